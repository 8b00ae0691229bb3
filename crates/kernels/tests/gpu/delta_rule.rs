//! Gated DeltaNet. One body for the CPU twins and the GPU.

mod long;

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuSlab, GpuSlice};
use plimsoll_kernels as cpu;
use plimsoll_kernels::cuda::{DeltaArgs, DeltaKernels, GpuDeltaGates, GpuStateRun, GpuStateTile};
use plimsoll_kernels::{DeltaGates, DeltaLayout, StateRun};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use crate::common::{assert_close, download, gpu, poisoned, random, rng, upload, widen};

/// Of an output that is rounded to bf16 once.
const BF16: f64 = 4e-3;
/// Of states in f32.
const F32: f64 = 1e-4;
/// Of states in f32 from keys and values in bf16: those near the middle between two bf16 numbers may be rounded to either, and one of
/// them is a large part of the state of a few tokens.
const BF16_KEYS: f64 = 1.5e-3;
/// Of states from chunks, whose operands have 16 bits of mantissa.
const CHUNKS: f64 = 3e-5;
const EPS: f32 = 1e-6;
/// Elements behind an output that must stay poisoned.
const GUARD: usize = 64;

/// A layer, and requests whose tokens go through it.
struct Case {
    layout: DeltaLayout,
    conv: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    requests: Vec<Request>,
    /// Where the state of each request is in the end.
    slots: Vec<usize>,
    /// Where it is now and then meanwhile.
    others: Vec<usize>,
    num_slots: usize,
}

struct Request {
    /// `[tokens, width]`.
    x: Vec<bf16>,
    tokens: usize,
}

/// What becomes of a request: all outputs, and the states behind its last token.
#[derive(Clone, Debug, Default, PartialEq)]
struct Served {
    out: Vec<f32>,
    conv_state: Vec<f32>,
    head_states: Vec<f32>,
}

/// The layer on a device, with the states of all slots.
trait Layer {
    /// Whether rows and runs of nobody may be among the others.
    const PADS: bool;

    /// How far states may be off.
    const STATES: f64;

    /// How q, k, v and outputs before the norm are rounded.
    fn rounded(x: f64) -> f64;

    /// Outputs of all rows of runs and of what their requests had before.
    fn step(&mut self, runs: &[Part], x: &[bf16]) -> Vec<f32>;

    /// Of the convolution and of the recurrence.
    fn states(&self) -> [Vec<f32>; 2];
}

/// A run of a request.
struct Part {
    rows: StateRun,
    /// Tokens of the request before it.
    start: usize,
    /// Tokens of the prompt may be computed in chunks.
    of_prompt: bool,
}

/// How the tokens of requests are cut into runs.
#[derive(Clone, Copy, Debug)]
struct Cuts {
    /// Most tokens of a run, but for those up to the next multiple.
    most: usize,
    /// Runs of a prompt end at multiples of so many tokens, or with it.
    multiple: usize,
    /// The part of the tokens that are the prompt's.
    prompt: f64,
}

impl Cuts {
    fn anywhere(most: usize) -> Self {
        Self {
            most,
            multiple: 1,
            prompt: 1.0,
        }
    }

    /// The length of a run behind `done` of `tokens`, of one token as often as of many; and whether it is of the prompt.
    fn next(&self, rng: &mut StdRng, done: usize, tokens: usize) -> (usize, bool) {
        let prompt = (self.prompt * tokens as f64) as usize;
        let (end, multiple) = match done < prompt {
            true => (prompt, self.multiple),
            false => (tokens, 1),
        };
        let most = self.most.min(end - done);
        let len = match rng.random_range(0..3) {
            0 => 1,
            1 => most,
            _ => rng.random_range(1..=most),
        };
        (
            (done + len).next_multiple_of(multiple).min(end) - done,
            done < prompt,
        )
    }
}

