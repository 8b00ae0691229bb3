//! Whole layers of one row in one launch: one layer against a reference in `f64`, and several against launches of one.

mod apart;
mod steps;

use std::ops::Range;

use half::bf16;
use plimsoll_core::BlockSize;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab, GpuSlice};
use plimsoll_kernels::KvLayout;
use plimsoll_kernels::cuda::{
    GpuChainEnd, GpuKv, GpuKvElement, GpuNorm, GpuQkNorm, GpuRope, GpuRowAttention, GpuRowLayer,
    GpuRowLayers, GpuRun, Linears, RowLayerProducts, has_hopper_kernels, rope_frequencies,
};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};

use crate::chain::{EPS, Layer, add, normalise, round};
use crate::common::{self, wide, widen};
use crate::fused::{ACTIVATIONS, activate};

/// Of a whole layer, within which roundings add up.
const TOLERANCE: f64 = 1.5e-2;

#[derive(Clone, Copy, Debug)]
struct Size {
    width: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    inner: usize,
}

struct RandomLayer {
    projections: Layer,
    output: Layer,
    gate_up: Layer,
    down: Layer,
    norms: [Vec<f32>; 2],
    head_norms: Option<[Vec<f32>; 2]>,
    /// Keys, values.
    cache: [Vec<bf16>; 2],
}

impl RandomLayer {
    fn products(&self) -> RowLayerProducts<'_> {
        RowLayerProducts {
            projections: &self.projections.device,
            output: &self.output.device,
            gate_up: &self.gate_up.device,
            down: &self.down.device,
        }
    }
}

struct Case {
    what: String,
    size: Size,
    layout: KvLayout,
    block_stride: usize,
    /// Tokens in the cache, without the row.
    cached: usize,
    blocks: Vec<i32>,
    slot: i32,
    frequencies: Vec<f32>,
    factor: f32,
    activation: plimsoll_kernels::Activation,
    layers: Vec<RandomLayer>,
    projected: Vec<bf16>,
    hidden: Vec<bf16>,
}

/// What is there before and after a launch.
#[derive(Clone, Debug, PartialEq)]
struct State {
    projected: Vec<bf16>,
    hidden: Vec<bf16>,
    caches: Vec<[Vec<bf16>; 2]>,
}

impl Case {
    fn random(gpu: &Gpu, rng: &mut StdRng, size: Size, cached: usize, layers: usize) -> Self {
        let Size {
            width,
            heads,
            kv_heads,
            head_dim,
            inner,
        } = size;
        let layout = KvLayout {
            kv_heads,
            head_dim,
            block_size: BlockSize::new(*[16, 32].choose(rng).unwrap()).unwrap(),
        };
        let block_stride = common::block_stride(rng, layout);
        let tokens = layout.block_size.tokens();
        let mut blocks: Vec<i32> = (0..=(cached / tokens) as i32 + 3).collect();
        let all = blocks.len();
        blocks.shuffle(rng);
        let slot = match rng.random_bool(0.9) {
            true => slot_of(&blocks, tokens, cached),
            false => -1,
        };
        let projected = (heads + 2 * kv_heads) * head_dim;
        let [with_head_norms, projection_bias, output_bias, down_bias] =
            [(); 4].map(|()| rng.random_bool(0.5));
        let weights = |rng: &mut StdRng, len: usize| -> Vec<f32> {
            (0..len).map(|_| rng.random_range(0.5..1.5)).collect()
        };
        let layers = (0..layers).map(|_| RandomLayer {
            projections: Layer::random(gpu, rng, None, [projected, width], projection_bias),
            output: Layer::random(gpu, rng, None, [width, heads * head_dim], output_bias),
            gate_up: Layer::random(gpu, rng, None, [2 * inner, width], false),
            down: Layer::random(gpu, rng, None, [width, inner], down_bias),
            norms: [weights(rng, width), weights(rng, width)],
            head_norms: with_head_norms.then(|| [weights(rng, head_dim), weights(rng, head_dim)]),
            cache: [(); 2].map(|()| {
                let mut cache = common::random(rng, (all - 1) * block_stride + layout.elements(1));
                // What lies beyond the context must not count.
                let token = |block: i32, at: usize| block as usize * block_stride + at * head_dim;
                for (index, &block) in blocks.iter().enumerate() {
                    for at in (0..kv_heads * tokens).filter(|at| index * tokens + at % tokens >= cached) {
                        let start = token(block, at);
                        cache[start..start + head_dim].fill(bf16::NAN);
                    }
                }
                cache
            }),
        });
        let layers: Vec<_> = layers.collect();
        let turns: Vec<f32> = (0..head_dim / 2)
            .map(|pair| 1e4f32.powf(-2.0 * pair as f32 / head_dim as f32))
            .collect();
        Self {
            what: format!(
                "{size:?}, {cached} cached in blocks of {tokens}, slot {slot}, norms of heads {with_head_norms}, biases {:?}",
                [projection_bias, output_bias, down_bias]
            ),
            size,
            layout,
            block_stride,
            cached,
            blocks,
            slot,
            frequencies: turns,
            factor: rng.random_range(0.8..1.2),
            activation: *ACTIVATIONS.choose(rng).unwrap(),
            layers,
            projected: common::random(rng, projected),
            hidden: common::random(rng, width),
        }
    }

