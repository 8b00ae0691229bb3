//! Closes the objects of JSON schemas.

use std::collections::HashSet;

use serde_json::{Map, Value};

/// Keywords of lists of schemas that apply to the same value, and of those of which one applies.
const ALL_OF: &str = "allOf";
const ONE_OF: [&str; 2] = ["anyOf", "oneOf"];

/// Forbids properties that `schema` does not name in every object that names some and says nothing of `additionalProperties`, as
/// vLLM does: a model could add properties without end. Schemas that describe one object together (`allOf`, `$ref` beside
/// `properties`, ...) stay open, as each would forbid the properties of the others, and so does what they refer to.
pub(crate) fn close_objects(schema: &mut Value) {
    let mut shared = HashSet::new();
    loop {
        let before = shared.len();
        walk(schema, "#", false, &mut shared, &mut |_| {});
        if shared.len() == before {
            break;
        }
    }
    walk(schema, "#", false, &mut shared, &mut |object| {
        object.insert("additionalProperties".to_owned(), Value::Bool(false));
    });
}

/// Calls `close` with each object to close. Schemas at paths in `shared`, and those below, stay open; what they refer to is added.
fn walk(
    schema: &mut Value,
    path: &str,
    is_open: bool,
    shared: &mut HashSet<String>,
    close: &mut impl FnMut(&mut Map<String, Value>),
) {
    let Value::Object(object) = schema else { return };
    let is_open = is_open || shared.contains(path) || count_parts(object) > 1;
    if let (Some(Value::String(target)), true) = (object.get("$ref"), is_open) {
        shared.insert(target.clone());
    }
    if !is_open && is_closable(object) {
        close(object);
    }
    for (key, value) in object {
        let here = format!("{path}/{key}");
        match (key.as_str(), value) {
            // Only what refers to a definition says whether it stays open.
            ("$defs" | "definitions", Value::Object(schemas)) => {
                for (name, schema) in schemas {
                    walk(schema, &format!("{here}/{name}"), false, shared, close);
                }
            }
            ("properties" | "patternProperties", Value::Object(schemas)) => {
                for (name, schema) in schemas {
                    walk(schema, &format!("{here}/{name}"), is_open, shared, close);
                }
            }
            ("items" | "prefixItems" | "anyOf" | "allOf" | "oneOf", Value::Array(schemas)) => {
                for (index, schema) in schemas.iter_mut().enumerate() {
                    walk(schema, &format!("{here}/{index}"), is_open, shared, close);
                }
            }
            ("items" | "additionalItems" | "additionalProperties", schema) => {
                walk(schema, &here, is_open, shared, close);
            }
            _ => {}
        }
    }
}

/// How many schemas describe the properties of the same object.
fn count_parts(object: &Map<String, Value>) -> usize {
    let list = |key: &str| object.get(key).and_then(Value::as_array).into_iter().flatten();
    let all = list(ALL_OF).filter(|schema| describes(schema)).count();
    let one = ONE_OF.iter().filter(|key| list(key).any(describes)).count();
    let conditional = ["if", "dependentSchemas", "dependencies"];
    let conditional = conditional.iter().any(|key| object.contains_key(*key));
    usize::from(has_properties(object))
        + usize::from(object.contains_key("$ref"))
        + usize::from(conditional)
        + all
        + one
}

/// Whether a schema may describe properties of an object.
fn describes(schema: &Value) -> bool {
    let Value::Object(object) = schema else {
        return false;
    };
    has_properties(object) || count_parts(object) > 0
}

fn has_properties(object: &Map<String, Value>) -> bool {
    ["properties", "patternProperties", "additionalProperties"]
        .iter()
        .any(|key| object.contains_key(*key))
}

/// Whether `object` names properties, all of the required ones among them, and does not say what others may be.
fn is_closable(object: &Map<String, Value>) -> bool {
    let says = ["additionalProperties", "unevaluatedProperties"];
    if says.iter().any(|key| object.contains_key(*key)) {
        return false;
    }
    let Some(properties) = object.get("properties").and_then(Value::as_object) else {
        return false;
    };
    let required = object.get("required").and_then(Value::as_array);
    let mut required = required.into_iter().flatten().filter_map(Value::as_str);
    object.contains_key("patternProperties") || required.all(|name| properties.contains_key(name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn closed(mut schema: Value) -> Value {
        close_objects(&mut schema);
        schema
    }

    #[test]
    fn objects_with_properties_are_closed() {
        let inner = json!({ "properties": { "x": {} } });
        let shut = json!({ "properties": { "x": {} }, "additionalProperties": false });
        for (given, expected) in [
            (inner.clone(), shut.clone()),
            (json!({ "type": "object" }), json!({ "type": "object" })),
            (json!({ "items": inner }), json!({ "items": shut })),
            (
                json!({ "anyOf": [inner, { "type": "null" }] }),
                json!({ "anyOf": [shut, { "type": "null" }] }),
            ),
            (json!({ "allOf": [inner] }), json!({ "allOf": [shut] })),
            (
                json!({ "$defs": { "a": inner }, "properties": { "b": { "$ref": "#/$defs/a" } } }),
                json!({
                    "$defs": { "a": shut },
                    "properties": { "b": { "$ref": "#/$defs/a" } },
                    "additionalProperties": false,
                }),
            ),
            (
                json!({ "properties": { "x": {} }, "anyOf": [{ "required": ["x"] }] }),
                json!({ "properties": { "x": {} }, "anyOf": [{ "required": ["x"] }], "additionalProperties": false }),
            ),
        ] {
            assert_eq!(closed(given.clone()), expected, "{given}");
        }
    }

    #[test]
    fn objects_that_say_more_stay_open() {
        let inner = json!({ "properties": { "x": {} } });
        for schema in [
            json!({ "properties": { "x": {} }, "additionalProperties": true }),
            json!({ "properties": { "x": {} }, "required": ["x", "y"] }),
            json!({ "allOf": [inner, { "properties": { "y": inner } }] }),
            json!({ "properties": { "y": {} }, "oneOf": [inner] }),
            // A definition that is extended, through another one.
            json!({
                "$defs": { "a": { "$ref": "#/$defs/b" }, "b": inner },
                "allOf": [{ "$ref": "#/$defs/a" }, { "properties": { "y": {} } }],
            }),
            // The name of a property is no keyword.
            json!({ "additionalProperties": true, "properties": { "properties": { "type": "string" } } }),
            json!({ "enum": [inner], "default": inner }),
        ] {
            assert_eq!(closed(schema.clone()), schema);
        }
    }
}
