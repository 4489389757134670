//! Slices that several threads write to at once, each its own part.
//!
//! The borrow checker can't see that tiles of a row-major matrix do not overlap; this type is the one place
//! where that is taken on trust.

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice, shared.
pub(super) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out `&mut` parts only through `part`, whose callers promise that no two overlap; so
// threads never share an element, and sending elements is allowed by `T: Send`.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: as a `&mut [T]`.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes the whole slice for as long as parts of it may be in use.
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Disjoint {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            lifetime: PhantomData,
        }
    }

    /// A part of the slice. Panics when `range` is not inside it.
    ///
    /// # Safety
    /// No other part that is in use at the same time overlaps `range`.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub(super) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice by the assertion, not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// Part `index` of `count` equal ones.
    ///
    /// # Safety
    /// As for `part`: each index is in use once at a time.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub(super) unsafe fn equal_part(&self, index: usize, count: usize) -> &mut [T] {
        let len = self.len / count;
        // SAFETY: the caller's promise.
        unsafe { self.part(index * len..(index + 1) * len) }
    }
}
