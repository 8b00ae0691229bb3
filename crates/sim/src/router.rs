//! What a router knows of a prefix cache from its events alone.

use std::collections::{HashMap, HashSet};

use plimsoll_core::{BlockImage, CacheContent, CacheEvent, CacheKind, ImageSpan, KvConfig, TokenId};

/// Blocks by name.
#[derive(Debug, Default)]
pub(crate) struct Router {
    /// What each name that was ever stored stands for.
    blocks: HashMap<u64, Block>,
    /// Group and name of the blocks that are cached.
    held: HashSet<(usize, u64)>,
}

#[derive(Clone, Debug, PartialEq)]
struct Block {
    parent: Option<u64>,
    tokens: Vec<TokenId>,
    images: Vec<BlockImage>,
    salt: Option<Box<str>>,
}

/// The same blocks are cached, whatever was cached before.
impl PartialEq for Router {
    fn eq(&self, other: &Self) -> bool {
        let mut names = self.held.iter().map(|(_, name)| name);
        self.held == other.held && names.all(|name| self.blocks.get(name) == other.blocks.get(name))
    }
}

impl Router {
    /// Takes in `events`; an error where they make no sense.
    pub(crate) fn hear(&mut self, events: Vec<CacheEvent>) -> Result<(), String> {
        for event in events {
            match event {
                CacheEvent::Cleared => self.held.clear(),
                CacheEvent::Removed { group, blocks } => {
                    for name in blocks {
                        if !self.held.remove(&(group, name)) {
                            return Err(format!("{name} was never stored in group {group}"));
                        }
                    }
                }
                CacheEvent::Stored {
                    group,
                    content,
                    blocks,
                    mut parent,
                    tokens,
                    images,
                    mut salt,
                } => {
                    let len = tokens.len() / blocks.len();
                    for (index, (&name, tokens)) in blocks.iter().zip(tokens.chunks_exact(len)).enumerate() {
                        let behind = parent.is_none_or(|parent| self.held.contains(&(group, parent)));
                        if content == CacheContent::Kv(CacheKind::Full) && !behind {
                            return Err(format!("{blocks:?} follow a block that is not cached"));
                        }
                        let block = Block {
                            parent,
                            tokens: tokens.to_vec(),
                            images: images
                                .iter()
                                .filter(|(at, _)| *at == index)
                                .map(|(_, image)| *image)
                                .collect(),
                            salt: salt.take(),
                        };
                        let known = self.blocks.entry(name).or_insert_with(|| block.clone());
                        if name == 0 || *known != block || !self.held.insert((group, name)) {
                            return Err(format!(
                                "{name} is no name, that of another block, or stored twice"
                            ));
                        }
                        parent = Some(name);
                    }
                }
            }
        }
        Ok(())
    }

    /// Cached blocks of all groups, states included.
    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    /// Tokens of the longest prefix of `tokens` that a request of `salt` finds: every group has what a query behind it sees, and
    /// that of states the last block.
    pub(crate) fn longest(
        &self,
        salt: Option<&str>,
        tokens: &[TokenId],
        images: &[ImageSpan],
        kv: &KvConfig,
    ) -> usize {
        let block_size = kv.block_size.tokens();
        let mut names: Vec<u64> = Vec::new();
        for (index, tokens) in tokens.chunks_exact(block_size).enumerate() {
            let range = index * block_size..(index + 1) * block_size;
            let images: Vec<BlockImage> = images
                .iter()
                .filter(|span| span.start < range.end && span.end() > range.start)
                .map(|span| BlockImage {
                    hash: span.image.hash,
                    row: span.first + range.start.saturating_sub(span.start),
                    at: span.start.saturating_sub(range.start),
                    len: span.end().min(range.end) - span.start.max(range.start),
                })
                .collect();
            let parent = names.last().copied();
            let salt = salt.filter(|_| parent.is_none());
            let next = self.blocks.iter().find(|(_, block)| {
                (block.parent, &block.images) == (parent, &images)
                    && block.tokens == tokens
                    && block.salt.as_deref() == salt
            });
            let Some((&name, _)) = next else { break };
            names.push(name);
        }
        let states = (kv.groups.state_layers() > 0).then_some(kv.groups.as_slice().len());
        let is_hit = |&blocks: &usize| {
            let query = blocks * block_size;
            kv.groups.iter().enumerate().all(|(group, described)| {
                let seen = |&block: &usize| match described.kind {
                    CacheKind::Full => true,
                    CacheKind::Window(window) => query - ((block + 1) * block_size - 1) < window,
                };
                let mut seen = (0..blocks).filter(seen);
                seen.all(|block| self.held.contains(&(group, names[block])))
            }) && (blocks == 0 || states.is_none_or(|group| self.held.contains(&(group, names[blocks - 1]))))
        };
        (0..=names.len()).rev().find(is_hit).unwrap_or(0) * block_size
    }
}
