use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use plimsoll_core::{CacheEvent, TokenId};

use crate::prefix::Prefix;

/// What changed in the prefix cache, until somebody asks.
#[derive(Debug)]
pub(crate) struct Journal {
    events: Vec<CacheEvent>,
    /// Of cached blocks with which a sequence of a salt begins, by name.
    salts: HashMap<u64, Box<str>>,
    /// Makes names of this process unlike those of any other.
    key: u64,
}

impl Default for Journal {
    fn default() -> Self {
        Self {
            events: Vec::new(),
            salts: HashMap::new(),
            key: RandomState::new().hash_one(0),
        }
    }
}

impl Journal {
    pub(crate) fn take(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }

    /// Nothing is cached any more; something was where `any`.
    pub(crate) fn clear(&mut self, any: bool) {
        self.salts.clear();
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
        let mut events = std::mem::take(&mut self.events);
        self.tell(&mut events, before, name, tokens);
        self.events = events;
    }

    pub(crate) fn removed(&mut self, name: u64) {
        self.salts.remove(&name);
        let public = self.public(name);
        match self.events.last_mut() {
            Some(CacheEvent::Removed(blocks)) => blocks.push(public),
            _ => self.events.push(CacheEvent::Removed(vec![public])),
        }
    }

    /// Adds to `events` that the block `name` holds `tokens` after `before`; those in a row become one event.
    pub(crate) fn tell(&self, events: &mut Vec<CacheEvent>, before: Prefix, name: u64, tokens: &[TokenId]) {
        let parent = (!before.is_root()).then(|| self.public(before.name));
        let name_of = self.public(name);
        if let Some(CacheEvent::Stored {
            blocks, tokens: row, ..
        }) = events.last_mut()
            && parent.is_some()
            && blocks.last() == parent.as_ref()
        {
            blocks.push(name_of);
            row.extend_from_slice(tokens);
            return;
        }
        events.push(CacheEvent::Stored {
            blocks: vec![name_of],
            parent,
            tokens: tokens.to_vec(),
            salt: self.salts.get(&name).cloned(),
        });
    }

    /// What others know a block by: a permutation of all names (the finalizer of SplitMix64, Steele et al. 2014), by a key
    /// of this process's own. Routers take equal names of two servers for equal blocks, and 0 for none.
    fn public(&self, name: u64) -> u64 {
        let mixed = name.wrapping_add(self.key);
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)).max(1)
    }
}
