//! Structured output: text that is JSON, follows a JSON schema, matches a regular expression or a grammar, by llguidance.
//!
//! A [`GrammarCompiler`] knows one tokenizer and turns a [`Grammar`] into a [`CompiledGrammar`], which begins
//! [`Constraint`](plimsoll_core::Constraint)s, one per sequence. Time and memory are bounded throughout, since grammars come
//! from clients: a grammar that needs more is refused, and one that turns out to need more ends its own request.

mod budget;
mod cache;
mod close;
mod compiler;
mod constraint;
mod ebnf;
mod lead;
mod schema;
mod tokens;

use serde_json::Value;

pub use budget::ReasoningBudget;
pub(crate) use close::close_objects;
pub use compiler::GrammarCompiler;
pub(crate) use compiler::MAX_BYTES;
pub use constraint::CompiledGrammar;
pub use schema::UnsupportedKeyword;

/// A grammar of a text.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema describes (JSON Schema 2020-12; others by their `$schema`).
    JsonSchema {
        /// The schema.
        schema: Value,
        /// Refuse keywords that cannot be enforced; otherwise they are not.
        strict: bool,
    },
    /// A whole match of a regular expression, in the syntax of the `regex` crate.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's variant of Lark; its first rule is `start`. JSON schemas can be embedded with
    /// `%json { ... }`, special tokens as `<|name|>`.
    Lark(String),
    /// A context-free grammar in GBNF, llama.cpp's variant of EBNF; its first rule is `root`.
    Ebnf(String),
}

/// A [`GrammarSpec`], and where and how it applies.
#[derive(Clone, Debug, PartialEq)]
pub struct Grammar {
    /// The grammar.
    pub spec: GrammarSpec,
    /// A regular expression of the whitespace between tokens of JSON; empty: none. Default: up to 32 spaces, tabs and line ends,
    /// so that a model cannot repeat them for ever. A [`GrammarSpec::Lark`] says it itself; here it is for the errors alone.
    pub whitespace: Option<String>,
    /// Unconstrained leads before the text that it applies to, in order.
    pub leads: Vec<Lead>,
}

/// An unconstrained part of a text, before the part to which a grammar applies.
#[derive(Clone, Debug, PartialEq)]
pub enum Lead {
    /// Up to the first occurrence of this, before which the text does not end.
    UpTo(String),
    /// Up to the first occurrence of this, if it ever comes: the text may end before, and within any lead before this one.
    Once(String),
    /// From the first of these marks, if the text begins with it, to the second. Otherwise there is none.
    Between([String; 2]),
    /// A text that this grammar (as [`GrammarSpec::Lark`]) describes, up to where nothing more may follow in it.
    Grammar(String),
}

impl Lead {
    fn marks(&self) -> &[String] {
        match self {
            Self::UpTo(mark) | Self::Once(mark) => std::slice::from_ref(mark),
            Self::Between(marks) => marks,
            Self::Grammar(_) => &[],
        }
    }
}

impl From<GrammarSpec> for Grammar {
    fn from(spec: GrammarSpec) -> Self {
        Self {
            spec,
            whitespace: None,
            leads: Vec::new(),
        }
    }
}

/// Why a grammar cannot be used. All are errors of the client.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GrammarError {
    /// It is empty or invalid.
    #[error("{0}")]
    Invalid(String),
    /// The regular expression of the whitespace cannot be used.
    #[error("{0}")]
    Whitespace(String),
    /// A JSON schema uses keywords that cannot be enforced.
    #[error(
        "JSON schema keywords that cannot be enforced: {}; leave them out",
        .0.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    Unsupported(Vec<UnsupportedKeyword>),
    /// It is longer than a grammar may be.
    #[error("the grammar has {bytes} bytes, and at most {limit} are compiled")]
    TooLarge {
        /// Its length.
        bytes: usize,
        /// The longest.
        limit: usize,
    },
}

#[cfg(test)]
mod tests;
