use half::f16;
use plimsoll_core::{BlockSize, PageId};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::*;
use crate::testing::{arena, assert_close, assert_same_bits, normal, rng, seeds};
use crate::{CachedValues, KvLayout, PagedKvMut, QkNorm, Rotation, qk_norm_rope_kv_write, rope_angles};

/// Some requests with all their queries, keys and values, `[tokens, heads, dim]` each.
struct Case {
    heads: usize,
    layout: KvLayout,
    window: Option<usize>,
    soft_cap: Option<f32>,
    sinks: Option<Vec<f32>>,
    sees: Seen,
    requests: Vec<Request>,
    blocks: usize,
}

struct Request {
    qkv: Vec<f32>,
    len: usize,
    table: Vec<PageId>,
}

/// What of a request its tokens see.
#[derive(Clone, Copy)]
enum Seen {
    Past,
    Run,
    /// Tokens in so many see only what is before them, in as many behind those they see each other, and so on.
    Spans(usize),
}

impl Seen {
    /// The end of what a token sees of `len`.
    fn end(self, token: usize, len: usize) -> usize {
        match self {
            Self::Run => len,
            Self::Spans(span) if token / span % 2 == 1 => ((token / span + 1) * span).min(len),
            Self::Past | Self::Spans(_) => token + 1,
        }
    }
}

impl Case {
    fn random(rng: &mut StdRng, lengths: &[usize]) -> Self {
        let pick = |rng: &mut StdRng, from: &[usize]| from[rng.random_range(0..from.len())];
        let kv_heads = pick(rng, &[1, 2, 3]);
        let layout = KvLayout {
            kv_heads,
            head_dim: pick(rng, &[2, 20, 64, 80, 96, 128, 256, 512]),
            block_size: BlockSize::new(pick(rng, &[8, 16, 32])).unwrap(),
        };
        let heads = kv_heads * pick(rng, &[1, 2, 3, 7]);
        let window = [None, Some(1), Some(50), Some(700)][rng.random_range(0..4)];
        let soft_cap = rng.random_bool(0.5).then(|| rng.random_range(0.5..4.0));
        // From next to nothing to nearly all of the weight.
        let sinks = rng
            .random_bool(0.5)
            .then(|| (0..heads).map(|_| rng.random_range(-5.0..9.0)).collect());
        let blocks = 3 + lengths
            .iter()
            .map(|&len| layout.block_size.blocks_for(len))
            .sum::<usize>();
        let mut free: Vec<PageId> = (0..blocks as u32).map(PageId).collect();
        free.shuffle(rng);
        let width = (heads + 2 * kv_heads) * layout.head_dim;
        let request = |&len: &usize| Request {
            qkv: normal(rng, len * width),
            len,
            table: free.split_off(free.len() - layout.block_size.blocks_for(len)),
        };
        let requests = lengths.iter().map(request).collect();
        Self {
            heads,
            layout,
            window,
            soft_cap,
            sinks,
            sees: Seen::Past,
            requests,
            blocks,
        }
    }

    fn describe(&self) -> String {
        let Self {
            layout,
            window,
            soft_cap,
            sinks,
            ..
        } = self;
        format!("{layout:?} window {window:?} cap {soft_cap:?} sinks {sinks:?}")
    }

    fn width(&self) -> usize {
        (self.heads + 2 * self.layout.kv_heads) * self.layout.head_dim
    }

