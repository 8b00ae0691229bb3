//! From MODEL to files: a directory, a GGUF file, a repository of the Hub, or the simulated model.

use std::path::{Path, PathBuf};

use crate::args::{HubArgs, LoadFormat};
use crate::client::check_http_url;
use crate::error::Error;
use crate::hub::{self, HubOptions, RepoId, Weights};
use crate::settings::EngineSettings;
use crate::simulated::{SIM_OPTIONS, SimSpec};
use crate::start::StartProgress;

/// What MODEL turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The simulated model.
    Sim,
    /// Files on this machine.
    Files {
        /// A directory with config.json, or a GGUF file.
        model: PathBuf,
        /// Directory, or GGUF file, that the tokenizer comes from.
        tokenizer: PathBuf,
    },
}

/// Whether MODEL is the simulated one.
pub(crate) fn is_sim(model: &str) -> bool {
    SimSpec::parse(model).is_some()
}

/// Finds MODEL, downloading it where it is a repository.
pub async fn resolve(settings: &EngineSettings, progress: &StartProgress) -> Result<Source, Error> {
    if is_sim(&settings.model) {
        return Ok(Source::Sim);
    }
    let model = locate(
        &settings.model,
        settings,
        weights_wanted(settings.load_format),
        progress,
    )
    .await?;
    let model = pick(&model, settings.load_format)?;
    let tokenizer = match &settings.tokenizer {
        None => model.clone(),
        Some(path) => {
            let path = locate(path, settings, Weights::None, progress).await?;
            if path.ends_with("tokenizer.json") {
                path.parent().unwrap_or(Path::new(".")).to_owned()
            } else {
                path
            }
        }
    };
    Ok(Source::Files { model, tokenizer })
}

/// Finds what tells about MODEL without its weights: config.json, or a GGUF file that is here.
pub async fn resolve_config(settings: &EngineSettings) -> Result<Source, Error> {
    if is_sim(&settings.model) {
        return Ok(Source::Sim);
    }
    let is_here = Path::new(&settings.model).exists();
    let only_weights = || Error::OnlyWeights {
        model: settings.model.clone(),
    };
    if !is_here && RepoId::parse(&settings.model).is_some_and(|repo| repo.quant.is_some()) {
        return Err(only_weights());
    }
    let path = locate(
        &settings.model,
        settings,
        Weights::None,
        &StartProgress::default(),
    )
    .await?;
    let has_config = path.join("config.json").is_file();
    let model = match pick(&path, settings.load_format) {
        // Weights may be missing.
        Err(_) if has_config && settings.load_format != LoadFormat::Gguf => path,
        Err(_) if !is_here => return Err(only_weights()),
        picked => picked?,
    };
    Ok(Source::Files {
        tokenizer: model.clone(),
        model,
    })
}

/// Whether resolving MODEL and `--tokenizer` may need the network.
pub fn is_remote(model: &str, tokenizer: Option<&str>) -> bool {
    let remote = |text: &str| !is_sim(text) && !Path::new(text).exists();
    remote(model) || tokenizer.is_some_and(remote)
}

fn weights_wanted(format: LoadFormat) -> Weights {
    match format {
        LoadFormat::Auto => Weights::Any,
        LoadFormat::Dummy => Weights::None,
        LoadFormat::Safetensors => Weights::Safetensors,
        LoadFormat::Gguf => Weights::Gguf,
    }
}

async fn locate(
    text: &str,
    settings: &EngineSettings,
    weights: Weights,
    progress: &StartProgress,
) -> Result<PathBuf, Error> {
    let path = Path::new(text);
    match path.try_exists() {
        Ok(true) => return Ok(path.to_owned()),
        Ok(false) => {}
        Err(source) => return Err(unreadable(path)(source)),
    }
    if let Some(options) = text.strip_prefix("sim:") {
        return Err(Error::configuration(
            "MODEL",
            format!("sim:{options} is not understood; {SIM_OPTIONS}"),
        ));
    }
    let looks_like_a_path = text.starts_with(['/', '.', '~', '\\']) || text.ends_with(".gguf");
    let repo = RepoId::parse(text).filter(|_| !looks_like_a_path);
    let Some(repo) = repo else {
        return Err(Error::NoSuchModel {
            model: text.to_owned(),
        });
    };
    let options = hub_options(&settings.hub, progress)?;
    Ok(hub::fetch(&repo, weights, &options).await?)
}

