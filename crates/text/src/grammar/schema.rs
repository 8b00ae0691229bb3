use std::fmt;

use serde_json::Value;

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
