use std::fmt::{self, Display};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use plimsoll_core::TokenId;
use serde_json::{Value, json};

use super::cache::Cache;
use super::close::close_objects;
use super::constraint::{Allowed, Compiled, CompiledGrammar, complaint};
use super::lead::SpelledLead;
use super::{Grammar, GrammarError, GrammarSpec, Lead, ebnf, schema, tokens};
use crate::Tokenizer;

/// Longest text of a grammar, in bytes.
pub(crate) const MAX_BYTES: usize = 256 << 10;
/// Longest marker behind which a grammar applies, in bytes.
const MAX_MARKER_BYTES: usize = 1 << 10;
/// Stack of the compiling thread, as rules are resolved recursively. Only used pages take memory.
const STACK: usize = 256 << 20;
/// Whitespace between the tokens of JSON.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// Limits on time and memory, for untrusted grammars: llguidance's defaults are for trusted ones. On a server's core a mask
/// takes at most about 20 ms, and a sequence at most about 40 MB.
fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 20_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Compiles grammars for one tokenizer, with a cache of the latest.
pub struct GrammarCompiler {
    tokenizer: Tokenizer,
    ends: Arc<[TokenId]>,
    factory: OnceLock<Result<ParserFactory, String>>,
    cache: Mutex<Cache>,
}

impl GrammarCompiler {
    /// A compiler for `tokenizer`; `ends` are all tokens that may end a text. The vocabulary is read by the first
    /// [`Self::compile`], or by [`Self::prepare`].
    pub fn new(tokenizer: Tokenizer, ends: &[TokenId]) -> Self {
        Self {
            tokenizer,
            ends: ends.into(),
            factory: OnceLock::new(),
            cache: Mutex::default(),
        }
    }

    /// Reads the vocabulary, once.
    pub fn prepare(&self) {
        let _ = self.factory();
    }

    fn factory(&self) -> Result<&ParserFactory, GrammarError> {
        let factory = self.factory.get_or_init(|| {
            let tokens = tokens::environment(&self.tokenizer, &self.ends);
            let slices = llguidance::earley::SlicedBiasComputer::general_slices();
            let factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &slices);
            let mut factory = factory.map_err(|error| error.to_string())?;
            *factory.limits_mut() = limits();
            factory.quiet();
            Ok(factory)
        });
        factory.as_ref().map_err(|error| {
            GrammarError::Invalid(format!("this model's vocabulary cannot follow grammars: {error}"))
        })
    }

    /// Compiles `grammar`, or takes it from the cache. May take seconds: call it on a blocking thread.
    ///
    /// # Errors
    /// [`GrammarError`], which says what to change.
    pub fn compile(&self, grammar: &Grammar) -> Result<CompiledGrammar, GrammarError> {
        let key = format!("{grammar:?}");
        if key.len() > 2 * MAX_BYTES {
            return Err(GrammarError::TooLarge {
                bytes: key.len(),
                limit: 2 * MAX_BYTES,
            });
        }
        if let Some(known) = self.cached(&key) {
            return Ok(known);
        }
        let compiled = with_stack(|| self.compile_anew(grammar))?;
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.insert(key, compiled.clone());
        Ok(compiled)
    }

    /// What is wrong with `grammar`, if llguidance cannot read it. For a part of a grammar that cannot be compiled: llguidance does
    /// not say which part it is.
    ///
    /// # Errors
    /// As [`Self::compile`].
    pub fn check(&self, grammar: &Grammar) -> Result<(), GrammarError> {
        with_stack(|| {
            let parser = self.factory()?.create_parser(source(grammar)?);
            match Matcher::new(parser).get_error() {
                None => Ok(()),
                Some(error) => Err(self.refusal(grammar, &error)),
            }
        })
    }

    fn cached(&self, key: &str) -> Option<CompiledGrammar> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(key)
    }

    fn compile_anew(&self, grammar: &Grammar) -> Result<CompiledGrammar, GrammarError> {
        let is_mark = |mark: &String| (1..=MAX_MARKER_BYTES).contains(&mark.len());
        if !grammar.leads.iter().flat_map(Lead::marks).all(is_mark) {
            return Err(GrammarError::Invalid(format!(
                "the marker after which the grammar applies must have 1 to {MAX_MARKER_BYTES} bytes"
            )));
        }
        let source = source(grammar)?;
        let matcher = Matcher::new(self.factory()?.create_parser(source));
        let invalid = |message: &dyn Display| GrammarError::Invalid(complaint(message));
        let mut matcher = match matcher.get_error() {
            None => matcher,
            Some(error) => return Err(self.refusal(grammar, &error)),
        };
        if matcher.is_stopped() {
            return Err(GrammarError::Invalid(
                "the grammar allows only the empty text".into(),
            ));
        }
        let vocab_size = self.tokenizer.vocab_size();
        let first =
            Allowed::compute(&mut matcher, vocab_size, &self.ends).map_err(|error| invalid(&error))?;
        let leads = grammar.leads.iter().map(|lead| self.lead(lead));
        Ok(CompiledGrammar::from(Compiled {
            matcher: Mutex::new(matcher),
            first,
            leads: leads.collect::<Result<_, _>>()?,
            tokenizer: self.tokenizer.clone(),
            ends: Arc::clone(&self.ends),
        }))
    }

    /// Why llguidance did not compile `grammar`.
    fn refusal(&self, grammar: &Grammar, error: &str) -> GrammarError {
        if error.contains("Unimplemented keys")
            && let GrammarSpec::JsonSchema { schema, .. } = &grammar.spec
        {
            let keywords = schema::unsupported(schema);
            if !keywords.is_empty() {
                return GrammarError::Unsupported(keywords);
            }
        }
        match self.whitespace_complaint(grammar) {
            Ok(None) => GrammarError::Invalid(complaint(&error)),
            Ok(Some(complaint)) => GrammarError::Whitespace(complaint),
            Err(error) => error,
        }
    }

    /// What llguidance says if the whitespace of `grammar` cannot be compiled with any other JSON either: it does not say whose
    /// regular expression is wrong.
    fn whitespace_complaint(&self, grammar: &Grammar) -> Result<Option<String>, GrammarError> {
        let Some(whitespace) = &grammar.whitespace else {
            return Ok(None);
        };
        let spaced = Grammar {
            whitespace: Some(whitespace.clone()),
            ..GrammarSpec::JsonObject.into()
        };
        let parser = self.factory()?.create_parser(source(&spaced)?);
        let error = Matcher::new(parser).get_error();
        Ok(error.map(|error| complaint(&error)))
    }

    fn lead(&self, lead: &Lead) -> Result<SpelledLead, GrammarError> {
        SpelledLead::new(lead, &self.tokenizer, |lark| {
            let compiled = self.compile_anew(&GrammarSpec::Lark(lark.to_owned()).into())?;
            Ok(compiled.constraint(&[]))
        })
    }
}