/// How to reach the Hub, as flags and environment say.
///
/// # Errors
/// If `HF_ENDPOINT` is not a URL.
pub(crate) fn hub_options(args: &HubArgs, progress: &StartProgress) -> Result<HubOptions, Error> {
    const ENDPOINT: &str = "HF_ENDPOINT";
    let endpoint = std::env::var(ENDPOINT)
        .ok()
        .filter(|endpoint| !endpoint.is_empty());
    if let Some(endpoint) = &endpoint {
        check_http_url(ENDPOINT, endpoint, "https://huggingface.co")?;
    }
    Ok(HubOptions {
        endpoint,
        cache_dir: args.download_dir.clone(),
        token: args.hf_token.clone(),
        revision: args.revision.clone(),
        offline: truthy("HF_HUB_OFFLINE"),
        progress: progress.clone(),
    })
}

/// As huggingface_hub reads its switches.
fn truthy(variable: &str) -> bool {
    let value = std::env::var(variable).unwrap_or_default();
    ["1", "on", "yes", "true"].contains(&&*value.to_ascii_lowercase())
}

fn unreadable(path: &Path) -> impl Fn(std::io::Error) -> Error {
    move |source| Error::Unreadable {
        path: path.to_owned(),
        source,
    }
}

/// The directory or the GGUF file in it, as `--load-format` says.
pub(crate) fn pick(path: &Path, format: LoadFormat) -> Result<PathBuf, Error> {
    let wrong = |expected: &'static str| Error::WrongFormat {
        path: path.to_owned(),
        expected,
    };
    if path.is_file() {
        let is_gguf = path
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
        return match format {
            LoadFormat::Safetensors => Err(wrong("a directory with *.safetensors, as --load-format says")),
            _ if !is_gguf => Err(wrong("a directory, or a file that ends in .gguf")),
            _ => Ok(path.to_owned()),
        };
    }
    if !path.is_dir() {
        return Err(wrong(
            "a directory, or a file that ends in .gguf; it is neither a directory nor a file",
        ));
    }
    let mut ggufs = Vec::new();
    let mut safetensors = false;
    for entry in std::fs::read_dir(path).map_err(unreadable(path))? {
        let entry = entry.map_err(unreadable(path))?.path();
        match entry.extension().and_then(|extension| extension.to_str()) {
            Some("gguf") => ggufs.push(entry),
            Some("safetensors") => safetensors = true,
            _ => {}
        }
    }
    let has_config = path.join("config.json").is_file();
    match (format, &ggufs[..]) {
        (LoadFormat::Dummy, _) if has_config => Ok(path.to_owned()),
        (LoadFormat::Auto | LoadFormat::Safetensors, _) if has_config && safetensors => Ok(path.to_owned()),
        (LoadFormat::Safetensors, _) => Err(wrong("a directory with config.json and *.safetensors")),
        (_, [gguf]) => Ok(gguf.clone()),
        (_, []) if path.join("adapter_config.json").is_file() => Err(wrong(
            "a model; it has an adapter, such as LoRA's, which has to be merged into its model first",
        )),
        (_, []) if has_config => Err(wrong(
            "*.safetensors or a .gguf file beside config.json (or --load-format dummy)",
        )),
        (_, []) => Err(wrong(
            "a directory with config.json and *.safetensors, or with a .gguf file",
        )),
        (_, _) => Err(wrong(
            "a directory with only one .gguf file; give the path of the one to load",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picked(files: &[&str], format: LoadFormat) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        for file in files {
            std::fs::write(dir.path().join(file), "").unwrap();
        }
        let path = pick(dir.path(), format).map_err(|e| e.to_string())?;
        Ok(path.strip_prefix(dir.path()).unwrap().display().to_string())
    }

    #[test]
    fn directories_hold_one_model() {
        let both = ["config.json", "model.safetensors", "m.gguf"];
        assert_eq!(picked(&both, LoadFormat::Auto).unwrap(), "");
        assert_eq!(picked(&both, LoadFormat::Safetensors).unwrap(), "");
        assert_eq!(picked(&both, LoadFormat::Gguf).unwrap(), "m.gguf");
        assert_eq!(picked(&["m.gguf"], LoadFormat::Auto).unwrap(), "m.gguf");
        assert_eq!(picked(&["config.json"], LoadFormat::Dummy).unwrap(), "");
        assert!(
            picked(&["config.json"], LoadFormat::Auto)
                .unwrap_err()
                .contains("dummy")
        );
        assert!(picked(&["m.gguf"], LoadFormat::Safetensors).is_err());
        assert!(
            picked(&["a.gguf", "b.gguf"], LoadFormat::Auto)
                .unwrap_err()
                .contains("only one")
        );
        assert!(picked(&[], LoadFormat::Auto).is_err());
        let adapter = ["adapter_config.json", "adapter_model.safetensors"];
        assert!(picked(&adapter, LoadFormat::Auto).unwrap_err().contains("merged"));
    }
}
