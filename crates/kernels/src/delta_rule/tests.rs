use rand::Rng;
use rand::rngs::StdRng;

use super::*;
use crate::testing::{assert_close, assert_same_bits, normal, rng, seeds};

/// Random inputs of a layer.
struct Case {
    layout: DeltaLayout,
    conv: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    x: Vec<f32>,
}

const EPS: f32 = 1e-6;

impl Case {
    fn new(rng: &mut StdRng, rows: usize) -> Self {
        let (key_heads, sharing) = (rng.random_range(1..4), rng.random_range(1..4));
        let layout = DeltaLayout {
            key_heads,
            value_heads: key_heads * sharing,
            adjacent: if rng.random() { sharing } else { 1 },
            key_dim: rng.random_range(1..40),
            value_dim: rng.random_range(1..40),
            taps: rng.random_range(2..=DeltaLayout::MAX_TAPS),
        };
        Self::of(rng, layout, rows)
    }

    fn of(rng: &mut StdRng, layout: DeltaLayout, rows: usize) -> Self {
        let heads = layout.value_heads;
        Self {
            layout,
            conv: normal(rng, layout.channels() * layout.taps),
            a_log: normal(rng, heads),
            dt_bias: normal(rng, heads),
            norm: normal(rng, layout.value_dim),
            x: normal(rng, rows * layout.width()),
        }
    }

    fn gates(&self) -> DeltaGates<'_> {
        DeltaGates {
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
            norm: &self.norm,
            eps: EPS,
        }
    }

    /// What the layer makes of these rows, which change `states`.
    fn forward(
        &self,
        level: Level,
        runs: &[StateRun],
        rows: std::ops::Range<usize>,
        states: &mut States,
    ) -> Vec<f32> {
        let layout = &self.layout;
        let mut x = self.x[rows.start * layout.width()..rows.end * layout.width()].to_vec();
        let mut out = vec![f32::NAN; rows.len() * layout.values()];
        causal_conv_at(level, layout, &self.conv, runs, &mut states.conv, &mut x);
        gated_delta_rule_at(
            level,
            layout,
            self.gates(),
            runs,
            &mut x,
            &mut states.heads,
            &mut out,
        );
        out
    }

    /// The definition, in `f64`: the convolution by indices of tokens, the recurrence as transformers'
    /// `torch_recurrent_gated_delta_rule` has it, of the tokens of one request.
    fn exact(&self, rows: std::ops::Range<usize>) -> Vec<f64> {
        let DeltaLayout {
            key_heads,
            value_heads,
            adjacent,
            key_dim,
            value_dim,
            taps,
        } = self.layout;
        let (width, channels, keys) = (self.layout.width(), self.layout.channels(), self.layout.keys());
        let at = |row: usize, column: usize| f64::from(self.x[row * width + column]);
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let mixed: Vec<Vec<f64>> = rows
            .clone()
            .map(|row| {
                let channel = |c: usize| {
                    let seen = (0..taps).filter(|tap| row + tap + 1 >= rows.start + taps);
                    let sum: f64 = seen
                        .map(|tap| f64::from(self.conv[c * taps + tap]) * at(row + tap + 1 - taps, c))
                        .sum();
                    silu(sum)
                };
                (0..channels).map(channel).collect()
            })
            .collect();
        let mut out = Vec::new();
        let mut states = vec![vec![vec![0.0; value_dim]; key_dim]; value_heads];
        for (mixed, row) in mixed.iter().zip(rows) {
            for (head, state) in states.iter_mut().enumerate() {
                let unit = |start: usize| {
                    let key_head = match adjacent {
                        1 => head % key_heads,
                        _ => head * key_heads / value_heads,
                    };
                    let start = start + key_head * key_dim;
                    let of = &mixed[start..start + key_dim];
                    let length = (of.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    of.iter().map(|x| x / length).collect::<Vec<f64>>()
                };
                let (q, k) = (unit(0), unit(keys));
                let gate = |part: usize| at(row, self.layout.projected() - (2 - part) * value_heads + head);
                let rate = f64::from(self.a_log[head]).exp();
                let decay = (-rate * (gate(1) + f64::from(self.dt_bias[head])).exp().ln_1p()).exp();
                let beta = 1.0 / (1.0 + (-gate(0)).exp());
                state.iter_mut().flatten().for_each(|s| *s *= decay);
                let read = |state: &[Vec<f64>], by: &[f64], column: usize| -> f64 {
                    state.iter().zip(by).map(|(line, x)| line[column] * x).sum()
                };
                let delta: Vec<f64> = (0..value_dim)
                    .map(|column| {
                        (mixed[2 * keys + head * value_dim + column] - read(state, &k, column)) * beta
                    })
                    .collect();
                for (line, k) in state.iter_mut().zip(&k) {
                    line.iter_mut().zip(&delta).for_each(|(s, delta)| *s += k * delta);
                }
                let read: Vec<f64> = (0..value_dim)
                    .map(|column| read(state, &q, column) / (key_dim as f64).sqrt())
                    .collect();
                let mean = read.iter().map(|x| x * x).sum::<f64>() / value_dim as f64;
                out.extend(read.iter().enumerate().map(|(column, x)| {
                    let z = at(row, channels + head * value_dim + column);
                    x / (mean + f64::from(EPS)).sqrt() * f64::from(self.norm[column]) * silu(z)
                }));
            }
        }
        out
    }
}

