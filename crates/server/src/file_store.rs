//! Files of `/v1/files` and batches, in a directory of bounded size. What is in it outlives the process, if the operator names the
//! directory.

use std::collections::HashSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::sync::watch;

use crate::time::unix_seconds;
use crate::wire::batch::{BatchObject, FileObject};

/// Limits of the file store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLimits {
    /// Maximum number of files, and of batches.
    pub count: usize,
    /// Maximum bytes of all files.
    pub bytes: u64,
    /// How long files and ended batches are kept.
    pub expiry: Duration,
}

impl Default for FileLimits {
    fn default() -> Self {
        Self {
            count: 10_000,
            bytes: 1 << 30,
            expiry: Duration::from_secs(30 * 24 * 3600),
        }
    }
}

/// Why something was not stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// There are too many bytes.
    #[error("the server's file store holds at most {0} bytes; delete files, or see --file-store-max-bytes")]
    Full(u64),
    /// There are too many files or batches.
    #[error(
        "the server's file store holds at most {0} files and as many batches; delete files, or see --file-store-max-count"
    )]
    TooMany(usize),
    /// The file system failed.
    #[error("the server's file store failed: {0}")]
    Io(#[from] io::Error),
}

/// Whose it is: the name of an API key.
pub(crate) type Owner = Option<String>;

/// An object of the API with what clients do not see.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record<T> {
    pub(crate) owner: Owner,
    /// Grows from one to the next.
    serial: u64,
    pub(crate) object: T,
}

/// A batch, with the files that its results are written to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Batch {
    pub(crate) object: BatchObject,
    /// Files that are not complete, and so not listed: answers and errors.
    pub(crate) parts: [String; 2],
    /// When results expire, in seconds after they are complete.
    pub(crate) output_expiry: Option<u64>,
}

