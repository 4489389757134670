//! Hits of the prefix cache on a trace of block names: our `RadixCache` alone, one request after another.
//!
//! Nothing runs at the same time and nothing is computed, so that eviction policies can be compared with
//! published tables. A request is matched, inserted whole, and released; then the cache is trimmed.

use super::report::Hits;
use crate::config::SchedulerConfig;
use crate::kv_manager::{KvManager, Start};
use crate::request::{CacheSalt, TokenId};

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedBlocks<'a> {
    /// Names of its prompt's blocks: equal names at the ends of equal prefixes stand for equal blocks.
    pub names: &'a [u32],
    /// Tokens of the prompt, of which the last block may have fewer than the others.
    pub num_tokens: u32,
}

/// What a cache of `capacity` blocks saves on `requests`, with `block_tokens` tokens in a whole block and
/// the limits and policies of `config` otherwise. Without a capacity nothing is ever evicted.
///
/// The pool holds the blocks of one request beyond the capacity, until they are inserted.
pub fn hit_rate(
    requests: &[NamedBlocks<'_>],
    block_tokens: u32,
    capacity: Option<u32>,
    config: &SchedulerConfig,
) -> Hits {
    let lengths = requests.iter().map(|request| request.names.len() as u32);
    let longest = lengths.clone().max().unwrap_or(0);
    let capacity = capacity.unwrap_or(lengths.sum());
    let mut cache = NamedCache {
        kv: KvManager::new(&SchedulerConfig {
            // A block is one token that is its name.
            block_size: 1,
            num_blocks: capacity + longest,
            prefix_cache: true,
            partial_copies: false,
            ..config.clone()
        }),
        salt: CacheSalt::default(),
        start: Start::default(),
        names: Vec::new(),
        table: Vec::new(),
    };
    let mut hits = Hits::default();
    for request in requests {
        let num_hit = cache.serve(request.names);
        cache.kv.shrink_cache(capacity);
        let num_cached = (num_hit * block_tokens).min(request.num_tokens);
        hits.add_blocks(request.names.len() as u32, num_hit);
        hits.add_tokens(request.num_tokens, num_cached);
    }
    hits
}

/// The cache, and buffers that keep their memory.
struct NamedCache {
    kv: KvManager,
    salt: CacheSalt,
    start: Start,
    names: Vec<TokenId>,
    table: Vec<crate::BlockId>,
}

impl NamedCache {
    /// A request comes and goes; says how many of its leading blocks were there.
    fn serve(&mut self, names: &[u32]) -> u32 {
        self.names.clear();
        self.names.extend(names.iter().copied().map(TokenId));
        self.kv.find(&self.salt, &self.names, &mut self.start);
        let num_hit = self.start.shared.len();
        self.table.clear();
        self.kv
            .claim(&self.start, self.names.len() as u32, &mut self.table);
        for index in num_hit..self.names.len() {
            let name = &self.names[index..=index];
            self.kv.publish(&self.salt, &mut self.table, index, name, 0);
        }
        self.kv.release(&self.table);
        num_hit as u32
    }
}
