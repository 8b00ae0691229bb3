//! `plimsoll list`.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use indicatif::HumanCount;
use plimsoll_model::ModelConfig;
use serde::Serialize;

use crate::args::{ListArgs, LoadFormat};
use crate::backend::Place;
use crate::bytes::Bytes;
use crate::display::{Align, Size, Table};
use crate::error::Error;
use crate::hub::{self, CachedModel, Contents, missing_shard};
use crate::serve::say;
use crate::settings::EngineSettings;
use crate::source::pick;
use crate::start::predict;

/// The exit code that says so.
const DOES_NOT_FIT: u8 = 4;

/// Whether a model can be served here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
enum Fits {
    Yes,
    No,
    /// It cannot be served anywhere.
    Unsupported,
    /// Files are missing.
    Incomplete,
    /// The device does not say.
    Unknown,
}

/// A line of the list.
#[derive(Clone, Debug, Serialize)]
struct Row {
    model: String,
    revisions: Vec<String>,
    commit: String,
    path: String,
    bytes: u64,
    family: Option<&'static str>,
    fits: Fits,
    /// Why not, or how many tokens of KV cache.
    reason: Option<String>,
    kv_tokens: Option<usize>,
    last_used: u64,
}

/// Lists the models of the Hub cache, with whether they fit this device.
///
/// # Errors
/// Where the cache cannot be read, or flags are wrong.
pub async fn list(args: ListArgs) -> Result<(), Error> {
    // One that environment or file name is for serve.
    let only = args.engine.model.typed().map(str::to_owned);
    let settings = EngineSettings::new(args.engine)?;
    let mut cache = hub::models(settings.hub.download_dir.as_deref()).await?;
    if let Some(only) = &only {
        let names = |model: &CachedModel| model.repo == *only || model.name == *only;
        cache.models.retain(names);
        if cache.models.is_empty() {
            let dir = cache.dir.display();
            let message = format!("it is not in the cache ({dir}); `plimsoll list` shows what is");
            return Err(Error::configuration(only, message));
        }
    }
    let work = move || {
        let device = (!cache.models.is_empty()).then(|| Place::look(&settings));
        let rows = cache
            .models
            .iter()
            .map(|model| row(model, &settings, device.as_ref()));
        let rows: Vec<_> = rows.collect();
        let device = device.map(|device| device.map_or_else(|error| error.to_string(), |place| place.name()));
        (cache, rows, device)
    };
    let (cache, rows, device) = tokio::task::spawn_blocking(work).await?;
    if args.json {
        let list = serde_json::json!({
            "cache": cache.dir,
            "device": device,
            "models": rows,
        });
        say(&format!("{list:#}"));
    } else {
        say(&text(&cache, &rows, device.as_deref()));
    }
    Ok(())
}

fn row(model: &CachedModel, settings: &EngineSettings, device: Option<&Result<Place, Error>>) -> Row {
    let mut row = Row {
        model: model.name.clone(),
        revisions: model.refs.clone(),
        commit: model.commit.clone(),
        path: model.path.display().to_string(),
        bytes: model.bytes,
        family: None,
        fits: Fits::Unknown,
        reason: None,
        kv_tokens: None,
        last_used: model
            .last_used
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |time| time.as_secs()),
    };
    let (fits, reason) = judge(model, settings, device, &mut row);
    row.fits = fits;
    row.reason = reason;
    row
}

/// Fills in what is found out on the way.
fn judge(
    model: &CachedModel,
    settings: &EngineSettings,
    device: Option<&Result<Place, Error>>,
    row: &mut Row,
) -> (Fits, Option<String>) {
    let path = &model.path;
    let read = ModelConfig::read(path, &settings.serve_as);
    if let Ok(config) = &read {
        row.family = Some(config.architecture.model_type());
    }
    if let Some(problem) = incomplete(path) {
        return (Fits::Incomplete, Some(problem));
    }
    if let Err(error) = read {
        return (Fits::Unsupported, Some(first_line(&error.to_string(), path)));
    }
    let place = match device {
        Some(Ok(place)) => place,
        Some(Err(_)) | None => return (Fits::Unknown, None),
    };
    let mut settings = settings.clone();
    settings.model.clone_from(&model.name);
    let settings = Arc::new(settings);
    let predicted = place
        .with(path, &settings)
        .and_then(|device| predict(&settings, &*device));
    match predicted {
        Ok(prediction) => {
            row.kv_tokens = Some(prediction.sizing.kv_tokens);
            (Fits::Yes, None)
        }
        Err(error) => {
            let fits = match error.exit_code() {
                DOES_NOT_FIT => Fits::No,
                _ => Fits::Unsupported,
            };
            let error = match error {
                Error::Predicted(error) => *error,
                error => error,
            };
            (fits, Some(first_line(&error.to_string(), path)))
        }
    }
}

