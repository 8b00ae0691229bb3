//! vLLM's events as MessagePack: a batch is an array, an event is a map with its `type` (`vllm/distributed/kv_events.py`).

use std::borrow::Cow;

use plimsoll_core::{CacheContent, CacheEvent, CacheKind, TokenId};
use serde::Serialize;

/// Medium of the blocks: vLLM's name for the memory of any device.
const MEDIUM: &str = "GPU";
/// There is one cache.
const DATA_PARALLEL_RANK: u32 = 0;

#[derive(Serialize)]
#[serde(tag = "type")]
enum Event<'a> {
    BlockStored {
        block_hashes: &'a [u64],
        parent_block_hash: Option<u64>,
        token_ids: &'a [TokenId],
        block_size: usize,
        lora_id: Option<u32>,
        medium: &'static str,
        lora_name: Option<&'a str>,
        /// For each block, what identifies it besides its tokens: the images in it, and a salt at the beginning of a sequence.
        #[serde(skip_serializing_if = "Option::is_none")]
        extra_keys: Option<Vec<Option<Vec<Cow<'a, str>>>>>,
        /// Field that Dynamo reads.
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_salt: Option<&'a str>,
        /// The cache group, and what its layers keep (vLLM pull requests 37688 and 40984).
        group_idx: usize,
        kv_cache_spec_kind: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        kv_cache_spec_sliding_window: Option<usize>,
    },
    BlockRemoved {
        block_hashes: &'a [u64],
        medium: &'static str,
        group_idx: usize,
    },
    AllBlocksCleared {},
}

impl<'a> From<&'a CacheEvent> for Event<'a> {
    fn from(event: &'a CacheEvent) -> Self {
        match event {
            CacheEvent::Stored {
                group,
                content,
                blocks,
                parent,
                tokens,
                images,
                salt,
            } => {
                let salt = salt.as_deref();
                let (kind, window) = match *content {
                    CacheContent::Kv(CacheKind::Full) => ("full_attention", None),
                    CacheContent::Kv(CacheKind::Window(window)) => ("sliding_window", Some(window)),
                    CacheContent::State => ("mamba", None),
                };
                Self::BlockStored {
                    block_hashes: blocks,
                    parent_block_hash: *parent,
                    token_ids: tokens,
                    block_size: tokens.len() / blocks.len().max(1),
                    lora_id: None,
                    medium: MEDIUM,
                    lora_name: None,
                    extra_keys: (salt.is_some() || !images.is_empty()).then(|| {
                        let mut keys: Vec<Option<Vec<_>>> = vec![None; blocks.len()];
                        for (block, image) in images {
                            keys[*block].get_or_insert_default().push(hex(&image.hash).into());
                        }
                        if let Some(salt) = salt {
                            keys[0].get_or_insert_default().push(salt.into());
                        }
                        keys
                    }),
                    cache_salt: salt,
                    group_idx: *group,
                    kv_cache_spec_kind: kind,
                    kv_cache_spec_sliding_window: window,
                }
            }
            CacheEvent::Removed { group, blocks } => Self::BlockRemoved {
                block_hashes: blocks,
                medium: MEDIUM,
                group_idx: *group,
            },
            CacheEvent::Cleared => Self::AllBlocksCleared {},
        }
    }
}

