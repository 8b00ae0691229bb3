//! What encoders of images do. Each test has one body, which the CPU twin and the GPU fill in, where there is a twin.

mod rows;
mod windows;

use std::sync::Arc;

use half::bf16;
use plimsoll_core::{BlockSize, Image, ImageGrid, PageId, PatchShape, Scratch};
use plimsoll_device::cuda::{Gpu, GpuSlab};
use plimsoll_device::{Arena, Budget};
use plimsoll_kernels::cuda::{EncoderKernels, GpuLayerNorm, PatchAttention, PatchGrid, PatchSegments};
use plimsoll_kernels::{self as cpu, AttentionOptions, Gelu, KvLayout, PagedKv, RunMeta, Sees};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use crate::common::{assert_close, download, gpu, poisoned, random, rng, upload, widen};

/// Tolerance of an output rounded to bf16 once.
const BF16: f64 = 4e-3;
const EPS: f32 = 1e-6;
/// Elements behind an output that must stay poisoned.
const GUARD: usize = 64;

#[track_caller]
fn written(gpu: &Gpu, slab: &GpuSlab, len: usize) -> Vec<f32> {
    let all: Vec<bf16> = download(gpu, slab, len + GUARD);
    let untouched = all[len..].iter().all(|x| x.to_bits() == 0xffff);
    assert!(untouched, "written beyond the end of {len} elements");
    widen(&all[..len])
}

/// Behind `values` there is poison.
fn upload_guarded(gpu: &Gpu, values: &[bf16]) -> GpuSlab {
    let mut all = values.to_vec();
    all.extend([bf16::from_bits(0xffff); GUARD]);
    upload(gpu, &all)
}

/// Bidirectional attention of segments.
#[derive(Debug)]
struct Attention {
    heads: usize,
    dim: usize,
    segment: usize,
    segments: usize,
    scale: f32,
    qkv: Vec<bf16>,
}

impl Attention {
    fn random(rng: &mut StdRng, [heads, dim, segment, segments]: [usize; 4]) -> Self {
        let sharpness = [1.0, 8.0][rng.random_range(0..2)];
        Self {
            heads,
            dim,
            segment,
            segments,
            scale: sharpness / (dim as f32).sqrt(),
            qkv: random(rng, 3 * heads * dim * segment * segments),
        }
    }

    fn row(&self, row: usize, part: usize, head: usize) -> &[bf16] {
        &self.qkv[((row * 3 + part) * self.heads + head) * self.dim..][..self.dim]
    }

    fn reference(&self) -> Vec<f64> {
        let of_head = |at: usize| {
            let (row, head) = (at / self.heads, at % self.heads);
            let first = row / self.segment * self.segment;
            let q = self.row(row, 0, head);
            let scores = (first..first + self.segment).map(|key| {
                let k = self.row(key, 1, head);
                let product: f64 = q.iter().zip(k).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum();
                product * f64::from(self.scale)
            });
            let scores: Vec<f64> = scores.collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let total: f64 = weights.iter().sum();
            let mut sum = vec![0.0; self.dim];
            for (key, weight) in weights.iter().enumerate() {
                let v = self.row(first + key, 2, head);
                sum.iter_mut()
                    .zip(v)
                    .for_each(|(sum, &v)| *sum += weight / total * f64::from(v));
            }
            sum
        };
        let heads = 0..self.segment * self.segments * self.heads;
        heads.into_par_iter().flat_map_iter(of_head).collect()
    }

    fn on_gpu(&self, gpu: &Gpu, kernels: &EncoderKernels) -> Vec<f32> {
        let qkv = upload_guarded(gpu, &self.qkv);
        let len = self.qkv.len() / 3;
        let out = poisoned::<bf16>(gpu, len + GUARD);
        let rows = self.segment * self.segments;
        // In two parts: of one segment, or whole segments.
        let cut = match self.segments {
            1 => self.segment * 2 / 5,
            segments => segments / 2 * self.segment,
        };
        for rows in [0..cut, cut..rows] {
            kernels
                .attention(&PatchAttention {
                    qkv: qkv.slice().range(0..self.qkv.len()),
                    heads: self.heads,
                    head_dim: self.dim,
                    segments: PatchSegments::Equal {
                        len: self.segment,
                        rows,
                    },
                    scale: self.scale,
                    out: out.slice().range(0..len),
                })
                .unwrap();
        }
        written(gpu, &out, len)
    }

