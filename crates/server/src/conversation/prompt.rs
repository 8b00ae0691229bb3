//! Renders and tokenizes conversations.

use std::borrow::Cow;

use plimsoll_core::{ImageSpan, TokenId};
use plimsoll_images::Overrides;
use plimsoll_text::{ChatInput, ChatTemplate, ReasoningFormat, TextError, ToolFormat};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{Tools, plain};
use crate::context::Context;
use crate::error::ApiError;
use crate::image_input::Prepared;
use crate::images::{self, Depth};
use crate::model::ModelInfo;
use crate::prompt;
use crate::request_memory::Reservation;
use crate::state::AppState;
use crate::wire::chat::ReasoningEffort;

/// Maximum number of messages: templates iterate over them, some more than once.
const MAX_MESSAGES: usize = 16_384;

const CHAT_TEMPLATE: &str = "chat_template";

/// Template variables that are set by the request's own fields.
const OURS: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// Template variables that switch reasoning on and off.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];
/// The template variable of the reasoning effort.
const EFFORT: &str = "reasoning_effort";

/// Everything that determines the prompt of a conversation.
#[derive(Debug)]
pub(crate) struct Prompt {
    /// As chat templates read them: `role` (system, user, assistant, tool), `content` (text, or parts that are text or images),
    /// `name`, `tool_calls`, `tool_call_id`. Already checked; only the template may still reject them.
    pub(crate) messages: Vec<Value>,
    /// Images of the messages, once [`Self::load_images`] loaded them.
    pub(crate) images: Vec<Prepared>,
    /// How images are resized, where not as the model's files say.
    pub(crate) image_overrides: Overrides,
    /// Tools and tool choice.
    pub(crate) tools: Tools,
    /// End with the start of an assistant message.
    pub(crate) add_generation_prompt: bool,
    /// Continue the final message instead.
    pub(crate) continue_final_message: bool,
    /// Replaces the model's template.
    pub(crate) template: Option<String>,
    /// Additional template variables.
    pub(crate) template_kwargs: Map<String, Value>,
    /// For templates that take documents.
    pub(crate) documents: Vec<Value>,
    /// Reasoning effort, if set.
    pub(crate) effort: Option<Effort>,
    /// Add the tokenizer's special tokens; templates usually contain them.
    pub(crate) add_special_tokens: bool,
    /// The API field that holds the conversation, for errors.
    pub(crate) field: &'static str,
}

impl Prompt {
    /// Of messages, with defaults for everything else.
    pub(crate) fn new(messages: Vec<Value>, field: &'static str) -> Self {
        Self {
            messages,
            images: Vec::new(),
            image_overrides: Overrides::default(),
            tools: Tools::default(),
            add_generation_prompt: true,
            continue_final_message: false,
            template: None,
            template_kwargs: Map::new(),
            documents: Vec::new(),
            effort: None,
            add_special_tokens: false,
            field,
        }
    }

    /// Loads the images of the messages: needed before anything is rendered. Returns the memory that they take.
    pub(crate) async fn load_images(
        &mut self,
        state: &AppState,
        depth: Depth,
    ) -> Result<Option<Reservation>, ApiError> {
        let loaded = images::load(state, &mut self.messages, self.image_overrides, depth, self.field).await?;
        self.images = loaded.images;
        Ok(loaded.memory)
    }

    /// Whether there are images.
    pub(crate) fn has_images(&self) -> bool {
        !self.images.is_empty()
    }

    /// Renders the conversation and tokenizes it. May take long: for the blocking pool.
    pub(crate) fn tokens(&self, model: &ModelInfo) -> Result<Vec<TokenId>, ApiError> {
        self.rendered(model, None).map(|rendered| rendered.tokens)
    }

    /// [`Self::tokens`] and the text. More than `most` tokens may be refused before everything is tokenized.
    pub(super) fn rendered(&self, model: &ModelInfo, most: Option<usize>) -> Result<Rendered, ApiError> {
        let text = self.text(model)?;
        let Encoded { tokens, images } = self.encode(model, &text, most)?;
        Ok(Rendered { text, tokens, images })
    }

