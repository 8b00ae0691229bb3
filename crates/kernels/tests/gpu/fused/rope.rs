//! Norm of q and k, rotation, write to the cache.

use plimsoll_kernels::cuda::{GpuKvElement, PairAxes};
use plimsoll_kernels::{CachedValues, QueryScale};

use super::*;
use crate::cache::{Cache, to_e4m3};

struct Case {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    pairs: usize,
    block_size: usize,
    qkv: Vec<bf16>,
    positions: Vec<i32>,
    /// Where positions have three numbers: with which of them each pair turns, and them, of which the first is the position.
    axes: Option<(Vec<usize>, Vec<[u32; 3]>)>,
    /// A slot per row, or -1.
    slots: Vec<i32>,
    blocks: usize,
    norm: Option<(Vec<f32>, Vec<f32>)>,
    frequencies: Vec<f32>,
    factor: f32,
    query_scale: Option<QueryScale>,
    /// On a GPU there are gates between q and k.
    gated: bool,
    values: CachedValues,
    /// Blocks of the cache with nothing of the layer in them, between its own.
    between: usize,
}

/// Rotated q `[tokens, heads, dim]`, and of each row with a slot k and v `[rows, 2, kv_heads, dim]`.
struct Out {
    q: Vec<f32>,
    kv: Vec<f32>,
}

impl Case {
    fn new(rng: &mut StdRng, [heads, kv_heads, dim, pairs]: [usize; 4], norm: bool) -> Self {
        let tokens: usize = rng.random_range(1..50);
        let block_size = [8, 16, 32][rng.random_range(0..3)];
        let blocks = tokens.div_ceil(block_size) + 2;
        // Consecutive positions of one request in blocks of decreasing number, far from the start; some rows are padding.
        let start = [0, 16_384 - 20, 131_000, 1_000_000][rng.random_range(0..4)] / block_size * block_size;
        let slot = |i: usize| (blocks - 1 - i / block_size) * block_size + i % block_size;
        let theta = [1e4f32, 5e5][rng.random_range(0..2)];
        Self {
            heads,
            kv_heads,
            dim,
            pairs,
            block_size,
            qkv: Vec::new(),
            positions: (0..tokens).map(|i| (start + i) as i32).collect(),
            axes: (pairs <= 128 && rng.random_bool(0.4)).then(|| {
                let position = |i: usize, rng: &mut StdRng| {
                    let mut near = || (start + i) as u32 + rng.random_range(0..100);
                    [(start + i) as u32, near(), near()]
                };
                (
                    (0..pairs).map(|_| rng.random_range(0..3)).collect(),
                    (0..tokens).map(|i| position(i, rng)).collect(),
                )
            }),
            slots: (0..tokens)
                .map(|i| if rng.random_bool(0.2) { -1 } else { slot(i) as i32 })
                .collect(),
            blocks,
            norm: norm.then(|| (random_f32(rng, dim), random_f32(rng, dim))),
            frequencies: (0..pairs)
                .map(|i| theta.powf(-(i as f32) / pairs as f32))
                .collect(),
            factor: [1.0, 1.25][rng.random_range(0..2)],
            query_scale: rng.random_bool(0.5).then_some(QueryScale {
                beta: 0.1,
                original: 16_384,
            }),
            gated: rng.random_bool(0.3),
            values: match rng.random_range(0..4) {
                0 if norm => CachedValues::Normalised(EPS),
                1 if norm => CachedValues::NormalisedKeys(EPS),
                _ => CachedValues::Projected,
            },
            between: rng.random_range(0..2),
        }
        .projected(rng)
    }

    /// With as many heads as are projected.
    fn projected(self, rng: &mut StdRng) -> Self {
        Self {
            qkv: random(rng, self.positions.len() * self.width()),
            ..self
        }
    }

