//! Rotary position embedding ([RoFormer](https://arxiv.org/abs/2104.09864)): angles per position.

use std::f64::consts::PI;

/// How positions turn into angles.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// How the frequencies are stretched for a longer context.
    pub scaling: RopeScaling,
}

/// The supported ways of stretching.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// All frequencies divided by `factor` (position interpolation).
    Linear {
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
}

impl RopeSpec {
    /// Angle per position of each of the `head_dim / 2` pairs, fastest first.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let frequency = |pair: usize| self.theta.powf(-((2 * pair) as f64) / head_dim as f64);
        (0..head_dim / 2)
            .map(|pair| self.scaling.apply(frequency(pair)) as f32)
            .collect()
    }

    /// The same, each divided by its factor, where a file spells out the scaling.
    pub(crate) fn scaled_frequencies(&self, head_dim: usize, factors: Option<&[f32]>) -> Vec<f32> {
        let mut frequencies = self.frequencies(head_dim);
        for (frequency, factor) in frequencies.iter_mut().zip(factors.unwrap_or_default()) {
            *frequency /= factor;
        }
        frequencies
    }
}

impl RopeScaling {
    fn apply(self, frequency: f64) -> f64 {
        match self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                let turns = original_context * frequency / (2.0 * PI);
                let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let kept = kept.clamp(0.0, 1.0);
                frequency * (kept + (1.0 - kept) / factor)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_fall_from_one_geometrically() {
        let rope = RopeSpec {
            theta: 10_000.0,
            scaling: RopeScaling::None,
        };
        assert_eq!(rope.frequencies(4), [1.0, 0.01]);
        let linear = RopeSpec {
            scaling: RopeScaling::Linear { factor: 4.0 },
            ..rope
        };
        assert_eq!(linear.frequencies(4), [0.25, 0.0025]);
    }

    /// Values of transformers 5.23 `ROPE_INIT_FUNCTIONS["llama3"]` for Llama 3.1's parameters are checked by the golden
    /// models; here, the three regimes.
    #[test]
    fn llama3_keeps_fast_and_stretches_slow_frequencies() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192.0,
        };
        let per_turn = |turns: f64| 2.0 * PI * turns / 8192.0;
        assert_eq!(scaling.apply(per_turn(5.0)), per_turn(5.0));
        assert!((scaling.apply(per_turn(0.5)) - per_turn(0.5) / 8.0).abs() < 1e-12);
        let middle = scaling.apply(per_turn(2.5));
        assert!((middle - per_turn(2.5) * (0.5 + 0.5 / 8.0)).abs() < 1e-12);
    }
}
