//! What is removed from the cache with a model: as huggingface_hub does it, a blob goes with the last file that refers to it.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use hf_hub::cache::{CachedFileInfo, CachedRepoInfo, CachedRevisionInfo};

use super::select::matches_quant;
use super::{Contents, ModelName};

/// What is going to be removed.
#[derive(Clone, Debug)]
pub struct Removal {
    /// Id of the repository.
    pub repo: String,
    /// Bytes that this frees.
    pub bytes: u64,
    /// Names of the revisions that it concerns: branches, tags, commits.
    pub revisions: Vec<String>,
    /// Files whose content is gone then.
    pub blobs: Vec<PathBuf>,
    /// Files and directories without content of their own, in this order.
    rest: Vec<PathBuf>,
    /// All lies in it.
    repo_dir: PathBuf,
    locks: PathBuf,
}

impl Removal {
    /// What goes with the model of that name.
    ///
    /// # Errors
    /// Where the cache does not hold it, or not as a cache does.
    pub fn plan(cache: &Contents, name: &ModelName) -> Result<Self, String> {
        let repo = cache.repos.iter().find(|repo| repo.repo_id == name.repo.id);
        let repo = repo.ok_or_else(|| {
            let dir = cache.dir.display();
            format!("it is not in the cache ({dir}); `plimsoll list` shows what is")
        })?;
        let repo_dir = inside(&cache.dir, &repo.repo_path)?;
        let chosen = revisions(repo, name)?;
        let concerns = |revision: &CachedRevisionInfo, file: &CachedFileInfo| {
            let is_meant = name.repo.quant.is_none()
                || (file.file_name.ends_with(".gguf") && matches_quant(&file.file_name, &name.repo));
            is_meant
                && chosen
                    .iter()
                    .any(|chosen| chosen.commit_hash == revision.commit_hash)
        };
        let files = repo.revisions.iter();
        let files = files.flat_map(|revision| revision.files.iter().map(move |file| (revision, file)));
        let (gone, kept): (Vec<_>, Vec<_>) = files.partition(|(revision, file)| concerns(revision, file));
        if gone.is_empty() && name.repo.quant.is_some() {
            return Err(format!("the cache holds no GGUF file {name}"));
        }
        let mut removal = Self {
            repo: repo.repo_id.clone(),
            bytes: 0,
            revisions: Vec::new(),
            blobs: Vec::new(),
            rest: Vec::new(),
            locks: cache
                .dir
                .join(".locks")
                .join(repo_dir.file_name().unwrap_or_default()),
            repo_dir,
        };
        for revision in &chosen {
            removal.revisions.extend(revision.refs.iter().cloned());
            removal.revisions.push(revision.commit_hash.clone());
        }
        let blobs = |files: &[(&CachedRevisionInfo, &CachedFileInfo)]| {
            files
                .iter()
                .map(|(_, file)| file.blob_path.clone())
                .collect::<BTreeSet<_>>()
        };
        let (of_gone, of_kept) = (blobs(&gone), blobs(&kept));
        let unused = of_gone.difference(&of_kept).cloned();
        let dir = removal.repo_dir.clone();
        let ours = |path: &PathBuf| is_below(&dir, path);
        removal.blobs = unused.filter(ours).collect();
        if kept.is_empty() {
            removal.bytes = size_of(&removal.repo_dir).map_err(|error| error.to_string())?;
            removal.rest = vec![removal.repo_dir.clone(), removal.locks.clone()];
            return Ok(removal);
        }
        let sizes = removal
            .blobs
            .iter()
            .map(|blob| blob.symlink_metadata().map_or(0, |data| data.len()));
        removal.bytes = sizes.sum();
        for revision in &chosen {
            let is_empty = !kept
                .iter()
                .any(|(other, _)| other.commit_hash == revision.commit_hash);
            if is_empty {
                let refs = revision
                    .refs
                    .iter()
                    .map(|name| removal.repo_dir.join("refs").join(name));
                removal.rest.extend(refs);
                for parent in ["snapshots", ".no_exist"] {
                    let dir = removal.repo_dir.join(parent).join(&revision.commit_hash);
                    removal.rest.push(dir);
                }
            }
        }
        removal
            .rest
            .extend(gone.iter().map(|(_, file)| file.file_path.clone()));
        removal.rest.retain(ours);
        Ok(removal)
    }

    /// Whether a download of a file of it is under way.
    pub fn is_downloading(&self) -> bool {
        let Ok(locks) = fs::read_dir(&self.locks) else {
            return false;
        };
        let is_held = |path: PathBuf| {
            let held = File::open(path).map(|file| file.try_lock());
            matches!(held, Ok(Err(TryLockError::WouldBlock)))
        };
        locks.flatten().any(|entry| is_held(entry.path()))
    }

