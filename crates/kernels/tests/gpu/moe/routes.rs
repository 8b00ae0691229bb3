//! Where rows go, against the CPU.

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_kernels::cuda::{EXPERT_TILES, GpuRouter, GpuRoutes, MoeKernels};
use plimsoll_kernels::{Activation, ExpertActivation, Route, Router, RouterSoftmax, route};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use super::weights::{Experts, Format};
use crate::common;

const SOFTMAXES: [RouterSoftmax; 2] = [RouterSoftmax::All, RouterSoftmax::Chosen];

/// Memory of the routes of a step, one piece.
pub(super) struct Room {
    slab: GpuSlab,
    rows: usize,
    top_k: usize,
    experts: usize,
    tile: usize,
}

impl Room {
    /// Poisoned: nothing may rely on what was there.
    pub(super) fn new(gpu: &Gpu, rows: usize, top_k: usize, experts: usize, tile: usize) -> Self {
        let this = Self {
            slab: common::poisoned::<u8>(gpu, 0),
            rows,
            top_k,
            experts,
            tile,
        };
        let bytes = this.ends()[4];
        Self {
            slab: common::poisoned::<u8>(gpu, bytes),
            ..this
        }
    }

    /// Where each part ends.
    fn ends(&self) -> [usize; 5] {
        let routes = self.rows * self.top_k;
        let tiles = GpuRoutes::tile_list(routes, self.experts);
        let mut end = 0;
        [2 * routes, 4 * routes, 4 * routes, 4 * routes, 4 * tiles].map(|bytes| {
            end += bytes.next_multiple_of(256);
            end
        })
    }

    pub(super) fn routes(&self) -> GpuRoutes<'_> {
        let routes = self.rows * self.top_k;
        let (all, ends) = (self.slab.slice::<u8>(), self.ends());
        let at = |part: usize, bytes: usize| {
            let start = if part == 0 { 0 } else { ends[part - 1] };
            all.range(start..start + bytes)
        };
        GpuRoutes {
            chosen: at(0, 2 * routes).cast(),
            weights: at(1, 4 * routes).cast(),
            places: at(2, 4 * routes).cast(),
            sources: at(3, 4 * routes).cast(),
            tiles: at(4, 4 * GpuRoutes::tile_list(routes, self.experts)).cast(),
            rows: self.rows,
            top_k: self.top_k,
            experts: self.experts,
            tile: self.tile,
        }
    }
}

/// Numbers with many ties, infinities and what is no number now and then.
pub(super) fn random_logits(rng: &mut StdRng, rows: usize, experts: usize) -> Vec<f32> {
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0];
    let chance = [0.0, 0.0, 0.01][rng.random_range(0..3)];
    let few = rng.random_bool(0.5);
    (0..rows * experts)
        .map(|_| match (rng.random_bool(chance), few) {
            (true, _) => odd[rng.random_range(0..odd.len())],
            (false, true) => rng.random_range(-3..4) as f32 * 0.5,
            (false, false) => rng.random_range(-5.0..5.0),
        })
        .collect()
}

