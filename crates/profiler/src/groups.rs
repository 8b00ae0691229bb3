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
    /// Further layers, which read what these keep and keep nothing themselves.
    pub sharing_layers: usize,
    /// Pages of one block of tokens.
    pub pages_per_block: usize,
    /// Bytes that a token takes while it is kept, rounding included.
    pub bytes_per_token: u64,
    /// Tokens that a request of full length keeps while it generates, in whole blocks.
    pub request_tokens: usize,
    /// Of the bytes of a token, those that are lost because pages have room for more layers.
    pub rounding_bytes: u64,
}

/// The layers that keep a state of fixed size of each request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StatesReport {
    /// Layers with such a state.
    pub layers: usize,
    /// States that there is room for: those of requests, and snapshots in the slots that they leave free.
    pub slots: usize,
    /// Of these, snapshots that the prefix cache can keep even while `--max-num-seqs` requests run.
    pub snapshots: usize,
    /// Bytes of the states of one request, all layers'.
    pub bytes_per_request: u64,
    /// The same in tokens of KV, rounded.
    pub tokens_per_request: u64,
}

impl StatesReport {
    /// Those of `spec`, if any layer has one.
    pub(crate) fn of(spec: &ProfileSpec) -> Option<Self> {
        let slots = spec.kv(0).state_slots;
        (slots > 0).then(|| Self {
            layers: spec.groups.state_layers(),
            slots,
            snapshots: slots - spec.limits.max_num_seqs,
            bytes_per_request: spec.state_bytes,
            tokens_per_request: (spec.state_bytes as f64 / spec.kv_bytes_per_token as f64).round() as u64,
        })
    }
}

impl GroupReport {
    /// The groups of `spec`, in their order.
    pub(crate) fn all(spec: &ProfileSpec) -> Vec<Self> {
        let groups = spec.groups.iter().map(|group| {
            let column = spec.column_bytes_per_token();
            let unused = spec.groups.unused_columns(group) as u64;
            let blocks = group.most_blocks(spec.block_size, spec.limits.max_model_len, 1);
            let (kind, window) = match group.kind {
                CacheKind::Full => ("full", None),
                CacheKind::Window(window) => ("window", Some(window)),
            };
            Self {
                kind,
                window,
                layers: group.layers,
                sharing_layers: group.sharing_layers,
                pages_per_block: group.pages_per_block,
                bytes_per_token: column * (group.columns as u64 + unused),
                request_tokens: blocks * spec.block_size.tokens(),
                rounding_bytes: column * unused,
            }
        });
        groups.collect()
    }
}