    /// Tokens of the rendered text.
    pub(super) fn encode(
        &self,
        model: &ModelInfo,
        text: &str,
        most: Option<usize>,
    ) -> Result<Encoded, ApiError> {
        let is_image = |part: &&Value| part["type"] == "image";
        let parts = self
            .messages
            .iter()
            .filter_map(|message| message["content"].as_array());
        let count = parts.flatten().filter(is_image).count();
        let encode = |text: &str| {
            prompt::check_length(model, text, most, self.field)?;
            // What messages say is guarded.
            let tokens = model.tokenizer.encode_guarded(text, self.add_special_tokens);
            tokens.map_err(|error| ApiError::from(error).in_field(self.field))
        };
        if count == 0 {
            return Ok(Encoded {
                tokens: encode(text)?,
                images: Vec::new(),
            });
        }
        // Dropped turns are the oldest.
        let images = self
            .images
            .len()
            .checked_sub(count)
            .map(|first| &self.images[first..]);
        let (Some(images), Some(input)) = (images, &model.images) else {
            return Err(ApiError::unsupported(self.field, "images have no meaning here"));
        };
        let tokens = encode(&input.with_placeholders(text))?;
        let expanded = input.expand(&tokens, images);
        let (tokens, images) = expanded.map_err(|found| {
            let message = format!(
                "the chat template has {found} places for images, but the messages have {count}: images belong to user \
                 messages, and some templates take them also in tool messages"
            );
            ApiError::invalid(self.field, message)
        })?;
        Ok(Encoded { tokens, images })
    }

    /// Renders the conversation.
    pub(super) fn text(&self, model: &ModelInfo) -> Result<String, ApiError> {
        let Some(source) = &self.template else {
            let template = model.template.as_ref().ok_or(TextError::NoChatTemplate)?;
            return self.text_by(template, model, self.field);
        };
        let wrong = |error: TextError| ApiError::invalid(CHAT_TEMPLATE, error.to_string());
        let template = ChatTemplate::new(source, model.tokenizer.special_tokens(), &model.renderer);
        let template = template.map_err(wrong)?;
        self.text_by(&template, model, CHAT_TEMPLATE)
    }

    /// `field` is named in errors of the template.
    fn text_by(
        &self,
        template: &ChatTemplate,
        model: &ModelInfo,
        field: &'static str,
    ) -> Result<String, ApiError> {
        if self.messages.is_empty() {
            let message = format!("{} must not be empty", self.field);
            return Err(ApiError::invalid(self.field, message));
        }
        if self.messages.len() > MAX_MESSAGES {
            let message = format!(
                "{} has {} messages; at most {MAX_MESSAGES} are allowed",
                self.field,
                self.messages.len()
            );
            return Err(ApiError::invalid(self.field, message));
        }
        if !self.documents.is_empty() && !template.mentions("documents") {
            let hint = Some("this model's chat template does not use documents");
            return Err(ApiError::unsupported("documents", hint));
        }
        let kwargs = self.kwargs(template, model.answers.reasoning.is_some())?;
        let tools = self.tools.as_template();
        let format = model.answers.tools.unwrap_or(ToolFormat::Json);
        let (messages, tools) = plain::for_template(template, &self.messages, &tools, format);
        let guarded = |values: &[Value]| guarded(model, values);
        let (messages, tools, documents) = (guarded(&messages), guarded(tools), guarded(&self.documents));
        let input = ChatInput {
            messages: &messages,
            tools: (!tools.is_empty()).then_some(&tools),
            documents: (!documents.is_empty()).then_some(&documents),
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
            kwargs: Some(&*kwargs),
        };
        let text = template.render(&input);
        text.map_err(|error| ApiError::from(error).in_field(field))
    }

