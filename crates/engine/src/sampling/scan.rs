//! Passes over a whole vocabulary: finite? largest? k-th largest? which reach a floor?
//!
//! Written so that the compiler makes vector code of them; values are read, never computed, so the
//! result cannot depend on the instruction set. Nothing here sorts a vocabulary.

use millpond_scheduler::TokenId;

use super::filter::Candidate;

/// Logits looked at together before a branch.
const STRIDE: usize = 64;

/// True when there is neither NaN nor infinity.
pub(super) fn all_finite(logits: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    logits.iter().fold(true, |finite, x| {
        finite & (x.to_bits() & EXPONENT != EXPONENT)
    })
}

/// The largest logit; −∞ when every token is masked or there is none.
pub(super) fn largest(logits: &[f32]) -> f32 {
    let (chunks, rest) = logits.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    lanes
        .iter()
        .chain(rest)
        .copied()
        .fold(f32::NEG_INFINITY, f32::max)
}

/// The lowest token whose logit is `value`.
pub(super) fn first_equal(logits: &[f32], value: f32) -> Option<TokenId> {
    let equal_in = |chunk: &[f32]| chunk.iter().fold(false, |any, &x| any | (x == value));
    let stride = logits.chunks(STRIDE).position(equal_in)?;
    let start = stride * STRIDE;
    let offset = logits.get(start..)?.iter().position(|&x| x == value)?;
    u32::try_from(start + offset).ok().map(TokenId)
}

/// The k-th largest logit for `k` ≥ 1, −∞ when fewer are not masked. `pool` is scratch.
///
/// The pool holds at least the k largest so far; whenever it is full, quickselect drops the others and
/// raises the bar. A logit equal to the bar need not enter: k logits already reach it.
pub(super) fn kth_largest(logits: &[f32], k: usize, pool: &mut Vec<f32>) -> f32 {
    let full = k.saturating_mul(2).max(STRIDE);
    let mut bar = f32::NEG_INFINITY;
    pool.clear();
    for chunk in logits.chunks(STRIDE) {
        if any_above(chunk, bar) {
            pool.extend(chunk.iter().copied().filter(|&x| x > bar));
        }
        if pool.len() >= full {
            bar = keep_largest(pool, k);
        }
    }
    if pool.len() < k {
        return f32::NEG_INFINITY;
    }
    keep_largest(pool, k)
}

/// Cuts `pool` to its k largest values and returns the smallest of them. The pool holds at least k ≥ 1.
fn keep_largest(pool: &mut Vec<f32>, k: usize) -> f32 {
    let (_, kth, _) = pool.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    let kth = *kth;
    pool.truncate(k);
    kth
}

/// Replaces `candidates` by the tokens whose logit is at least `floor` (finite), in order of id.
pub(super) fn gather(logits: &[f32], floor: f32, candidates: &mut Vec<Candidate>) {
    candidates.clear();
    for (chunk, first) in logits.chunks(STRIDE).zip((0_u32..).step_by(STRIDE)) {
        if !chunk.iter().fold(false, |any, &x| any | (x >= floor)) {
            continue;
        }
        let tokens = (first..).zip(chunk).filter(|(_, x)| **x >= floor);
        candidates.extend(tokens.map(|(id, &logit)| Candidate {
            token: TokenId(id),
            logit,
        }));
    }
}

fn any_above(chunk: &[f32], bar: f32) -> bool {
    chunk.iter().fold(false, |any, &x| any | (x > bar))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scattered values with many ties: 0, 1/8 … 12.
    fn values(num: usize) -> Vec<f32> {
        (0..num).map(|i| (i * 7919 % 97) as f32 * 0.125).collect()
    }

    #[test]
    fn kth_largest_equals_that_of_a_sort() {
        let mut pool = Vec::new();
        for num in [1, 63, 64, 65, 1000] {
            let logits = values(num);
            let mut sorted = logits.clone();
            sorted.sort_unstable_by(|a, b| b.total_cmp(a));
            for k in [1, 2, 31, num].into_iter().filter(|&k| k <= num) {
                let found = kth_largest(&logits, k, &mut pool);
                assert_eq!(found, sorted[k - 1], "k {k} of {num}");
            }
        }
    }

    #[test]
    fn masked_logits_are_no_candidates() {
        let mut logits = values(100);
        logits[..98].fill(f32::NEG_INFINITY);
        assert_eq!(kth_largest(&logits, 3, &mut Vec::new()), f32::NEG_INFINITY);
        let mut candidates = Vec::new();
        gather(&logits, f32::MIN, &mut candidates);
        let ids: Vec<_> = candidates.iter().map(|c| c.token.0).collect();
        assert_eq!(ids, [98, 99]);
    }

    #[test]
    fn largest_and_its_lowest_token_are_found_anywhere() {
        for at in [0, 1, 15, 16, 63, 64, 99] {
            let mut logits = vec![-1.0; 100];
            logits[at] = 2.5;
            logits[99] = 2.5;
            assert_eq!(largest(&logits), 2.5);
            assert_eq!(first_equal(&logits, 2.5), Some(TokenId(at as u32)));
        }
        assert_eq!(largest(&[]), f32::NEG_INFINITY);
    }

    #[test]
    fn each_kind_of_non_finite_is_seen() {
        assert!(all_finite(&[f32::MIN, f32::MAX, 0.0, 1e-42]));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut logits = vec![0.0; 100];
            logits[77] = bad;
            assert!(!all_finite(&logits), "{bad}");
        }
    }
}
