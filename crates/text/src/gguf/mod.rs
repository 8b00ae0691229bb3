//! Tokenizers of GGUF files, converted by our own code. What the metadata keys mean, and the defaults where they are
//! absent, is llama.cpp's (`llama-vocab.cpp`), whose published token vectors these pass.

mod bpe;
mod pre;
mod spm;
mod word_piece;

use plimsoll_core::untrusted::quotable;
use plimsoll_core::{MetaValue, Metadata, TokenId};

use crate::pipeline::{self, Pipeline};
use crate::tokenizer::{Encode, Parts, SpecialTokens, Tokenizer, Wrap};
use crate::vocab::{self, Vocab};
use crate::{TextError, limits};

const MODEL: &str = "tokenizer.ggml.model";

/// `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenType {
    Normal,
    /// Structures a text: recognised only where special tokens are parsed, skipped on decoding.
    Control,
    /// Recognised in any text, and part of it.
    UserDefined,
    /// One byte, written `<0xNN>`.
    Byte,
}

impl TokenType {
    fn new(code: i64) -> Self {
        match code {
            // 2 is the token for what cannot be encoded.
            2 | 3 => Self::Control,
            4 => Self::UserDefined,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }
}

/// The lists and keys that every kind of tokenizer shares.
struct Source<'a> {
    metadata: &'a Metadata,
    tokens: Vec<&'a str>,
    types: Vec<TokenType>,
}

impl<'a> Source<'a> {
    fn new(metadata: &'a Metadata) -> Result<Self, TextError> {
        let tokens: Vec<&str> =
            list(metadata, "tokenizer.ggml.tokens", MetaValue::as_str)?.ok_or_else(|| {
                TextError::invalid(
                    "tokenizer.ggml.tokens",
                    "missing: this GGUF file has no vocabulary",
                )
            })?;
        let code = |value: &MetaValue| match *value {
            MetaValue::Int(code) => Some(code),
            MetaValue::UInt(code) => i64::try_from(code).ok(),
            _ => None,
        };
        let codes =
            list(metadata, "tokenizer.ggml.token_type", code)?.unwrap_or_else(|| vec![1; tokens.len()]);
        if codes.len() != tokens.len() {
            let problem = format!("{} entries for {} tokens", codes.len(), tokens.len());
            return Err(TextError::invalid("tokenizer.ggml.token_type", problem));
        }
        Ok(Self {
            metadata,
            tokens,
            types: codes.into_iter().map(TokenType::new).collect(),
        })
    }

    /// Every token with its id and type.
    fn iter(&self) -> impl Iterator<Item = (TokenId, &'a str, TokenType)> + '_ {
        (0..)
            .zip(&self.tokens)
            .zip(&self.types)
            .map(|((id, &text), &kind)| (id, text, kind))
    }

    /// The id under `tokenizer.ggml.{name}_token_id`.
    fn id(&self, name: &str) -> Result<Option<TokenId>, TextError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(value) = self.metadata.get(&key) else {
            return Ok(None);
        };
        let id = value.as_u64().filter(|&id| id < self.tokens.len() as u64);
        let id =
            id.ok_or_else(|| TextError::invalid(&key, format!("{value:?} is not an id of this vocabulary")))?;
        Ok(Some(id as TokenId))
    }

    fn flag(&self, name: &str, default: bool) -> bool {
        let value = self.metadata.get(&format!("tokenizer.ggml.{name}"));
        value.and_then(MetaValue::as_bool).unwrap_or(default)
    }

    /// The vocabulary for decoding; `normal` gives the bytes of ordinary tokens.
    fn vocab(&self, strip_leading_space: bool, normal: impl Fn(&str) -> Vec<u8>) -> Vocab {
        let mut vocab = Vocab::new(strip_leading_space);
        for (_, text, kind) in self.iter() {
            match kind {
                TokenType::Normal => vocab.push(&normal(text), false),
                TokenType::Byte => match vocab::byte_fallback(text) {
                    Some(byte) => vocab.push(&[byte], false),
                    None => vocab.push(&normal(text), false),
                },
                TokenType::UserDefined | TokenType::Control => {
                    vocab.push(text.as_bytes(), kind == TokenType::Control);
                }
            }
        }
        vocab
    }
}

/// The list under `key`, each element read by `element`.
fn list<'a, T>(
    metadata: &'a Metadata,
    key: &str,
    element: impl Fn(&'a MetaValue) -> Option<T>,
) -> Result<Option<Vec<T>>, TextError> {
    let Some(value) = metadata.get(key) else {
        return Ok(None);
    };
    let wrong = || TextError::invalid(key, "not a list of the right type");
    let items = value.as_list().ok_or_else(wrong)?;
    items
        .iter()
        .map(element)
        .collect::<Option<Vec<_>>>()
        .ok_or_else(wrong)
        .map(Some)
}