/// Files and batches.
#[derive(Debug)]
pub struct FileStore {
    /// The operator's directory.
    dir: Option<PathBuf>,
    /// In place of it, made with the first file: there may be no room for one, nor a need.
    temporary: OnceLock<TempDir>,
    /// Tells other processes that the operator's directory is in use.
    _lock: Option<File>,
    limits: FileLimits,
    inner: Mutex<Inner>,
    /// Changes when a batch is to be cancelled.
    cancelled: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Inner {
    files: Vec<Record<FileObject>>,
    batches: Vec<Record<Batch>>,
    /// Bytes of all files, those that are being written among them.
    used: u64,
    serial: u64,
}

impl Inner {
    /// What an earlier process left in `dir`, which is made if it is not there.
    fn read(dir: &Path) -> io::Result<Self> {
        make_parts(dir)?;
        let mut inner = Self {
            files: read_records(&dir.join(FILES))?,
            batches: read_records(&dir.join(BATCHES))?,
            ..Self::default()
        };
        inner.serial = last(&inner.files).max(last(&inner.batches));
        // Uploads that a crash interrupted, and whatever else no record knows.
        let live = inner
            .batches
            .iter()
            .filter(|batch| batch.object.object.status.is_live());
        let parts = live.flat_map(|batch| batch.object.parts.iter().cloned());
        let known: HashSet<String> = inner
            .files
            .iter()
            .map(|file| file.object.id.clone())
            .chain(parts)
            .collect();
        for entry in fs::read_dir(dir.join(FILES))? {
            let path = entry?.path();
            let stem = path
                .file_stem()
                .and_then(|stem| stem.to_str())
                .unwrap_or_default();
            if !known.contains(stem) {
                fs::remove_file(&path)?;
            } else if path.extension().is_some_and(|kind| kind == CONTENT) {
                inner.used += fs::metadata(&path)?.len();
            }
        }
        Ok(inner)
    }
}

/// The lock of a directory, which is made if it is not there.
fn lock(dir: &Path) -> io::Result<File> {
    fs::create_dir_all(dir)?;
    let file = File::create(dir.join("lock"))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(io::Error::other(
            "another server uses it; give each its own --file-store-dir",
        )),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn make_parts(dir: &Path) -> io::Result<()> {
    [FILES, BATCHES]
        .into_iter()
        .try_for_each(|part| fs::create_dir_all(dir.join(part)))
}

const FILES: &str = "files";
const BATCHES: &str = "batches";

impl FileStore {
    /// Opens the store in `dir`, which is made if it is not there; without one in a directory that is removed in the end.
    ///
    /// # Errors
    /// If the directory cannot be made or read.
    pub fn open(dir: Option<&Path>, limits: FileLimits) -> io::Result<Self> {
        let lock = dir.map(lock).transpose()?;
        let inner = match dir {
            Some(dir) => Inner::read(dir)?,
            None => Inner::default(),
        };
        Ok(Self {
            dir: dir.map(Path::to_owned),
            temporary: OnceLock::new(),
            _lock: lock,
            limits,
            inner: Mutex::new(inner),
            cancelled: watch::Sender::new(()),
        })
    }

    /// The directory, which is there once there is a file.
    fn dir(&self) -> &Path {
        let temporary = self.temporary.get().map(TempDir::path);
        self.dir.as_deref().or(temporary).unwrap_or(Path::new(""))
    }

    /// Makes the temporary directory, if there is to be one.
    fn prepare(&self) -> io::Result<()> {
        let _once = self.inner.lock();
        if self.dir.is_some() || self.temporary.get().is_some() {
            return Ok(());
        }
        let temporary = tempfile::Builder::new().prefix("plimsoll-files-").tempdir()?;
        make_parts(temporary.path())?;
        self.temporary.get_or_init(|| temporary);
        Ok(())
    }

    /// How long files are kept.
    pub(crate) fn expiry(&self) -> u64 {
        self.limits.expiry.as_secs()
    }

    /// The content of a file, whether it is complete or not.
    pub(crate) fn path(&self, id: &str) -> PathBuf {
        self.dir().join(FILES).join(id).with_extension(CONTENT)
    }

    /// A file of `owner`.
    pub(crate) fn file(&self, owner: &Owner, id: &str) -> Option<FileObject> {
        self.sweep();
        let inner = self.inner.lock();
        let found = inner
            .files
            .iter()
            .find(|file| file.object.id == id && file.owner == *owner);
        found.map(|file| file.object.clone())
    }

    /// All files of `owner`, the oldest first.
    pub(crate) fn files(&self, owner: &Owner) -> Vec<FileObject> {
        self.sweep();
        let inner = self.inner.lock();
        let own = inner.files.iter().filter(|file| file.owner == *owner);
        own.map(|file| file.object.clone()).collect()
    }

    /// Deletes a file of `owner`; false if there is none.
    pub(crate) fn delete(&self, owner: &Owner, id: &str) -> io::Result<bool> {
        let mut inner = self.inner.lock();
        let at = inner
            .files
            .iter()
            .position(|file| file.object.id == id && file.owner == *owner);
        let Some(at) = at else { return Ok(false) };
        self.remove_file(&mut inner, at)?;
        Ok(true)
    }

    fn remove_file(&self, inner: &mut Inner, at: usize) -> io::Result<()> {
        let id = inner.files[at].object.id.clone();
        remove(&self.record_path(FILES, &id))?;
        remove(&self.path(&id))?;
        let file = inner.files.remove(at);
        inner.used = inner.used.saturating_sub(file.object.bytes);
        Ok(())
    }

    fn record_path(&self, kind: &str, id: &str) -> PathBuf {
        self.dir().join(kind).join(id).with_extension("json")
    }

    /// Removes what has expired.
    fn sweep(&self) {
        let now = unix_seconds();
        let mut inner = self.inner.lock();
        while let Some(at) = inner.files.iter().position(|file| file.object.expires_at <= now) {
            if let Err(error) = self.remove_file(&mut inner, at) {
                tracing::error!(%error, "an expired file cannot be removed");
                break;
            }
        }
        let expiry = self.expiry();
        let is_old = |batch: &Record<Batch>| {
            let object = &batch.object.object;
            !object.status.is_live() && object.created_at.saturating_add(expiry) <= now
        };
        let old: Vec<_> = inner
            .batches
            .iter()
            .filter(|batch| is_old(batch))
            .cloned()
            .collect();
        for batch in old {
            let id = &batch.object.object.id;
            if let Err(error) = remove(&self.record_path(BATCHES, id)) {
                tracing::error!(%error, "an expired batch cannot be removed");
                break;
            }
            inner.batches.retain(|other| other.serial != batch.serial);
        }
    }

    /// Begins or continues a file called `id`. `is_kept`: what was written so far stays if the writer is dropped.
    pub(crate) async fn write(self: &Arc<Self>, id: &str, is_kept: bool) -> Result<Writer, StoreError> {
        self.prepare()?;
        let path = self.path(id);
        let file = tokio::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .await?;
        let bytes = file.metadata().await?.len();
        Ok(Writer {
            store: Arc::clone(self),
            id: id.to_owned(),
            file,
            bytes,
            is_kept,
        })
    }

    fn reserve(&self, bytes: u64) -> Result<(), StoreError> {
        let mut inner = self.inner.lock();
        if inner.used.saturating_add(bytes) > self.limits.bytes {
            return Err(StoreError::Full(self.limits.bytes));
        }
        inner.used += bytes;
        Ok(())
    }

    /// Forgets a file that was not completed.
    fn abandon(&self, id: &str, bytes: u64) {
        if let Err(error) = remove(&self.path(id)) {
            tracing::error!(%error, "an incomplete file cannot be removed");
        }
        let mut inner = self.inner.lock();
        inner.used = inner.used.saturating_sub(bytes);
    }

    /// An incomplete file lost so many bytes at its end.
    pub(crate) fn shrank(&self, bytes: u64) {
        let mut inner = self.inner.lock();
        inner.used = inner.used.saturating_sub(bytes);
    }

    /// Room for another file.
    pub(crate) fn check_count(&self) -> Result<(), StoreError> {
        self.sweep();
        match self.inner.lock().files.len() {
            count if count < self.limits.count => Ok(()),
            _ => Err(StoreError::TooMany(self.limits.count)),
        }
    }

    fn add_file(&self, owner: Owner, object: FileObject) -> Result<(), StoreError> {
        let mut inner = self.inner.lock();
        inner.serial += 1;
        let record = Record {
            owner,
            serial: inner.serial,
            object,
        };
        save(&self.record_path(FILES, &record.object.id), &record)?;
        inner.files.push(record);
        Ok(())
    }

    /// Adds a batch.
    pub(crate) fn add_batch(&self, owner: Owner, batch: Batch) -> Result<(), StoreError> {
        self.sweep();
        let mut inner = self.inner.lock();
        if inner.batches.len() >= self.limits.count {
            return Err(StoreError::TooMany(self.limits.count));
        }
        inner.serial += 1;
        let record = Record {
            owner,
            serial: inner.serial,
            object: batch,
        };
        save(&self.record_path(BATCHES, &record.object.object.id), &record)?;
        inner.batches.push(record);
        Ok(())
    }

    /// A batch of `owner`.
    pub(crate) fn batch(&self, owner: &Owner, id: &str) -> Option<BatchObject> {
        self.sweep();
        let found = self.batch_record(id).filter(|batch| batch.owner == *owner);
        found.map(|batch| batch.object.object)
    }

    /// A batch, whoever owns it.
    pub(crate) fn batch_record(&self, id: &str) -> Option<Record<Batch>> {
        let inner = self.inner.lock();
        let found = inner.batches.iter().find(|batch| batch.object.object.id == id);
        found.cloned()
    }

    /// All batches of `owner`, the oldest first.
    pub(crate) fn batches(&self, owner: &Owner) -> Vec<BatchObject> {
        self.sweep();
        let inner = self.inner.lock();
        let own = inner.batches.iter().filter(|batch| batch.owner == *owner);
        own.map(|batch| batch.object.object.clone()).collect()
    }

    /// Ids of batches that are not over.
    pub(crate) fn live_batches(&self) -> Vec<String> {
        let inner = self.inner.lock();
        let live = inner
            .batches
            .iter()
            .filter(|batch| batch.object.object.status.is_live());
        live.map(|batch| batch.object.object.id.clone()).collect()
    }

    /// Changes a batch. `saved`: also on disk.
    pub(crate) fn change_batch(
        &self,
        id: &str,
        saved: bool,
        change: impl FnOnce(&mut BatchObject),
    ) -> Result<Option<BatchObject>, StoreError> {
        let mut inner = self.inner.lock();
        let Some(record) = inner
            .batches
            .iter_mut()
            .find(|batch| batch.object.object.id == id)
        else {
            return Ok(None);
        };
        change(&mut record.object.object);
        if saved {
            save(&self.record_path(BATCHES, id), record)?;
        }
        let object = record.object.object.clone();
        drop(inner);
        self.cancelled.send_replace(());
        Ok(Some(object))
    }

    /// Completes when batch `id` is to be cancelled, or is gone.
    pub(crate) async fn cancelled(&self, id: &str) {
        use crate::wire::batch::BatchStatus::{Finalizing, InProgress, Validating};
        let goes_on = || {
            let record = self.batch_record(id);
            record.is_some_and(|batch| {
                matches!(batch.object.object.status, Validating | InProgress | Finalizing)
            })
        };
        // The sender lives as long as the store.
        let _ = self.cancelled.subscribe().wait_for(|()| !goes_on()).await;
    }
}

/// Extension of contents.
const CONTENT: &str = "data";

/// A file being written.
#[derive(Debug)]
pub(crate) struct Writer {
    store: Arc<FileStore>,
    id: String,
    file: tokio::fs::File,
    bytes: u64,
    is_kept: bool,
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.is_kept {
            self.store.abandon(&self.id, self.bytes);
        }
    }
}

impl Writer {
    /// Appends `data`.
    pub(crate) async fn append(&mut self, data: &[u8]) -> Result<(), StoreError> {
        self.store.reserve(data.len() as u64)?;
        self.file.write_all(data).await?;
        self.bytes += data.len() as u64;
        Ok(())
    }

