//! Where rows go, against the CPU.

use std::sync::Arc;

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_kernels::cuda::{
    EXPERT_TILES, GpuExpertLoads, GpuLinear, GpuMatrix, GpuRouter, GpuRoutes, GpuWeight, MoeKernels,
    has_hopper_kernels,
};
use plimsoll_kernels::{Activation, ExpertActivation, Route, Router, RouterSoftmax, route};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use super::weights::{Experts, Format};
use crate::common;

const SOFTMAXES: [RouterSoftmax; 2] = [RouterSoftmax::All, RouterSoftmax::Chosen];

/// What was counted of each expert before.
const LOAD_BEFORE: u32 = u32::MAX - 2;

/// Memory of the routes of a step, one piece.
pub(super) struct Room {
    slab: GpuSlab,
    /// Counts of rows of each expert.
    loads: GpuSlab,
    /// The rows that count, the others are padding; also in device memory.
    real_rows: (usize, GpuSlab),
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
            loads: common::upload(gpu, &vec![LOAD_BEFORE; experts]),
            real_rows: (rows, common::upload(gpu, &[rows as i32])),
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

    /// Only the first rows are not padding.
    fn of_real_rows(self, gpu: &Gpu, rows: usize) -> Self {
        Self {
            real_rows: (rows, common::upload(gpu, &[rows as i32])),
            ..self
        }
    }

    fn loads(&self, gpu: &Gpu) -> Vec<u32> {
        common::download(gpu, &self.loads, self.experts)
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
            loads: Some(GpuExpertLoads {
                counts: self.loads.slice().range(0..self.experts),
                rows: self.real_rows.1.slice().range(0..1),
            }),
            shared: false,
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

/// How logits become weights, on both sides.
struct RandomRouter {
    softmax: RouterSoftmax,
    scale: f32,
    bias: Option<Vec<bf16>>,
    scales: Option<Vec<f32>>,
    device_bias: GpuSlab,
    device_scales: GpuSlab,
}

impl RandomRouter {
    fn new(gpu: &Gpu, rng: &mut StdRng, experts: usize) -> Self {
        let bias = rng.random_bool(0.3).then(|| common::random(rng, experts));
        let scales = (0..experts).map(|_| rng.random_range(0.5..1.5));
        let scales: Option<Vec<f32>> = Some(scales.collect()).filter(|_| rng.random_bool(0.3));
        Self {
            softmax: *SOFTMAXES.choose(rng).unwrap(),
            scale: if bias.is_none() && rng.random_bool(0.5) {
                0.125
            } else {
                1.0
            },
            device_bias: common::upload(gpu, bias.as_deref().unwrap_or_default()),
            device_scales: common::upload(gpu, scales.as_deref().unwrap_or_default()),
            bias,
            scales,
        }
    }

    fn what(&self) -> String {
        let Self {
            softmax,
            scale,
            bias,
            scales,
            ..
        } = self;
        let (bias, scales) = (bias.is_some(), scales.is_some());
        format!("{softmax:?}, times {scale}, bias {bias}, of experts {scales}")
    }

    fn on_gpu(&self) -> GpuRouter<'_> {
        let bias = self.bias.as_ref();
        let scales = self.scales.as_ref();
        GpuRouter {
            scale: self.scale,
            expert_scale: scales.map(|scales| self.device_scales.slice().range(0..scales.len())),
            ..GpuRouter::plain(
                bias.map(|bias| self.device_bias.slice().range(0..bias.len())),
                self.softmax,
            )
        }
    }

    /// So many routes of all rows, by the CPU.
    fn expected(&self, mut logits: Vec<f32>, experts: usize, routes: usize) -> Vec<Route> {
        for row in logits.chunks_exact_mut(experts) {
            let bias = self.bias.iter().flatten();
            row.iter_mut().zip(bias).for_each(|(x, b)| *x += b.to_f32());
        }
        let none = Route {
            expert: 0,
            row: 0,
            weight: 0.0,
        };
        let mut expected = vec![none; routes];
        let router = Router {
            softmax: self.softmax,
            scale: self.scale,
            expert_scale: self.scales.as_deref(),
        };
        route(&mut logits, experts, router, &mut expected);
        expected
    }
}

/// Places are as expected, rows that are no padding are counted, and tiles are the places of each expert, in order, and none is empty.
fn compare(gpu: &Gpu, room: &Room, expected: &[Route], what: &str) {
    let (found, tiles) = found_routes(gpu, room, &room.routes());
    for (place, (found, want)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.0, want.row, "{what}, place {place}: {want:?}");
        let near = (found.1 - want.weight).abs() <= 1e-5 * want.weight.abs() + 1e-9;
        assert!(
            near || (found.1.is_nan() && want.weight.is_nan()),
            "{what}, place {place}: {found:?} {want:?}"
        );
    }
    let mut next = 0;
    for [expert, first, count, _] in tiles {
        assert_eq!(first, next, "{what}");
        assert!((1..=room.tile as i32).contains(&count), "{what}: {count}");
        let own = &expected[first as usize..(first + count) as usize];
        assert!(own.iter().all(|route| route.expert == expert as u32), "{what}");
        next = first + count;
        let is_last = expected
            .get(next as usize)
            .is_none_or(|route| route.expert != expert as u32);
        assert!(
            is_last || count == room.tile as i32,
            "{what}: a tile that is not full"
        );
    }
    assert_eq!(next as usize, expected.len(), "{what}");
    let mut loads = vec![LOAD_BEFORE; room.experts];
    let (real_rows, _) = room.real_rows;
    for route in expected.iter().filter(|route| (route.row as usize) < real_rows) {
        let load = &mut loads[route.expert as usize];
        *load = load.wrapping_add(1);
    }
    assert_eq!(room.loads(gpu), loads, "{what}, {real_rows} real rows");
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
        (1900, 128),
        (2000, 5),
        (8192, 128),
        (8191, 60),
        (5000, 1),
        (40, 300),
        (300, 1024),
    ];
    for (rows, experts) in sizes {
        for _ in 0..6 {
            let top_k = rng.random_range(1..=experts.min(9));
            let tile = *EXPERT_TILES.choose(&mut rng).unwrap();
            let mut logits = random_logits(&mut rng, rows, experts);
            let are_alike = rng.random_bool(0.2);
            if are_alike {
                logits = logits[..experts].repeat(rows);
            }
            let router = RandomRouter::new(&gpu, &mut rng, experts);
            let what = format!(
                "{rows} rows, alike {are_alike}, {top_k} of {experts}, tiles of {tile}, {}",
                router.what()
            );
            let device = common::upload(&gpu, &logits);
            let real_rows = rng.random_range(0..=rows);
            let room = Room::new(&gpu, rows, top_k, experts, tile).of_real_rows(&gpu, real_rows);
            let logits_slice = device.slice().range(0..logits.len());
            kernels
                .route(logits_slice, router.on_gpu(), &room.routes())
                .unwrap();
            compare(
                &gpu,
                &room,
                &router.expected(logits, experts, rows * top_k),
                &what,
            );
        }
    }
}

