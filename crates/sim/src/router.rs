//! What a router knows of a prefix cache from its events alone.

use std::collections::HashMap;

use plimsoll_core::{CacheEvent, TokenId};

/// Blocks by name.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Router {
    blocks: HashMap<u64, Block>,
}

#[derive(Debug, PartialEq)]
struct Block {
    parent: Option<u64>,
    tokens: Vec<TokenId>,
    salt: Option<Box<str>>,
}

impl Router {
    /// Takes in `events`; an error where they make no sense.
    pub(crate) fn hear(&mut self, events: Vec<CacheEvent>) -> Result<(), String> {
        for event in events {
            match event {
                CacheEvent::Cleared => self.blocks.clear(),
                CacheEvent::Removed(names) => {
                    for name in names {
                        self.blocks
                            .remove(&name)
                            .ok_or(format!("{name} was never stored"))?;
                        if self.blocks.values().any(|block| block.parent == Some(name)) {
                            return Err(format!("{name} goes before those behind it"));
                        }
                    }
                }
                CacheEvent::Stored {
                    blocks,
                    mut parent,
                    tokens,
                    mut salt,
                } => {
                    if parent.is_some_and(|parent| !self.blocks.contains_key(&parent)) {
                        return Err(format!("{blocks:?} follow what is not there"));
                    }
                    for (&name, tokens) in blocks
                        .iter()
                        .zip(tokens.chunks_exact(tokens.len() / blocks.len()))
                    {
                        let block = Block {
                            parent,
                            tokens: tokens.to_vec(),
                            salt: salt.take(),
                        };
                        if name == 0 || self.blocks.insert(name, block).is_some() {
                            return Err(format!("{name} is no name, or that of another block"));
                        }
                        parent = Some(name);
                    }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Tokens of the longest beginning of `tokens` that is cached for `salt`.
    pub(crate) fn longest(&self, salt: Option<&str>, tokens: &[TokenId], block_size: usize) -> usize {
        let mut parent = None;
        let mut found = 0;
        for tokens in tokens.chunks_exact(block_size) {
            let salt = salt.filter(|_| parent.is_none());
            let next = self.blocks.iter().find(|(_, block)| {
                block.parent == parent && block.tokens == tokens && block.salt.as_deref() == salt
            });
            let Some((&name, _)) = next else { break };
            parent = Some(name);
            found += block_size;
        }
        found
    }
}
