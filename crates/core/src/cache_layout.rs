//! Which tokens of a request the layers of a model keep in the KV cache, and its division into pages of one size.
//!
//! Layers that keep the same form a group. A block is `block_size` tokens of all layers of one group; it takes one or several
//! pages, each with the same number of layers. So any free page serves any group: there is one pool, without a split that
//! is fixed beforehand (vLLM's hybrid KV cache manager shares pages between kinds of layers in the same way).
//!
//! A page is divided into columns, each of which has room for the keys and values of the narrowest layer; wider layers take
//! several, or have fewer tokens in a page: a block may be cut into slices of as many tokens each, so that few columns are
//! unused ([`CacheGroup::slices`]). Layers that read the keys and values of another one have none ([`CacheLayer::shares`]).
//!
//! Layers that keep a state of fixed size in place of tokens are a group without pages: a request has one slot for the states
//! of all of them, whatever its length ([`CacheGroups::state_layers`]). Further slots hold snapshots: states behind prefixes that
//! later requests may begin with.

mod cut;

use std::fmt;

use crate::BlockSize;
use cut::{Cut, pages, place};

/// Which tokens of a request a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheKind {
    /// All tokens.
    Full,
    /// So many tokens, at least 1: a query sees itself and those right before it (`sliding_window` of a configuration).
    Window(usize),
}

impl CacheKind {
    /// The first position that a query at `position` sees.
    pub fn first_visible(self, position: usize) -> usize {
        match self {
            Self::Full => 0,
            Self::Window(window) => (position + 1).saturating_sub(window),
        }
    }
}

impl fmt::Display for CacheKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Window(window) => write!(f, "window of {window}"),
        }
    }
}

/// What a layer asks of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheLayer {
    /// Which tokens it keeps.
    pub kind: CacheKind,
    /// Columns of a page that the keys and values of a block take, at least 1.
    pub columns: usize,
    /// The layer, as an index among those of the model that have attention, whose keys and values it reads. It keeps none
    /// itself then.
    pub shares: Option<usize>,
}

impl From<CacheKind> for CacheLayer {
    /// A layer that is as wide as the narrowest, with keys and values of its own.
    fn from(kind: CacheKind) -> Self {
        Self {
            kind,
            columns: 1,
            shares: None,
        }
    }
}

/// Layers that keep the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheGroup {
    /// Which tokens they keep.
    pub kind: CacheKind,
    /// Number of layers.
    pub layers: usize,
    /// Columns that the keys and values of a block take.
    pub columns: usize,
    /// Further layers, which read what these keep.
    pub sharing_layers: usize,
    /// Pages of one block of this group: those of its first slice, then those of the next.
    pub pages_per_block: usize,
    /// Slices that a block is cut into, of as many tokens each, which have pages of their own. For attention, each is a block.
    pub slices: usize,
}

impl CacheGroup {
    /// Pages of one slice of a block.
    pub fn pages_per_slice(&self) -> usize {
        self.pages_per_block / self.slices
    }

    /// The first block that a step still reads which starts at position `start`: those before it lie behind the window.
    pub fn first_block(&self, block_size: BlockSize, start: usize) -> usize {
        self.kind.first_visible(start) / block_size.tokens()
    }

    /// Most blocks that a request of at most `tokens` tokens holds which is computed `chunk` tokens at a time.
    pub fn most_blocks(&self, block_size: BlockSize, tokens: usize, chunk: usize) -> usize {
        let all = block_size.blocks_for(tokens);
        match self.kind {
            CacheKind::Full => all,
            // What the first token of a chunk sees, and the chunk, wherever in a block that begins.
            CacheKind::Window(window) => {
                let seen = window.saturating_add(chunk.max(1)) - 2;
                all.min(block_size.blocks_for(seen).saturating_add(1))
            }
        }
    }
}

/// The groups of a model; full attention comes first, if there is any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheGroups {
    groups: [CacheGroup; CacheGroups::MAX],
    len: usize,
    columns_per_page: usize,
    state_layers: usize,
}

impl Default for CacheGroups {
    /// One layer that keeps everything, or all layers of a model taken for one.
    fn default() -> Self {
        Self {
            groups: [Self::SINGLE; Self::MAX],
            len: 1,
            columns_per_page: 1,
            state_layers: 0,
        }
    }
}