    /// Heads of the values that are projected.
    fn value_heads(&self) -> usize {
        match self.values {
            CachedValues::NormalisedKeys(_) => 0,
            CachedValues::Projected | CachedValues::Normalised(_) => self.kv_heads,
        }
    }

    /// Elements of a block, and from one to the next.
    fn block(&self) -> [usize; 2] {
        let own = self.kv_heads * self.block_size * self.dim;
        [own, own * (1 + self.between)]
    }

    /// The projections with gates, if there are any, that nobody reads.
    fn with_gates(&self) -> Vec<bf16> {
        let rows = self.qkv.chunks_exact(self.width());
        let (q, gates) = (self.heads * self.dim, vec![bf16::NAN; self.gates()]);
        rows.flat_map(|row| [&row[..q], &gates, &row[q..]].concat())
            .collect()
    }

    /// The same without them. They are as they were.
    fn without_gates(&self, rows: &[f32]) -> Vec<f32> {
        let q = self.heads * self.dim;
        let rows = rows.chunks_exact(self.width() + self.gates());
        rows.flat_map(|row| {
            let (gates, kv) = row[q..].split_at(self.gates());
            assert!(gates.iter().all(|x| x.is_nan()), "gates are left alone");
            [&row[..q], kv].concat()
        })
        .collect()
    }

    fn gates(&self) -> usize {
        usize::from(self.gated) * self.heads * self.dim
    }

    fn width(&self) -> usize {
        (self.heads + self.kv_heads + self.value_heads()) * self.dim
    }

    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let (mut q, mut kv) = (Vec::new(), Vec::new());
        for (row, x) in self.qkv.chunks_exact(self.width()).enumerate() {
            let mut heads: Vec<Vec<f64>> = x
                .chunks_exact(self.dim)
                .map(|head| head.iter().map(|&x| f64::from(x)).collect())
                .collect();
            let keys = self.heads..self.heads + self.kv_heads;
            let mut values = match self.values {
                CachedValues::NormalisedKeys(_) => heads[keys.clone()].to_vec(),
                CachedValues::Projected | CachedValues::Normalised(_) => heads.split_off(keys.end),
            };
            if self.values != CachedValues::Projected {
                for head in &mut values {
                    let mean = head.iter().map(|x| x * x).sum::<f64>() / self.dim as f64;
                    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
                    head.iter_mut().for_each(|x| *x *= scale);
                }
            }
            for (i, head) in heads.iter_mut().enumerate() {
                if let Some((q, k)) = &self.norm {
                    let weight = if i < self.heads { q } else { k };
                    let mean = head.iter().map(|x| x * x).sum::<f64>() / self.dim as f64;
                    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
                    head.iter_mut()
                        .zip(weight)
                        .for_each(|(x, &w)| *x *= scale * f64::from(w));
                }
                for (pair, &frequency) in self.frequencies.iter().enumerate() {
                    let position = match &self.axes {
                        None => f64::from(self.positions[row]),
                        Some((axes, positions)) => f64::from(positions[row][axes[pair]]),
                    };
                    let (sin, cos) = (position * f64::from(frequency)).sin_cos();
                    let (sin, cos) = (sin * f64::from(self.factor), cos * f64::from(self.factor));
                    let (a, b) = (head[pair], head[pair + self.pairs]);
                    head[pair] = a * cos - b * sin;
                    head[pair + self.pairs] = b * cos + a * sin;
                }
                if let (Some(scale), true) = (self.query_scale, i < self.heads) {
                    let passed = (self.positions[row] as usize / scale.original) as f64;
                    let scale = 1.0 + f64::from(scale.beta) * (1.0 + passed).ln();
                    head.iter_mut().for_each(|x| *x *= scale);
                }
            }
            q.extend(heads[..self.heads].concat());
            if self.slots[row] >= 0 {
                kv.extend(heads[keys].concat());
                kv.extend(values.concat());
            }
        }
        (q, kv)
    }

    /// Rows with a slot from a cache whose element `(kv_head, token, element)` of a block is at `index`.
    fn gather(
        &self,
        k: &[f32],
        v: &[f32],
        index: impl Fn(usize, usize, usize, usize) -> [usize; 2],
    ) -> Vec<f32> {
        let mut out = Vec::new();
        for &slot in self.slots.iter().filter(|&&slot| slot >= 0) {
            let (block, token) = (slot as usize / self.block_size, slot as usize % self.block_size);
            for (cache, which) in [(k, 0), (v, 1)] {
                for head in 0..self.kv_heads {
                    out.extend((0..self.dim).map(|d| cache[index(block, head, token, d)[which]]));
                }
            }
        }
        out
    }

    fn check(&self, name: &str, out: &Out) {
        let (q, kv) = self.reference();
        let shape = format!(
            "{name}: {} + {} + {} heads of {}, {} pairs, {:?}, {} rows from position {}, norm {}, factor {}, {:?}, axes {}",
            self.heads,
            self.kv_heads,
            self.value_heads(),
            self.dim,
            self.pairs,
            self.values,
            self.positions.len(),
            self.positions[0],
            self.norm.is_some(),
            self.factor,
            self.query_scale,
            self.axes.is_some(),
        );
        assert_close(&format!("{shape}: q"), &out.q, &q, BF16);
        assert_close(&format!("{shape}: kv"), &out.kv, &kv, BF16);
    }
}

