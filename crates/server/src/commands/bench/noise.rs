//! Noise for prompts: numbers that look random and are the same for the same seed.

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Noise(u64);

impl Noise {
    /// A stream of its own for every list of numbers.
    pub fn of(parts: &[u64]) -> Self {
        let mix = |state: u64, part: &u64| Noise(state ^ part).next();
        Noise(parts.iter().fold(0, mix))
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The next number below `bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}
