//! Rotary position embedding ([RoFormer](https://arxiv.org/abs/2104.09864)): angles per position.

use std::f64::consts::PI;

use plimsoll_kernels::QueryScale;

/// How positions turn into angles.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Elements of a head that are rotated, from the first on: even, at most `head_dim`.
    pub rotary_dim: usize,
    /// How the frequencies are stretched for a longer context.
    pub scaling: RopeScaling,
    /// How queries grow with their position.
    pub query_scale: Option<QueryScale>,
    /// How the dimensions of a position share the pairs, where positions have three.
    pub sections: Option<MropeSections>,
}

/// Which pairs turn with the position in time, row and column (mRoPE, [Qwen2-VL](https://arxiv.org/abs/2409.12191)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MropeSections {
    /// Pairs of each dimension; together all that are rotated.
    pub pairs_of: [usize; 3],
    /// The dimensions take turns as long as they have pairs left, and the rest is time's; otherwise one follows the other.
    pub interleaved: bool,
}

impl MropeSections {
    /// The dimension of each pair.
    pub fn axes(&self) -> Vec<usize> {
        let [time, rows, _] = self.pairs_of;
        let axis = |pair: usize| match self.interleaved {
            true if pair < 3 * self.pairs_of[pair % 3] => pair % 3,
            true => 0,
            false => usize::from(pair >= time) + usize::from(pair >= time + rows),
        };
        (0..self.pairs_of.iter().sum()).map(axis).collect()
    }
}

/// The supported ways of stretching.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// All frequencies divided by `factor` (position interpolation).
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Gemma 4: pairs of the whole head, of which the first turn as the first of a head that is rotated in full, divided by
    /// `factor`, and the others do not turn (transformers 5.23, `_compute_proportional_rope_parameters`).
    Proportional {
        /// Pairs that turn.
        pairs: usize,
        /// At least 1.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, those between blended.
    Llama3 {
        /// At least 1.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are stretched in full.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context of the training, in tokens.
        original_context: f64,
    },
    /// [YaRN](https://arxiv.org/abs/2309.00071): pairs that turn often within the training's context are kept, those that
    /// turn seldom divided by `factor`, a linear ramp between.
    Yarn {
        /// At least 1.
        factor: f64,
        /// Context of the training, in tokens.
        original_context: f64,
        /// Pairs of more turns are kept; usually 32.
        beta_fast: f64,
        /// Pairs of fewer turns are stretched in full; usually 1.
        beta_slow: f64,
        /// The ramp begins and ends at whole pairs.
        truncate: bool,
        /// Multiplies cosines and sines.
        attention_factor: f64,
    },
    /// [LongRoPE](https://arxiv.org/abs/2402.13753): each frequency divided by a factor of its own. There are two lists,
    /// for contexts up to the training's and for longer ones; as in vLLM, a state takes that of the longest context it
    /// serves for all requests.
    LongRope {
        /// One factor per pair.
        short: Vec<f64>,
        /// Likewise.
        long: Vec<f64>,
        /// Context of the training, in tokens.
        original_context: usize,
        /// Multiplies cosines and sines.
        attention_factor: f64,
    },
}

/// What rotates a head at each position.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians per position of each pair of elements, fastest first.
    pub frequencies: Vec<f32>,
    /// Multiplies cosines and sines.
    pub attention_factor: f32,
}

impl RopeSpec {
    /// The tables there are. A state uses that of index [`Self::variant`].
    pub fn tables(&self) -> Vec<RopeTable> {
        match &self.scaling {
            RopeScaling::LongRope { short, long, .. } => {
                vec![
                    self.table(Some(short.as_slice())),
                    self.table(Some(long.as_slice())),
                ]
            }
            _ => vec![self.table(None)],
        }
    }

    /// The same, each frequency divided by its factor, where a file spells out the scaling.
    pub(crate) fn scaled_tables(&self, factors: Option<&[f32]>) -> Vec<RopeTable> {
        let mut tables = self.tables();
        for table in &mut tables {
            for (frequency, factor) in table.frequencies.iter_mut().zip(factors.unwrap_or_default()) {
                *frequency /= factor;
            }
        }
        tables
    }

    /// Which of the tables a state uses that serves contexts of up to `max_model_len` tokens.
    pub fn variant(&self, max_model_len: usize) -> usize {
        match self.scaling {
            RopeScaling::LongRope { original_context, .. } => usize::from(max_model_len > original_context),
            _ => 0,
        }
    }

    /// The frequencies divided by `divisors` in addition to what the scaling says.
    fn table(&self, divisors: Option<&[f64]>) -> RopeTable {
        let divisor = |pair: usize| divisors.map_or(1.0, |divisors| divisors[pair]);
        RopeTable {
            frequencies: (0..self.rotary_dim / 2)
                .map(|pair| (self.scaled(pair) / divisor(pair)) as f32)
                .collect(),
            attention_factor: match self.scaling {
                RopeScaling::Yarn { attention_factor, .. }
                | RopeScaling::LongRope { attention_factor, .. } => attention_factor as f32,
                RopeScaling::None
                | RopeScaling::Linear { .. }
                | RopeScaling::Proportional { .. }
                | RopeScaling::Llama3 { .. } => 1.0,
            },
        }
    }

