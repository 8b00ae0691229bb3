//! Calls as models write them: one by one, and as a grammar of all that may come.

use plimsoll_core::TokenId;
use serde_json::{Map, Value, json};

use super::{Function, ToolFormat};

/// What may stand between the tokens of arguments: no model can go on with it for ever.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

impl ToolFormat {
    /// A call in this format.
    pub fn call(self, name: &str, arguments: &Value) -> String {
        let object = |key: &str| format!("{{\"name\": {}, \"{key}\": {arguments}}}", json!(name));
        let fields = || arguments.as_object().into_iter().flatten();
        match self {
            Self::Hermes => format!("<tool_call>\n{}\n</tool_call>", object("arguments")),
            Self::LlamaJson => object("parameters"),
            Self::Json => object("arguments"),
            Self::Mistral => format!("[TOOL_CALLS] [{}]", object("arguments")),
            Self::Pythonic => {
                let fields: Vec<_> = fields().map(|(key, value)| format!("{key}={value}")).collect();
                format!("[{name}({})]", fields.join(", "))
            }
            Self::QwenCoder => {
                let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                let fields: String = fields()
                    .map(|(key, value)| format!("<parameter={key}>\n{}\n</parameter>\n", text(value)))
                    .collect();
                format!("<tool_call>\n<function={name}>\n{fields}</function>\n</tool_call>")
            }
        }
    }

    /// A grammar, in llguidance's Lark, of answers that do nothing but call some of the functions, as this format reads them.
    pub fn grammar(self, grammar: &CallGrammar<'_>) -> String {
        let mut lark = Lark {
            token: grammar.token,
            rules: String::new(),
            has_text: false,
        };
        let (open, calls) = lark.calls(self, grammar);
        let start = if grammar.is_begun {
            calls
        } else {
            let other = grammar.or_json.map(|(schema, strict)| {
                lark.schema("other", schema.clone(), strict);
                " | other"
            });
            format!("WS? ({open} {calls}{})", other.unwrap_or_default())
        };
        format!("start: {start}\nWS: /[ \\n]{{1,4}}/\n{}", lark.rules)
    }

    /// What begins a call wherever it stands, if the format has such a mark.
    pub fn opening(self) -> Option<&'static str> {
        match self {
            Self::Hermes | Self::QwenCoder => Some("<tool_call>"),
            Self::Mistral => Some("[TOOL_CALLS]"),
            Self::LlamaJson | Self::Pythonic | Self::Json => None,
        }
    }
}

/// What a grammar of calls allows.
#[derive(Clone, Copy)]
pub struct CallGrammar<'a> {
    /// What may be called, at least one.
    pub functions: &'a [Function],
    /// Several calls may follow each other.
    pub several: bool,
    /// The grammar applies behind [`ToolFormat::opening`], which must be there.
    pub is_begun: bool,
    /// In place of calls the answer may be JSON of this schema; true where keywords that cannot be enforced are an error.
    pub or_json: Option<(&'a Map<String, Value>, bool)>,
    /// The special token with this text, if there is one.
    pub token: &'a dyn Fn(&str) -> Option<TokenId>,
}

impl std::fmt::Debug for CallGrammar<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallGrammar")
            .field("functions", &self.functions)
            .field("several", &self.several)
            .field("is_begun", &self.is_begun)
            .field("or_json", &self.or_json)
            .finish_non_exhaustive()
    }
}

struct Lark<'a> {
    token: &'a dyn Fn(&str) -> Option<TokenId>,
    rules: String,
    /// There is a rule for text up to the end of a tag.
    has_text: bool,
}

/// `text` as a terminal.
fn literal(text: &str) -> String {
    json!(text).to_string()
}