    fn state(&self) -> State {
        State {
            projected: self.projected.clone(),
            hidden: self.hidden.clone(),
            caches: self.layers.iter().map(|layer| layer.cache.clone()).collect(),
        }
    }

    /// A step of the row, with so many tokens in the cache.
    fn place(&self, gpu: &Gpu, cached: usize, slot: i32) -> Place {
        let run = GpuRun {
            len: 1,
            context_end: cached as i32 + 1,
            block_offset: 1,
            ..GpuRun::default()
        };
        Place {
            run: common::upload(gpu, &[run]),
            slot: common::upload(gpu, &[slot]),
            position: common::upload(gpu, &[cached as i32]),
        }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.size.head_dim as f32).sqrt()
    }

    /// q or k of a head, normalised, rotated and rounded.
    fn rotated(&self, head: &[f64], norm: Option<&Vec<f32>>) -> Vec<f64> {
        let square = head.iter().map(|x| x * x).sum::<f64>() / head.len() as f64;
        let scale = 1.0 / (square + f64::from(EPS)).sqrt();
        let x: Vec<f64> = match norm {
            Some(norm) => head
                .iter()
                .zip(norm)
                .map(|(x, weight)| x * scale * f64::from(*weight))
                .collect(),
            None => head.to_vec(),
        };
        let pairs = x.len() / 2;
        let turned = |at: usize| {
            let angle = self.cached as f64 * f64::from(self.frequencies[at % pairs]);
            let [cos, sin] = [angle.cos(), angle.sin()].map(|x| x * f64::from(self.factor));
            match at < pairs {
                true => round(x[at] * cos - x[at + pairs] * sin),
                false => round(x[at] * cos + x[at - pairs] * sin),
            }
        };
        (0..x.len()).map(turned).collect()
    }

    /// What one layer leaves behind.
    fn check(&self, at: usize, before: &State, after: &State) {
        let layer = &self.layers[at];
        let Size {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.size;
        let close = |part: &str, found: &[bf16], want: &[f64]| {
            let what = format!("{}: {part} of layer {at}", self.what);
            common::assert_close(&what, &widen(found), want, TOLERANCE);
        };
        let projected = wide(&before.projected);
        let head = |index: usize| &projected[index * head_dim..(index + 1) * head_dim];
        let norms = layer.head_norms.as_ref();
        let (q_norm, k_norm) = (norms.map(|norms| &norms[0]), norms.map(|norms| &norms[1]));
        let keys: Vec<_> = (0..kv_heads)
            .map(|kv| self.rotated(head(heads + kv), k_norm))
            .collect();
        let tokens = self.layout.block_size.tokens();
        let place = |slot: usize, kv: usize| {
            slot / tokens * self.block_stride + (kv * tokens + slot % tokens) * head_dim
        };
        let mut attended = Vec::new();
        for index in 0..heads {
            let kv = index / (heads / kv_heads);
            let q = self.rotated(head(index), q_norm);
            let of_cache = |which: usize, token: usize| {
                let block = self.blocks[token / tokens] as usize;
                let start = place(block * tokens + token % tokens, kv);
                wide(&layer.cache[which][start..start + head_dim])
            };
            let (mut all_keys, mut all_values) = (Vec::new(), Vec::new());
            for token in 0..self.cached {
                all_keys.push(of_cache(0, token));
                all_values.push(of_cache(1, token));
            }
            all_keys.push(keys[kv].clone());
            all_values.push(head(heads + kv_heads + kv).to_vec());
            let dot = |key: &Vec<f64>| {
                key.iter().zip(&q).map(|(x, y)| x * y).sum::<f64>() * f64::from(self.scale())
            };
            let scores: Vec<f64> = all_keys.iter().map(dot).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let total: f64 = weights.iter().sum();
            attended.extend((0..head_dim).map(|d| {
                let sum: f64 = weights
                    .iter()
                    .zip(&all_values)
                    .map(|(weight, value)| weight * value[d])
                    .sum();
                round(sum / total)
            }));
        }
        let hidden = add(&wide(&before.hidden), &layer.output.forward(&attended));
        let gate_up = layer.gate_up.forward(&normalise(&hidden, &layer.norms[1]));
        let (gate, up) = gate_up.split_at(self.size.inner);
        let activated = gate
            .iter()
            .zip(up)
            .map(|(x, up)| round(activate(self.activation, *x) * up));
        let hidden = add(&hidden, &layer.down.forward(&activated.collect::<Vec<_>>()));
        close("residual stream", &after.hidden, &hidden);
        if let Some(following) = self.layers.get(at + 1) {
            let projected = following
                .projections
                .forward(&normalise(&wide(&after.hidden), &following.norms[0]));
            close("what follows", &after.projected, &projected);
        }
        let mut expected = layer.cache.clone();
        for (kv, key) in keys.iter().enumerate().filter(|_| self.slot >= 0) {
            let start = place(self.slot as usize, kv);
            let written = start..start + head_dim;
            close("key", &after.caches[at][0][written.clone()], key);
            let value = (heads + kv_heads + kv) * head_dim;
            let value = &before.projected[value..value + head_dim];
            expected[0][written.clone()].copy_from_slice(&after.caches[at][0][written.clone()]);
            expected[1][written].copy_from_slice(value);
        }
        let bits = |cache: &Vec<bf16>| cache.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (found, expected) in after.caches[at].iter().zip(&expected) {
            assert!(
                bits(found) == bits(expected),
                "{}: the cache elsewhere",
                self.what
            );
        }
    }
}