    /// Of pages, keys by columns.
    fn on_cpu(&self) -> Vec<f32> {
        const BLOCK: usize = 32;
        let layout = KvLayout {
            kv_heads: self.heads,
            head_dim: self.dim,
            block_size: BlockSize::new(BLOCK).unwrap(),
        };
        let blocks = self.segment.div_ceil(BLOCK);
        let pages: Vec<PageId> = (0..(blocks * self.segments) as u32).map(PageId).collect();
        let mut k = vec![0.0; layout.elements(pages.len())];
        let mut v = k.clone();
        let mut q = Vec::new();
        for row in 0..self.segment * self.segments {
            let (segment, at) = (row / self.segment, row % self.segment);
            for head in 0..self.heads {
                let page = segment * blocks + at / BLOCK;
                let base = (page * self.heads + head) * BLOCK * self.dim;
                q.extend(widen(self.row(row, 0, head)));
                for (d, (&key, &value)) in self
                    .row(row, 1, head)
                    .iter()
                    .zip(self.row(row, 2, head))
                    .enumerate()
                {
                    k[base + d * BLOCK + at % BLOCK] = key.to_f32();
                    v[base + at % BLOCK * self.dim + d] = value.to_f32();
                }
            }
        }
        let runs: Vec<RunMeta<'_>> = (0..self.segments)
            .map(|segment| RunMeta {
                first_row: segment * self.segment,
                len: self.segment,
                start: 0,
                first_block: 0,
                blocks: &pages[segment * blocks..(segment + 1) * blocks],
            })
            .collect();
        let options = AttentionOptions {
            scale: self.scale,
            window: None,
            soft_cap: None,
            sinks: None,
            sees: Sees::Run,
        };
        let kv = PagedKv {
            k: &k,
            v: &v,
            layout,
            stride: layout.elements(1),
        };
        let arena = Arena::new(&Budget::new(1 << 30), Scratch::Growable).unwrap();
        let mut out = vec![f32::NAN; q.len()];
        cpu::attention(&q, kv, &runs, options, &mut out, &arena).unwrap();
        out
    }
}

/// Heads, their size, rows of a segment, segments: of the tiles' sizes and beside them.
const ATTENTIONS: [[usize; 4]; 16] = [
    [1, 64, 1, 1],
    [2, 72, 4, 1],
    [3, 72, 63, 3],
    [2, 72, 64, 2],
    [2, 72, 65, 2],
    [16, 72, 260, 1],
    [3, 80, 129, 2],
    [2, 64, 200, 1],
    [4, 16, 48, 2],
    [3, 8, 70, 1],
    [2, 40, 130, 1],
    [2, 128, 130, 2],
    [1, 96, 190, 1],
    [2, 88, 64, 1],
    [2, 104, 130, 2],
    [16, 64, 300, 1],
];

/// Weights are rounded to bf16 on a GPU.
fn check_attention(what: &str, run: impl Fn(&Attention) -> Vec<f32>) {
    let mut rng = rng(what);
    for shape in ATTENTIONS {
        let case = Attention::random(&mut rng, shape);
        let about = format!("{what}: {shape:?}, scale {}", case.scale);
        assert_close(&about, &run(&case), &case.reference(), BF16);
    }
}

