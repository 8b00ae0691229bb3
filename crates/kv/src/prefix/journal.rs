use std::collections::HashMap;

use plimsoll_core::{CacheEvent, TokenId};
use sha2::{Digest, Sha256};

use super::Prefix;

/// What changed in the prefix cache, until somebody asks.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    events: Vec<CacheEvent>,
    /// Of cached blocks with which a sequence of a salt begins, by name.
    salts: HashMap<u64, Box<str>>,
    /// What others know cached blocks by, by name.
    public: HashMap<u64, u64>,
}

impl Journal {
    pub(crate) fn take(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }

    /// Nothing is cached any more; something was where `any`.
    pub(crate) fn clear(&mut self, any: bool) {
        self.salts.clear();
        self.public.clear();
        // What nobody heard of yet was said of a cache that is gone. Of what they heard, all may be removed already.
        if any || !self.events.is_empty() {
            self.events.clear();
            self.events.push(CacheEvent::Cleared);
        }
    }

    pub(crate) fn stored(&mut self, before: Prefix, name: u64, tokens: &[TokenId], salt: Option<&str>) {
        if let Some(salt) = salt.filter(|_| before.is_root()) {
            self.salts.insert(name, salt.into());
        }
        let public = public(
            self.parent(before),
            tokens,
            self.salts.get(&name).map(Box::as_ref),
        );
        self.public.insert(name, public);
        let mut events = std::mem::take(&mut self.events);
        self.tell(&mut events, before, name, tokens);
        self.events = events;
    }

    pub(crate) fn removed(&mut self, name: u64) {
        self.salts.remove(&name);
        let public = self.public.remove(&name).expect("it was stored");
        match self.events.last_mut() {
            Some(CacheEvent::Removed(blocks)) => blocks.push(public),
            _ => self.events.push(CacheEvent::Removed(vec![public])),
        }
    }

    /// Adds to `events` that the block `name` holds `tokens` after `before`; those in a row become one event.
    pub(crate) fn tell(&self, events: &mut Vec<CacheEvent>, before: Prefix, name: u64, tokens: &[TokenId]) {
        let parent = self.parent(before);
        let public = self.public[&name];
        if let Some(CacheEvent::Stored {
            blocks, tokens: row, ..
        }) = events.last_mut()
            && parent.is_some()
            && blocks.last() == parent.as_ref()
        {
            blocks.push(public);
            row.extend_from_slice(tokens);
            return;
        }
        events.push(CacheEvent::Stored {
            blocks: vec![public],
            parent,
            tokens: tokens.to_vec(),
            salt: self.salts.get(&name).cloned(),
        });
    }

    /// What others know the last block of `before` by.
    fn parent(&self, before: Prefix) -> Option<u64> {
        (!before.is_root()).then(|| self.public[&before.name])
    }
}

/// What others know a block by: a digest of its tokens and of all that is before them. Routers keep one tree for all servers,
/// in which equal blocks are taken to have equal names, and 0 is none. Nobody can make a block with the name of another's.
fn public(parent: Option<u64>, tokens: &[TokenId], salt: Option<&str>) -> u64 {
    let mut digest = Sha256::new();
    digest.update(parent.unwrap_or(0).to_le_bytes());
    for token in tokens {
        digest.update(token.to_le_bytes());
    }
    // Behind the tokens, whose number is always the same: no salt can pass for tokens.
    digest.update(salt.unwrap_or_default());
    let digest: [u8; 32] = digest.finalize().into();
    let (first, _) = digest.split_first_chunk().expect("32 bytes");
    u64::from_le_bytes(*first).max(1)
}
