//! `KvManager` (block pool and radix cache) against a twin without trees, lists or counters.
//!
//! The twin keeps one flat list of cached prefixes and recounts everything each time it is asked. After every
//! operation both must agree on every match, on the state of every block, and so on every eviction.

use std::fmt;
use std::sync::Arc;

use millpond_scheduler::block_pool::BlockState;
use millpond_scheduler::kv_manager::{KvManager, Start};
use millpond_scheduler::{BlockId, CacheSalt, SchedulerConfig, TokenId};
use proptest::prelude::*;

use crate::property::check_property;

/// What clients of the manager do. Numbers pick among the open tables.
#[derive(Clone, Debug)]
enum Operation {
    /// A sequence starts from what is cached of its tokens.
    Open(Context),
    /// A sequence starts from the leading tokens of an open one.
    Share {
        which: usize,
        num_tokens: usize,
    },
    /// The next full block of a table was computed.
    Publish(usize),
    /// The last step, with its copies, is done.
    Land,
    Close(usize),
}

#[derive(Clone, PartialEq, Eq)]
struct Context {
    salt: u8,
    tokens: Vec<TokenId>,
}

impl fmt::Debug for Context {
    /// `salt:tokens`, short enough to read a failing case.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.salt)?;
        self.tokens
            .iter()
            .try_for_each(|token| write!(f, "{}", token.0))
    }
}

/// A sequence's blocks.
#[derive(Clone, Debug)]
struct Table {
    context: Context,
    blocks: Vec<BlockId>,
    num_published: usize,
}

/// A cached block: the whole context up to its end, not just its own tokens.
#[derive(Clone, Debug)]
struct Cached {
    context: Context,
    block: BlockId,
    last_use: u64,
}

/// The twin.
#[derive(Debug)]
struct Twin {
    block_size: usize,
    num_blocks: u32,
    cached: Vec<Cached>,
    tables: Vec<Table>,
    copy_sources: Vec<BlockId>,
    clock: u64,
}

impl Twin {
    fn state(&self, block: BlockId) -> BlockState {
        let in_tables = self.tables.iter().flat_map(|table| &table.blocks);
        let holders = in_tables.chain(&self.copy_sources);
        let holders = holders.filter(|held| **held == block).count() as u32;
        match self.cached.iter().any(|cached| cached.block == block) {
            true => BlockState::Cached { holders },
            false if holders > 0 => BlockState::Private { holders },
            false => BlockState::Free,
        }
    }

    fn count(&self, state: BlockState) -> u32 {
        let blocks = (0..self.num_blocks).map(BlockId);
        blocks.filter(|block| self.state(*block) == state).count() as u32
    }

    /// The cached blocks that hold whole blocks of `context`, in order.
    fn path(&self, context: &Context) -> Vec<BlockId> {
        let ends = (1..).map(|blocks| blocks * self.block_size);
        let prefixes = ends
            .take_while(|end| *end <= context.tokens.len())
            .map(|end| context.prefix(end));
        prefixes
            .map_while(|prefix| self.entry(&prefix).map(|cached| cached.block))
            .collect()
    }

    fn entry(&self, context: &Context) -> Option<&Cached> {
        self.cached.iter().find(|cached| cached.context == *context)
    }

    /// The most tokens after the whole blocks of the match that a cached block agrees on.
    fn partial(&self, context: &Context, num_matched: usize) -> usize {
        let matched = context.prefix(num_matched);
        let follows = |cached: &&Cached| {
            cached.context.tokens.len() == num_matched + self.block_size
                && cached.context.prefix(num_matched) == matched
        };
        let agreement = |cached: &Cached| {
            let own = &cached.context.tokens[num_matched..];
            let pairs = own.iter().zip(&context.tokens[num_matched..]);
            pairs.take_while(|(a, b)| a == b).count()
        };
        self.cached
            .iter()
            .filter(follows)
            .map(agreement)
            .max()
            .unwrap_or(0)
    }

