//! Identity of a GPU, independent of its ordinal in this process.

use cudarc::driver::sys;

use super::gpu::{device, driver_version};
use super::{GpuError, check};

/// Name of a GPU, or of a part of one, that all processes of the machine know it by: `GPU-` and 32 hexadecimal digits in
/// groups, as `nvidia-smi -L` shows them. Takes no memory of it.
///
/// # Errors
/// [`GpuError`] if there is no driver, a driver too old, or no such GPU.
pub fn uuid(ordinal: usize) -> Result<String, GpuError> {
    driver_version()?;
    let device = device(ordinal)?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: a place to write to.
    check("cuDeviceGetUuid", unsafe {
        sys::cuDeviceGetUuid_v2(&mut uuid, device)
    })?;
    Ok(text(uuid.bytes.map(|byte| byte as u8)))
}

fn text(bytes: [u8; 16]) -> String {
    let hex = |range: std::ops::Range<usize>| -> String {
        bytes[range].iter().map(|byte| format!("{byte:02x}")).collect()
    };
    let groups = [0..4, 4..6, 6..8, 8..10, 10..16].map(hex);
    format!("GPU-{}", groups.join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_nvidia_smi_writes_it() {
        let bytes = std::array::from_fn(|at| 0x11 * at as u8);
        assert_eq!(text(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU: make test-gpu"]
    fn a_gpu_has_one() {
        let first = uuid(0).unwrap();
        assert_eq!(first.len(), 40);
        assert_eq!(uuid(0).unwrap(), first);
        assert!(matches!(uuid(4096), Err(GpuError::NoDevice { .. })));
    }
}
