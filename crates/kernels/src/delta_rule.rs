//! Gated DeltaNet ([Yang, Kautz, Hatamizadeh](https://arxiv.org/abs/2412.06464)): attention whose memory of all earlier
//! tokens is one matrix of fixed size for each head.
//!
//! The recurrence runs token by token. Chunked forms compute the same from products of matrices, which pays where these are
//! fast, but their rounding depends on where chunks begin. This one gives the same bits however a prompt is cut into steps.

use crate::parallel::{Disjoint, run, run_ranges};
use crate::simd::{Kernel, LANES, Level, Simd, dispatch, times_sigmoid};

mod norm;

pub use norm::{DeltaGates, sigmoid_gate};
use norm::{GatedNorm, Gates, normalise};

/// Shape of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaLayout {
    /// Heads of q and of k.
    pub key_heads: usize,
    /// Heads of v and of the state, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Heads of v in a row that share a head of q and k: all that do, or 1 where the heads of q and k take turns, as in GGUF files.
    pub adjacent: usize,
    /// Elements of a head of q and of k, at most [`DeltaLayout::MAX_HEAD_DIM`].
    pub key_dim: usize,
    /// Elements of a head of v, at most [`DeltaLayout::MAX_HEAD_DIM`].
    pub value_dim: usize,
    /// Tokens that the convolution sees, the current one included, from 2 to [`DeltaLayout::MAX_TAPS`].
    pub taps: usize,
}

impl DeltaLayout {
    /// Elements of the largest head.
    pub const MAX_HEAD_DIM: usize = 256;
    /// Tokens that the longest convolution sees.
    pub const MAX_TAPS: usize = 8;

    /// The head of q and k of a head of v.
    pub fn key_head(&self, value_head: usize) -> usize {
        value_head / self.adjacent % self.key_heads
    }

    /// Elements of q, and of k.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Elements of v, of the output and of its gate.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Elements of q, k and v: what the convolution mixes.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Elements of q, k, v, the gate z of the output, and b and a for each head of v, which make the gates of the state.
    pub fn projected(&self) -> usize {
        self.channels() + self.values() + 2 * self.value_heads
    }

    /// Elements from one row of these to the next: a multiple of 8, so that rows begin at whole vectors.
    pub fn width(&self) -> usize {
        self.projected().next_multiple_of(8)
    }

    /// Elements of the convolution's state of one request: its last inputs, `[taps - 1][channels]`.
    pub fn conv_state(&self) -> usize {
        (self.taps - 1) * self.channels()
    }

    /// Elements of the recurrence's state of one request: `[value_heads][key_dim][value_dim]`.
    pub fn head_states(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }
}

/// Consecutive rows of one request, in the order of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateRun {
    /// Index of the first row in the batch.
    pub first_row: usize,
    /// Number of rows.
    pub len: usize,
    /// The slot of the request's state before the first row, which stays as it is unless it is `after` too; `None` where that is
    /// the request's first token: the state is zero.
    pub before: Option<usize>,
    /// The slot of its state after the last row.
    pub after: usize,
}

/// Checks what the kernels rely on: rows and slots exist, no two runs share rows, and none reads or writes a slot that another
/// writes.
fn check(runs: &[StateRun], rows: usize, slots: usize) {
    let mut writers = vec![None; slots];
    let mut end = 0;
    for (index, run) in runs.iter().enumerate() {
        assert!(run.first_row >= end, "rows of runs are ascending");
        end = run.first_row + run.len;
        assert!(
            end <= rows && run.before.unwrap_or(0).max(run.after) < slots,
            "{run:?} in {rows} rows and {slots} slots"
        );
        let other = writers[run.after].replace(index);
        assert!(other.is_none(), "two runs write slot {}", run.after);
    }
    for (index, run) in runs.iter().enumerate() {
        let writer = run.before.and_then(|before| writers[before]);
        assert!(
            writer.is_none_or(|writer| writer == index),
            "{run:?} reads what another run writes"
        );
    }
}

/// The causal convolution over tokens, each channel by itself, then SiLU: `x` is `[tokens, layout.width()]`, of whose rows
/// the first `layout.channels()` elements are replaced; `weight` is `[channels][taps]`, the last tap that of the token
/// itself. `states` is `[slots]` of [`DeltaLayout::conv_state`]. Every row must belong to one of `runs`.
pub fn causal_conv(
    layout: &DeltaLayout,
    weight: &[f32],
    runs: &[StateRun],
    states: &mut [f32],
    x: &mut [f32],
) {
    causal_conv_at(Level::detect(), layout, weight, runs, states, x);
}

