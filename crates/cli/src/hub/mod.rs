//! Models from the Hugging Face Hub: only the files that are needed, into the cache that Python's libraries share.
//!
//! hf-hub does the transfers. What it leaves open is done here: choosing files, checking what arrived (it writes whatever
//! body a server sends), retrying a transfer that broke off, and working offline.

mod cache;
mod name;
mod progress;
mod removal;
mod select;
mod verify;

use std::error::Error as _;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use futures::TryStreamExt;
use hf_hub::repository::{HFRepository, RepoTreeEntry, RepoTypeModel};
use hf_hub::{HFClient, HFError};

use self::select::{glob_escape, select};
use self::verify::{check, list};
use crate::start::StartProgress;

pub use self::cache::{CachedModel, Contents, models};
pub use self::name::{ModelName, RepoId};
pub use self::removal::Removal;
pub(crate) use self::verify::missing_shard;

/// How often a download that broke off or arrived damaged is tried.
const ATTEMPTS: usize = 3;

/// Which weights are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// safetensors where there are any, else GGUF.
    Any,
    /// Only safetensors.
    Safetensors,
    /// Only GGUF.
    Gguf,
    /// Only the configuration.
    None,
}

/// How to reach the Hub; what is `None` is hf-hub's default, which knows the `HF_*` variables.
#[derive(Clone, Debug)]
pub struct HubOptions {
    /// Base address.
    pub endpoint: Option<String>,
    /// Cache directory.
    pub cache_dir: Option<PathBuf>,
    /// Access token.
    pub token: Option<String>,
    /// Branch, tag or commit.
    pub revision: String,
    /// Do not use the network at all.
    pub offline: bool,
    /// Hears how far a download is.
    pub progress: StartProgress,
}

/// Why a model could not be had from the Hub.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// 404, or 401 without a token, which is how the Hub hides private repositories.
    #[error(
        "{repo} (revision {revision}) was not found on {endpoint}. Check the name; if it is private or gated, give a \
         token with --hf-token or HF_TOKEN. If you meant a local path, there is none: {repo}"
    )]
    NotFound {
        /// The repository.
        repo: String,
        /// The revision.
        revision: String,
        /// The Hub's address.
        endpoint: String,
    },
    /// 401 with a token.
    #[error("{endpoint} rejected the token; create a new one at {endpoint}/settings/tokens and set HF_TOKEN")]
    BadToken {
        /// The Hub's address.
        endpoint: String,
    },
    /// 403.
    #[error("no access to {repo}: accept its licence at {endpoint}/{repo} and use a token of that account")]
    Gated {
        /// The repository.
        repo: String,
        /// The Hub's address.
        endpoint: String,
    },
    /// The repository has nothing we can load.
    #[error("{repo} has no {wanted}; {found}")]
    NoWeights {
        /// The repository.
        repo: String,
        /// What was looked for.
        wanted: &'static str,
        /// What there is instead, or what to do.
        found: String,
    },
    /// Several GGUF files and none named.
    #[error("{repo} has several GGUF files; name one, such as {repo}:{example}. There are: {files}")]
    WhichGguf {
        /// The repository.
        repo: String,
        /// A quantisation that exists.
        example: String,
        /// All of them.
        files: String,
    },
    /// Offline and not in the cache.
    #[error(
        "HF_HUB_OFFLINE is set and {missing} of {repo} is not in the cache ({cache}); unset it to download"
    )]
    NotCached {
        /// The repository.
        repo: String,
        /// What is missing.
        missing: String,
        /// Where it was looked for.
        cache: String,
    },
    /// What arrived is not what the Hub announced, several times over.
    #[error(
        "{file} of {repo} was damaged in {ATTEMPTS} downloads ({problem}); try again, or check your proxy"
    )]
    Damaged {
        /// The repository.
        repo: String,
        /// The file.
        file: String,
        /// How it differs.
        problem: String,
    },
    /// The transfer itself.
    #[error(
        "downloading {repo} from the Hub failed: {}. Start again to resume; HF_ENDPOINT sets another server",
        cause(source)
    )]
    Transfer {
        /// The repository.
        repo: String,
        /// What hf-hub reports.
        source: Box<HFError>,
    },
    /// A file that cannot be written, as where the disk is full.
    #[error(
        "cannot store {repo} in {cache}: {source}; make room there, or name another directory with --download-dir. What has come \
         stays, and the next start goes on from there"
    )]
    NotStored {
        /// The repository.
        repo: String,
        /// The cache's directory.
        cache: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The cache.
    #[error("the Hub cache cannot be used: {0}; set another directory with --download-dir")]
    Cache(#[from] std::io::Error),
}

/// hf-xet, which transfers large files, reports every transfer to the Hub unless the environment says no, and listens to
/// nothing but the environment: this starts the process over with that said. Whoever set the variable keeps it.
///
/// # Errors
/// Where the operating system does not start the program again; otherwise this returns only if there is nothing to do.
pub fn disable_telemetry() -> std::io::Result<()> {
    const SWITCH: &str = "HF_XET_TELEMETRY_ENABLED";
    if std::env::var_os(SWITCH).is_some() {
        return Ok(());
    }
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_default();
    let mut again = Command::new(std::env::current_exe()?);
    Err(again.arg0(name).args(arguments).env(SWITCH, "0").exec())
}

/// A model that is in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// Its directory, or the GGUF file in it.
    pub path: PathBuf,
    /// Files that are needed.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Files that were not there before.
    pub new: usize,
}

