//! The end of the process, which no device may hold up.

use std::thread;
use std::time::Duration;

/// How long exit handlers may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Ends the process by SIGABRT if it is still there in five seconds. A driver whose device hangs may never leave the exit
/// handlers that it has installed.
pub fn at_the_latest() {
    thread::spawn(|| {
        thread::sleep(PATIENCE);
        std::process::abort();
    });
}