    /// Takes `num_blocks` new blocks out of the free ones, evicting while there are none.
    fn make_room(&mut self, num_blocks: u32) {
        for _ in self.count(BlockState::Free)..num_blocks {
            self.evict();
        }
    }

    /// Of the cached blocks that nobody holds and nothing follows, the one used longest ago goes.
    fn evict(&mut self) {
        let is_leaf = |entry: &Cached| {
            let len = entry.context.tokens.len();
            let mut others = self.cached.iter();
            !others.any(|other| {
                other.context.tokens.len() > len && other.context.prefix(len) == entry.context
            })
        };
        let evictable = self
            .cached
            .iter()
            .enumerate()
            .filter(|(_, entry)| self.state(entry.block) == BlockState::Cached { holders: 0 })
            .filter(|(_, entry)| is_leaf(entry));
        let oldest = evictable.min_by_key(|(_, entry)| entry.last_use);
        let (index, _) = oldest.expect("room was found before it was taken");
        self.cached.remove(index);
    }

    fn touch(&mut self, blocks: &[BlockId]) {
        self.clock += 1;
        for entry in &mut self.cached {
            if blocks.contains(&entry.block) {
                entry.last_use = self.clock;
            }
        }
    }
}

impl Context {
    fn prefix(&self, len: usize) -> Context {
        Context {
            salt: self.salt,
            tokens: self.tokens[..len].to_vec(),
        }
    }

    fn cache_salt(&self) -> CacheSalt {
        CacheSalt(Arc::from([self.salt]))
    }
}

/// Manager and twin side by side.
struct Pair {
    manager: KvManager,
    twin: Twin,
}

impl Pair {
    fn new(config: &SchedulerConfig) -> Self {
        Pair {
            manager: KvManager::new(config),
            twin: Twin {
                block_size: config.block_size as usize,
                num_blocks: config.num_blocks,
                cached: Vec::new(),
                tables: Vec::new(),
                copy_sources: Vec::new(),
                clock: 0,
            },
        }
    }

    fn perform(&mut self, operation: &Operation) {
        match operation {
            Operation::Open(context) => self.open(context),
            Operation::Share { which, num_tokens } => self.share(*which, *num_tokens),
            Operation::Publish(which) => self.publish(*which),
            Operation::Land => self.land(),
            Operation::Close(which) => self.close(*which),
        }
        self.check();
    }

    fn open(&mut self, context: &Context) {
        // Two sources that land together are used at the same time, and which goes first is not defined.
        self.land();
        let mut start = Start::default();
        self.manager
            .find(&context.cache_salt(), &context.tokens, &mut start);
        assert_eq!(start.shared, self.twin.path(context));
        let num_matched = start.shared.len() * self.twin.block_size;
        let num_partial = start.copy.map_or(0, |copy| copy.num_tokens) as usize;
        assert_eq!(num_partial, self.twin.partial(context, num_matched));
        self.claim(context, &start, start.shared.len());
    }

    fn share(&mut self, which: usize, num_tokens: usize) {
        let Some(index) = self.pick(which) else {
            return;
        };
        self.land();
        let size = self.twin.block_size;
        let sibling = &self.twin.tables[index];
        let context = sibling.context.clone();
        // As in the scheduler, where a computed block is a published block: whole blocks are shared only if they
        // are published, a private one is copied.
        let num_computed = context
            .tokens
            .len()
            .min((sibling.num_published + 1) * size - 1);
        let num_tokens = num_tokens % (num_computed + 1);
        let num_published = num_tokens / size;
        let mut start = Start::default();
        self.manager
            .share(&sibling.blocks, num_tokens as u32, &mut start);
        self.claim(&context, &start, num_published);
    }