    fn options(&self) -> AttentionOptions<'_> {
        AttentionOptions {
            scale: 1.0 / (self.layout.head_dim as f32).sqrt(),
            window: self.window,
            soft_cap: self.soft_cap,
            sinks: self.sinks.as_deref(),
            sees: match self.sees {
                Seen::Run => Sees::Run,
                // In steps with spans it is said of each row.
                Seen::Past | Seen::Spans(_) => Sees::Past,
            },
        }
    }

    /// Writes and attends in steps, each a list of `(request, start, len)`; the result of every request. The cache is
    /// NaN where nothing was written.
    fn run<E: KvElement>(&self, level: Level, steps: &[Vec<(usize, usize, usize)>]) -> Vec<Vec<f32>> {
        let nan = vec![E::from_f32(f32::NAN); self.layout.elements(self.blocks)];
        let (mut k, mut v) = (nan.clone(), nan);
        let row = self.heads * self.layout.head_dim;
        let mut results: Vec<Vec<f32>> = self
            .requests
            .iter()
            .map(|r| vec![f32::NAN; r.len * row])
            .collect();
        for step in steps {
            let (mut qkv, mut runs, mut ends, mut first_row) = (vec![], vec![], vec![], 0);
            for &(r, start, len) in step {
                let request = &self.requests[r];
                ends.extend((start..start + len).map(|token| self.sees.end(token, request.len)));
                qkv.extend_from_slice(&request.qkv[start * self.width()..(start + len) * self.width()]);
                // Blocks that no later token sees are gone: neither in the table nor in the cache.
                let first_block = self.options().first_seen(start) / self.layout.block_size.tokens();
                for block in &request.table[..first_block] {
                    let gone = self.layout.elements(block.index())..self.layout.elements(block.index() + 1);
                    k[gone.clone()].fill(E::from_f32(f32::NAN));
                    v[gone].fill(E::from_f32(f32::NAN));
                }
                runs.push(RunMeta {
                    first_row,
                    len,
                    start,
                    first_block,
                    blocks: &request.table[first_block..],
                });
                first_row += len;
            }
            let mut q = vec![f32::NAN; first_row * row];
            let mut kv = PagedKvMut {
                k: &mut k,
                v: &mut v,
                layout: self.layout,
                stride: self.layout.elements(1),
            };
            // No rotation: the cosines of no pairs.
            qk_norm_rope_kv_write::<E>(
                &qkv,
                None,
                Rotation::default(),
                CachedValues::Projected,
                &runs,
                &mut kv,
                &mut q,
            );
            let mut out = vec![f32::NAN; q.len()];
            let options = AttentionOptions {
                sees: match self.sees {
                    Seen::Spans(_) => Sees::UpTo(&ends),
                    Seen::Past | Seen::Run => self.options().sees,
                },
                ..self.options()
            };
            attention_at(level, &q, kv.as_ref(), &runs, options, &mut out, &arena()).unwrap();
            for (run, &(r, start, len)) in runs.iter().zip(step) {
                let from = &out[run.first_row * row..(run.first_row + len) * row];
                results[r][start * row..(start + len) * row].copy_from_slice(from);
            }
        }
        results
    }

    /// Softmax over the whole context, in f64; `round` is what the cache does to keys and values.
    fn naive(&self, request: &Request, round: fn(f32) -> f32) -> Vec<f64> {
        let dim = self.layout.head_dim;
        let group = self.heads / self.layout.kv_heads;
        let at = |token: usize, head: usize| &request.qkv[token * self.width() + head * dim..][..dim];
        let mut out = Vec::new();
        for token in 0..request.len {
            let first = self.window.map_or(0, |w| (token + 1).saturating_sub(w));
            for head in 0..self.heads {
                let dot = |(a, b): (&f32, &f32)| f64::from(*a) * f64::from(round(*b));
                let key = |t| at(t, self.heads + head / group);
                let score = |t| {
                    let score =
                        at(token, head).iter().zip(key(t)).map(dot).sum::<f64>() / (dim as f64).sqrt();
                    self.soft_cap
                        .map_or(score, |cap| f64::from(cap) * f64::tanh(score / f64::from(cap)))
                };
                let last = self.sees.end(token, request.len) - 1;
                let weights: Vec<f64> = (first..=last).map(|t| f64::exp(score(t))).collect();
                let sink = self
                    .sinks
                    .as_ref()
                    .map_or(0.0, |sinks| f64::exp(f64::from(sinks[head])));
                let sum: f64 = weights.iter().sum::<f64>() + sink;
                let value = |t| at(t, self.heads + self.layout.kv_heads + head / group);
                out.extend((0..dim).map(|d| {
                    let weighted = |(i, w): (usize, &f64)| w * f64::from(round(value(first + i)[d]));
                    weights.iter().enumerate().map(weighted).sum::<f64>() / sum
                }));
            }
        }
        out
    }

    /// Every request in random chunks, interleaved at random.
    fn random_steps(&self, rng: &mut StdRng) -> Vec<Vec<(usize, usize, usize)>> {
        let mut done = vec![0; self.requests.len()];
        let mut steps = Vec::new();
        while done
            .iter()
            .zip(&self.requests)
            .any(|(&done, request)| done < request.len)
        {
            let mut step = Vec::new();
            for (r, request) in self.requests.iter().enumerate() {
                if done[r] < request.len && rng.random_bool(0.7) {
                    let most = [1, 7, 100, 1000][rng.random_range(0..4)];
                    let len = rng.random_range(1..=most).min(request.len - done[r]);
                    step.push((r, done[r], len));
                    done[r] += len;
                }
            }
            step.shuffle(rng);
            steps.push(step);
        }
        steps
    }

    fn whole(&self, request: usize) -> Vec<Vec<(usize, usize, usize)>> {
        vec![vec![(request, 0, self.requests[request].len)]]
    }
}

