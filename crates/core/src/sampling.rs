use crate::TokenId;

/// A request parameter outside its legal range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ParamError {
    /// The field's name in the API.
    pub param: &'static str,
    /// What is wrong and what would be right.
    pub message: String,
}

impl ParamError {
    /// An error about the API field `param`.
    pub fn new(param: &'static str, message: impl Into<String>) -> Self {
        Self {
            param,
            message: message.into(),
        }
    }
}

/// Sampling parameters as the client sent them, not validated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOptions {
    /// 0 is greedy. Default 1.
    pub temperature: Option<f64>,
    /// Nucleus mass in (0, 1]. Default 1.
    pub top_p: Option<f64>,
    /// 0 and -1 mean all. Default all.
    pub top_k: Option<i64>,
    /// Minimum probability relative to the most likely token, in [0, 1]. Default 0.
    pub min_p: Option<f64>,
    /// In [-2, 2]. Default 0.
    pub presence_penalty: Option<f64>,
    /// In [-2, 2]. Default 0.
    pub frequency_penalty: Option<f64>,
    /// In [0.01, 100], 1 means none. Default 1. It divides logits: by a number close to 0 they become infinite, and a step with such
    /// logits fails, for all of its requests.
    pub repetition_penalty: Option<f64>,
    /// Added to the logits, each in [-100, 100].
    pub logit_bias: Vec<(TokenId, f64)>,
    /// `None`: no logprobs. `Some(k)`: the sampled token's, and those of the `k` likeliest (at most 20).
    pub logprobs: Option<u32>,
}

/// Bias of a banned token: far below any logit, with room for penalties to multiply it.
const BAN: f32 = -1e30;

/// Validated sampling parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    temperature: f32,
    top_p: f32,
    top_k: usize,
    min_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    repetition_penalty: f32,
    logit_bias: Vec<(TokenId, f32)>,
    logprobs: Option<usize>,
}

impl SamplingParams {
    /// Maximum of `top_logprobs` (OpenAI's limit).
    pub const MAX_LOGPROBS: u32 = 20;

    /// How many of the likeliest tokens the field `param` asks for, at most the vocabulary.
    pub(crate) fn top_logprobs(
        param: &'static str,
        asked: Option<u32>,
        vocab_size: usize,
    ) -> Result<Option<usize>, ParamError> {
        match asked {
            Some(k) if k > Self::MAX_LOGPROBS => {
                let most = Self::MAX_LOGPROBS;
                let message = format!("{param}: at most {most} logprobs can be returned, {k} were asked for");
                Err(ParamError::new(param, message))
            }
            k => Ok(k.map(|k| (k as usize).min(vocab_size))),
        }
    }

    /// Checks every parameter against its range and `logit_bias` against the vocabulary.
    pub fn new(options: &SamplingOptions, vocab_size: usize) -> Result<Self, ParamError> {
        let temperature = in_range("temperature", options.temperature, 1.0, 0.0, 100.0)?;
        let top_p = in_range("top_p", options.top_p, 1.0, 0.0, 1.0)?;
        if top_p == 0.0 {
            return Err(ParamError::new(
                "top_p",
                "top_p must be above 0; use temperature 0 for greedy sampling",
            ));
        }
        let repetition_penalty =
            in_range("repetition_penalty", options.repetition_penalty, 1.0, 0.01, 100.0)?;
        let top_k = match options.top_k.unwrap_or(0) {
            0 | -1 => vocab_size,
            k if k > 0 => usize::try_from(k).unwrap_or(usize::MAX).min(vocab_size),
            k => {
                return Err(ParamError::new(
                    "top_k",
                    format!("top_k must be -1, 0 (all) or positive, not {k}"),
                ));
            }
        };
        let logprobs = Self::top_logprobs("top_logprobs", options.logprobs, vocab_size)?;
        let mut logit_bias = Vec::with_capacity(options.logit_bias.len());
        for &(token, bias) in &options.logit_bias {
            if token as usize >= vocab_size {
                let message =
                    format!("logit_bias names token {token}, but the vocabulary has {vocab_size} tokens");
                return Err(ParamError::new("logit_bias", message));
            }
            logit_bias.push((token, in_range("logit_bias", Some(bias), 0.0, -100.0, 100.0)?));
        }
        merge(&mut logit_bias);
        Ok(Self {
            temperature,
            top_p,
            top_k,
            min_p: in_range("min_p", options.min_p, 0.0, 0.0, 1.0)?,
            presence_penalty: in_range("presence_penalty", options.presence_penalty, 0.0, -2.0, 2.0)?,
            frequency_penalty: in_range("frequency_penalty", options.frequency_penalty, 0.0, -2.0, 2.0)?,
            repetition_penalty,
            logit_bias,
            logprobs,
        })
    }

