//! Parses a model's output into reasoning, content and tool calls. It is read character by character, so that the result does
//! not depend on how the text was split.

mod harmony;
mod json;
mod mark;
mod position;
mod reasoning;
mod sink;
mod tools;

use std::sync::Arc;

use harmony::Harmony;
pub use position::Position;
pub use reasoning::ReasoningFormat;
use reasoning::{Region, Splitter};
use sink::Sink;
use tools::Syntax;
pub use tools::{CallGrammar, Function, JsonAnswer, ToolFormat};

/// A part of an answer. Consecutive parts of the same kind continue each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Reasoning before the answer.
    Reasoning(String),
    /// The answer's text.
    Content(String),
    /// A call begins.
    Call {
        /// Name of the function, whole.
        name: String,
    },
    /// More of the arguments of the last call, as JSON text.
    Arguments(String),
}

/// Format of a model's output.
#[derive(Clone, Debug, Default)]
pub struct AnswerFormat {
    /// How reasoning is marked, if the model reasons.
    pub reasoning: Option<ReasoningFormat>,
    /// Where in an answer the prompt ends: the template may have begun it.
    pub position: Position,
    /// Format of tool calls; without it all is text.
    pub tools: Option<ToolFormat>,
    /// Functions that the model may call.
    pub functions: Arc<[Function]>,
    /// Maximum number of calls; the answer ends before the next one.
    pub max_calls: Option<usize>,
}

/// Parses a model's output incrementally. No text is lost: what looks like a call but is none is content.
#[derive(Debug)]
pub struct AnswerParser {
    splitter: Option<Splitter>,
    tools: Option<Box<dyn Syntax>>,
    sink: Sink,
}

impl AnswerParser {
    /// Reads a text of this format from its beginning.
    pub fn new(format: &AnswerFormat) -> Self {
        let AnswerFormat { reasoning, tools, .. } = format;
        let sink = Sink::new(tools.is_some(), format.max_calls);
        // Its channels hold reasoning and calls alike.
        if *reasoning == Some(ReasoningFormat::Harmony) || *tools == Some(ToolFormat::Harmony) {
            let functions = tools.map(|_| Arc::clone(&format.functions));
            return Self {
                splitter: None,
                tools: Some(Box::new(Harmony::new(
                    format.position,
                    reasoning.is_some(),
                    functions,
                ))),
                sink,
            };
        }
        let call = tools.and_then(ToolFormat::opening);
        let is_open = format.position == Position::Reasoning;
        let splitter = reasoning.map(|marks| Splitter::new(marks, is_open, call));
        let tools = tools.map(|tools| tools.parser(Arc::clone(&format.functions)));
        Self {
            splitter,
            tools,
            sink,
        }
    }

    /// Adds text; returns the parts that are certain.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        text.chars().for_each(|c| self.take(c));
        self.sink.drain()
    }

    /// Ends the text; returns what was held back.
    pub fn finish(&mut self) -> Vec<Part> {
        self.end(false)
    }

    /// Ends a text that was cut off: as [`Self::finish`], but an incomplete call behind a mark is left out.
    pub fn cut_off(&mut self) -> Vec<Part> {
        self.end(true)
    }

    fn end(&mut self, cut_off: bool) -> Vec<Part> {
        if let Some(splitter) = &mut self.splitter {
            let mut rest = String::new();
            let region = splitter.finish(&mut rest);
            self.give(region, &rest);
        }
        match &mut self.tools {
            Some(tools) if cut_off => tools.cut_off(&mut self.sink),
            Some(tools) => tools.finish(&mut self.sink),
            None => {}
        }
        self.sink.finish();
        self.sink.drain()
    }

    /// True once there are too many calls: the rest of the text is not part of the answer.
    pub fn is_full(&self) -> bool {
        self.sink.is_full()
    }

    /// True while the model reasons.
    pub fn in_reasoning(&self) -> bool {
        self.splitter.as_ref().is_some_and(Splitter::is_inside)
            || self.tools.as_ref().is_some_and(|tools| tools.in_reasoning())
    }

    fn take(&mut self, c: char) {
        let mut text = String::new();
        let region = match &mut self.splitter {
            Some(splitter) => splitter.take(c, &mut text),
            None => {
                text.push(c);
                Region::Answer
            }
        };
        self.give(region, &text);
    }

    fn give(&mut self, region: Region, text: &str) {
        match (region, &mut self.tools) {
            (Region::Reasoning, _) => self.sink.reasoning(text),
            (Region::Answer, Some(tools)) => text.chars().for_each(|c| tools.take(c, &mut self.sink)),
            (Region::Answer, None) => self.sink.contents(text),
        }
    }
}
