//! Grammars of arguments that are written one by one, as in Python or in tags.

use llguidance::regex_to_lark;
use serde_json::{Map, Value, json};

use super::Function;
use super::parameters::{Object, Others, Parameters};
use super::write::{Lark, literal};
use crate::grammar::GrammarError;

/// Rule of text up to the end of its tag.
const TEXT: &str = "text";
/// What a tag's text cannot hold.
const END_OF_TEXT: &str = "</parameter>";
/// The end of a tag's text, without a line break that is layout.
const END: &str = "\n</parameter>";
/// Names of arguments that a schema allows without naming them.
const NAME: &str = "/[a-zA-Z_][a-zA-Z0-9_]{0,63}/";
/// Under this name the whole schema comes along with one of its parts.
const WHOLE: &str = "arguments";

/// References that are followed from one to the next.
const MAX_REFERENCES: usize = 16;

/// Keywords that say something about a text that a grammar of it cannot.
const NOT_OF_TEXT: [&str; 10] = [
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

/// One way to put arguments together, in rules.
struct Written {
    /// Each with its name, and whether it must be there.
    arguments: Vec<(String, bool)>,
    /// Any other, as often as one likes.
    other: Option<String>,
}

/// How an argument is written.
#[derive(Clone, Copy, PartialEq)]
enum Style {
    Python,
    Xml,
}

impl Style {
    /// An argument, of a terminal for its name and a rule for its value.
    fn argument(self, name: &str, value: &str) -> String {
        match self {
            Self::Python => format!("{name} \"=\" {value}"),
            Self::Xml => format!("\"<parameter=\" {name} \">\\n\" {value}"),
        }
    }

    /// Whether a parser finds the end of this name.
    fn can_write(self, name: &str) -> bool {
        let bare = !name.is_empty() && name.trim() == name;
        bare && match self {
            Self::Python => !name.contains('=') && !name.starts_with(')'),
            Self::Xml => !name.contains('>'),
        }
    }
}

/// A grammar for the arguments of one function.
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
        let body = Arguments::new(self, function, Style::Python).all(rule, |written| {
            let (required, optional): (Vec<_>, Vec<_>) =
                written.arguments.iter().partition(|(_, required)| *required);
            let more = |rest: &[&(String, bool)]| {
                let rest = rest.iter().map(|(argument, _)| format!("(\", \" {argument})?"));
                let others = written.other.iter().map(|other| format!("(\", \" {other})*"));
                rest.chain(others).collect::<Vec<_>>().join(" ")
            };
            let first: Vec<_> = required.iter().map(|(argument, _)| argument.as_str()).collect();
            if !first.is_empty() {
                return format!("{} {}", first.join(" \", \" "), more(&optional));
            }
            // Any of them may be the first.
            let begun = optional
                .iter()
                .enumerate()
                .map(|(i, (argument, _))| format!("{argument} {}", more(&optional[i + 1..])));
            let others = written.other.iter().map(|other| format!("{other} {}", more(&[])));
            let begun: Vec<_> = begun.chain(others).collect();
            match begun.as_slice() {
                [] => String::new(),
                begun => format!("({})?", begun.join(" | ")),
            }
        })?;
        let open = literal(&format!("{}(", function.name));
        Ok(format!("{open} {body} \")\""))
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

    /// All ways to put the arguments together, each as `body` writes it.
    fn all(mut self, rule: &str, body: impl Fn(&Written) -> String) -> Result<String, GrammarError> {
        for keyword in &self.parameters.beyond {
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
            if self.style.can_write(name) && !argument.said.contains(&&Value::Bool(false)) {
                let is_text = self.parameters.is_text(name);
                let value = self.value(&format!("{rule}_{i}"), name, &argument.said, is_text)?;
                arguments.push((self.style.argument(&literal(name), &value), argument.is_required));
            } else if argument.is_required {
                let name = literal(name);
                return Err(self.refused(&format!("the required argument {name}"), "cannot be written"));
            }
        }
        let any: Vec<&Value> = Vec::new();
        let others = match &object.others {
            Others::Of(said) => Some(said),
            // What is said in other ways is left to the model.
            Others::Unsaid if object.arguments.is_empty() && !self.parameters.beyond.is_empty() => Some(&any),
            Others::Unsaid | Others::None => None,
        };
        let other = match others {
            Some(said) => {
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
                let is_text = self.parameters.others_are_text();
                let value = self.value(&format!("{rule}_other"), "any other", said, is_text)?;
                Some(self.style.argument(&name, &value))
            }
            None => None,
        };
        Ok(Written { arguments, other })
    }

    /// A rule of the value of an argument, with what ends it.
    fn value(
        &mut self,
        rule: &str,
        name: &str,
        said: &[&'f Value],
        is_text: bool,
    ) -> Result<String, GrammarError> {
        self.lark.check_size()?;
        if self.style == Style::Xml && is_text {
            let text = self.text(name, said)?;
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
        let schema = match said {
            [] => json!({}),
            [one] => (*one).clone(),
            all => json!({ "allOf": all }),
        };
        let schema = alone(schema, &self.function.parameters);
        self.lark.schema(rule, schema, self.function.strict);
        Ok(match self.style {
            Style::Python => rule.to_owned(),
            Style::Xml => format!("{rule} {}", literal(&format!("{END}\n"))),
        })
    }

    /// The rule of a text of which nothing is said, the same for all.
    fn any_text(&mut self) -> &'static str {
        if !std::mem::replace(&mut self.lark.has_text, true) {
            let rule = format!("{TEXT}[suffix={}]", literal(END_OF_TEXT));
            self.lark.rule(&rule, "/(?s:.*)/");
        }
        TEXT
    }

    /// What the schemas say about a text, all of which hold.
    fn text(&self, name: &str, said: &[&'f Value]) -> Result<Text, GrammarError> {
        let mut text = Text::default();
        for schema in said {
            let mut schema = *schema;
            // References that lead back to themselves lead nowhere.
            for _ in 0..MAX_REFERENCES {
                let Some(fields) = schema.as_object() else { break };
                for (keyword, value) in fields {
                    let wrong = |what: &str| self.refused(&format!("`{keyword}` of {name}"), what);
                    text.add(keyword, value)
                        .ok_or_else(|| wrong("is not valid for a string"))?;
                    if NOT_OF_TEXT.contains(&keyword.as_str()) {
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

    /// A keyword that no rule says: an error if the function is strict.
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

/// A grammar of a text.
#[derive(Default)]
struct Text {
    /// One of these, if there are any.
    choices: Option<Vec<String>>,
    patterns: Vec<String>,
    min: u64,
    max: Option<u64>,
}

impl Text {
    /// `None` where the keyword's value is none that it may have.
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
                (min..=max).contains(&(text.chars().count() as u64)) && !text.contains(END_OF_TEXT)
            });
        }
        min <= max && self.choices.as_ref().is_none_or(|choices| !choices.is_empty())
    }

    /// As a terminal; `None` where any text will do.
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
            all.push(format!("~/(?s:.*){}(?s:.*)/", regex_to_lark(END_OF_TEXT, "")));
        }
        Some(all.join(" & "))
    }
}

/// A terminal of all texts in which a pattern of JSON Schema is found.
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

/// What stands between the bars of a pattern that are in no group or class.
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

/// A schema that is a part of `whole` as one that stands alone: what it refers to comes along.
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

/// Has references within the whole schema lead to where it comes along; false where there are none.
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
                    // Names, which may be any.
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
