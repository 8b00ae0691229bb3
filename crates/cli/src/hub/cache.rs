//! What the cache holds.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hf_hub::cache::{CachedFileInfo, CachedRepoInfo, CachedRevisionInfo};
use hf_hub::{HFClient, HFError};

use super::select::{matches_quant, quant_of, stem_of};
use super::{HubError, RepoId};

/// The models of a cache.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The cache.
    pub dir: PathBuf,
    /// In the order of their names.
    pub models: Vec<CachedModel>,
    pub(super) repos: Vec<CachedRepoInfo>,
}

/// What MODEL of `serve` can be: a revision of a repository, or a GGUF file in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedModel {
    /// The repository.
    pub repo: String,
    /// As `serve` takes it.
    pub name: String,
    /// Branches and tags that mean it.
    pub refs: Vec<String>,
    /// The commit.
    pub commit: String,
    /// A directory, or a GGUF file.
    pub path: PathBuf,
    /// On disk. Revisions may share some of them.
    pub bytes: u64,
    /// When a file of it was last read, as far as the file system notes that.
    pub last_used: SystemTime,
}

/// Looks into the cache at `dir`, or the one that the environment names.
///
/// # Errors
/// Where it cannot be read; one that is not there is empty.
pub async fn models(dir: Option<&Path>) -> Result<Contents, HubError> {
    let unusable = |error| match error {
        HFError::Io(error) => HubError::Cache(error),
        error => HubError::Cache(std::io::Error::other(error)),
    };
    let mut builder = HFClient::builder();
    if let Some(dir) = dir {
        builder = builder.cache_dir(dir);
    }
    let client = builder.build().map_err(unusable)?;
    let mut found = client.scan_cache().send().await.map_err(unusable)?;
    found.repos.retain(|repo| repo.repo_type == "model");
    found.repos.sort_by(|a, b| a.repo_id.cmp(&b.repo_id));
    let of_repo = |repo: &CachedRepoInfo| {
        let revisions = repo.revisions.iter();
        revisions
            .flat_map(|revision| of_revision(&repo.repo_id, revision))
            .collect::<Vec<_>>()
    };
    Ok(Contents {
        models: found.repos.iter().flat_map(of_repo).collect(),
        dir: found.cache_dir,
        repos: found.repos,
    })
}

fn of_revision(repo: &str, revision: &CachedRevisionInfo) -> Vec<CachedModel> {
    let model = |name: String, path: PathBuf, files: &[&CachedFileInfo]| {
        let mut refs = revision.refs.clone();
        refs.sort();
        CachedModel {
            repo: repo.to_owned(),
            name,
            refs,
            commit: revision.commit_hash.clone(),
            path,
            bytes: files.iter().map(|file| file.size_on_disk).sum(),
            last_used: files
                .iter()
                .map(|file| file.blob_last_accessed)
                .max()
                .unwrap_or(SystemTime::UNIX_EPOCH),
        }
    };
    let (mut ggufs, others): (Vec<_>, Vec<_>) = revision
        .files
        .iter()
        .partition(|file| file.file_name.ends_with(".gguf"));
    ggufs.sort_by(|a, b| a.file_name.cmp(&b.file_name));
    let mut models = Vec::new();
    // Without weights it is a part of the GGUF files' own repository.
    let has_weights = others.iter().any(|file| file.file_name.ends_with(".safetensors"));
    if has_weights || ggufs.is_empty() {
        models.push(model(repo.to_owned(), revision.snapshot_path.clone(), &others));
    }
    let alone = ggufs.len() == 1 && !has_weights;
    for gguf in &ggufs {
        let name = match alone {
            true => repo.to_owned(),
            false => format!("{repo}:{}", unique_name(&gguf.file_name, repo, &ggufs)),
        };
        models.push(model(name, gguf.file_path.clone(), &[gguf]));
    }
    models
}

/// What picks this GGUF file among others.
fn unique_name<'a>(file: &'a str, repo: &str, all: &[&CachedFileInfo]) -> &'a str {
    let short = quant_of(file);
    let named = RepoId {
        id: repo.to_owned(),
        quant: Some(short.to_owned()),
    };
    let fitting = all.iter().filter(|other| matches_quant(&other.file_name, &named));
    let names: BTreeSet<_> = fitting.map(|other| &other.file_name).collect();
    match names.len() {
        1 => short,
        _ => stem_of(file),
    }
}