fn causal_conv_at(
    level: Level,
    layout: &DeltaLayout,
    weight: &[f32],
    runs: &[StateRun],
    states: &mut [f32],
    x: &mut [f32],
) {
    let (channels, width) = (layout.channels(), layout.width());
    assert!(
        (2..=DeltaLayout::MAX_TAPS).contains(&layout.taps),
        "{} taps",
        layout.taps
    );
    assert_eq!(
        weight.len(),
        channels * layout.taps,
        "weight is not [channels, taps]"
    );
    check(runs, x.len() / width, states.len() / layout.conv_state());
    let (x, states) = (Disjoint::new(x), Disjoint::new(states));
    for run in runs {
        run_ranges(channels, 4 * LANES, &|range| {
            for first in range.clone().step_by(LANES) {
                let conv = Conv {
                    layout,
                    weight,
                    run,
                    first,
                    lanes: LANES.min(range.end - first),
                    states: &states,
                    x: &x,
                };
                dispatch(level, conv);
            }
        });
    }
}

/// A few neighbouring channels of one run.
struct Conv<'a> {
    layout: &'a DeltaLayout,
    weight: &'a [f32],
    run: &'a StateRun,
    first: usize,
    lanes: usize,
    states: &'a Disjoint<'a, f32>,
    x: &'a Disjoint<'a, f32>,
}

impl Kernel for Conv<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self {
            layout,
            weight,
            run,
            first,
            lanes,
            states,
            x,
        } = self;
        let (taps, past) = (layout.taps, layout.taps - 1);
        // The inputs of the tokens before and of this one.
        let mut seen = [[0f32; LANES]; DeltaLayout::MAX_TAPS];
        let mut weights = [[0f32; LANES]; DeltaLayout::MAX_TAPS];
        for (tap, weights) in weights[..taps].iter_mut().enumerate() {
            for (lane, to) in weights[..lanes].iter_mut().enumerate() {
                *to = weight[(first + lane) * taps + tap];
            }
        }
        let at = |slot: usize, tap: usize| slot * layout.conv_state() + tap * layout.channels() + first;
        if let Some(before) = run.before {
            for (tap, seen) in seen[..past].iter_mut().enumerate() {
                // SAFETY: these channels of this slot are written by this task or by none.
                seen[..lanes].copy_from_slice(unsafe { states.shared(at(before, tap), lanes) });
            }
        }
        for row in run.first_row..run.first_row + run.len {
            // SAFETY: these channels of this row are this task's alone.
            let x = unsafe { x.part(row * layout.width() + first, lanes) };
            seen[past][..lanes].copy_from_slice(x);
            let mut out = [0f32; LANES];
            // SAFETY: the features are there, and all are arrays of sixteen.
            unsafe {
                let mut sum = S::splat(0.0);
                for (seen, weight) in seen[..taps].iter().zip(&weights) {
                    sum = S::fma(S::load(seen.as_ptr()), S::load(weight.as_ptr()), sum);
                }
                S::store(out.as_mut_ptr(), times_sigmoid::<S>(sum, sum));
            }
            x.copy_from_slice(&out[..lanes]);
            seen.copy_within(1..taps, 0);
        }
        for (tap, seen) in seen[..past].iter().enumerate() {
            // SAFETY: these channels of this slot are this task's alone.
            unsafe { states.part(at(run.after, tap), lanes) }.copy_from_slice(&seen[..lanes]);
        }
    }
}

/// The gated delta rule, from [`causal_conv`]'s output to the gated and normalised output. For each token and head, with q
/// and k of unit length and q divided by the root of `key_dim`,
///
/// ```text
/// S = exp(-exp(a_log) softplus(a + dt_bias)) S
/// S = S + k (sigmoid(b) (v - Sᵀk))ᵀ
/// out = norm(Sᵀq) silu(z)
/// ```
///
/// `x` is `[tokens, layout.width()]`: q, k, v, z, b, a, padding, of which q and k are scaled in place. `states` is `[slots]` of
/// [`DeltaLayout::head_states`], `out` is `[tokens, layout.values()]`. Every row must belong to one of `runs`.
pub fn gated_delta_rule(
    layout: &DeltaLayout,
    gates: DeltaGates<'_>,
    runs: &[StateRun],
    x: &mut [f32],
    states: &mut [f32],
    out: &mut [f32],
) {
    gated_delta_rule_at(Level::detect(), layout, gates, runs, x, states, out);
}