impl CacheGroups {
    /// Maximum number of groups.
    pub const MAX: usize = 3;

    /// Part of a group's memory that padding may take where larger pages make fewer of them.
    const MAX_PADDING: f64 = 0.02;

    const SINGLE: CacheGroup = CacheGroup {
        kind: CacheKind::Full,
        layers: 1,
        columns: 1,
        sharing_layers: 0,
        pages_per_block: 1,
        slices: 1,
    };

    /// The groups.
    pub fn as_slice(&self) -> &[CacheGroup] {
        &self.groups[..self.len]
    }

    /// The same of a model that has so many layers with states too.
    pub fn with_states(self, layers: usize) -> Self {
        Self {
            state_layers: layers,
            ..self
        }
    }

    /// The groups, in order.
    pub fn iter(&self) -> std::slice::Iter<'_, CacheGroup> {
        self.as_slice().iter()
    }

    /// Whether some layers take more columns than others.
    pub fn has_wide_layers(&self) -> bool {
        self.iter().any(|group| group.columns > group.layers)
    }

    /// Columns of one page, some of them unused where their number does not divide that of a group.
    pub fn columns_per_page(&self) -> usize {
        self.columns_per_page
    }

    /// Layers that keep a state of fixed size of each request, and no tokens.
    pub fn state_layers(&self) -> usize {
        self.state_layers
    }

    /// State slots of a cache for so many requests at once: at most `most`, but one for each request in any case, and if prefixes are
    /// cached up to as many again for snapshots: the turns of chats that fill the KV cache are about as many as the requests that do.
    pub fn state_slots(&self, requests: usize, most: usize, prefix_caching: bool) -> usize {
        let snapshots = if prefix_caching { requests } else { 0 };
        match self.state_layers {
            0 => 0,
            _ => most.clamp(requests, requests.saturating_add(snapshots)),
        }
    }

    /// Pages of one block in every group.
    pub fn pages_per_block(&self) -> usize {
        self.iter().map(|group| group.pages_per_block).sum()
    }

    /// Columns of the pages of one block of `group` that none of its layers takes.
    pub fn unused_columns(&self, group: &CacheGroup) -> usize {
        group.pages_per_block * self.columns_per_page - group.columns
    }
}