    fn claim(&mut self, context: &Context, start: &Start, num_published: usize) {
        let num_blocks = context.tokens.len().div_ceil(self.twin.block_size) as u32;
        let num_new = num_blocks - start.shared.len() as u32;
        let table = Table {
            context: context.clone(),
            blocks: start.shared.clone(),
            num_published,
        };
        self.twin.tables.push(table);
        self.twin
            .copy_sources
            .extend(start.copy.map(|copy| copy.block));
        let available =
            self.twin.count(BlockState::Free) + self.twin.count(BlockState::Cached { holders: 0 });
        let left = self.manager.left_after(start, num_blocks);
        assert_eq!(left, available.checked_sub(num_new));
        if left.is_none() {
            self.twin.tables.pop();
            if start.copy.is_some() {
                self.twin.copy_sources.pop();
            }
            return;
        }
        self.twin.make_room(num_new);
        let mut blocks = Vec::new();
        let copy = self.manager.claim(start, num_blocks, &mut blocks);
        assert!(blocks.starts_with(&start.shared));
        let copied_to = start.copy.map(|_| blocks[start.shared.len()]);
        assert_eq!(copy.map(|copy| copy.to), copied_to);
        let last = self.twin.tables.last_mut();
        last.expect("it was pushed above").blocks = blocks;
    }

    fn publish(&mut self, which: usize) {
        let Some(index) = self.pick(which) else {
            return;
        };
        let size = self.twin.block_size;
        let table = &mut self.twin.tables[index];
        let (start, end) = (table.num_published * size, (table.num_published + 1) * size);
        if end > table.context.tokens.len() {
            return;
        }
        let context = table.context.prefix(end);
        let number = table.num_published;
        let tokens = &context.tokens[start..end];
        let salt = context.cache_salt();
        let own = table.blocks[number];
        self.manager
            .publish(&salt, &mut table.blocks, number, tokens, 1);
        table.num_published += 1;
        let block = table.blocks[number];
        match self.twin.entry(&context) {
            Some(entry) => assert_eq!(block, entry.block),
            None => {
                assert_eq!(block, own);
                let last_use = 0;
                self.twin.cached.push(Cached {
                    context,
                    block,
                    last_use,
                });
            }
        }
    }

    fn land(&mut self) {
        self.manager.release_copy_sources();
        let sources = std::mem::take(&mut self.twin.copy_sources);
        self.twin.touch(&sources);
    }

    /// As in the scheduler, a table goes back only between steps: a source must not outlive its own prefix.
    fn close(&mut self, which: usize) {
        self.land();
        if let Some(index) = self.pick(which) {
            let table = self.twin.tables.remove(index);
            self.manager.release(&table.blocks);
            self.twin.touch(&table.blocks);
        }
    }

    fn pick(&self, which: usize) -> Option<usize> {
        which.checked_rem(self.twin.tables.len())
    }

    fn check(&self) {
        if let Err(broken) = self.manager.check() {
            panic!("{broken}");
        }
        for block in (0..self.twin.num_blocks).map(BlockId) {
            let (state, expected) = (self.manager.state(block), self.twin.state(block));
            assert_eq!(state, expected, "{block:?}");
        }
    }
}

/// Two tokens and two tenants: contexts meet, part and meet again.
fn contexts() -> impl Strategy<Value = Context> {
    let tokens = prop::collection::vec((0u32..2).prop_map(TokenId), 1..14);
    (0u8..2, tokens).prop_map(|(salt, tokens)| Context { salt, tokens })
}

fn operations() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => contexts().prop_map(Operation::Open),
        1 => (any::<usize>(), any::<usize>())
            .prop_map(|(which, num_tokens)| Operation::Share { which, num_tokens }),
        8 => any::<usize>().prop_map(Operation::Publish),
        2 => Just(Operation::Land),
        4 => any::<usize>().prop_map(Operation::Close),
    ]
}

#[test]
fn i1_i2_i8_manager_and_naive_twin_agree_on_every_block() {
    let pool = (1u32..=4, 2u32..20);
    let strategy = (pool, prop::collection::vec(operations(), 1..120));
    check_property(8000, strategy, |((block_size, num_blocks), operations)| {
        let config = SchedulerConfig {
            block_size,
            num_blocks,
            ..SchedulerConfig::default()
        };
        let mut pair = Pair::new(&config);
        for operation in &operations {
            pair.perform(operation);
        }
    });
}
