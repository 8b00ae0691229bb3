//! Who holds a GPU's memory, by the driver's management library (NVML), which needs no context and so no memory of the GPU.

use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;

use libloading::{Library, Symbol};

/// A process that holds memory of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its id, as the driver numbers processes: from outside of containers.
    pub pid: u32,
    /// What the operating system calls it, where it shows it here.
    pub name: Option<String>,
    /// Bytes; `None` where the driver does not tell.
    pub bytes: Option<u64>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.pid)?;
        if let Some(name) = &self.name {
            write!(f, " ({name})")?;
        }
        match self.bytes {
            Some(bytes) => write!(f, " holds {:.2} GiB", bytes as f64 / f64::from(1 << 30)),
            None => f.write_str(" holds an unknown amount"),
        }
    }
}

/// Processes that hold memory of the GPU of that [`uuid`](super::uuid), the largest first; none where the library is not
/// there or does not say, as in a container that has processes of its own.
pub fn holders(uuid: &str) -> Vec<Holder> {
    // SAFETY: NVIDIA's library, which runs nothing of consequence when loaded; the functions have these types.
    let mut holders = unsafe { ask(uuid) }.unwrap_or_default();
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
    holders
}

/// `nvmlProcessInfo_t` of the functions that end in `_v3`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

type Device = *mut c_void;
type Processes = unsafe extern "C" fn(Device, *mut c_uint, *mut ProcessInfo) -> c_int;

/// More processes than share any GPU.
const MOST: usize = 256;

/// `None` where a call fails.
///
/// # Safety
/// The library must be NVML.
unsafe fn ask(uuid: &str) -> Option<Vec<Holder>> {
    let uuid = CString::new(uuid).ok()?;
    let (mut device, mut count) = (std::ptr::null_mut(), MOST as c_uint);
    let mut processes = [ProcessInfo::default(); MOST];
    let ok = |code: c_int| (code == 0).then_some(());
    // SAFETY: the caller's promise; places to write to, the list with its length.
    unsafe {
        let library = Library::new("libnvidia-ml.so.1").ok()?;
        let init: Symbol<'_, unsafe extern "C" fn() -> c_int> = library.get(b"nvmlInit_v2").ok()?;
        let shutdown: Symbol<'_, unsafe extern "C" fn() -> c_int> = library.get(b"nvmlShutdown").ok()?;
        let by_uuid: Symbol<'_, unsafe extern "C" fn(*const c_char, *mut Device) -> c_int> =
            library.get(b"nvmlDeviceGetHandleByUUID").ok()?;
        let running: Symbol<'_, Processes> = library.get(b"nvmlDeviceGetComputeRunningProcesses_v3").ok()?;
        ok(init())?;
        let found = ok(by_uuid(uuid.as_ptr(), &mut device))
            .and_then(|()| ok(running(device, &mut count, processes.as_mut_ptr())));
        shutdown();
        found?;
    }
    let processes = processes.iter().take(count as usize);
    Some(processes.map(holder).collect())
}

fn holder(info: &ProcessInfo) -> Holder {
    let name = std::fs::read_to_string(format!("/proc/{}/comm", info.pid));
    Holder {
        pid: info.pid,
        name: name.ok().map(|name| name.trim().to_owned()),
        // NVML_VALUE_NOT_AVAILABLE.
        bytes: (info.used != c_ulonglong::MAX).then_some(info.used),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_is_named_as_far_as_it_is_known() {
        let own = holder(&ProcessInfo {
            pid: std::process::id(),
            used: 3 << 29,
            ..Default::default()
        });
        assert!(own.name.is_some());
        assert!(own.to_string().ends_with(") holds 1.50 GiB"), "{own}");
        let hidden = Holder {
            name: None,
            bytes: None,
            ..own
        };
        assert!(
            hidden.to_string().ends_with(" holds an unknown amount"),
            "{hidden}"
        );
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU: make test-gpu"]
    fn this_process_holds_memory_of_a_gpu_that_it_opened() {
        let gpu = crate::cuda::Gpu::open(0).unwrap();
        let holders = holders(&crate::cuda::uuid(0).unwrap());
        // A container may see other ids, or no processes at all.
        assert!(
            holders.iter().all(|holder| holder.bytes != Some(0)),
            "{holders:?}"
        );
        drop(gpu);
    }
}
