//! Memory of the machine: `/proc` and the control groups of Linux.
//!
//! Three things bound what a process can still take: what the machine has available (`MemAvailable`, which counts page cache
//! as available because the kernel gives it back), what is left below the limit of its control group and of every group
//! above that, and what the process has been promised already without having touched it.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// How much memory a shared device has left for this process.
pub trait Supply: fmt::Debug + Send + Sync {
    /// Bytes that this process could take now beyond the `reserved` bytes that it has taken; `None` if that is unknown.
    fn left(&self, reserved: u64) -> Option<u64>;
}

/// The machine this process runs on, as its files describe it.
#[derive(Clone, Debug)]
pub struct Machine {
    root: PathBuf,
}

/// Memory left for this process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Available on the machine.
    pub machine: u64,
    /// Left below the tightest limit of a control group; `None` without a limit.
    pub group: Option<u64>,
}

impl Room {
    /// The lower of both bounds.
    pub fn bytes(&self) -> u64 {
        self.group.map_or(self.machine, |group| group.min(self.machine))
    }
}

/// The machine does not say how much memory it has.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the available memory from {path} ({reason}); set --device-memory, such as 8GiB")]
pub struct CapacityError {
    path: PathBuf,
    reason: String,
}

impl Machine {
    /// This machine.
    pub fn this() -> Self {
        Self::at(Path::new("/"))
    }

    /// The machine whose `proc` and `sys` stand in `root`.
    pub(crate) fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// Memory left now.
    ///
    /// # Errors
    /// [`CapacityError`] where there is no readable `/proc/meminfo`. An absent or unlimited control group is no error.
    pub fn room(&self) -> Result<Room, CapacityError> {
        let path = self.root.join("proc/meminfo");
        let error = |reason: String| CapacityError {
            path: path.clone(),
            reason,
        };
        let meminfo = fs::read_to_string(&path).map_err(|e| error(e.to_string()))?;
        let available = kilobytes(&meminfo, "MemAvailable")
            .ok_or_else(|| error("there is no MemAvailable line".into()))?;
        Ok(Room {
            machine: available.saturating_add(self.at_hand().unwrap_or(0)),
            group: self.group_room(),
        })
    }

    /// Bytes that this process could ever take: all memory of the machine, or the tightest limit of a control group; `None` if the
    /// machine does not say.
    pub fn size(&self) -> Option<u64> {
        let meminfo = fs::read_to_string(self.root.join("proc/meminfo")).ok()?;
        let machine = kilobytes(&meminfo, "MemTotal")?;
        let group = self.least_of_groups(|group, root| group.limit(root));
        Some(group.map_or(machine, |group| group.min(machine)))
    }

    /// Bytes of free pages on the per-CPU lists of the kernel. `MemAvailable` leaves them out, and since Linux 6.7 they may be an eighth of
    /// the memory after somebody freed a lot: they would look like memory of another process.
    fn at_hand(&self) -> Option<u64> {
        let zones = fs::read_to_string(self.root.join("proc/zoneinfo")).ok()?;
        let page = page_size(&fs::read(self.root.join("proc/self/auxv")).ok()?)?;
        pages_at_hand(&zones).checked_mul(page)
    }

    /// Least room below the limits of this process's control group and its ancestors; `None` without a limit.
    fn group_room(&self) -> Option<u64> {
        self.least_of_groups(|group, root| group.room(root))
    }

    fn least_of_groups(&self, bytes: impl Fn(&Group<'_>, &Path) -> Option<u64>) -> Option<u64> {
        let groups = fs::read_to_string(self.root.join("proc/self/cgroup")).ok()?;
        let groups = groups.lines().filter_map(Group::parse);
        groups.filter_map(|group| bytes(&group, &self.root)).min()
    }

    /// Bytes of private memory of this process that really exist; `None` where the kernel does not say (before Linux 4.5).
    fn resident(&self) -> Option<u64> {
        let status = fs::read_to_string(self.root.join("proc/self/status")).ok()?;
        kilobytes(&status, "RssAnon")
    }
}

impl Supply for Machine {
    /// Memory that was taken but not touched still counts as available: it is subtracted.
    fn left(&self, reserved: u64) -> Option<u64> {
        let room = match self.room() {
            Ok(room) => room.bytes(),
            Err(error) => {
                tracing::debug!(%error, "cannot read the memory of other processes");
                return None;
            }
        };
        let untouched = self
            .resident()
            .map_or(0, |resident| reserved.saturating_sub(resident));
        Some(room.saturating_sub(untouched))
    }
}

/// Value in bytes of the line `key: value kB`, as `meminfo` and `status` have them.
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    value
        .trim()
        .strip_suffix("kB")?
        .trim_end()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// Sum of the lines `count: value` of `zoneinfo`: pages on the lists of each CPU, zone by zone.
fn pages_at_hand(zones: &str) -> u64 {
    let counts = zones
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("count:"));
    counts
        .filter_map(|count| count.trim().parse::<u64>().ok())
        .fold(0, u64::saturating_add)
}

