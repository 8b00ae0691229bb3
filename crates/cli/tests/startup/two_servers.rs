//! Servers that start at the same moment on one device: real processes and their lock file.

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use crate::Model;
use crate::process::Process;

const FLAGS: [&str; 4] = ["--device-memory", "48MiB", "--max-model-len", "1024"];
const SERVE: [&str; 6] = [
    "--device-memory",
    "48MiB",
    "--max-model-len",
    "1024",
    "--port",
    "0",
];

/// Time of a log line, as text that sorts.
fn time(line: &str) -> String {
    let plain = line.split_whitespace().next().unwrap_or_default();
    assert!(plain.ends_with('Z'), "no time in {line}");
    plain.to_owned()
}

/// One measures, then the other; both end with a size that was proved.
#[test]
fn servers_that_start_together_measure_one_after_the_other() {
    let (model, locks) = (Model::new(), tempfile::tempdir().unwrap());
    let mut servers = [(); 3].map(|()| Process::start("serve", model.dir.path(), locks.path(), &SERVE));
    let mut turns: Vec<_> = servers
        .iter_mut()
        .map(|server| {
            let begin = time(&server.expect(&["device lock:"]));
            let baseline = time(&server.expect(&["phase=baseline"]));
            let proved = server.expect(&["phase=validate", "outcome=proved"]);
            server.expect(&["ready: "]);
            (begin, baseline, time(&proved))
        })
        .collect();
    turns.sort();
    for (begin, baseline, proved) in &turns {
        assert!(begin <= baseline && baseline < proved, "{turns:?}");
    }
    for pair in turns.windows(2) {
        assert!(
            pair[0].2 < pair[1].0,
            "one began before the other was proved: {turns:?}"
        );
    }
}

/// A holder that hangs is waited for as long as was asked; one that is killed is not waited for.
#[test]
fn whoever_waits_gives_up_in_time_or_goes_on_when_the_holder_dies() {
    let (model, locks) = (Model::new(), tempfile::tempdir().unwrap());
    // This test holds it: no process could be stopped at the right moment on every machine.
    let mut holder = File::create(locks.path().join("cpu.lock")).unwrap();
    holder.lock().unwrap();
    let name = format!("process {}", std::process::id());
    write!(holder, "{name}").unwrap();

    let mut impatient = Process::start(
        "profile",
        model.dir.path(),
        locks.path(),
        &[&FLAGS[..], &["--device-lock-timeout", "0.2"]].concat(),
    );
    assert_eq!(impatient.finish(), Some(8), "{:?}", impatient.log);
    let said = impatient.expect(&["error: ", "cpu", "--device-lock-timeout"]);
    assert!(said.contains(&name), "{said}");
    // The simulated device is each process's own.
    let mut simulated = Process::start(
        "profile",
        "sim".as_ref(),
        locks.path(),
        &["--device-lock-timeout", "0"],
    );
    assert_eq!(simulated.finish(), Some(0), "{:?}", simulated.log);

    let mut patient = Process::start("profile", model.dir.path(), locks.path(), &FLAGS);
    let waiting = patient.expect(&["waiting for cpu"]);
    assert!(waiting.contains(&name) && waiting.contains("600 s"), "{waiting}");
    let freed = Instant::now();
    // As the kernel does for a process that ends, however it ends.
    drop(holder);
    patient.expect(&["device lock:"]);
    assert!(freed.elapsed() < Duration::from_secs(60));
    assert_eq!(patient.finish(), Some(0), "{:?}", patient.log);
}