impl Case {
    fn new(rng: &mut StdRng, layout: DeltaLayout, lens: &[usize]) -> Self {
        let mut values = |len: usize, low: f32, high: f32| -> Vec<f32> {
            (0..len).map(|_| rng.random_range(low..high)).collect()
        };
        let (conv, norm) = (
            values(layout.channels() * layout.taps, -1.0, 1.0),
            values(layout.value_dim, 0.5, 2.0),
        );
        // From heads that forget within a token to such that hardly do.
        let a_log = values(layout.value_heads, -6.0, 2.0);
        let dt_bias = values(layout.value_heads, -4.0, 2.0);
        let requests = lens.iter().map(|&tokens| {
            let mut x = random(rng, tokens * layout.width());
            for row in x.chunks_exact_mut(layout.width()) {
                let of_gates = row.iter_mut().skip(layout.channels() + layout.values());
                of_gates.for_each(|x| *x = bf16::from_f32(4.0 * x.to_f32()));
            }
            Request { x, tokens }
        });
        let requests: Vec<Request> = requests.collect();
        let num_slots = 2 * requests.len() + 2;
        let mut slots: Vec<usize> = (0..num_slots).collect();
        slots.shuffle(rng);
        let others = slots.split_off(requests.len())[..requests.len()].to_vec();
        Self {
            layout,
            conv,
            a_log,
            dt_bias,
            norm,
            requests,
            slots,
            others,
            num_slots,
        }
    }

    /// The definition in `f64`, token by token.
    fn exact(&self, request: &Request, rounded: fn(f64) -> f64) -> [Vec<f64>; 2] {
        let layout = &self.layout;
        let DeltaLayout {
            value_heads,
            key_heads,
            adjacent,
            key_dim,
            value_dim,
            taps,
        } = *layout;
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let at = |token: usize, channel: usize| request.x[token * layout.width() + channel].to_f64();
        let of_head = |head: usize| {
            let (mut out, mut state) = (Vec::new(), vec![0.0; key_dim * value_dim]);
            for token in 0..request.tokens {
                let mixed = |channel: usize| {
                    let seen = (0..taps.min(token + 1)).map(|back| {
                        f64::from(self.conv[channel * taps + taps - 1 - back]) * at(token - back, channel)
                    });
                    silu(seen.sum())
                };
                let unit = |first: usize, scale: f64| {
                    let key_head = match adjacent {
                        1 => head % key_heads,
                        _ => head / (value_heads / key_heads),
                    };
                    let first = first + key_head * key_dim;
                    let x: Vec<f64> = (first..first + key_dim).map(mixed).collect();
                    let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    let scaled = x.into_iter().map(|x| rounded(x / length * scale));
                    scaled.collect::<Vec<f64>>()
                };
                let (q, k) = (unit(0, (key_dim as f64).sqrt().recip()), unit(layout.keys(), 1.0));
                let ba = |part: usize| at(token, layout.projected() - (2 - part) * value_heads + head);
                let rate = f64::from(self.a_log[head]).exp();
                let decay = (-rate * (ba(1) + f64::from(self.dt_bias[head])).exp().ln_1p()).exp();
                let beta = 1.0 / (1.0 + (-ba(0)).exp());
                let first = head * value_dim;
                let mut values: Vec<f64> = (0..value_dim)
                    .map(|column| {
                        let of_column = |key: usize| key * value_dim + column;
                        (0..key_dim).for_each(|key| state[of_column(key)] *= decay);
                        let known: f64 = (0..key_dim).map(|key| state[of_column(key)] * k[key]).sum();
                        let delta = beta * (rounded(mixed(2 * layout.keys() + first + column)) - known);
                        (0..key_dim).for_each(|key| state[of_column(key)] += k[key] * delta);
                        rounded((0..key_dim).map(|key| state[of_column(key)] * q[key]).sum())
                    })
                    .collect();
                let mean = values.iter().map(|x| x * x).sum::<f64>() / value_dim as f64;
                let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
                for (column, value) in values.iter_mut().enumerate() {
                    let gate = at(token, layout.channels() + first + column);
                    *value *= factor * f64::from(self.norm[column]) * silu(gate);
                }
                out.push(values);
            }
            (out, state)
        };
        let heads = (0..value_heads).into_par_iter().map(of_head);
        let (outs, states): (Vec<Vec<Vec<f64>>>, Vec<Vec<f64>>) = heads.unzip();
        let rows = (0..request.tokens).flat_map(|token| outs.iter().flat_map(move |head| &head[token]));
        [rows.copied().collect(), states.concat()]
    }

