//! JSON schemas as types of TypeScript, as gpt-oss was trained to read them: what
//! <https://github.com/openai/harmony> makes of them, byte by byte.

use serde_json::Value;

/// The type of a value that `schema` describes.
pub(super) fn of(schema: &Value) -> String {
    let mut out = String::new();
    write(schema, "", &mut out);
    out
}

fn write(schema: &Value, indent: &str, out: &mut String) {
    if let Some(variants) = list(schema, "oneOf") {
        for variant in variants {
            *out += &format!("\n{indent} | ");
            write_nullable(variant, &format!("{indent}   "), out);
            let said = [
                text(variant, "description").map(str::to_owned),
                default(variant, false),
            ];
            comment(said, out);
        }
        return;
    }
    if let Some(types) = list(schema, "type") {
        let names = types.iter().filter_map(Value::as_str);
        let names: Vec<_> = names
            .map(|name| if name == "integer" { "number" } else { name })
            .collect();
        if !names.is_empty() {
            *out += &names.join(" | ");
            return;
        }
    }
    match text(schema, "type") {
        Some("object") => object(schema, indent, out),
        Some("string") => {
            let choices = list(schema, "enum")
                .into_iter()
                .flatten()
                .filter_map(Value::as_str);
            let choices: Vec<_> = choices.map(|choice| format!("\"{choice}\"")).collect();
            *out += &match choices.is_empty() {
                true => "string".to_owned(),
                false => choices.join(" | "),
            };
        }
        Some("number" | "integer") => *out += "number",
        Some("boolean") => *out += "boolean",
        Some("array") => match schema.get("items") {
            Some(items) => {
                write(items, indent, out);
                *out += "[]";
            }
            None => *out += "Array<any>",
        },
        _ => *out += "any",
    }
}

fn write_nullable(schema: &Value, indent: &str, out: &mut String) {
    let from = out.len();
    write(schema, indent, out);
    if schema["nullable"] == true && !out[from..].contains("null") {
        *out += " | null";
    }
}

fn object(schema: &Value, indent: &str, out: &mut String) {
    if let Some(text) = text(schema, "description") {
        *out += &format!("{indent}// {text}\n");
    }
    *out += "{\n";
    let properties = schema.get("properties").and_then(Value::as_object);
    for (name, property) in properties.into_iter().flatten() {
        let is_required =
            list(schema, "required").is_some_and(|names| names.iter().any(|required| required == name));
        let mark = if is_required { "" } else { "?" };
        self::property(&format!("{name}{mark}"), property, indent, out);
    }
    *out += &format!("{indent}}}");
}

/// `name` and type of a property, below what is said about it.
fn property(name: &str, property: &Value, indent: &str, out: &mut String) {
    if let Some(title) = text(property, "title") {
        *out += &format!("{indent}// {title}\n{indent}//\n");
    }
    let variants = list(property, "oneOf");
    let description = text(property, "description");
    let mut above = description;
    if let Some(variants) = variants {
        // One that repeats the description of the first variant is left out.
        let first = variants.first().and_then(|first| text(first, "description"));
        above = description.filter(|_| first != description);
    } else if let Some(description) = description {
        *out += &format!("{indent}// {description}\n");
    }
    let examples = list(property, "examples").filter(|examples| !examples.is_empty());
    if let Some(examples) = examples {
        *out += &format!("{indent}// Examples:\n");
        for example in examples.iter().filter_map(Value::as_str) {
            *out += &format!("{indent}// - \"{example}\"\n");
        }
    }
    let Some(variants) = variants else {
        *out += &format!("{indent}{name}: ");
        write_nullable(property, &format!("{indent}    "), out);
        *out += ",";
        comment([default(property, true), None], out);
        *out += "\n";
        return;
    };
    for said in [above.map(str::to_owned), default(property, true)]
        .into_iter()
        .flatten()
    {
        *out += &format!("{indent}// {said}\n");
    }
    *out += &format!("{indent}{name}:\n");
    for (index, variant) in variants.iter().enumerate() {
        *out += &format!("{indent} | ");
        write_nullable(variant, &format!("{indent}   "), out);
        let said = text(variant, "description").filter(|_| index > 0 || above.is_none());
        let said = said.filter(|said| Some(*said) != description);
        comment([said.map(str::to_owned), default(variant, true)], out);
        *out += "\n";
    }
    *out += &format!("{indent},\n");
}

/// The default, if there is one. `bare`: that of an `enum` without quotes.
fn default(schema: &Value, bare: bool) -> Option<String> {
    let value = schema.get("default")?;
    let is_enum = list(schema, "enum").is_some_and(|choices| !choices.is_empty());
    Some(match value.as_str() {
        Some(text) if is_enum && bare => format!("default: {text}"),
        Some(text) if !is_enum => format!("default: \"{text}\""),
        _ => format!("default: {value}"),
    })
}

/// Appends what is said, if anything, to the line.
fn comment(said: [Option<String>; 2], out: &mut String) {
    let said: Vec<_> = said.into_iter().flatten().collect();
    if !said.is_empty() {
        *out += &format!(" // {}", said.join(" "));
    }
}

fn text<'a>(schema: &'a Value, name: &str) -> Option<&'a str> {
    schema.get(name)?.as_str()
}

fn list<'a>(schema: &'a Value, name: &str) -> Option<&'a [Value]> {
    schema.get(name)?.as_array().map(Vec::as_slice)
}
