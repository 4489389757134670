//! What a mock exports of its blocks and imports into others, with a checksum over all of it.

use super::chain::mix;
use super::oracle::Slot;
use crate::plan::BlockId;

/// The contents of some blocks, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockImage {
    num_blocks: usize,
    slots: Vec<Slot>,
    checksum: u64,
}

/// Blocks that cannot be exported, or an image that cannot be imported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// It is not what was exported.
    #[error("the checksum does not fit the contents")]
    Checksum,
    /// It is for more or fewer slots.
    #[error("an image of {found} slots or blocks for {expected}")]
    WrongSize {
        /// How many there are to fill.
        expected: usize,
        /// How many the image has.
        found: usize,
    },
    /// The model has no such block.
    #[error("{block:?} is outside the pool")]
    OutsidePool {
        /// The block.
        block: BlockId,
    },
}

impl BlockImage {
    pub(super) fn new(num_blocks: usize, slots: Vec<Slot>) -> Self {
        let checksum = checksum(&slots);
        BlockImage {
            num_blocks,
            slots,
            checksum,
        }
    }

    /// What a faulty link does: one bit of the contents or, if it has none, of the checksum is another.
    pub fn flip_bit(&mut self, which: u64) {
        let num_slots = self.slots.len() as u64;
        let slot = which.checked_rem(num_slots);
        let written = slot.and_then(|at| match &mut self.slots[at as usize] {
            Slot::Written { entry, .. } => Some(&mut entry.running),
            Slot::Unwritten | Slot::Void { .. } => None,
        });
        *written.unwrap_or(&mut self.checksum) ^= 1 << (which % 64);
    }

    pub(super) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    pub(super) fn check(&self, num_blocks: usize) -> Result<(), ImageError> {
        if self.checksum != checksum(&self.slots) {
            return Err(ImageError::Checksum);
        }
        match self.num_blocks == num_blocks {
            true => Ok(()),
            false => Err(ImageError::WrongSize {
                expected: num_blocks,
                found: self.num_blocks,
            }),
        }
    }
}

/// Depends on every field of every slot, but not on who wrote it.
fn checksum(slots: &[Slot]) -> u64 {
    slots.iter().fold(0, |sum, slot| match slot {
        Slot::Unwritten => mix(sum),
        Slot::Void { step, .. } => mix(mix(!sum) ^ step),
        Slot::Written { entry, .. } => {
            let place = u64::from(entry.position) << 32 | u64::from(entry.token.0);
            mix(mix(mix(sum ^ entry.salt) ^ place) ^ entry.running)
        }
    })
}