/// A router's weights `[experts, k]` in device memory.
fn linear(gpu: &Gpu, weight: &[bf16], experts: usize) -> GpuLinear {
    let slab = Arc::new(common::upload(gpu, weight));
    let matrix = GpuMatrix::Bf16(GpuWeight::new(&slab, 0..weight.len()));
    GpuLinear::new(matrix, None, experts, weight.len() / experts)
}

/// The kernel that computes the router's product too. Its sums are exact here, so what is equal is so on both sides.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn few_rows_go_where_a_cpu_sends_them_by_its_own_product() {
    let gpu = common::gpu();
    let mut rng = common::rng("few_rows_go_where_a_cpu_sends_them_by_its_own_product");
    let kernels = MoeKernels::load(&gpu).unwrap();
    let random = |rng: &mut StdRng, len: usize| -> Vec<bf16> {
        let quarters = (0..len).map(|_| rng.random_range(-2..=2) as f32);
        quarters.map(|x| bf16::from_f32(x / 4.0)).collect()
    };
    for experts in [1, 8, 20, 32, 60, 96, 128, 200, 256] {
        for _ in 0..12 {
            let k = 32 * rng.random_range(1..=if experts > 128 { 64 } else { 90 });
            let rows = rng.random_range(2..=32);
            let top_k = rng.random_range(1..=experts.min(9).min(256 / rows));
            let tile = *EXPERT_TILES.choose(&mut rng).unwrap();
            let (x, weight) = (random(&mut rng, rows * k), random(&mut rng, experts * k));
            let router = RandomRouter::new(&gpu, &mut rng, experts);
            let what = format!(
                "{rows} rows of {k}, {top_k} of {experts}, tiles of {tile}, {}",
                router.what()
            );

            let device = common::upload(&gpu, &x);
            let linear = linear(&gpu, &weight, experts);
            // Fewer rows than the step has tokens too: those of a last layer.
            let real_rows = rng.random_range(0..=rows + 1);
            let room = Room::new(&gpu, rows, top_k, experts, tile).of_real_rows(&gpu, real_rows);
            let fuses = kernels.fuses_router(&linear, &room.routes());
            assert_eq!(fuses, has_hopper_kernels(&gpu), "{what}");
            if !fuses {
                return;
            }
            let x_slice = device.slice().range(0..x.len());
            // The gate of an expert that all rows go to, now and then.
            let gate = random(&mut rng, k);
            let gate_linear = self::linear(&gpu, &gate, 1);
            assert!(kernels.fuses_gate(&gate_linear));
            let gates = common::upload(&gpu, &vec![f32::NAN; rows]);
            let is_gated = rng.random_bool(0.5);
            let with_gate = is_gated.then(|| (&gate_linear, gates.slice().range(0..rows)));
            kernels
                .route_inputs(x_slice, &linear, router.on_gpu(), &room.routes(), with_gate)
                .unwrap();

            let (x, weight) = (common::widen(&x), common::widen(&weight));
            let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f32>();
            if is_gated {
                let gate = common::widen(&gate);
                let expected: Vec<f32> = x.chunks_exact(k).map(|x| dot(x, &gate)).collect();
                assert_eq!(
                    common::download::<f32>(&gpu, &gates, rows),
                    expected,
                    "{what}: gates"
                );
            }
            let logits = x.chunks_exact(k).flat_map(|x| {
                let weights = weight.chunks_exact(k);
                weights.map(move |weight| dot(x, weight))
            });
            let expected = router.expected(logits.collect(), experts, rows * top_k);
            compare(&gpu, &room, &expected, &what);
        }
    }
}

