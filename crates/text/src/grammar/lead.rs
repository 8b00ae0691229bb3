//! Constraints that apply after an unconstrained lead, such as reasoning.

use std::sync::Arc;

use plimsoll_core::{Constraint, ConstraintError, Progress, TokenId, mask};

use super::{GrammarError, Lead};
use crate::Tokenizer;

/// A [`Lead`] with the tokens of its first mark, or the constraint of its text.
#[derive(Debug)]
pub(super) enum SpelledLead {
    UpTo(String),
    Once(String),
    Between { open: Arc<Spelling>, close: String },
    Grammar(Box<dyn Constraint>),
}

impl SpelledLead {
    /// `compile` makes the constraint of a grammar in Lark.
    pub(super) fn new(
        lead: &Lead,
        tokenizer: &Tokenizer,
        compile: impl FnOnce(&str) -> Result<Box<dyn Constraint>, GrammarError>,
    ) -> Result<Self, GrammarError> {
        Ok(match lead {
            Lead::UpTo(mark) => Self::UpTo(mark.clone()),
            Lead::Once(mark) => Self::Once(mark.clone()),
            Lead::Between([open, close]) => Self::Between {
                open: Spelling::new(open, tokenizer).into(),
                close: close.clone(),
            },
            Lead::Grammar(lark) => Self::Grammar(compile(lark)?),
        })
    }

    /// Whether the text may end within the lead.
    pub(super) fn is_optional(&self) -> bool {
        matches!(self, Self::Once(_))
    }

    /// The constraint of a text with this lead, after which `inner` applies. Tokens in `barred` are not allowed within it.
    pub(super) fn before(
        &self,
        inner: Box<dyn Constraint>,
        tokenizer: &Tokenizer,
        barred: &Arc<[TokenId]>,
    ) -> Box<dyn Constraint> {
        let behind =
            |mark: &str, inner| Box::new(Behind::new(mark, tokenizer.clone(), Arc::clone(barred), inner));
        match self {
            Self::UpTo(mark) | Self::Once(mark) => behind(mark, inner),
            Self::Between { open, close } => Box::new(MayBegin::Open {
                spelling: Arc::clone(open),
                written: 0,
                without: Some(inner.clone()),
                behind: behind(close, inner),
            }),
            Self::Grammar(lead) => Box::new(Followed {
                lead: Some(lead.clone()),
                inner,
            }),
        }
    }
}

/// Applies one constraint until its text is complete, then another.
#[derive(Clone, Debug)]
struct Followed {
    /// `None` once complete.
    lead: Option<Box<dyn Constraint>>,
    inner: Box<dyn Constraint>,
}

impl Constraint for Followed {
    fn restrict(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        self.lead.as_mut().unwrap_or(&mut self.inner).restrict(mask)
    }