/// What of a step says where the row is.
struct Place {
    run: GpuSlab,
    slot: GpuSlab,
    position: GpuSlab,
}

/// A case in device memory.
struct Memory {
    projected: GpuSlab,
    hidden: GpuSlab,
    norms: Vec<[GpuSlab; 2]>,
    head_norms: Vec<Option<[GpuSlab; 2]>>,
    caches: Vec<[GpuSlab; 2]>,
    blocks: GpuSlab,
    frequencies: GpuSlab,
    place: Place,
}

impl Memory {
    fn new(gpu: &Gpu, case: &Case) -> Self {
        let table: Vec<i32> = std::iter::once(i32::MAX)
            .chain(case.blocks.iter().copied())
            .collect();
        let both = |norms: &[Vec<f32>; 2]| norms.each_ref().map(|norm| common::upload(gpu, norm));
        let layers = || case.layers.iter();
        Self {
            projected: common::upload(gpu, &case.projected),
            hidden: common::upload(gpu, &case.hidden),
            norms: layers().map(|layer| both(&layer.norms)).collect(),
            head_norms: layers()
                .map(|layer| layer.head_norms.as_ref().map(both))
                .collect(),
            caches: layers()
                .map(|layer| layer.cache.each_ref().map(|cache| common::upload(gpu, cache)))
                .collect(),
            blocks: common::upload(gpu, &table),
            frequencies: common::upload(gpu, &rope_frequencies(&case.frequencies)),
            place: case.place(gpu, case.cached, case.slot),
        }
    }

