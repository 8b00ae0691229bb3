//! Which tokens of a request the layers of a model keep in the KV cache, and its division into pages of one size.
//!
//! Layers that keep the same form a group. A block is `block_size` tokens of all layers of one group; it takes one or several
//! pages, each with the same number of layers. So any free page serves any group: there is one pool, without a split that
//! is fixed beforehand (vLLM's hybrid KV cache manager shares pages between kinds of layers in the same way).
//!
//! Layers that keep a state of fixed size in place of tokens are a group without pages: a request has one slot for the states
//! of all of them, whatever its length ([`CacheGroups::state_layers`]). Further slots hold snapshots: states behind prefixes that
//! later requests may begin with.

use std::fmt;

use crate::BlockSize;

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

/// Layers that keep the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheGroup {
    /// Which tokens they keep.
    pub kind: CacheKind,
    /// Number of layers.
    pub layers: usize,
    /// Pages of one block of this group.
    pub pages_per_block: usize,
}

impl CacheGroup {
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
    layers_per_page: usize,
    state_layers: usize,
}

impl Default for CacheGroups {
    /// One layer that keeps everything, or all layers of a model taken for one.
    fn default() -> Self {
        Self {
            groups: [Self::SINGLE; Self::MAX],
            len: 1,
            layers_per_page: 1,
            state_layers: 0,
        }
    }
}

impl CacheGroups {
    /// Maximum number of groups.
    pub const MAX: usize = 3;

    /// Part of the memory that padding may take where larger pages make fewer of them.
    const MAX_PADDING: f64 = 0.02;

