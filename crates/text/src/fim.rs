//! Fill in the middle: prompts for the text between a prefix and a suffix.

use plimsoll_core::TokenId;

use crate::{TextError, Tokenizer};

/// How one family of models is asked for the text between two others.
struct Format {
    prefix: &'static str,
    suffix: &'static str,
    /// Before the answer; none where the answer follows the prefix.
    middle: Option<&'static str>,
}

/// By the names of the tokens, as the model cards show them. With `middle` the order is prefix, suffix, middle (PSM),
/// otherwise suffix, prefix (SPM).
const FORMATS: [Format; 6] = [
    // Qwen2.5-Coder, CodeGemma, Granite 4.
    Format {
        prefix: "<|fim_prefix|>",
        suffix: "<|fim_suffix|>",
        middle: Some("<|fim_middle|>"),
    },
    // StarCoder, StarCoder2, Granite Code.
    Format {
        prefix: "<fim_prefix>",
        suffix: "<fim_suffix>",
        middle: Some("<fim_middle>"),
    },
    // SantaCoder.
    Format {
        prefix: "<fim-prefix>",
        suffix: "<fim-suffix>",
        middle: Some("<fim-middle>"),
    },
    // DeepSeek-Coder and later models of DeepSeek.
    Format {
        prefix: "<｜fim▁begin｜>",
        suffix: "<｜fim▁hole｜>",
        middle: Some("<｜fim▁end｜>"),
    },
    // CodeLlama.
    Format {
        prefix: "▁<PRE>",
        suffix: "▁<SUF>",
        middle: Some("▁<MID>"),
    },
    // Codestral.
    Format {
        prefix: "[PREFIX]",
        suffix: "[SUFFIX]",
        middle: None,
    },
];

/// Tokens that end the text in the middle, besides those of the format and end-of-sequence tokens.
const ENDS: [&str; 12] = [
    "▁<EOT>",
    "<EOT>",
    "<|endoftext|>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<fim-pad>",
    "<|file_sep|>",
    "<file_sep>",
    "<|file_separator|>",
    "<|repo_name|>",
    "<repo_name>",
    "<｜end▁of▁sentence｜>",
];

/// A character that tokenizers keep apart from what follows it.
const APART: &str = "☺";

/// The tokens by which a model fills in the middle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fim {
    prefix: TokenId,
    suffix: TokenId,
    middle: Option<TokenId>,
    ends: Vec<TokenId>,
}

impl Fim {
    /// `None` if the tokenizer has no such tokens.
    pub fn detect(tokenizer: &Tokenizer) -> Option<Self> {
        let named = |name: &str| tokenizer.token_named(name);
        FORMATS.iter().find_map(|format| {
            let (prefix, suffix) = (named(format.prefix)?, named(format.suffix)?);
            let middle = match format.middle {
                Some(middle) => Some(named(middle)?),
                None => None,
            };
            let marks = [Some(prefix), Some(suffix), middle].into_iter().flatten();
            Some(Self {
                prefix,
                suffix,
                middle,
                ends: marks.chain(ENDS.iter().filter_map(|name| named(name))).collect(),
            })
        })
    }

    /// Tokens that end the text in the middle.
    pub fn ends(&self) -> &[TokenId] {
        &self.ends
    }

    /// The prompt for the text between `prefix` and `suffix`. `add_special` begins it with what the tokenizer puts before a text.
    pub fn prompt(
        &self,
        tokenizer: &Tokenizer,
        prefix: Vec<TokenId>,
        suffix: &str,
        add_special: bool,
    ) -> Result<Vec<TokenId>, TextError> {
        let begin = match add_special {
            true => begin(tokenizer)?,
            false => Vec::new(),
        };
        let suffix = continuation(tokenizer, suffix)?;
        let parts = match self.middle {
            Some(middle) => [
                begin,
                vec![self.prefix],
                prefix,
                vec![self.suffix],
                suffix,
                vec![middle],
            ],
            None => [
                begin,
                vec![self.suffix],
                suffix,
                vec![self.prefix],
                prefix,
                Vec::new(),
            ],
        };
        Ok(parts.concat())
    }
}

/// What the tokenizer puts before a text.
fn begin(tokenizer: &Tokenizer) -> Result<Vec<TokenId>, TextError> {
    let mut whole = tokenizer.encode("a", true)?;
    let bare = tokenizer.encode("a", false)?;
    let at = whole.windows(bare.len().max(1)).position(|tokens| tokens == bare);
    whole.truncate(at.unwrap_or(0));
    Ok(whole)
}

/// Tokens of a text that continues another: without the space that some tokenizers put before a text. The texts of special
/// tokens are text.
fn continuation(tokenizer: &Tokenizer, text: &str) -> Result<Vec<TokenId>, TextError> {
    let apart = tokenizer.encode_literal(APART)?;
    let whole = tokenizer.encode_literal(&format!("{APART}{text}"))?;
    match whole.strip_prefix(apart.as_slice()) {
        Some(tokens) => Ok(tokens.to_vec()),
        None => tokenizer.encode_literal(text),
    }
}
