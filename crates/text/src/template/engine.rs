//! Jinja2 as Hugging Face transformers sets it up, in this process. Steps and output are bounded; memory and stack are not, as
//! the template engine has no such bounds: see [`super::worker`].

use std::collections::BTreeMap;
use std::error::Error as _;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};
use std::time::SystemTime;

use chrono::format::{Item, StrftimeItems};
use chrono::{DateTime, Utc};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value as JinjaValue, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use regex::Regex;
use serde_json::Value;

use super::text::{DEFAULT, TOOL_USE, TemplateText};
use super::{ChatInput, TOOLS, json};
use crate::TextError;
use crate::bounds::{MAX_OUTPUT_BYTES, MAX_STEPS, RenderLimit};

/// Clock of templates (`strftime_now`, in UTC).
pub type Clock = fn() -> SystemTime;

/// Templates that are compiled.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    environment: Arc<Environment<'static>>,
    text: Arc<TemplateText>,
}

impl Engine {
    pub(super) fn compile(text: Arc<TemplateText>, clock: Clock) -> Result<Self, TextError> {
        let environment = guarded(|| {
            let mut environment = environment(clock)?;
            for (name, source) in &text.named {
                environment.add_template_owned(name.clone(), strip_generation(source))?;
            }
            Ok(environment)
        });
        let environment =
            environment.map_err(|e| TextError::Template(e.map_or(PANICKED.into(), |e| describe(&e))))?;
        Ok(Self {
            environment: Arc::new(environment),
            text,
        })
    }

    /// Renders `input` exactly as given.
    pub(super) fn render(&self, input: &ChatInput<'_>) -> Result<String, TextError> {
        let mut output = Output::default();
        let rendered = guarded(|| {
            let with_tools = input
                .tools
                .and_then(|_| self.environment.get_template(TOOL_USE).ok());
            let template = match with_tools {
                Some(template) => template,
                None => self.environment.get_template(DEFAULT)?,
            };
            template
                .render_captured_to(self.variables(input), &mut output)
                .map(drop)
        });
        match rendered {
            Ok(()) => String::from_utf8(output.bytes)
                .map_err(|_| TextError::Render("the template engine wrote no UTF-8".to_owned())),
            Err(_) if output.is_full => Err(TextError::Limit(RenderLimit::Output)),
            Err(None) => Err(TextError::Render(PANICKED.to_owned())),
            Err(Some(error)) if has_no_fuel(&error) => Err(TextError::Limit(RenderLimit::Steps)),
            Err(Some(error)) => Err(match raised(&error) {
                Some(message) => TextError::Refused(message),
                None => TextError::Render(describe(&error)),
            }),
        }
    }

    fn variables(&self, input: &ChatInput<'_>) -> JinjaValue {
        let list = |values: &[Value]| JinjaValue::from_iter(values.iter().map(json::to_jinja));
        let optional = |values: Option<&[Value]>| values.map_or(JinjaValue::from(()), list);
        let mut variables: BTreeMap<&str, JinjaValue> = BTreeMap::new();
        let special_tokens = self.text.special_tokens.iter();
        variables.extend(special_tokens.map(|(role, text)| (role.as_str(), text.into())));
        let kwargs = input.kwargs.into_iter().flatten();
        variables.extend(kwargs.map(|(name, value)| (name.as_str(), json::to_jinja(value))));
        variables.insert("messages", list(input.messages));
        variables.insert(TOOLS, optional(input.tools));
        variables.insert("documents", optional(input.documents));
        variables.insert("add_generation_prompt", input.add_generation_prompt.into());
        JinjaValue::from_pairs(variables)
    }
}

/// Templates and messages come from outside, and minijinja panics on some (`[][::-1]` in 3.0.5): `Err(None)`.
fn guarded<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Option<Error>> {
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|_| None)?
        .map_err(Some)
}

const PANICKED: &str = "the template engine panicked";

/// What a template writes, up to [`MAX_OUTPUT_BYTES`].
#[derive(Default)]
struct Output {
    bytes: Vec<u8>,
    is_full: bool,
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > MAX_OUTPUT_BYTES - self.bytes.len() {
            self.is_full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn environment(clock: Clock) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    environment.set_syntax(syntax?);
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    // To Python nothing iterates over none, and a text or a mapping is a sequence too.
    environment.add_test("iterable", |value: &JinjaValue| {
        !value.is_none() && (value.kind() == ValueKind::String || value.try_iter().is_ok())
    });
    environment.add_test("sequence", |value: &JinjaValue| match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map => true,
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    });
    // Both are empty in Jinja where there is nothing.
    environment.add_filter("first", |value: &JinjaValue| match value.is_undefined() {
        true => Ok(JinjaValue::UNDEFINED),
        false => minijinja::filters::first(value),
    });
    environment.add_filter("last", |value: JinjaValue| match value.is_undefined() {
        true => Ok(JinjaValue::UNDEFINED),
        false => minijinja::filters::last(value),
    });
    environment.add_filter("items", |value: &JinjaValue| match value.is_undefined() {
        true => Ok(JinjaValue::from_iter::<[JinjaValue; 0]>([])),
        false => minijinja::filters::items(value),
    });
    for name in ["length", "count"] {
        environment.add_filter(name, |value: &JinjaValue| match value.is_undefined() {
            true => Ok(0),
            false => minijinja::filters::length(value),
        });
    }
    environment.add_filter("tojson", json::tojson);
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<JinjaValue, Error> {
            let error = Error::new(ErrorKind::InvalidOperation, "the template raised an exception");
            Err(error.with_source(Raised(message)))
        },
    );
    add_strftime_now(&mut environment, clock);
    Ok(environment)
}

fn add_strftime_now(environment: &mut Environment<'_>, clock: Clock) {
    environment.add_function("strftime_now", move |format: &str| -> Result<String, Error> {
        let items: Vec<_> = StrftimeItems::new(format).collect();
        if items.contains(&Item::Error) {
            let message = format!("strftime_now: {format:?} is not a valid format");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        Ok(DateTime::<Utc>::from(clock())
            .format_with_items(items.into_iter())
            .to_string())
    });
}

/// `{% generation %}` marks the assistant's tokens for training and is no part of Jinja; `with` has the same scope.
fn strip_generation(source: &str) -> String {
    static TAG: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("a constant pattern")
    });
    TAG.replace_all(source, "{%$1 ${2}with $3%}").into_owned()
}

/// What `raise_exception` was given.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raised(error: &Error) -> Option<String> {
    cause(error, |_| true).map(|Raised(message)| message.clone())
}

/// The first cause of this type for which `wanted` holds.
fn cause<T: std::error::Error + 'static>(error: &Error, wanted: impl Fn(&T) -> bool) -> Option<&T> {
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(found) = error.downcast_ref().filter(|found| wanted(found)) {
            return Some(found);
        }
        source = error.source();
    }
    None
}

/// The whole chain of causes in one line.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// Whether the steps were used up; an error of an inner call is the cause of another.
fn has_no_fuel(error: &Error) -> bool {
    let is_it = |error: &Error| error.kind() == ErrorKind::OutOfFuel;
    is_it(error) || cause::<Error>(error, is_it).is_some()
}