/// Makes `repo` available locally: its directory, or the GGUF file in it.
pub async fn fetch(repo: &RepoId, weights: Weights, options: &HubOptions) -> Result<PathBuf, HubError> {
    Ok(pull(repo, weights, options).await?.path)
}

/// Makes `repo` available locally.
///
/// # Errors
/// As [`HubError`] says.
pub async fn pull(repo: &RepoId, weights: Weights, options: &HubOptions) -> Result<Pulled, HubError> {
    let mut builder = HFClient::builder().user_agent(concat!("plimsoll/", env!("CARGO_PKG_VERSION")));
    if let Some(endpoint) = &options.endpoint {
        builder = builder.endpoint(endpoint);
    }
    if let Some(dir) = &options.cache_dir {
        builder = builder.cache_dir(dir);
    }
    if let Some(token) = &options.token {
        builder = builder.token(token);
    }
    let client = builder.build().map_err(|e| transfer(repo, e))?;
    let (owner, name) = hf_hub::split_id(&repo.id);
    let hub = Hub {
        repo,
        options,
        remote: client.model(owner, name),
        client,
    };
    if options.offline {
        return hub.cached(weights).await;
    }
    let downloaded = hub.download(weights).await;
    if matches!(&downloaded, Err(HubError::Transfer { source, .. }) if unreachable(source))
        && let Ok(cached) = hub.cached(weights).await
    {
        let endpoint = hub.client.endpoint();
        tracing::warn!(
            endpoint,
            "the Hub cannot be reached; using the cached {}",
            repo.id
        );
        return Ok(cached);
    }
    downloaded
}

struct Hub<'a> {
    repo: &'a RepoId,
    options: &'a HubOptions,
    client: HFClient,
    remote: HFRepository<RepoTypeModel>,
}

/// One file of a repository.
#[derive(Clone, Debug)]
pub(crate) struct RemoteFile {
    pub(crate) path: String,
    pub(crate) size: u64,
}