impl Lark<'_> {
    fn rule(&mut self, name: &str, body: &str) {
        self.rules += &format!("{name}: {body}\n");
    }

    /// A mark as the special token that it is, or as text.
    fn mark(&self, mark: &str) -> String {
        match (self.token)(mark) {
            Some(id) => format!("<[{id}]>"),
            None => literal(mark),
        }
    }

    /// What opens the first call, and the rest of all calls.
    fn calls(&mut self, format: ToolFormat, grammar: &CallGrammar<'_>) -> (String, String) {
        let names: Vec<_> = (0..grammar.functions.len())
            .map(|i| format!("call_{i}"))
            .collect();
        for (name, function) in names.iter().zip(grammar.functions) {
            let body = self.call(format, name, function);
            self.rule(name, &body);
        }
        self.rule("call", &names.join(" | "));
        let open = format.opening().map(|mark| self.mark(mark)).unwrap_or_default();
        let list = |separator: &str| match grammar.several {
            true => format!("call ({separator} call)*"),
            false => "call".to_owned(),
        };
        let calls = match format {
            ToolFormat::Hermes | ToolFormat::QwenCoder => list(&format!("\"\\n\" {open}")),
            ToolFormat::Mistral if self.has_args() => list(&open),
            ToolFormat::Mistral => format!("\" \"? \"[\" {} \"]\"", list("\", \"")),
            ToolFormat::LlamaJson => list("\"; \""),
            ToolFormat::Pythonic => format!("\"[\" {} \"]\"", list("\", \"")),
            ToolFormat::Json if grammar.several => "(call | \"[\" call (\", \" call)+ \"]\")".to_owned(),
            ToolFormat::Json => list(""),
        };
        (open, calls)
    }

    /// Mistral's newer models have a token between name and arguments.
    fn has_args(&self) -> bool {
        (self.token)("[ARGS]").is_some()
    }

    fn call(&mut self, format: ToolFormat, rule: &str, function: &Function) -> String {
        let name = json!(function.name);
        let object = |key: &str| literal(&format!("{{\"name\": {name}, \"{key}\": "));
        match format {
            ToolFormat::Hermes => {
                let close = self.mark("</tool_call>");
                let head = literal(&format!("\n{{\"name\": {name}, \"arguments\": "));
                format!("{head} {} \"}}\\n\" {close}", self.arguments(rule, function))
            }
            ToolFormat::LlamaJson => {
                format!(
                    "{} {} \"}}\"",
                    object("parameters"),
                    self.arguments(rule, function)
                )
            }
            ToolFormat::Mistral if self.has_args() => format!(
                "{} {} {}",
                literal(&function.name),
                self.mark("[ARGS]"),
                self.arguments(rule, function)
            ),
            ToolFormat::Mistral | ToolFormat::Json => {
                format!(
                    "{} {} \"}}\"",
                    object("arguments"),
                    self.arguments(rule, function)
                )
            }
            ToolFormat::Pythonic => self.python(rule, function),
            ToolFormat::QwenCoder => self.xml(rule, function),
        }
    }

    fn arguments(&mut self, rule: &str, function: &Function) -> String {
        if function.parameters.is_empty() {
            return literal("{}");
        }
        let name = format!("{rule}_arguments");
        let mut schema = function.parameters.clone();
        schema.entry("type").or_insert_with(|| json!("object"));
        self.schema(&name, schema, function.strict);
        name
    }

    fn schema(&mut self, rule: &str, mut schema: Map<String, Value>, strict: bool) {
        let options =
            json!({ "lenient": !strict, "coerce_one_of": !strict, "whitespace_pattern": WHITESPACE });
        schema.insert("x-guidance".to_owned(), options);
        self.rule(rule, &format!("%json {}", Value::Object(schema)));
    }

    /// Properties in the order of the schema: name, rule of the value, whether it must be there. Types are told to `text`,
    /// which may have a rule of its own for a value.
    fn properties<'f>(
        &mut self,
        rule: &str,
        function: &'f Function,
        text: impl Fn(&Value) -> Option<String>,
    ) -> Vec<(&'f str, String, bool)> {
        let required = function.parameters.get("required").and_then(Value::as_array);
        let is_required = |key: &str| required.is_some_and(|list| list.iter().any(|name| name == key));
        let properties = function.parameters.get("properties").and_then(Value::as_object);
        let mut found = Vec::new();
        for (i, (key, schema)) in properties.into_iter().flatten().enumerate() {
            let value = text(schema).unwrap_or_else(|| {
                let name = format!("{rule}_{i}");
                let mut schema = schema.as_object().cloned().unwrap_or_default();
                // References are to the whole schema.
                for key in ["$defs", "definitions"] {
                    if let Some(shared) = function.parameters.get(key) {
                        schema.entry(key).or_insert_with(|| shared.clone());
                    }
                }
                self.schema(&name, schema, function.strict);
                name
            });
            found.push((key.as_str(), value, is_required(key)));
        }
        found
    }

    fn xml(&mut self, rule: &str, function: &Function) -> String {
        const TEXT: &str = "xml_text";
        const END: &str = "\n</parameter>\n";
        let is_text = |schema: &Value| schema["type"] == "string" && schema.get("enum").is_none();
        let choice = |schema: &Value| {
            let texts = schema["enum"]
                .as_array()?
                .iter()
                .map(Value::as_str)
                .collect::<Option<Vec<_>>>()?;
            let texts: Vec<_> = texts.into_iter().map(literal).collect();
            (!texts.is_empty()).then(|| format!("({}) {}", texts.join(" | "), literal(END)))
        };
        let text = |schema: &Value| {
            is_text(schema)
                .then(|| TEXT.to_owned())
                .or_else(|| choice(schema))
        };
        if !std::mem::replace(&mut self.has_text, true) {
            self.rules += &format!("{TEXT}[suffix={}]: /(?s:.*)/\n", literal(END));
        }
        let mut body = literal(&format!("\n<function={}>\n", function.name));
        for (key, value, required) in self.properties(rule, function, text) {
            let end = if value.starts_with(rule) {
                literal(END)
            } else {
                String::new()
            };
            let optional = if required { "" } else { "?" };
            body += &format!(
                " ({} {value} {end}){optional}",
                literal(&format!("<parameter={key}>\n"))
            );
        }
        format!("{body} \"</function>\\n\" {}", self.mark("</tool_call>"))
    }

    fn python(&mut self, rule: &str, function: &Function) -> String {
        let properties = self.properties(rule, function, |_| None);
        let item = |key: &str, value: &str| format!("{} {value}", literal(&format!("{key}=")));
        let (required, optional): (Vec<_>, Vec<_>) =
            properties.iter().partition(|(_, _, required)| *required);
        let mut parts: Vec<_> = required.iter().map(|(key, value, _)| item(key, value)).collect();
        let more = |rest: &[&(&str, String, bool)]| {
            let more = rest
                .iter()
                .map(|(key, value, _)| format!("(\", \" {})?", item(key, value)));
            more.collect::<Vec<_>>().join(" ")
        };
        let body = if !parts.is_empty() || optional.is_empty() {
            let all = parts.join(" \", \" ");
            format!("{all} {}", more(&optional))
        } else {
            // Any of them may be the first.
            parts.extend((0..optional.len()).map(|first| {
                let (key, value, _) = optional[first];
                format!("{} {}", item(key, value), more(&optional[first + 1..]))
            }));
            format!("({})?", parts.join(" | "))
        };
        format!("{} {body} \")\"", literal(&format!("{}(", function.name)))
    }
}
