//! Chat templates: Jinja2 as Hugging Face transformers sets it up (`transformers.utils.chat_template_utils`).

mod json;
mod messages;

use std::collections::BTreeMap;
use std::error::Error as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::SystemTime;

use chrono::format::{Item, StrftimeItems};
use chrono::{DateTime, Utc};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value as JinjaValue, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use plimsoll_core::Metadata;
use regex::Regex;
use serde_json::{Map, Value, json};

use crate::{SpecialTokens, TextError, directory};
use messages::ContentFormat;

/// Clock of templates (`strftime_now`, in UTC).
pub type Clock = fn() -> SystemTime;

/// A model's chat template, compiled.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    source: Arc<str>,
    /// What requests with tools get.
    tool_source: Arc<str>,
    special_tokens: SpecialTokens,
    content: ContentFormat,
    tools: ToolPlace,
    shows_calls: bool,
}

/// Where a template reads the tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ToolPlace {
    /// It does not show them.
    Nowhere,
    /// The variable of this name.
    Variable(&'static str),
    /// The field `tools` of the system message, as JSON text.
    SystemMessage,
}

/// What to render. Objects keep the order of their keys.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChatInput<'a> {
    /// OpenAI's `messages`.
    pub messages: &'a [Value],
    /// OpenAI's `tools`.
    pub tools: Option<&'a [Value]>,
    /// Documents for retrieval, as Cohere's templates take them.
    pub documents: Option<&'a [Value]>,
    /// End with the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// End within the final message, behind its content, so that the model continues it; no turn begins then.
    pub continue_final_message: bool,
    /// More variables for the template (`chat_template_kwargs`), such as `enable_thinking`.
    pub kwargs: Option<&'a Map<String, Value>>,
}

const TOOLS: &str = "tools";
/// Where templates read tools: nearly all, SmolLM3's, Phi-4-mini's.
const TOOL_PLACES: [ToolPlace; 3] = [
    ToolPlace::Variable(TOOLS),
    ToolPlace::Variable("xml_tools"),
    ToolPlace::SystemMessage,
];

const DEFAULT: &str = "default";
/// Where a model has several templates, transformers takes this one for requests with tools.
const TOOL_USE: &str = "tool_use";

impl ChatTemplate {
    /// Compiles `source`; `special_tokens` are [`crate::Tokenizer::special_tokens`].
    pub fn new(source: &str, special_tokens: &SpecialTokens) -> Result<Self, TextError> {
        Self::with_names(&[(DEFAULT.to_owned(), source.to_owned())], special_tokens)
    }

    fn with_names(templates: &[(String, String)], special_tokens: &SpecialTokens) -> Result<Self, TextError> {
        let mut environment = environment()?;
        for (name, source) in templates {
            let source = strip_generation(source);
            let added = environment.add_template_owned(name.clone(), source);
            added.map_err(|e| TextError::Template(describe(&e)))?;
        }
        let named = |wanted: &str| {
            let found = templates.iter().find(|(name, _)| name == wanted);
            found.map(|(_, source)| source.as_str())
        };
        let source = named(DEFAULT).ok_or_else(|| {
            let names: Vec<_> = templates.iter().map(|(name, _)| name.as_str()).collect();
            TextError::Template(format!(
                "there is no template called \"default\", only {}",
                names.join(", ")
            ))
        })?;
        let mut template = Self {
            environment: Arc::new(environment),
            source: source.into(),
            tool_source: named(TOOL_USE).unwrap_or(source).into(),
            special_tokens: special_tokens.clone(),
            content: ContentFormat::Text,
            tools: ToolPlace::Nowhere,
            shows_calls: true,
        };
        template.content = ContentFormat::detect(&template);
        template.tools = template.find_tools();
        template.shows_calls = template.find_calls();
        Ok(template)
    }