    /// The last inputs of the convolution, oldest first.
    fn last_inputs(&self, request: &Request) -> Vec<f32> {
        let past = self.layout.taps - 1;
        let tokens = (0..past).map(|tap| (request.tokens + tap).checked_sub(past));
        let inputs = tokens.flat_map(|token| match token {
            None => vec![0.0; self.layout.channels()],
            Some(token) => {
                let row = &request.x[token * self.layout.width()..];
                widen(&row[..self.layout.channels()])
            }
        });
        inputs.collect()
    }

    /// Serves all requests in steps of random runs in random order.
    fn serve<L: Layer>(&self, rng: &mut StdRng, layer: &mut L, cuts: Cuts) -> Vec<Served> {
        let width = self.layout.width();
        let mut served = vec![Served::default(); self.requests.len()];
        let mut done = vec![0; self.requests.len()];
        let mut at = vec![None; self.requests.len()];
        loop {
            let left = (0..done.len()).filter(|&index| done[index] < self.requests[index].tokens);
            let mut order: Vec<usize> = left.collect();
            if order.is_empty() {
                break;
            }
            order.shuffle(rng);
            order.truncate(rng.random_range(1..=order.len()));
            let (mut runs, mut x) = (Vec::new(), Vec::new());
            for &index in &order {
                let request = &self.requests[index];
                let (len, of_prompt) = cuts.next(rng, done[index], request.tokens);
                for _ in 0..rng.random_range(0..3) * usize::from(L::PADS) {
                    x.extend(vec![bf16::NAN; width]);
                }
                let ends = done[index] + len == request.tokens;
                let after = match ends || rng.random() {
                    true => self.slots[index],
                    false => self.others[index],
                };
                let rows = StateRun {
                    first_row: x.len() / width,
                    len,
                    before: at[index].replace(after),
                    after,
                };
                runs.push(Part {
                    rows,
                    start: done[index],
                    of_prompt,
                });
                x.extend(&request.x[done[index] * width..(done[index] + len) * width]);
                done[index] += len;
            }
            let out = layer.step(&runs, &x);
            let values = self.layout.values();
            for (Part { rows, .. }, index) in runs.iter().zip(order) {
                served[index]
                    .out
                    .extend(&out[rows.first_row * values..(rows.first_row + rows.len) * values]);
            }
        }
        let [conv, heads] = layer.states();
        let (conv_state, head_states) = (self.layout.conv_state(), self.layout.head_states());
        for (served, &slot) in served.iter_mut().zip(&self.slots) {
            served.conv_state = conv[slot * conv_state..(slot + 1) * conv_state].to_vec();
            served.head_states = heads[slot * head_states..(slot + 1) * head_states].to_vec();
        }
        let of_requests = |slot: &usize| self.slots.contains(slot) || self.others.contains(slot);
        for slot in (0..self.num_slots).filter(|slot| !of_requests(slot)) {
            let untouched = conv[slot * conv_state..(slot + 1) * conv_state]
                .iter()
                .chain(&heads[slot * head_states..(slot + 1) * head_states])
                .all(|x| x.is_nan());
            assert!(untouched, "slot {slot} is nobody's");
        }
        served
    }