/// What a directory lacks of a model.
fn incomplete(path: &Path) -> Option<String> {
    if path.is_file() {
        return None;
    }
    let missing = |name: &str| format!("{name} is missing: `plimsoll pull` fetches it");
    if let Some(shard) = missing_shard(path) {
        return Some(missing(&shard));
    }
    for name in ["config.json", "tokenizer.json"] {
        if !path.join(name).exists() {
            return Some(missing(name));
        }
    }
    match pick(path, LoadFormat::Auto) {
        Ok(_) => None,
        Err(_) => Some(missing("the weights' file")),
    }
}

/// The message without the path, which another column shows.
fn first_line(text: &str, path: &Path) -> String {
    let line = text.lines().next().unwrap_or_default();
    let line = line.replace(&format!("{}/", path.display()), "");
    line.replace(&format!("{}: ", path.display()), "")
}

fn text(cache: &Contents, rows: &[Row], device: Option<&str>) -> String {
    let dir = cache.dir.display();
    if rows.is_empty() {
        return format!("no models in {dir}; `plimsoll pull MODEL` fetches one");
    }
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let cells = rows.iter().map(|row| {
        let revision = match row.revisions.is_empty() {
            true => row.commit.chars().take(7).collect(),
            false => row.revisions.join(","),
        };
        let fits: &str = row.fits.into();
        let note = match (&row.reason, row.kv_tokens) {
            // The list of supported alternatives is only in the JSON.
            (Some(reason), _) => reason.split("; ").next().unwrap_or_default().to_owned(),
            (None, Some(tokens)) => format!("{} tokens of KV cache", HumanCount(tokens as u64)),
            (None, None) => String::new(),
        };
        [
            row.model.clone(),
            revision,
            Bytes(row.bytes).to_string(),
            row.family.unwrap_or("-").to_owned(),
            fits.to_owned(),
            ago(now.saturating_sub(Duration::from_secs(row.last_used))),
            note,
        ]
    });
    let width = match std::io::stdout().is_terminal() {
        true => Size::of_stdout().unwrap_or_default().columns,
        false => usize::MAX,
    };
    let lines = match width < NARROW {
        true => cells
            .map(|cells| paragraph(&cells, width))
            .collect::<Vec<_>>()
            .join("\n"),
        false => {
            let mut table = Table::new(vec![Align::Left, Align::Left, Align::Right]);
            let titles = ["MODEL", "REVISION", "SIZE", "FAMILY", "FITS", "LAST USED", ""];
            table.push(titles.map(str::to_owned).into());
            cells.for_each(|cells| table.push(cells.into()));
            table.layout(width).concat().join("\n")
        }
    };
    let on = device.map_or_else(String::new, |device| format!("; device: {device}"));
    format!("{lines}\n\nin {dir}{on}")
}

/// Columns below which a table would be unreadable.
const NARROW: usize = 80;

/// A model's cells below each other.
fn paragraph([model, revision, size, family, fits, used, note]: &[String; 7], width: usize) -> String {
    let lines = [
        format!("{model} ({revision})"),
        format!("  {size}, {family}, used {used}"),
        match note.is_empty() {
            true => format!("  fits: {fits}"),
            false => format!("  fits: {fits}, {note}"),
        },
    ];
    let options = textwrap::Options::new(width).subsequent_indent("    ");
    lines.map(|line| textwrap::fill(&line, &options)).join("\n")
}

/// A time in the past, in its largest unit.
fn ago(time: Duration) -> String {
    let seconds = time.as_secs();
    let of = |unit: u64, name: &str| match seconds / unit {
        1 => format!("1 {name} ago"),
        count => format!("{count} {name}s ago"),
    };
    match seconds {
        0..60 => "just now".to_owned(),
        60..3600 => of(60, "minute"),
        3600..86_400 => of(3600, "hour"),
        86_400..5_184_000 => of(86_400, "day"),
        5_184_000..63_072_000 => of(2_592_000, "month"),
        _ => of(31_536_000, "year"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_terminals_have_a_paragraph_for_each_model() {
        let cells = [
            "acme/tiny",
            "main",
            "934.1 KiB",
            "llama",
            "incomplete",
            "just now",
            "tokenizer.json: missing",
        ];
        let text = paragraph(&cells.map(str::to_owned), 36);
        let expected = "acme/tiny (main)\n  934.1 KiB, llama, used just now\n  fits: incomplete, tokenizer.json:\n    missing";
        assert_eq!(text, expected);
    }

    #[test]
    fn times_in_words() {
        for (seconds, text) in [
            (3, "just now"),
            (60, "1 minute ago"),
            (7200, "2 hours ago"),
            (86_400 * 59, "59 days ago"),
            (86_400 * 61, "2 months ago"),
            (86_400 * 800, "2 years ago"),
        ] {
            assert_eq!(ago(Duration::from_secs(seconds)), text);
        }
    }
}