    /// From a model directory: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, which may be one
    /// template or several with names. `None` where there is neither.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>, TextError> {
        let special_tokens = directory::special_tokens(dir)?;
        let path = dir.join("chat_template.jinja");
        if path.exists() {
            let source = std::fs::read_to_string(&path).map_err(TextError::read(&path))?;
            return Self::new(&source, &special_tokens).map(Some);
        }
        let config = directory::read_json(dir, "tokenizer_config.json")?.unwrap_or_default();
        match &config["chat_template"] {
            Value::Null => Ok(None),
            Value::String(source) => Self::new(source, &special_tokens).map(Some),
            several => {
                let text = |entry: &Value, key: &str| entry.get(key)?.as_str().map(str::to_owned);
                let entries = several.as_array().into_iter().flatten();
                let named = entries.map(|entry| text(entry, "name").zip(text(entry, "template")));
                let named = named
                    .collect::<Option<Vec<_>>>()
                    .filter(|named| !named.is_empty());
                let place = dir.join("tokenizer_config.json").display().to_string();
                let problem = "chat_template is neither a string nor a list of {name, template}";
                let named = named.ok_or_else(|| TextError::invalid(place, problem))?;
                Self::with_names(&named, &special_tokens).map(Some)
            }
        }
    }

    /// From the `tokenizer.chat_template` keys of a GGUF file; `None` where there are none.
    pub fn from_gguf(metadata: &Metadata, special_tokens: &SpecialTokens) -> Result<Option<Self>, TextError> {
        const KEY: &str = "tokenizer.chat_template";
        let text = |key: &str| metadata.get(key)?.as_str().map(str::to_owned);
        let Some(source) = text(KEY) else { return Ok(None) };
        let mut named = vec![(DEFAULT.to_owned(), source)];
        named.extend(text(&format!("{KEY}.{TOOL_USE}")).map(|source| (TOOL_USE.to_owned(), source)));
        Self::with_names(&named, special_tokens).map(Some)
    }

    /// Replaces the system's clock.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        let mut environment = Environment::clone(&self.environment);
        add_strftime_now(&mut environment, clock);
        self.environment = Arc::new(environment);
        self
    }

    /// Renders the prompt of a chat. It contains BOS where the model wants one: tokenize it without special tokens added.
    ///
    /// `messages` are as OpenAI's API has them. Content is brought into the shape that this template reads, a text or a
    /// list of parts, tools go to where it reads them, and the arguments of tool calls are parsed, as templates expect them.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TextError> {
        self.render_with(input, self.tools)
    }

    fn render_with(&self, input: &ChatInput<'_>, place: ToolPlace) -> Result<String, TextError> {
        let mut messages = messages::normalize(input.messages, self.content)?;
        let mut kwargs = input.kwargs.cloned().unwrap_or_default();
        let mut tools = input.tools;
        match (place, tools) {
            (ToolPlace::SystemMessage, Some(list)) => {
                messages::add_tools(&mut messages, list, self.content)?;
                tools = None;
            }
            (ToolPlace::Variable(name), Some(list)) if name != TOOLS => {
                kwargs.entry(name).or_insert_with(|| json!(list));
            }
            _ => {}
        }
        if input.continue_final_message {
            messages::mark_end(&mut messages);
        }
        let mut text = self.render_as_given(&ChatInput {
            messages: &messages,
            tools,
            kwargs: Some(&kwargs),
            add_generation_prompt: input.add_generation_prompt && !input.continue_final_message,
            ..*input
        })?;
        if input.continue_final_message {
            let end = text.rfind(messages::END).ok_or_else(|| {
                TextError::Render("it omits the final message, which cannot be continued then".to_owned())
            })?;
            text.truncate(end);
        }
        Ok(text)
    }

    /// Renders `messages` exactly as given, like transformers' `apply_chat_template`.
    pub fn render_as_given(&self, input: &ChatInput<'_>) -> Result<String, TextError> {
        let list = |values: &[Value]| JinjaValue::from_iter(values.iter().map(json::to_jinja));
        let mut variables: BTreeMap<&str, JinjaValue> = BTreeMap::new();
        variables.extend(
            self.special_tokens
                .iter()
                .map(|(role, text)| (role.as_str(), text.into())),
        );
        let kwargs = input.kwargs.into_iter().flatten();
        variables.extend(kwargs.map(|(name, value)| (name.as_str(), json::to_jinja(value))));
        variables.insert("messages", list(input.messages));
        variables.insert(TOOLS, input.tools.map(list).unwrap_or(JinjaValue::from(())));
        variables.insert(
            "documents",
            input.documents.map(list).unwrap_or(JinjaValue::from(())),
        );
        variables.insert("add_generation_prompt", input.add_generation_prompt.into());

        let with_tools = input
            .tools
            .and_then(|_| self.environment.get_template(TOOL_USE).ok());
        let template = match with_tools {
            Some(template) => template,
            None => self
                .environment
                .get_template(DEFAULT)
                .map_err(|e| TextError::Template(describe(&e)))?,
        };
        // Templates and messages come from outside, and minijinja panics on some (`[][::-1]` in 3.0.5).
        let rendered = catch_unwind(AssertUnwindSafe(|| {
            template.render(JinjaValue::from_pairs(variables))
        }));
        let rendered = rendered.map_err(|_| TextError::Render("the template engine panicked".to_owned()))?;
        rendered.map_err(|e| match raised(&e) {
            Some(message) => TextError::Refused(message),
            None => TextError::Render(describe(&e)),
        })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of the template that requests with tools get.
    pub fn tool_source(&self) -> &str {
        &self.tool_source
    }

    /// Whether the template tells the model about tools.
    pub fn takes_tools(&self) -> bool {
        self.tools != ToolPlace::Nowhere
    }

    /// Whether the template shows the calls of earlier messages.
    pub fn shows_calls(&self) -> bool {
        self.shows_calls
    }

    /// Whether the template reads the variable `name`, as far as its text shows.
    pub fn mentions(&self, name: &str) -> bool {
        let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        [&self.source, &self.tool_source].iter().any(|source| {
            source.match_indices(name).any(|(at, _)| {
                !is_word(source[..at].chars().next_back())
                    && !is_word(source[at + name.len()..].chars().next())
            })
        })
    }

    /// Determined by test renderings, as templates do not declare it. One that refuses them takes tools if it mentions them.
    fn find_tools(&self) -> ToolPlace {
        let messages = [json!({"role": "user", "content": "x"})];
        for place in TOOL_PLACES {
            match self.probe(&messages, place) {
                Ok(true) => return place,
                Ok(false) => {}
                Err(_) if self.mentions(TOOLS) => return ToolPlace::Variable(TOOLS),
                Err(_) => {}
            }
        }
        ToolPlace::Nowhere
    }

    /// Likewise; one that refuses the test's messages is taken to show calls.
    fn find_calls(&self) -> bool {
        let id = "probe0000";
        let function = json!({"name": PROBE, "arguments": {}});
        let messages = [
            json!({"role": "user", "content": "x"}),
            json!({"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function}]}),
            json!({"role": "tool", "tool_call_id": id, "name": "y", "content": "x"}),
        ];
        self.probe(&messages, ToolPlace::Nowhere).unwrap_or(true)
    }

    /// Whether [`PROBE`] is shown, the name of a tool unless that is nowhere.
    fn probe(&self, messages: &[Value], place: ToolPlace) -> Result<bool, TextError> {
        let parameters = json!({"type": "object", "properties": {}, "required": []});
        let function = json!({"name": PROBE, "description": "A probe.", "parameters": parameters});
        let tools = [json!({"type": "function", "function": function})];
        let input = ChatInput {
            messages,
            tools: (place != ToolPlace::Nowhere).then_some(&tools),
            add_generation_prompt: true,
            ..Default::default()
        };
        Ok(self.render_with(&input, place)?.contains(PROBE))
    }
}

/// Name of a function that no template mentions by itself.
const PROBE: &str = "probe_for_tools";

fn environment() -> Result<Environment<'static>, TextError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    environment.set_syntax(syntax.map_err(|e| TextError::Template(describe(&e)))?);
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
    // What is undefined is empty in Jinja, and has neither a first nor a last element.
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
    add_strftime_now(&mut environment, SystemTime::now);
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
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Some(message.clone());
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
