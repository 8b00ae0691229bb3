//! Writes calls as models do, and grammars of all calls that are possible.

use plimsoll_core::TokenId;
use serde_json::{Map, Value, json};

use super::super::position::Position;
use super::{Function, ToolFormat, gemma4};
use crate::grammar::{GrammarError, MAX_BYTES, close_objects};
use crate::harmony;

/// Whitespace between the tokens of arguments: bounded, as a model could repeat it for ever.
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
            Self::Harmony => {
                // Only a string can hold a mark.
                let arguments = arguments.to_string().replace("<|", "\\u003c|");
                harmony::call(name, &arguments)
            }
            Self::Gemma4 => {
                let arguments = gemma4::written(arguments);
                format!("{}call:{name}{arguments}{}", gemma4::OPEN, gemma4::CLOSE)
            }
            Self::Phi4Mini => format!("<|tool_call|>[{}]<|/tool_call|>", object("arguments")),
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
    /// If [`Self::holds_reasoning`], reasoning and what else comes before calls is part of it.
    ///
    /// # Errors
    /// [`GrammarError`] if this format cannot write a required argument, or cannot enforce a strict function's schema.
    pub fn grammar(self, grammar: &CallGrammar<'_>) -> Result<String, GrammarError> {
        let mut lark = Lark {
            token: grammar.token,
            rules: String::new(),
            has_text: false,
        };
        if self == Self::Harmony {
            return lark.harmony(grammar);
        }
        let (open, calls) = lark.calls(self, grammar)?;
        let start = if grammar.is_begun {
            calls
        } else {
            let other = grammar.or_json.map(|json| {
                lark.schema("other", json.schema.clone(), json.strict, json.whitespace);
                " | other"
            });
            format!("WS? ({open} {calls}{})", other.unwrap_or_default())
        };
        Ok(format!("start: {start}\nWS: /[ \\n]{{1,4}}/\n{}", lark.rules))
    }

    /// The mark that begins a call anywhere in an answer, if the format has one.
    pub fn opening(self) -> Option<&'static str> {
        match self {
            Self::Hermes | Self::QwenCoder => Some("<tool_call>"),
            Self::Mistral => Some("[TOOL_CALLS]"),
            Self::Phi4Mini => Some("<|tool_call|>"),
            Self::Gemma4 => Some(gemma4::OPEN),
            Self::LlamaJson | Self::Pythonic | Self::Json | Self::Harmony => None,
        }
    }

    /// Whether grammars in this format are of whole answers, with their reasoning.
    pub fn holds_reasoning(self) -> bool {
        self == Self::Harmony
    }
}

/// What a grammar of calls allows.
#[derive(Clone, Copy)]
pub struct CallGrammar<'a> {
    /// What may be called, at least one.
    pub functions: &'a [Function],
    /// Several calls may follow each other.
    pub several: bool,
    /// The grammar applies behind [`ToolFormat::opening`], which must be there. If the grammar is of whole answers: they need
    /// not have calls.
    pub is_begun: bool,
    /// In place of calls the answer may be this.
    pub or_json: Option<JsonAnswer<'a>>,
    /// Where in an answer the prompt ends, for grammars of whole answers.
    pub position: Position,
    /// The special token with this text, if there is one.
    pub token: &'a dyn Fn(&str) -> Option<TokenId>,
}

/// An answer that is JSON.
#[derive(Clone, Copy, Debug)]
pub struct JsonAnswer<'a> {
    /// Its schema.
    pub schema: &'a Map<String, Value>,
    /// Keywords that cannot be enforced are an error.
    pub strict: bool,
    /// As [`Grammar::whitespace`](crate::grammar::Grammar::whitespace).
    pub whitespace: Option<&'a str>,
}

impl std::fmt::Debug for CallGrammar<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallGrammar")
            .field("functions", &self.functions)
            .field("several", &self.several)
            .field("is_begun", &self.is_begun)
            .field("or_json", &self.or_json)
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

/// A grammar being written.
pub(super) struct Lark<'a> {
    pub(super) token: &'a dyn Fn(&str) -> Option<TokenId>,
    pub(super) rules: String,
    /// There is a rule for text up to the end of a tag.
    pub(super) has_text: bool,
}

/// `text` as a terminal.
pub(super) fn literal(text: &str) -> String {
    json!(text).to_string()
}

