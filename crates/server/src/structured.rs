//! Structured output: from the fields of a request to a compiled grammar.

use std::sync::Arc;

use plimsoll_text::grammar::{CompiledGrammar, Grammar, GrammarError, GrammarSpec};
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::blocking::blocking;
use crate::error::ApiError;
use crate::state::AppState;
use crate::wire::structured::{ResponseFormat, StructuredFields, StructuredOutputs};

/// A grammar that a request asks for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Requested {
    pub(crate) grammar: Grammar,
    /// The field that holds it, for errors.
    pub(crate) field: &'static str,
    /// The field that holds its whitespace, if it has any of its own.
    pub(crate) whitespace_field: &'static str,
    /// The schemas that the server built the grammar from, if it did.
    pub(crate) schemas: Vec<Schema>,
}

/// A schema that a grammar was built from, to name it in errors.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Schema {
    /// The field that holds it.
    pub(crate) field: &'static str,
    /// What an error calls it.
    pub(crate) name: String,
    /// The grammar of this schema alone.
    pub(crate) grammar: Grammar,
}

impl Requested {
    /// `grammar`, all of which `field` holds.
    pub(crate) fn new(grammar: Grammar, field: &'static str) -> Self {
        Self {
            grammar,
            field,
            whitespace_field: field,
            schemas: Vec::new(),
        }
    }
}

/// Compiles a request's grammar, if it has one. May wait for other compilations.
pub(crate) async fn compile(
    state: &AppState,
    requested: Option<Requested>,
) -> Result<Option<CompiledGrammar>, ApiError> {
    let Some(Requested {
        grammar,
        field,
        whitespace_field,
        schemas,
    }) = requested
    else {
        return Ok(None);
    };
    let grammars = Arc::clone(state.grammars());
    let compiled = permitted(state.compiling(), move || {
        let compiled = grammars.compile(&grammar);
        compiled.map_err(|error| {
            let wrong = |schema: &Schema| {
                let error = grammars.check(&schema.grammar).err()?;
                Some(ApiError::invalid(
                    schema.field,
                    format!("{}: {error}", schema.name),
                ))
            };
            let (field, named) = match error {
                GrammarError::Whitespace(_) => (whitespace_field, None),
                GrammarError::Invalid(_) => (field, schemas.iter().find_map(wrong)),
                // It is one schema, or too long to look for the wrong one.
                GrammarError::Unsupported(_) | GrammarError::TooLarge { .. } => (field, None),
            };
            named.unwrap_or_else(|| ApiError::invalid(field, format!("{field}: {error}")))
        })
    });
    compiled.await.map(Some)
}

/// Runs `work` on the blocking pool, limited by permits. It cannot be cancelled: if its request is gone, it keeps its permit
/// until it is done.
async fn permitted<T: Send + 'static>(
    permits: &Arc<Semaphore>,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let permit = Arc::clone(permits).acquire_owned().await;
    let permit = permit.map_err(|closed| ApiError::Internal(closed.to_string()))?;
    blocking(move || {
        let done = work();
        drop(permit);
        done
    })
    .await
}

impl StructuredFields {
    /// The grammar of the text, if one is requested.
    pub(crate) fn grammar(self) -> Result<Option<Requested>, ApiError> {
        let Self {
            response_format,
            structured_outputs,
            guided_json,
            guided_regex,
            guided_choice,
            guided_grammar,
            guided_whitespace_pattern,
            _guided_decoding_backend,
        } = self;
        let mut asked = Asked::default();
        if let Some(format) = response_format {
            asked.format(format);
        }
        let mut spaces = Whitespace {
            pattern: guided_whitespace_pattern,
            field: "guided_whitespace_pattern",
        };
        if let Some(outputs) = structured_outputs {
            spaces = asked.outputs(outputs, spaces)?;
        }
        if let Some(schema) = guided_json {
            asked.schema("guided_json", schema, true)?;
        }
        asked.spec("guided_regex", guided_regex.map(GrammarSpec::Regex));
        asked.spec("guided_choice", guided_choice.map(GrammarSpec::Choice));
        asked.spec("guided_grammar", guided_grammar.map(grammar));
        asked.one(spaces)
    }
}

/// The whitespace allowed between JSON tokens, and the field that sets it.
struct Whitespace {
    pattern: Option<String>,
    field: &'static str,
}

