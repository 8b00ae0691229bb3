//! What each group of layers keeps, for reports.

use plimsoll_core::CacheKind;
use serde::Serialize;

use crate::ProfileSpec;

/// A group of layers in the KV cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupReport {
    /// `full` or `window`.
    pub kind: &'static str,
    /// Tokens that a query sees, itself included; absent where that is all of them.
    pub window: Option<usize>,
    /// Layers that keep the same.
    pub layers: usize,
    /// Pages of one block of tokens.
    pub pages_per_block: usize,
    /// Bytes that a token takes while it is kept, rounding included.
    pub bytes_per_token: u64,
    /// Tokens that a request of full length keeps while it generates, in whole blocks.
    pub request_tokens: usize,
    /// Of the bytes of a token, those that are lost because pages have room for more layers.
    pub rounding_bytes: u64,
}

impl GroupReport {
    /// The groups of `spec`, in their order.
    pub(crate) fn all(spec: &ProfileSpec) -> Vec<Self> {
        let groups = spec.groups.iter().map(|group| {
            let layer = spec.layer_bytes_per_token();
            let unused = spec.groups.unused_layers(group) as u64;
            let blocks = group.most_blocks(spec.block_size, spec.limits.max_model_len, 1);
            let (kind, window) = match group.kind {
                CacheKind::Full => ("full", None),
                CacheKind::Window(window) => ("window", Some(window)),
            };
            Self {
                kind,
                window,
                layers: group.layers,
                pages_per_block: group.pages_per_block,
                bytes_per_token: layer * (group.layers as u64 + unused),
                request_tokens: blocks * spec.block_size.tokens(),
                rounding_bytes: layer * unused,
            }
        });
        groups.collect()
    }
}
