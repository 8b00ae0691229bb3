//! One start at a time on each device: whoever measures a device's memory and takes its own share holds the lock.
//!
//! The lock is one of the kernel's on a file, so it is free as soon as its holder ends, however it ends. What the file says
//! about the holder is for people alone.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::terminal;

/// Where lock files lie by default: all users of a machine can meet there, and not everybody's `TMPDIR` is the same.
const DEFAULT_DIR: &str = "/tmp/plimsoll";

/// How often a lock that is held is tried again.
const POLL: Duration = Duration::from_millis(100);

/// How often the log says that it still waits.
const REMIND: Duration = Duration::from_secs(10);

/// Longest description of a holder that is believed.
const HOLDER_BYTES: u64 = 200;

/// How the starts on one device are kept apart.
#[derive(Clone, Debug)]
pub struct Locks {
    dir: PathBuf,
    timeout: Duration,
    /// What others shall read about this process.
    holder: String,
}

/// Held while a device is measured; dropping it lets the next start go on.
#[derive(Debug)]
#[must_use = "a dropped lock is free at once"]
pub struct DeviceLock {
    /// Of each device that is locked.
    files: Vec<File>,
    waited: Duration,
    relock: Relock,
}

/// Takes the lock of a device, or of several, once more in the same process, for a state that is built again. The default is for
/// a device that nobody else can use.
#[derive(Clone, Debug, Default)]
pub struct Relock(Option<(Locks, Vec<String>)>);

impl Relock {
    /// Takes the lock if it is free. Where there can be no lock, a warning says so.
    ///
    /// # Errors
    /// [`Error::DeviceBusy`] if anybody else holds it.
    pub fn try_take(&self) -> Result<DeviceLock, Error> {
        match &self.0 {
            Some((locks, devices)) => locks.take_all(devices),
            None => Ok(DeviceLock::none()),
        }
    }
}

impl DeviceLock {
    /// For a device that nobody else can use, or whose starts cannot be kept apart.
    pub fn none() -> Self {
        Self {
            files: Vec::new(),
            waited: Duration::ZERO,
            relock: Relock::default(),
        }
    }

    /// Holds what another holds too.
    fn add(&mut self, mut other: Self) {
        self.files.append(&mut other.files);
        self.waited += other.waited;
        let others = std::mem::take(&mut other.relock).0;
        match (&mut self.relock.0, others) {
            (Some((_, devices)), Some((_, others))) => devices.extend(others),
            (own @ None, others) => *own = others,
            (Some(_), None) => {}
        }
    }

    /// How to take the same lock later.
    pub fn relock(&self) -> Relock {
        self.relock.clone()
    }

    /// Whether there is a lock.
    pub fn is_held(&self) -> bool {
        !self.files.is_empty()
    }

    /// How long others had it first.
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl Drop for DeviceLock {
    fn drop(&mut self) {
        for file in &self.files {
            // For people alone; the kernel frees the lock with the file.
            let _ = file.set_len(0);
        }
    }
}

impl Locks {
    /// With lock files in `dir`, for a start of `model`; `timeout`: how long to wait for another start.
    pub fn new(dir: Option<PathBuf>, timeout: Duration, model: &str) -> Self {
        Self {
            dir: dir.unwrap_or_else(|| DEFAULT_DIR.into()),
            timeout,
            holder: format!("process {} on {} ({model})", std::process::id(), host()),
        }
    }

    /// Waits until no other start works on `device`. Where there can be no lock, a warning says so and the start goes on.
    ///
    /// # Errors
    /// [`Error::DeviceBusy`] if another start holds it for longer than `--device-lock-timeout`.
    pub fn take(&self, device: &str) -> Result<DeviceLock, Error> {
        let (begin, path) = (Instant::now(), self.dir.join(format!("{device}.lock")));
        let locked = match open(&path) {
            Ok(mut file) => self.wait(device, &path, &mut file, begin)?.map(|()| file),
            Err(error) => Err(error),
        };
        let file = match locked {
            Ok(file) => file,
            Err(error) => {
                tracing::warn!(
                    "no device lock ({}: {error}): two servers that start on one device at the same moment may both count the \
                     same memory; give a directory that they share with --device-lock-dir",
                    path.display()
                );
                return Ok(DeviceLock::none());
            }
        };
        let waited = begin.elapsed();
        tracing::info!(
            "device lock: {}, acquired after {:.1} s",
            path.display(),
            waited.as_secs_f64()
        );
        let at_once = Self {
            timeout: Duration::ZERO,
            ..self.clone()
        };
        Ok(DeviceLock {
            files: vec![file],
            waited,
            relock: Relock(Some((at_once, vec![device.to_owned()]))),
        })
    }

    /// The locks of several devices, as [`Self::take`]: in one order in all starts, so that no two wait for each other.
    ///
    /// # Errors
    /// As [`Self::take`], for the first that is held.
    pub fn take_all(&self, devices: &[String]) -> Result<DeviceLock, Error> {
        let mut devices: Vec<_> = devices.iter().collect();
        devices.sort_unstable();
        devices.dedup();
        let mut all = DeviceLock::none();
        for device in devices {
            all.add(self.take(device)?);
        }
        Ok(all)
    }