/// Bytes of a page, from the pairs of words that the kernel hands to a process (getauxval(3)).
fn page_size(auxv: &[u8]) -> Option<u64> {
    const AT_PAGESZ: usize = 6;
    const WORD: usize = size_of::<usize>();
    let words = auxv
        .chunks_exact(WORD)
        .map(|bytes| usize::from_ne_bytes(bytes.try_into().expect("a chunk is a word")));
    let words: Vec<usize> = words.collect();
    let pair = words.chunks_exact(2).find(|pair| pair[0] == AT_PAGESZ)?;
    Some(pair[1] as u64)
}

/// Names of one version of the memory controller's files, and of the lines of its `memory.stat`.
#[derive(Debug, PartialEq, Eq)]
struct Files {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// Used, but given back under pressure: page cache, and what the kernel caches for itself.
    reclaimable: &'static [&'static str],
}

const V1: Files = Files {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: &["total_inactive_file", "total_active_file"],
};
const V2: Files = Files {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: &["inactive_file", "active_file", "slab_reclaimable"],
};

/// A control group with a memory controller.
#[derive(Debug, PartialEq, Eq)]
struct Group<'a> {
    files: &'static Files,
    path: &'a str,
}

impl<'a> Group<'a> {
    /// `line` is `hierarchy:controllers:path` (cgroups(7)); v2 is hierarchy 0 without controllers.
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.splitn(3, ':');
        let (hierarchy, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let files = if hierarchy == "0" && controllers.is_empty() {
            &V2
        } else if controllers.split(',').any(|controller| controller == "memory") {
            &V1
        } else {
            return None;
        };
        let path = path.trim_start_matches('/');
        Some(Self { files, path })
    }

    /// Least room at this level and above.
    fn room(&self, root: &Path) -> Option<u64> {
        self.least_of_levels(root, |level| {
            let read = |name: &str| fs::read_to_string(level.join(name)).ok();
            let usage = read(self.files.usage).unwrap_or_default();
            let stat = read("memory.stat").unwrap_or_default();
            self.files.room(&read(self.files.limit)?, &usage, &stat)
        })
    }

    /// Least limit at this level and above.
    fn limit(&self, root: &Path) -> Option<u64> {
        self.least_of_levels(root, |level| {
            Files::limit(&fs::read_to_string(level.join(self.files.limit)).ok()?)
        })
    }

    fn least_of_levels(&self, root: &Path, bytes: impl Fn(&Path) -> Option<u64>) -> Option<u64> {
        let mount = root.join(self.files.mount);
        // Inside a container the path may be the host's and absent here; the mount point itself is then the group.
        let own = mount.join(self.path);
        let levels = own.ancestors().take_while(|level| level.starts_with(&mount));
        levels.filter_map(bytes).min()
    }
}

impl Files {
    /// "max" (v2) is no number; v1 says a huge one, which no machine has and the minimum with the machine's memory ignores.
    fn limit(text: &str) -> Option<u64> {
        text.trim().parse().ok()
    }