impl Hub<'_> {
    async fn download(&self, weights: Weights) -> Result<Pulled, HubError> {
        let tree = self
            .remote
            .list_tree()
            .revision(&*self.options.revision)
            .recursive(true)
            .send();
        let entries: Vec<RepoTreeEntry> = match tree {
            Ok(tree) => tree.try_collect().await.map_err(|e| self.classify(e))?,
            Err(e) => return Err(self.classify(e)),
        };
        let files = entries.into_iter().filter_map(|entry| match entry {
            RepoTreeEntry::File { path, size, .. } => Some(RemoteFile { path, size }),
            RepoTreeEntry::Directory { .. } => None,
        });
        let files: Vec<_> = files.collect();
        let wanted = select(&files, self.repo, weights)?;
        let (mut problem, mut came) = (None, 0);
        for attempt in 1..=ATTEMPTS {
            let known = self.snapshot().await;
            let new = missing(known.as_deref(), &wanted);
            came = came.max(new.len());
            let bar = progress::DownloadBar::new(&self.repo.id, &new, &self.options.progress);
            let result = self
                .remote
                .snapshot_download()
                .revision(&*self.options.revision)
                .allow_patterns(wanted.iter().map(|file| glob_escape(&file.path)).collect())
                .progress(bar.handler())
                .send()
                .await;
            bar.finish(result.is_ok());
            let snapshot = match result {
                Ok(snapshot) => snapshot,
                Err(error) if broke_off(&error) && attempt < ATTEMPTS => {
                    tracing::warn!(attempt, %error, "the download was interrupted; retrying");
                    continue;
                }
                Err(error) => return Err(self.classify(error)),
            };
            problem = check(&snapshot, &wanted, &new).await?;
            match &problem {
                None => return Ok(Pulled::new(&snapshot, &wanted, came)),
                Some((file, problem)) => {
                    tracing::warn!(attempt, "{file} is damaged ({problem}); retrying")
                }
            }
        }
        let (file, problem) =
            problem.unwrap_or_else(|| (self.repo.id.clone(), "it was interrupted".to_owned()));
        Err(HubError::Damaged {
            repo: self.repo.id.clone(),
            file,
            problem,
        })
    }

    /// The snapshot of the wanted revision, if the cache has one.
    async fn snapshot(&self) -> Option<PathBuf> {
        let download = self.remote.snapshot_download();
        let local = download.revision(&*self.options.revision).local_files_only(true);
        local.send().await.ok()
    }

    async fn cached(&self, weights: Weights) -> Result<Pulled, HubError> {
        let not_cached = |missing: String| HubError::NotCached {
            repo: self.repo.id.clone(),
            missing,
            cache: self.client.cache_dir().display().to_string(),
        };
        let snapshot = self.snapshot().await;
        let snapshot = snapshot.ok_or_else(|| not_cached(format!("revision {}", self.options.revision)))?;
        let mut files = Vec::new();
        list(&snapshot, &snapshot, &mut files)?;
        if let Some(name) = missing_shard(&snapshot)
            && matches!(weights, Weights::Any | Weights::Safetensors)
        {
            return Err(not_cached(name));
        }
        let wanted = select(&files, self.repo, weights).map_err(|_| not_cached("the weights".to_owned()))?;
        let is_gguf = wanted.iter().any(|file| file.path.ends_with(".gguf"));
        for needed in ["config.json", "tokenizer.json"] {
            if !is_gguf && !wanted.iter().any(|file| file.path == needed) {
                return Err(not_cached(needed.to_owned()));
            }
        }
        Ok(Pulled::new(&snapshot, &wanted, 0))
    }

    fn classify(&self, error: HFError) -> HubError {
        let repo = self.repo.id.clone();
        let endpoint = self.client.endpoint().to_owned();
        let error = match error {
            HFError::Io(source) => {
                let cache = self.client.cache_dir().display().to_string();
                return HubError::NotStored { repo, cache, source };
            }
            error => error,
        };
        let status = match &error {
            HFError::Http { context } => context.status.as_u16(),
            HFError::AuthRequired { .. } => 401,
            HFError::Forbidden { .. } => 403,
            HFError::RepoNotFound { .. }
            | HFError::RevisionNotFound { .. }
            | HFError::EntryNotFound { .. } => 404,
            _ => 0,
        };
        match status {
            // The Hub's own words separate a rejected token from a repository it does not show to strangers.
            401 if error.to_string().to_ascii_lowercase().contains("credentials") => {
                HubError::BadToken { endpoint }
            }
            401 | 404 => HubError::NotFound {
                repo,
                revision: self.options.revision.clone(),
                endpoint,
            },
            403 => HubError::Gated { repo, endpoint },
            _ => transfer(self.repo, error),
        }
    }
}

fn transfer(repo: &RepoId, error: HFError) -> HubError {
    HubError::Transfer {
        repo: repo.id.clone(),
        source: Box::new(error),
    }
}

/// What hf-hub reports; of a request that failed, its server once and the cause, which the HTTP client leaves out.
fn cause(error: &HFError) -> String {
    let HFError::Request { source, .. } = error else {
        return error.to_string();
    };
    let server = source.url().and_then(|url| url.host_str().map(str::to_owned));
    let server = server.unwrap_or_else(|| "the server".to_owned());
    let what = match () {
        () if source.is_timeout() => format!("{server} did not answer in time"),
        () if source.is_connect() => format!("{server} cannot be reached"),
        () => format!("the request to {server} failed"),
    };
    let causes = std::iter::successors(source.source(), |&error| error.source());
    match causes.last() {
        Some(root) => format!("{what} ({root})"),
        None => what,
    }
}

fn unreachable(error: &HFError) -> bool {
    match error {
        HFError::Request { source, .. } => source.is_connect() || source.is_timeout(),
        HFError::Http { context } => context.status.is_server_error(),
        _ => false,
    }
}

/// hf-hub retries requests, but not a body that ends early.
fn broke_off(error: &HFError) -> bool {
    match error {
        HFError::Request { source, .. } => source.is_body() || source.is_decode() || source.is_timeout(),
        HFError::Xet { .. } => true,
        _ => false,
    }
}

impl Pulled {
    fn new(snapshot: &Path, wanted: &[RemoteFile], new: usize) -> Self {
        let gguf = wanted.iter().find(|file| file.path.ends_with(".gguf"));
        Self {
            path: match gguf {
                Some(file) => snapshot.join(&file.path),
                None => snapshot.to_owned(),
            },
            files: wanted.len(),
            bytes: wanted.iter().map(|file| file.size).sum(),
            new,
        }
    }
}

fn missing(snapshot: Option<&Path>, wanted: &[RemoteFile]) -> Vec<RemoteFile> {
    let is_missing = |file: &&RemoteFile| snapshot.is_none_or(|dir| !dir.join(&file.path).exists());
    wanted.iter().filter(is_missing).cloned().collect()
}
