use std::collections::HashSet;
use std::{fmt, ptr};

use serde_json::{Deserializer, Value};

/// Keywords of JSON Schema that say something about values, and that the compiler does not know.
const UNSUPPORTED: [&str; 16] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
];

/// A keyword that cannot be enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedKeyword {
    /// The keyword.
    pub keyword: &'static str,
    /// The schema that has it, as a JSON pointer.
    pub path: String,
}

impl fmt::Display for UnsupportedKeyword {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.as_str() {
            "" => write!(f, "`{}`", self.keyword),
            path => write!(f, "`{}` at {path}", self.keyword),
        }
    }
}

/// All keywords of `schema` that cannot be enforced, those of unused definitions included.
pub(super) fn unsupported(schema: &Value) -> Vec<UnsupportedKeyword> {
    let mut found = Vec::new();
    collect(schema, "", &mut found);
    found
}

fn collect(schema: &Value, path: &str, found: &mut Vec<UnsupportedKeyword>) {
    let Some(schema) = schema.as_object() else { return };
    for (key, value) in schema {
        if let Some(keyword) = UNSUPPORTED.into_iter().find(|keyword| keyword == key) {
            let path = path.to_owned();
            found.push(UnsupportedKeyword { keyword, path });
            continue;
        }
        let here = format!("{path}/{}", key.replace('~', "~0").replace('/', "~1"));
        match (key.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                for (name, schema) in schemas {
                    let name = name.replace('~', "~0").replace('/', "~1");
                    collect(schema, &format!("{here}/{name}"), found);
                }
            }
            ("items" | "prefixItems" | "anyOf" | "allOf" | "oneOf", Value::Array(schemas)) => {
                for (index, schema) in schemas.iter().enumerate() {
                    collect(schema, &format!("{here}/{index}"), found);
                }
            }
            ("items" | "additionalItems" | "additionalProperties", schema) => collect(schema, &here, found),
            _ => {}
        }
    }
}

/// Range of numbers that llguidance handles, which reads them as doubles: it negates `i64::MIN` in an endless recursion, and may
/// read a number one double off.
const LEAST: f64 = -9_223_372_036_854_770_000.0;
const MOST: f64 = 9_223_372_036_854_770_000.0;

/// Narrows bounds of numbers in `schema` and its subschemas to that range: what the result allows, `schema` allows too.
///
/// # Errors
/// Names a number outside of the range that cannot be narrowed.
pub(super) fn fit_numbers(schema: &mut Value) -> Result<(), String> {
    fit(schema)?;
    let (mut references, mut fitted) = (Vec::new(), HashSet::new());
    collect_references(schema, &mut references);
    // llguidance treats any target of a reference as a schema, even the `default` of another.
    for reference in references {
        if let Some(schema) = target(schema, &reference)
            && fitted.insert(ptr::from_ref(schema))
        {
            fit(schema)?;
        }
    }
    Ok(())
}

fn collect_references(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| collect_references(value, found)),
        Value::Object(values) => {
            found.extend(values.get("$ref").and_then(Value::as_str).map(str::to_owned));
            values.values().for_each(|value| collect_references(value, found));
        }
        _ => {}
    }
}

/// Target of `reference` as llguidance resolves it: unlike in a JSON pointer, nothing is escaped.
fn target<'a>(schema: &'a mut Value, reference: &str) -> Option<&'a mut Value> {
    let mut segments = reference.strip_prefix("#/")?.split('/');
    segments.try_fold(schema, |value, segment| match value {
        Value::Array(values) => values.get_mut(segment.parse::<usize>().ok()?),
        value => value.get_mut(segment),
    })
}

/// [`fit_numbers`] without targets of references.
fn fit(schema: &mut Value) -> Result<(), String> {
    let schema = match schema {
        Value::Array(schemas) => return schemas.iter_mut().try_for_each(fit),
        Value::Object(schema) => schema,
        _ => return Ok(()),
    };
    for (key, value) in schema {
        match (key.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                schemas.values_mut().try_for_each(fit)?;
            }
            ("minimum" | "exclusiveMinimum", bound @ Value::Number(_)) => narrow(key, bound, LEAST)?,
            ("maximum" | "exclusiveMaximum", bound @ Value::Number(_)) => narrow(key, bound, MOST)?,
            ("enum", values @ Value::Array(_)) | ("const", values) => check_values(key, values)?,
            ("default" | "examples", _) => {}
            (_, schemas) => fit(schemas)?,
        }
    }
    Ok(())
}

fn narrow(key: &str, bound: &mut Value, to: f64) -> Result<(), String> {
    let is_beyond = |limit: f64| {
        bound
            .as_f64()
            .is_some_and(|bound| if limit < 0.0 { bound < limit } else { bound > limit })
    };
    if is_beyond(-to) {
        return Err(beyond(key, bound));
    }
    if is_beyond(to) {
        *bound = to.into();
    }
    Ok(())
}

fn check_values(key: &str, value: &Value) -> Result<(), String> {
    match value {
        Value::Number(number)
            if number
                .as_f64()
                .is_some_and(|number| !(LEAST..=MOST).contains(&number)) =>
        {
            Err(beyond(key, value))
        }
        Value::Array(values) => values.iter().try_for_each(|value| check_values(key, value)),
        Value::Object(values) => values.values().try_for_each(|value| check_values(key, value)),
        _ => Ok(()),
    }
}

fn beyond(key: &str, number: &Value) -> String {
    format!("`{key}`: {number} is outside the supported range, {LEAST} to {MOST}")
}

/// [`fit_numbers`] for each `%json` schema in `lark`.
///
/// # Errors
/// As there.
pub(super) fn fit_numbers_in_lark(lark: &str) -> Result<String, String> {
    const MARK: &str = "%json";
    let (mut fitted, mut rest) = (String::with_capacity(lark.len()), lark);
    while let Some(at) = rest.find(MARK) {
        let (before, schema) = rest.split_at(at + MARK.len());
        fitted.push_str(before);
        let mut values = Deserializer::from_str(schema).into_iter::<Value>();
        // Invalid JSON is reported by llguidance.
        let parsed = values.next().and_then(Result::ok);
        let (text, behind) = schema.split_at(values.byte_offset());
        match parsed {
            Some(mut value) => {
                let before = value.clone();
                fit_numbers(&mut value)?;
                if value == before {
                    fitted.push_str(text);
                } else {
                    fitted.push(' ');
                    fitted.push_str(&value.to_string());
                }
                rest = behind;
            }
            None => rest = schema,
        }
    }
    fitted.push_str(rest);
    Ok(fitted)
}