    /// Limit minus what cannot be reclaimed, from the text of the three files of one level.
    fn room(&self, limit: &str, usage: &str, stat: &str) -> Option<u64> {
        let limit = Self::limit(limit)?;
        let usage = usage.trim().parse::<u64>().unwrap_or(0);
        let lines = stat.lines().filter_map(|line| line.split_once(' '));
        let reclaimable = lines
            .filter(|(key, _)| self.reclaimable.contains(key))
            .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
            .fold(0, u64::saturating_add);
        Some(limit.saturating_sub(usage.saturating_sub(reclaimable)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    // As a machine with Linux 6.18 shows them, abridged.
    const MEMINFO: &str = "MemTotal:       24684084 kB\nMemFree:        23958980 kB\nMemAvailable:   24206312 kB\n\
        Buffers:            1132 kB\nCached:            33324 kB\nSwapCached:            0 kB\n";
    const STATUS: &str = "Name:\tplimsoll\nVmPeak:\t   12160 kB\nVmRSS:\t    1712 kB\nRssAnon:\t     112 kB\n\
        RssFile:\t    1600 kB\nRssShmem:\t       0 kB\n";
    const STAT_V1: &str = "cache 9457664\nrss 13864960\nshmem 9084928\ninactive_file 16384\nactive_file 356352\n\
        hierarchical_memory_limit 9223372036854771712\ntotal_cache 1391550464\ntotal_inactive_file 864632832\n\
        total_active_file 492814336\n";
    const STAT_V2: &str = "anon 1572864000\nfile 1610612736\nkernel 20971520\nshmem 4096\ninactive_anon 1572864000\n\
        active_anon 0\ninactive_file 1073741824\nactive_file 536870912\nunevictable 0\nslab_reclaimable 1048576\n\
        slab_unreclaimable 2097152\nworkingset_refault_file 7\n";

    #[test]
    fn lines_of_proc() {
        assert_eq!(kilobytes(MEMINFO, "MemAvailable"), Some(24_206_312 << 10));
        assert_eq!(kilobytes(STATUS, "RssAnon"), Some(112 << 10));
        // A prefix of a key is no key.
        assert_eq!(kilobytes(STATUS, "Rss"), None);
        for wrong in [
            "",
            "Key: 12 MB",
            "Key: 99999999999999999999 kB",
            "Key: -1 kB",
            "Key 1 kB",
        ] {
            assert_eq!(kilobytes(wrong, "Key"), None, "{wrong}");
        }
    }

    #[test]
    fn free_pages_on_lists_of_cpus() {
        const ZONES: &str = "Node 0, zone   Normal\n  pages free     2637196\n        min      14563\n  pagesets\n    \
            cpu: 0\n              count:    16902\n              high:     34009\n  vm stats threshold: 36\n    cpu: 1\n\
            \x20             count:    38123\n  node_unreclaimable:  0\n  start_pfn:           1048576\n";
        assert_eq!(pages_at_hand(ZONES), 16902 + 38123);
        assert_eq!(pages_at_hand("count: x\ncounts: 5\n"), 0);
        let auxv = |words: &[usize]| {
            words
                .iter()
                .flat_map(|word| word.to_ne_bytes())
                .collect::<Vec<_>>()
        };
        assert_eq!(page_size(&auxv(&[16, 6, 6, 4096, 0, 0])), Some(4096));
        assert_eq!(page_size(&auxv(&[16, 6, 0, 0])), None);
        assert_eq!(page_size(&[6]), None);

        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/self")).unwrap();
        fs::write(root.path().join("proc/meminfo"), MEMINFO).unwrap();
        fs::write(root.path().join("proc/zoneinfo"), ZONES).unwrap();
        let machine = Machine::at(root.path());
        let available = 24_206_312 << 10;
        assert_eq!(machine.room().unwrap().machine, available);
        fs::write(root.path().join("proc/self/auxv"), auxv(&[6, 16384])).unwrap();
        assert_eq!(
            machine.room().unwrap().machine,
            available + (16902 + 38123) * 16384
        );
    }

    #[test]
    fn lines_of_control_groups() {
        let path = |line| Group::parse(line).map(|group| (group.files == &V2, group.path));
        assert_eq!(path("0::/"), Some((true, "")));
        assert_eq!(path("0::/user.slice/a:b"), Some((true, "user.slice/a:b")));
        assert_eq!(path("4:memory:/docker/x"), Some((false, "docker/x")));
        assert_eq!(path("9:cpu,memory:/"), Some((false, "")));
        for other in ["1:cpu:/", "3:memoryless:/a", "name=systemd", "", "0:"] {
            assert_eq!(path(other), None, "{other}");
        }
    }

    #[test]
    fn page_cache_is_available() {
        let gib = |n: u64| (n * GIB).to_string();
        assert_eq!(
            V2.room(&gib(8), "3206545408\n", STAT_V2),
            Some(8 * GIB - (3_206_545_408 - 1_073_741_824 - 536_870_912 - 1_048_576))
        );
        assert_eq!(
            V1.room("2147483648\n", "1415135232\n", STAT_V1),
            Some(2 * GIB - (1_415_135_232 - 864_632_832 - 492_814_336))
        );
        assert_eq!(V2.room("max\n", "5", ""), None);
        assert_eq!(V2.room("100", "", ""), Some(100));
        assert_eq!(
            V2.room("100", "90", "inactive_file 1000\nactive_file x\n"),
            Some(100)
        );
        assert_eq!(V2.room("100", "200", ""), Some(0));
    }

    #[test]
    fn memory_that_was_taken_but_not_touched_is_not_left() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let machine = Machine::at(root.path());
        assert_eq!((machine.left(0), machine.size()), (None, None));
        write("proc/meminfo", MEMINFO);
        let available = 24_206_312 << 10;
        assert_eq!(
            machine.left(GIB),
            Some(available),
            "a kernel that does not say what is touched"
        );
        write("proc/self/status", STATUS);
        let resident = 112 << 10;
        assert_eq!(machine.left(0), Some(available));
        assert_eq!(machine.left(resident), Some(available));
        assert_eq!(machine.left(resident + GIB), Some(available - GIB));
        assert_eq!(machine.left(u64::MAX), Some(0));
        // The tighter of machine and group.
        write("proc/self/cgroup", "0::/pod/app\n");
        write("sys/fs/cgroup/pod/app/memory.max", "max\n");
        write("sys/fs/cgroup/pod/memory.max", "2147483648\n");
        write("sys/fs/cgroup/pod/memory.current", "1073741824\n");
        assert_eq!(machine.left(resident + GIB / 2), Some(GIB / 2));
        assert_eq!(machine.size(), Some(2 * GIB));
        write("sys/fs/cgroup/pod/memory.max", "max\n");
        assert_eq!(machine.size(), Some(24_684_084 << 10));
    }

    /// The files are where this expects them.
    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_answers() {
        let machine = Machine::this();
        let left = machine.left(0).unwrap();
        assert!(left > 0 && left <= machine.size().unwrap());
        assert!(machine.resident().unwrap() > 0);
        assert!(machine.at_hand().is_some());
    }
}