    /// Radians per position of a pair.
    fn scaled(&self, pair: usize) -> f64 {
        let dim = self.rotary_dim as f64;
        let frequency = self.theta.powf(-((2 * pair) as f64) / dim);
        match self.scaling {
            RopeScaling::None | RopeScaling::LongRope { .. } => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Proportional { pairs, factor } => match pair < pairs {
                true => frequency / factor,
                false => 0.0,
            },
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                let turns = original_context * frequency / (2.0 * PI);
                let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                blend(frequency, factor, kept)
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                // The pair, as a fraction, that turns so often within the training's context.
                let pair_of =
                    |turns: f64| dim * (original_context / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
                let (mut first, mut last) = (pair_of(beta_fast), pair_of(beta_slow));
                if truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                let (first, mut last) = (first.max(0.0), last.min(dim - 1.0));
                if first == last {
                    last += 0.001;
                }
                blend(frequency, factor, (last - pair as f64) / (last - first))
            }
        }
    }
}

/// The part `kept` of a frequency, within 0 to 1, and the rest divided by `factor`.
fn blend(frequency: f64, factor: f64, kept: f64) -> f64 {
    let kept = kept.clamp(0.0, 1.0);
    frequency * (kept + (1.0 - kept) / factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(theta: f64, rotary_dim: usize, scaling: RopeScaling) -> RopeSpec {
        RopeSpec {
            theta,
            rotary_dim,
            scaling,
            query_scale: None,
            sections: None,
        }
    }

    #[test]
    fn frequencies_fall_from_one_geometrically() {
        let frequencies = |scaling| spec(10_000.0, 4, scaling).tables()[0].frequencies.clone();
        assert_eq!(frequencies(RopeScaling::None), [1.0, 0.01]);
        assert_eq!(frequencies(RopeScaling::Linear { factor: 4.0 }), [0.25, 0.0025]);
        let proportional = RopeScaling::Proportional {
            pairs: 1,
            factor: 2.0,
        };
        assert_eq!(frequencies(proportional), [0.5, 0.0]);
    }

    /// Values of transformers 5.23 `ROPE_INIT_FUNCTIONS["llama3"]` for Llama 3.1's parameters are checked by the golden
    /// models; here, the three regimes.
    #[test]
    fn llama3_keeps_fast_and_stretches_slow_frequencies() {
        // The one pair turns so often within the training's context.
        let scaled = |turns: f64| {
            let scaling = RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_context: turns * 2.0 * PI,
            };
            spec(10_000.0, 2, scaling).scaled(0)
        };
        assert_eq!(scaled(5.0), 1.0);
        assert!((scaled(0.5) - 1.0 / 8.0).abs() < 1e-12);
        assert!((scaled(2.5) - (0.5 + 0.5 / 8.0)).abs() < 1e-12);
    }

    /// The formulas of transformers 5.23 `_compute_yarn_parameters`, written out for one case.
    #[test]
    fn yarn_keeps_pairs_that_turn_often() {
        let yarn = |truncate| RopeScaling::Yarn {
            factor: 16.0,
            original_context: 16384.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate,
            attention_factor: 1.25,
        };
        for truncate in [true, false] {
            let scaled = &spec(1e6, 128, yarn(truncate)).tables()[0];
            let plain = &spec(1e6, 128, RopeScaling::None).tables()[0];
            let pair = |turns: f64| 128.0 * (16384.0 / (turns * 2.0 * PI)).ln() / (2.0 * 1e6_f64.ln());
            let (low, high) = match truncate {
                true => (pair(32.0).floor(), pair(1.0).ceil()),
                false => (pair(32.0), pair(1.0)),
            };
            for (i, (scaled, plain)) in scaled.frequencies.iter().zip(&plain.frequencies).enumerate() {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                let want = f64::from(*plain) * (ramp / 16.0 + 1.0 - ramp);
                assert!((f64::from(*scaled) / want - 1.0).abs() < 1e-6, "pair {i}");
            }
            assert_eq!(scaled.attention_factor, 1.25);
        }
    }

    #[test]
    fn dimensions_share_the_pairs() {
        let axes = |pairs_of, interleaved| {
            MropeSections {
                pairs_of,
                interleaved,
            }
            .axes()
        };
        assert_eq!(axes([4, 2, 2], false), [0, 0, 0, 0, 1, 1, 2, 2]);
        assert_eq!(axes([4, 2, 2], true), [0, 1, 2, 0, 1, 2, 0, 0]);
        assert_eq!(axes([3, 3, 2], true), [0, 1, 2, 0, 1, 2, 0, 1]);
    }

    #[test]
    fn long_factors_are_for_states_of_long_contexts() {
        let scaling = RopeScaling::LongRope {
            short: vec![1.0, 2.0],
            long: vec![4.0, 8.0],
            original_context: 4096,
            attention_factor: 1.5,
        };
        let rope = spec(10_000.0, 4, scaling);
        let tables = rope.tables();
        assert_eq!(tables[rope.variant(4096)].frequencies, [1.0, 0.005]);
        assert_eq!(tables[rope.variant(4097)].frequencies, [0.25, 0.00125]);
        assert_eq!(tables[1].attention_factor, 1.5);
    }
}