    /// Whether nothing was written.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Forgets what was written.
    pub(crate) fn give_up(mut self) {
        self.is_kept = false;
    }

    /// Waits until everything is written.
    pub(crate) async fn flush(&mut self) -> Result<(), StoreError> {
        Ok(self.file.flush().await?)
    }

    /// Completes the file, which is listed from then on. It is deleted `expiry` seconds from now.
    pub(crate) async fn finish(
        mut self,
        owner: Owner,
        filename: String,
        purpose: &str,
        expiry: u64,
    ) -> Result<FileObject, StoreError> {
        self.flush().await?;
        self.file.sync_all().await?;
        let created_at = unix_seconds();
        let object = FileObject {
            id: self.id.clone(),
            object: "file".to_owned(),
            bytes: self.bytes,
            created_at,
            expires_at: created_at.saturating_add(expiry),
            filename,
            purpose: purpose.to_owned(),
            status: "processed".to_owned(),
        };
        self.store.add_file(owner, object.clone())?;
        self.is_kept = true;
        Ok(object)
    }
}

/// Writes a record whole or not at all.
fn save<T: Serialize>(path: &Path, record: &T) -> io::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, serde_json::to_vec(record)?)?;
    fs::rename(new, path)
}

/// Removes a file, which may be gone.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn last<T>(records: &[Record<T>]) -> u64 {
    records.iter().map(|record| record.serial).max().unwrap_or(0)
}

/// All records of a directory, the oldest first.
fn read_records<T: DeserializeOwned>(dir: &Path) -> io::Result<Vec<Record<T>>> {
    let mut records = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "json") {
            let record = serde_json::from_slice(&fs::read(&path)?);
            let record: Record<T> =
                record.map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
            records.push(record);
        }
    }
    records.sort_by_key(|record| record.serial);
    Ok(records)
}