    fn put(&self, gpu: &Gpu, state: &State) {
        let put = |values: &[bf16], to: &GpuSlab| {
            gpu.upload(values, part(to, values.len())).expect("a copy");
        };
        put(&state.projected, &self.projected);
        put(&state.hidden, &self.hidden);
        for (values, to) in state.caches.iter().flatten().zip(self.caches.iter().flatten()) {
            put(values, to);
        }
    }

    fn state(&self, gpu: &Gpu, case: &Case) -> State {
        let caches = case.layers.iter().zip(&self.caches).map(|(layer, caches)| {
            let len = layer.cache[0].len();
            caches.each_ref().map(|cache| common::download(gpu, cache, len))
        });
        State {
            projected: common::download(gpu, &self.projected, case.projected.len()),
            hidden: common::download(gpu, &self.hidden, case.hidden.len()),
            caches: caches.collect(),
        }
    }

    fn norm(&self, case: &Case, at: usize, which: usize) -> GpuNorm<'_> {
        GpuNorm {
            weight: part(&self.norms[at][which], case.size.width),
            eps: EPS,
        }
    }

    fn qk_norm(&self, case: &Case, at: usize) -> Option<GpuQkNorm<'_>> {
        let of_heads = self.head_norms[at].as_ref();
        of_heads.map(|[q, k]| GpuQkNorm {
            q: part(q, case.size.head_dim),
            k: part(k, case.size.head_dim),
            eps: EPS,
        })
    }

    fn kv(&self, case: &Case, at: usize) -> GpuKv<'_> {
        let bytes = 2 * case.layers[at].cache[0].len();
        let [k, v] = self.caches[at].each_ref().map(|cache| part(cache, bytes));
        GpuKv {
            k,
            v,
            block_stride: case.block_stride,
            element: GpuKvElement::Bf16,
            k_scale: 1.0,
            v_scale: 1.0,
        }
    }

    fn rope(&self, case: &Case) -> GpuRope<'_> {
        GpuRope {
            positions: part(&self.place.position, 1),
            axes: None,
            frequencies: part(&self.frequencies, case.size.head_dim),
            factor: case.factor,
            query_scale: None,
        }
    }

    /// The projections of this layer, from the residual stream on.
    fn next<'a>(&'a self, case: &'a Case, at: usize) -> Option<GpuChainEnd<'a>> {
        case.layers.get(at).map(|layer| GpuChainEnd {
            norm: self.norm(case, at, 0),
            linear: &layer.projections.device,
            out: part(&self.projected, case.projected.len()),
        })
    }

    /// These layers, and the projections that follow if there are any.
    fn forward(&self, case: &Case, linears: &Linears, at: Range<usize>) -> Result<(), GpuError> {
        let layers = at.clone().map(|index| GpuRowLayer {
            products: case.layers[index].products(),
            qk_norm: self.qk_norm(case, index),
            kv: self.kv(case, index),
            norm: self.norm(case, index, 1),
            first_norm: self.norm(case, index, 0),
        });
        let layers: Vec<_> = layers.collect();
        linears.forward_row_layers(&GpuRowLayers {
            layers: &layers,
            attention: GpuRowAttention {
                heads: case.size.heads,
                layout: case.layout,
                scale: case.scale(),
                rope: self.rope(case),
                run: part(&self.place.run, 1),
                blocks: part(&self.blocks, 1 + case.blocks.len()),
                slot: part(&self.place.slot, 1),
            },
            activation: case.activation,
            projected: part(&self.projected, case.projected.len()),
            hidden: part(&self.hidden, case.size.width),
            next: self.next(case, at.end),
        })
    }

    /// What these layers leave behind of a state.
    fn run(&self, gpu: &Gpu, linears: &Linears, case: &Case, at: Range<usize>, before: &State) -> State {
        self.put(gpu, before);
        self.forward(case, linears, at).expect("a launch");
        self.state(gpu, case)
    }
}