/// As vLLM writes hashes of content.
fn hex(hash: &[u8; 32]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A batch of `events` that happened at `time`, in seconds since 1970.
pub(crate) fn encode(time: f64, events: &[CacheEvent]) -> Vec<u8> {
    let events: Vec<Event<'_>> = events.iter().map(Event::from).collect();
    rmp_serde::to_vec_named(&(time, events, DATA_PARALLEL_RANK)).expect("numbers and text are MessagePack")
}

#[cfg(test)]
mod tests {
    use plimsoll_core::BlockImage;

    use super::*;

    #[test]
    fn bytes_are_those_of_vllms_encoder() {
        let events = [
            CacheEvent::Stored {
                group: 1,
                content: CacheContent::Kv(CacheKind::Window(100)),
                blocks: vec![1, u64::MAX],
                parent: Some(300),
                tokens: vec![7, 8, 9, 70_000],
                images: Vec::new(),
                salt: None,
            },
            CacheEvent::Removed {
                group: 1,
                blocks: vec![2],
            },
            CacheEvent::Cleared,
        ];
        // msgspec.msgpack.encode of vLLM's structs.
        let mut expected = vec![0x93, 0xcb];
        expected.extend(1.5_f64.to_be_bytes());
        expected.push(0x93);
        let text = |out: &mut Vec<u8>, text: &str| {
            out.push(0xa0 | text.len() as u8);
            out.extend(text.as_bytes());
        };
        expected.push(0x8b);
        text(&mut expected, "type");
        text(&mut expected, "BlockStored");
        text(&mut expected, "block_hashes");
        expected.extend([0x92, 1, 0xcf, 255, 255, 255, 255, 255, 255, 255, 255]);
        text(&mut expected, "parent_block_hash");
        expected.extend([0xcd, 1, 44]);
        text(&mut expected, "token_ids");
        expected.extend([0x94, 7, 8, 9, 0xce, 0, 1, 0x11, 0x70]);
        text(&mut expected, "block_size");
        expected.push(2);
        text(&mut expected, "lora_id");
        expected.push(0xc0);
        text(&mut expected, "medium");
        text(&mut expected, "GPU");
        text(&mut expected, "lora_name");
        expected.push(0xc0);
        text(&mut expected, "group_idx");
        expected.push(1);
        text(&mut expected, "kv_cache_spec_kind");
        text(&mut expected, "sliding_window");
        text(&mut expected, "kv_cache_spec_sliding_window");
        expected.push(100);
        expected.push(0x84);
        text(&mut expected, "type");
        text(&mut expected, "BlockRemoved");
        text(&mut expected, "block_hashes");
        expected.extend([0x91, 2]);
        text(&mut expected, "medium");
        text(&mut expected, "GPU");
        text(&mut expected, "group_idx");
        expected.push(1);
        expected.push(0x81);
        text(&mut expected, "type");
        text(&mut expected, "AllBlocksCleared");
        expected.push(0);
        assert_eq!(encode(1.5, &events), expected);
    }

    #[test]
    fn images_are_told_with_their_blocks() {
        let image = |hash: u8| BlockImage {
            hash: [hash; 32],
            row: 0,
            at: 0,
            len: 1,
        };
        let event = CacheEvent::Stored {
            group: 0,
            content: CacheContent::Kv(CacheKind::Full),
            blocks: vec![1, 2],
            parent: None,
            tokens: vec![5, 6],
            images: vec![(0, image(0x0F)), (0, image(0xA0))],
            salt: Some("pepper".into()),
        };
        let mut keys = b"\xaaextra_keys\x92\x93".to_vec();
        for byte in ["0f", "a0"] {
            keys.extend(b"\xd9\x40");
            keys.extend(byte.repeat(32).as_bytes());
        }
        keys.extend(b"\xa6pepper\xc0");
        let bytes = encode(0.0, &[event]);
        assert!(bytes.windows(keys.len()).any(|part| part == keys), "{bytes:?}");
    }

    #[test]
    fn a_salt_is_told_with_the_first_block() {
        let event = CacheEvent::Stored {
            group: 0,
            content: CacheContent::Kv(CacheKind::Full),
            blocks: vec![1, 2],
            parent: None,
            tokens: vec![5, 6],
            images: Vec::new(),
            salt: Some("pepper".into()),
        };
        let bytes = encode(0.0, &[event]);
        let expected = b"\xaaextra_keys\x92\x91\xa6pepper\xc0\xaacache_salt\xa6pepper\xa9group_idx\0";
        assert!(
            bytes.windows(expected.len()).any(|part| part == expected),
            "{bytes:?}"
        );
    }

    #[test]
    fn states_are_of_a_kind_that_routers_know() {
        let event = CacheEvent::Stored {
            group: 1,
            content: CacheContent::State,
            blocks: vec![2],
            parent: Some(1),
            tokens: vec![5, 6],
            images: Vec::new(),
            salt: None,
        };
        let bytes = encode(0.0, &[event]);
        let expected = b"\xa9group_idx\x01\xb2kv_cache_spec_kind\xa5mamba";
        assert!(
            bytes.windows(expected.len()).any(|part| part == expected),
            "{bytes:?}"
        );
    }
}