#[test]
fn paged_chunked_and_batched_equal_whole_and_alone_to_the_bit_and_naive_nearly() {
    for seed in seeds(4) {
        let mut rng = rng(seed);
        let lengths: Vec<usize> = (0..3).map(|_| rng.random_range(1..160)).collect();
        let case = Case::random(&mut rng, &lengths);
        let context = |r: usize| format!("seed {seed} request {r} {}", case.describe());
        let together = case.run::<f32>(Level::detect(), &case.random_steps(&mut rng));
        let halves = case.run::<f16>(Level::detect(), &case.random_steps(&mut rng));
        for (r, request) in case.requests.iter().enumerate() {
            let alone = &case.run::<f32>(Level::detect(), &case.whole(r))[r];
            assert_same_bits(&together[r], alone, &context(r));
            assert_close(alone, &case.naive(request, |x| x), 2e-6, &context(r));
            // Many rows at once read keys and values that were widened, few read the cache.
            let alone = &case.run::<f16>(Level::detect(), &case.whole(r))[r];
            assert_same_bits(&halves[r], alone, &context(r));
            assert_close(
                &halves[r],
                &case.naive(request, |x| f16::from_f32(x).to_f32()),
                2e-6,
                &context(r),
            );
        }
    }
}

#[test]
fn long_contexts_cross_splits_and_waves() {
    for seed in seeds(3) {
        let mut rng = rng(seed);
        let len = rng.random_range(SPLIT..3 * SPLIT);
        let case = Case::random(&mut rng, &[len]);
        // All but the last token at once, then that one alone: its splits are worked on in parallel.
        let whole = case.run::<f32>(Level::detect(), &case.whole(0));
        let steps = [vec![(0, 0, len - 1)], vec![(0, len - 1, 1)]];
        let stepped = case.run::<f32>(Level::detect(), &steps);
        let context = format!("seed {seed} len {len} {}", case.describe());
        assert_same_bits(&stepped[0], &whole[0], &context);
        let row = case.heads * case.layout.head_dim;
        let naive = case.naive(&case.requests[0], |x| x);
        assert_close(
            &whole[0][(len - 1) * row..],
            &naive[(len - 1) * row..],
            5e-6,
            &context,
        );
    }
}

#[test]
fn instruction_sets_agree_to_the_bit() {
    for seed in 0..4 {
        let mut rng = rng(seed);
        let case = Case::random(&mut rng, &[90, 33]);
        let steps = case.random_steps(&mut rng);
        let want = case.run::<f16>(Level::Scalar, &steps);
        for level in Level::available() {
            for (got, want) in case.run::<f16>(level, &steps).iter().zip(&want) {
                assert_same_bits(got, want, &format!("seed {seed} {level:?}"));
            }
        }
    }
}

