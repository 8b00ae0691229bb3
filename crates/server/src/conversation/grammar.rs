//! The grammar of an answer: structured output, required tool calls, or either.

use plimsoll_text::grammar::{Grammar, GrammarSpec, Lead};
use plimsoll_text::{CallGrammar, Function, ReasoningFormat, Tokenizer, ToolFormat};
use serde_json::{Map, Value, json};

use super::Tools;
use crate::error::ApiError;
use crate::structured::Requested;

/// Whether the answer begins with reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Thinking {
    /// The model does not reason, or the prompt ends after it.
    Over,
    /// The model may reason first.
    Possible(ReasoningFormat),
    /// The prompt ends within reasoning.
    Open(ReasoningFormat),
}

impl Thinking {
    pub(super) fn of(format: Option<ReasoningFormat>, prompt: &str) -> Self {
        match format {
            Some(format) if format.is_open_after(prompt) => Self::Open(format),
            Some(format) if !format.is_over_after(prompt) => Self::Possible(format),
            _ => Self::Over,
        }
    }

    /// The marks around reasoning, if there may be some.
    pub(super) fn marks(self) -> Option<&'static [&'static str; 2]> {
        match self {
            Self::Open(format) | Self::Possible(format) => Some(format.marks()),
            Self::Over => None,
        }
    }

    /// The reasoning before the answer: the grammar does not apply to it.
    fn lead(self) -> Option<Lead> {
        match self {
            Self::Open(format) => Some(Lead::UpTo(format.marks()[1].to_owned())),
            Self::Possible(format) => Some(Lead::Between(format.marks().map(str::to_owned))),
            Self::Over => None,
        }
    }
}

/// The grammar of the answer, if there is one. `structure` is what the client requested, `format` the format of tool calls if
/// they are allowed.
pub(super) fn of_answer(
    tokenizer: &Tokenizer,
    tools: &Tools,
    format: Option<ToolFormat>,
    thinking: Thinking,
    structure: Option<Requested>,
) -> Result<Option<Requested>, ApiError> {
    let Some(format) = format else {
        return Ok(structure.map(|mut requested| {
            requested.grammar.leads = thinking.lead().into_iter().collect();
            requested
        }));
    };
    let functions = tools.functions();
    let token = |text: &str| tokenizer.special_token(text);
    let calls = CallGrammar {
        functions: &functions,
        several: tools.max_calls() != Some(1),
        is_begun: false,
        or_json: None,
        token: &token,
    };
    let requested = |calls: &CallGrammar<'_>, field, mark: Option<&str>| {
        let lark = format.grammar(calls);
        let lark = lark.map_err(|error| ApiError::invalid("tools", format!("tools: {error}")))?;
        let mark = mark.map(|mark| Lead::Once(mark.to_owned()));
        let grammar = Grammar {
            leads: thinking.lead().into_iter().chain(mark).collect(),
            ..GrammarSpec::Lark(lark).into()
        };
        Ok(Some(Requested { grammar, field }))
    };
    if tools.must_call() {
        return requested(&calls, "tools", None);
    }
    if let Some(structure) = structure {
        let (schema, strict) = json_schema(&structure)?;
        let either = CallGrammar {
            or_json: Some((&schema, strict)),
            ..calls
        };
        return requested(&either, structure.field, None);
    }
    match format.opening().filter(|_| functions.iter().any(is_strict)) {
        Some(mark) => {
            let begun = CallGrammar {
                is_begun: true,
                ..calls
            };
            requested(&begun, "tools", Some(mark))
        }
        None => Ok(None),
    }
}

fn is_strict(function: &Function) -> bool {
    function.strict
}

/// The JSON schema of a structure: only JSON can be combined with tool calls.
fn json_schema(structure: &Requested) -> Result<(Map<String, Value>, bool), ApiError> {
    match &structure.grammar.spec {
        GrammarSpec::JsonObject => {
            let object = json!({ "type": "object" });
            Ok((object.as_object().cloned().unwrap_or_default(), true))
        }
        GrammarSpec::JsonSchema { schema, strict } => match schema {
            Value::Object(schema) => Ok((schema.clone(), *strict)),
            Value::Bool(true) => Ok((Map::new(), *strict)),
            _ => {
                let message = format!("{}: a JSON schema must be an object", structure.field);
                Err(ApiError::invalid(structure.field, message))
            }
        },
        _ => Err(ApiError::unsupported(
            structure.field,
            "together with optional tools only JSON is; set tool_choice to none or required",
        )),
    }
}