/// What the kinds of tokenizer differ in.
struct Kind {
    encoder: Box<dyn Encode>,
    shrinks: Option<usize>,
    vocab: Vocab,
    add_bos: bool,
    add_eos: bool,
    /// Where the file does not say.
    default_bos: Option<TokenId>,
    default_eos: Option<TokenId>,
}

impl Kind {
    /// A tokenizer of the `tokenizers` crate that loses no text and adds nothing around it.
    fn of(inner: pipeline::Inner, vocab: Vocab) -> Self {
        Self {
            encoder: Box::new(Pipeline::new(inner)),
            shrinks: Some(1),
            vocab,
            add_bos: false,
            add_eos: false,
            default_bos: None,
            default_eos: None,
        }
    }
}

impl Tokenizer {
    /// From the `tokenizer.ggml.*` keys of a GGUF file.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TextError> {
        load(metadata).map(Self::new)
    }
}

fn load(metadata: &Metadata) -> Result<Parts, TextError> {
    let model = metadata.get(MODEL).and_then(MetaValue::as_str);
    let model = model.ok_or_else(|| TextError::invalid(MODEL, "missing: this GGUF file has no tokenizer"))?;
    let source = Source::new(metadata)?;
    let special = source
        .iter()
        .filter(|(.., kind)| matches!(kind, TokenType::Control | TokenType::UserDefined));
    limits::check_special(special.map(|(_, text, _)| text))
        .map_err(|problem| TextError::invalid("tokenizer.ggml.tokens", problem))?;
    let kind = match model {
        "gpt2" => bpe::byte_level(&source)?,
        "gemma4" => bpe::gemma4(&source)?,
        "llama" => spm::load(&source)?,
        "bert" => word_piece::load(&source)?,
        _ => {
            return Err(TextError::Unsupported {
                place: MODEL.to_owned(),
                what: "tokenizer",
                found: quotable(model),
                supported: "gpt2, gemma4, llama, bert".to_owned(),
            });
        }
    };
    let known = |id: &TokenId| (*id as usize) < source.tokens.len();
    let bos = source
        .id("bos")?
        .or(source.id("cls")?)
        .or(kind.default_bos.filter(known));
    let own_eos = source.id("eos")?.or(kind.default_eos.filter(known));
    let wrap = Wrap::Explicit {
        bos: bos.filter(|_| source.flag("add_bos_token", kind.add_bos)),
        // BERT's texts end with its separator.
        eos: own_eos
            .or(source.id("seperator")?)
            .filter(|_| source.flag("add_eos_token", kind.add_eos)),
    };
    let mut special_tokens = SpecialTokens::new();
    let roles = [
        ("bos", bos),
        ("eos", own_eos),
        ("unk", source.id("unknown")?),
        ("pad", source.id("padding")?),
    ];
    for (role, id) in roles {
        if let Some(id) = id {
            special_tokens.insert(format!("{role}_token"), source.tokens[id as usize].to_owned());
        }
    }
    let eos = end_tokens(&source, own_eos)?;
    Ok(Parts {
        encoder: kind.encoder,
        wrap,
        shrinks: kind.shrinks,
        vocab: kind.vocab,
        special_tokens,
        bos,
        eos,
    })
}

/// Tokens that end a turn in one family of models or another. GGUF names one EOS (and sometimes one EOT), but chat models
/// may end with any of these.
const END_TOKENS: [&str; 21] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

fn end_tokens(source: &Source<'_>, eos: Option<TokenId>) -> Result<Vec<TokenId>, TextError> {
    let mut ends: Vec<_> = [eos, source.id("eot")?, source.id("eom")?]
        .into_iter()
        .flatten()
        .collect();
    let control = source.iter().filter(|&(_, _, kind)| kind == TokenType::Control);
    ends.extend(
        control
            .filter(|(_, text, _)| END_TOKENS.contains(text))
            .map(|(id, _, _)| id),
    );
    let has = |text: &str| ends.iter().any(|&id| source.tokens[id as usize] == text);
    // In Harmony (gpt-oss) and Solar `<|end|>` ends a message, not the turn.
    if (has("<|return|>") && has("<|call|>")) || (has("<|calls|>") && has("<|flush|>")) {
        ends.retain(|&id| source.tokens[id as usize] != "<|end|>");
    }
    let mut seen = std::collections::HashSet::new();
    ends.retain(|&id| seen.insert(id));
    Ok(ends)
}