/// Whatever the sink: next to a large one nothing is seen, and damage is not hidden by it.
#[test]
fn sinks_of_any_size() {
    let layout = KvLayout {
        kv_heads: 1,
        head_dim: 2,
        block_size: BlockSize::default(),
    };
    let size = layout.elements(1);
    let attend = |key: f32, sink: f32| {
        let sinks = [sink];
        let run = RunMeta {
            first_row: 0,
            len: 1,
            start: 0,
            first_block: 0,
            blocks: &[PageId(0)],
        };
        let options = AttentionOptions {
            scale: 1.0,
            window: None,
            soft_cap: None,
            sinks: Some(&sinks),
            sees: Sees::Past,
        };
        let (k, v) = (vec![key; size], vec![3.0; size]);
        let kv = PagedKv {
            k: &k,
            v: &v,
            layout,
            stride: layout.elements(1),
        };
        let mut out = [f32::NAN; 2];
        attention(&[1.0; 2], kv, &[run], options, &mut out, &arena()).unwrap();
        out
    };
    assert!(attend(50.0, 1e30)[0].abs() < 1e-30);
    assert_eq!(attend(50.0, -1e30), [3.0; 2]);
    assert_eq!(attend(50.0, 100.0), [1.5; 2]);
    assert!(attend(f32::NAN, 1.0)[0].is_nan());
}

#[test]
fn without_an_order_every_token_sees_its_whole_run() {
    for seed in seeds(4) {
        let mut rng = rng(seed);
        let lengths = [1, rng.random_range(2..80), rng.random_range(500..800)];
        let case = Case {
            window: None,
            sees: Seen::Run,
            ..Case::random(&mut rng, &lengths)
        };
        let step: Vec<_> = lengths.iter().enumerate().map(|(r, &len)| (r, 0, len)).collect();
        let together = case.run::<f32>(Level::detect(), &[step]);
        for (r, request) in case.requests.iter().enumerate() {
            let context = format!("seed {seed} request {r} {}", case.describe());
            assert_close(&together[r], &case.naive(request, |x| x), 2e-6, &context);
            for level in Level::available() {
                let alone = &case.run::<f32>(level, &case.whole(r))[r];
                assert_same_bits(&together[r], alone, &context);
            }
        }
    }
}

#[test]
fn tokens_of_a_span_see_each_other() {
    for seed in seeds(4) {
        let mut rng = rng(seed);
        let span = [1, 9, 70, 300][rng.random_range(0..4)];
        let lengths = [1, rng.random_range(2..80), rng.random_range(500..700)];
        let case = Case {
            sees: Seen::Spans(span),
            ..Case::random(&mut rng, &lengths)
        };
        let step: Vec<_> = lengths.iter().enumerate().map(|(r, &len)| (r, 0, len)).collect();
        let together = case.run::<f32>(Level::detect(), &[step]);
        for (r, request) in case.requests.iter().enumerate() {
            let context = format!("seed {seed} request {r} spans of {span} {}", case.describe());
            assert_close(&together[r], &case.naive(request, |x| x), 2e-6, &context);
            // Cut where spans end.
            let chunk = span * 100usize.div_ceil(span);
            let whole: Vec<_> = (0..request.len)
                .step_by(chunk)
                .map(|start| vec![(r, start, chunk.min(request.len - start))])
                .collect();
            for level in Level::available() {
                let alone = &case.run::<f32>(level, &whole)[r];
                assert_same_bits(&together[r], alone, &context);
            }
        }
    }
}

#[test]
fn scratch_does_not_grow_with_the_context() {
    let used = |len: usize| {
        let layout = KvLayout {
            kv_heads: 2,
            head_dim: 16,
            block_size: BlockSize::default(),
        };
        let kv = vec![0f32; layout.elements(layout.block_size.blocks_for(len))];
        let table: Vec<PageId> = (0..layout.block_size.blocks_for(len) as u32)
            .map(PageId)
            .collect();
        let arena = arena();
        let run = RunMeta {
            first_row: 0,
            len: 1,
            start: len - 1,
            first_block: 0,
            blocks: &table,
        };
        let options = AttentionOptions {
            scale: 1.0,
            window: None,
            soft_cap: None,
            sinks: None,
            sees: Sees::Past,
        };
        let mut out = vec![f32::NAN; 64];
        let kv = PagedKv {
            k: &kv,
            v: &kv,
            layout,
            stride: layout.elements(1),
        };
        attention(&[0.5; 64], kv, &[run], options, &mut out, &arena).unwrap();
        assert_eq!(out, [0.0; 64]);
        arena.high_water()
    };
    assert_eq!(used(1), used(40 * SPLIT));
}

