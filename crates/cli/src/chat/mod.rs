//! `plimsoll chat`: a chat in the terminal, with a server that runs or one of its own.

mod ask;
mod connect;
mod input;
mod own_server;
mod print;
mod session;

use std::future::Future;
use std::io::{IsTerminal, Read, stdin, stdout};
use std::pin::pin;

use clap::Args;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

use self::ask::{Asked, Piece, Server};
use self::input::{Editor, Line, TerminalMode};
use self::own_server::OwnServer;
use self::print::{Note, Printer};
use self::session::{Command, Session};
use crate::args::{positive, whole};
use crate::client::ClientArgs;
use crate::display;
use crate::error::Error;
use crate::signals::Signal;
use crate::terminal;

/// Where a server listens by default.
const DEFAULT_URL: &str = "http://127.0.0.1:8000";

/// `plimsoll chat`.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true, after_help = HELP)]
pub struct ChatCommandArgs {
    /// Model to chat with; `serve` says what it can be [default: the one that the running server serves]
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    /// URL of a running server, or unix:PATH of its socket. Without this flag it is http://127.0.0.1:8000, and if no server answers there, the chat starts its own
    /// for MODEL
    #[arg(long, value_name = "URL", conflicts_with = "own_server")]
    url: Option<String>,
    /// Start a server for MODEL even if one runs
    #[arg(long, requires = "model")]
    own_server: bool,
    /// Credentials for the server.
    #[command(flatten)]
    client: ClientArgs,
    /// System prompt
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// What answers are sampled by.
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Flags of `serve` for a server that the chat starts, such as -- --device cpu
    #[arg(last = true, value_name = "SERVE FLAGS")]
    serve_flags: Vec<String>,
}

/// Sampling parameters; what is left out is the server's default.
#[derive(Clone, Debug, Args)]
struct SamplingArgs {
    /// Sampling temperature; 0 always takes the most likely token [default: the server's]
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
    /// Sample from the most likely tokens that have this probability together [default: the server's]
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Maximum number of tokens of an answer [default: what the context leaves]
    #[arg(long, value_name = "N", value_parser = positive)]
    max_tokens: Option<usize>,
    /// Seed, to get the same answers again
    #[arg(long, value_name = "SEED", value_parser = whole::<u64>)]
    seed: Option<u64>,
}

const HELP: &str = "\
At the prompt, /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat.

If standard input is not a terminal, all of it is one message, and the answer is plain text: echo 'What is a load line?' | plimsoll chat

A server that the chat starts listens on a private socket, serves one request at a time unless -- --max-num-seqs says otherwise, and ends with the chat.";

/// Chats until the user has enough.
///
/// # Errors
/// Where there is no server, or none for MODEL, and where a single question is not answered.
pub async fn run(args: ChatCommandArgs) -> Result<(), Error> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    // A signal may come while the line editor has it.
    let mode = TerminalMode::saved();
    let mut own = None;
    let result = {
        let chat = pin!(chat(args, &mode, &mut own));
        tokio::select! {
            result = chat => result,
            _ = terminate.recv() => Err(Error::Stopped(Signal::Terminate)),
            _ = hangup.recv() => Err(Error::Stopped(Signal::Hangup)),
        }
    };
    match own {
        Some(server) => server.stop().await.and(result),
        None => result,
    }
}

async fn chat(args: ChatCommandArgs, mode: &TerminalMode, own: &mut Option<OwnServer>) -> Result<(), Error> {
    let interactive = stdin().is_terminal() && stdout().is_terminal();
    // Read first: whoever writes it may take its time, and an empty one needs no server.
    let question = match interactive {
        true => None,
        false => Some(tokio::task::spawn_blocking(whole_input).await??),
    };
    let mut interrupt = signal(SignalKind::interrupt())?;
    if interactive {
        mode.keep_keys_for_the_editor()?;
    }
    let server = {
        let connected = connect::connect(&args, own);
        unless(&mut interrupt, connected)
            .await
            .unwrap_or(Err(Error::Stopped(Signal::Interrupt)))?
    };
    let session = Session::new(server, args.system, args.sampling);
    match question {
        None => converse(session, mode, &mut interrupt, own).await,
        Some(question) => answer_once(session, question, &mut interrupt).await,
    }
}

/// The result, unless the signal comes first.
async fn unless<T>(interrupt: &mut Stream, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        done = work => Some(done),
        _ = interrupt.recv() => None,
    }
}

fn whole_input() -> Result<String, Error> {
    let mut text = String::new();
    stdin().read_to_string(&mut text)?;
    match text.trim() {
        "" => Err(Error::configuration(
            "standard input",
            "it is empty: pipe a message into it, or start the chat on a terminal",
        )),
        text => Ok(text.to_owned()),
    }
}

/// One question, and its answer as plain text.
async fn answer_once(mut session: Session, question: String, interrupt: &mut Stream) -> Result<(), Error> {
    session.ask(question);
    let mut printer = Printer::plain(stdout().is_terminal());
    let answered = unless(interrupt, stream(&mut session, &mut printer)).await;
    printer.finish()?;
    match answered {
        None => Err(Error::Stopped(Signal::Interrupt)),
        Some(answered) => {
            let asked = answered?;
            if let Some(why) = asked.cut_off() {
                Note::stderr(why);
            }
            Ok(())
        }
    }
}

/// The chat with a person.
async fn converse(
    mut session: Session,
    mode: &TerminalMode,
    interrupt: &mut Stream,
    own: &mut Option<OwnServer>,
) -> Result<(), Error> {
    let styled = display::is_styled();
    let note = Note::on_terminal(styled);
    let mut editor = Editor::new(styled)?;
    editor.problem().iter().for_each(|text| note.say(text));
    note.say(&terminal::fitted(&session.greeting()));
    loop {
        // Again, as a shell sets its own mode when it continues what Ctrl-Z has stopped.
        mode.keep_keys_for_the_editor()?;
        let (back, line) = editor.read().await?;
        editor = back;
        editor.problem().iter().for_each(|text| note.say(text));
        let text = match line {
            Line::End => return Ok(()),
            Line::Interrupted => {
                note.say("Ctrl-D or /exit ends the chat");
                continue;
            }
            Line::Text(text) => text,
        };
        match Command::parse(&text) {
            Ok(Command::Exit) => return Ok(()),
            Ok(Command::Nothing) => {}
            Ok(Command::Say(text)) => {
                session.ask(text);
                let mut printer = Printer::for_people(styled);
                let answered = unless(interrupt, stream(&mut session, &mut printer)).await;
                printer.finish()?;
                match answered {
                    None => note.say("stopped"),
                    Some(Ok(asked)) => note.say(&asked.summary()),
                    Some(Err(problem)) => note.say(&format!("error: {problem}")),
                }
                session.answered();
                if let Some(server) = own {
                    server.check()?;
                }
            }
            Ok(command) => note.say(&session.obey(command)),
            Err(problem) => note.say(&problem),
        }
    }
}

/// Asks, and prints the answer as it comes; it is kept as far as it came.
async fn stream(session: &mut Session, printer: &mut Printer) -> Result<Asked, Error> {
    let mut asked = session.send().await?;
    while let Some(piece) = asked.next().await? {
        match piece {
            Piece::Reasoning(text) => printer.reasoning(&text)?,
            Piece::Content(text) => {
                printer.content(&text)?;
                session.hear(&text);
            }
        }
    }
    Ok(asked)
}
