//! One start at a time on each device (U9): whoever measures a device's memory and takes its own share holds the lock.
//!
//! The lock is one of the kernel's on a file, so it is free as soon as its holder ends, however it ends. What the file says
//! about the holder is for people alone.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::args::EngineArgs;
use crate::error::Error;

/// How often a lock that is held is tried again.
const POLL: Duration = Duration::from_millis(100);

/// How often the log says that it still waits.
const REMIND: Duration = Duration::from_secs(10);

/// Longest description of a holder that is believed.
const HOLDER_BYTES: u64 = 200;

/// How the starts on one device are kept apart.
#[derive(Clone, Debug)]
pub struct Locks {
    /// Directories for lock files; the first that can be used is.
    dirs: Vec<PathBuf>,
    timeout: Duration,
    /// What others shall read about this process.
    holder: String,
}

/// Held while a device is measured; dropping it lets the next start go on.
#[derive(Debug)]
#[must_use = "a dropped lock is free at once"]
pub struct DeviceLock {
    file: Option<File>,
    waited: Duration,
}

impl DeviceLock {
    /// For a device that nobody else can use, or whose starts cannot be kept apart.
    pub fn none() -> Self {
        Self {
            file: None,
            waited: Duration::ZERO,
        }
    }

    /// Whether there is a lock.
    pub fn is_held(&self) -> bool {
        self.file.is_some()
    }

    /// How long others had it first.
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl Drop for DeviceLock {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // For people alone; the kernel frees the lock with the file.
            let _ = file.set_len(0);
        }
    }
}

impl Locks {
    /// As the flags say.
    pub fn new(args: &EngineArgs) -> Self {
        let model = args.model.model();
        Self {
            dirs: match &args.device.device_lock_dir {
                Some(dir) => vec![dir.clone()],
                None => default_dirs(),
            },
            timeout: args.device.device_lock_timeout,
            holder: format!("process {} on {} ({model})", std::process::id(), host()),
        }
    }

    /// Waits until no other start works on `device`. Where there can be no lock, a warning says so and the start goes on.
    ///
    /// # Errors
    /// [`Error::DeviceBusy`] if another start holds it for longer than `--device-lock-timeout`.
    pub fn take(&self, device: &str) -> Result<DeviceLock, Error> {
        let mut refused = String::new();
        for dir in &self.dirs {
            match open(dir, device) {
                Ok((path, file)) => return self.wait(device, &path, file),
                Err(error) => refused = format!("{}: {error}", dir.display()),
            }
        }
        no_lock(&refused);
        Ok(DeviceLock::none())
    }

    fn wait(&self, device: &str, path: &Path, mut file: File) -> Result<DeviceLock, Error> {
        let begin = Instant::now();
        let mut said = None;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => {
                    no_lock(&format!("{}: {error}", path.display()));
                    return Ok(DeviceLock::none());
                }
            }
            let waited = begin.elapsed();
            if waited >= self.timeout {
                return Err(Error::DeviceBusy {
                    device: device.to_owned(),
                    holder: holder(&mut file),
                    timeout: self.timeout,
                    path: path.to_owned(),
                });
            }
            // A holder needs a moment to say who it is.
            if waited >= POLL && said.is_none_or(|at| waited - at >= REMIND) {
                said = Some(waited);
                tracing::info!(
                    "waiting for {device}: {} measures it; waited {:.0} s of at most {:.0} s",
                    holder(&mut file),
                    waited.as_secs_f64(),
                    self.timeout.as_secs_f64()
                );
            }
            thread::sleep(POLL.min(self.timeout - waited));
        }
        if let Err(error) = sign(&mut file, &self.holder) {
            tracing::debug!(%error, "the lock file does not say who holds it");
        }
        let waited = begin.elapsed();
        tracing::info!(
            "device lock: {} after {:.1} s",
            path.display(),
            waited.as_secs_f64()
        );
        Ok(DeviceLock {
            file: Some(file),
            waited,
        })
    }
}

fn no_lock(reason: &str) {
    tracing::warn!(
        "no device lock ({reason}): two servers that start on one device at the same moment may both count the same memory; \
         give a directory that they share with --device-lock-dir"
    );
}

/// Where all users of a machine can meet.
fn default_dirs() -> Vec<PathBuf> {
    vec![
        PathBuf::from("/run/lock/plimsoll"),
        std::env::temp_dir().join("plimsoll"),
    ]
}

/// Name of the machine or the container, which makes a process id mean something.
fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "this host".to_owned(), |name| name.trim().to_owned())
}