    /// Removes it.
    ///
    /// # Errors
    /// Where the operating system refuses; what is gone then is gone.
    pub fn carry_out(&self) -> io::Result<()> {
        // Links first, then contents: an interruption leaves no dangling link.
        for path in self.rest.iter().chain(&self.blobs) {
            let removed = match path.symlink_metadata() {
                Ok(data) if data.is_dir() => fs::remove_dir_all(path),
                Ok(_) => fs::remove_file(path),
                Err(error) => Err(error),
            };
            match removed {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(io::Error::new(
                        error.kind(),
                        format!("{}: {error}", path.display()),
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The directory of a repository, which must lie in the cache itself.
fn inside(cache: &Path, dir: &Path) -> Result<PathBuf, String> {
    let elsewhere = |what: &str| format!("{} {what}: remove it yourself", dir.display());
    if dir.is_symlink() {
        return Err(elsewhere("is a link to another place"));
    }
    let real = |path: &Path| {
        path.canonicalize()
            .map_err(|error| format!("{}: {error}", path.display()))
    };
    let (cache, dir_in_fact) = (real(cache)?, real(dir)?);
    match dir_in_fact.parent() == Some(&*cache) {
        true => Ok(dir_in_fact),
        false => Err(elsewhere("does not lie in the cache")),
    }
}

/// Whether a path, with links followed, lies in `dir`: files outside the cache are never removed.
fn is_below(dir: &Path, path: &Path) -> bool {
    let parent = path.parent().and_then(|parent| parent.canonicalize().ok());
    parent.is_some_and(|parent| parent.starts_with(dir))
}

/// The revisions that a name means: all, or those of that branch, tag or commit.
fn revisions<'a>(repo: &'a CachedRepoInfo, name: &ModelName) -> Result<Vec<&'a CachedRevisionInfo>, String> {
    let Some(wanted) = &name.revision else {
        return Ok(repo.revisions.iter().collect());
    };
    let is_commit = wanted.len() >= 7 && wanted.bytes().all(|b| b.is_ascii_hexdigit());
    let is_meant = |revision: &&CachedRevisionInfo| {
        revision.refs.contains(wanted) || (is_commit && revision.commit_hash.starts_with(&**wanted))
    };
    let found: Vec<_> = repo.revisions.iter().filter(is_meant).collect();
    if found.is_empty() {
        let known = repo.revisions.iter().flat_map(|revision| {
            let refs = revision.refs.iter().map(String::as_str);
            refs.chain([&*revision.commit_hash])
        });
        let known: Vec<_> = known.collect();
        return Err(format!(
            "the cache holds no revision {wanted} of {}; it holds {}",
            repo.repo_id,
            known.join(", ")
        ));
    }
    Ok(found)
}

/// Bytes of the files in a directory; links count as nothing.
fn size_of(dir: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let data = entry.path().symlink_metadata()?;
        bytes += match () {
            () if data.is_dir() => size_of(&entry.path())?,
            () if data.is_file() => data.len(),
            () => 0,
        };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::hub::models;

    const OLD: &str = "1111111111111111111111111111111111111111";
    const NEW: &str = "2222222222222222222222222222222222222222";

    /// A cache with two revisions of one model, which share a file, and another model.
    fn cache() -> tempfile::TempDir {
        let cache = tempfile::tempdir().unwrap();
        for (repo, commit, reference, files) in [
            (
                "a--b",
                OLD,
                "v1",
                &[("config.json", "same"), ("model.safetensors", "old-weights")][..],
            ),
            (
                "a--b",
                NEW,
                "main",
                &[("config.json", "same"), ("model.safetensors", "weights")],
            ),
            (
                "a--c",
                NEW,
                "main",
                &[("x-Q4_0.gguf", "four"), ("x-Q8_0.gguf", "eight")],
            ),
        ] {
            let dir = cache.path().join(format!("models--{repo}"));
            for part in ["blobs", "refs", &format!("snapshots/{commit}"), ".no_exist"] {
                fs::create_dir_all(dir.join(part)).unwrap();
            }
            fs::create_dir_all(dir.join(".no_exist").join(commit)).unwrap();
            fs::create_dir_all(cache.path().join(".locks").join(format!("models--{repo}"))).unwrap();
            fs::write(dir.join("refs").join(reference), commit).unwrap();
            for (name, content) in files {
                fs::write(dir.join("blobs").join(content), content).unwrap();
                let link = dir.join("snapshots").join(commit).join(name);
                symlink(Path::new("../../blobs").join(content), link).unwrap();
            }
        }
        cache
    }

    async fn plan(cache: &Path, name: &str) -> Result<Removal, String> {
        Removal::plan(&models(Some(cache)).await.unwrap(), &name.parse().unwrap())
    }

    fn exists(cache: &Path, paths: &[&str]) -> Vec<bool> {
        paths
            .iter()
            .map(|path| cache.join("models--a--b").join(path).symlink_metadata().is_ok())
            .collect()
    }

    #[tokio::test]
    async fn a_revision_goes_with_what_nobody_else_uses() {
        let cache = cache();
        for name in ["a/b@v1", "a/b@1111111"] {
            let removal = plan(cache.path(), name).await.unwrap();
            assert_eq!(removal.bytes, "old-weights".len() as u64);
            assert_eq!(removal.revisions, ["v1", OLD]);
        }
        plan(cache.path(), "a/b@v1").await.unwrap().carry_out().unwrap();
        let (old, new) = (format!("snapshots/{OLD}"), format!("snapshots/{NEW}/config.json"));
        let paths = [
            "blobs/old-weights",
            "refs/v1",
            &old,
            "blobs/same",
            "blobs/weights",
            "refs/main",
            &new,
        ];
        assert_eq!(
            exists(cache.path(), &paths),
            [false, false, false, true, true, true, true]
        );
        // The last one goes with everything.
        plan(cache.path(), "a/b@main").await.unwrap().carry_out().unwrap();
        assert_eq!(exists(cache.path(), &["."]), [false]);
        assert!(!cache.path().join(".locks/models--a--b").exists());
        assert!(cache.path().join("models--a--c/blobs/four").exists());
    }

    #[tokio::test]
    async fn one_of_several_files_goes_alone() {
        let cache = cache();
        let found = models(Some(cache.path())).await.unwrap();
        let names: Vec<_> = found
            .models
            .iter()
            .map(|model| (&*model.name, model.bytes))
            .collect();
        assert_eq!(names.len(), 4);
        assert_eq!(names[2..], [("a/c:Q4_0", 4), ("a/c:Q8_0", 5)]);
        let removal = plan(cache.path(), "a/c:Q8_0").await.unwrap();
        assert_eq!(removal.bytes, 5);
        removal.carry_out().unwrap();
        let left = models(Some(cache.path())).await.unwrap().models;
        assert_eq!(left.last().map(|model| &*model.name), Some("a/c"));
    }

    #[tokio::test]
    async fn nothing_outside_the_cache_is_touched() {
        let cache = cache();
        let outside = tempfile::tempdir().unwrap();
        let file = outside.path().join("weights");
        fs::write(&file, "theirs").unwrap();
        let snapshot = cache.path().join("models--a--b/snapshots").join(NEW);
        symlink(&file, snapshot.join("linked")).unwrap();
        symlink(outside.path(), snapshot.join("directory")).unwrap();
        // One of the revisions, then all that is left.
        for name in ["a/b@main", "a/b"] {
            plan(cache.path(), name).await.unwrap().carry_out().unwrap();
            assert_eq!(fs::read(&file).unwrap(), b"theirs");
        }
        assert_eq!(exists(cache.path(), &["."]), [false]);
        assert_eq!(fs::read(&file).unwrap(), b"theirs");
        // A model that is kept elsewhere.
        let repo = cache.path().join("models--a--c");
        fs::rename(&repo, outside.path().join("moved")).unwrap();
        symlink(outside.path().join("moved"), &repo).unwrap();
        let error = plan(cache.path(), "a/c").await.unwrap_err();
        assert!(error.contains("is a link"), "{error}");
    }

    #[tokio::test]
    async fn what_is_not_there_cannot_be_removed() {
        let cache = cache();
        for (name, part) in [
            ("a/d", "plimsoll list"),
            ("a/b@v2", "it holds"),
            ("a/c:Q2_K", "no GGUF file"),
        ] {
            let error = plan(cache.path(), name).await.unwrap_err();
            assert!(error.contains(part), "{name}: {error}");
        }
    }

    #[tokio::test]
    async fn a_download_is_noticed() {
        let cache = cache();
        let removal = plan(cache.path(), "a/b").await.unwrap();
        assert!(!removal.is_downloading());
        let lock = File::create(cache.path().join(".locks/models--a--b/x.lock")).unwrap();
        assert!(!removal.is_downloading());
        lock.lock().unwrap();
        assert!(removal.is_downloading());
    }
}
