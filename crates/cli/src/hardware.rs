//! What the operating system says about the machine.

/// What stands after `key` and a colon in a file such as `/proc/cpuinfo`.
pub(crate) fn field(file: &str, key: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The processor as it calls itself.
pub(crate) fn cpu() -> Option<String> {
    field("/proc/cpuinfo", "model name")
}
