//! Leaf LRU as a table of names: slow, and plainly right.

use std::collections::BTreeMap;

/// A cached block. Its name stands for the whole prefix up to it, so its parent is always the same.
struct Entry {
    parent: Option<u32>,
    tick: usize,
    num_children: u32,
}

/// Hit blocks and blocks. The leaf with the oldest tick goes first; one request is inserted whole before
/// any goes.
pub fn lru<'a>(requests: impl Iterator<Item = &'a [u32]>, capacity: Option<u32>) -> (u64, u64) {
    let mut cached: BTreeMap<u32, Entry> = BTreeMap::new();
    let (mut num_hit, mut num_blocks) = (0, 0);
    for (tick, names) in requests.enumerate() {
        num_blocks += names.len() as u64;
        num_hit += names
            .iter()
            .take_while(|name| cached.contains_key(name))
            .count() as u64;
        let mut parent = None;
        for &name in names {
            if let Some(entry) = cached.get_mut(&name) {
                entry.tick = tick;
            } else {
                let num_children = 0;
                cached.insert(
                    name,
                    Entry {
                        parent,
                        tick,
                        num_children,
                    },
                );
                if let Some(parent) = parent.and_then(|parent| cached.get_mut(&parent)) {
                    parent.num_children += 1;
                }
            }
            parent = Some(name);
        }
        while capacity.is_some_and(|capacity| cached.len() > capacity as usize) {
            let leaves = cached.iter().filter(|(_, entry)| entry.num_children == 0);
            let oldest = leaves
                .min_by_key(|(_, entry)| entry.tick)
                .map(|(name, _)| *name);
            let oldest = oldest.expect("a tree has a leaf");
            let entry = cached.remove(&oldest).expect("just found");
            if let Some(parent) = entry.parent.and_then(|parent| cached.get_mut(&parent)) {
                parent.num_children -= 1;
            }
        }
    }
    (num_hit, num_blocks)
}
