//! Default memory budget of a server.
//!
//! Two bounds apply and the lower one holds:
//! - half of what the machine has available (`MemAvailable`): a machine without a limit is shared with others, and the
//!   process itself needs memory beyond the budget (tokenizer, HTTP, page cache of the weights' file);
//! - three quarters of what is left below the control group's limit (v2 or v1): the limit was set for this service, and
//!   exceeding it kills the process.

use std::fmt;

use crate::{CapacityError, Machine};

/// Default size of a budget, and what bounds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The bytes.
    pub bytes: u64,
    /// What bounds them.
    pub bound: Bound,
}

/// What bounds a [`Capacity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Memory available on the machine, in bytes.
    Available(u64),
    /// Memory left below the limit of a control group, in bytes.
    ControlGroup(u64),
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Available(bytes) => write!(f, "half of the {} MiB available on this machine", bytes >> 20),
            Self::ControlGroup(bytes) => {
                write!(
                    f,
                    "three quarters of the {} MiB left below the control group's limit",
                    bytes >> 20
                )
            }
        }
    }
}

/// Asks the operating system (Linux: `/proc` and `/sys/fs/cgroup`).
///
/// # Errors
/// [`CapacityError`] where there is no readable `/proc/meminfo`. An absent or unlimited control group is no error.
pub fn default_capacity() -> Result<Capacity, CapacityError> {
    on(&Machine::this())
}

fn on(machine: &Machine) -> Result<Capacity, CapacityError> {
    let room = machine.room()?;
    let host = Capacity {
        bytes: room.machine / 2,
        bound: Bound::Available(room.machine),
    };
    let group = room
        .group
        .map(|room| Capacity {
            bytes: room / 4 * 3,
            bound: Bound::ControlGroup(room),
        })
        .filter(|group| group.bytes < host.bytes);
    Ok(group.unwrap_or(host))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    fn detect(root: &Path) -> Result<Capacity, CapacityError> {
        on(&Machine::at(root))
    }

    const MEMINFO: &str =
        "MemTotal:       24684096 kB\nMemFree:        19252144 kB\nMemAvailable:   16777216 kB\n";
    const GIB: u64 = 1 << 30;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn half_of_a_machine_without_limits() {
        let expected = Capacity {
            bytes: 8 * GIB,
            bound: Bound::Available(16 * GIB),
        };
        let plain = machine(&[("proc/meminfo", MEMINFO)]);
        assert_eq!(detect(plain.path()).unwrap(), expected);
        let unlimited = machine(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "4:memory:/a/b\n0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "max\n"),
            (
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
        ]);
        assert_eq!(detect(unlimited.path()).unwrap(), expected);
        assert_eq!(
            expected.bound.to_string(),
            "half of the 16384 MiB available on this machine"
        );
    }

    #[test]
    fn a_limit_of_version_2_holds_at_every_level() {
        let root = machine(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/kubepods/pod7\n"),
            ("sys/fs/cgroup/kubepods/memory.max", "5368709120\n"),
            ("sys/fs/cgroup/kubepods/memory.current", "2147483648\n"),
            (
                "sys/fs/cgroup/kubepods/memory.stat",
                "anon 7\ninactive_file 1073741824\nshmem 5\n",
            ),
            ("sys/fs/cgroup/kubepods/pod7/memory.max", "max\n"),
        ]);
        let expected = Capacity {
            bytes: 3 * GIB,
            bound: Bound::ControlGroup(4 * GIB),
        };
        assert_eq!(detect(root.path()).unwrap(), expected);
    }

    #[test]
    fn a_limit_of_version_1() {
        let root = machine(&[
            ("proc/meminfo", MEMINFO),
            (
                "proc/self/cgroup",
                "5:cpu:/docker/x\n4:hugetlb,memory:/docker/x\n0::/\n",
            ),
            // The container sees its own group at the mount point.
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "536870912\n"),
            (
                "sys/fs/cgroup/memory/memory.stat",
                "inactive_file 1\ntotal_inactive_file 0\n",
            ),
        ]);
        let expected = Capacity {
            bytes: GIB / 8 * 3,
            bound: Bound::ControlGroup(GIB / 2),
        };
        assert_eq!(detect(root.path()).unwrap(), expected);
    }

    #[test]
    fn a_group_over_its_limit_has_no_room() {
        let root = machine(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "100\n"),
            ("sys/fs/cgroup/memory.current", "200\n"),
        ]);
        assert_eq!(detect(root.path()).unwrap().bytes, 0);
    }

    #[test]
    fn a_machine_that_does_not_say_is_an_error_that_names_the_flag() {
        let old = machine(&[("proc/meminfo", "MemTotal: 5 kB\nMemFree: 3 kB\n")]);
        for root in [old.path(), Path::new("/nonexistent")] {
            let message = detect(root).unwrap_err().to_string();
            assert!(
                message.contains("--device-memory") && message.contains("meminfo"),
                "{message}"
            );
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_has_some() {
        assert!(default_capacity().unwrap().bytes > 0);
    }
}
