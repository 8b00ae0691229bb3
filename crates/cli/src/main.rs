//! The `plimsoll` binary.

use std::process::ExitCode;

use plimsoll_cli::args::{BenchCommand, Cli, Command};
use plimsoll_cli::command_line::CommandLine;
use plimsoll_cli::{Error, bench, hub, layers, logging, plan, selftest, serve, source};

fn main() -> ExitCode {
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn start() -> Result<(), Error> {
    let cli = layers::from_process()?;
    if cli.command.model().is_some_and(source::is_remote) {
        hub::disable_telemetry()?;
    }
    tokio::runtime::Runtime::new()?.block_on(run(cli))
}

async fn run(cli: Cli) -> Result<(), Error> {
    match cli.command {
        Command::Serve(args) => {
            logging::init(args.engine.log_format);
            serve::serve(*args).await
        }
        Command::Profile(args) => {
            logging::init(args.engine.log_format);
            plan::profile(*args).await
        }
        Command::Plan(args) => {
            logging::init(args.engine.log_format);
            plan::plan(*args, std::env::args()).await
        }
        Command::Bench(BenchCommand::Serve(args)) => bench::serve(*args).await,
        Command::Bench(BenchCommand::Latency(args)) => bench::latency(*args).await,
        Command::Bench(BenchCommand::Throughput(args)) => bench::throughput(*args).await,
        Command::Selftest(args) => selftest::run(*args).await,
    }
}

#[allow(
    clippy::print_stderr,
    reason = "the last word of the process, whatever the log level"
)]
fn report(error: &Error) {
    match error {
        // It knows its colours, and that help goes to stdout.
        Error::Clap(error) => {
            let _ = error.print();
        }
        error => eprintln!("error: {}", CommandLine::of_process().explain(error)),
    }
}