const WIDE: Cache = Cache {
    element: GpuKvElement::Bf16,
    k_scale: 1.0,
    v_scale: 1.0,
};

/// Elements of 16 bits.
fn wide(bytes: &[u8]) -> Vec<bf16> {
    let pairs = bytes.chunks_exact(2);
    pairs
        .map(|pair| bf16::from_le_bytes([pair[0], pair[1]]))
        .collect()
}

const SHAPES: [[usize; 4]; 13] = [
    [32, 8, 128, 64],
    [9, 3, 64, 32],
    [1, 1, 96, 48],
    [8, 1, 256, 128],
    [8, 2, 512, 256],
    [32, 4, 512, 64],
    [3, 3, 80, 40],
    [4, 2, 128, 48],
    [2, 1, 64, 8],
    [64, 8, 128, 64],
    [128, 16, 128, 64],
    // No rotary embedding.
    [4, 4, 128, 0],
    [16, 2, 64, 0],
];

/// Writes `case` to a cache of such elements: the projections afterwards, and the bytes of keys and of values.
fn write_on_gpu(gpu: &Gpu, kernels: &FusedKernels, case: &Case, cache: Cache) -> (Vec<f32>, [Vec<u8>; 2]) {
    let (tokens, dim) = (case.positions.len(), case.dim);
    let projections = case.with_gates();
    let mut padded = projections.clone();
    padded.extend([bf16::from_bits(0xffff); GUARD]);
    let qkv = upload(gpu, &padded);
    let positions: Vec<i32> = match &case.axes {
        None => case.positions.clone(),
        Some((_, positions)) => positions.iter().flatten().map(|&at| at as i32).collect(),
    };
    let numbers = positions.len();
    let (positions, slots) = (upload(gpu, &positions), upload(gpu, &case.slots));
    let frequencies = upload(gpu, &rope_frequencies(&case.frequencies));
    let [own, stride] = case.block();
    let len = (case.blocks - 1) * stride + own;
    let bytes = len * cache.element.bytes();
    let (k, v) = (guarded::<u8>(gpu, bytes), guarded::<u8>(gpu, bytes));
    let norms = case.norm.as_ref().map(|(q, k)| (upload(gpu, q), upload(gpu, k)));
    let norm = norms.as_ref().map(|(q, k)| GpuQkNorm {
        q: q.slice().range(0..dim),
        k: k.slice().range(0..dim),
        eps: EPS,
    });
    let rope = GpuRope {
        positions: positions.slice().range(0..numbers),
        axes: case.axes.as_ref().map(|(axes, _)| PairAxes::new(axes)),
        frequencies: frequencies.slice().range(0..2 * case.pairs),
        factor: case.factor,
        query_scale: case.query_scale,
    };
    let kv = GpuKvWrite {
        kv: cache.on_gpu(&k, &v, (len, stride)),
        slots: slots.slice().range(0..tokens),
        kv_heads: case.kv_heads,
        block_size: case.block_size,
        head_dim: dim,
        gated: case.gated,
        values: case.values,
    };
    kernels
        .qk_norm_rope_kv_write(qkv.slice().range(0..projections.len()), norm, rope, kv)
        .unwrap();

    let after = widen(&written::<bf16>(gpu, &qkv, projections.len()));
    (
        case.without_gates(&after),
        [written(gpu, &k, bytes), written(gpu, &v, bytes)],
    )
}

