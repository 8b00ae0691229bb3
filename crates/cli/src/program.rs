//! The program: chooses the command, runs it, and says how it ended.

use std::io::Write;
use std::process::ExitCode;

use crate::args::{BenchCommand, Cli, Command};
use crate::command_line::CommandLine;
use crate::logging::{self, Kind};
use crate::{
    Error, bench, chat, config, exit, hub, layers, models, plan, selftest, serve, templates, terminal,
};

/// Runs the command that the process was started with. It is here and not in the binary, so that what it runs is compiled once,
/// with this crate.
pub fn main() -> ExitCode {
    match templates::render_if_asked().unwrap_or_else(start) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn start() -> Result<(), Error> {
    let cli = layers::from_process()?;
    if cli.command.may_download() {
        hub::disable_telemetry()?;
    }
    let runtime = tokio::runtime::Runtime::new()?;
    let result = runtime.block_on(run(cli));
    // Work that goes on has a bar of its own.
    logging::end_bars();
    // What still works is not waited for: it may wait for a device that hangs.
    runtime.shutdown_background();
    if let Err(error) = &result
        && error.leaves_work_behind()
    {
        exit::at_the_latest();
    }
    result
}

async fn run(cli: Cli) -> Result<(), Error> {
    match cli.command {
        Command::Serve(args) => {
            logging::init(&args.engine.log, Kind::Server)?;
            serve::serve(*args).await
        }
        Command::Chat(args) => chat::run(*args).await,
        Command::Pull(args) => {
            logging::init(&args.log, Kind::Command)?;
            models::pull(*args).await
        }
        Command::List(args) => {
            logging::init(&args.engine.log, Kind::Command)?;
            models::list(*args).await
        }
        Command::Rm(args) => models::rm(args).await,
        Command::Profile(args) => {
            logging::init(&args.serve.engine.log, Kind::Command)?;
            plan::profile(*args).await
        }
        Command::Plan(args) => {
            logging::init(&args.serve.engine.log, Kind::Command)?;
            plan::plan(*args, std::env::args_os()).await
        }
        Command::Config(args) => config::print(&args, &layers::settings_of_process()?),
        Command::Bench(BenchCommand::Serve(args)) => bench::serve(*args).await,
        Command::Bench(BenchCommand::Latency(args)) => bench::latency(*args).await,
        Command::Bench(BenchCommand::Throughput(args)) => bench::throughput(*args).await,
        Command::Selftest(args) => selftest::run(*args).await,
    }
}

/// The last word of the process, whatever the log level.
fn report(error: &Error) {
    // Held to the end of the process: what still works logs nothing behind it.
    let mut stderr = std::io::stderr().lock();
    match error {
        Error::Clap(inner) if logging::is_json() && inner.use_stderr() => {
            let text = inner.render().to_string();
            let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
            logging::last_word(text, error.exit_code());
        }
        // It knows its colours, and that help goes to stdout.
        Error::Clap(error) => {
            let _ = error.print();
        }
        error if logging::is_json() => {
            logging::last_word(&CommandLine::of_process().explain(error), error.exit_code());
        }
        // It may be that there is nobody to read it.
        error => {
            let text = format!("error: {}", CommandLine::of_process().explain(error));
            let _ = writeln!(stderr, "{}", terminal::prose(&text));
        }
    }
    std::mem::forget(stderr);
}