    const SINGLE: CacheGroup = CacheGroup {
        kind: CacheKind::Full,
        layers: 1,
        pages_per_block: 1,
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

    /// Layers in one page, some of them unused where their number does not divide that of a group.
    pub fn layers_per_page(&self) -> usize {
        self.layers_per_page
    }

    /// Layers that keep a state of fixed size of each request, and no tokens.
    pub fn state_layers(&self) -> usize {
        self.state_layers
    }

    /// State slots of a cache for so many requests at once, and as many snapshots again if prefixes are cached: the turns of chats
    /// that fill the KV cache are about as many as the requests that do.
    pub fn state_slots(&self, requests: usize, prefix_caching: bool) -> usize {
        match self.state_layers {
            0 => 0,
            _ => requests.saturating_mul(1 + usize::from(prefix_caching)),
        }
    }

    /// Pages of one block in every group.
    pub fn pages_per_block(&self) -> usize {
        self.iter().map(|group| group.pages_per_block).sum()
    }

    /// Layers that the pages of one block of `group` have room for and that it does not have.
    pub fn unused_layers(&self, group: &CacheGroup) -> usize {
        group.pages_per_block * self.layers_per_page - group.layers
    }
}

impl<'a> IntoIterator for &'a CacheGroups {
    type Item = &'a CacheGroup;
    type IntoIter = std::slice::Iter<'a, CacheGroup>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Where a layer's keys and values are: in column `column` of the `plane`-th page of each block of group `group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerPlace {
    /// Index of its group.
    pub group: usize,
    /// Which of the pages of a block.
    pub plane: usize,
    /// Which of the layers of that page.
    pub column: usize,
}

/// The groups of a model and each layer's place in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    /// The groups.
    pub groups: CacheGroups,
    /// One place for each layer that keeps tokens, in their order.
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
}

impl CacheLayout {
    /// Groups layers, whose blocks all take the same bytes, by what they keep. A window of `max_tokens` tokens or more, the
    /// longest context, keeps everything.
    ///
    /// A page holds as many layers as make little padding: at most 2 % of a block in every group. With one group that is all.
    ///
    /// # Errors
    /// [`CacheLayoutError`].
    pub fn new(layers: &[CacheKind], max_tokens: usize) -> Result<Self, CacheLayoutError> {
        let whole = |&kind: &CacheKind| match kind {
            CacheKind::Window(window) if window < max_tokens => kind,
            _ => CacheKind::Full,
        };
        if let Some(layer) = layers.iter().position(|&kind| kind == CacheKind::Window(0)) {
            return Err(CacheLayoutError::EmptyWindow { layer });
        }
        let layers: Vec<CacheKind> = layers.iter().map(whole).collect();
        let mut kinds = layers.clone();
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
        let count = |kind: &CacheKind| layers.iter().filter(|&layer| layer == kind).count();
        let counts: Vec<usize> = kinds.iter().map(count).collect();
        let layers_per_page = layers_per_page(&counts);
        let mut groups = [CacheGroups::SINGLE; CacheGroups::MAX];
        for ((group, &kind), &layers) in groups.iter_mut().zip(&kinds).zip(&counts) {
            *group = CacheGroup {
                kind,
                layers,
                pages_per_block: layers.div_ceil(layers_per_page),
            };
        }
        let mut placed = vec![0; kinds.len()];
        let place = |kind: &CacheKind| {
            let group = kinds.iter().position(|other| other == kind).unwrap_or_default();
            let index = placed[group];
            placed[group] += 1;
            LayerPlace {
                group,
                plane: index / layers_per_page,
                column: index % layers_per_page,
            }
        };
        Ok(Self {
            places: layers.iter().map(place).collect(),
            groups: CacheGroups {
                groups,
                len: kinds.len(),
                layers_per_page,
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

/// The most for which padding stays small; 1, which needs none, always does.
fn layers_per_page(counts: &[usize]) -> usize {
    let layers: usize = counts.iter().sum();
    let padding = |per_page: usize| {
        let held: usize = counts.iter().map(|count| count.next_multiple_of(per_page)).sum();
        (held - layers) as f64
    };
    let most = counts.iter().copied().max().unwrap_or(1);
    let small = |&per_page: &usize| padding(per_page) <= layers as f64 * CacheGroups::MAX_PADDING;
    (1..=most).rev().find(small).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every `period`-th layer keeps everything, the others a window.
    fn alternating(layers: usize, period: usize) -> Vec<CacheKind> {
        let kind = |layer: usize| match (layer + 1).is_multiple_of(period) {
            true => CacheKind::Full,
            false => CacheKind::Window(1024),
        };
        (0..layers).map(kind).collect()
    }

    fn pages(layers: usize, period: usize) -> (usize, Vec<usize>) {
        let layout = CacheLayout::new(&alternating(layers, period), 1 << 17).unwrap();
        let pages = layout.groups.iter().map(|group| group.pages_per_block);
        (layout.groups.layers_per_page(), pages.collect())
    }

    #[test]
    fn one_kind_is_one_page() {
        for kind in [CacheKind::Full, CacheKind::Window(4096)] {
            let layout = CacheLayout::new(&[kind; 32], 1 << 17).unwrap();
            assert_eq!(layout.groups.as_slice().len(), 1);
            assert_eq!(layout.groups.as_slice()[0].pages_per_block, 1);
            assert_eq!(layout.groups.layers_per_page(), 32);
            assert!(
                layout
                    .places
                    .iter()
                    .enumerate()
                    .all(|(i, place)| place.column == i)
            );
        }
    }

    #[test]
    fn pages_are_as_large_as_two_percent_of_padding_let_them_be() {
        // Gemma 3: 270m, 1b, 4b, 12b, 27b.
        assert_eq!(pages(18, 6), (3, vec![1, 5]));
        assert_eq!(pages(26, 6), (2, vec![2, 11]));
        assert_eq!(pages(34, 6), (1, vec![5, 29]));
        assert_eq!(pages(48, 6), (8, vec![1, 5]));
        assert_eq!(pages(62, 6), (2, vec![5, 26]));
        // 50 layers of one kind and 99 of another: one unused layer of 149.
        let mut kinds = vec![CacheKind::Full; 50];
        kinds.extend([CacheKind::Window(8); 99]);
        let layout = CacheLayout::new(&kinds, 100).unwrap();
        assert_eq!(layout.groups.layers_per_page(), 50);
        let unused: Vec<_> = layout
            .groups
            .iter()
            .map(|group| layout.groups.unused_layers(group))
            .collect();
        assert_eq!(unused, [0, 1]);
    }

    #[test]
    fn every_layer_has_a_place_of_its_own() {
        for (layers, period) in [(18, 6), (26, 6), (34, 6), (62, 6), (7, 2)] {
            let kinds = alternating(layers, period);
            let layout = CacheLayout::new(&kinds, 1 << 17).unwrap();
            let mut places = layout.places.clone();
            places.sort_unstable_by_key(|place| (place.group, place.plane, place.column));
            places.dedup();
            assert_eq!(places.len(), layers);
            for (place, kind) in layout.places.iter().zip(kinds) {
                let group = layout.groups.as_slice()[place.group];
                assert_eq!(group.kind, kind);
                assert!(place.plane < group.pages_per_block);
                assert!(place.column < layout.groups.layers_per_page());
            }
        }
    }

    #[test]
    fn a_window_as_long_as_the_context_keeps_everything() {
        let layout = CacheLayout::new(&[CacheKind::Window(64), CacheKind::Full], 64).unwrap();
        assert_eq!(layout.groups.as_slice().len(), 1);
        assert_eq!(layout.groups.as_slice()[0].kind, CacheKind::Full);
    }

    #[test]
    fn what_cannot_share_a_cache_is_refused() {
        let new = |kinds: &[CacheKind]| CacheLayout::new(kinds, 100).unwrap_err();
        assert_eq!(new(&[]), CacheLayoutError::NoLayers);
        let empty = [CacheKind::Full, CacheKind::Window(0)];
        assert_eq!(new(&empty), CacheLayoutError::EmptyWindow { layer: 1 });
        let many = [1, 2, 3, 4].map(CacheKind::Window);
        assert_eq!(new(&many), CacheLayoutError::TooManyKinds);
    }
}
