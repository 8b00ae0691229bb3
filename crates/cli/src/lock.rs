//! One start at a time on each device: whoever measures a device's memory and takes its own share holds the lock.
//!
//! The lock is one of the kernel's on a file, so it is free as soon as its holder ends, however it ends. What the file says
//! about the holder is for people alone.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::args::EngineArgs;
use crate::error::Error;

/// How often a lock that is held is tried again.
const POLL: Duration = Duration::from_millis(100);

/// How often the log says that it still waits.
const REMIND: Duration = Duration::from_secs(10);

/// Begins the names of what is not everybody's yet.
const UNFINISHED: &str = ".unfinished-";

/// Longest description of a holder that is believed.
const HOLDER_BYTES: u64 = 200;

/// How the starts on one device are kept apart.
#[derive(Clone, Debug)]
pub struct Locks {
    /// Directories for lock files, in the order of all processes. A lock is taken in each that can be used: which ones
    /// differs between users, and two of them shall meet in one at least.
    dirs: Vec<PathBuf>,
    timeout: Duration,
    /// What others shall read about this process.
    holder: String,
}

/// Held while a device is measured; dropping it lets the next start go on.
#[derive(Debug)]
#[must_use = "a dropped lock is free at once"]
pub struct DeviceLock {
    files: Vec<File>,
    waited: Duration,
    relock: Relock,
}

/// Takes a device's lock once more in the same process, for a state that is built again. The default is for a device that
/// nobody else can use.
#[derive(Clone, Debug, Default)]
pub struct Relock(Option<(Locks, String)>);

impl Relock {
    /// Takes the lock if it is free. Where there can be no lock, a warning says so.
    ///
    /// # Errors
    /// [`Error::DeviceBusy`] if anybody else holds it.
    pub fn try_take(&self) -> Result<DeviceLock, Error> {
        match &self.0 {
            Some((locks, device)) => locks.take(device),
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
        let begin = Instant::now();
        let (mut paths, mut files, mut refused) = (Vec::new(), Vec::<File>::new(), Vec::new());
        for dir in &self.dirs {
            match open(dir, device) {
                // A directory that leads to another has the same file, whose lock would be waited for by its holder.
                Ok((_, file)) if files.iter().any(|held| is_same(held, &file)) => {}
                Ok((path, mut file)) => match self.wait(device, &path, &mut file, begin)? {
                    Ok(()) => {
                        paths.push(path.display().to_string());
                        files.push(file);
                    }
                    Err(error) => refused.push(format!("{}: {error}", path.display())),
                },
                Err(error) => refused.push(format!("{}: {error}", dir.display())),
            }
        }
        if files.is_empty() {
            no_lock(&refused.join(", "));
            return Ok(DeviceLock::none());
        }
        let waited = begin.elapsed();
        tracing::info!(
            "device lock: {} after {:.1} s",
            paths.join(", "),
            waited.as_secs_f64()
        );
        let at_once = Self {
            timeout: Duration::ZERO,
            ..self.clone()
        };
        Ok(DeviceLock {
            files,
            waited,
            relock: Relock(Some((at_once, device.to_owned()))),
        })
    }

    /// Waits for one file's lock; `Ok(Err)`: it cannot be locked at all.
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
                tracing::info!(
                    "waiting for {device}: {} measures it; waited {:.0} s of at most {:.0} s",
                    holder(file),
                    waited.as_secs_f64(),
                    self.timeout.as_secs_f64()
                );
            }
            thread::sleep(POLL.min(self.timeout - waited));
        }
        if let Err(error) = sign(file, &self.holder) {
            tracing::debug!(%error, "the lock file does not say who holds it");
        }
        Ok(Ok(()))
    }
}

fn is_same(a: &File, b: &File) -> bool {
    let id = |file: &File| {
        file.metadata()
            .map(|metadata| (metadata.dev(), metadata.ino()))
            .ok()
    };
    id(a).is_some() && id(a) == id(b)
}