struct States {
    conv: Vec<f32>,
    heads: Vec<f32>,
}

impl States {
    /// What was there before does not matter to new requests.
    fn of_others(layout: &DeltaLayout, slots: usize) -> Self {
        Self {
            conv: vec![f32::NAN; slots * layout.conv_state()],
            heads: vec![f32::NAN; slots * layout.head_states()],
        }
    }
}

/// A run whose state is in one slot, unless it is new.
fn one(rows: std::ops::Range<usize>, slot: usize, is_new: bool) -> StateRun {
    StateRun {
        first_row: rows.start,
        len: rows.len(),
        before: (!is_new).then_some(slot),
        after: slot,
    }
}

#[test]
fn matches_the_definition_on_every_instruction_set() {
    for seed in seeds(12) {
        let mut rng = rng(seed);
        let rows = rng.random_range(1..70);
        let case = Case::new(&mut rng, rows);
        let want = case.exact(0..rows);
        let mut first: Option<Vec<f32>> = None;
        for level in Level::available() {
            let mut states = States::of_others(&case.layout, 3);
            let out = case.forward(level, &[one(0..rows, 1, true)], 0..rows, &mut states);
            let context = format!("seed {seed} {level:?} {:?}", case.layout);
            assert_close(&out, &want, 2e-5, &context);
            assert_same_bits(&out, first.get_or_insert(out.clone()), &context);
            assert!(
                states.heads[..case.layout.head_states()]
                    .iter()
                    .all(|x| x.is_nan()),
                "{context}"
            );
        }
    }
}

/// A context of 32k and more, in steps as a server cuts it. Decay makes heads forget within a token or remember everything: there
/// rounding adds up for longest.
#[test]
fn long_contexts_match_the_definition() {
    const STEP: usize = 512;
    const ROWS: usize = (32 << 10) + 1000;
    let layout = DeltaLayout {
        key_heads: 2,
        value_heads: 4,
        adjacent: 2,
        key_dim: 16,
        value_dim: 16,
        taps: 4,
    };
    let mut case = Case::of(&mut rng(7), layout, ROWS);
    case.a_log = vec![-20.0, -9.0, -4.0, 1.0];
    let mut states = States::of_others(&layout, 1);
    let mut out = Vec::new();
    for start in (0..ROWS).step_by(STEP) {
        let rows = start..ROWS.min(start + STEP);
        let run = one(0..rows.len(), 0, start == 0);
        out.extend(case.forward(Level::detect(), &[run], rows, &mut states));
    }
    let want = case.exact(0..ROWS);
    let late = (ROWS - STEP) * layout.values();
    assert_close(&out, &want, 2e-5, "all tokens");
    assert_close(&out[late..], &want[late..], 2e-5, "the last tokens");
}