    fn check<L: Layer>(&self, what: &str, served: &[Served]) {
        for (request, served) in self.requests.iter().zip(served) {
            let what = format!("{what}, {:?}, {} tokens", self.layout, request.tokens);
            let [out, states] = self.exact(request, L::rounded);
            assert_close(&format!("{what}: outputs"), &served.out, &out, BF16);
            assert_close(
                &format!("{what}: states"),
                &served.head_states,
                &states,
                L::STATES,
            );
            assert_eq!(served.conv_state, self.last_inputs(request), "{what}");
        }
    }
}

struct OnCpu<'a> {
    case: &'a Case,
    conv: Vec<f32>,
    heads: Vec<f32>,
}

impl<'a> OnCpu<'a> {
    fn new(case: &'a Case) -> Self {
        Self {
            case,
            conv: vec![f32::NAN; case.num_slots * case.layout.conv_state()],
            heads: vec![f32::NAN; case.num_slots * case.layout.head_states()],
        }
    }
}

impl Layer for OnCpu<'_> {
    const PADS: bool = false;
    const STATES: f64 = F32;

    fn rounded(x: f64) -> f64 {
        x
    }

    fn step(&mut self, runs: &[Part], x: &[bf16]) -> Vec<f32> {
        let runs: Vec<StateRun> = runs.iter().map(|part| part.rows).collect();
        let Case {
            layout,
            conv,
            a_log,
            dt_bias,
            norm,
            ..
        } = self.case;
        let mut x = widen(x);
        let mut out = vec![f32::NAN; x.len() / layout.width() * layout.values()];
        let gates = DeltaGates {
            a_log,
            dt_bias,
            norm,
            eps: EPS,
        };
        cpu::causal_conv(layout, conv, &runs, &mut self.conv, &mut x);
        cpu::gated_delta_rule(layout, gates, &runs, &mut x, &mut self.heads, &mut out);
        out
    }

    fn states(&self) -> [Vec<f32>; 2] {
        [self.conv.clone(), self.heads.clone()]
    }
}

fn floats(slab: &GpuSlab, len: usize) -> GpuSlice<'_, f32> {
    slab.slice().range(0..len)
}

struct OnGpu<'a> {
    gpu: &'a Gpu,
    kernels: &'a DeltaKernels,
    case: &'a Case,
    weights: [GpuSlab; 4],
    states: [GpuSlab; 2],
    rng: StdRng,
}

impl<'a> OnGpu<'a> {
    fn new(gpu: &'a Gpu, kernels: &'a DeltaKernels, case: &'a Case, rng: StdRng) -> Self {
        let weights = [&case.conv, &case.a_log, &case.dt_bias, &case.norm];
        let [conv, heads] = [case.layout.conv_state(), case.layout.head_states()]
            .map(|elements| poisoned::<f32>(gpu, case.num_slots * elements));
        Self {
            gpu,
            kernels,
            case,
            weights: weights.map(|weight| upload(gpu, weight)),
            states: [conv, heads],
            rng,
        }
    }
}