fn run_on_gpu(gpu: &Gpu, kernels: &FusedKernels, case: &Case) -> Out {
    let dim = case.dim;
    let (after, written) = write_on_gpu(gpu, kernels, case, WIDE);
    let q: Vec<f32> = after
        .chunks_exact(case.width())
        .flat_map(|row| &row[..case.heads * dim])
        .copied()
        .collect();
    let [k, v] = written.map(|bytes| widen(&wide(&bytes)));
    let used = case.slots.iter().filter(|&&slot| slot >= 0).count() * case.kv_heads * dim;
    for cache in [&k, &v] {
        assert_eq!(
            cache.iter().filter(|x| !x.is_nan()).count(),
            used,
            "only the slots are written"
        );
    }
    let index = |block: usize, head: usize, token: usize, d: usize| {
        [block * case.block()[1] + (head * case.block_size + token) * dim + d; 2]
    };
    Out {
        q,
        kv: case.gather(&k, &v, index),
    }
}

/// The CPU's runs have no padding: every row gets its slot, in the block the case has for it.
fn run_on_cpu(case: &Case) -> Out {
    let tokens = case.positions.len();
    let layout = cpu::KvLayout {
        kv_heads: case.kv_heads,
        head_dim: case.dim,
        block_size: BlockSize::new(case.block_size).unwrap(),
    };
    let (mut k, mut v) = (
        vec![f32::NAN; layout.elements(case.blocks)],
        vec![f32::NAN; layout.elements(case.blocks)],
    );
    let start = case.positions[0] as usize;
    let table = (0..tokens.div_ceil(case.block_size)).map(|i| PageId((case.blocks - 1 - i) as u32));
    let table: Vec<PageId> = table.collect();
    let runs = [cpu::RunMeta {
        start,
        len: tokens,
        first_row: 0,
        first_block: start / case.block_size,
        blocks: &table,
    }];
    let mut angles = vec![f32::NAN; tokens * 2 * case.pairs];
    match &case.axes {
        None => cpu::rope_angles(&case.frequencies, case.factor, &runs, &mut angles),
        Some((axes, positions)) => {
            cpu::rope_angles_of_axes(&case.frequencies, case.factor, axes, positions, &mut angles);
        }
    }
    let mut q = vec![f32::NAN; tokens * case.heads * case.dim];
    let norm = case.norm.as_ref().map(|(q, k)| cpu::QkNorm { q, k, eps: EPS });
    let mut kv = cpu::PagedKvMut {
        layout,
        stride: layout.elements(1),
        k: &mut k,
        v: &mut v,
    };
    let qkv = widen(&case.qkv);
    cpu::qk_norm_rope_kv_write(
        &qkv,
        norm,
        cpu::Rotation {
            angles: &angles,
            query_scale: case.query_scale,
        },
        case.values,
        &runs,
        &mut kv,
        &mut q,
    );
    let index = |block: usize, head: usize, token: usize, d: usize| {
        let base = (block * case.kv_heads + head) * case.block_size * case.dim;
        [base + d * case.block_size + token, base + token * case.dim + d]
    };
    Out {
        q,
        kv: case.gather(&k, &v, index),
    }
}

