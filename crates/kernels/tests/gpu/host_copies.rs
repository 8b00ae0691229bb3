//! Copies between pinned memory and the device by a kernel.

use plimsoll_core::Component;
use plimsoll_device::cuda::PinnedSlab;
use plimsoll_kernels::cuda::FusedKernels;
use rand::Rng;

use crate::common::{gpu, rng};

/// Bytes of the source ahead of what is copied, and behind it.
const AROUND: usize = 64;

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn words_arrive_and_come_back() {
    let gpu = gpu();
    let copies = FusedKernels::load(&gpu).unwrap().host_copies();
    let mut rng = rng("words_arrive_and_come_back");
    for words in [0, 1, 3, 4, 5, 31, 1023, 4096, 32 * 1024 + 1, 1_000_003] {
        let bytes = 4 * words;
        let mut from = PinnedSlab::new(&gpu, bytes + 2 * AROUND).unwrap();
        rng.fill(from.as_mut_slice::<u8>());
        let device = gpu.alloc(Component::Staging, bytes + AROUND).unwrap();
        gpu.fill(device.slice(), 0xa5).unwrap();
        let mut to = PinnedSlab::new(&gpu, bytes + AROUND).unwrap();
        to.as_mut_slice::<u8>().fill(0x5a);
        let on_device = device.slice::<u8>();
        // SAFETY: all live and stay untouched until the GPU is idle; no kernel follows.
        unsafe {
            let sent = on_device.range(0..bytes);
            copies.upload(&from, AROUND..AROUND + bytes, sent).unwrap();
            copies.download(sent, &mut to).unwrap();
        }
        gpu.synchronize().unwrap();
        let want = &from.as_slice::<u8>()[AROUND..AROUND + bytes];
        let (copied, behind) = to.as_slice::<u8>().split_at(bytes);
        assert!(copied == want, "{words} words");
        assert!(
            behind.iter().all(|&byte| byte == 0x5a),
            "{words} words: behind them"
        );
        let behind = gpu.download(on_device.range(bytes..bytes + AROUND)).unwrap();
        assert!(
            behind.iter().all(|&byte| byte == 0xa5),
            "{words} words: behind them on the device"
        );
    }
}
