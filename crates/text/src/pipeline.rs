use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::time::Instant;

use plimsoll_core::TokenId;
use serde::Deserialize;
use tokenizers::normalizers::Replace;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::pattern::Invert;
use tokenizers::{
    DecoderWrapper, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizedString, PreTokenizer, PreTokenizerWrapper, SplitDelimiterBehavior, TokenizerImpl,
};

use crate::TextError;
use crate::pattern::{MAX_TIME, Pattern, TooLong};
use crate::tokenizer::Encode;

/// The `tokenizers` crate, with our own search for regular expressions.
pub(crate) type Inner =
    TokenizerImpl<ModelWrapper, Normalizers, PreTokenizers, PostProcessorWrapper, DecoderWrapper>;

/// The `tokenizers` crate as an encoder.
pub(crate) struct Pipeline {
    inner: Inner,
    /// `inner` with special tokens taken as text; made when first asked for.
    literal: OnceLock<Inner>,
}

impl Pipeline {
    pub(crate) fn new(inner: Inner) -> Self {
        Self {
            inner,
            literal: OnceLock::new(),
        }
    }

    /// Finds regular expressions whose time is not linear, as far as texts of one repeated character show it.
    pub(crate) fn try_out(&self) -> Result<(), TooLong> {
        let normalizers = self.inner.get_normalizer().into_iter();
        let normalizers = normalizers.flat_map(|all| all.0.iter().filter_map(Rewrite::pattern));
        let pre_tokenizers = self.inner.get_pre_tokenizer().into_iter();
        let pre_tokenizers = pre_tokenizers.flat_map(|all| all.0.iter().filter_map(Cut::pattern));
        normalizers.chain(pre_tokenizers).try_for_each(Pattern::try_out)
    }
}

impl Encode for Pipeline {
    fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<TokenId>, TextError> {
        let inner = match parse_special {
            true => &self.inner,
            false => self.literal.get_or_init(|| {
                let mut literal = self.inner.clone();
                literal.set_encode_special_tokens(true);
                literal
            }),
        };
        let encoding = guarded(|| inner.encode_fast(text, add_special)).map_err(TextError::Encode)?;
        Ok(encoding.get_ids().to_vec())
    }

    fn encode_pair(&self, first: &str, second: &str) -> Result<Vec<TokenId>, TextError> {
        let encoding =
            guarded(|| self.inner.encode_fast((first, second), true)).map_err(TextError::Encode)?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// The `tokenizers` crate panics on some files.
pub(crate) fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    let result =
        catch_unwind(AssertUnwindSafe(work)).map_err(|_| "the tokenizer cannot be used".to_owned())?;
    result.map_err(|error| error.to_string())
}

/// What is done to a text before it is cut: the `normalizer` of a tokenizer.json.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "NormalizerWrapper")]
pub(crate) struct Normalizers(Vec<Rewrite>);

#[derive(Clone, Debug)]
enum Rewrite {
    Replace { pattern: Pattern, content: String },
    Other(NormalizerWrapper),
}

impl Rewrite {
    fn add(step: &NormalizerWrapper, field: &str, steps: &mut Vec<Self>) -> tokenizers::Result<()> {
        match step {
            NormalizerWrapper::Sequence(sequence) => {
                for (i, step) in sequence.as_ref().iter().enumerate() {
                    Self::add(step, &format!("{field}.normalizers[{i}]"), steps)?;
                }
            }
            NormalizerWrapper::Replace(replace) => steps.push(Self::replace(replace, field)?),
            other => steps.push(Self::Other(other.clone())),
        }
        Ok(())
    }

    fn replace(replace: &Replace, field: &str) -> tokenizers::Result<Self> {
        // Its pattern is not public.
        let written = serde_json::to_value(replace)?;
        Ok(match written["pattern"]["Regex"].as_str() {
            Some(regex) => Self::Replace {
                pattern: Pattern::new(regex, &format!("{field}.pattern.Regex"))?,
                content: replace.content.clone(),
            },
            None => Self::Other(replace.clone().into()),
        })
    }

    fn pattern(&self) -> Option<&Pattern> {
        match self {
            Self::Replace { pattern, .. } => Some(pattern),
            Self::Other(_) => None,
        }
    }
}

impl TryFrom<NormalizerWrapper> for Normalizers {
    type Error = tokenizers::Error;

    fn try_from(step: NormalizerWrapper) -> tokenizers::Result<Self> {
        let mut steps = Vec::new();
        Rewrite::add(&step, "normalizer", &mut steps)?;
        Ok(Self(steps))
    }
}

impl Normalizer for Normalizers {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        let end = Instant::now() + MAX_TIME;
        self.0.iter().try_for_each(|step| match step {
            Rewrite::Replace { pattern, content } => text.replace(pattern.until(end), content),
            Rewrite::Other(other) => other.normalize(text),
        })
    }
}

/// How a text is cut into words: the `pre_tokenizer` of a tokenizer.json.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "PreTokenizerWrapper")]
pub(crate) struct PreTokenizers(Vec<Cut>);

#[derive(Clone, Debug)]
enum Cut {
    Split {
        pattern: Pattern,
        behavior: SplitDelimiterBehavior,
        invert: bool,
    },
    Other(PreTokenizerWrapper),
}

impl Cut {
    fn add(step: &PreTokenizerWrapper, field: &str, steps: &mut Vec<Self>) -> tokenizers::Result<()> {
        match step {
            PreTokenizerWrapper::Sequence(sequence) => {
                for (i, step) in sequence.as_ref().iter().enumerate() {
                    Self::add(step, &format!("{field}.pretokenizers[{i}]"), steps)?;
                }
            }
            PreTokenizerWrapper::Split(Split {
                pattern: SplitPattern::Regex(regex),
                behavior,
                invert,
                ..
            }) => steps.push(Self::Split {
                pattern: Pattern::new(regex, &format!("{field}.pattern.Regex"))?,
                behavior: *behavior,
                invert: *invert,
            }),
            other => steps.push(Self::Other(other.clone())),
        }
        Ok(())
    }

    fn pattern(&self) -> Option<&Pattern> {
        match self {
            Self::Split { pattern, .. } => Some(pattern),
            Self::Other(_) => None,
        }
    }
}

impl TryFrom<PreTokenizerWrapper> for PreTokenizers {
    type Error = tokenizers::Error;

    fn try_from(step: PreTokenizerWrapper) -> tokenizers::Result<Self> {
        let mut steps = Vec::new();
        Cut::add(&step, "pre_tokenizer", &mut steps)?;
        Ok(Self(steps))
    }
}

impl PreTokenizer for PreTokenizers {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> tokenizers::Result<()> {
        let end = Instant::now() + MAX_TIME;
        self.0.iter().try_for_each(|step| match step {
            Cut::Split {
                pattern,
                behavior,
                invert: true,
            } => text.split(|_, piece| piece.split(Invert(pattern.until(end)), *behavior)),
            Cut::Split {
                pattern, behavior, ..
            } => text.split(|_, piece| piece.split(pattern.until(end), *behavior)),
            Cut::Other(other) => other.pre_tokenize(text),
        })
    }
}
