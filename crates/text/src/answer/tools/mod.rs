//! Tool calls in a model's output: one file per family of formats.

mod arguments;
mod call;
mod gemma4;
mod harmony_grammar;
mod json_calls;
mod parameters;
mod python;
mod pythonic;
mod qwen_coder;
mod write;

use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::sink::Sink;
use crate::harmony;
pub(super) use harmony_grammar::lead as harmony_lead;
use json_calls::{JsonCalls, Layout};
pub use write::{CallGrammar, JsonAnswer};

/// A function that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments.
    pub parameters: Map<String, Value>,
    /// Schema keywords that cannot be enforced are an error.
    pub strict: bool,
}

/// How a family of models writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": .., "arguments": ..}</tool_call>` (Hermes, Qwen2.5, Qwen3, SmolLM3).
    Hermes,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` (Qwen3-Coder).
    QwenCoder,
    /// `{"name": .., "parameters": ..}`, with or without `<|python_tag|>` before it, several with `;` between (Llama 3).
    LlamaJson,
    /// `[f(a=1), g(b="x")]`, with or without `<|python_start|>` and `<|python_end|>` (Llama 3.2, Llama 4).
    Pythonic,
    /// `[TOOL_CALLS][{"name": .., "arguments": ..}]`, or `[TOOL_CALLS]name[ARGS]{..}` (Mistral).
    Mistral,
    /// `<|tool_call|>[{"name": .., "arguments": ..}]<|/tool_call|>`, or `functools[..]` (Phi-4-mini).
    Phi4Mini,
    /// `{"name": .., "arguments": ..}` or a list of these as the whole answer: for models trained on no format.
    Json,
    /// `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>` (Gemma 4).
    Gemma4,
    /// `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{..}<|call|>` (gpt-oss).
    Harmony,
}

impl ToolFormat {
    /// Names of `--tool-call-parser`: vLLM's, and `json`.
    pub const NAMES: &[(&str, Self)] = &[
        ("hermes", Self::Hermes),
        ("qwen3_coder", Self::QwenCoder),
        ("qwen3_xml", Self::QwenCoder),
        ("llama3_json", Self::LlamaJson),
        ("llama4_json", Self::LlamaJson),
        ("pythonic", Self::Pythonic),
        ("llama4_pythonic", Self::Pythonic),
        ("mistral", Self::Mistral),
        ("phi4_mini_json", Self::Phi4Mini),
        ("gemma4", Self::Gemma4),
        ("json", Self::Json),
        ("openai", Self::Harmony),
    ];

    /// Detects the format from a chat template.
    pub fn detect(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        // As text of the template, or within one of its strings.
        let has_line = |before: &str, after: &str| {
            has(&format!("{before}\n{after}")) || has(&format!("{before}\\n{after}"))
        };
        // The more particular first: many templates mention `<tool_call>`.
        if harmony::is_in(template) {
            Some(Self::Harmony)
        } else if has(gemma4::OPEN) && has(gemma4::CLOSE) && has(gemma4::QUOTE) {
            Some(Self::Gemma4)
        } else if has("<tool_call>") && has("<function=") && has("<parameter=") {
            Some(Self::QwenCoder)
        } else if has("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if has("<|/tool|>") || has("functools[") {
            Some(Self::Phi4Mini)
        } else if has("arguments")
            && (has_line("<tool_call>", "{") || has("<tool_call></tool_call>") && has("return a json object"))
        {
            Some(Self::Hermes)
        } else if has("<|start_header_id|>") && has("ipython") && has("\"parameters\": ") {
            Some(Self::LlamaJson)
        } else {
            None
        }
    }

    /// Marks around calls. Those that are special tokens must not be skipped when the answer is decoded.
    pub fn marks(self) -> &'static [&'static str] {
        match self {
            Self::QwenCoder => &qwen_coder::MARKS,
            Self::Pythonic => &pythonic::MARKS,
            Self::Gemma4 => &gemma4::MARKS,
            Self::Harmony => &harmony::MARKS,
            _ => self.json_layout().marks,
        }
    }

    /// Marks that end an answer, if they are tokens.
    pub fn ends(self) -> &'static [&'static str] {
        match self {
            Self::Harmony => &[harmony::RETURN, harmony::CALL],
            Self::Gemma4 => &[gemma4::RESPONSE],
            _ => &[],
        }
    }

    /// Layout of a format that writes calls as JSON.
    fn json_layout(self) -> &'static Layout {
        match self {
            Self::Hermes => &json_calls::HERMES,
            Self::Phi4Mini => &json_calls::PHI4_MINI,
            Self::Mistral => &json_calls::MISTRAL,
            Self::LlamaJson => &json_calls::LLAMA,
            Self::Json | Self::QwenCoder | Self::Pythonic | Self::Gemma4 | Self::Harmony => &json_calls::JSON,
        }
    }

    /// A parser of what follows reasoning in this format. [`Self::Harmony`] has one of whole answers.
    pub(super) fn parser(self, functions: Arc<[Function]>) -> Box<dyn Syntax> {
        match self {
            Self::QwenCoder => Box::new(qwen_coder::QwenCoder::new(functions)),
            Self::Pythonic => Box::new(pythonic::Pythonic::new(functions)),
            Self::Gemma4 => Box::new(gemma4::Gemma4::new()),
            _ => Box::new(JsonCalls::new(self.json_layout(), functions)),
        }
    }
}

/// Parser of one format's calls.
pub(super) trait Syntax: fmt::Debug + Send {
    /// Takes one more character.
    fn take(&mut self, c: char, sink: &mut Sink);

    /// Nothing more comes.
    fn finish(&mut self, sink: &mut Sink);

    /// The text was cut off here: the incomplete beginning of a call behind a mark is left out.
    fn cut_off(&mut self, sink: &mut Sink) {
        match self.is_in_markup() {
            true => sink.drop_space(),
            false => self.finish(sink),
        }
    }

    /// The held text is certainly the beginning of a call, as it stands behind a mark or among calls. False once it was emitted.
    fn is_in_markup(&self) -> bool;

    /// The text is reasoning; for formats that mark it as they mark calls.
    fn in_reasoning(&self) -> bool {
        false
    }
}

pub(super) fn is_known(functions: &[Function], name: &str) -> bool {
    functions.iter().any(|function| function.name == name)
}
