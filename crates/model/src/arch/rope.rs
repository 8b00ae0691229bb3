//! From `rope_scaling` or `rope_parameters` to a [`RopeSpec`].

use plimsoll_kernels::QueryScale;

use crate::ModelError;
use crate::config::{RawConfig, RawRope};
use crate::rope::{MropeSections, RopeScaling, RopeSpec};

/// Every family's base in transformers and llama.cpp, where it has none of its own.
const DEFAULT_THETA: f64 = 10_000.0;

/// Of layers with full attention.
pub(super) fn read(config: &RawConfig) -> Result<RopeSpec, ModelError> {
    match (&config.rope_parameters, &config.rope_scaling) {
        (Some(raw), _) => match &raw.full_attention {
            Some(full) => Reader::new("rope_parameters.full_attention", full, config).spec(),
            None => Reader::new("rope_parameters", raw, config).spec(),
        },
        (None, Some(raw)) => Reader::new("rope_scaling", raw, config).spec(),
        (None, None) => Reader::new("rope_scaling", &RawRope::default(), config).spec(),
    }
}

/// Of layers with a window, in a family in which they have positions of their own.
pub(super) fn local(config: &RawConfig) -> Result<RopeSpec, ModelError> {
    let given = config
        .rope_parameters
        .as_ref()
        .and_then(|raw| raw.sliding_attention.as_deref());
    let mut raw = given.cloned().unwrap_or_default();
    raw.rope_theta = raw.rope_theta.or(config.rope_local_base_freq);
    Reader::new("rope_parameters.sliding_attention", &raw, config).spec()
}

struct Reader<'a> {
    field: &'a str,
    raw: &'a RawRope,
    config: &'a RawConfig,
}

impl<'a> Reader<'a> {
    fn new(field: &'a str, raw: &'a RawRope, config: &'a RawConfig) -> Self {
        Self { field, raw, config }
    }

    fn spec(&self) -> Result<RopeSpec, ModelError> {
        let Self { raw, config, .. } = *self;
        let partial = raw
            .partial_rotary_factor
            .or(config.partial_rotary_factor)
            .unwrap_or(1.0);
        if !(partial > 0.0 && partial <= 1.0) {
            return Err(ModelError::unsupported(
                "partial_rotary_factor",
                partial,
                "more than 0 and at most 1 is",
            ));
        }
        let is_proportional = raw.kind() == Some("proportional");
        // Rounded down, but for what the product is too small by.
        let rotated = (config.head_dim() as f64 * partial + 1e-6) as usize;
        let rotary_dim = if is_proportional {
            config.head_dim()
        } else {
            rotated
        };
        let query_scale = match raw.llama_4_scaling_beta {
            // Devstral 2 has it, and does not use it.
            None | Some(0.0) => None,
            beta => Some(QueryScale {
                beta: self.positive("llama_4_scaling_beta", beta)? as f32,
                original: self.original_context()? as usize,
            }),
        };
        Ok(RopeSpec {
            theta: raw.rope_theta.or(config.rope_theta).unwrap_or(DEFAULT_THETA),
            rotary_dim,
            scaling: self.scaling(rotated / 2)?,
            query_scale,
            sections: self.sections(rotary_dim / 2)?,
        })
    }

    /// How the dimensions of a position share the pairs.
    fn sections(&self, pairs: usize) -> Result<Option<MropeSections>, ModelError> {
        let Some(pairs_of) = &self.raw.mrope_section else {
            return Ok(None);
        };
        if !self.config.has_mrope {
            return Err(ModelError::unsupported(
                format!("{}.mrope_section", self.field),
                "given",
                "positions of one dimension are, in this family",
            ));
        }
        match <[usize; 3]>::try_from(pairs_of.as_slice()) {
            Ok(pairs_of)
                if pairs_of.iter().try_fold(0, |sum: usize, &n| sum.checked_add(n)) == Some(pairs) =>
            {
                Ok(Some(MropeSections {
                    pairs_of,
                    interleaved: self.raw.mrope_interleaved.unwrap_or(false),
                }))
            }
            _ => Err(ModelError::unsupported(
                format!("{}.mrope_section", self.field),
                format!("{pairs_of:?}"),
                format!("three numbers that add up to the {pairs} pairs that are rotated are"),
            )),
        }
    }