    fn accept(&mut self, token: TokenId) -> Result<Progress, ConstraintError> {
        let Some(lead) = &mut self.lead else {
            return self.inner.accept(token);
        };
        if lead.accept(token)? == Progress::Complete {
            self.lead = None;
        }
        Ok(Progress::Open)
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// Applies a constraint after a marker. Before it, all tokens but `barred` are allowed.
///
/// Text after the marker within the marker's last token is not checked: models that use markers have tokens for them.
#[derive(Clone, Debug)]
pub(super) struct Behind {
    marker: String,
    tokenizer: Tokenizer,
    /// The last bytes of the text, in which the marker may begin; `None` after the marker.
    before: Option<Vec<u8>>,
    /// Tokens that are not allowed before the marker.
    barred: Arc<[TokenId]>,
    inner: Box<dyn Constraint>,
}

impl Behind {
    pub(super) fn new(
        marker: &str,
        tokenizer: Tokenizer,
        barred: Arc<[TokenId]>,
        inner: Box<dyn Constraint>,
    ) -> Self {
        Self {
            marker: marker.to_owned(),
            tokenizer,
            before: Some(Vec::new()),
            barred,
            inner,
        }
    }
}

impl Constraint for Behind {
    fn restrict(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        if self.before.is_none() {
            return self.inner.restrict(mask);
        }
        for &token in &*self.barred {
            mask::forbid(mask, token);
        }
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<Progress, ConstraintError> {
        let Some(before) = &mut self.before else {
            return self.inner.accept(token);
        };
        before.extend_from_slice(self.tokenizer.token_bytes(token));
        if contains_mark(before, &self.marker) {
            self.before = None;
        }
        Ok(Progress::Open)
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// Whether `tail` contains `mark`. Drops the bytes of `tail` with which no mark can begin any more.
pub(super) fn contains_mark(tail: &mut Vec<u8>, mark: &str) -> bool {
    let found = tail.windows(mark.len()).any(|bytes| bytes == mark.as_bytes());
    let useless = (tail.len() + 1).saturating_sub(mark.len());
    tail.drain(..useless);
    found
}

/// All ways to write a mark in tokens.
#[derive(Debug)]
pub(super) struct Spelling {
    /// For each position in the mark: tokens that continue it there, with their lengths in bytes.
    next: Vec<Vec<(TokenId, usize)>>,
    /// Tokens of whitespace only, which may precede the mark.
    spaces: Vec<TokenId>,
}

impl Spelling {
    /// Searches the vocabulary. A mark that is a special token is written only by that token.
    pub(super) fn new(mark: &str, tokenizer: &Tokenizer) -> Self {
        let mut next = vec![Vec::new(); mark.len()];
        let tokens = 0..tokenizer.vocab_size() as TokenId;
        let is_space = |token: &TokenId| {
            let bytes = tokenizer.token_bytes(*token);
            !bytes.is_empty() && bytes.iter().all(u8::is_ascii_whitespace)
        };
        let spaces = tokens.clone().filter(is_space).collect();
        if let (Some(token), Some(first)) = (tokenizer.special_token(mark), next.first_mut()) {
            first.push((token, mark.len()));
            return Self { next, spaces };
        }
        for token in tokens {
            let bytes = tokenizer.token_bytes(token);
            if bytes.is_empty() {
                continue;
            }
            for (at, tokens) in next.iter_mut().enumerate() {
                if mark.as_bytes()[at..].starts_with(bytes) {
                    tokens.push((token, bytes.len()));
                }
            }
        }
        Self { next, spaces }
    }
}

/// Applies a constraint after an optional lead that begins with a mark, or to the whole text if there is no lead.
#[derive(Clone, Debug)]
pub(super) enum MayBegin {
    /// Undecided: the text so far may begin with the mark.
    Open {
        spelling: Arc<Spelling>,
        /// Bytes of the mark read so far.
        written: usize,
        /// State of the constraint if there is no lead, while that is possible.
        without: Option<Box<dyn Constraint>>,
        behind: Box<dyn Constraint>,
    },
    /// Decided.
    Settled(Box<dyn Constraint>),
}

impl Constraint for MayBegin {
    fn restrict(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        let (tokens, without) = match self {
            Self::Settled(inner) => return inner.restrict(mask),
            Self::Open {
                spelling,
                written,
                without,
                ..
            } => (&spelling.next[*written], without),
        };
        let allowed = tokens.iter().map(|&(token, _)| token);
        let allowed: Vec<_> = allowed.filter(|&token| mask::allows(mask, token)).collect();
        match without {
            Some(without) => without.restrict(mask)?,
            None => mask.fill(0),
        }
        for token in allowed {
            mask::allow(mask, token);
        }
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<Progress, ConstraintError> {
        let (spelling, written, without, behind) = match self {
            Self::Settled(inner) => return inner.accept(token),
            Self::Open {
                spelling,
                written,
                without,
                behind,
            } => (spelling, written, without, behind),
        };
        let other = without.as_mut().map(|without| without.accept(token));
        let step = spelling.next[*written].iter().find(|(known, _)| *known == token);
        let Some(&(_, bytes)) = step else {
            return match (without.take(), other) {
                // Whitespace before the mark, where the constraint allows it.
                (Some(text), Some(Ok(Progress::Open)))
                    if *written == 0 && spelling.spaces.contains(&token) =>
                {
                    *without = Some(text);
                    Ok(Progress::Open)
                }
                (Some(without), Some(progress)) => {
                    *self = Self::Settled(without);
                    progress
                }
                _ => Err(ConstraintError(
                    "the marker does not continue like this".to_owned(),
                )),
            };
        };
        *written += bytes;
        if *written == spelling.next.len() {
            *self = Self::Settled(behind.clone());
            return Ok(Progress::Open);
        }
        match other {
            Some(Ok(progress)) => Ok(progress),
            _ => {
                *without = None;
                Ok(Progress::Open)
            }
        }
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
