//! Token prefix to blocks: a radix tree whose spans are aligned to blocks, with leaf-only LRU eviction.
//!
//! It compares tokens on every match (no hash stands for them), counts no holders and owns no block:
//! `KvManager` tells it what is pinned. After RadixAttention (SGLang, arXiv 2312.07104), with spans cut at
//! block borders and a logical clock instead of wall time.

use std::collections::{BTreeMap, BTreeSet};

use crate::block_pool::{BlockPool, BlockState};
use crate::plan::BlockId;
use crate::request::{CacheSalt, TokenId};

/// Logical time of the LRU order: counts releases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tick(pub u64);

/// A cached block whose leading tokens go on where a match ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialMatch {
    /// The block.
    pub block: BlockId,
    /// Leading tokens that match; at least 1.
    pub num_tokens: u32,
}

/// Where a block is to be inserted.
#[derive(Clone, Copy, Debug)]
pub enum InsertAt<'a> {
    /// It is the first block of a sequence with this salt.
    Root(&'a CacheSalt),
    /// It follows this cached block.
    After(BlockId),
}

/// What `insert` did with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// It is in the tree now.
    New,
    /// The tree has this block with the same tokens after the same prefix; nothing changed.
    Present(BlockId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NodeId(u32);

#[derive(Debug)]
enum Parent {
    /// This node is the root of a salt and has no blocks.
    Salt(CacheSalt),
    Node(NodeId),
}

/// A span of blocks that follow each other, and the spans that may follow it.
struct Node {
    parent: Parent,
    blocks: Vec<BlockId>,
    /// Sorted by the tokens of their first blocks, no two of which are equal.
    children: Vec<NodeId>,
}

/// Where a cached block sits in the tree. Meaningless for blocks that are not cached.
#[derive(Clone, Copy, Debug)]
struct Seat {
    node: NodeId,
    index: u32,
    tick: Tick,
}

/// The tree of one worker. All salts share its limits; none shares a node.
pub struct RadixCache {
    block_size: usize,
    nodes: Vec<Node>,
    vacant: Vec<NodeId>,
    roots: BTreeMap<CacheSalt, NodeId>,
    /// Indexed by block id, like `tokens` in units of `block_size`: no allocation per cached block.
    seats: Vec<Seat>,
    tokens: Vec<TokenId>,
    /// Leaves whose last block nobody holds, by that block's tick: the order of eviction.
    evictable: BTreeSet<(Tick, NodeId)>,
}

/// Result of looking for a block among the children of a node.
enum Branch {
    Child(NodeId),
    /// No child starts with the block; this is the child that agrees longest, if any agrees at all.
    Nearest(Option<PartialMatch>),
}

impl RadixCache {
    /// An empty tree over the blocks of a pool of `num_blocks`.
    pub fn new(num_blocks: u32, block_size: u32) -> Self {
        let nowhere = Seat {
            node: NodeId(0),
            index: 0,
            tick: Tick(0),
        };
        RadixCache {
            block_size: block_size as usize,
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: BTreeMap::new(),
            seats: vec![nowhere; num_blocks as usize],
            tokens: vec![TokenId(0); num_blocks as usize * block_size as usize],
            evictable: BTreeSet::new(),
        }
    }

    /// Appends to `path` the blocks that hold the longest cached prefix of `tokens`, whole blocks only,
    /// and returns the block that agrees longest with what is left.
    pub fn find(
        &self,
        salt: &CacheSalt,
        tokens: &[TokenId],
        path: &mut Vec<BlockId>,
    ) -> Option<PartialMatch> {
        let mut node = *self.roots.get(salt)?;
        let mut rest = tokens;
        loop {
            node = match self.branch(node, rest) {
                Branch::Child(child) => child,
                Branch::Nearest(partial) => return partial,
            };
            for &block in &self.node(node).blocks {
                match rest.strip_prefix(self.block_tokens(block)) {
                    Some(after) => rest = after,
                    None => return self.partial(block, rest),
                }
                path.push(block);
            }
        }
    }

    /// Puts `block`, which holds `tokens` (a whole block), into the tree unless an equal one is there.
    ///
    /// The caller holds the block and the one before it. `num_following` more blocks may follow it in
    /// the same sequence: memory for them is set aside now, so that publishing them allocates nothing.
    pub fn insert(
        &mut self,
        at: InsertAt<'_>,
        block: BlockId,
        tokens: &[TokenId],
        num_following: usize,
    ) -> Inserted {
        let node = match at {
            InsertAt::Root(salt) => self.root(salt),
            InsertAt::After(previous) => {
                let seat = self.seats[previous.0 as usize];
                let next = self.node(seat.node).blocks.get(seat.index as usize + 1);
                match next {
                    Some(&next) if self.block_tokens(next) == tokens => {
                        return Inserted::Present(next);
                    }
                    Some(_) => self.split(seat.node, seat.index as usize + 1),
                    None => {}
                }
                seat.node
            }
        };
        if let Branch::Child(child) = self.branch(node, tokens) {
            return Inserted::Present(self.node(child).blocks[0]);
        }
        let start = block.0 as usize * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
        let span = self.span_for(node, block);
        let blocks = &mut self.node_mut(span).blocks;
        blocks.reserve(1 + num_following);
        blocks.push(block);
        let index = blocks.len() as u32 - 1;
        self.seats[block.0 as usize] = Seat {
            node: span,
            index,
            tick: Tick(0),
        };
        Inserted::New
    }

    /// `block` had no holder and has one now.
    pub fn pin(&mut self, block: BlockId) {
        if let Some(node) = self.leaf_ending_with(block) {
            let tick = self.tick(block);
            self.evictable.remove(&(tick, node));
        }
    }

    /// `block` lost its last holder.
    pub fn unpin(&mut self, block: BlockId) {
        if let Some(node) = self.leaf_ending_with(block) {
            let tick = self.tick(block);
            self.evictable.insert((tick, node));
            // Whoever extended this span has left; what was set aside for it is not needed.
            self.node_mut(node).blocks.shrink_to_fit();
        }
    }

    /// `block`, which somebody holds, was used at `tick`.
    pub fn touch(&mut self, block: BlockId, tick: Tick) {
        self.seats[block.0 as usize].tick = tick;
    }

    /// Takes the last block of the leaf used longest ago out of the tree.
    pub fn evict(&mut self, pool: &BlockPool) -> Option<BlockId> {
        let (_, leaf) = self.evictable.pop_first()?;
        let block = self
            .node_mut(leaf)
            .blocks
            .pop()
            .expect("a leaf has at least one block");
        let new_leaf = if self.node(leaf).blocks.is_empty() {
            self.remove_leaf(leaf, block)
        } else {
            Some(leaf)
        };
        if let Some(&last) = new_leaf.and_then(|n| self.node(n).blocks.last())
            && pool.is_evictable(last)
            && let Some(node) = new_leaf
        {
            self.evictable.insert((self.tick(last), node));
        }
        Some(block)
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }

    fn tick(&self, block: BlockId) -> Tick {
        self.seats[block.0 as usize].tick
    }

    fn block_tokens(&self, block: BlockId) -> &[TokenId] {
        let start = block.0 as usize * self.block_size;
        &self.tokens[start..start + self.block_size]
    }

    fn first_tokens(&self, node: NodeId) -> &[TokenId] {
        self.block_tokens(self.node(node).blocks[0])
    }

    fn partial(&self, block: BlockId, rest: &[TokenId]) -> Option<PartialMatch> {
        let held = self.block_tokens(block);
        let num_tokens = held.iter().zip(rest).take_while(|(a, b)| a == b).count() as u32;
        (num_tokens > 0).then_some(PartialMatch { block, num_tokens })
    }

    /// Position of the child that starts with the first block of `rest`, or where it would be.
    fn search(&self, node: NodeId, rest: &[TokenId]) -> Result<usize, usize> {
        let key = &rest[..rest.len().min(self.block_size)];
        self.node(node)
            .children
            .binary_search_by(|child| self.first_tokens(*child).cmp(key))
    }

    fn branch(&self, node: NodeId, rest: &[TokenId]) -> Branch {
        let children = &self.node(node).children;
        match self.search(node, rest) {
            Ok(at) => Branch::Child(children[at]),
            // In sorted order, whoever shares the longest prefix with a key is next to its place.
            Err(at) => {
                let neighbours = children[at.saturating_sub(1)..].iter().take(2);
                let partials =
                    neighbours.filter_map(|c| self.partial(self.node(*c).blocks[0], rest));
                Branch::Nearest(partials.max_by_key(|p| p.num_tokens))
            }
        }
    }

    fn root(&mut self, salt: &CacheSalt) -> NodeId {
        if let Some(&root) = self.roots.get(salt) {
            return root;
        }
        let root = self.new_node(Parent::Salt(salt.clone()));
        self.roots.insert(salt.clone(), root);
        root
    }

    /// The node that `block` is appended to: `node` itself if nothing follows it yet, else a new child.
    fn span_for(&mut self, node: NodeId, block: BlockId) -> NodeId {
        let parent = self.node(node);
        if parent.children.is_empty() && !parent.blocks.is_empty() {
            return node;
        }
        let start = block.0 as usize * self.block_size;
        let at = self
            .search(node, &self.tokens[start..start + self.block_size])
            .expect_err("equal blocks were ruled out by the caller");
        let child = self.new_node(Parent::Node(node));
        self.node_mut(node).children.insert(at, child);
        child
    }

    fn new_node(&mut self, parent: Parent) -> NodeId {
        if let Some(id) = self.vacant.pop() {
            self.node_mut(id).parent = parent;
            return id;
        }
        let id = NodeId(self.nodes.len() as u32);
        self.nodes.push(Node {
            parent,
            blocks: Vec::new(),
            children: Vec::new(),
        });
        id
    }

    /// Cuts `node` before its block `at`; the later blocks become its only child.
    fn split(&mut self, node: NodeId, at: usize) {
        let tail = self.new_node(Parent::Node(node));
        let head = self.node_mut(node);
        let blocks = head.blocks.split_off(at);
        let children = std::mem::replace(&mut head.children, vec![tail]);
        for &child in &children {
            self.node_mut(child).parent = Parent::Node(tail);
        }
        for (index, block) in blocks.iter().enumerate() {
            let seat = &mut self.seats[block.0 as usize];
            seat.node = tail;
            seat.index = index as u32;
        }
        if let Some(&last) = blocks.last() {
            let tick = self.tick(last);
            if self.evictable.remove(&(tick, node)) {
                self.evictable.insert((tick, tail));
            }
        }
        let new = self.node_mut(tail);
        new.blocks = blocks;
        new.children = children;
    }

    /// Unhooks a leaf whose only block `first` was taken; returns its parent if that is a leaf with blocks now.
    fn remove_leaf(&mut self, leaf: NodeId, first: BlockId) -> Option<NodeId> {
        let Parent::Node(parent) = self.node(leaf).parent else {
            unreachable!("the root of a salt has no blocks to take");
        };
        self.vacant.push(leaf);
        let at = self.child_at(parent, leaf, first);
        self.node_mut(parent).children.remove(at);
        if !self.node(parent).children.is_empty() {
            return None;
        }
        match &self.nodes[parent.0 as usize].parent {
            Parent::Node(_) => Some(parent),
            Parent::Salt(salt) => {
                self.roots.remove(salt);
                self.vacant.push(parent);
                None
            }
        }
    }

    /// Index of `leaf` among the children of `parent`; its blocks are gone, `first` was the first.
    fn child_at(&self, parent: NodeId, leaf: NodeId, first: BlockId) -> usize {
        let key = self.block_tokens(first);
        self.node(parent)
            .children
            .binary_search_by(|child| match *child == leaf {
                true => std::cmp::Ordering::Equal,
                false => self.first_tokens(*child).cmp(key),
            })
            .expect("a node is among its parent's children")
    }

    /// The leaf whose last block is `block`.
    fn leaf_ending_with(&self, block: BlockId) -> Option<NodeId> {
        let seat = self.seats[block.0 as usize];
        let node = self.node(seat.node);
        let is_last = node.blocks.len() == seat.index as usize + 1;
        (is_last && node.children.is_empty()).then_some(seat.node)
    }

    /// I8, and that the tree and the pool agree on which blocks are cached and which may go.
    pub fn check(&self, pool: &BlockPool) -> Result<(), String> {
        let mut num_blocks = 0;
        let mut evictable = BTreeSet::new();
        let mut pending: Vec<NodeId> = self.roots.values().copied().collect();
        while let Some(id) = pending.pop() {
            self.check_span(id, pool)?;
            self.check_children(id)?;
            let node = self.node(id);
            num_blocks += node.blocks.len() as u32;
            pending.extend(&node.children);
            if let Some(&last) = node.blocks.last()
                && node.children.is_empty()
                && pool.is_evictable(last)
            {
                evictable.insert((self.tick(last), id));
            }
        }
        let counts = pool.counts();
        if num_blocks != counts.cached_evictable + counts.cached_pinned {
            return Err(format!("{num_blocks} blocks in the tree, pool {counts:?}"));
        }
        match evictable == self.evictable {
            true => Ok(()),
            false => Err("the evictable leaves and the leaves nobody holds differ".into()),
        }
    }

    /// Seats agree with the span, every block is cached, and a held block's predecessor is held too.
    fn check_span(&self, id: NodeId, pool: &BlockPool) -> Result<(), String> {
        let node = self.node(id);
        let mut previous = match &node.parent {
            Parent::Salt(salt) if self.roots.get(salt) != Some(&id) || !node.blocks.is_empty() => {
                return Err(format!("{id:?} is not the root of its salt"));
            }
            Parent::Salt(_) => None,
            Parent::Node(_) if node.blocks.is_empty() => return Err(format!("{id:?} is empty")),
            Parent::Node(parent) => self.node(*parent).blocks.last(),
        };
        for (index, block) in node.blocks.iter().enumerate() {
            let seat = self.seats[block.0 as usize];
            if (seat.node, seat.index as usize) != (id, index) {
                return Err(format!(
                    "{block:?} is at {id:?}/{index}, its seat says {seat:?}"
                ));
            }
            if !matches!(pool.state(*block), BlockState::Cached { .. }) {
                return Err(format!("{block:?} in the tree is {:?}", pool.state(*block)));
            }
            if let Some(previous) = previous {
                self.check_order(*previous, *block, pool)?;
            }
            previous = Some(block);
        }
        Ok(())
    }

    fn check_order(
        &self,
        previous: BlockId,
        block: BlockId,
        pool: &BlockPool,
    ) -> Result<(), String> {
        match (pool.is_evictable(previous), pool.is_evictable(block)) {
            (true, false) => Err(format!("{block:?} is held, {previous:?} before it is not")),
            (true, true) if self.tick(previous) < self.tick(block) => Err(format!(
                "{block:?} was used after {previous:?}, which comes before it"
            )),
            (true, true) | (false, true) | (false, false) => Ok(()),
        }
    }

    /// Children know their parent, are sorted, and no two start with the same block of tokens.
    fn check_children(&self, id: NodeId) -> Result<(), String> {
        let children = &self.node(id).children;
        let is_parent =
            |child: &NodeId| matches!(self.node(*child).parent, Parent::Node(p) if p == id);
        if !children.iter().all(is_parent) {
            return Err(format!("a child of {id:?} has another parent"));
        }
        match children.is_sorted_by(|a, b| self.first_tokens(*a) < self.first_tokens(*b)) {
            true => Ok(()),
            false => Err(format!(
                "the children of {id:?} are not disjoint and sorted"
            )),
        }
    }
}