    fn scaling(&self, pairs: usize) -> Result<RopeScaling, ModelError> {
        let raw = self.raw;
        Ok(match raw.kind() {
            None | Some("default") => RopeScaling::None,
            // What the first files of Qwen2.5-VL called it, of which the sections say all.
            Some("mrope") if self.config.has_mrope => RopeScaling::None,
            Some("linear") => RopeScaling::Linear {
                factor: self.positive("factor", raw.factor)?,
            },
            Some("proportional") => RopeScaling::Proportional {
                pairs,
                factor: self.positive("factor", raw.factor.or(Some(1.0)))?,
            },
            Some("llama3") => RopeScaling::Llama3 {
                factor: self.positive("factor", raw.factor)?,
                low_freq_factor: self.positive("low_freq_factor", raw.low_freq_factor)?,
                high_freq_factor: self.positive("high_freq_factor", raw.high_freq_factor)?,
                original_context: self.original_context()?,
            },
            Some("yarn") => {
                let factor = self.positive("factor", raw.factor)?;
                RopeScaling::Yarn {
                    factor,
                    original_context: self.original_context()?,
                    beta_fast: self.positive("beta_fast", raw.beta_fast.or(Some(32.0)))?,
                    beta_slow: self.positive("beta_slow", raw.beta_slow.or(Some(1.0)))?,
                    truncate: raw.truncate.unwrap_or(true),
                    attention_factor: self.yarn_attention_factor(factor),
                }
            }
            // `su` is what the first files of Phi-3 called it.
            Some("longrope" | "su") => {
                let original = self.original_context()?;
                let factor = raw
                    .factor
                    .unwrap_or(self.config.max_position_embeddings as f64 / original);
                let attention_factor = match factor > 1.0 {
                    true => (1.0 + factor.ln() / original.ln()).sqrt(),
                    false => 1.0,
                };
                RopeScaling::LongRope {
                    short: self.factors("short_factor", raw.short_factor.as_deref(), pairs)?,
                    long: self.factors("long_factor", raw.long_factor.as_deref(), pairs)?,
                    original_context: original as usize,
                    attention_factor: raw.attention_factor.unwrap_or(attention_factor),
                }
            }
            Some(other) => {
                let supported = "default, linear, llama3, yarn, longrope and proportional are";
                // transformers changes frequencies only beyond `max_position_embeddings`.
                let advice = match other {
                    "dynamic" => {
                        "; within `max_position_embeddings` it has no effect: set it to `default` to serve contexts up to that"
                    }
                    _ => "",
                };
                return Err(ModelError::unsupported(
                    format!("{}.rope_type", self.field),
                    format!("`{other}`"),
                    format!("{supported}{advice}"),
                ));
            }
        })
    }

    /// As transformers computes it.
    fn yarn_attention_factor(&self, factor: f64) -> f64 {
        let mscale = |mscale: f64| match factor > 1.0 {
            true => 0.1 * mscale * factor.ln() + 1.0,
            false => 1.0,
        };
        let given = |mscale: Option<f64>| mscale.filter(|&mscale| mscale != 0.0);
        match (given(self.raw.mscale), given(self.raw.mscale_all_dim)) {
            _ if self.raw.attention_factor.is_some() => self.raw.attention_factor.unwrap_or(1.0),
            (Some(one), Some(all)) => mscale(one) / mscale(all),
            _ => mscale(1.0),
        }
    }

    /// Phi-3 has the field beside the others.
    fn original_context(&self) -> Result<f64, ModelError> {
        let beside = self.config.original_max_position_embeddings;
        let own = self.raw.original_max_position_embeddings;
        let tokens = self.positive("original_max_position_embeddings", beside.or(own))?;
        Ok(tokens.max(1.0))
    }

    fn positive(&self, name: &str, value: Option<f64>) -> Result<f64, ModelError> {
        let value = value.filter(|value| value.is_finite() && *value > 0.0);
        value.ok_or_else(|| {
            ModelError::unsupported(
                format!("{}.{name}", self.field),
                "absent or not positive",
                "a positive number is",
            )
        })
    }

    fn factors(&self, name: &str, list: Option<&[f64]>, pairs: usize) -> Result<Vec<f64>, ModelError> {
        let list = list.unwrap_or_default();
        match list.len() == pairs && list.iter().all(|factor| factor.is_finite() && *factor > 0.0) {
            true => Ok(list.to_vec()),
            false => Err(ModelError::unsupported(
                format!("{}.{name}", self.field),
                format!("a list of {}", list.len()),
                format!("{pairs} positive numbers are, one for each pair that is rotated"),
            )),
        }
    }
}