#[test]
fn cuts_and_neighbours_change_no_bit() {
    for seed in seeds(12) {
        let mut rng = rng(seed);
        let rows = rng.random_range(2..60);
        let case = Case::new(&mut rng, rows);
        let layout = &case.layout;
        let level = Level::detect();
        // Two requests beside each other: one of the first rows, one of the others.
        let middle = rng.random_range(1..rows);
        let mut states = States::of_others(layout, 2);
        let both = [one(0..middle, 1, true), one(middle..rows, 0, true)];
        let whole = case.forward(level, &both, 0..rows, &mut states);
        assert_close(
            &whole[middle * layout.values()..],
            &case.exact(middle..rows),
            2e-5,
            "the second request",
        );
        // The same, each alone and cut anywhere.
        for (rows, slot) in [(0..middle, 1), (middle..rows, 0)] {
            let mut states = States::of_others(layout, 2);
            let mut start = rows.start;
            while start < rows.end {
                let end = rng.random_range(start + 1..=rows.end);
                let run = one(0..end - start, slot, start == rows.start);
                let part = case.forward(level, &[run], start..end, &mut states);
                let want = &whole[start * layout.values()..end * layout.values()];
                assert_same_bits(&part, want, &format!("seed {seed} rows {start}..{end}"));
                start = end;
            }
        }
    }
}

/// A state that a run leaves behind in another slot stays as it was, and others go on from it, also in the same step.
#[test]
fn a_state_that_is_left_behind_can_be_continued_again() {
    for seed in seeds(12) {
        let mut rng = rng(seed);
        let rows = rng.random_range(2..60);
        let case = Case::new(&mut rng, rows);
        let layout = &case.layout;
        let (level, middle) = (Level::detect(), rng.random_range(1..rows));
        let mut states = States::of_others(layout, 4);
        let whole = case.forward(level, &[one(0..rows, 0, true)], 0..rows, &mut states);
        case.forward(level, &[one(0..middle, 1, true)], 0..middle, &mut states);
        let want = &whole[middle * layout.values()..];
        for (seed, first) in [(seed, 2), (seed + 1, 3)] {
            let run = StateRun {
                before: Some(1),
                ..one(0..rows - middle, first, true)
            };
            let part = case.forward(level, &[run], middle..rows, &mut states);
            assert_same_bits(&part, want, &format!("seed {seed} rows {middle}..{rows}"));
        }
        let end = |slot: usize, states: &States| {
            let (conv, heads) = (layout.conv_state(), layout.head_states());
            [
                states.conv[slot * conv..][..conv].to_vec(),
                states.heads[slot * heads..][..heads].to_vec(),
            ]
        };
        for slot in [2, 3] {
            for (part, want) in end(slot, &states).iter().zip(end(0, &states)) {
                assert_same_bits(
                    part,
                    &want,
                    &format!("seed {seed}: the state behind the last token"),
                );
            }
        }
    }
}

#[test]
#[should_panic(expected = "reads what another run writes")]
fn no_run_begins_with_a_state_that_another_writes() {
    let case = Case::new(&mut rng(1), 4);
    let mut states = States::of_others(&case.layout, 2);
    let second = StateRun {
        before: Some(1),
        ..one(2..4, 0, true)
    };
    case.forward(Level::detect(), &[one(0..2, 1, true), second], 0..4, &mut states);
}

#[test]
fn attention_is_gated_by_sigmoids_of_a_part_of_each_row() {
    for seed in seeds(4) {
        let mut rng = rng(seed);
        let (rows, n, first) = (
            rng.random_range(1..30),
            rng.random_range(1..70),
            rng.random_range(0..50),
        );
        let width = first + n + rng.random_range(0..30);
        let (x, gates) = (normal(&mut rng, rows * n), normal(&mut rng, rows * width));
        let want: Vec<f64> = (0..rows * n)
            .map(|i| f64::from(x[i]) / (1.0 + (-f64::from(gates[i / n * width + first + i % n])).exp()))
            .collect();
        let mut out = x;
        sigmoid_gate(&mut out, n, &gates, width, first);
        assert_close(&out, &want, 1e-6, &format!("seed {seed}"));
    }
}

#[test]
#[should_panic(expected = "two runs write slot 1")]
fn no_two_runs_share_a_state() {
    let case = Case::new(&mut rng(1), 4);
    let mut states = States::of_others(&case.layout, 2);
    let runs = [one(0..2, 1, true), one(2..4, 1, true)];
    case.forward(Level::detect(), &runs, 0..4, &mut states);
}