#[test]
fn heads_are_normalised_then_rotated() {
    for seed in seeds(3) {
        let mut rng = rng(seed);
        let (heads, kv_heads, dim, pairs, start) = (4, 2, 48, 16, rng.random_range(0..5000));
        let layout = KvLayout {
            kv_heads,
            head_dim: dim,
            block_size: BlockSize::new(8).unwrap(),
        };
        let qkv = normal(&mut rng, 3 * (heads + 2 * kv_heads) * dim);
        let weights = [normal(&mut rng, dim), normal(&mut rng, dim)];
        let frequencies: Vec<f32> = (0..pairs)
            .map(|i| 1e4f32.powf(-(i as f32) / pairs as f32))
            .collect();
        let table: Vec<PageId> = (0..layout.block_size.blocks_for(start + 3) as u32)
            .rev()
            .map(PageId)
            .collect();
        let runs = [RunMeta {
            first_row: 0,
            len: 3,
            start,
            first_block: 0,
            blocks: &table,
        }];
        let mut angles = vec![f32::NAN; 3 * 2 * pairs];
        rope_angles(&frequencies, 1.0, &runs, &mut angles);
        let (mut k, mut v) = (
            vec![0f32; layout.elements(table.len())],
            vec![0f32; layout.elements(table.len())],
        );
        let mut q = vec![f32::NAN; 3 * heads * dim];
        let norm = QkNorm {
            q: &weights[0],
            k: &weights[1],
            eps: 1e-6,
        };
        let mut kv = PagedKvMut {
            k: &mut k,
            v: &mut v,
            layout,
            stride: layout.elements(1),
        };
        qk_norm_rope_kv_write(
            &qkv,
            Some(norm),
            Rotation {
                angles: &angles,
                query_scale: None,
            },
            CachedValues::Projected,
            &runs,
            &mut kv,
            &mut q,
        );

        let head = |token: usize, head: usize| &qkv[(token * (heads + 2 * kv_heads) + head) * dim..][..dim];
        let expect = |token: usize, x: &[f32], weight: &[f32]| -> Vec<f64> {
            let square: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / dim as f64;
            let normed = |i: usize| f64::from(x[i]) / (square + 1e-6).sqrt() * f64::from(weight[i]);
            let rotated = |i: usize| {
                let (pair, sign) = if i < pairs {
                    (i + pairs, -1.0)
                } else {
                    (i - pairs, 1.0)
                };
                let angle = (start + token) as f64 * f64::from(frequencies[i % pairs]);
                normed(i) * angle.cos() + sign * normed(pair) * angle.sin()
            };
            (0..dim)
                .map(|i| if i < 2 * pairs { rotated(i) } else { normed(i) })
                .collect()
        };
        for token in 0..3 {
            for h in 0..heads {
                let got = &q[(token * heads + h) * dim..][..dim];
                assert_close(
                    got,
                    &expect(token, head(token, h), &weights[0]),
                    1e-6,
                    &format!("q, seed {seed}"),
                );
            }
            let (block, slot) = ((start + token) / 8, (start + token) % 8);
            for h in 0..kv_heads {
                let offset = layout.head_offset(layout.elements(1), table[block], h);
                let key: Vec<f32> = (0..dim).map(|d| k[offset + d * 8 + slot]).collect();
                assert_close(
                    &key,
                    &expect(token, head(token, heads + h), &weights[1]),
                    1e-6,
                    &format!("k, {seed}"),
                );
                let value = &v[offset + slot * dim..][..dim];
                assert_eq!(value, head(token, heads + kv_heads + h), "v, seed {seed}");
            }
        }
    }
}