fn no_lock(reason: &str) {
    tracing::warn!(
        "no device lock ({reason}): two servers that start on one device at the same moment may both count the same memory; \
         give a directory that they share with --device-lock-dir"
    );
}

/// Where all users of a machine can meet: in some systems only the superuser may write to the first, and not everybody's
/// `TMPDIR` is the same.
fn default_dirs() -> Vec<PathBuf> {
    ["/run/lock/plimsoll", "/tmp/plimsoll"].map(PathBuf::from).into()
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
    let existing = || {
        OpenOptions::new()
            .read(true)
            .write(true)
            // Others may write to the directory: a link would make us write where they like.
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
    };
    let file = match existing() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // Under its name it is everybody's from the first moment on: who comes between must not be turned away.
            let unfinished = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(dir)?;
            let permissions = fs::Permissions::from_mode(0o666);
            unfinished.as_file().set_permissions(permissions)?;
            match unfinished.persist_noclobber(&path) {
                Ok(file) => file,
                Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => existing()?,
                Err(error) => return Err(error.error),
            }
        }
        other => other?,
    };
    Ok((path, file))
}

/// Makes a directory in which everybody can make files, and nobody can remove those of others.
fn make(dir: &Path) -> io::Result<()> {
    if let Some(parent) = dir.parent() {
        fs::create_dir_all(parent)?;
    }
    let unfinished = tempfile::Builder::new()
        .prefix(UNFINISHED)
        .tempdir_in(dir.parent().unwrap_or(dir))?;
    fs::set_permissions(unfinished.path(), fs::Permissions::from_mode(0o1777))?;
    match fs::rename(unfinished.path(), dir) {
        Ok(()) => {
            // It has another name now, and stays.
            let _ = unfinished.keep();
            Ok(())
        }
        // Somebody else was first.
        Err(_) if dir.is_dir() => Ok(()),
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
    use std::io::BufRead;

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
            assert!(line.contains("waiting for cpu: process 7 on here (m)"), "{line}");
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
        // The next directory does as well.
        let mut both = locks(&file, Duration::ZERO);
        both.dirs.push(dir.path().join("usable"));
        assert!(both.take("cpu").unwrap().is_held());
    }

    /// One user may write to both directories, the other to the second alone.
    #[test]
    fn users_who_share_one_directory_of_two_meet_there() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("first"), dir.path().join("second"));
        let all = Locks {
            dirs: vec![first.clone(), second.clone()],
            ..locks(&first, Duration::ZERO)
        };
        let some = locks(&second, Duration::ZERO);
        let held = some.take("cpu").unwrap();
        assert_eq!(all.take("cpu").unwrap_err().exit_code(), 8);
        drop(held);
        let held = all.take("cpu").unwrap();
        assert_eq!(some.take("cpu").unwrap_err().exit_code(), 8);
        drop(held);
        assert!(some.take("cpu").unwrap().is_held());
        // The same directory by two names is one.
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&first, &link).unwrap();
        let twice = Locks {
            dirs: vec![first.clone(), link],
            ..locks(&first, Duration::ZERO)
        };
        assert!(twice.take("cpu").unwrap().is_held());
    }

    /// Whoever sees a file or directory may use it: there is no moment between its creation and its permissions.
    #[test]
    fn nothing_is_there_before_it_is_everybodys() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("plimsoll");
        let done = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                for device in 0..200 {
                    drop(locks(&dir, Duration::ZERO).take(&device.to_string()).unwrap());
                }
                done.store(true, std::sync::atomic::Ordering::Relaxed);
            });
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
                    let path = entry.path();
                    let seen = path.extension().is_some_and(|extension| extension == "lock");
                    assert!(!seen || mode(&path) == 0o666, "{}", path.display());
                }
            }
        });
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 200, "nothing is left behind");
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
