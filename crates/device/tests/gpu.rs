//! The CUDA half of the crate, on a real GPU: `make test-gpu`.

use plimsoll_core::{Component, Oom, Scratch};
use plimsoll_device::cuda::{
    DeviceError, Gpu, GpuArena, GpuError, GpuLimit, GpuOptions, PinnedSlab, Uploader,
};

const MIB: usize = 1 << 20;

fn out_of_memory(result: Result<(), DeviceError>) -> Oom {
    match result {
        Err(DeviceError::Oom(oom)) => oom,
        other => panic!("not for want of memory: {other:?}"),
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn bytes_survive_every_kind_of_copy() {
    let gpu = Gpu::open(0).unwrap();
    assert!(gpu.info().sm_count > 0);
    for component in [Component::Kv, Component::Weights] {
        let data: Vec<u32> = (0..1_000_003).map(|i| i * 7 + 1).collect();
        let slab = gpu.alloc(component, data.len() * 8).unwrap();
        let all = slab.slice::<u32>();
        let (front, back) = (all.range(0..data.len()), all.range(data.len()..2 * data.len()));
        gpu.upload(&data, front).unwrap();
        gpu.copy(front, back).unwrap();
        gpu.fill(front.cast(), 0xff).unwrap();
        assert_eq!(gpu.download(back).unwrap(), data);
        assert!(gpu.download(front).unwrap().iter().all(|&x| x == u32::MAX));

        let mut pinned = PinnedSlab::new(&gpu, data.len() * 4).unwrap();
        pinned.as_mut_slice().copy_from_slice(&data);
        let mut answer = PinnedSlab::new(&gpu, data.len() * 4).unwrap();
        // SAFETY: both live and stay untouched until the event has passed.
        unsafe {
            gpu.upload_async(&pinned, 0, front.cast()).unwrap();
            gpu.download_async(front.cast(), &mut answer).unwrap();
        }
        let done = gpu.event().unwrap();
        done.record().unwrap();
        done.synchronize().unwrap();
        assert!(done.is_reached().unwrap());
        assert_eq!(answer.as_slice::<u32>(), data);
    }
    let meters = gpu.budget().meters();
    assert_eq!(meters.reserved, meters.by_component.get(Component::Runtime));
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn threads_upload_side_by_side() {
    const PIECE: usize = 999_999;
    const PIECES: usize = 24;
    let gpu = Gpu::open(0).unwrap();
    let byte = |i: usize| (i / 7 % 251) as u8;
    let slab = gpu.alloc(Component::Weights, PIECE * PIECES).unwrap();
    let all = slab.slice::<u8>();
    gpu.fill(all, 0xff).unwrap();
    gpu.synchronize().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let gpu = &gpu;
            scope.spawn(move || {
                let mut uploader = Uploader::new(gpu, PIECE).unwrap();
                for piece in (thread..PIECES).step_by(4) {
                    let range = piece * PIECE..(piece + 1) * PIECE;
                    let fill = |out: &mut [u8]| {
                        out.iter_mut()
                            .zip(range.clone())
                            .for_each(|(out, i)| *out = byte(i));
                        Ok::<_, GpuError>(())
                    };
                    uploader.upload(all.range(range.clone()), fill).unwrap();
                    // What could not be filled is not copied.
                    let failed = uploader.upload(all.range(range), |_| Err(GpuError::NoKernels));
                    assert_eq!(failed, Err(GpuError::NoKernels));
                }
                // The drop waits.
            });
        }
    });
    let found = gpu.download(all).unwrap();
    assert!(found.iter().enumerate().all(|(i, &found)| found == byte(i)));
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn an_arena_keeps_its_addresses_while_it_grows() {
    let gpu = Gpu::open(0).unwrap();
    let mut arena = GpuArena::new(&gpu, Scratch::Growable).unwrap();
    let (first, high_water) = {
        let small = arena.alloc::<u32>(1000).unwrap();
        gpu.upload(&[42; 1000], small).unwrap();
        let large = arena.alloc::<u8>(300 * MIB).unwrap();
        gpu.fill(large, 1).unwrap();
        assert_eq!(gpu.download(small).unwrap(), [42; 1000]);
        (small.ptr(), arena.high_water())
    };
    arena.reset();
    assert_eq!(arena.alloc::<u8>(1).unwrap().ptr(), first);
    drop(arena);

    let arena = GpuArena::new(&gpu, Scratch::Fixed(high_water as u64)).unwrap();
    arena.alloc::<u32>(1000).unwrap();
    arena.alloc::<u8>(300 * MIB).unwrap();
    let oom = out_of_memory(arena.alloc::<u8>(1).map(drop));
    assert_eq!(oom.component, Component::Arena);
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_cap_is_an_oom_and_not_the_end() {
    let options = GpuOptions {
        cap: Some(512 * MIB as u64),
        ..Default::default()
    };
    let gpu = Gpu::open_with(0, options).unwrap();
    for component in [Component::Kv, Component::Weights] {
        let half = gpu.alloc(component, 256 * MIB).unwrap();
        let oom = out_of_memory(gpu.alloc(component, 300 * MIB).map(drop));
        assert_eq!((oom.component, oom.requested > 0), (component, true));
        drop(half);
        drop(gpu.alloc(component, 500 * MIB).unwrap());
    }
    // The device itself has no such room, and says so without harm.
    let gpu = Gpu::open(0).unwrap();
    let all = gpu.info().total_bytes as usize;
    for component in [Component::Kv, Component::Weights] {
        assert!(gpu.alloc(component, all).is_err());
        drop(gpu.alloc(component, 64 * MIB).unwrap());
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn meters_say_what_is_held_and_what_came_back() {
    let gpu = Gpu::open(0).unwrap();
    let read = || {
        gpu.trim().unwrap();
        gpu.settle_runtime().unwrap();
        gpu.reset_high_water().unwrap();
        gpu.meters()
    };
    let before = read();
    let runtime = before.by_component.get(Component::Runtime);
    assert!(runtime > 100 * MIB as u64, "a context takes memory: {before:?}");
    assert_eq!((before.used, before.used_high), (runtime, runtime));
    {
        let kv = gpu.alloc(Component::Kv, 300 * MIB + 1).unwrap();
        let canary = gpu.alloc(Component::Canary, 256 * MIB).unwrap();
        let held = gpu.meters();
        assert!(held.reserved - before.reserved >= (556 * MIB) as u64, "{held:?}");
        // The driver agrees, but for tables of its own.
        let taken = before.free - held.free;
        assert!(
            taken.abs_diff(held.reserved - before.reserved) <= (8 * MIB) as u64,
            "{taken}: {held:?}"
        );
        assert_eq!(held.allocations, before.allocations + 2);
        // Mapped memory goes back at once,
        drop(canary);
        let freed = gpu.meters();
        assert_eq!(
            (held.reserved - freed.reserved, held.used - freed.used),
            ((256 * MIB) as u64, (256 * MIB) as u64)
        );
        // the pool keeps what was freed until it is trimmed.
        let weights = gpu.alloc(Component::Weights, 64 * MIB).unwrap();
        let pooled = gpu.meters();
        drop(weights);
        let freed = gpu.meters();
        assert_eq!(
            (freed.reserved, pooled.used - freed.used),
            (pooled.reserved, (64 * MIB) as u64)
        );
        drop(kv);
    }
    let high = gpu.meters().reserved_high;
    assert!(high - before.reserved >= (556 * MIB) as u64, "{high}");
    let after = read();
    assert_eq!(
        (after.used, after.reserved),
        (before.used, before.reserved),
        "{after:?}"
    );
    assert_eq!(
        (after.used_high, after.reserved_high),
        (after.used, after.reserved)
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_limit_is_all_there_is() {
    let options = GpuOptions {
        limit: GpuLimit::Bytes(4 << 30),
        ..Default::default()
    };
    let gpu = Gpu::open_with(0, options).unwrap();
    let meters = gpu.meters();
    assert_eq!((meters.total, meters.peers()), (4 << 30, 0));
    let free = meters.free as usize;
    assert!(gpu.alloc(Component::Kv, free + MIB).is_err());
    drop(gpu.alloc(Component::Kv, free - 4 * MIB).unwrap());
}

/// Two GPUs where there are two, else one twice.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn gpus_of_one_process_reach_each_others_memory() {
    let first = Gpu::open(0).unwrap();
    let second = Gpu::open(1).or_else(|_| Gpu::open(0)).unwrap();
    if !first.reaches(&second).unwrap() {
        // Then it is said, and not tried.
        first
            .alloc_for(Component::Communication, MIB, std::slice::from_ref(&second))
            .unwrap_err();
        return;
    }
    let gpus = [first, second];
    let data: Vec<u32> = (0..1_000_003).map(|i| i * 11 + 5).collect();
    let slabs = gpus.each_ref().map(|gpu| {
        let slab = gpu
            .alloc_for(Component::Communication, data.len() * 4, &gpus)
            .unwrap();
        let held = gpu.budget().meters().by_component.get(Component::Communication);
        assert_eq!(held, (4 * MIB) as u64, "whole units of 2 MiB");
        slab
    });
    let [a, b] = slabs.each_ref().map(|slab| slab.slice::<u32>());
    // One thread turns from GPU to GPU.
    for (writer, reader) in [(&gpus[0], &gpus[1]), (&gpus[1], &gpus[0])] {
        writer.upload(&data, a).unwrap();
        writer.copy(a, b).unwrap();
        writer.fill(a.cast(), 0xee).unwrap();
        writer.synchronize().unwrap();
        assert_eq!(reader.download(b).unwrap(), data);
        assert!(reader.download(a).unwrap().iter().all(|&x| x == 0xeeee_eeee));
        reader.fill(b.cast(), 0).unwrap();
        reader.synchronize().unwrap();
    }
    // Memory of its own, on whichever was used last.
    for gpu in &gpus {
        let slab = gpu.alloc(Component::Arena, MIB).unwrap();
        gpu.fill(slab.slice(), 9).unwrap();
        assert!(gpu.download(slab.slice::<u8>()).unwrap().iter().all(|&x| x == 9));
    }
    drop(slabs);
    for gpu in &gpus {
        assert_eq!(
            gpu.budget().meters().by_component.get(Component::Communication),
            0
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_graph_replays_what_was_recorded() {
    let gpu = Gpu::open(0).unwrap();
    let slab = gpu.alloc(Component::Arena, 2 * MIB).unwrap();
    let (a, b) = (
        slab.slice::<u8>().range(0..MIB),
        slab.slice::<u8>().range(MIB..2 * MIB),
    );
    gpu.fill(slab.slice(), 0).unwrap();
    let graph = gpu
        .capture(|| {
            gpu.fill(a, 7)?;
            gpu.copy(a, b)
        })
        .unwrap();
    assert!(
        gpu.download(b).unwrap().iter().all(|&x| x == 0),
        "recording runs nothing"
    );
    graph.launch().unwrap();
    assert!(gpu.download(b).unwrap().iter().all(|&x| x == 7));
}