fn gated_delta_rule_at(
    level: Level,
    layout: &DeltaLayout,
    gates: DeltaGates<'_>,
    runs: &[StateRun],
    x: &mut [f32],
    states: &mut [f32],
    out: &mut [f32],
) {
    let heads = layout.value_heads;
    let rows = out.len() / layout.values();
    assert!(heads.is_multiple_of(layout.key_heads), "{layout:?}");
    assert!(
        layout.key_dim.max(layout.value_dim) <= DeltaLayout::MAX_HEAD_DIM,
        "{layout:?}"
    );
    assert_eq!(x.len(), rows * layout.width(), "as many rows of everything");
    gates.check(layout);
    check(runs, rows, states.len() / layout.head_states());
    {
        let x = Disjoint::new(x);
        run_ranges(rows, 4, &|rows| {
            for row in rows {
                // SAFETY: rows are disjoint.
                let qk = unsafe { x.part(row * layout.width(), 2 * layout.keys()) };
                let (q, k) = qk.split_at_mut(layout.keys());
                normalise(level, q, layout.key_dim, (layout.key_dim as f32).sqrt().recip());
                normalise(level, k, layout.key_dim, 1.0);
            }
        });
    }
    let (x, states, out) = (&*x, Disjoint::new(states), Disjoint::new(out));
    run(runs.len() * heads, &|_, task| {
        let (run, head) = (&runs[task / heads], task % heads);
        let size = layout.key_dim * layout.value_dim;
        // SAFETY: this head of this slot is this task's alone.
        let state = unsafe { states.part((run.after * heads + head) * size, size) };
        match run.before {
            None => state.fill(0.0),
            Some(before) if before == run.after => {}
            Some(before) => {
                // SAFETY: no task writes this slot.
                let before = unsafe { states.shared((before * heads + head) * size, size) };
                state.copy_from_slice(before);
            }
        }
        let recurrence = Recurrence {
            layout,
            gates,
            run,
            head,
            x,
            state,
            out: &out,
        };
        dispatch(level, recurrence);
    });
}

/// One head of one run.
struct Recurrence<'a> {
    layout: &'a DeltaLayout,
    gates: DeltaGates<'a>,
    run: &'a StateRun,
    head: usize,
    x: &'a [f32],
    /// `[key_dim][value_dim]`.
    state: &'a mut [f32],
    out: &'a Disjoint<'a, f32>,
}

impl Kernel for Recurrence<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self {
            layout,
            gates,
            run,
            head,
            x,
            state,
            out,
        } = self;
        let (keys, dim, width) = (layout.keys(), layout.value_dim, layout.width());
        let key_head = layout.key_head(head);
        let mut delta = [0f32; DeltaLayout::MAX_HEAD_DIM];
        let delta = &mut delta[..dim];
        for row in run.first_row..run.first_row + run.len {
            let x = &x[row * width..(row + 1) * width];
            let of_key = |start: usize| &x[start + key_head * layout.key_dim..][..layout.key_dim];
            let (q, k) = (of_key(0), of_key(keys));
            let of_value = |start: usize| &x[start + head * dim..][..dim];
            let (v, z) = (of_value(2 * keys), of_value(layout.channels()));
            let Gates { decay, beta } =
                gates.of(head, &x[layout.channels() + layout.values()..layout.projected()]);
            delta.fill(0.0);
            for (state, &k) in state.chunks_exact_mut(dim).zip(k) {
                for (state, sum) in state.iter_mut().zip(&mut *delta) {
                    *state *= decay;
                    *sum += *state * k;
                }
            }
            for (delta, v) in delta.iter_mut().zip(v) {
                *delta = (v - *delta) * beta;
            }
            // SAFETY: this head of this row is this task's alone.
            let out = unsafe { out.part(row * layout.values() + head * dim, dim) };
            out.fill(0.0);
            for ((state, &k), &q) in state.chunks_exact_mut(dim).zip(k).zip(q) {
                for ((state, delta), out) in state.iter_mut().zip(&*delta).zip(&mut *out) {
                    *state += k * *delta;
                    *out += *state * q;
                }
            }
            let norm = GatedNorm {
                weight: gates.norm,
                eps: gates.eps,
                gate: z,
                out,
            };
            // SAFETY: the features are there.
            unsafe { norm.run::<S>() };
        }
    }
}

#[cfg(test)]
mod tests;
