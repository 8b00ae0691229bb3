use plimsoll_core::MetaValue;
use tokenizers::models::bpe::{BPE, BpeBuilder, Merges, Vocab as Ids};
use tokenizers::normalizers::Replace;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, NormalizerWrapper, SplitDelimiterBehavior};

use super::{Kind, Source, TokenType, list, pre};
use crate::pipeline::{Inner, Normalizers, PreTokenizers};
use crate::{TextError, vocab};

const MERGES: &str = "tokenizer.ggml.merges";

/// GPT-2's BPE over bytes written as printable characters: nearly every model since.
pub(super) fn byte_level(source: &Source<'_>) -> Result<Kind, TextError> {
    let pre = pre::load(source)?;
    let mut inner = inner(source, BPE::builder().ignore_merges(pre.ignore_merges))?;
    let splits = pre.patterns.iter().map(|pattern| split(pattern));
    let mut steps = splits.collect::<Result<Vec<PreTokenizerWrapper>, _>>()?;
    steps.push(ByteLevel::new(false, false, false).into());
    cut(&mut inner, steps)?;
    add_special(source, &mut inner)?;
    Ok(Kind {
        add_bos: pre.add_bos,
        ..Kind::of(inner, source.vocab(false, vocab::byte_level))
    })
}

/// Gemma 4's: BPE over characters, `▁` for spaces, bytes for what is not in the vocabulary.
pub(super) fn gemma4(source: &Source<'_>) -> Result<Kind, TextError> {
    let mut inner = inner(source, BPE::builder().byte_fallback(true))?;
    let spaces = Replace::new(" ", "▁").map_err(|e| TextError::invalid(super::MODEL, e.to_string()))?;
    normalize(&mut inner, spaces)?;
    cut(&mut inner, vec![split(r"[^\n]+|[\n]+")?])?;
    add_special(source, &mut inner)?;
    Ok(Kind::of(inner, source.vocab(false, vocab::sentencepiece)))
}

/// With the vocabulary and the merges of the file.
fn inner(source: &Source<'_>, builder: BpeBuilder) -> Result<Inner, TextError> {
    let ids = ids(source);
    let merges = merges(source, &ids)?;
    let model = builder.vocab_and_merges(ids, merges).build();
    let model = model.map_err(|e| TextError::invalid(MERGES, e.to_string()))?;
    Ok(Inner::new(model.into()))
}

pub(super) fn ids(source: &Source<'_>) -> Ids {
    source.iter().map(|(id, text, _)| (text.to_owned(), id)).collect()
}

fn merges(source: &Source<'_>, ids: &Ids) -> Result<Merges, TextError> {
    let lines = list(source.metadata, MERGES, MetaValue::as_str)?;
    let lines = lines.ok_or_else(|| TextError::invalid(MERGES, "missing: BPE needs merges"))?;
    let mut merges = Vec::with_capacity(lines.len());
    for line in lines {
        // A piece may itself begin with a space, as in Gemma's; none is empty.
        let second = line
            .char_indices()
            .skip(1)
            .find(|&(_, c)| c == ' ')
            .map(|(at, _)| at);
        let at = second.ok_or_else(|| TextError::invalid(MERGES, format!("{line:?} is not two pieces")))?;
        let (left, right) = (&line[..at], &line[at + 1..]);
        // Files cut down from a larger vocabulary keep merges that lead nowhere.
        if [left, right, &format!("{left}{right}")]
            .iter()
            .all(|piece| ids.contains_key(*piece))
        {
            merges.push((left.to_owned(), right.to_owned()));
        }
    }
    Ok(merges)
}

fn split(pattern: &str) -> Result<PreTokenizerWrapper, TextError> {
    let pattern = SplitPattern::Regex(pattern.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
    split
        .map(Into::into)
        .map_err(|e| TextError::invalid("tokenizer.ggml.pre", e.to_string()))
}

fn cut(inner: &mut Inner, steps: Vec<PreTokenizerWrapper>) -> Result<(), TextError> {
    let steps = PreTokenizers::try_from(PreTokenizerWrapper::from(Sequence::new(steps)));
    inner.with_pre_tokenizer(Some(
        steps.map_err(|e| TextError::invalid("tokenizer.ggml.pre", e.to_string()))?,
    ));
    Ok(())
}

pub(super) fn normalize(inner: &mut Inner, step: impl Into<NormalizerWrapper>) -> Result<(), TextError> {
    let done =
        Normalizers::try_from(step.into()).and_then(|steps| inner.with_normalizer(Some(steps)).map(drop));
    done.map_err(|e| TextError::invalid(super::MODEL, e.to_string()))
}

/// Tokens recognised in the text before anything else.
pub(super) fn add_special(source: &Source<'_>, inner: &mut Inner) -> Result<(), TextError> {
    let special = source
        .iter()
        .filter(|(.., kind)| matches!(kind, TokenType::Control | TokenType::UserDefined));
    let tokens =
        special.map(|(_, text, kind)| AddedToken::from(text, kind == TokenType::Control).normalized(false));
    let added = inner.add_tokens(tokens.collect::<Vec<_>>());
    added.map_err(|e| TextError::invalid("tokenizer.ggml.tokens", e.to_string()))?;
    Ok(())
}
