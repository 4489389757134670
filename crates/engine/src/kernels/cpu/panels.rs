//! Memory of packed weights: zeroed, aligned to pages, in huge pages where the system gives them.
//!
//! Decode reads every weight once per token; with small pages a good part of that time goes to looking up
//! addresses. Loads of a cache line never cross two, because panels begin on page borders.

use std::marker::PhantomData;

use half::{bf16, f16};
use memmap2::MmapMut;

use super::KernelError;

/// A slice in memory of its own.
pub(super) struct Panels<T> {
    /// None when there are no elements.
    map: Option<MmapMut>,
    len: usize,
    elements: PhantomData<T>,
}

/// Types that are valid for any bits, zeros too, and need no more alignment than a page has.
///
/// # Safety
/// Exactly that.
pub(super) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: numbers.
unsafe impl Plain for u8 {}
// SAFETY: numbers.
unsafe impl Plain for u64 {}
// SAFETY: numbers.
unsafe impl Plain for f32 {}
// SAFETY: numbers.
unsafe impl Plain for f16 {}
// SAFETY: numbers.
unsafe impl Plain for bf16 {}
// SAFETY: as their elements.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

impl<T: Plain> Panels<T> {
    /// `len` elements of zeros.
    pub(super) fn zeros(len: usize) -> Result<Self, KernelError> {
        let map = match len.checked_mul(size_of::<T>()) {
            Some(0) => None,
            Some(num_bytes) => Some(map(num_bytes)?),
            None => return Err(KernelError::OutOfMemory(usize::MAX)),
        };
        Ok(Panels {
            map,
            len,
            elements: PhantomData,
        })
    }

    /// The elements.
    #[inline(always)]
    pub(super) fn as_slice(&self) -> &[T] {
        match &self.map {
            // SAFETY: the map holds `len` elements, which any bits are valid for, at the start of a page.
            Some(map) => unsafe { std::slice::from_raw_parts(map.as_ptr().cast(), self.len) },
            None => &[],
        }
    }

    /// Bytes of the elements.
    pub(super) fn num_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The same, to be written.
    pub(super) fn as_mut_slice(&mut self) -> &mut [T] {
        match &mut self.map {
            // SAFETY: as above, and borrowed alone.
            Some(map) => unsafe {
                std::slice::from_raw_parts_mut(map.as_mut_ptr().cast(), self.len)
            },
            None => &mut [],
        }
    }
}

/// Memory of at least a page, which is taken when it is first written.
fn map(num_bytes: usize) -> Result<MmapMut, KernelError> {
    let map = MmapMut::map_anon(num_bytes).map_err(|_| KernelError::OutOfMemory(num_bytes))?;
    // A wish; small pages do as well.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(map)
}