    /// Greedy sampling: temperature 0.
    pub fn greedy() -> Self {
        let options = SamplingOptions {
            temperature: Some(0.0),
            ..Default::default()
        };
        // A vocabulary of `usize::MAX` makes `top_k` mean "all" for any model.
        Self::new(&options, usize::MAX).expect("temperature 0 is legal")
    }

    /// True if the most likely token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Divides the logits; 0 is greedy.
    pub fn temperature(&self) -> f32 {
        self.temperature
    }

    /// Nucleus mass in (0, 1].
    pub fn top_p(&self) -> f32 {
        self.top_p
    }

    /// Candidates kept, at most the vocabulary.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Minimum probability relative to the most likely token, in [0, 1].
    pub fn min_p(&self) -> f32 {
        self.min_p
    }

    /// Subtracted once from each token that was generated.
    pub fn presence_penalty(&self) -> f32 {
        self.presence_penalty
    }

    /// Subtracted from each generated token once per occurrence.
    pub fn frequency_penalty(&self) -> f32 {
        self.frequency_penalty
    }

    /// Divides positive and multiplies negative logits of every token in prompt or output.
    pub fn repetition_penalty(&self) -> f32 {
        self.repetition_penalty
    }

    /// True where sampling depends on the tokens before, so that [`crate::SampleSpec::history`] is needed.
    pub fn needs_history(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }

    /// Added to the logits of these tokens, which ascend: no more than the vocabulary has.
    pub fn logit_bias(&self) -> &[(TokenId, f32)] {
        &self.logit_bias
    }

    /// A copy that bans `tokens` by a large negative bias: they are chosen only if a mask leaves nothing else, so there always
    /// is a choice.
    #[must_use]
    pub fn banning(&self, tokens: impl IntoIterator<Item = TokenId>) -> Self {
        let mut banning = self.clone();
        banning
            .logit_bias
            .extend(tokens.into_iter().map(|token| (token, BAN)));
        merge(&mut banning.logit_bias);
        banning
    }

    /// `None`: no logprobs. `Some(k)`: the sampled token's and those of the `k` likeliest.
    pub fn logprobs(&self) -> Option<usize> {
        self.logprobs
    }
}

/// Sorts by token and adds up what one token has.
fn merge(biases: &mut Vec<(TokenId, f32)>) {
    biases.sort_by_key(|&(token, _)| token);
    biases.dedup_by(|next, kept| {
        let same = next.0 == kept.0;
        if same {
            kept.1 += next.1;
        }
        same
    });
}

fn in_range(
    param: &'static str,
    value: Option<f64>,
    default: f64,
    min: f64,
    max: f64,
) -> Result<f32, ParamError> {
    let value = value.unwrap_or(default);
    if !(min..=max).contains(&value) {
        return Err(ParamError::new(
            param,
            format!("{param} must be between {min} and {max}, not {value}"),
        ));
    }
    Ok(value as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_parameter_that_is_wrong() {
        let cases: [(SamplingOptions, &str); 10] = [
            (
                SamplingOptions {
                    temperature: Some(f64::NAN),
                    ..Default::default()
                },
                "temperature",
            ),
            (
                SamplingOptions {
                    temperature: Some(-0.1),
                    ..Default::default()
                },
                "temperature",
            ),
            (
                SamplingOptions {
                    top_p: Some(0.0),
                    ..Default::default()
                },
                "top_p",
            ),
            (
                SamplingOptions {
                    top_k: Some(-2),
                    ..Default::default()
                },
                "top_k",
            ),
            (
                SamplingOptions {
                    min_p: Some(1.5),
                    ..Default::default()
                },
                "min_p",
            ),
            (
                SamplingOptions {
                    presence_penalty: Some(2.5),
                    ..Default::default()
                },
                "presence_penalty",
            ),
            (
                SamplingOptions {
                    repetition_penalty: Some(0.0),
                    ..Default::default()
                },
                "repetition_penalty",
            ),
            (
                SamplingOptions {
                    repetition_penalty: Some(1e-40),
                    ..Default::default()
                },
                "repetition_penalty",
            ),
            (
                SamplingOptions {
                    logit_bias: vec![(100, 1.0)],
                    ..Default::default()
                },
                "logit_bias",
            ),
            (
                SamplingOptions {
                    logprobs: Some(21),
                    ..Default::default()
                },
                "top_logprobs",
            ),
        ];
        for (options, param) in cases {
            assert_eq!(SamplingParams::new(&options, 100).unwrap_err().param, param);
        }
    }

    #[test]
    fn defaults_are_the_apis() {
        let params = SamplingParams::new(&SamplingOptions::default(), 100).unwrap();
        assert_eq!(
            (params.temperature(), params.top_p(), params.top_k()),
            (1.0, 1.0, 100)
        );
        assert!(!params.is_greedy() && !params.needs_history() && params.logprobs().is_none());
    }
}
