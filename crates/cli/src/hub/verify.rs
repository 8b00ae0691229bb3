//! Whether the cache holds what the Hub announced.

use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::select::INDEX;
use super::{HubError, RemoteFile};
use crate::bytes::Bytes;

/// Compares what is in the cache with what the Hub announced, and removes a file that differs. Contents are hashed only
/// when they are new: reading a large model again at every start would cost more than loading it.
pub(super) async fn check(
    snapshot: &Path,
    wanted: &[RemoteFile],
    new: &[RemoteFile],
) -> Result<Option<(String, String)>, HubError> {
    let (snapshot, wanted, new) = (snapshot.to_owned(), wanted.to_vec(), new.to_vec());
    let work = move || -> std::io::Result<Option<(String, String)>> {
        for RemoteFile { path, size } in wanted {
            let blob = snapshot.join(&path).canonicalize()?;
            let found = blob.metadata()?.len();
            let problem = if found != size {
                Some(format!("{} instead of {}", Bytes(found), Bytes(size)))
            } else {
                let is_new = new.iter().any(|file| file.path == path);
                (is_new && !has_its_hash(&blob)?).then(|| "the SHA-256 differs".to_owned())
            };
            if let Some(problem) = problem {
                std::fs::remove_file(&blob)?;
                // On systems without links the blob and the file in the snapshot are two.
                if let Err(error) = std::fs::remove_file(snapshot.join(&path))
                    && error.kind() != std::io::ErrorKind::NotFound
                {
                    return Err(error);
                }
                return Ok(Some((path, problem)));
            }
        }
        Ok(None)
    };
    Ok(tokio::task::spawn_blocking(work)
        .await
        .expect("the check does not panic")?)
}

/// The blob of a large file is named by its SHA-256, that of a small one by git's SHA-1, which the size must vouch for.
fn has_its_hash(blob: &Path) -> std::io::Result<bool> {
    let name = blob
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    if name.len() != 64 || !name.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Ok(true);
    }
    let mut file = std::fs::File::open(blob)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => hash.update(&buffer[..n]),
        }
    }
    let digest: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(digest.eq_ignore_ascii_case(name))
}

/// Files under `dir`, as paths relative to `root`; a link whose blob is gone does not count.
pub(super) fn list(root: &Path, dir: &Path, files: &mut Vec<RemoteFile>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        match std::fs::metadata(&path) {
            Ok(data) if data.is_dir() => list(root, &path, files)?,
            Ok(data) => {
                let relative = path.strip_prefix(root).expect("entries lie under the root");
                files.push(RemoteFile {
                    path: relative.to_string_lossy().into_owned(),
                    size: data.len(),
                });
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(())
}

/// A file that the index of a sharded model names and the snapshot lacks.
pub(crate) fn missing_shard(snapshot: &Path) -> Option<String> {
    let index = std::fs::read(snapshot.join(INDEX)).ok()?;
    let index: serde_json::Value = serde_json::from_slice(&index).ok()?;
    let shards = index
        .get("weight_map")?
        .as_object()?
        .values()
        .filter_map(|shard| shard.as_str());
    let mut missing: Vec<_> = shards.filter(|shard| !snapshot.join(shard).exists()).collect();
    missing.sort_unstable();
    missing.first().map(|&shard| shard.to_owned())
}