/// All grammars that a request asks for, with their fields.
#[derive(Default)]
struct Asked(Vec<(&'static str, GrammarSpec)>);

impl Asked {
    fn spec(&mut self, field: &'static str, spec: Option<GrammarSpec>) {
        self.0.extend(spec.map(|spec| (field, spec)));
    }

    fn format(&mut self, format: ResponseFormat) {
        let (field, spec) = match format {
            ResponseFormat::Text => return,
            ResponseFormat::JsonObject => ("response_format", GrammarSpec::JsonObject),
            ResponseFormat::JsonSchema { json_schema } => {
                let (schema, strict) = (json_schema.schema, json_schema.strict.unwrap_or(true));
                (
                    "response_format.json_schema.schema",
                    GrammarSpec::JsonSchema { schema, strict },
                )
            }
        };
        self.spec(field, Some(spec));
    }

    /// A schema, or the text of one.
    fn schema(&mut self, field: &'static str, schema: Value, strict: bool) -> Result<(), ApiError> {
        let schema = match schema {
            Value::String(text) => serde_json::from_str(&text)
                .map_err(|error| ApiError::invalid(field, format!("{field} is not JSON: {error}")))?,
            schema => schema,
        };
        self.spec(field, Some(GrammarSpec::JsonSchema { schema, strict }));
        Ok(())
    }

    fn outputs(&mut self, outputs: StructuredOutputs, outer: Whitespace) -> Result<Whitespace, ApiError> {
        let StructuredOutputs {
            json,
            regex,
            choice,
            grammar: rules,
            json_object,
            whitespace_pattern,
            disable_any_whitespace,
            _disable_fallback,
        } = outputs;
        if let Some(schema) = json {
            self.schema("structured_outputs.json", schema, true)?;
        }
        self.spec("structured_outputs.regex", regex.map(GrammarSpec::Regex));
        self.spec("structured_outputs.choice", choice.map(GrammarSpec::Choice));
        self.spec("structured_outputs.grammar", rules.map(grammar));
        let object = json_object.then_some(GrammarSpec::JsonObject);
        self.spec("structured_outputs.json_object", object);
        let none = disable_any_whitespace.then(|| Whitespace {
            pattern: Some(String::new()),
            field: "structured_outputs.disable_any_whitespace",
        });
        let own = whitespace_pattern.map(|pattern| Whitespace {
            pattern: Some(pattern),
            field: "structured_outputs.whitespace_pattern",
        });
        let outer_said = outer.pattern.is_some();
        match (none, own) {
            (Some(spaces), None) | (None, Some(spaces)) if !outer_said => Ok(spaces),
            (None, None) => Ok(outer),
            (one, other) => {
                let said = one.or(other).map_or(outer.field, |spaces| spaces.field);
                Err(ApiError::invalid(
                    said,
                    format!("{said}: whitespace is set more than once"),
                ))
            }
        }
    }

    fn one(self, spaces: Whitespace) -> Result<Option<Requested>, ApiError> {
        let mut asked = self.0.into_iter();
        let first = asked.next();
        if let (Some((one, _)), Some((other, _))) = (&first, asked.next()) {
            return Err(ApiError::invalid(
                other,
                format!("{one} and {other} are mutually exclusive"),
            ));
        }
        let json = matches!(
            first,
            Some((_, GrammarSpec::JsonObject | GrammarSpec::JsonSchema { .. }))
        );
        if spaces.pattern.is_some() && !json {
            let message = format!(
                "{} applies to JSON, which the request does not ask for",
                spaces.field
            );
            return Err(ApiError::invalid(spaces.field, message));
        }
        Ok(first.map(|(field, spec)| Requested {
            grammar: Grammar {
                whitespace: spaces.pattern,
                ..spec.into()
            },
            field,
            whitespace_field: spaces.field,
            schemas: Vec::new(),
        }))
    }
}

/// A grammar in GBNF or Lark notation: only GBNF has `::=`.
fn grammar(text: String) -> GrammarSpec {
    match text.contains("::=") {
        true => GrammarSpec::Ebnf(text),
        false => GrammarSpec::Lark(text),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use serde_json::json;

    use super::*;

    fn requested(fields: Value) -> Result<Option<Requested>, ApiError> {
        serde_json::from_value::<StructuredFields>(fields)
            .expect("the fields have these types")
            .grammar()
    }

    #[tokio::test]
    async fn cancelled_work_keeps_its_permit_until_done() {
        let permits = Arc::new(Semaphore::new(1));
        let (begun, begins) = tokio::sync::oneshot::channel();
        let (end, ends) = mpsc::channel::<()>();
        let work = move || {
            begun
                .send(())
                .map_err(|()| ApiError::Internal("the receiver is gone".into()))?;
            // Until the test lets go.
            let _ = ends.recv();
            Ok(())
        };
        let theirs = Arc::clone(&permits);
        let waiting = tokio::spawn(async move { permitted(&theirs, work).await });
        begins.await.unwrap();
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        assert_eq!(permits.available_permits(), 0, "it still works");
        drop(end);
        let permit = permits.acquire().await;
        assert!(permit.is_ok(), "done, and given back");
    }

    #[test]
    fn every_field_requests_its_grammar() {
        let schema = json!({"type": "object"});
        let strict = |strict| GrammarSpec::JsonSchema {
            schema: json!({"type": "object"}),
            strict,
        };
        let format = |strict: Value| {
            let json_schema = json!({"name": "n", "schema": {"type": "object"}, "strict": strict});
            json!({"response_format": {"type": "json_schema", "json_schema": json_schema}})
        };
        let (object, regex) = (GrammarSpec::JsonObject, GrammarSpec::Regex("a".into()));
        let (lark, ebnf) = ("start: \"a\"", "root ::= \"a\"");
        let text = json!({"type": "text"});
        let cases = [
            (
                json!({"response_format": {"type": "json_object"}}),
                object.clone(),
            ),
            (format(json!(null)), strict(true)),
            (format(json!(true)), strict(true)),
            (format(json!(false)), strict(false)),
            (json!({"guided_json": schema}), strict(true)),
            (json!({"guided_json": "{\"type\": \"object\"}"}), strict(true)),
            (json!({"guided_regex": "a"}), regex.clone()),
            (
                json!({"guided_choice": ["a"]}),
                GrammarSpec::Choice(vec!["a".into()]),
            ),
            (json!({"guided_grammar": lark}), GrammarSpec::Lark(lark.into())),
            (json!({"guided_grammar": ebnf}), GrammarSpec::Ebnf(ebnf.into())),
            (json!({"structured_outputs": {"json": schema}}), strict(true)),
            (json!({"structured_outputs": {"json_object": true}}), object),
            (json!({"structured_outputs": {"regex": "a"}}), regex.clone()),
            (
                json!({"response_format": text, "guided_regex": "a", "guided_decoding_backend": "auto"}),
                regex,
            ),
        ];
        for (fields, spec) in cases {
            let requested = requested(fields.clone()).unwrap().unwrap();
            assert_eq!(requested.grammar.spec, spec, "{fields}");
        }
        for nothing in [
            json!({}),
            json!({"response_format": {"type": "text"}}),
            json!({"structured_outputs": {}}),
        ] {
            assert_eq!(requested(nothing).unwrap(), None);
        }
        let spaced = requested(json!({"guided_json": {}, "guided_whitespace_pattern": " ?"}));
        assert_eq!(spaced.unwrap().unwrap().grammar.whitespace.as_deref(), Some(" ?"));
        let tight = json!({"structured_outputs": {"json_object": true, "disable_any_whitespace": true}});
        assert_eq!(
            requested(tight).unwrap().unwrap().grammar.whitespace.as_deref(),
            Some("")
        );
    }

    #[test]
    fn conflicting_fields_are_refused_by_name() {
        let object = json!({"type": "json_object"});
        let spaces = json!({"json_object": true, "whitespace_pattern": "a", "disable_any_whitespace": true});
        let cases = json!([
            [{"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"],
            [{"response_format": object, "guided_json": {}}, "guided_json"],
            [{"structured_outputs": {"regex": "a", "json_object": true}}, "structured_outputs.json_object"],
            [{"guided_json": "{"}, "guided_json"],
            [{"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern"],
            [{"guided_whitespace_pattern": "a", "guided_regex": "a"}, "guided_whitespace_pattern"],
            [{"structured_outputs": spaces}, "structured_outputs.disable_any_whitespace"],
        ]);
        for case in cases.as_array().unwrap() {
            let error = requested(case[0].clone()).unwrap_err();
            assert_eq!(error.body()["error"]["param"], case[1], "{case}: {error}");
        }
    }
}
