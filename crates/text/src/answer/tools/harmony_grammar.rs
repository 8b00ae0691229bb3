//! Grammars of answers in the Harmony format: reasoning and text on their channels, then a call or what the client wants.

use plimsoll_core::TokenId;

use super::super::position::Position;
use super::write::{CallGrammar, Lark, literal};
use crate::grammar::GrammarError;
use crate::harmony::{
    ANALYSIS, ASSISTANT, CHANNEL, COMMENTARY, CONSTRAIN, END, FINAL, MESSAGE, NAMESPACE, START,
};

/// Rule of JSON in place of a call, and of any text of a message.
const OTHER: &str = "other";
const TEXT: &str = "text";
const ANY_TEXT: &str = "/(?s:.*)/";

impl Lark<'_> {
    /// An answer with a call of one of the functions, which ends it; in place of the call it may end as `grammar` says.
    pub(super) fn harmony(mut self, grammar: &CallGrammar<'_>) -> Result<String, GrammarError> {
        let last = match grammar.or_json {
            Some(json) => {
                self.schema(OTHER, json.schema.clone(), json.strict, json.whitespace);
                Some(OTHER)
            }
            None => grammar.is_begun.then_some(TEXT),
        };
        // A message for the user that the prompt begins can be the last one.
        let now = match (grammar.position, last) {
            (Position::Answer, Some(OTHER)) => return Ok(format!("start: {OTHER}\n{}", self.rules)),
            (Position::Answer, Some(_)) => format!("{TEXT} | "),
            _ => String::new(),
        };
        let marks = Marks::new(self.token);
        let mut lasts: Vec<_> = last
            .map(|rule| format!("{} {rule}", marks.last_header()))
            .into_iter()
            .collect();
        for (index, function) in grammar.functions.iter().enumerate() {
            let rule = format!("call_{index}");
            let arguments = self.arguments(&rule, function);
            self.rule(
                &rule,
                &format!("{} {arguments}", marks.call_header(&function.name)),
            );
            self.check_size()?;
            lasts.push(rule);
        }
        let channels = format!("({} | {})", literal(ANALYSIS), literal(COMMENTARY));
        Ok(format!(
            "start: {now}{} message* last\nlast: {}\n{}{}",
            marks.begin(grammar.position),
            lasts.join(" | "),
            marks.rules(&channels),
            self.rules,
        ))
    }
}

/// A grammar of all that comes before the text of the last message of an answer without calls.
pub(crate) fn lead(position: Position, token: &dyn Fn(&str) -> Option<TokenId>) -> String {
    let marks = Marks::new(token);
    let (begin, header) = (marks.begin(position), marks.last_header());
    format!(
        "start: {begin} message* {header}\n{}",
        marks.rules(&literal(ANALYSIS))
    )
}

/// The marks as terminals.
struct Marks {
    start: String,
    channel: String,
    constrain: String,
    message: String,
    /// The rule of a message's text with its end.
    ended: String,
}

impl Marks {
    /// `token` gives the special token of a mark, if it is one.
    fn new(token: &dyn Fn(&str) -> Option<TokenId>) -> Self {
        let mark = |mark: &str| token(mark).map_or_else(|| literal(mark), |id| format!("<[{id}]>"));
        Self {
            start: mark(START),
            channel: mark(CHANNEL),
            constrain: mark(CONSTRAIN),
            message: mark(MESSAGE),
            // Text never matches a special token; with any other mark it ends where that comes first.
            ended: match token(END) {
                Some(_) => format!("ended: {TEXT} {}", mark(END)),
                None => format!("ended[suffix={}]: {ANY_TEXT}", literal(END)),
            },
        }
    }

    /// The header of a call. Models name the recipient in either of two places.
    fn call_header(&self, name: &str) -> String {
        let Self {
            channel,
            constrain,
            message,
            ..
        } = self;
        let recipient = format!(" to={NAMESPACE}{name}");
        format!(
            "({channel} {} | {} {channel} {}) \" \"? {constrain} \"json\" {message}",
            literal(&format!("{COMMENTARY}{recipient}")),
            literal(&recipient),
            literal(COMMENTARY),
        )
    }

    /// The header of the message that answers the user.
    fn last_header(&self) -> String {
        let Self {
            channel,
            constrain,
            message,
            ..
        } = self;
        format!(
            "{channel} {} (\" \"? {constrain} \"json\")? {message}",
            literal(FINAL)
        )
    }

    /// The rest of the message that the prompt begins, if it does, up to where the next one begins.
    fn begin(&self, position: Position) -> String {
        let assistant = format!("{} {}", self.start, literal(ASSISTANT));
        match position {
            Position::Before => format!("({assistant})?"),
            Position::Reasoning | Position::Answer => format!("ended {assistant}"),
        }
    }

    /// Rules of whole messages on one of `channels`, and of texts.
    fn rules(&self, channels: &str) -> String {
        let Self {
            start,
            channel,
            message,
            ended,
            ..
        } = self;
        let assistant = literal(ASSISTANT);
        format!(
            "message: {channel} {channels} {message} ended {start} {assistant}\n{ended}\n{TEXT}: {ANY_TEXT}\n"
        )
    }
}
