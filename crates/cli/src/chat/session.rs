//! A conversation, and the commands that change it.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};

use super::{Asked, SamplingArgs, Server};
use crate::error::Error;

/// What /help says.
const COMMANDS: &str = "\
/system TEXT  set the system prompt, or show it
/save FILE    write the chat as Markdown or .json
/clear        forget all but the system prompt
/help         this list
/exit         end the chat (also Ctrl-D)
\"\"\"           around a message of several lines
Ctrl-C        stops an answer";

/// Names of the commands, for completion.
pub(super) const NAMES: [&str; 5] = ["/system ", "/save ", "/clear", "/help", "/exit"];

/// Around messages of several lines.
pub(super) const QUOTES: &str = "\"\"\"";

/// What a line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// Say this to the model.
    Say(String),
    System(String),
    Save(PathBuf),
    Clear,
    Help,
    Exit,
    Nothing,
}

impl Command {
    /// What a line, or several between quotes, ask for.
    ///
    /// # Errors
    /// What is wrong, for people.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let trimmed = text.trim();
        if let Some(rest) = trimmed.strip_prefix(QUOTES) {
            let inner = rest.strip_suffix(QUOTES).unwrap_or(rest).trim_matches('\n');
            return Ok(match inner.trim() {
                "" => Self::Nothing,
                _ => Self::Say(inner.to_owned()),
            });
        }
        let (name, rest) = trimmed.split_once(char::is_whitespace).unwrap_or((trimmed, ""));
        let rest = rest.trim();
        // A path is no command.
        let is_name = |name: &str| name.len() > 1 && name[1..].bytes().all(|b| b.is_ascii_alphabetic());
        Ok(match (name, rest) {
            ("", _) => Self::Nothing,
            ("/system", text) => Self::System(text.to_owned()),
            ("/save", "") => return Err("/save needs the name of a file".to_owned()),
            ("/save", file) => Self::Save(file.into()),
            ("/clear", "") => Self::Clear,
            ("/help" | "/?", "") => Self::Help,
            ("/exit" | "/quit" | "/bye", "") => Self::Exit,
            ("/clear" | "/help" | "/exit", _) => return Err(format!("{name} takes nothing after it")),
            (name, _) if name.starts_with('/') && is_name(name) => {
                return Err(format!("there is no {name}: /help lists the commands"));
            }
            _ => Self::Say(trimmed.to_owned()),
        })
    }
}

#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
struct Message {
    role: &'static str,
    content: String,
}

/// Everything said so far, and to whom.
#[derive(Debug)]
pub(super) struct Session {
    server: Server,
    sampling: SamplingArgs,
    system: Option<String>,
    messages: Vec<Message>,
    /// The answer that is coming.
    answer: String,
    /// Files that this session wrote, which it may write again.
    saved: BTreeSet<PathBuf>,
}

impl Session {
    pub(super) fn new(server: Server, system: Option<String>, sampling: SamplingArgs) -> Self {
        Self {
            server,
            sampling,
            system,
            messages: Vec::new(),
            answer: String::new(),
            saved: BTreeSet::new(),
        }
    }

    /// The first line of a chat.
    pub(super) fn greeting(&self) -> String {
        let Server { title, place, .. } = &self.server;
        format!("chat with {title} {place}; /help lists commands, Ctrl-D ends")
    }

    /// The user says something.
    pub(super) fn ask(&mut self, text: String) {
        self.messages.push(Message {
            role: "user",
            content: text,
        });
    }

    /// Sends what was said.
    ///
    /// # Errors
    /// Where the server does not answer, or refuses.
    pub(super) async fn send(&self) -> Result<Asked, Error> {
        self.server.chat(&self.body()).await
    }

    /// A part of the answer came.
    pub(super) fn hear(&mut self, text: &str) {
        self.answer.push_str(text);
    }

    /// The answer has ended. A question without one is forgotten: it can be asked again.
    pub(super) fn answered(&mut self) {
        match std::mem::take(&mut self.answer) {
            empty if empty.is_empty() => {
                self.messages.pop();
            }
            content => self.messages.push(Message {
                role: "assistant",
                content,
            }),
        }
    }

    fn all(&self) -> Vec<Message> {
        let system = self.system.iter().map(|text| Message {
            role: "system",
            content: text.clone(),
        });
        system.chain(self.messages.iter().cloned()).collect()
    }