/// Opens the lock file of `device` for everybody.
fn open(dir: &Path, device: &str) -> io::Result<(PathBuf, File)> {
    if !dir.is_dir() {
        make(dir)?;
    }
    let path = dir.join(format!("{device}.lock"));
    let with = |create_new: bool| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(create_new)
            // Others may write to the directory: a link would make us write where they like.
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
    };
    // Linux refuses to "create" a file of another user's that is there already in a directory of everybody's.
    let file = match with(false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => match with(true) {
            Ok(file) => {
                file.set_permissions(fs::Permissions::from_mode(0o666))?;
                file
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => with(false)?,
            Err(error) => return Err(error),
        },
        other => other?,
    };
    Ok((path, file))
}

/// Makes a directory in which everybody can make files, and nobody can remove those of others.
fn make(dir: &Path) -> io::Result<()> {
    if let Some(parent) = dir.parent() {
        fs::create_dir_all(parent)?;
    }
    match fs::create_dir(dir) {
        Ok(()) => fs::set_permissions(dir, fs::Permissions::from_mode(0o1777)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

fn sign(file: &mut File, holder: &str) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(holder.as_bytes())
}

/// What the holder says about itself. Anybody may have written it.
fn holder(file: &mut File) -> String {
    let mut bytes = Vec::new();
    let read = file
        .rewind()
        .and_then(|()| file.take(HOLDER_BYTES).read_to_end(&mut bytes));
    let text = String::from_utf8_lossy(&bytes);
    let text: String = text.chars().filter(|c| !c.is_control()).collect();
    match read {
        Ok(_) if !text.is_empty() => text,
        _ => "another process".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locks(dir: &Path, timeout: Duration) -> Locks {
        Locks {
            dirs: vec![dir.to_owned()],
            timeout,
            holder: "process 7 on here (m)".to_owned(),
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn u9_one_holder_at_a_time_on_each_device() {
        let dir = tempfile::tempdir().unwrap();
        let locks = locks(&dir.path().join("new/dir"), Duration::ZERO);
        let held = locks.take("cpu").unwrap();
        assert!(held.is_held());
        let error = locks.take("cpu").unwrap_err();
        assert_eq!(error.exit_code(), 8);
        let text = error.to_string();
        for part in ["process 7 on here (m)", "--device-lock-timeout", "cpu.lock"] {
            assert!(text.contains(part), "{text}");
        }
        let other = locks.take("GPU-1").unwrap();
        assert!(other.is_held(), "another device is free");
        drop(held);
        assert!(locks.take("cpu").unwrap().is_held());
    }

    #[test]
    fn everybody_may_use_the_files() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("plimsoll");
        drop(locks(&dir, Duration::ZERO).take("cpu").unwrap());
        assert_eq!(mode(&dir), 0o1777);
        assert_eq!(mode(&dir.join("cpu.lock")), 0o666);
        // A directory that is there already stays as it is.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        drop(locks(&dir, Duration::ZERO).take("cpu").unwrap());
        assert_eq!(mode(&dir), 0o755);
    }

    #[test]
    fn whoever_waits_goes_on_when_the_holder_is_done() {
        let dir = tempfile::tempdir().unwrap();
        let locks = locks(dir.path(), Duration::from_secs(60));
        let held = locks.take("cpu").unwrap();
        let begin = Instant::now();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| locks.take("cpu").unwrap());
            thread::sleep(Duration::from_millis(300));
            assert!(!waiting.is_finished());
            drop(held);
            let lock = waiting.join().unwrap();
            assert!(
                lock.is_held() && lock.waited() > Duration::from_millis(200),
                "{lock:?}"
            );
        });
        assert!(begin.elapsed() < Duration::from_secs(30), "it was told nothing");
    }

    #[test]
    fn without_a_usable_directory_there_is_no_lock_and_no_failure() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        for unusable in [file.as_path(), &file.join("below"), Path::new("/proc/plimsoll")] {
            assert!(!locks(unusable, Duration::ZERO).take("cpu").unwrap().is_held());
        }
        // The next directory does as well.
        let mut both = locks(&file, Duration::ZERO);
        both.dirs.push(dir.path().join("usable"));
        assert!(both.take("cpu").unwrap().is_held());
    }

    #[test]
    fn a_link_is_not_followed_and_a_holder_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("precious");
        fs::write(&target, "text").unwrap();
        std::os::unix::fs::symlink(&target, dir.path().join("cpu.lock")).unwrap();
        assert!(!locks(dir.path(), Duration::ZERO).take("cpu").unwrap().is_held());
        assert_eq!(fs::read_to_string(&target).unwrap(), "text");

        let mut file = tempfile::tempfile().unwrap();
        assert_eq!(holder(&mut file), "another process");
        sign(&mut file, &format!("a\n\u{1b}[31mb{}", "x".repeat(1000))).unwrap();
        let text = holder(&mut file);
        assert!(text.starts_with("a[31mbx") && text.len() < 200, "{text}");
    }
}