impl Layer for OnGpu<'_> {
    const PADS: bool = true;
    const STATES: f64 = BF16_KEYS;

    fn rounded(x: f64) -> f64 {
        bf16::from_f64(x).to_f64()
    }

    fn step(&mut self, runs: &[Part], x: &[bf16]) -> Vec<f32> {
        let (gpu, layout) = (self.gpu, self.case.layout);
        let rows = x.len() / layout.width();
        // Those in chunks first, those of one token and padding last, otherwise in any order.
        let mut list: Vec<GpuStateRun> = runs
            .iter()
            .map(|part| GpuStateRun::new(part.rows, part.start, part.of_prompt))
            .collect();
        list.extend(vec![GpuStateRun::PADDING; self.rng.random_range(0..4)]);
        list.shuffle(&mut self.rng);
        list.sort_by_key(|run| (!run.in_chunks(), run.is_of_one_token()));
        let tiles: Vec<GpuStateTile> = GpuStateTile::all(&list).collect();
        assert!(tiles.len() <= GpuStateTile::most(rows, list.len()));
        let chunks: Vec<GpuStateTile> = GpuStateTile::chunks(&list).collect();
        assert!(chunks.len() <= GpuStateTile::most_chunks(rows, list.len()));
        let [on_gpu, tiles_on_gpu] = [upload(gpu, &list), upload(gpu, &tiles)];
        // Memory for at least one.
        let chunks_on_gpu = upload(gpu, &[&chunks[..], &tiles[..1]].concat());
        let x_on_gpu = upload(gpu, x);
        let room = rows * DeltaKernels::scratch_floats(&layout);
        let scratch = poisoned::<f32>(gpu, room + GUARD);
        let len = rows * layout.values();
        let out = poisoned::<bf16>(gpu, len + GUARD);
        let [conv, a_log, dt_bias, norm] = &self.weights;
        let args = DeltaArgs {
            layout,
            conv: floats(conv, layout.channels() * layout.taps),
            gates: GpuDeltaGates {
                a_log: floats(a_log, layout.value_heads),
                dt_bias: floats(dt_bias, layout.value_heads),
                norm: floats(norm, layout.value_dim),
                eps: EPS,
            },
            runs: on_gpu.slice().range(0..list.len()),
            tiles: tiles_on_gpu.slice().range(0..tiles.len()),
            chunks: chunks_on_gpu.slice().range(0..chunks.len()),
            in_chunks: list.iter().filter(|run| run.in_chunks()).count(),
            of_one_token: list.iter().filter(|run| run.is_of_one_token()).count(),
            x: x_on_gpu.slice().range(0..x.len()),
            conv_states: floats(&self.states[0], self.case.num_slots * layout.conv_state()),
            head_states: floats(&self.states[1], self.case.num_slots * layout.head_states()),
            scratch: floats(&scratch, room),
            out: out.slice().range(0..len),
        };
        self.kernels.forward(&args).unwrap();
        let after: Vec<f32> = download(gpu, &scratch, room + GUARD);
        assert!(after[room..].iter().all(|x| x.to_bits() == u32::MAX), "scratch");
        let mut all: Vec<bf16> = download(gpu, &out, len + GUARD);
        assert!(
            all.split_off(len).iter().all(|x| x.to_bits() == u16::MAX),
            "outputs"
        );
        let x_after: Vec<bf16> = download(gpu, &x_on_gpu, x.len());
        let same = x_after
            .iter()
            .zip(x)
            .all(|(after, x)| after.to_bits() == x.to_bits());
        assert!(same, "inputs stay as they are");
        widen(&all)
    }

    fn states(&self) -> [Vec<f32>; 2] {
        let layout = &self.case.layout;
        let [conv, heads] = &self.states;
        [
            download(self.gpu, conv, self.case.num_slots * layout.conv_state()),
            download(self.gpu, heads, self.case.num_slots * layout.head_states()),
        ]
    }
}

/// Key heads, value heads, elements of each, taps.
const SHAPES: [[usize; 5]; 8] = [
    // The golden model's.
    [1, 3, 16, 24, 4],
    [2, 2, 64, 64, 4],
    [2, 4, 128, 128, 4],
    [1, 2, 256, 256, 3],
    [3, 3, 72, 40, 2],
    [1, 1, 8, 8, 4],
    [2, 6, 136, 200, 4],
    // Qwen3.5-9B's.
    [16, 32, 128, 128, 4],
];

fn layout([key_heads, value_heads, key_dim, value_dim, taps]: [usize; 5]) -> DeltaLayout {
    DeltaLayout {
        key_heads,
        value_heads,
        adjacent: value_heads / key_heads,
        key_dim,
        value_dim,
        taps,
    }
}

/// Heads of v beside those with the same head of q and k, and so that these take turns.
fn orders(shape: [usize; 5]) -> impl Iterator<Item = DeltaLayout> {
    let grouped = layout(shape);
    let in_turn = DeltaLayout {
        adjacent: 1,
        ..grouped
    };
    let count = 1 + usize::from(grouped.key_heads.min(grouped.adjacent) > 1);
    [grouped, in_turn].into_iter().take(count)
}