    /// Waits for the file's lock; `Ok(Err)`: it cannot be locked at all.
    fn wait(
        &self,
        device: &str,
        path: &Path,
        file: &mut File,
        begin: Instant,
    ) -> Result<io::Result<()>, Error> {
        let mut said = None;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Ok(Err(error)),
            }
            let waited = begin.elapsed();
            if waited >= self.timeout {
                return Err(Error::DeviceBusy {
                    device: device.to_owned(),
                    holder: holder(file),
                    timeout: self.timeout,
                    path: path.to_owned(),
                });
            }
            // A holder needs a moment to say who it is.
            if waited >= POLL && said.is_none_or(|at| waited - at >= REMIND) {
                said = Some(waited);
                let text = format!(
                    "waiting for {device}, which {} is measuring; waited {:.0} s of at most {:.0} s",
                    holder(file),
                    waited.as_secs_f64(),
                    self.timeout.as_secs_f64()
                );
                terminal::phase("device", &text);
                tracing::info!("{text}");
            }
            thread::sleep(POLL.min(self.timeout - waited));
        }
        if let Err(error) = sign(file, &self.holder) {
            tracing::debug!(%error, "cannot read the holder of the lock file");
        }
        Ok(Ok(()))
    }
}

/// Name of the machine or the container, which makes a process id mean something.
fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "this host".to_owned(), |name| name.trim().to_owned())
}

/// Opens a lock file for everybody, in a directory where everybody can make files and nobody remove those of others.
fn open(path: &Path) -> io::Result<File> {
    let dir = path.parent().unwrap_or(path);
    if !dir.is_dir() {
        fs::create_dir_all(dir)?;
        fs::set_permissions(dir, Permissions::from_mode(0o1777))?;
    }
    let mut options = OpenOptions::new();
    // Others may write to the directory: a link would make us write where they like.
    options.read(true).custom_flags(libc::O_NOFOLLOW);
    // A file that is there is opened without O_CREAT, which the kernel refuses for another user's (fs.protected_regular).
    let existing = || match options.clone().write(true).open(path) {
        // Enough for the lock, if not to say who holds it.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => options.open(path),
        opened => opened,
    };
    match existing() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            match options.clone().write(true).create_new(true).open(path) {
                Ok(file) => file.set_permissions(Permissions::from_mode(0o666)).map(|()| file),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => existing(),
                Err(error) => Err(error),
            }
        }
        opened => opened,
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
    use std::io::BufRead;

    use super::*;

    fn locks(dir: &Path, timeout: Duration) -> Locks {
        Locks {
            dir: dir.to_owned(),
            timeout,
            holder: "process 7 on here (m)".to_owned(),
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn one_holder_at_a_time_on_each_device() {
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
        let again = held.relock();
        assert!(matches!(again.try_take(), Err(Error::DeviceBusy { .. })));
        let other = locks.take("GPU-1").unwrap();
        assert!(other.is_held(), "another device is free");
        drop(held);
        let held = again.try_take().unwrap();
        assert!(held.is_held() && locks.take("cpu").is_err());
        drop(held);
        assert!(locks.take("cpu").unwrap().is_held());
        assert!(!DeviceLock::none().relock().try_take().unwrap().is_held());
    }

    #[test]
    fn several_devices_are_locked_together() {
        let dir = tempfile::tempdir().unwrap();
        let locks = locks(dir.path(), Duration::ZERO);
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let held = locks.take_all(&names(&["GPU-2", "GPU-1", "GPU-2"])).unwrap();
        assert!(held.is_held());
        for device in ["GPU-1", "GPU-2"] {
            assert!(matches!(locks.take(device), Err(Error::DeviceBusy { .. })));
        }
        let again = held.relock();
        drop(held);
        let one = locks.take("GPU-2").unwrap();
        assert!(matches!(again.try_take(), Err(Error::DeviceBusy { .. })));
        assert!(
            locks.take("GPU-1").unwrap().is_held(),
            "what was taken is given back"
        );
        drop(one);
        let held = again.try_take().unwrap();
        assert!(held.is_held() && locks.take("GPU-1").is_err() && locks.take("GPU-2").is_err());
        assert!(!locks.take_all(&[]).unwrap().is_held());
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
        let (said, log) = io::pipe().unwrap();
        let begin = Instant::now();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let log = tracing_subscriber::fmt().with_writer(std::sync::Mutex::new(log));
                tracing::subscriber::with_default(log.finish(), || locks.take("cpu").unwrap())
            });
            // From then on it has waited for some time, however late its thread began.
            let (mut said, mut line) = (io::BufReader::new(said), String::new());
            said.read_line(&mut line).unwrap();
            assert!(
                line.contains("waiting for cpu, which process 7 on here (m) is measuring"),
                "{line}"
            );
            thread::sleep(2 * POLL);
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