impl State {
    /// Where caches may be NaN.
    fn bits(&self) -> Vec<u16> {
        let all = [&self.projected, &self.hidden];
        let all = all.into_iter().chain(self.caches.iter().flatten());
        all.flatten().map(|x| x.to_bits()).collect()
    }
}

fn part<T: plimsoll_device::Pod>(slab: &GpuSlab, len: usize) -> GpuSlice<'_, T> {
    slab.slice::<T>().range(0..len)
}

/// Where the token behind so many goes.
fn slot_of(blocks: &[i32], tokens: usize, cached: usize) -> i32 {
    blocks[cached / tokens] * tokens as i32 + (cached % tokens) as i32
}

const fn size(width: usize, heads: usize, kv_heads: usize, head_dim: usize, inner: usize) -> Size {
    Size {
        width,
        heads,
        kv_heads,
        head_dim,
        inner,
    }
}

/// Qwen2.5-0.5B's, Gemma 3's smallest, Qwen3-0.6B's, Llama 3.2's smallest, Qwen2.5-1.5B's, and the least and the most there can be.
const SIZES: [Size; 7] = [
    size(896, 14, 2, 64, 4864),
    size(640, 10, 5, 64, 1536),
    size(1024, 16, 8, 128, 3072),
    size(2048, 32, 8, 64, 8192),
    size(1536, 12, 2, 128, 8960),
    size(512, 2, 1, 64, 128),
    size(512, 6, 6, 128, 11520),
];

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn whole_layers_of_one_row() {
    let gpu = common::gpu();
    let linears = crate::linear::linears(&gpu);
    let mut rng = common::rng("whole_layers_of_one_row");
    let contexts = [0, 1, 15, 16, 250, 256, 257, 1000, 1153, 2305, 3000, 5000, 9000];
    for (index, &cached) in contexts.iter().chain(&[250; 7]).enumerate() {
        let case = Case::random(&gpu, &mut rng, SIZES[index % SIZES.len()], cached, 3);
        for layer in &case.layers {
            let can = linears.can_chain_layer(&layer.products(), case.size.heads, &case.layout);
            assert_eq!(can, has_hopper_kernels(&gpu), "{}", case.what);
            if !can {
                return;
            }
        }
        let memory = Memory::new(&gpu, &case);
        let mut state = case.state();
        for at in 0..case.layers.len() {
            let after = memory.run(&gpu, &linears, &case, at..at + 1, &state);
            case.check(at, &state, &after);
            state = after;
        }
        // The last layer's launch left what it got to project from.
        state.projected = case.projected.clone();
        for _ in 0..3 {
            let together = memory.run(&gpu, &linears, &case, 0..case.layers.len(), &case.state());
            assert!(
                together.bits() == state.bits(),
                "{}: other bits in one launch",
                case.what
            );
        }
    }
}

/// Layers that are too narrow for every block to have a part, or too wide.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn layers_of_other_sizes_are_none() {
    let gpu = common::gpu();
    let linears = crate::linear::linears(&gpu);
    let mut rng = common::rng("layers_of_other_sizes_are_none");
    for of in [
        size(384, 6, 6, 64, 1024),
        size(576, 9, 3, 64, 1536),
        size(2304, 8, 4, 128, 512),
        size(512, 2, 1, 64, 11648),
    ] {
        let case = Case::random(&gpu, &mut rng, of, 1, 1);
        let products = case.layers[0].products();
        assert!(
            !linears.can_chain_layer(&products, of.heads, &case.layout),
            "{of:?}"
        );
    }
}
