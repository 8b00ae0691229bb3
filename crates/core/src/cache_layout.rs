//! Which tokens of a request the layers of a model keep in the KV cache, and its division into pages of one size.
//!
//! Layers that keep the same form a group. A block is `block_size` tokens of all layers of one group; it takes one or several
//! pages, each with the same number of layers. So any free page serves any group: there is one pool, without a split that
//! is fixed beforehand (vLLM's hybrid KV cache manager shares pages between kinds of layers in the same way).
//!
//! A page is divided into columns, each of which has room for the keys and values of the narrowest layer; wider layers take
//! several. Layers that read the keys and values of another one have none ([`CacheLayer::shares`]).
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

/// What a layer asks of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheLayer {
    /// Which tokens it keeps.
    pub kind: CacheKind,
    /// Columns of a page that its keys and values take, at least 1.
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
    /// Columns that their keys and values take.
    pub columns: usize,
    /// Further layers, which read what these keep.
    pub sharing_layers: usize,
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

    /// Part of the memory that padding may take where larger pages make fewer of them.
    const MAX_PADDING: f64 = 0.02;

    const SINGLE: CacheGroup = CacheGroup {
        kind: CacheKind::Full,
        layers: 1,
        columns: 1,
        sharing_layers: 0,
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

/// Where a layer's keys and values are: from column `column` on in the `plane`-th page of each block of group `group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerPlace {
    /// Index of its group.
    pub group: usize,
    /// Which of the pages of a block.
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
    /// Groups layers, whose blocks all take the same bytes, by what they keep: [`Self::of`] without anything special.
    ///
    /// # Errors
    /// [`CacheLayoutError`].
    pub fn new(layers: &[CacheKind], max_tokens: usize) -> Result<Self, CacheLayoutError> {
        let layers: Vec<CacheLayer> = layers.iter().map(|&kind| kind.into()).collect();
        Self::of(&layers, max_tokens)
    }

    /// Groups layers by what they keep. A window of `max_tokens` tokens or more, the longest context, keeps everything.
    ///
    /// A page has as many columns as make little padding: at most 2 % of a block in all groups together, if a page can hold the widest
    /// layer. With one group that is all.
    ///
    /// # Errors
    /// [`CacheLayoutError`].
    pub fn of(layers: &[CacheLayer], max_tokens: usize) -> Result<Self, CacheLayoutError> {
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
        let columns_per_page = columns_per_page(&widths);
        let mut groups = [CacheGroups::SINGLE; CacheGroups::MAX];
        for ((group, &kind), widths) in groups.iter_mut().zip(&kinds).zip(&widths) {
            *group = CacheGroup {
                kind,
                layers: widths.len(),
                columns: widths.iter().sum(),
                sharing_layers: of_kind(kind).count() - widths.len(),
                pages_per_block: pages(widths, columns_per_page),
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
                    let (plane, column) = place(&mut ends[group], layer.columns, columns_per_page);
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

/// The page and column of the next layer of a group whose layers so far end at `end`: none is divided among pages.
fn place(end: &mut (usize, usize), columns: usize, per_page: usize) -> (usize, usize) {
    let (page, column) = *end;
    let start = match column + columns <= per_page {
        true => (page, column),
        false => (page + 1, 0),
    };
    *end = (start.0, start.1 + columns);
    start
}

/// Pages of a block of layers of these widths.
fn pages(widths: &[usize], per_page: usize) -> usize {
    let mut end = (0, 0);
    for &columns in widths {
        place(&mut end, columns, per_page);
    }
    end.0 + 1
}

/// The most for which padding stays small, at least as many as the widest layer takes.
fn columns_per_page(widths: &[Vec<usize>]) -> usize {
    let columns = |widths: &Vec<usize>| widths.iter().sum::<usize>();
    let all: usize = widths.iter().map(columns).sum();
    let padding = |per_page: usize| {
        let held: usize = widths
            .iter()
            .map(|widths| pages(widths, per_page) * per_page)
            .sum();
        (held - all) as f64
    };
    let most = widths.iter().map(columns).max().unwrap_or(1);
    let least = widths.iter().flatten().copied().max().unwrap_or(1);
    let small = |&per_page: &usize| padding(per_page) <= all as f64 * CacheGroups::MAX_PADDING;
    (least..=most).rev().find(small).unwrap_or(least)
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
        (layout.groups.columns_per_page(), pages.collect())
    }

    #[test]
    fn one_kind_is_one_page() {
        for kind in [CacheKind::Full, CacheKind::Window(4096)] {
            let layout = CacheLayout::new(&[kind; 32], 1 << 17).unwrap();
            assert_eq!(layout.groups.as_slice().len(), 1);
            assert_eq!(layout.groups.as_slice()[0].pages_per_block, 1);
            assert_eq!(layout.groups.columns_per_page(), 32);
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
        assert_eq!(layout.groups.columns_per_page(), 50);
        let unused: Vec<_> = layout
            .groups
            .iter()
            .map(|group| layout.groups.unused_columns(group))
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
                assert!(place.column < layout.groups.columns_per_page());
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
    /// Gemma 4: of each number of layers the last of six (or five) keeps everything, and is `full` columns wide, the others
    /// `window`; the last `sharing` of them read what the last keeping one of their kind keeps.
    fn gemma4(layers: usize, period: usize, sharing: usize, full: usize, window: usize) -> Vec<CacheLayer> {
        let kinds = alternating(layers, period);
        let keeping = layers - sharing;
        let layer = |(index, &kind): (usize, &CacheKind)| CacheLayer {
            kind,
            columns: if kind == CacheKind::Full { full } else { window },
            shares: (index >= keeping)
                .then(|| kinds[..keeping].iter().rposition(|&other| other == kind))
                .flatten(),
        };
        kinds.iter().enumerate().map(layer).collect()
    }

    #[test]
    fn wider_layers_take_more_columns_and_sharing_ones_none() {
        // 26B-A4B, 31B, E2B, E4B.
        for (layers, want) in [
            (gemma4(30, 6, 0, 1, 2), (2, vec![(5, 5, 0, 3), (25, 50, 0, 25)])),
            (
                gemma4(60, 6, 0, 1, 2),
                (10, vec![(10, 10, 0, 1), (50, 100, 0, 10)]),
            ),
            (gemma4(35, 5, 20, 2, 1), (6, vec![(3, 6, 4, 1), (12, 12, 16, 2)])),
            (gemma4(42, 6, 18, 2, 1), (4, vec![(4, 8, 3, 2), (20, 20, 15, 5)])),
        ] {
            let layout = CacheLayout::of(&layers, 1 << 17).unwrap();
            let groups = layout.groups.iter();
            let groups = groups.map(|group| {
                (
                    group.layers,
                    group.columns,
                    group.sharing_layers,
                    group.pages_per_block,
                )
            });
            assert_eq!((layout.groups.columns_per_page(), groups.collect()), want);
            let mut taken: Vec<(usize, usize, usize)> = Vec::new();
            for (layer, place) in layers.iter().zip(&layout.places) {
                let group = layout.groups.as_slice()[place.group];
                assert!(group.kind == layer.kind && place.plane < group.pages_per_block);
                assert!(place.column + layer.columns <= layout.groups.columns_per_page());
                match layer.shares {
                    Some(of) => assert_eq!(*place, layout.places[of]),
                    None => taken.extend(
                        (place.column..place.column + layer.columns)
                            .map(|column| (place.group, place.plane, column)),
                    ),
                }
            }
            let columns = taken.len();
            taken.sort_unstable();
            taken.dedup();
            assert_eq!(taken.len(), columns, "no column is two layers'");
        }
    }

    #[test]
    fn what_cannot_be_shared_is_refused() {
        let layer = |kind, columns, shares| CacheLayer {
            kind,
            columns,
            shares,
        };
        let full = layer(CacheKind::Full, 1, None);
        for (second, of) in [
            (layer(CacheKind::Window(8), 1, Some(0)), 0),
            (layer(CacheKind::Full, 2, Some(0)), 0),
            (layer(CacheKind::Full, 1, Some(1)), 1),
            (layer(CacheKind::Full, 1, Some(7)), 7),
        ] {
            let error = CacheLayout::of(&[full, second], 100).unwrap_err();
            assert_eq!(error, CacheLayoutError::NotShared { layer: 1, of });
        }
        let chain = [
            full,
            layer(CacheKind::Full, 1, Some(0)),
            layer(CacheKind::Full, 1, Some(1)),
        ];
        let error = CacheLayout::of(&chain, 100).unwrap_err();
        assert_eq!(error, CacheLayoutError::NotShared { layer: 2, of: 1 });
    }
}
