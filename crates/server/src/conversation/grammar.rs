//! What an answer must be: a structure that the client asked for, calls that must be made, or either.

use plimsoll_text::grammar::{Grammar, GrammarSpec, Lead};
use plimsoll_text::{CallGrammar, Function, ReasoningFormat, Tokenizer, ToolFormat};
use serde_json::{Map, Value, json};

use super::Tools;
use crate::error::ApiError;
use crate::structured::Requested;

/// Where a model that reasons stands when it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Thinking {
    /// It does not reason, or is done.
    Over,
    /// It may begin.
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

    /// What is thought before the answer: a grammar does not apply to it.
    fn lead(self) -> Option<Lead> {
        match self {
            Self::Open(format) => Some(Lead::UpTo(format.marks()[1].to_owned())),
            Self::Possible(format) => Some(Lead::Between(format.marks().map(str::to_owned))),
            Self::Over => None,
        }
    }
}

/// The grammar of the answer, if it is not free. `structure` is what the client asked for, `format` how calls are written if
/// there may be any.
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

/// The schema that a structure is: only JSON can stand beside calls.
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
                let message = format!("{}: a JSON schema is an object", structure.field);
                Err(ApiError::invalid(structure.field, message))
            }
        },
        _ => Err(ApiError::unsupported(
            structure.field,
            "beside tools that need not be called only JSON is; send tool_choice = none or required",
        )),
    }
}
