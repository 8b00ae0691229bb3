//! Chat templates: Jinja2 as Hugging Face transformers sets it up (`transformers.utils.chat_template_utils`).

mod engine;
mod harmony;
mod json;
mod messages;
mod protocol;
mod renderer;
mod text;
mod worker;
mod workers;

use std::path::Path;
use std::sync::Arc;

use plimsoll_core::{MetaValue, Metadata};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::harmony::is_in;
use crate::{SpecialTokens, TextError, directory};
use messages::ContentFormat;
use renderer::Compiled;
use text::{DEFAULT, Found, TemplateText};

pub use engine::Clock;
pub use renderer::Renderer;
pub use worker::run_template_worker;
pub use workers::WorkerProgram;

/// A model's chat template, compiled.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    text: Arc<TemplateText>,
    compiled: Compiled,
    content: ContentFormat,
    tools: ToolPlace,
    shows_calls: bool,
    shows_system: bool,
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
#[derive(Clone, Copy, Debug, Default, Serialize)]
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
/// Stands for the text of a template where gpt-oss has none.
const HARMONY_TEXT: &str =
    "{# OpenAI's Harmony format, with <|channel|>analysis<|message|> and other channels #}";
/// Where templates read tools: nearly all, SmolLM3's, Phi-4-mini's.
const TOOL_PLACES: [ToolPlace; 3] = [
    ToolPlace::Variable(TOOLS),
    ToolPlace::Variable("xml_tools"),
    ToolPlace::SystemMessage,
];

impl ChatTemplate {
    /// Compiles `source`, to be rendered by `renderer`; `special_tokens` are [`crate::Tokenizer::special_tokens`]. The source
    /// [`Self::HARMONY`] stands for OpenAI's Harmony format.
    ///
    /// # Errors
    /// Where it is not Jinja, or a test rendering exceeds a bound.
    pub fn new(source: &str, special_tokens: &SpecialTokens, renderer: &Renderer) -> Result<Self, TextError> {
        if source == Self::HARMONY {
            return Self::harmony(special_tokens, renderer);
        }
        let named = vec![(DEFAULT.to_owned(), source.to_owned())];
        let text = Arc::new(TemplateText::new(named, special_tokens)?);
        Self::with(Arc::clone(&text), renderer.compile(text)?)
    }

    /// What stands for OpenAI's Harmony format in place of a template.
    pub const HARMONY: &str = "harmony";

    /// OpenAI's Harmony format, for gpt-oss without a template.
    fn harmony(special_tokens: &SpecialTokens, renderer: &Renderer) -> Result<Self, TextError> {
        let named = vec![(DEFAULT.to_owned(), HARMONY_TEXT.to_owned())];
        let text = Arc::new(TemplateText::new(named, special_tokens)?);
        Self::with(text, renderer.harmony())
    }

    fn with(text: Arc<TemplateText>, compiled: Compiled) -> Result<Self, TextError> {
        let mut template = Self {
            compiled,
            text,
            content: ContentFormat::Text,
            tools: ToolPlace::Nowhere,
            shows_calls: true,
            shows_system: true,
        };
        template.content = ContentFormat::detect(&template)?;
        template.tools = template.find_tools()?;
        template.shows_calls = template.find_calls()?;
        template.shows_system = template.find_system()?;
        Ok(template)
    }

    fn from_file(
        found: Found,
        special_tokens: &SpecialTokens,
        renderer: &Renderer,
    ) -> Result<Self, TextError> {
        let Found { place, named } = found;
        let template = || {
            let text = Arc::new(TemplateText::new(named, special_tokens)?);
            let compiled = match is_in(text.source()) {
                true => renderer.harmony(),
                false => renderer.compile(Arc::clone(&text))?,
            };
            Self::with(text, compiled)
        };
        template().map_err(|error| match error {
            TextError::Template(problem) => TextError::invalid(
                format!("chat_template of {place}"),
                format!("not valid Jinja: {problem}"),
            ),
            TextError::Limit(limit) => TextError::invalid(
                format!("chat_template of {place}"),
                format!("{limit}, with a short test message"),
            ),
            error => error,
        })
    }

    /// From a model directory: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, which may be one
    /// template or several with names. `None` where there is neither, unless `config.json` is gpt-oss's.
    ///
    /// In place of a template of OpenAI's Harmony format, here and in GGUF files, the format itself is rendered, which has more
    /// than the templates show.
    pub fn from_dir(dir: &Path, renderer: &Renderer) -> Result<Option<Self>, TextError> {
        let special_tokens = directory::special_tokens(dir)?;
        match text::in_dir(dir)? {
            Some(found) => Self::from_file(found, &special_tokens, renderer).map(Some),
            None if text::is_gpt_oss(dir)? => Self::harmony(&special_tokens, renderer).map(Some),
            None => Ok(None),
        }
    }