impl<'a> IntoIterator for &'a CacheGroups {
    type Item = &'a CacheGroup;
    type IntoIter = std::slice::Iter<'a, CacheGroup>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Where a layer's keys and values are: from column `column` on in the `plane`-th page of each slice of a block of group `group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerPlace {
    /// Index of its group.
    pub group: usize,
    /// Which of the pages of a slice.
    pub plane: usize,
    /// The first of its columns of that page.
    pub column: usize,
}

/// The groups of a model and each layer's place in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    /// The groups.
    pub groups: CacheGroups,
    /// One place for each layer with attention, in their order; that of a layer that shares is the other one's.
    pub places: Vec<LayerPlace>,
}

/// Why layers cannot share one cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CacheLayoutError {
    /// Nothing to keep.
    #[error("a model without attention layers has no KV cache, and none is served without")]
    NoLayers,
    /// A query that does not see itself.
    #[error("a sliding window must hold at least 1 token, and that of layer {layer} holds none")]
    EmptyWindow {
        /// Index of the layer.
        layer: usize,
    },
    /// More than [`CacheGroups::MAX`].
    #[error(
        "the layers have more than {} kinds of attention: at most one full and two windows are supported",
        CacheGroups::MAX
    )]
    TooManyKinds,
    /// A layer can only read what an earlier layer of the same kind and width keeps.
    #[error(
        "layer {layer} is to read the keys and values of layer {of}, which is no earlier layer of the same kind"
    )]
    NotShared {
        /// Index of the layer.
        layer: usize,
        /// The one that it shares with.
        of: usize,
    },
}

impl CacheLayout {
    /// Groups layers, whose blocks all take the same bytes, by what they keep. Blocks of layers of one width are never cut, so their
    /// size does not matter.
    ///
    /// # Errors
    /// [`CacheLayoutError`].
    pub fn new(layers: &[CacheKind], max_tokens: usize) -> Result<Self, CacheLayoutError> {
        let layers: Vec<CacheLayer> = layers.iter().map(|&kind| kind.into()).collect();
        Self::of(&layers, max_tokens, BlockSize::default())
    }

    /// Groups layers by what they keep. A window of `max_tokens` tokens or more, the longest context, keeps everything.
    ///
    /// Blocks are cut into as few slices, and pages have as many columns, as keep padding small: at most 2 % of what each group holds,
    /// where that can be. With one group, a page is a block.
    ///
    /// # Errors
    /// [`CacheLayoutError`].
    pub fn of(
        layers: &[CacheLayer],
        max_tokens: usize,
        block_size: BlockSize,
    ) -> Result<Self, CacheLayoutError> {
        let whole = |layer: &CacheLayer| match layer.kind {
            CacheKind::Window(window) if window < max_tokens => *layer,
            _ => CacheLayer {
                kind: CacheKind::Full,
                ..*layer
            },
        };
        let is_empty = |layer: &CacheLayer| layer.kind == CacheKind::Window(0);
        if let Some(layer) = layers.iter().position(is_empty) {
            return Err(CacheLayoutError::EmptyWindow { layer });
        }
        let layers: Vec<CacheLayer> = layers.iter().map(whole).collect();
        for (layer, this) in layers.iter().enumerate() {
            if let Some(of) = this.shares {
                let other = layers[..layer].get(of).filter(|other| other.shares.is_none());
                if other.is_none_or(|other| (other.kind, other.columns) != (this.kind, this.columns)) {
                    return Err(CacheLayoutError::NotShared { layer, of });
                }
            }
        }
        let mut kinds: Vec<CacheKind> = layers.iter().map(|layer| layer.kind).collect();
        // The group that keeps everything comes first, then the widest window.
        kinds.sort_unstable_by_key(|&kind| match kind {
            CacheKind::Full => (0, 0),
            CacheKind::Window(window) => (1, usize::MAX - window),
        });
        kinds.dedup();
        if kinds.is_empty() {
            return Err(CacheLayoutError::NoLayers);
        }
        if kinds.len() > CacheGroups::MAX {
            return Err(CacheLayoutError::TooManyKinds);
        }
        let of_kind = |kind: CacheKind| layers.iter().filter(move |layer| layer.kind == kind);
        let keeping = |kind: CacheKind| of_kind(kind).filter(|layer| layer.shares.is_none());
        let widths: Vec<Vec<usize>> = kinds
            .iter()
            .map(|&kind| keeping(kind).map(|layer| layer.columns).collect())
            .collect();
        let Cut {
            columns_per_page,
            slices,
        } = Cut::of(&widths, block_size);
        let mut groups = [CacheGroups::SINGLE; CacheGroups::MAX];
        for (((group, &kind), widths), &slices) in groups.iter_mut().zip(&kinds).zip(&widths).zip(&slices) {
            *group = CacheGroup {
                kind,
                layers: widths.len(),
                columns: widths.iter().sum(),
                sharing_layers: of_kind(kind).count() - widths.len(),
                pages_per_block: slices * pages(widths, slices, columns_per_page),
                slices,
            };
        }
        let mut ends = vec![(0, 0); kinds.len()];
        let mut places: Vec<LayerPlace> = Vec::with_capacity(layers.len());
        for layer in &layers {
            let group = kinds
                .iter()
                .position(|other| *other == layer.kind)
                .unwrap_or_default();
            places.push(match layer.shares {
                Some(of) => places[of],
                None => {
                    let columns = layer.columns / slices[group];
                    let (plane, column) = place(&mut ends[group], columns, columns_per_page);
                    LayerPlace { group, plane, column }
                }
            });
        }
        Ok(Self {
            places,
            groups: CacheGroups {
                groups,
                len: kinds.len(),
                columns_per_page,
                state_layers: 0,
            },
        })
    }

    /// As [`CacheGroups::with_states`].
    pub fn with_states(mut self, layers: usize) -> Self {
        self.groups = self.groups.with_states(layers);
        self
    }
}

#[cfg(test)]
mod tests;
