//! Grammars of calls whose arguments are written one by one: as in Python, or in XML tags.

use llguidance::regex_to_lark;
use serde_json::{Map, Value, json};

use super::Function;
use super::gemma4;
use super::parameters::{Additional, Object, Parameters};
use super::qwen_coder::ENDS_OF_VALUE;
use super::write::{Lark, literal};
use crate::grammar::GrammarError;

/// Rule of a string up to its closing tag.
const TEXT: &str = "text";
/// Closing tag of a string.
const END_OF_TEXT: &str = "</parameter>";
/// Closing tag with the line break before it, which is not part of the string.
const END: &str = "\n</parameter>";
/// Names of additional arguments.
const NAME: &str = "/[a-zA-Z_][a-zA-Z0-9_]{0,63}/";
/// Name in `$defs` under which a subschema carries the whole schema, for its references.
const WHOLE: &str = "arguments";

/// Maximum length of a chain of references.
const MAX_REFERENCES: usize = 16;

/// Keywords of strings that the grammar of an unquoted string cannot enforce.
const UNENFORCED_IN_TEXT: [&str; 10] = [
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "anyOf",
    "else",
    "format",
    "if",
    "not",
    "oneOf",
    "then",
];

/// One alternative of the arguments, as rules.
struct Written {
    /// Rule of each, and whether it is required.
    arguments: Vec<(String, bool)>,
    /// Rule of additional arguments, any number of them.
    other: Option<String>,
}

/// How an argument is written.
#[derive(Clone, Copy, PartialEq)]
enum Style {
    Python,
    Xml,
    Gemma4,
}

impl Style {
    /// Rule of an argument, from a terminal for its name and a rule for its value.
    fn argument(self, name: &str, value: &str) -> String {
        match self {
            Self::Python => format!("{name} \"=\" {value}"),
            Self::Gemma4 => format!("{name} \":\" {value}"),
            Self::Xml => format!("\"<parameter=\" {name} \">\\n\" {value}"),
        }
    }

    /// Whether the parser can find the end of this name.
    fn can_write(self, name: &str) -> bool {
        let bare = !name.is_empty() && name.trim() == name;
        bare && match self {
            Self::Python => !name.contains('=') && !name.starts_with(')'),
            Self::Xml => !name.contains('>'),
            Self::Gemma4 => !name.contains(':') && !name.starts_with(['"', '<', '}']),
        }
    }

    /// What no unquoted string holds.
    fn ends_of_text(self) -> &'static [&'static str] {
        match self {
            Self::Gemma4 => &[gemma4::QUOTE],
            Self::Python | Self::Xml => &ENDS_OF_VALUE,
        }
    }
}

/// Writes the grammar of one function's arguments.
struct Arguments<'l, 'a, 'f> {
    lark: &'l mut Lark<'a>,
    function: &'f Function,
    parameters: Parameters<'f>,
    style: Style,
}

impl Lark<'_> {
    /// `<function=name>` up to the end of the call.
    pub(super) fn xml(&mut self, rule: &str, function: &Function) -> Result<String, GrammarError> {
        let close = self.mark("</tool_call>");
        let body = Arguments::new(self, function, Style::Xml).all(rule, |written| {
            let arguments = written.arguments.iter();
            let mut body: Vec<_> = arguments
                .map(|(argument, required)| match required {
                    true => argument.clone(),
                    false => format!("({argument})?"),
                })
                .collect();
            body.extend(written.other.iter().map(|other| format!("({other})*")));
            body.join(" ")
        })?;
        let open = literal(&format!("\n<function={}>\n", function.name));
        Ok(format!("{open} {body} \"</function>\\n\" {close}"))
    }

    /// `name(key=value)`.
    pub(super) fn python(&mut self, rule: &str, function: &Function) -> Result<String, GrammarError> {
        let body = self.list(rule, function, Style::Python, ", ")?;
        let open = literal(&format!("{}(", function.name));
        Ok(format!("{open} {body} \")\""))
    }

    /// `call:name{key:value}`, up to the end of the call.
    pub(super) fn gemma4(&mut self, rule: &str, function: &Function) -> Result<String, GrammarError> {
        let close = self.mark(gemma4::CLOSE);
        let body = self.list(rule, function, Style::Gemma4, ",")?;
        let open = literal(&format!("call:{}{{", function.name));
        Ok(format!("{open} {body} \"}}\" {close}"))
    }

    /// Arguments with `separator` between them.
    fn list(
        &mut self,
        rule: &str,
        function: &Function,
        style: Style,
        separator: &str,
    ) -> Result<String, GrammarError> {
        let separator = literal(separator);
        Arguments::new(self, function, style).all(rule, |written| {
            let (required, optional): (Vec<_>, Vec<_>) =
                written.arguments.iter().partition(|(_, required)| *required);
            let more = |rest: &[&(String, bool)]| {
                let rest = rest
                    .iter()
                    .map(|(argument, _)| format!("({separator} {argument})?"));
                let additional = written
                    .other
                    .iter()
                    .map(|other| format!("({separator} {other})*"));
                rest.chain(additional).collect::<Vec<_>>().join(" ")
            };
            let first: Vec<_> = required.iter().map(|(argument, _)| argument.as_str()).collect();
            if !first.is_empty() {
                return format!("{} {}", first.join(&format!(" {separator} ")), more(&optional));
            }
            // Any of the optional arguments may come first.
            let begun = optional
                .iter()
                .enumerate()
                .map(|(i, (argument, _))| format!("{argument} {}", more(&optional[i + 1..])));
            let additional = written.other.iter().map(|other| format!("{other} {}", more(&[])));
            let begun: Vec<_> = begun.chain(additional).collect();
            match begun.as_slice() {
                [] => String::new(),
                begun => format!("({})?", begun.join(" | ")),
            }
        })
    }
}