    fn body(&self) -> Value {
        let SamplingArgs {
            temperature,
            top_p,
            max_tokens,
            seed,
        } = self.sampling;
        let mut body = json!({
            "model": self.server.model,
            "messages": self.all(),
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let parameters = [
            ("temperature", temperature.map(Value::from)),
            ("top_p", top_p.map(Value::from)),
            ("max_tokens", max_tokens.map(Value::from)),
            ("seed", seed.map(Value::from)),
        ];
        for (name, value) in parameters {
            if let Some(value) = value {
                body[name] = value;
            }
        }
        body
    }

    /// Does what a command asks for; what to tell about it.
    pub(super) fn obey(&mut self, command: Command) -> String {
        match command {
            Command::System(text) if text.is_empty() => match &self.system {
                Some(text) => text.clone(),
                None => "there is no system prompt: /system TEXT sets one".to_owned(),
            },
            Command::System(text) => {
                self.system = Some(text);
                "set the system prompt".to_owned()
            }
            Command::Clear => {
                self.messages.clear();
                "forgot the chat".to_owned()
            }
            Command::Save(path) => match self.save(&path) {
                Ok(()) => format!("wrote {} messages to {}", self.all().len(), path.display()),
                Err(error) => format!("cannot write {}: {error}", path.display()),
            },
            Command::Help => COMMANDS.to_owned(),
            Command::Say(_) | Command::Exit | Command::Nothing => String::new(),
        }
    }

    fn save(&mut self, path: &Path) -> std::io::Result<()> {
        let all = self.all();
        let text = match path
            .extension()
            .is_some_and(|end| end.eq_ignore_ascii_case("json"))
        {
            true => format!("{:#}\n", json!({"model": self.server.model, "messages": all})),
            false => markdown(&all),
        };
        let mut options = OpenOptions::new();
        match self.saved.contains(path) {
            true => options.write(true).create(true).truncate(true),
            // Whatever else is there is somebody's.
            false => options.write(true).create_new(true),
        };
        options.open(path)?.write_all(text.as_bytes())?;
        self.saved.insert(path.to_owned());
        Ok(())
    }
}

fn markdown(messages: &[Message]) -> String {
    let title = |role: &str| match role {
        "system" => "System",
        "user" => "User",
        _ => "Assistant",
    };
    let parts = messages
        .iter()
        .map(|Message { role, content }| format!("## {}\n\n{}\n", title(role), content.trim()));
    parts.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_begin_with_a_slash() {
        let say = |text: &str| Ok(Command::Say(text.to_owned()));
        for (line, expected) in [
            ("  hello ", say("hello")),
            ("", Ok(Command::Nothing)),
            ("/etc/hosts is what?", say("/etc/hosts is what?")),
            ("/", say("/")),
            ("/system  Be brief. ", Ok(Command::System("Be brief.".into()))),
            ("/system", Ok(Command::System(String::new()))),
            ("/save a b.md", Ok(Command::Save("a b.md".into()))),
            ("/clear", Ok(Command::Clear)),
            ("/exit", Ok(Command::Exit)),
            ("\"\"\"\na\n /exit\n\"\"\"", say("a\n /exit")),
            ("\"\"\"\"\"\"", Ok(Command::Nothing)),
        ] {
            assert_eq!(Command::parse(line), expected, "{line:?}");
        }
        for (line, part) in [
            ("/sav x", "/help"),
            ("/save", "a file"),
            ("/clear all", "nothing"),
        ] {
            let problem = Command::parse(line).unwrap_err();
            assert!(problem.contains(part), "{line}: {problem}");
        }
    }

    #[test]
    fn a_chat_is_saved_for_people_and_for_programs() {
        let dir = tempfile::tempdir().unwrap();
        let mut session = session();
        session.obey(Command::System("Be brief.".into()));
        session.ask("Hi".into());
        session.hear("Hel");
        session.hear("lo");
        session.answered();
        // No answer came to this one.
        session.ask("Are you there?".into());
        session.answered();
        let [text, json] = ["chat.md", "chat.json"].map(|name| dir.path().join(name));
        for path in [&text, &json, &text] {
            let said = session.obey(Command::Save(path.clone()));
            assert!(said.starts_with("wrote 3 messages"), "{said}");
        }
        let text = std::fs::read_to_string(text).unwrap();
        assert_eq!(
            text,
            "## System\n\nBe brief.\n\n## User\n\nHi\n\n## Assistant\n\nHello\n"
        );
        let json: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        assert_eq!(
            json["messages"][2],
            json!({"role": "assistant", "content": "Hello"})
        );
        let theirs = dir.path().join("theirs");
        std::fs::write(&theirs, "x").unwrap();
        let said = session.obey(Command::Save(theirs.clone()));
        assert!(said.starts_with("cannot write"), "{said}");
        assert_eq!(std::fs::read(theirs).unwrap(), b"x");
    }

    #[test]
    fn requests_hold_what_was_said_and_set() {
        let mut session = session();
        session.sampling.temperature = Some(0.0);
        session.ask("Hi".into());
        let body = session.body();
        assert_eq!(body["messages"], json!([{"role": "user", "content": "Hi"}]));
        assert_eq!(body["temperature"], json!(0.0));
        assert!(body.get("top_p").is_none());
        session.obey(Command::Clear);
        assert_eq!(session.body()["messages"], json!([]));
    }

    fn session() -> Session {
        let sampling = SamplingArgs {
            temperature: None,
            top_p: None,
            max_tokens: None,
            seed: None,
        };
        Session::new(
            Server::new(reqwest::Client::new(), "http://a", "m"),
            None,
            sampling,
        )
    }
}