/// All routes, in the order of places, and the tiles, as the kernels found them.
fn found_routes(gpu: &Gpu, room: &Room, routes: &GpuRoutes<'_>) -> (Vec<(u32, f32)>, Vec<[i32; 4]>) {
    let count = room.rows * room.top_k;
    let sources: Vec<i32> = gpu.download(routes.sources).unwrap();
    let places: Vec<i32> = gpu.download(routes.places).unwrap();
    let weights: Vec<f32> = gpu.download(routes.weights).unwrap();
    assert_eq!(sources.len(), count);
    for (place, &source) in sources.iter().enumerate() {
        assert_eq!(places[source as usize], place as i32, "places and sources");
    }
    let of_place = |&source: &i32| {
        let row = source as usize / room.top_k;
        (row as u32, weights[source as usize])
    };
    let tiles: Vec<i32> = gpu.download(routes.tiles).unwrap();
    let tiles = tiles.as_chunks().0;
    let listed = tiles[0][2] as usize;
    (sources.iter().map(of_place).collect(), tiles[1..=listed].to_vec())
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn rows_go_where_a_cpu_sends_them() {
    let gpu = common::gpu();
    let mut rng = common::rng("rows_go_where_a_cpu_sends_them");
    let kernels = MoeKernels::load(&gpu).unwrap();
    let sizes = [
        (1, 1),
        (3, 8),
        (128, 128),
        (129, 8),
        (700, 128),
        (2000, 5),
        (40, 300),
        (300, 1024),
    ];
    for (rows, experts) in sizes {
        for _ in 0..6 {
            let top_k = rng.random_range(1..=experts.min(9));
            let softmax = *SOFTMAXES.choose(&mut rng).unwrap();
            let tile = *EXPERT_TILES.choose(&mut rng).unwrap();
            let mut logits = random_logits(&mut rng, rows, experts);
            let bias = rng.random_bool(0.3).then(|| common::random(&mut rng, experts));
            let scales = rng.random_bool(0.3).then(|| {
                (0..experts)
                    .map(|_| rng.random_range(0.5..1.5))
                    .collect::<Vec<f32>>()
            });
            let scale = if bias.is_none() && rng.random_bool(0.5) {
                0.125
            } else {
                1.0
            };
            let what = format!(
                "{rows} rows, {top_k} of {experts}, {softmax:?}, tiles of {tile}, times {scale}, of experts {}",
                scales.is_some()
            );

            let device = common::upload(&gpu, &logits);
            let device_bias = common::upload(&gpu, bias.as_deref().unwrap_or_default());
            let room = Room::new(&gpu, rows, top_k, experts, tile);
            let routes = room.routes();
            let bias_slice = bias.as_ref().map(|bias| device_bias.slice().range(0..bias.len()));
            let logits_slice = device.slice().range(0..logits.len());
            let device_scales = common::upload(&gpu, scales.as_deref().unwrap_or_default());
            let router = GpuRouter {
                scale,
                expert_scale: scales.as_ref().map(|_| device_scales.slice().range(0..experts)),
                ..GpuRouter::plain(bias_slice, softmax)
            };
            kernels.route(logits_slice, router, &routes).unwrap();
            let (found, tiles) = found_routes(&gpu, &room, &routes);

            for row in logits.chunks_exact_mut(experts) {
                let bias = bias.iter().flatten();
                row.iter_mut().zip(bias).for_each(|(x, b)| *x += b.to_f32());
            }
            let mut expected = vec![
                Route {
                    expert: 0,
                    row: 0,
                    weight: 0.0
                };
                rows * top_k
            ];
            let router = Router {
                softmax,
                scale,
                expert_scale: scales.as_deref(),
            };
            route(&mut logits, experts, router, &mut expected);
            for (place, (found, want)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(found.0, want.row, "{what}, place {place}: {want:?}");
                let near = (found.1 - want.weight).abs() <= 1e-5 * want.weight.abs() + 1e-9;
                assert!(
                    near || (found.1.is_nan() && want.weight.is_nan()),
                    "{what}, place {place}: {found:?} {want:?}"
                );
            }
            // Tiles are the places of each expert, in order, and none is empty.
            let mut next = 0;
            for [expert, first, count, _] in tiles {
                assert_eq!(first, next, "{what}");
                assert!((1..=tile as i32).contains(&count), "{what}: {count}");
                let own = &expected[first as usize..(first + count) as usize];
                assert!(own.iter().all(|route| route.expert == expert as u32), "{what}");
                next = first + count;
                let is_last = expected
                    .get(next as usize)
                    .is_none_or(|route| route.expert != expert as u32);
                assert!(is_last || count == tile as i32, "{what}: a tile that is not full");
            }
            assert_eq!(next as usize, rows * top_k, "{what}");
        }
    }
}

/// The kernel that sends one row to its experts itself writes what the others do, and multiplies as they do.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn one_row_goes_where_it_goes_among_others() {
    let gpu = common::gpu();
    let mut rng = common::rng("one_row_goes_where_it_goes_among_others");
    let kernels = MoeKernels::load(&gpu).unwrap();
    let (hidden, inner) = (64, 24);
    let activation = ExpertActivation::Glu(Activation::Silu);
    for experts in [1, 8, 128, 200, 1024] {
        let gate_up = Experts::random(&gpu, &mut rng, Format::Bf16, experts, [2 * inner, hidden], true);
        for top_k in [1, 8, 16, 17, 32].map(|most| most.min(experts)) {
            for softmax in SOFTMAXES {
                let logits = common::upload(&gpu, &random_logits(&mut rng, 1, experts));
                let bias = common::upload(&gpu, &common::random(&mut rng, experts));
                let scales: Vec<f32> = (0..experts).map(|_| rng.random_range(0.5..1.5)).collect();
                let scales = common::upload(&gpu, &scales);
                let router = GpuRouter {
                    scale: *[1.0, 0.125].choose(&mut rng).unwrap(),
                    expert_scale: rng.random_bool(0.5).then(|| scales.slice().range(0..experts)),
                    ..GpuRouter::plain(
                        rng.random_bool(0.5).then(|| bias.slice().range(0..experts)),
                        softmax,
                    )
                };
                let logits = logits.slice().range(0..experts);
                let x = common::upload(&gpu, &common::random(&mut rng, hidden));
                let x = x.slice().range(0..hidden);
                let [apart, together] = [false, true].map(|together| {
                    let room = Room::new(&gpu, 1, top_k, experts, EXPERT_TILES[0]);
                    let routes = room.routes();
                    let slab = common::poisoned::<bf16>(&gpu, top_k * inner);
                    let out = slab.slice().range(0..top_k * inner);
                    if together {
                        let device = &gate_up.device;
                        kernels
                            .route_gate_up(x, (logits, router), device, activation, &routes, out)
                            .unwrap();
                    } else {
                        kernels.route(logits, router, &routes).unwrap();
                        kernels
                            .gate_up(x, &gate_up.device, activation, &routes, out)
                            .unwrap();
                    }
                    let (found, tiles) = found_routes(&gpu, &room, &routes);
                    let weights: Vec<u32> = found.iter().map(|(_, weight)| weight.to_bits()).collect();
                    (
                        weights,
                        tiles,
                        common::download::<u16>(&gpu, &slab, top_k * inner),
                    )
                });
                assert!(
                    apart == together,
                    "{top_k} of {experts}, {softmax:?}: {apart:?} {together:?}"
                );
            }
        }
    }
}