/// Runs `work` on a thread with a large stack.
fn with_stack<T: Send>(work: impl FnOnce() -> Result<T, GrammarError> + Send) -> Result<T, GrammarError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK);
        let thread = thread.spawn_scoped(scope, work);
        let thread =
            thread.map_err(|error| GrammarError::Invalid(format!("cannot start a thread: {error}")))?;
        thread
            .join()
            .unwrap_or_else(|_| Err(GrammarError::Invalid("the grammar cannot be compiled".into())))
    })
}

/// The grammar as llguidance reads it.
fn source(grammar: &Grammar) -> Result<TopLevelGrammar, GrammarError> {
    let empty = |what: &str| Err(GrammarError::Invalid(format!("{what} must not be empty")));
    let sized = |text: &str| match text.len() {
        bytes @ 0..=MAX_BYTES => Ok(bytes),
        bytes => Err(GrammarError::TooLarge {
            bytes,
            limit: MAX_BYTES,
        }),
    };
    let source = match &grammar.spec {
        GrammarSpec::JsonObject => json_schema(json!({ "type": "object" }), true, grammar)?,
        GrammarSpec::JsonSchema { schema, strict } => {
            sized(&schema.to_string())?;
            json_schema(schema.clone(), *strict, grammar)?
        }
        GrammarSpec::Regex(regex) if regex.is_empty() => return empty("the regular expression"),
        GrammarSpec::Regex(regex) => {
            sized(regex)?;
            GrammarWithLexer::from_regex(regex)
        }
        GrammarSpec::Choice(choices) if choices.is_empty() => return empty("the list of choices"),
        GrammarSpec::Choice(choices) if choices.iter().any(String::is_empty) => return empty("a choice"),
        GrammarSpec::Choice(choices) => {
            let quoted: Vec<String> = choices.iter().map(|choice| json!(choice).to_string()).collect();
            let choices = quoted.join(" | ");
            sized(&choices)?;
            GrammarWithLexer::from_lark(format!("start: CHOICE\nCHOICE: {choices}"))
        }
        GrammarSpec::Lark(lark) if lark.trim().is_empty() => return empty("the grammar"),
        GrammarSpec::Lark(lark) => {
            sized(lark)?;
            GrammarWithLexer::from_lark(schema::fit_numbers_in_lark(lark).map_err(GrammarError::Invalid)?)
        }
        GrammarSpec::Ebnf(ebnf) if ebnf.trim().is_empty() => return empty("the grammar"),
        GrammarSpec::Ebnf(ebnf) => {
            sized(ebnf)?;
            GrammarWithLexer::from_lark(ebnf::to_lark(ebnf)?)
        }
    };
    Ok(TopLevelGrammar::from_grammar(source))
}

fn json_schema(schema: Value, strict: bool, grammar: &Grammar) -> Result<GrammarWithLexer, GrammarError> {
    let schema = match schema {
        Value::Object(_) => schema,
        Value::Bool(true) => json!({}),
        other => {
            let message = format!("a JSON schema is an object, not {other}");
            return Err(GrammarError::Invalid(message));
        }
    };
    let whitespace =
        Some(grammar.whitespace.as_deref().unwrap_or(WHITESPACE)).filter(|pattern| !pattern.is_empty());
    let options = JsonCompileOptions {
        whitespace_flexible: whitespace.is_some(),
        whitespace_pattern: whitespace.map(str::to_owned),
        lenient: !strict,
        coerce_one_of: !strict,
        ..JsonCompileOptions::default()
    };
    let mut schema = schema;
    schema::fit_numbers(&mut schema).map_err(GrammarError::Invalid)?;
    close_objects(&mut schema);
    // These replace options that a client may have sent.
    options.apply_to(&mut schema);
    Ok(GrammarWithLexer::from_json_schema(schema))
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler")
            .field("tokenizer", &self.tokenizer)
            .field("ends", &self.ends)
            .finish_non_exhaustive()
    }
}