fn check(name: &str, run: impl Fn(&Case) -> Out) {
    let mut rng = rng(name);
    for shape in SHAPES {
        for norm in [false, true] {
            let case = Case::new(&mut rng, shape, norm);
            case.check(name, &run(&case));
        }
    }
}

#[test]
fn qk_norm_rope_kv_write_on_the_cpu() {
    check("qk_norm_rope_kv_write on the CPU", run_on_cpu);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_qk_norm_rope_kv_write() {
    let gpu = gpu();
    let kernels = FusedKernels::load(&gpu).unwrap();
    check("qk_norm_rope_kv_write", |case| run_on_gpu(&gpu, &kernels, case));
}

/// Queries alone are the bits of those beside keys and values.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_rotate_queries() {
    let (gpu, mut rng) = (gpu(), rng("rotate_queries"));
    let kernels = FusedKernels::load(&gpu).unwrap();
    for shape in SHAPES {
        for norm in [false, true] {
            let case = Case {
                axes: None,
                ..Case::new(&mut rng, shape, norm)
            };
            let (tokens, dim) = (case.positions.len(), case.dim);
            let rows = case.qkv.chunks_exact(case.width());
            let mut queries: Vec<bf16> = rows.flat_map(|row| &row[..case.heads * dim]).copied().collect();
            let len = queries.len();
            queries.extend([bf16::from_bits(0xffff); GUARD]);
            let q = upload(&gpu, &queries);
            let (positions, frequencies) = (
                upload(&gpu, &case.positions),
                upload(&gpu, &rope_frequencies(&case.frequencies)),
            );
            let weight = case.norm.as_ref().map(|(q, _)| upload(&gpu, q));
            let norm = weight.as_ref().map(|weight| GpuNorm {
                weight: weight.slice().range(0..dim),
                eps: EPS,
            });
            let rope = GpuRope {
                positions: positions.slice().range(0..tokens),
                axes: None,
                frequencies: frequencies.slice().range(0..2 * case.pairs),
                factor: case.factor,
                query_scale: case.query_scale,
            };
            kernels
                .rotate_queries(q.slice().range(0..len), dim, norm, rope)
                .unwrap();
            let found = widen(&written::<bf16>(&gpu, &q, len));
            assert_eq!(found, run_on_gpu(&gpu, &kernels, &case).q, "{shape:?}");
        }
    }
}

/// Elements of 8 bits are those of 16 bits divided by the scale and rounded, to the bit, and queries are the same.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fused_kv_of_8_bits_is_that_of_16_rounded() {
    let (gpu, mut rng) = (gpu(), rng("kv of 8 bits"));
    let kernels = FusedKernels::load(&gpu).unwrap();
    for shape in SHAPES {
        for norm in [false, true] {
            let case = Case::new(&mut rng, shape, norm);
            let fp8 = Cache {
                element: GpuKvElement::Fp8,
                // Small enough that some values are cut off.
                k_scale: rng.random_range(0.001..2.0),
                v_scale: rng.random_range(0.001..2.0),
            };
            let (after, expected) = write_on_gpu(&gpu, &kernels, &case, WIDE);
            let (also, found) = write_on_gpu(&gpu, &kernels, &case, fp8);
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&after), bits(&also), "{shape:?}: projections");
            for ((expected, found), scale) in expected.iter().zip(&found).zip([fp8.k_scale, fp8.v_scale]) {
                for (at, (expected, &found)) in wide(expected).into_iter().zip(found).enumerate() {
                    let expected = match expected.is_nan() {
                        // Not written.
                        true => 0xff,
                        false => to_e4m3(expected.to_f32() * scale.recip()),
                    };
                    assert_eq!(found, expected, "{shape:?}, norm {norm}, {fp8:?}: element {at}");
                }
            }
        }
    }
}
