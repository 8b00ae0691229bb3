//! `plimsoll plan`: what a server would need and how large its KV cache would be, without loading a model; and
//! `plimsoll profile`, which measures that and says how far off the plan is.

use std::ffi::OsString;
use std::sync::Arc;

use plimsoll_core::Component;
use plimsoll_profiler::{Compared, Prediction, Report, comparison_table};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::{PlanArgs, ProfileArgs};
use crate::backend::{self, Device};
use crate::bytes::Bytes;
use crate::command_line::CommandLine;
use crate::error::Error;
use crate::serve::{open_timed, resolve_timed, say};
use crate::serve_settings::check_names;
use crate::settings::EngineSettings;
use crate::source::{Source, resolve_config};
use crate::start::{Loaded, StartTimes, Text, predict, report_json, with_enough_memory};
use crate::terminal;

/// The exit code that says so.
const DOES_NOT_FIT: u8 = 4;

/// Predicts what fits, and says so. `argv` is the command line, to say how to serve.
///
/// # Errors
/// As [`profile`] would end with, as far as configuration and device tell.
pub async fn plan(args: PlanArgs, argv: impl Iterator<Item = OsString>) -> Result<(), Error> {
    check_names(&args.serve)?;
    let settings = Arc::new(EngineSettings::new(args.serve.engine)?);
    let source = resolve_config(&settings).await?;
    if let Source::Files { model, .. } = &source
        && settings.tokenizer.is_none()
        && !settings.is_dummy()
        && Text::is_absent(&source)
    {
        tracing::warn!(
            "{} has no tokenizer.json: plan does not need one, but serve does; use --tokenizer to name one",
            model.display()
        );
    }
    let serve = serve_command(argv);
    let work = move || {
        let device = backend::look(&source, &settings)?;
        let predicted = predict(&settings, &*device);
        if args.json {
            say(&format!(
                "{:#}",
                plan_json(&settings.model, &*device, &predicted, &serve)
            ));
        } else if let Ok(prediction) = &predicted {
            say(&plan_text(&settings.model, &*device, prediction));
            say(&serve);
        }
        predicted.map(|_| ())
    };
    tokio::task::spawn_blocking(work).await?
}

/// Measures what fits, and says so.
///
/// # Errors
/// Where the model cannot be loaded or does not fit.
pub async fn profile(args: ProfileArgs) -> Result<(), Error> {
    check_names(&args.serve)?;
    let mut settings = EngineSettings::new(args.serve.engine)?;
    // It is asked to measure; the next server profits.
    settings.plans = settings.plans.write_only();
    let settings = Arc::new(settings);
    let times = StartTimes::begin();
    let source = resolve_timed(&settings, &times).await?;
    let work = move || {
        let (backend, _lock) = open_timed(&source, &settings, &times)?;
        let prediction = times.measure("prediction", || predicted(&settings, &*backend));
        let proof = Loaded::new(&source, &settings, Arc::clone(&backend), &times)
            .and_then(|loaded| loaded.prove())
            .map_err(|error| with_enough_memory(&settings, &*backend, error))?;
        times.ready();
        let report = proof.report();
        let whole = profile_json(report_json(report, &times), prediction.as_ref(), report);
        settings.report_file.write(&whole)?;
        say(&match args.json {
            true => format!("{whole:#}"),
            false => profile_text(prediction.as_ref(), report),
        });
        Ok(())
    };
    tokio::task::spawn_blocking(work).await?
}

/// What [`plan`] would say on this device. A prediction that fails is no reason not to measure.
fn predicted(settings: &EngineSettings, device: &dyn Device) -> Option<Prediction> {
    match predict(settings, device) {
        Ok(prediction) => Some(prediction),
        Err(error) => {
            let error = match error {
                Error::Predicted(error) => *error,
                error => error,
            };
            // What to do about it is better said by who measured.
            let text = error.to_string();
            let text = text.lines().next().unwrap_or_default();
            tracing::warn!("predicted: {text}; measuring anyway");
            None
        }
    }
}

/// As wide as the terminal.
fn plan_text(model: &str, device: &dyn Device, prediction: &Prediction) -> String {
    let weights = prediction.baseline.components.iter();
    let weights = weights.filter(|line| line.name == Component::Weights.name());
    let weights: u64 = weights.map(|line| line.bytes).sum();
    // What cannot be read was said before.
    let left_out = match device.text_part_of() {
        Ok(Some(name)) => format!("\n  the text of {name}: images are not served"),
        Ok(None) | Err(_) => String::new(),
    };
    terminal::fitted(&format!(
        "predicted for {model} on {}\n  no weights were read and nothing was measured; `plimsoll profile` does\n{}\n  \
         {} of weights, {} bytes of KV a token{left_out}",
        device.name(),
        prediction.table(terminal::stdout_columns()),
        Bytes(weights),
        prediction.kv_bytes_per_token,
    ))
}

fn profile_text(prediction: Option<&Prediction>, report: &Report) -> String {
    let compared = match prediction {
        Some(prediction) => comparison_table(&prediction.compare(report), terminal::stdout_columns()),
        None => "  it was predicted not to fit".to_owned(),
    };
    let table = report.table(terminal::stdout_columns());
    terminal::fitted(&format!("{table}\n{compared}"))
}

fn plan_json(model: &str, device: &dyn Device, predicted: &Result<Prediction, Error>, serve: &str) -> Value {
    let mut whole = match predicted {
        Ok(prediction) => json!(prediction),
        Err(error) => json!({ "error": error.to_string() }),
    };
    whole["model"] = json!(model);
    whole["device"] = json!({
        "kind": device.kind(),
        "name": device.name(),
        "assumed": device.is_assumed(),
    });
    whole["fits"] = match predicted {
        Ok(_) => json!(true),
        Err(error) if error.exit_code() == DOES_NOT_FIT => json!(false),
        Err(_) => Value::Null,
    };
    whole["command"] = json!(serve);
    whole
}

/// The report, with the prediction beside it.
fn profile_json(mut report_json: Value, prediction: Option<&Prediction>, report: &Report) -> Value {
    #[derive(Serialize)]
    struct Beside<'a> {
        #[serde(flatten)]
        prediction: &'a Prediction,
        compared: Vec<Compared>,
    }
    report_json["prediction"] = json!(prediction.map(|prediction| Beside {
        prediction,
        compared: prediction.compare(report),
    }));
    report_json
}

/// The command line that serves what this one plans.
fn serve_command(argv: impl Iterator<Item = OsString>) -> String {
    let mut planned = false;
    let argv = argv.enumerate().filter(|(_, arg)| arg != "--json");
    let argv = argv.map(|(at, arg)| {
        // The first after the program is the subcommand; whatever else is called so is a value.
        match at > 0 && arg == "plan" && !std::mem::replace(&mut planned, true) {
            true => "serve".into(),
            false => arg,
        }
    });
    CommandLine::new(argv).with(&[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_to_serve_is_this_one() {
        let command = |line: &[&str]| serve_command(line.iter().map(OsString::from));
        assert_eq!(
            command(&["plimsoll", "plan", "--json", "a/b", "--max-num-seqs=4"]),
            "plimsoll serve a/b --max-num-seqs=4"
        );
        assert_eq!(
            command(&[
                "./plimsoll",
                "plan",
                "it's here",
                "--tokenizer",
                "plan",
                "--hf-token",
                "secret"
            ]),
            r"./plimsoll serve 'it'\''s here' --tokenizer plan '--hf-token=***'"
        );
    }
}
