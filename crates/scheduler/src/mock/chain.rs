//! The oracle's arithmetic: a running hash per position, a digest of all positions read, the token that follows.
//!
//! It knows nothing of blocks, steps or batches; that is why [`oracle_output`] can say what any schedule must give.

use std::num::NonZeroU32;

use super::sampling::first_allowed;
use crate::request::{CacheSalt, Request, RowError, TokenId};

/// What has been read of a sequence, position after position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    /// Hash of the salt and of all tokens up to the last position.
    running: u64,
    /// Sum over the positions, so that every slot read counts, not the last one alone.
    digest: u64,
    num_positions: u32,
}

impl Chain {
    /// Nothing read yet, under a salt.
    pub(super) fn new(salt: &CacheSalt) -> Self {
        let running = salt_hash(salt);
        Chain {
            running,
            digest: running,
            num_positions: 0,
        }
    }

    /// Computes the next position from its token and returns its running hash.
    pub(super) fn compute(&mut self, token: TokenId) -> u64 {
        let running = mix(self.running.rotate_left(17) ^ u64::from(token.0));
        self.read(running);
        running
    }

    /// Takes over the next position's running hash as it was stored.
    pub(super) fn read(&mut self, running: u64) {
        self.running = running;
        self.digest = self
            .digest
            .wrapping_add(mix(running ^ u64::from(self.num_positions)));
        self.num_positions += 1;
    }

    /// A number that depends on everything read and on nothing else.
    pub(super) fn draw(&self) -> u64 {
        mix(!self.digest)
    }

    /// The token that follows: a hash of everything read, the seed, the choice and the position.
    pub(super) fn sample(
        &self,
        request: &Request,
        choice: u32,
        vocabulary: NonZeroU32,
    ) -> Result<TokenId, RowError> {
        let key = u64::from(choice) << 32 | u64::from(self.num_positions);
        let hash = mix(self.digest ^ mix(request.sampling.seed ^ mix(key)));
        let start = TokenId((hash % u64::from(vocabulary.get())) as u32);
        let num_output = (self.num_positions + 1).saturating_sub(request.prompt.len() as u32);
        first_allowed(request, start, num_output, vocabulary)
    }
}

/// What stands for a tenant's salt in a slot.
pub(super) fn salt_hash(salt: &CacheSalt) -> u64 {
    let start = mix(salt.0.len() as u64);
    let bytes = salt.0.iter();
    bytes.fold(start, |hash, byte| mix(hash ^ u64::from(*byte)))
}

/// A bijection of 64 bits that spreads every input bit over all output bits.
///
/// The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
pub(super) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The whole output of a choice of `request` on an oracle, computed without any scheduler.
///
/// It ends where the request's own stop conditions say, or before a token that cannot be chosen because all are
/// masked. A scheduler's `max_context` may cut it shorter.
pub fn oracle_output(request: &Request, choice: u32, vocabulary: NonZeroU32) -> Vec<TokenId> {
    let mut chain = Chain::new(&request.salt);
    for token in request.prompt.iter() {
        chain.compute(*token);
    }
    let mut output = Vec::new();
    while let Ok(token) = chain.sample(request, choice, vocabulary) {
        output.push(token);
        if request.stop.finish_at(token, output.len() as u32).is_some() {
            break;
        }
        chain.compute(token);
    }
    output
}
