//! Layouts of published models, and of layers that cannot share a cache.

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

/// Columns of a page; and of each group the layers, columns, sharing layers, pages of a block and slices of it. No column is two layers'.
fn cut(layers: &[CacheLayer], block_size: usize) -> (usize, Vec<[usize; 5]>) {
    let layout = CacheLayout::of(layers, 1 << 17, BlockSize::new(block_size).unwrap()).unwrap();
    let groups = &layout.groups;
    let mut taken: Vec<(usize, usize, usize)> = Vec::new();
    for (layer, place) in layers.iter().zip(&layout.places) {
        let group = groups.as_slice()[place.group];
        let columns = layer.columns / group.slices;
        assert_eq!((group.kind, layer.columns % group.slices), (layer.kind, 0));
        assert!(place.plane < group.pages_per_slice());
        assert!(place.column + columns <= groups.columns_per_page());
        match layer.shares {
            Some(of) => assert_eq!(*place, layout.places[of]),
            None => taken.extend(
                (place.column..place.column + columns).map(|column| (place.group, place.plane, column)),
            ),
        }
    }
    let columns = taken.len();
    taken.sort_unstable();
    taken.dedup();
    assert_eq!(taken.len(), columns, "no column is two layers'");
    let of = |group: &CacheGroup| {
        let CacheGroup { layers, columns, .. } = *group;
        [
            layers,
            columns,
            group.sharing_layers,
            group.pages_per_block,
            group.slices,
        ]
    };
    (groups.columns_per_page(), groups.iter().map(of).collect())
}

#[test]
fn wider_layers_take_more_columns_and_sharing_ones_none() {
    // 31B, E2B, E4B.
    for (layers, want) in [
        (
            gemma4(60, 6, 0, 1, 2),
            (10, vec![[10, 10, 0, 1, 1], [50, 100, 0, 10, 1]]),
        ),
        (
            gemma4(35, 5, 20, 2, 1),
            (6, vec![[3, 6, 4, 1, 1], [12, 12, 16, 2, 1]]),
        ),
        (
            gemma4(42, 6, 18, 2, 1),
            (4, vec![[4, 8, 3, 2, 1], [20, 20, 15, 5, 1]]),
        ),
    ] {
        assert_eq!(cut(&layers, 16), want);
    }
}

/// 26B-A4B: five layers of one column leave half a page unused if pages have two; cut in two, blocks of the wide layers fit pages of five.
#[test]
fn blocks_of_wide_layers_are_cut_where_that_saves_memory() {
    let layers = gemma4(30, 6, 0, 1, 2);
    for block_size in [16, 32] {
        let want = (5, vec![[5, 5, 0, 1, 1], [25, 50, 0, 10, 2]]);
        assert_eq!(cut(&layers, block_size), want);
    }
    // Four tokens are no block.
    assert_eq!(
        cut(&layers, 8),
        (2, vec![[5, 5, 0, 3, 1], [25, 50, 0, 25, 1]]),
        "of the least padding"
    );
}

#[test]
fn little_of_each_group_is_unused_where_a_slice_is_no_wider_than_the_narrowest_layer() {
    let full = CacheLayer::from(CacheKind::Full);
    for (width, count, windows) in [1, 2, 4]
        .into_iter()
        .flat_map(|width| (1..20).flat_map(move |count| (1..40).map(move |windows| (width, count, windows))))
    {
        let windowed = CacheLayer {
            columns: width,
            ..CacheKind::Window(512).into()
        };
        let layers = [vec![full; count], vec![windowed; windows]].concat();
        let (per_page, groups) = cut(&layers, 32);
        for [_, columns, _, pages, _] in groups {
            let unused = pages * per_page - columns;
            assert!(unused as f64 <= 0.02 * columns as f64, "{per_page}: {layers:?}");
        }
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
        let error = CacheLayout::of(&[full, second], 100, BlockSize::default()).unwrap_err();
        assert_eq!(error, CacheLayoutError::NotShared { layer: 1, of });
    }
    let chain = [
        full,
        layer(CacheKind::Full, 1, Some(0)),
        layer(CacheKind::Full, 1, Some(1)),
    ];
    let error = CacheLayout::of(&chain, 100, BlockSize::default()).unwrap_err();
    assert_eq!(error, CacheLayoutError::NotShared { layer: 2, of: 1 });
}