impl<'l, 'a, 'f> Arguments<'l, 'a, 'f> {
    fn new(lark: &'l mut Lark<'a>, function: &'f Function, style: Style) -> Self {
        Self {
            lark,
            function,
            parameters: Parameters::of(&function.parameters),
            style,
        }
    }

    /// All alternatives of the arguments, each as `body` writes it.
    fn all(mut self, rule: &str, body: impl Fn(&Written) -> String) -> Result<String, GrammarError> {
        for keyword in &self.parameters.unenforced {
            self.cannot(keyword)?;
        }
        let mut bodies = Vec::new();
        for (i, object) in self.parameters.objects.clone().iter().enumerate() {
            let body = body(&self.object(&format!("{rule}_{i}"), object)?);
            bodies.push(if body.is_empty() { literal("") } else { body });
        }
        Ok(format!("({})", bodies.join(" | ")))
    }

    fn object(&mut self, rule: &str, object: &Object<'f>) -> Result<Written, GrammarError> {
        let mut arguments = Vec::new();
        for (i, argument) in object.arguments.iter().enumerate() {
            let name = argument.name;
            if self.style.can_write(name) && !argument.schemas.contains(&&Value::Bool(false)) {
                let is_text = self.parameters.is_text(name);
                let value = self.value(&format!("{rule}_{i}"), name, &argument.schemas, is_text)?;
                arguments.push((self.style.argument(&literal(name), &value), argument.is_required));
            } else if argument.is_required {
                let name = literal(name);
                return Err(self.refused(&format!("the required argument {name}"), "cannot be written"));
            }
        }
        let any: Vec<&Value> = Vec::new();
        let additional = match &object.additional {
            Additional::Of(schemas) => Some(schemas),
            // Arguments that only unenforced keywords describe are left to the model.
            Additional::Unspecified
                if object.arguments.is_empty() && !self.parameters.unenforced.is_empty() =>
            {
                Some(&any)
            }
            Additional::Unspecified | Additional::None => None,
        };
        let other = match additional {
            Some(schemas) => {
                let names: Vec<_> = object
                    .arguments
                    .iter()
                    .map(|argument| literal(argument.name))
                    .collect();
                let name = format!("{}_NAME", rule.to_uppercase());
                let but = match names.as_slice() {
                    [] => String::new(),
                    names => format!(" & ~({})", names.join(" | ")),
                };
                self.lark.rule(&name, &format!("{NAME}{but}"));
                let is_text = self.parameters.additional_is_text();
                let value = self.value(&format!("{rule}_other"), "any other", schemas, is_text)?;
                Some(self.style.argument(&name, &value))
            }
            None => None,
        };
        Ok(Written { arguments, other })
    }