/// Tokens of requests: some shorter than the convolution, some around the lengths in which kernels go through them.
fn lens(rng: &mut StdRng, layout: &DeltaLayout) -> Vec<usize> {
    let mut lens = vec![1, 2, 3, 16, 17, 33, 64, 65, 66];
    let longest = if layout.value_heads > 8 { 140 } else { 300 };
    lens.extend((0..3).map(|_| rng.random_range(1..longest)));
    lens
}

#[test]
fn the_delta_rule_on_the_cpu() {
    let mut rng = rng("delta_rule on the CPU");
    for layout in SHAPES.into_iter().take(6).flat_map(orders) {
        let lens = lens(&mut rng, &layout);
        let case = Case::new(&mut rng, layout, &lens);
        let served = case.serve(&mut rng, &mut OnCpu::new(&case), Cuts::anywhere(100));
        case.check::<OnCpu<'_>>("CPU", &served);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn the_delta_rule() {
    let (gpu, mut rng) = (gpu(), rng("delta_rule"));
    let kernels = DeltaKernels::load(&gpu).unwrap();
    for layout in SHAPES.into_iter().flat_map(orders) {
        let lens = lens(&mut rng, &layout);
        let case = Case::new(&mut rng, layout, &lens);
        let mut serve = |cuts: Cuts| {
            let mut layer = OnGpu::new(&gpu, &kernels, &case, StdRng::from_rng(&mut rng));
            case.serve(&mut rng, &mut layer, cuts)
        };
        let multiple = kernels.chunk(&layout);
        let of = |most, prompt| Cuts {
            most,
            multiple,
            prompt,
        };
        let [whole, half, single] = [1.0, 0.5, 0.0].map(|prompt| serve(of(usize::MAX, prompt)));
        case.check::<OnGpu<'_>>("GPU", &whole);
        case.check::<OnGpu<'_>>("GPU, half of the tokens one by one", &half);
        // Of the same q, k and v, chunks make the same states as single tokens do.
        for (whole, single) in whole.iter().zip(&single) {
            let single: Vec<f64> = single.head_states.iter().copied().map(f64::from).collect();
            let what = format!("chunks beside single tokens, {layout:?}");
            assert_close(&what, &whole.head_states, &single, CHUNKS);
        }
        for most in [1, 7, 40, usize::MAX] {
            // Prompts cut at these multiples and answers anywhere, beside anyone: every bit is the same.
            for (prompt, expected) in [(1.0, &whole), (0.5, &half), (0.0, &single)] {
                assert!(
                    serve(of(most, prompt)) == *expected,
                    "{layout:?}: runs of up to {most} tokens, {prompt} of them prompts"
                );
            }
            // Cut anywhere: rounded otherwise, and as close.
            case.check::<OnGpu<'_>>("GPU, cut anywhere", &serve(Cuts::anywhere(most)));
        }
    }
}

/// What a slot holds of an earlier request is nothing to the next, and the same steps give the same bits.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn slots_are_used_again() {
    let (gpu, mut rng) = (gpu(), rng("slots of the delta rule"));
    let kernels = DeltaKernels::load(&gpu).unwrap();
    let layout = layout(SHAPES[2]);
    let case = Case::new(&mut rng, layout, &[3, 70, 1]);
    let mut layer = OnGpu::new(&gpu, &kernels, &case, StdRng::from_rng(&mut rng));
    let cuts = Cuts {
        most: 50,
        multiple: kernels.chunk(&layout),
        prompt: 0.7,
    };
    let first = case.serve(&mut rng, &mut layer, cuts);
    assert!(case.serve(&mut rng, &mut layer, cuts) == first);
    case.check::<OnGpu<'_>>("GPU, a second time", &first);
}