/// Experts and weights, bit for bit, of each row.
fn of_rows(gpu: &Gpu, room: &Room) -> Vec<Vec<(i32, u32)>> {
    let routes = room.routes();
    let (_, tiles) = found_routes(gpu, room, &routes);
    let places: Vec<i32> = gpu.download(routes.places).unwrap();
    let weights: Vec<f32> = gpu.download(routes.weights).unwrap();
    let expert_at = |place: i32| {
        let tile = tiles
            .iter()
            .find(|tile| (tile[1]..tile[1] + tile[2]).contains(&place));
        tile.expect("each place is in a tile")[0]
    };
    let all: Vec<_> = places
        .iter()
        .zip(&weights)
        .map(|(&place, weight)| (expert_at(place), weight.to_bits()))
        .collect();
    all.chunks(room.top_k).map(<[_]>::to_vec).collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn few_rows_do_not_depend_on_those_beside_them() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("few_rows_do_not_depend_on_those_beside_them");
    let kernels = MoeKernels::load(&gpu).unwrap();
    for (experts, top_k, k) in [
        (128, 8, 2048),
        (32, 4, 2880),
        (128, 4, 2880),
        (60, 4, 2048),
        (256, 8, 2048),
    ] {
        let x = common::random(&mut rng, 32 * k);
        let linear = linear(&gpu, &common::random(&mut rng, experts * k), experts);
        let run = |rows: &[usize]| {
            let x: Vec<bf16> = rows.iter().flat_map(|row| &x[row * k..][..k]).copied().collect();
            let device = common::upload(&gpu, &x);
            let room = Room::new(&gpu, rows.len(), top_k, experts, EXPERT_TILES[0]);
            let router = GpuRouter {
                scale: 0.01,
                ..GpuRouter::plain(None, RouterSoftmax::Chosen)
            };
            kernels
                .route_inputs(
                    device.slice().range(0..x.len()),
                    &linear,
                    router,
                    &room.routes(),
                    None,
                )
                .unwrap();
            of_rows(&gpu, &room)
        };
        let all = run(&(0..32).collect::<Vec<_>>());
        for _ in 0..20 {
            let rows: Vec<usize> = (0..rng.random_range(2..=32))
                .map(|_| rng.random_range(0..32))
                .collect();
            for (found, &row) in run(&rows).iter().zip(&rows) {
                assert_eq!(found, &all[row], "{top_k} of {experts}, row {row} of {rows:?}");
            }
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
                        room.loads(&gpu),
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