    /// The template's variables: the client's, and those for the effort. `reasons`: the model's answers have reasoning.
    fn kwargs(
        &self,
        template: &ChatTemplate,
        reasons: bool,
    ) -> Result<Cow<'_, Map<String, Value>>, ApiError> {
        let taken = |name: &&&str| self.template_kwargs.contains_key(**name);
        if let Some(name) = OURS.iter().find(taken) {
            let message =
                format!("`{name}` cannot be set in chat_template_kwargs: use the field of this name");
            return Err(ApiError::invalid(format!("chat_template_kwargs.{name}"), message));
        }
        let Some(effort) = &self.effort else {
            return Ok(Cow::Borrowed(&self.template_kwargs));
        };
        let mut kwargs = self.template_kwargs.clone();
        let level = json!(effort.level);
        let is_level = |levels: &[&str]| levels.iter().any(|known| level == *known);
        if !template.efforts().is_none_or(is_level) {
            if effort.context.may_ignore(effort.field) {
                return Ok(Cow::Borrowed(&self.template_kwargs));
            }
            let field = format!("{} = {}", effort.field, level.as_str().unwrap_or_default());
            return Err(ApiError::unsupported(
                field,
                "this model's levels are low, medium and high",
            ));
        }
        let off = effort.level == ReasoningEffort::None;
        let reasons = reasons || ReasoningFormat::detect(template.source()).is_some();
        // Without levels and without a switch, a model that reasons does so as much as it does.
        let mut known = off != reasons;
        known |= set_effort(template, effort.level, &mut kwargs);
        known |= switch_reasoning(template, !off, &mut kwargs);
        if known || effort.context.may_ignore(effort.field) {
            return Ok(Cow::Owned(kwargs));
        }
        let hint = match off {
            true => "this model always reasons: its chat template has no switch",
            false => "this model does not reason",
        };
        Err(ApiError::unsupported(effort.field, hint))
    }
}

/// Messages, tools or documents in which no text is a special token.
fn guarded(model: &ModelInfo, values: &[Value]) -> Vec<Value> {
    let mut values = values.to_vec();
    for value in &mut values {
        let kept = match (model.answers.reasoning, value["role"] == "assistant") {
            (Some(format), true) => format.in_content(),
            _ => &[],
        };
        model.tokenizer.guard(value, kept);
    }
    values
}

/// A reasoning effort.
#[derive(Clone, Debug)]
pub(crate) struct Effort {
    pub(crate) level: ReasoningEffort,
    /// The API field that sets it, for errors.
    pub(crate) field: &'static str,
    /// Of the request, which may say that it is ignored.
    pub(crate) context: Context,
}

/// Sets the template's effort variable; false if it has none. The client's own variables are kept, here and below.
pub(crate) fn set_effort(
    template: &ChatTemplate,
    effort: impl Serialize,
    kwargs: &mut Map<String, Value>,
) -> bool {
    let takes = template.mentions(EFFORT);
    if takes {
        kwargs.entry(EFFORT).or_insert_with(|| json!(effort));
    }
    takes
}

/// Switches reasoning on or off; false if the template has no switch.
pub(crate) fn switch_reasoning(template: &ChatTemplate, on: bool, kwargs: &mut Map<String, Value>) -> bool {
    let mut switches = SWITCHES
        .into_iter()
        .filter(|name| template.mentions(name))
        .peekable();
    let has_switch = switches.peek().is_some();
    for name in switches {
        kwargs.entry(name).or_insert(json!(on));
    }
    has_switch
}

/// A rendered prompt.
#[derive(Debug)]
pub(super) struct Rendered {
    pub(super) text: String,
    pub(super) tokens: Vec<TokenId>,
    pub(super) images: Vec<ImageSpan>,
}

/// A tokenized prompt: tokens, and which of them are images.
#[derive(Debug)]
pub(super) struct Encoded {
    pub(super) tokens: Vec<TokenId>,
    pub(super) images: Vec<ImageSpan>,
}