    /// Rule of an argument's value with its closing tag.
    fn value(
        &mut self,
        rule: &str,
        name: &str,
        schemas: &[&'f Value],
        is_text: bool,
    ) -> Result<String, GrammarError> {
        self.lark.check_size()?;
        if self.style == Style::Gemma4 && is_text {
            let text = self.text(name, schemas)?;
            let regex = text
                .regex()
                .unwrap_or_else(|| format!("/(?s:.*)/ & {}", without(&[gemma4::QUOTE])));
            let quote = self.lark.mark(gemma4::QUOTE);
            // A string ends where the mark comes, which is a token of its own or text.
            return Ok(match (self.lark.token)(gemma4::QUOTE) {
                Some(_) => {
                    let terminal = rule.to_uppercase();
                    self.lark.rule(&terminal, &regex);
                    format!("{quote} {terminal} {quote}")
                }
                None => {
                    self.lark.rule(&format!("{rule}[suffix={quote}]"), &regex);
                    format!("{quote} {rule}")
                }
            });
        }
        if self.style == Style::Xml && is_text {
            let text = self.text(name, schemas)?;
            let rule = match text.regex() {
                None => self.any_text(),
                Some(regex) => {
                    self.lark
                        .rule(&format!("{rule}[suffix={}]", literal(END)), &regex);
                    rule
                }
            };
            return Ok(format!("{rule} \"\\n\""));
        }
        let schema = match schemas {
            [] => json!({}),
            [one] => (*one).clone(),
            all => json!({ "allOf": all }),
        };
        let schema = alone(schema, &self.function.parameters);
        self.lark.schema(rule, schema, self.function.strict, None);
        Ok(match self.style {
            Style::Python | Style::Gemma4 => rule.to_owned(),
            Style::Xml => format!("{rule} {}", literal(&format!("{END}\n"))),
        })
    }

    /// The rule of an unconstrained string, shared by all arguments.
    fn any_text(&mut self) -> &'static str {
        if !std::mem::replace(&mut self.lark.has_text, true) {
            let rule = format!("{TEXT}[suffix={}]", literal(END_OF_TEXT));
            let body = format!("/(?s:.*)/ & {}", without(&ENDS_OF_VALUE));
            self.lark.rule(&rule, &body);
        }
        TEXT
    }

    /// Constraints on a string from `schemas`, all of which apply.
    fn text(&self, name: &str, schemas: &[&'f Value]) -> Result<Text, GrammarError> {
        let mut text = Text {
            ends: self.style.ends_of_text(),
            ..Text::default()
        };
        for schema in schemas {
            let mut schema = *schema;
            // References may be circular.
            for _ in 0..MAX_REFERENCES {
                let Some(fields) = schema.as_object() else { break };
                for (keyword, value) in fields {
                    let wrong = |what: &str| self.refused(&format!("`{keyword}` of {name}"), what);
                    text.add(keyword, value)
                        .ok_or_else(|| wrong("is not valid for a string"))?;
                    if UNENFORCED_IN_TEXT.contains(&keyword.as_str()) {
                        self.cannot(&format!("`{keyword}` of {name}"))?;
                    }
                }
                match (self.parameters.target(fields), fields.contains_key("$ref")) {
                    (Some(target), _) => schema = target,
                    (None, true) => {
                        self.cannot(&format!("`$ref` of {name}"))?;
                        break;
                    }
                    (None, false) => break,
                }
            }
        }
        match text.is_possible() {
            true => Ok(text),
            false => Err(self.refused(&format!("the schema of {name}"), "allows no string")),
        }
    }

    /// An unenforceable keyword: an error if the function is strict.
    fn cannot(&self, keyword: &str) -> Result<(), GrammarError> {
        match self.function.strict {
            true => Err(self.refused(
                keyword,
                "cannot be enforced in the format in which this model writes calls; leave it out",
            )),
            false => Ok(()),
        }
    }

    fn refused(&self, what: &str, why: &str) -> GrammarError {
        GrammarError::Invalid(format!("the parameters of {}: {what} {why}", self.function.name))
    }
}

/// Constraints on an unquoted string.
#[derive(Default)]
struct Text {
    /// The string is one of these, if set.
    choices: Option<Vec<String>>,
    patterns: Vec<String>,
    min: u64,
    max: Option<u64>,
    /// What the string does not hold.
    ends: &'static [&'static str],
}

impl Text {
    /// Adds a keyword; `None` if its value is invalid.
    fn add(&mut self, keyword: &str, value: &Value) -> Option<()> {
        match keyword {
            "enum" => self.choose(value.as_array()?),
            "const" => self.choose(std::slice::from_ref(value)),
            "pattern" => self.patterns.push(value.as_str()?.to_owned()),
            "minLength" => self.min = self.min.max(value.as_u64()?),
            "maxLength" => {
                let max = value.as_u64()?;
                self.max = Some(self.max.map_or(max, |known| known.min(max)));
            }
            _ => {}
        }
        Some(())
    }

    fn choose(&mut self, values: &[Value]) {
        let mut texts: Vec<_> = values
            .iter()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect();
        if let Some(known) = &self.choices {
            texts.retain(|text| known.contains(text));
        }
        self.choices = Some(texts);
    }

