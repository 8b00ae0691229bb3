use std::collections::HashMap;

use plimsoll_core::{CacheContent, CacheEvent, CacheGroups};
use sha2::{Digest, Sha256};

use super::Prefix;
use crate::content::Content;

/// Groups that events may be about: of KV, and that of states.
const GROUPS: usize = CacheGroups::MAX + 1;

/// Records events of the prefix cache.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    events: Vec<CacheEvent>,
    /// Salts of blocks at the beginning of a sequence, by name.
    salts: HashMap<u64, Box<str>>,
    /// Public hashes of blocks, by name.
    public: HashMap<u64, u64>,
}

impl Journal {
    pub(crate) fn take(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }

    /// Records that the cache was cleared; `any`: something was cached.
    pub(crate) fn clear(&mut self, any: bool) {
        self.salts.clear();
        self.public.clear();
        // Pending events are about a cache that is gone, but earlier ones may have been published.
        if any || !self.events.is_empty() {
            self.events.clear();
            self.events.push(CacheEvent::Cleared);
        }
    }

    /// Gives the block called `name` within this process its public name.
    pub(crate) fn name(&mut self, before: Prefix, name: u64, content: Content<'_>, salt: Option<&str>) {
        let salt = salt.filter(|_| before.is_root());
        let public = public(self.parent(before), content, salt);
        self.public.insert(name, public);
        self.salts.extend(salt.map(|salt| (name, salt.into())));
    }

    /// No group holds block `name` any more, nor one that continues it.
    pub(crate) fn forget(&mut self, name: u64) {
        self.salts.remove(&name);
        self.public.remove(&name);
    }

    /// Records that `group` holds block `name`.
    pub(crate) fn stored(
        &mut self,
        group: (usize, CacheContent),
        before: Prefix,
        name: u64,
        content: Content<'_>,
    ) {
        let mut events = std::mem::take(&mut self.events);
        self.tell(&mut events, group, before, name, content);
        self.events = events;
    }

    /// Records that `group` holds block `name` no more.
    pub(crate) fn removed(&mut self, group: usize, name: u64) {
        let public = self.public[&name];
        // Groups take turns: the last event of each is among the last few.
        for event in self.events.iter_mut().rev().take(GROUPS) {
            match event {
                CacheEvent::Removed { group: of, blocks } if *of == group => return blocks.push(public),
                CacheEvent::Removed { .. } => {}
                _ => break,
            }
        }
        let blocks = vec![public];
        self.events.push(CacheEvent::Removed { group, blocks });
    }

    /// Appends to `events` that `group` holds block `name`, with what it holds after `before`; consecutive blocks become one event.
    pub(crate) fn tell(
        &self,
        events: &mut Vec<CacheEvent>,
        (group, content): (usize, CacheContent),
        before: Prefix,
        name: u64,
        held: Content<'_>,
    ) {
        let parent = self.parent(before);
        let public = self.public[&name];
        for event in events.iter_mut().rev().take(GROUPS) {
            let CacheEvent::Stored {
                group: of,
                blocks,
                tokens: row,
                images,
                ..
            } = event
            else {
                break;
            };
            if *of == group {
                if parent.is_some() && blocks.last() == parent.as_ref() {
                    images.extend(held.images.iter().map(|&image| (blocks.len(), image)));
                    blocks.push(public);
                    row.extend_from_slice(held.tokens);
                    return;
                }
                break;
            }
        }
        events.push(CacheEvent::Stored {
            group,
            content,
            blocks: vec![public],
            parent,
            tokens: held.tokens.to_vec(),
            images: held.images.iter().map(|&image| (0, image)).collect(),
            salt: self.salts.get(&name).cloned(),
        });
    }

    /// Public hash of the last block of `before`.
    fn parent(&self, before: Prefix) -> Option<u64> {
        (!before.is_root()).then(|| self.public[&before.name])
    }
}

/// Public hash of a block: a digest of its tokens and everything before them. Routers keep one tree for all servers and expect
/// equal blocks to have equal hashes, and 0 to mean none. A cryptographic hash, so that clients cannot craft collisions.
fn public(parent: Option<u64>, content: Content<'_>, salt: Option<&str>) -> u64 {
    let mut digest = Sha256::new();
    digest.update(parent.unwrap_or(0).to_le_bytes());
    for token in content.tokens {
        digest.update(token.to_le_bytes());
    }
    // Salts are UTF-8, in which no byte is 0xFF.
    for image in content.images {
        digest.update([0xFF]);
        digest.update(image.hash);
        digest.update(
            [image.row as u64, image.at as u64, image.len as u64]
                .map(u64::to_le_bytes)
                .concat(),
        );
    }
    // After the tokens, whose number is fixed, so that no salt can be mistaken for tokens.
    digest.update(salt.unwrap_or_default());
    let digest: [u8; 32] = digest.finalize().into();
    let (first, _) = digest.split_first_chunk().expect("32 bytes");
    u64::from_le_bytes(*first).max(1)
}