#[test]
fn patches_see_each_other_on_the_cpu() {
    check_attention("bidirectional attention on the CPU", Attention::on_cpu);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn encoder_attention() {
    let gpu = gpu();
    let kernels = EncoderKernels::load(&gpu).unwrap();
    check_attention("encoder attention", |case| case.on_gpu(&gpu, &kernels));
}

struct NormCase {
    hidden: Vec<bf16>,
    delta: Option<Vec<bf16>>,
    weight: Vec<f32>,
    bias: Vec<f32>,
}

/// Calls `run` with cases; it returns the residual stream afterwards and the norm.
fn check_norm(what: &str, run: impl Fn(&NormCase) -> (Vec<f32>, Vec<f32>)) {
    let mut rng = rng(what);
    for (n, added) in [8, 144, 1152, 1280, 4608, 8192, 8200, 16384]
        .into_iter()
        .flat_map(|n| [false, true].map(|added| (n, added)))
    {
        let rows = rng.random_range(1..40);
        let mut floats = |least: f32| (0..n).map(|_| rng.random_range(least..1.5)).collect::<Vec<f32>>();
        let (weight, bias) = (floats(0.5), floats(-1.5));
        // Far from zero, where a mean and a mean square would cancel.
        let offset = bf16::from_f32([0.0, 3.0][rng.random_range(0..2)]);
        let case = NormCase {
            hidden: random(&mut rng, rows * n).iter().map(|&x| x + offset).collect(),
            delta: added.then(|| random(&mut rng, rows * n)),
            weight,
            bias,
        };
        let (residual, out) = run(&case);
        let mut sum: Vec<f64> = case.hidden.iter().map(|&x| x.into()).collect();
        if let Some(delta) = &case.delta {
            sum.iter_mut().zip(delta).for_each(|(x, &d)| *x += f64::from(d));
        }
        assert_close(&format!("{what}: [{rows}, {n}] residual"), &residual, &sum, BF16);
        // Of the sum as it was rounded.
        let normed: Vec<f64> = residual
            .chunks_exact(n)
            .flat_map(|row| {
                let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / n as f64;
                let squares = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
                let scale = 1.0 / (squares / n as f64 + f64::from(EPS)).sqrt();
                let affine = case.weight.iter().zip(&case.bias);
                row.iter()
                    .zip(affine)
                    .map(move |(&x, (&w, &b))| (f64::from(x) - mean) * scale * f64::from(w) + f64::from(b))
                    .collect::<Vec<_>>()
            })
            .collect();
        assert_close(
            &format!("{what}: [{rows}, {n}], added {added}"),
            &out,
            &normed,
            BF16,
        );
    }
}

#[test]
fn layer_norms_on_the_cpu() {
    check_norm("layer norms on the CPU", |case| {
        let mut hidden = widen(&case.hidden);
        if let Some(delta) = &case.delta {
            hidden.iter_mut().zip(widen(delta)).for_each(|(x, d)| *x += d);
        }
        let mut out = vec![f32::NAN; hidden.len()];
        cpu::layer_norm(&hidden, &case.weight, &case.bias, EPS, &mut out);
        (hidden, out)
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn encoder_layer_norms() {
    let gpu = gpu();
    let kernels = EncoderKernels::load(&gpu).unwrap();
    check_norm("layer norms", |case| {
        let (len, n) = (case.hidden.len(), case.weight.len());
        let hidden = upload_guarded(&gpu, &case.hidden);
        let delta = case.delta.as_ref().map(|delta| upload(&gpu, delta));
        let (weight, bias) = (upload(&gpu, &case.weight), upload(&gpu, &case.bias));
        let out = poisoned::<bf16>(&gpu, len + GUARD);
        let norm = GpuLayerNorm {
            weight: weight.slice().range(0..n),
            bias: bias.slice().range(0..n),
            eps: EPS,
        };
        let delta = delta.as_ref().map(|delta| delta.slice().range(0..len));
        kernels
            .layer_norm(
                hidden.slice().range(0..len),
                delta,
                norm,
                out.slice().range(0..len),
            )
            .unwrap();
        (written(&gpu, &hidden, len), written(&gpu, &out, len))
    });
}

/// The twin's test is `gelu.rs`'s own: here it is the reference.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn encoder_gelus() {
    let gpu = gpu();
    let kernels = EncoderKernels::load(&gpu).unwrap();
    let mut rng = rng("GELU");
    for len in [8, 56, 4304, 100_000] {
        for form in [Gelu::Exact, Gelu::Tanh] {
            let mut x: Vec<bf16> = (0..len)
                .map(|_| bf16::from_f32(rng.random_range(-6.0..6.0)))
                .collect();
            (x[0], x[1]) = (bf16::from_f32(-1e30), bf16::from_f32(1e4));
            let mut want = widen(&x);
            cpu::gelu(form, &mut want);
            let slab = upload_guarded(&gpu, &x);
            kernels.gelu(form, slab.slice().range(0..len)).unwrap();
            let found = written(&gpu, &slab, len);
            assert!(found[0].abs() < 1e-6 && found[1] == x[1].to_f32(), "{form:?}");
            let want: Vec<f64> = want[2..].iter().map(|&x| x.into()).collect();
            assert_close(&format!("{form:?} of {len}"), &found[2..], &want, BF16);
        }
    }
}

fn random_grid(rng: &mut StdRng) -> PatchGrid<'static> {
    let merge = rng.random_range(1..=3);
    let [height, width] = [0; 2].map(|_| merge * rng.random_range(1..=12));
    PatchGrid {
        patches: rng.random_range(1..=3) * height * width,
        height,
        width,
        merge,
        order: None,
    }
}

/// None, or another order of so many rows.
fn random_order(rng: &mut StdRng, rows: usize) -> Option<Vec<i32>> {
    let mut order: Vec<i32> = (0..rows as i32).collect();
    order.shuffle(rng);
    rng.random_bool(0.5).then_some(order)
}

/// Row and column of each patch in an order: without one frame by frame, and merged ones one after the other.
fn places(grid: PatchGrid<'_>, order: Option<&[i32]>) -> Vec<[usize; 2]> {
    let PatchGrid {
        patches,
        height,
        width,
        merge,
        ..
    } = grid;
    let mut places = Vec::new();
    for _ in 0..patches / (height * width) {
        for (row, column) in
            (0..height / merge).flat_map(|row| (0..width / merge).map(move |column| (row, column)))
        {
            for (y, x) in (0..merge).flat_map(|y| (0..merge).map(move |x| (y, x))) {
                places.push([row * merge + y, column * merge + x]);
            }
        }
    }
    match order {
        None => places,
        Some(order) => {
            let squares: Vec<_> = places.chunks_exact(merge * merge).collect();
            order
                .iter()
                .flat_map(|&square| squares[square as usize])
                .copied()
                .collect()
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn encoder_patches_are_read_by_the_levels_of_their_colours() {
    let gpu = gpu();
    let kernels = EncoderKernels::load(&gpu).unwrap();
    let mut rng = rng("patches");
    for _ in 0..20 {
        let mut grid = random_grid(&mut rng);
        let merged = grid.merge * grid.merge;
        let order = random_order(&mut rng, grid.patches / merged);
        let list = order.as_ref().map(|order| upload(&gpu, order));
        let squares = order.as_ref().map_or(0, Vec::len);
        grid.order = list.as_ref().map(|list| list.slice().range(0..squares));
        let side = rng.random_range(1..=20);
        let shape = PatchShape {
            pixels: side * side,
            frames: rng.random_range(1..=3),
        };
        let image = Image {
            hash: [0; 32],
            grid: ImageGrid {
                frames: 1,
                height: grid.patches,
                width: 1,
            },
            pixels: (0..grid.patches * shape.bytes()).map(|_| rng.random()).collect(),
            levels: Arc::new(std::array::from_fn(|_| {
                std::array::from_fn(|_| rng.random_range(-2.0..2.0))
            })),
        };
        let mut want = vec![f32::NAN; grid.patches * shape.values()];
        for (row, to) in want.chunks_exact_mut(shape.values()).enumerate() {
            let square = order
                .as_ref()
                .map_or(row / merged, |order| order[row / merged] as usize);
            image.read_patch(square * merged + row % merged, shape, to);
        }
        let levels: Vec<f32> = image.levels.iter().flatten().copied().collect();
        let (pixels, levels) = (upload(&gpu, &image.pixels), upload(&gpu, &levels));
        let out = poisoned::<bf16>(&gpu, want.len() + GUARD);
        kernels
            .read_patches(
                pixels.slice().range(0..image.pixels.len()),
                levels.slice().range(0..3 * 256),
                shape,
                grid,
                out.slice().range(0..want.len()),
            )
            .unwrap();
        let want: Vec<f32> = want.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        assert_eq!(written(&gpu, &out, want.len()), want, "{grid:?} of {shape:?}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn encoder_positions_are_interpolated() {
    let gpu = gpu();
    let kernels = EncoderKernels::load(&gpu).unwrap();
    let mut rng = rng("positions");
    for _ in 0..20 {
        let (mut grid, side, n) = (
            random_grid(&mut rng),
            rng.random_range(1..50),
            8 * rng.random_range(1..40),
        );
        let order = random_order(&mut rng, grid.patches / (grid.merge * grid.merge));
        let list = order.as_ref().map(|order| upload(&gpu, order));
        let squares = order.as_ref().map_or(0, Vec::len);
        grid.order = list.as_ref().map(|list| list.slice().range(0..squares));
        let hidden = random(&mut rng, grid.patches * n);
        let table: Vec<f32> = (0..side * side * n)
            .map(|_| rng.random_range(-1.0..1.0))
            .collect();
        let mut want = Vec::new();
        for (row, [y, x]) in hidden.chunks_exact(n).zip(places(grid, order.as_deref())) {
            // Where the table and the grid have the same corners.
            let at = |place: usize, len: usize| {
                let place = place as f64 * (side - 1) as f64 / (len - 1).max(1) as f64;
                // A hair below a whole place is that place.
                let first = (place + 1e-6).floor();
                (first as usize, place - first)
            };
            let ((y, of_y), (x, of_x)) = (at(y, grid.height), at(x, grid.width));
            for (i, &value) in row.iter().enumerate() {
                let corner = |dy: usize, dx: usize| {
                    let (y, x) = ((y + dy).min(side - 1), (x + dx).min(side - 1));
                    f64::from(table[(y * side + x) * n + i])
                };
                let upper = corner(0, 0) * (1.0 - of_x) + corner(0, 1) * of_x;
                let lower = corner(1, 0) * (1.0 - of_x) + corner(1, 1) * of_x;
                want.push(f64::from(value) + upper * (1.0 - of_y) + lower * of_y);
            }
        }
        let (slab, table) = (upload_guarded(&gpu, &hidden), upload(&gpu, &table));
        kernels
            .add_positions(
                slab.slice().range(0..hidden.len()),
                table.slice().range(0..side * side * n),
                side,
                grid,
            )
            .unwrap();
        let found = written(&gpu, &slab, hidden.len());
        assert_close(
            &format!("{grid:?}, {side} x {side} positions of {n}"),
            &found,
            &want,
            BF16,
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn encoder_heads_turn_with_row_and_column() {
    let gpu = gpu();
    let kernels = EncoderKernels::load(&gpu).unwrap();
    let mut rng = rng("rotation");
    for _ in 0..20 {
        let mut grid = random_grid(&mut rng);
        let order = random_order(&mut rng, grid.patches / (grid.merge * grid.merge));
        let list = order.as_ref().map(|order| upload(&gpu, order));
        let squares = order.as_ref().map_or(0, Vec::len);
        grid.order = list.as_ref().map(|list| list.slice().range(0..squares));
        let (heads, pairs) = (rng.random_range(1..5), 4 * rng.random_range(1..10));
        let dim = 2 * pairs;
        let theta = [1e4, 100.0][rng.random_range(0..2)];
        let column_shift = [0.0, 0.5][rng.random_range(0..2)];
        let qkv = random(&mut rng, grid.patches * 3 * heads * dim);
        let mut want: Vec<f64> = qkv.iter().map(|&x| x.into()).collect();
        let mut turned = Vec::new();
        for (row, place) in want
            .chunks_exact_mut(3 * heads * dim)
            .zip(places(grid, order.as_deref()))
        {
            let quarter = pairs / 2;
            let angles: Vec<f64> = (0..pairs)
                .map(|pair| {
                    let shift = column_shift * (pair / quarter) as f64;
                    let power = -((pair % quarter) as f64 + shift) / quarter as f64;
                    place[pair / quarter] as f64 * f64::powf(theta, power)
                })
                .collect();
            turned.extend(angles.iter().flat_map(|angle| [angle.cos(), angle.sin()]));
            // Values stay.
            for head in row.chunks_exact_mut(dim).take(2 * heads) {
                for (pair, angle) in angles.iter().enumerate() {
                    let (a, b) = (head[pair], head[pair + pairs]);
                    head[pair] = a * angle.cos() - b * angle.sin();
                    head[pair + pairs] = b * angle.cos() + a * angle.sin();
                }
            }
        }
        let slab = upload_guarded(&gpu, &qkv);
        let len = grid.patches * pairs * 2;
        let angles = poisoned::<f32>(&gpu, len);
        let angles_of = angles.slice().range(0..len);
        kernels
            .patch_angles(grid, theta, column_shift, angles_of)
            .unwrap();
        let what = format!("{grid:?}, {heads} heads of {dim}, theta {theta}, columns {column_shift} behind");
        assert_close(&what, &download::<f32>(&gpu, &angles, len), &turned, 1e-6);
        let all = slab.slice().range(0..qkv.len());
        kernels.rotate(all, heads, angles_of, grid.patches).unwrap();
        assert_close(&what, &written(&gpu, &slab, qkv.len()), &want, BF16);
    }
}
