//! The served model, as the API sees it.

use std::sync::Arc;

use plimsoll_core::{ExpertLoads, Matryoshka, Pooling, TokenId};
use plimsoll_text::{ChatTemplate, ReasoningFormat, Renderer, Tokenizer, ToolFormat};
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::image_input::ImageInput;

/// The served model: names, tokenizer, chat template, defaults.
#[derive(Debug)]
pub struct ModelInfo {
    /// The name under which it is served: first in `/v1/models`, and the one in responses.
    pub id: String,
    /// Other names that requests may use.
    pub aliases: Vec<String>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// What the model's files say about its tokenizer (tokenizer_config.json), for `/tokenizer_info`.
    pub tokenizer_config: Map<String, Value>,
    /// The chat template; without one there is no chat, only completions.
    pub template: Option<ChatTemplate>,
    /// Renders the templates that requests bring.
    pub renderer: Renderer,
    /// How its answers are parsed.
    pub answers: AnswerStyle,
    /// End-of-sequence tokens; `ignore_eos` ignores them.
    pub eos_token_ids: Vec<TokenId>,
    /// Defaults of sampling parameters.
    pub defaults: GenerationDefaults,
    /// Set where it is served for embeddings instead of text generation.
    pub embedding: Option<EmbeddingInfo>,
    /// Set where it takes images.
    pub images: Option<ImageInput>,
    /// How its linear layers are stored, if not in floats.
    pub quantization: Option<String>,
    /// Bits of device memory for each of its weights, if it has any.
    pub bits_per_weight: Option<f64>,
    /// Weights, if it has any.
    pub num_parameters: Option<u64>,
    /// Those that are read for one token: without the experts to which it does not go.
    pub num_active_parameters: Option<u64>,
    /// Where tokens go, if it has experts and its device counts that.
    pub expert_loads: Option<Arc<ExpertLoads>>,
}

/// How a model's answers are parsed into reasoning, content and tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerStyle {
    /// The format of its tool calls. Where it is unknown, tools are refused unless a call is required, which a grammar enforces.
    pub tools: Option<ToolFormat>,
    /// The format of its reasoning, if it reasons.
    pub reasoning: Option<ReasoningFormat>,
    /// `tool_choice = auto` is allowed.
    pub auto_tool_choice: bool,
}

impl AnswerStyle {
    /// Detects the formats from the chat template. Where the template takes no tools, a system message describes them.
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

    /// Tokens that end an answer in these formats, whether or not the model's files say so.
    pub(crate) fn ends(&self, tokenizer: &Tokenizer) -> Vec<TokenId> {
        let ends = self.tools.map(ToolFormat::ends).unwrap_or_default();
        ends.iter()
            .filter_map(|mark| tokenizer.special_token(mark))
            .collect()
    }

    /// Special tokens that mark reasoning and tool calls: the parser reads them as text.
    pub(crate) fn marks(&self, tokenizer: &Tokenizer) -> Arc<[TokenId]> {
        let tools = self.tools.map(ToolFormat::marks).unwrap_or_default();
        let reasoning = self.reasoning.map(|format| format.marks().as_slice());
        let marks = tools.iter().chain(reasoning.unwrap_or_default());
        marks.filter_map(|mark| tokenizer.special_token(mark)).collect()
    }
}

/// Sampling defaults of the model (`generation_config.json`); where absent, the API's apply.
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
    /// Default `max_tokens` of chats; lowered to what fits.
    pub max_new_tokens: Option<usize>,
}

/// How a model makes embeddings.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingInfo {
    /// How hidden states become one vector.
    pub pooling: Pooling,
    /// Vectors are scaled to length 1.
    pub normalize: bool,
    /// Dimensions of a vector.
    pub size: usize,
    /// Sizes to which vectors may be truncated (Matryoshka representations).
    pub matryoshka: Matryoshka,
    /// What a cross-encoder makes of them: it is served for scores of pairs of texts, and its vectors are of no other use.
    pub scorer: Option<Scorer>,
}

/// How a cross-encoder makes a score of a pair's vector.
#[derive(Clone, Debug, PartialEq)]
pub struct Scorer {
    /// As long as the vector: their product is the score. Empty where the weights were not read.
    pub row: Arc<[f32]>,
    /// The score goes through a sigmoid, so that it is between 0 and 1.
    pub sigmoid: bool,
    /// The chat template renders pairs whatever roles it knows, as sentence-transformers does for models of text. Otherwise only one
    /// that names the roles of pairs does: many classifiers inherit another.
    pub always_rendered: bool,
    /// The system message, where a chat template renders pairs.
    pub instruction: Option<String>,
    /// That template's variables.
    pub template_kwargs: Map<String, Value>,
    /// That prompt ends with the beginning of an answer.
    pub add_generation_prompt: bool,
}

impl Scorer {
    /// The score of a pair with this vector.
    pub(crate) fn score(&self, vector: &[f32]) -> Result<f64, ApiError> {
        let products = self
            .row
            .iter()
            .zip(vector)
            .map(|(&a, &b)| f64::from(a) * f64::from(b));
        let score: f64 = products.sum();
        match (score.is_finite(), self.sigmoid) {
            (false, _) => Err(ApiError::Internal("the model's output is not finite".into())),
            (true, true) => Ok(1.0 / (1.0 + (-score).exp())),
            (true, false) => Ok(score),
        }
    }
}
