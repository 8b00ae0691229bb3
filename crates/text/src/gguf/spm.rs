use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use aho_corasick::{AhoCorasick, MatchKind};
use plimsoll_core::{MetaValue, TokenId};

use super::{Kind, Source, TokenType, list};
use crate::tokenizer::Encode;
use crate::{TextError, vocab};

const SCORES: &str = "tokenizer.ggml.scores";

/// SentencePiece's BPE, as Llama 1 and 2, Mistral, Phi-3 and Gemma use it: the neighbours whose union has the highest score
/// merge first, the leftmost of equals. Not what the `tokenizers` crate can express: its merges have ranks without ties.
struct SentencePiece {
    pieces: HashMap<Box<str>, (TokenId, f32)>,
    /// Token of each byte, for characters without a token.
    bytes: Vec<Option<TokenId>>,
    unknown: Option<TokenId>,
    add_space_prefix: bool,
    special: Splitter,
    user_defined: Splitter,
}

pub(super) fn load(source: &Source<'_>) -> Result<Kind, TextError> {
    let score = |value: &MetaValue| value.as_f64().map(|score| score as f32);
    let scores = list(source.metadata, SCORES, score)?;
    let scores = scores.filter(|scores| scores.len() == source.tokens.len());
    let scores = scores.ok_or_else(|| TextError::invalid(SCORES, "missing, or not one score per token"))?;

    let mut pieces = HashMap::with_capacity(source.tokens.len());
    let mut bytes = vec![None; 256];
    for ((id, text, kind), score) in source.iter().zip(scores) {
        pieces.insert(text.into(), (id, score));
        if let Some(byte) = (kind == TokenType::Byte)
            .then(|| vocab::byte_fallback(text))
            .flatten()
        {
            bytes[usize::from(byte)] = Some(id);
        }
    }
    let add_space_prefix = source.flag("add_space_prefix", true);
    let encoder = SentencePiece {
        pieces,
        bytes,
        unknown: source.id("unknown")?,
        add_space_prefix,
        special: Splitter::new(source, |kind| {
            matches!(kind, TokenType::Control | TokenType::UserDefined)
        })?,
        user_defined: Splitter::new(source, |kind| kind == TokenType::UserDefined)?,
    };
    Ok(Kind {
        encoder: Box::new(encoder),
        shrinks: Some(1),
        vocab: source.vocab(add_space_prefix, vocab::sentencepiece),
        add_bos: true,
        add_eos: false,
        default_bos: Some(1),
        default_eos: Some(2),
    })
}

impl Encode for SentencePiece {
    fn encode(&self, text: &str, _add_special: bool, parse_special: bool) -> Result<Vec<TokenId>, TextError> {
        let splitter = if parse_special {
            &self.special
        } else {
            &self.user_defined
        };
        let mut tokens = Vec::new();
        // A text begins a word, and so does what follows a special token.
        let mut at_word_start = true;
        splitter.split(text, |piece| match piece {
            Segment::Token(id) => {
                tokens.push(id);
                at_word_start = true;
            }
            Segment::Text(text) => {
                let prefix = if self.add_space_prefix && at_word_start {
                    "▁"
                } else {
                    ""
                };
                self.merge(&(prefix.to_owned() + &text.replace(' ', "▁")), &mut tokens);
                at_word_start = false;
            }
        });
        Ok(tokens)
    }
}

/// Part of the text being merged; a doubly linked list by index, `NONE` at its ends. Empty once merged into its left neighbour.
struct Symbol {
    start: usize,
    len: usize,
    prev: usize,
    next: usize,
}

const NONE: usize = usize::MAX;

/// Two neighbours whose union is a token.
#[derive(PartialEq)]
struct Bigram {
    score: f32,
    left: usize,
    right: usize,
    /// Bytes of the union when this was proposed: if they differ now, one of the two has changed.
    len: usize,
}

impl Eq for Bigram {}

impl Ord for Bigram {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score
            .total_cmp(&other.score)
            .then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Bigram {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl SentencePiece {
    fn merge(&self, text: &str, tokens: &mut Vec<TokenId>) {
        let mut symbols: Vec<Symbol> = (text.char_indices().enumerate())
            .map(|(i, (start, c))| Symbol {
                start,
                len: c.len_utf8(),
                prev: i.wrapping_sub(1),
                next: i + 1,
            })
            .collect();
        let Some(last) = symbols.last_mut() else { return };
        last.next = NONE;

        let mut queue = BinaryHeap::new();
        for right in 1..symbols.len() {
            queue.extend(self.bigram(text, &symbols, right - 1, right));
        }
        while let Some(Bigram { left, right, len, .. }) = queue.pop() {
            let (l, r) = (symbols[left].len, symbols[right].len);
            if l == 0 || r == 0 || l + r != len {
                continue;
            }
            let next = symbols[right].next;
            symbols[right].len = 0;
            symbols[left].len = len;
            symbols[left].next = next;
            if next != NONE {
                symbols[next].prev = left;
                queue.extend(self.bigram(text, &symbols, left, next));
            }
            let prev = symbols[left].prev;
            if prev != NONE {
                queue.extend(self.bigram(text, &symbols, prev, left));
            }
        }
        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            self.emit(&text[symbol.start..symbol.start + symbol.len], tokens);
        }
    }

    fn bigram(&self, text: &str, symbols: &[Symbol], left: usize, right: usize) -> Option<Bigram> {
        let (start, len) = (symbols[left].start, symbols[left].len + symbols[right].len);
        let &(_, score) = self.pieces.get(&text[start..start + len])?;
        Some(Bigram {
            score,
            left,
            right,
            len,
        })
    }

    fn emit(&self, piece: &str, tokens: &mut Vec<TokenId>) {
        match self.pieces.get(piece) {
            Some(&(id, _)) => tokens.push(id),
            // Every merged symbol is a token, so this is one character: its bytes, or the unknown token.
            None => match piece
                .bytes()
                .map(|byte| self.bytes[usize::from(byte)])
                .collect::<Option<Vec<_>>>()
            {
                Some(bytes) => tokens.extend(bytes),
                None => tokens.extend(self.unknown),
            },
        }
    }
}

/// Cuts tokens that are recognised verbatim out of a text: the leftmost first, the longest of those that start together.
struct Splitter {
    matcher: AhoCorasick,
    ids: Vec<TokenId>,
}

enum Segment<'a> {
    Token(TokenId),
    Text(&'a str),
}

impl Splitter {
    fn new(source: &Source<'_>, wanted: impl Fn(TokenType) -> bool) -> Result<Self, TextError> {
        let wanted = source
            .iter()
            .filter(|(_, text, kind)| wanted(*kind) && !text.is_empty());
        let (ids, texts): (Vec<_>, Vec<_>) = wanted.map(|(id, text, _)| (id, text)).unzip();
        let matcher = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(texts);
        let matcher = matcher.map_err(|e| TextError::invalid("tokenizer.ggml.tokens", e.to_string()))?;
        Ok(Self { matcher, ids })
    }

    fn split<'a>(&self, text: &'a str, mut each: impl FnMut(Segment<'a>)) {
        let mut done = 0;
        for found in self.matcher.find_iter(text) {
            if found.start() > done {
                each(Segment::Text(&text[done..found.start()]));
            }
            each(Segment::Token(self.ids[found.pattern().as_usize()]));
            done = found.end();
        }
        if done < text.len() {
            each(Segment::Text(&text[done..]));
        }
    }
}
