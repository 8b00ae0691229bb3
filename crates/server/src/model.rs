//! The served model, as far as the API knows it.

use std::sync::Arc;

use plimsoll_core::{Matryoshka, Pooling, TokenId};
use plimsoll_text::{ChatTemplate, ReasoningFormat, Tokenizer, ToolFormat};

/// The model, as far as the API knows it.
#[derive(Debug)]
pub struct ModelInfo {
    /// The name under which it is served; the first of `/v1/models`, and what responses say.
    pub id: String,
    /// Further names that requests may use.
    pub aliases: Vec<String>,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Messages to text; without it there are only completions.
    pub template: Option<ChatTemplate>,
    /// How its answers are taken apart.
    pub answers: AnswerStyle,
    /// Tokens that end generation unless the request says `ignore_eos`.
    pub eos_token_ids: Vec<TokenId>,
    /// What a request gets that does not say.
    pub defaults: GenerationDefaults,
    /// How it makes vectors, where it is served for embeddings: it generates no text then.
    pub embedding: Option<EmbeddingInfo>,
}

/// How a model's answers are taken apart into reasoning, content and calls of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerStyle {
    /// How it writes calls; where nobody knows, tools are refused unless one must be called, which a grammar enforces.
    pub tools: Option<ToolFormat>,
    /// How it marks reasoning, if it reasons.
    pub reasoning: Option<ReasoningFormat>,
    /// Requests may leave it to the model whether it calls a tool.
    pub auto_tool_choice: bool,
}

impl AnswerStyle {
    /// What the chat template shows. Models whose template knows no tools are told of them in a system message.
    pub fn detect(template: Option<&ChatTemplate>) -> Self {
        let tools = template.and_then(|template| match template.takes_tools() {
            true => ToolFormat::detect(template.tool_source()),
            false => Some(ToolFormat::Json),
        });
        Self {
            tools,
            reasoning: template.and_then(|template| ReasoningFormat::detect(template.source())),
            auto_tool_choice: true,
        }
    }

    /// The special tokens that mark parts of answers: they are read as text.
    pub(crate) fn marks(&self, tokenizer: &Tokenizer) -> Arc<[TokenId]> {
        let tools = self.tools.map(ToolFormat::marks).unwrap_or_default();
        let reasoning = self.reasoning.map(|format| format.marks().as_slice());
        let marks = tools.iter().chain(reasoning.unwrap_or_default());
        marks.filter_map(|mark| tokenizer.special_token(mark)).collect()
    }
}

/// Sampling defaults of the model (`generation_config.json`); absent ones are the API's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Default `temperature`.
    pub temperature: Option<f64>,
    /// Default `top_p`.
    pub top_p: Option<f64>,
    /// Default `top_k`.
    pub top_k: Option<i64>,
    /// Default `min_p`.
    pub min_p: Option<f64>,
    /// Default `repetition_penalty`.
    pub repetition_penalty: Option<f64>,
    /// Default `max_tokens` of chats, as far as it fits.
    pub max_new_tokens: Option<usize>,
}

/// How a model that is served for embeddings answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingInfo {
    /// From rows to a vector.
    pub pooling: Pooling,
    /// Vectors are scaled to length 1.
    pub normalize: bool,
    /// Elements of a vector.
    pub size: usize,
    /// Sizes to which vectors may be cut.
    pub matryoshka: Matryoshka,
}
