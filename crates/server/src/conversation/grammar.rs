//! The grammar of an answer: structured output, required tool calls, or either.

use plimsoll_text::grammar::{Grammar, GrammarSpec, Lead};
use plimsoll_text::{CallGrammar, Function, JsonAnswer, Position, ReasoningFormat, Tokenizer, ToolFormat};
use serde_json::{Map, Value, json};

use super::Tools;
use crate::error::ApiError;
use crate::structured::{Requested, Schema};

/// The grammar of the answer, if there is one. `structure` is what the client requested, `format` the format of tool calls if
/// they are allowed, `reasoning` that of reasoning if there may be some, from `position` on.
pub(super) fn of_answer(
    tokenizer: &Tokenizer,
    tools: &Tools,
    format: Option<ToolFormat>,
    reasoning: Option<ReasoningFormat>,
    position: Position,
    structure: Option<Requested>,
) -> Result<Option<Requested>, ApiError> {
    let token = |text: &str| tokenizer.special_token(text);
    let lead = || reasoning.and_then(|reasoning| reasoning.lead(position, &token));
    let Some(format) = format else {
        return Ok(structure.map(|mut requested| {
            requested.grammar.leads = lead().into_iter().collect();
            requested
        }));
    };
    let functions = tools.functions();
    let calls = CallGrammar {
        functions: &functions,
        several: tools.max_calls() != Some(1),
        is_begun: false,
        or_json: None,
        position,
        token: &token,
    };
    let requested = |calls: &CallGrammar<'_>, field, mark: Option<&str>| {
        let lark = format.grammar(calls);
        let lark = lark.map_err(|error| ApiError::invalid("tools", format!("tools: {error}")))?;
        let mark = mark.map(|mark| Lead::Once(mark.to_owned()));
        let lead = (!format.holds_reasoning()).then(lead).flatten();
        let grammar = Grammar {
            leads: lead.into_iter().chain(mark).collect(),
            ..GrammarSpec::Lark(lark).into()
        };
        Ok(Requested {
            schemas: functions.iter().map(parameters).collect(),
            ..Requested::new(grammar, field)
        })
    };
    if tools.must_call() {
        return requested(&calls, "tools", None).map(Some);
    }
    if let Some(structure) = structure {
        let (schema, strict) = json_schema(&structure)?;
        let either = CallGrammar {
            or_json: Some(JsonAnswer {
                schema: &schema,
                strict,
                whitespace: structure.grammar.whitespace.as_deref(),
            }),
            ..calls
        };
        let mut either = requested(&either, structure.field, None)?;
        either.grammar.whitespace = structure.grammar.whitespace.clone();
        either.whitespace_field = structure.whitespace_field;
        either.schemas.push(Schema {
            field: structure.field,
            name: structure.field.to_owned(),
            grammar: structure.grammar,
        });
        return Ok(Some(either));
    }
    let begun = CallGrammar {
        is_begun: true,
        ..calls
    };
    match format.opening() {
        _ if !functions.iter().any(is_strict) => Ok(None),
        Some(mark) => requested(&begun, "tools", Some(mark)).map(Some),
        None if format.holds_reasoning() => requested(&begun, "tools", None).map(Some),
        None => Ok(None),
    }
}

/// The parameters of a function.
fn parameters(function: &Function) -> Schema {
    let schema = GrammarSpec::JsonSchema {
        schema: Value::Object(function.parameters.clone()),
        strict: function.strict,
    };
    Schema {
        field: "tools",
        name: format!("tools: the parameters of {}", function.name),
        grammar: schema.into(),
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