    /// From the `tokenizer.chat_template` keys of the GGUF file at `path`; `None` where there are none.
    pub fn from_gguf(
        path: &Path,
        metadata: &Metadata,
        special_tokens: &SpecialTokens,
        renderer: &Renderer,
    ) -> Result<Option<Self>, TextError> {
        let architecture = metadata.get("general.architecture").and_then(MetaValue::as_str);
        match text::in_gguf(path, metadata) {
            Some(found) => Self::from_file(found, special_tokens, renderer).map(Some),
            None if architecture == Some("gpt-oss") => Self::harmony(special_tokens, renderer).map(Some),
            None => Ok(None),
        }
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
        self.compiled.render(input)
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        self.text.source()
    }

    /// The text of the template that requests with tools get.
    pub fn tool_source(&self) -> &str {
        self.text.tool_source()
    }

    /// Whether the template tells the model about tools.
    pub fn takes_tools(&self) -> bool {
        self.tools != ToolPlace::Nowhere
    }

    /// Whether the template shows the calls of earlier messages.
    pub fn shows_calls(&self) -> bool {
        self.shows_calls
    }

    /// Whether the template shows system messages; some refuse them (Gemma 2's).
    pub fn shows_system(&self) -> bool {
        self.shows_system
    }

    /// Whether the template reads the variable `name`, as far as its text shows.
    pub fn mentions(&self, name: &str) -> bool {
        if self.is_harmony() {
            return harmony::VARIABLES.contains(&name);
        }
        let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        [self.source(), self.tool_source()].iter().any(|source| {
            source.match_indices(name).any(|(at, _)| {
                !is_word(source[..at].chars().next_back())
                    && !is_word(source[at + name.len()..].chars().next())
            })
        })
    }

    /// The levels of `reasoning_effort`, where they are known.
    pub fn efforts(&self) -> Option<&'static [&'static str]> {
        self.is_harmony().then_some(harmony::EFFORTS)
    }

    fn is_harmony(&self) -> bool {
        matches!(self.compiled, Compiled::Harmony(_))
    }

    /// Determined by test renderings, as templates do not declare it. One that refuses them takes tools if it mentions them.
    fn find_tools(&self) -> Result<ToolPlace, TextError> {
        let messages = [json!({"role": "user", "content": "x"})];
        for place in TOOL_PLACES {
            match self.probe(&messages, place)? {
                Some(true) => return Ok(place),
                None if self.mentions(TOOLS) => return Ok(ToolPlace::Variable(TOOLS)),
                _ => {}
            }
        }
        Ok(ToolPlace::Nowhere)
    }

    /// Likewise; one that refuses the test's messages is taken to show calls.
    fn find_calls(&self) -> Result<bool, TextError> {
        let id = "probe0000";
        let function = json!({"name": PROBE, "arguments": {}});
        let messages = [
            json!({"role": "user", "content": "x"}),
            json!({"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function}]}),
            json!({"role": "tool", "tool_call_id": id, "name": "y", "content": "x"}),
        ];
        Ok(self.probe(&messages, ToolPlace::Nowhere)?.unwrap_or(true))
    }

    fn find_system(&self) -> Result<bool, TextError> {
        let user = json!({"role": "user", "content": "x"});
        let messages = [json!({"role": "system", "content": PROBE}), user.clone()];
        match self.probe(&messages, ToolPlace::Nowhere)? {
            Some(shown) => Ok(shown),
            // One that refuses more than that is not blamed on the system message.
            None => Ok(self.probe(&[user], ToolPlace::Nowhere)?.is_none()),
        }
    }

    /// Whether [`PROBE`] is shown, the name of a tool unless that is nowhere; `None` where the template refuses the messages.
    fn probe(&self, messages: &[Value], place: ToolPlace) -> Result<Option<bool>, TextError> {
        let parameters = json!({"type": "object", "properties": {}, "required": []});
        let function = json!({"name": PROBE, "description": "A probe.", "parameters": parameters});
        let tools = [json!({"type": "function", "function": function})];
        let input = ChatInput {
            messages,
            tools: (place != ToolPlace::Nowhere).then_some(&tools),
            add_generation_prompt: true,
            ..Default::default()
        };
        let text = unless_refused(self.render_with(&input, place))?;
        Ok(text.map(|text| text.contains(PROBE)))
    }
}

/// Name of a function that no template mentions by itself.
const PROBE: &str = "probe_for_tools";

/// `None` where a template refuses the messages of a test rendering, or fails on them: it may be right to.
fn unless_refused(rendered: Result<String, TextError>) -> Result<Option<String>, TextError> {
    match rendered {
        Ok(text) => Ok(Some(text)),
        Err(TextError::Refused(_) | TextError::Render(_)) => Ok(None),
        Err(error) => Err(error),
    }
}