    fn is_possible(&mut self) -> bool {
        let (min, max) = (self.min, self.max.unwrap_or(u64::MAX));
        if let Some(choices) = &mut self.choices {
            choices.retain(|text| {
                (min..=max).contains(&(text.chars().count() as u64))
                    && !self.ends.iter().any(|end| text.contains(end))
            });
        }
        min <= max && self.choices.as_ref().is_none_or(|choices| !choices.is_empty())
    }

    /// A terminal; `None` for an unconstrained string.
    fn regex(&self) -> Option<String> {
        let mut all: Vec<_> = self.patterns.iter().map(|pattern| search(pattern)).collect();
        match &self.choices {
            Some(choices) => {
                let choices: Vec<_> = choices.iter().map(|choice| literal(choice)).collect();
                all.push(format!("({})", choices.join(" | ")));
            }
            None if self.min > 0 || self.max.is_some() => {
                let max = self.max.map(|max| max.to_string()).unwrap_or_default();
                all.push(format!("/(?s:.{{{},{max}}})/", self.min));
            }
            None if all.is_empty() => return None,
            None => {}
        }
        if self.choices.is_none() {
            all.push(without(self.ends));
        }
        Some(all.join(" & "))
    }
}

/// A terminal of all strings that the parser reads up to what ends them.
fn without(ends: &[&str]) -> String {
    let ends: Vec<_> = ends.iter().map(|end| end.replace('|', "\\|")).collect();
    let ends = regex_to_lark(&ends.join("|"), "");
    format!("~/(?s:.*)({ends})(?s:.*)/")
}

/// A terminal of all strings that contain a match of a JSON Schema `pattern`.
fn search(pattern: &str) -> String {
    let pattern = regex_to_lark(pattern, "dw");
    let anywhere = |found: bool| if found { "" } else { "(?s:.*)" };
    let alternatives: Vec<_> = alternatives(&pattern)
        .into_iter()
        .map(|text| {
            let slashes = text
                .strip_suffix('$')
                .map(|rest| rest.len() - rest.trim_end_matches('\\').len());
            let is_end = slashes.is_some_and(|slashes| slashes % 2 == 0);
            format!(
                "/{}(?:{text}){}/",
                anywhere(text.starts_with('^')),
                anywhere(is_end)
            )
        })
        .collect();
    format!("({})", alternatives.join(" | "))
}

/// Top-level alternatives of a pattern: split at `|` outside of groups and classes.
fn alternatives(pattern: &str) -> Vec<&str> {
    let (mut from, mut groups, mut class, mut escaped) = (0, 0usize, false, false);
    let mut found = Vec::new();
    for (at, c) in pattern.char_indices() {
        match c {
            _ if std::mem::take(&mut escaped) => {}
            '\\' => escaped = true,
            ']' => class = false,
            _ if class => {}
            '[' => class = true,
            '(' => groups += 1,
            ')' => groups = groups.saturating_sub(1),
            '|' if groups == 0 => {
                found.push(&pattern[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    found.push(&pattern[from..]);
    found
}

/// A subschema of `whole` as a schema of its own, which carries `whole` in `$defs` if it has references.
fn alone(mut schema: Value, whole: &Map<String, Value>) -> Map<String, Value> {
    let refers = redirect(&mut schema);
    let mut schema = match schema {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    if let Some(draft) = whole.get("$schema") {
        schema.insert("$schema".to_owned(), draft.clone());
    }
    if refers {
        let mut whole = Value::Object(whole.clone());
        redirect(&mut whole);
        if let Some(fields) = whole.as_object_mut() {
            fields.retain(|key, _| !matches!(key.as_str(), "$schema" | "$id" | "id"));
        }
        schema.insert("$defs".to_owned(), json!({ WHOLE: whole }));
    }
    schema
}

/// Redirects references within the whole schema to where [`alone`] puts it; false if there are none.
fn redirect(schema: &mut Value) -> bool {
    let mut any = false;
    match schema {
        Value::Array(items) => {
            for item in items {
                any |= redirect(item);
            }
        }
        Value::Object(fields) => {
            for (key, value) in fields.iter_mut() {
                any |= match (key.as_str(), value) {
                    ("$ref", Value::String(target)) if target == "#" || target.starts_with("#/") => {
                        target.replace_range(..1, &format!("#/$defs/{WHOLE}"));
                        true
                    }
                    // Values, not schemas.
                    ("const" | "enum" | "default" | "examples", _) => false,
                    // Keys are names, not keywords.
                    (
                        "properties" | "patternProperties" | "$defs" | "definitions",
                        Value::Object(schemas),
                    ) => {
                        let mut here = false;
                        for (_, schema) in schemas.iter_mut() {
                            here |= redirect(schema);
                        }
                        here
                    }
                    (_, value) => redirect(value),
                };
            }
        }
        _ => {}
    }
    any
}
