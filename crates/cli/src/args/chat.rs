//! How answers of chats are read.

use clap::Args;
use clap::builder::PossibleValuesParser;
use plimsoll_server::AnswerStyle;
use plimsoll_text::{ChatTemplate, ReasoningFormat, ToolFormat};

/// Tools and reasoning.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Chat")]
pub struct ChatArgs {
    /// Format of the model's tool calls [default: detected from its chat template]
    #[arg(long, value_name = "FORMAT", value_parser = tool_formats())]
    tool_call_parser: Option<String>,
    /// Format of the model's reasoning; none keeps it in the content [default: detected from its chat template]
    #[arg(long, value_name = "FORMAT", value_parser = reasoning_formats())]
    reasoning_parser: Option<String>,
    /// Allow tool_choice auto, where the model decides whether to call a tool (the default)
    #[arg(long, overrides_with = "no_enable_auto_tool_choice")]
    enable_auto_tool_choice: bool,
    /// Refuse requests with tool_choice auto
    #[arg(long, overrides_with = "enable_auto_tool_choice")]
    no_enable_auto_tool_choice: bool,
    /// Allow requests with their own `chat_template`, a program that can occupy a core for 20 s and 512 MiB of memory
    #[arg(long, overrides_with = "no_trust_request_chat_template")]
    pub trust_request_chat_template: bool,
    /// Refuse requests with a `chat_template` (the default)
    #[arg(long, overrides_with = "trust_request_chat_template", hide = true)]
    no_trust_request_chat_template: bool,
}

impl ChatArgs {
    /// What the flags say, and the template where they are silent.
    pub fn answer_style(&self, template: Option<&ChatTemplate>) -> AnswerStyle {
        let detected = AnswerStyle::detect(template);
        let tools = self.tool_call_parser.as_deref();
        let tools = tools.and_then(|wanted| named(ToolFormat::NAMES, wanted));
        let reasoning = match self.reasoning_parser.as_deref() {
            Some(wanted) => named(ReasoningFormat::NAMES, wanted),
            None => detected.reasoning,
        };
        AnswerStyle {
            tools: tools.or(detected.tools),
            reasoning,
            auto_tool_choice: !self.no_enable_auto_tool_choice,
        }
    }
}

/// Leaves reasoning in the content.
const NONE: &str = "none";

fn tool_formats() -> PossibleValuesParser {
    PossibleValuesParser::new(ToolFormat::NAMES.iter().map(|(name, _)| *name))
}

fn reasoning_formats() -> PossibleValuesParser {
    let names = ReasoningFormat::NAMES.iter().map(|(name, _)| *name);
    PossibleValuesParser::new(names.chain([NONE]))
}

fn named<T: Copy>(names: &[(&str, T)], wanted: &str) -> Option<T> {
    names
        .iter()
        .find(|(name, _)| *name == wanted)
        .map(|&(_, format)| format)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use plimsoll_text::{Renderer, SpecialTokens};

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        chat: ChatArgs,
    }

    fn style(line: &[&str], template: &str) -> AnswerStyle {
        let words = ["x"].iter().chain(line);
        let chat = Line::try_parse_from(words).unwrap().chat;
        let template = ChatTemplate::new(template, &SpecialTokens::new(), &Renderer::in_process());
        chat.answer_style(Some(&template.unwrap()))
    }

    #[test]
    fn flags_win_over_the_template() {
        const QWEN: &str = "{{ tools|tojson }}<tool_call>\n{arguments}</tool_call></think>";
        let found = style(&[], QWEN);
        assert_eq!(
            (found.tools, found.reasoning, found.auto_tool_choice),
            (Some(ToolFormat::Hermes), Some(ReasoningFormat::Think), true)
        );
        assert_eq!(
            style(&["--tool-call-parser", "mistral"], QWEN).tools,
            Some(ToolFormat::Mistral)
        );
        assert_eq!(style(&["--reasoning-parser", "none"], QWEN).reasoning, None);
        assert!(!style(&["--no-enable-auto-tool-choice"], QWEN).auto_tool_choice);
        // A template without tools, and one whose calls are in no known format.
        assert_eq!(style(&[], "x").tools, Some(ToolFormat::Json));
        assert_eq!(style(&[], "{{ tools|tojson }}").tools, None);
        assert!(Line::try_parse_from(["x", "--tool-call-parser", "nonsense"]).is_err());
    }
}