impl Lark<'_> {
    pub(super) fn rule(&mut self, name: &str, body: &str) {
        self.rules += &format!("{name}: {body}\n");
    }

    /// An error once the grammar is longer than can be compiled: subschemas with references carry the whole schema.
    pub(super) fn check_size(&self) -> Result<(), GrammarError> {
        match self.rules.len() {
            0..=MAX_BYTES => Ok(()),
            bytes => Err(GrammarError::TooLarge {
                bytes,
                limit: MAX_BYTES,
            }),
        }
    }

    /// A mark as the special token that it is, or as text.
    pub(super) fn mark(&self, mark: &str) -> String {
        match (self.token)(mark) {
            Some(id) => format!("<[{id}]>"),
            None => literal(mark),
        }
    }

    /// What begins the first call, and the rest of all calls.
    fn calls(
        &mut self,
        format: ToolFormat,
        grammar: &CallGrammar<'_>,
    ) -> Result<(String, String), GrammarError> {
        let names: Vec<_> = (0..grammar.functions.len())
            .map(|i| format!("call_{i}"))
            .collect();
        for (name, function) in names.iter().zip(grammar.functions) {
            let body = self.call(format, name, function)?;
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
            ToolFormat::Gemma4 => list(&open),
            ToolFormat::Mistral => format!("\" \"? \"[\" {} \"]\"", list("\", \"")),
            ToolFormat::Phi4Mini => format!("\"[\" {} \"]\" {}", list("\", \""), self.mark("<|/tool_call|>")),
            ToolFormat::LlamaJson => list("\"; \""),
            ToolFormat::Pythonic => format!("\"[\" {} \"]\"", list("\", \"")),
            // It has grammars of whole answers.
            ToolFormat::Harmony => list(""),
            ToolFormat::Json if grammar.several => "(call | \"[\" call (\", \" call)+ \"]\")".to_owned(),
            ToolFormat::Json => list(""),
        };
        Ok((open, calls))
    }

    /// Mistral's newer models have a token between name and arguments.
    fn has_args(&self) -> bool {
        (self.token)("[ARGS]").is_some()
    }

    fn call(&mut self, format: ToolFormat, rule: &str, function: &Function) -> Result<String, GrammarError> {
        let name = json!(function.name);
        let object = |key: &str| literal(&format!("{{\"name\": {name}, \"{key}\": "));
        let (head, tail) = match format {
            ToolFormat::Pythonic => return self.python(rule, function),
            ToolFormat::QwenCoder => return self.xml(rule, function),
            ToolFormat::Gemma4 => return self.gemma4(rule, function),
            ToolFormat::Hermes => {
                let head = format!("\n{{\"name\": {name}, \"arguments\": ");
                (literal(&head), format!("\"}}\\n\" {}", self.mark("</tool_call>")))
            }
            ToolFormat::LlamaJson => (object("parameters"), literal("}")),
            ToolFormat::Mistral if self.has_args() => {
                let head = format!("{} {}", literal(&function.name), self.mark("[ARGS]"));
                (head, String::new())
            }
            ToolFormat::Mistral | ToolFormat::Phi4Mini | ToolFormat::Json | ToolFormat::Harmony => {
                (object("arguments"), literal("}"))
            }
        };
        Ok(format!("{head} {} {tail}", self.arguments(rule, function)))
    }

    pub(super) fn arguments(&mut self, rule: &str, function: &Function) -> String {
        if function.parameters.is_empty() {
            return literal("{}");
        }
        let name = format!("{rule}_arguments");
        let mut schema = function.parameters.clone();
        schema.entry("type").or_insert_with(|| json!("object"));
        self.schema(&name, schema, function.strict, None);
        name
    }

    /// `whitespace`: a regular expression of the whitespace between tokens, empty for none, or the default.
    pub(super) fn schema(
        &mut self,
        rule: &str,
        mut schema: Map<String, Value>,
        strict: bool,
        whitespace: Option<&str>,
    ) {
        let whitespace = Some(whitespace.unwrap_or(WHITESPACE)).filter(|pattern| !pattern.is_empty());
        let options = json!({
            "lenient": !strict,
            "coerce_one_of": !strict,
            "whitespace_flexible": whitespace.is_some(),
            "whitespace_pattern": whitespace,
        });
        schema.insert("x-guidance".to_owned(), options);
        let mut schema = Value::Object(schema);
        close_objects(&mut schema);
        self.rule(rule, &format!("%json {schema}"));
    }
}
