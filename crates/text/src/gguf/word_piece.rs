use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;

use super::{Kind, Source, bpe};
use crate::pipeline::{Inner, PreTokenizers};
use crate::{TextError, limits, vocab};

/// BERT's WordPiece. GGUF marks the beginning of a word with `▁`, where BERT marks the continuation with `##`.
pub(super) fn load(source: &Source<'_>) -> Result<Kind, TextError> {
    let unknown = source.id("unknown")?.unwrap_or(100);
    let named = |text: &str| match text.strip_prefix('▁') {
        Some(word) => word.to_owned(),
        None if text.starts_with('[') && text.ends_with(']') && text.len() > 2 => text.to_owned(),
        None => format!("##{text}"),
    };
    let ids: tokenizers::models::bpe::Vocab = source.iter().map(|(id, text, _)| (named(text), id)).collect();
    let unknown = source
        .tokens
        .get(unknown as usize)
        .copied()
        .unwrap_or("[UNK]")
        .to_owned();
    // llama.cpp knows no limit on the length of a word; without one, time is cubic.
    let model = WordPiece::builder()
        .vocab(ids)
        .unk_token(unknown)
        .max_input_chars_per_word(limits::MAX_WORD_CHARS)
        .build();
    let model = model.map_err(|e| TextError::invalid("tokenizer.ggml.tokens", e.to_string()))?;
    let mut inner = Inner::new(model.into());
    let normalizer = BertNormalizer::new(true, true, Some(true), true);
    bpe::normalize(&mut inner, normalizer)?;
    let words = PreTokenizers::try_from(PreTokenizerWrapper::from(BertPreTokenizer));
    inner.with_pre_tokenizer(Some(
        words.map_err(|e| TextError::invalid(super::MODEL, e.to_string()))?,
    ));
    bpe::add_special(source, &mut inner)?;
    Ok(Kind {
        // A word that is unknown is one token, however long it is.
        shrinks: None,
        add_bos: true,
        add_eos: true,
        ..Kind::of(inner, source.vocab(true, vocab::sentencepiece))
    })
}
