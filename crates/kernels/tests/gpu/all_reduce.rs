//! Sums over GPUs, for as many of 2, 4 and 8 as there are.

use std::thread;
use std::time::{Duration, Instant};

use half::bf16;
use plimsoll_core::Component;
use plimsoll_device::cuda::{DeviceError, Gpu, GpuError, GpuSlab, GpuSlice};
use plimsoll_kernels::cuda::{
    AllReduce, AllReducePath, Fp8Scaling, FusedKernels, GpuAdded, GpuFp8Rows, GpuNorm, communication_bytes,
    sent_bytes,
};
use rand::Rng;
use rand::rngs::StdRng;

use crate::common::{download, gpu, poisoned, random, rng, upload};

const EPS: f32 = 1e-5;

fn gpus() -> Vec<Gpu> {
    let mut gpus = vec![gpu()];
    while let Ok(gpu) = Gpu::open(gpus.len()) {
        gpus.push(gpu);
    }
    gpus
}

#[allow(clippy::print_stdout, reason = "shown where a test fails")]
fn for_each_group(test: impl Fn(&[Gpu], Vec<AllReduce>)) {
    let all = gpus();
    for ranks in [2, 4, 8].into_iter().filter(|&n| n <= all.len()) {
        let gpus = &all[..ranks];
        let group = AllReduce::group(gpus, AllReducePath::Peers).expect("a group");
        println!("{ranks} GPUs\n{}", group[0].report());
        test(gpus, group);
    }
}

/// What each rank's thread makes of its rank.
fn on_all<R: Send>(group: &mut [AllReduce], work: impl Fn(&AllReduce) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = group
            .iter_mut()
            .map(|rank| scope.spawn(move || work(rank)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a rank"))
            .collect()
    })
}

/// In the order of ranks in f32, rounded once.
fn summed(parts: &[Vec<bf16>]) -> Vec<bf16> {
    (0..parts[0].len())
        .map(|i| {
            let sum = parts[1..]
                .iter()
                .fold(parts[0][i].to_f32(), |sum, part| sum + part[i].to_f32());
            bf16::from_f32(sum)
        })
        .collect()
}

#[track_caller]
fn assert_same(what: &str, got: &[bf16], expected: &[bf16]) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths");
    let differs = |(a, b): &(&bf16, &bf16)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
    let wrong = got.iter().zip(expected).filter(differs).count();
    let first = got.iter().zip(expected).position(|pair| differs(&pair));
    if let Some(at) = first {
        panic!(
            "{what}: {wrong} of {} differ, first {at}: {} for {}",
            got.len(),
            got[at],
            expected[at]
        );
    }
}

fn random_parts(rng: &mut StdRng, ranks: usize, len: usize) -> Vec<Vec<bf16>> {
    let mut parts: Vec<_> = (0..ranks).map(|_| random(rng, len)).collect();
    // What a rank sends may look like anything.
    for part in &mut parts {
        for bits in [0xffff, 0x7fff, 0x8000, 0x7f80, 0xff80, 0xffff] {
            let at = rng.random_range(0..len);
            part[at] = bf16::from_bits(bits);
        }
        let at = rng.random_range(0..len / 2) * 2;
        part[at..at + 2].fill(bf16::from_bits(0xffff));
    }
    parts
}

fn alloc<T>(gpu: &Gpu, len: usize) -> GpuSlab {
    gpu.alloc(Component::Arena, len * size_of::<T>())
        .expect("room on the GPU")
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn sums_have_the_same_bits_on_all_ranks() {
    for_each_group(|gpus, mut group| {
        let mut rng = rng("sums");
        let shapes = [
            (1, 8),
            (1, 4096),
            (3, 576),
            (64, 4096),
            (512, 8192),
            (2048, 4096),
            (2500, 4096),
            (700, 5128),
            (1, 8192),
            (257, 4096),
            (128, 4096),
            (1031, 8192),
            (5, 2880),
        ];
        for (rows, n) in shapes {
            let parts = random_parts(&mut rng, gpus.len(), rows * n);
            let expected = summed(&parts);
            let sums = on_all(&mut group, |rank| {
                let gpu = &gpus[rank.rank()];
                let mut part = parts[rank.rank()].clone();
                part.extend([bf16::from_bits(0xabcd); 64]);
                let x = upload(gpu, &part);
                rank.sum(x.slice().range(0..rows * n)).unwrap();
                let sums: Vec<bf16> = download(gpu, &x, part.len());
                rank.check().unwrap();
                sums
            });
            for (rank, mut sums) in sums.into_iter().enumerate() {
                let behind = sums.split_off(rows * n);
                assert!(
                    behind.iter().all(|x| x.to_bits() == 0xabcd),
                    "written behind the end"
                );
                assert_same(&format!("[{rows}, {n}] on rank {rank}"), &sums, &expected);
            }
        }
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn sum_and_norm_in_one_are_those_of_two_kernels() {
    for_each_group(|gpus, mut group| {
        let mut rng = rng("norms of sums");
        let fused: Vec<_> = gpus.iter().map(|gpu| FusedKernels::load(gpu).unwrap()).collect();
        for (rows, n) in [
            (1, 4096),
            (1, 8192),
            (5, 2880),
            (64, 4096),
            (128, 5120),
            (7, 16384),
            (33, 576),
            (200, 4096),
        ] {
            let len = rows * n;
            let parts: Vec<_> = (0..gpus.len()).map(|_| random(&mut rng, len)).collect();
            let hidden = random(&mut rng, len);
            let [weight, delta_weight] =
                [0; 2].map(|_| -> Vec<f32> { (0..n).map(|_| rng.random_range(0.5..1.5)).collect() });
            for sandwich in [false, true] {
                let results = on_all(&mut group, |rank| {
                    let gpu = &gpus[rank.rank()];
                    let fused = &fused[rank.rank()];
                    let [weight, delta_weight] = [&weight, &delta_weight].map(|weight| upload(gpu, weight));
                    let norm = GpuNorm {
                        weight: weight.slice().range(0..n),
                        eps: EPS,
                    };
                    let delta_weight = delta_weight.slice::<f32>().range(0..n);
                    let scalar = (rows % 2 == 1).then(|| weight.slice().range(0..1));
                    let scaling = Fp8Scaling::Rows;
                    let mut results = Vec::new();
                    for together in [false, true] {
                        let [stream, stream_fp8] = [0; 2].map(|_| upload(gpu, &hidden));
                        let [delta, delta_fp8] = [0; 2].map(|_| upload(gpu, &parts[rank.rank()]));
                        let (out, values, scales) = (
                            poisoned::<bf16>(gpu, len),
                            poisoned::<u8>(gpu, len),
                            poisoned::<f32>(gpu, rows),
                        );
                        let fp8 = || GpuFp8Rows {
                            values: values.slice().range(0..len),
                            scales: scales.slice().range(0..rows),
                            scaling,
                        };
                        let (h, h8) = (stream.slice().range(0..len), stream_fp8.slice().range(0..len));
                        let (d, d8) = (delta.slice().range(0..len), delta_fp8.slice().range(0..len));
                        let o = out.slice().range(0..len);
                        let added = |delta| GpuAdded {
                            delta,
                            weight: delta_weight,
                            scalar,
                        };
                        match (together, sandwich) {
                            (false, false) => {
                                rank.sum(d).unwrap();
                                fused.add_rms_norm(h, d, norm, o).unwrap();
                                rank.sum(d8).unwrap();
                                fused.add_rms_norm(h8, d8, norm, fp8()).unwrap();
                            }
                            (false, true) => {
                                rank.sum(d).unwrap();
                                fused.sandwich_norm(h, d, delta_weight, scalar, norm, o).unwrap();
                                rank.sum(d8).unwrap();
                                fused
                                    .sandwich_norm(h8, d8, delta_weight, scalar, norm, fp8())
                                    .unwrap();
                            }
                            (true, false) => {
                                rank.add_rms_norm(fused, h, d, norm, o).unwrap();
                                rank.add_rms_norm(fused, h8, d8, norm, fp8()).unwrap();
                            }
                            (true, true) => {
                                rank.sandwich_norm(fused, h, added(d), norm, o).unwrap();
                                rank.sandwich_norm(fused, h8, added(d8), norm, fp8()).unwrap();
                            }
                        }
                        rank.check().unwrap();
                        results.push((
                            download::<bf16>(gpu, &stream, len),
                            download::<bf16>(gpu, &out, len),
                            download::<bf16>(gpu, &stream_fp8, len),
                            download::<u8>(gpu, &values, len),
                            download::<f32>(gpu, &scales, rows),
                        ));
                    }
                    results
                });
                let what = format!("[{rows}, {n}], sandwich {sandwich}");
                let first = &results[0][0];
                for (rank, results) in results.iter().enumerate() {
                    for (together, result) in results.iter().enumerate() {
                        let what = format!("{what}, rank {rank}, together {together}");
                        assert_same(&format!("{what}, residual"), &result.0, &first.0);
                        assert_same(&format!("{what}, norm"), &result.1, &first.1);
                        assert_same(&format!("{what}, residual of fp8"), &result.2, &first.0);
                        assert_eq!(result.3, first.3, "{what}, fp8");
                        assert_eq!(result.4, first.4, "{what}, scales");
                    }
                }
            }
        }
    });
}

/// The elements before `cut` or from there on.
fn half_of(slab: &GpuSlab, cut: usize, len: usize, half: usize) -> GpuSlice<'_, bf16> {
    match half {
        0 => slab.slice().range(0..cut),
        _ => slab.slice().range(cut..len),
    }
}

/// A copy engine sends one half while the other is computed; many sums in a row, of ranks that are not in step, so that rows arrive before
/// those of the sum ahead are read.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn sums_in_halves_are_those_of_one_kernel() {
    for_each_group(|gpus, mut group| {
        if gpus.len() != 2 {
            assert!(group[0].make_room(8192, 4096).unwrap().is_none());
            return;
        }
        let mut rng = rng("halves");
        let fused: Vec<_> = gpus.iter().map(|gpu| FusedKernels::load(gpu).unwrap()).collect();
        for (rows, n) in [(4096, 4096), (4609, 576), (5001, 2880), (4096, 8192)] {
            let len = rows * n;
            let parts: Vec<_> = (0..2).map(|_| random(&mut rng, len)).collect();
            let (summed, hidden) = (summed(&parts), random(&mut rng, len));
            let weight: Vec<f32> = (0..n).map(|_| rng.random_range(0.5..1.5)).collect();
            assert_eq!(group[0].halves(rows, n), None, "without room");
            let rooms: Vec<_> = group
                .iter()
                .map(|rank| rank.make_room(rows, n).unwrap().unwrap())
                .collect();
            for gpu in gpus {
                let held = gpu.budget().meters().by_component.get(Component::Communication);
                assert_eq!(held, (communication_bytes(2) + sent_bytes(2, rows, n)) as u64);
            }
            let results = on_all(&mut group, |rank| {
                let (gpu, fused) = (&gpus[rank.rank()], &fused[rank.rank()]);
                let weight = upload(gpu, &weight);
                let norm = GpuNorm {
                    weight: weight.slice().range(0..n),
                    eps: EPS,
                };
                let halves = rank.halves(rows, n).expect("rows are summed in halves");
                assert_eq!(halves.iter().sum::<usize>(), rows);
                let cut = halves[0] * n;
                let (part, sum) = (upload(gpu, &parts[rank.rank()]), upload(gpu, &summed));
                let [normed, expected] = [0; 2].map(|_| poisoned::<bf16>(gpu, len));
                let [stream, expected_stream] = [0; 2].map(|_| upload(gpu, &hidden));
                let delta = alloc::<bf16>(gpu, len);
                let mut wrong = 0;
                for round in 0..7 {
                    thread::sleep(Duration::from_micros(
                        (round * 131 + rank.rank() as u64 * 977) % 900,
                    ));
                    let sent = [0, 1].map(|half| {
                        gpu.copy(half_of(&part, cut, len, half), half_of(&delta, cut, len, half))
                            .unwrap();
                        rank.send(half, half_of(&delta, cut, len, half)).unwrap()
                    });
                    if round % 2 == 0 {
                        for half in [0, 1] {
                            rank.sum_sent(sent[half], half_of(&delta, cut, len, half))
                                .unwrap();
                        }
                        let sums = download::<bf16>(gpu, &delta, len);
                        wrong += sums
                            .iter()
                            .zip(&summed)
                            .filter(|(a, b)| a.to_bits() != b.to_bits())
                            .count();
                        continue;
                    }
                    for half in [0, 1] {
                        let (h, d, o) = (
                            half_of(&stream, cut, len, half),
                            half_of(&delta, cut, len, half),
                            half_of(&normed, cut, len, half),
                        );
                        rank.add_rms_norm_sent(sent[half], h, d, norm, o).unwrap();
                        let (h, d, o) = (
                            half_of(&expected_stream, cut, len, half),
                            half_of(&sum, cut, len, half),
                            half_of(&expected, cut, len, half),
                        );
                        fused.add_rms_norm(h, d, norm, o).unwrap();
                    }
                }
                rank.check().unwrap();
                let found = [&stream, &normed].map(|slab| download::<bf16>(gpu, slab, len));
                let expected = [&expected_stream, &expected].map(|slab| download::<bf16>(gpu, slab, len));
                (wrong, found, expected)
            });
            for (rank, (wrong, found, expected)) in results.into_iter().enumerate() {
                assert_eq!(wrong, 0, "[{rows}, {n}]: sums on rank {rank}");
                assert_same(
                    &format!("[{rows}, {n}], residual on rank {rank}"),
                    &found[0],
                    &expected[0],
                );
                assert_same(
                    &format!("[{rows}, {n}], norm on rank {rank}"),
                    &found[1],
                    &expected[1],
                );
            }
            drop(rooms);
        }
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn columns_of_all_ranks_lie_side_by_side() {
    for_each_group(|gpus, mut group| {
        for (rows, width) in [(1, 4), (1, 64128), (64, 64128), (3, 8000), (257, 1004)] {
            let value =
                |rank: usize, row: usize, column: usize| ((rank * 1000 + row) * 100_003 + column) as f32;
            let results = on_all(&mut group, |rank| {
                let gpu = &gpus[rank.rank()];
                let mine: Vec<f32> = (0..rows * width)
                    .map(|i| value(rank.rank(), i / width, i % width))
                    .collect();
                let len = gpus.len() * mine.len();
                let (mine, out) = (upload(gpu, &mine), poisoned::<f32>(gpu, len));
                let part = mine.slice().range(0..rows * width);
                rank.gather(part, rows, out.slice().range(0..len)).unwrap();
                let out: Vec<f32> = download(gpu, &out, len);
                rank.check().unwrap();
                out
            });
            for (rank, out) in results.iter().enumerate() {
                for (row, out) in out.chunks_exact(gpus.len() * width).enumerate() {
                    let wrong = (0..out.len()).find(|&i| out[i] != value(i / width, row, i % width));
                    assert_eq!(wrong, None, "[{rows}, {width}]: row {row} on rank {rank}");
                }
            }
        }
    });
}

/// Many steps without waiting for the host, in graphs, with ranks that start at different times.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn replayed_graphs_take_turns() {
    for_each_group(|gpus, mut group| {
        let mut rng = rng("graphs");
        // An odd number of sums, so that halves alternate from replay to replay.
        let shapes = [4096, 64 * 4096, 300 * 4096, 1500 * 4096, 8];
        let delays: Vec<Vec<u64>> = (0..gpus.len())
            .map(|_| (0..40).map(|_| rng.random_range(0..300)).collect())
            .collect();
        let wrong = on_all(&mut group, |rank| {
            let gpu = &gpus[rank.rank()];
            let slabs = shapes.map(|len| alloc::<bf16>(gpu, len));
            let ones = shapes.map(|len| upload(gpu, &vec![bf16::ONE; len]));
            let graph = gpu
                .capture(|| {
                    for (slab, ones) in slabs.iter().zip(&ones) {
                        gpu.copy(ones.slice::<bf16>(), slab.slice())?;
                        rank.sum(slab.slice())?;
                        rank.sum(slab.slice())?;
                        rank.sum(slab.slice())?;
                    }
                    Ok::<_, GpuError>(())
                })
                .unwrap();
            let mut wrong = 0;
            for &delay in &delays[rank.rank()] {
                thread::sleep(Duration::from_micros(delay));
                graph.launch().unwrap();
            }
            let expected = (gpus.len() as f32).powi(3);
            for slab in &slabs {
                let sums: Vec<bf16> = gpu.download(slab.slice()).unwrap();
                wrong += sums.iter().filter(|sum| sum.to_f32() != expected).count();
            }
            rank.check().unwrap();
            wrong
        });
        assert_eq!(wrong, vec![0; gpus.len()], "wrong sums by rank");
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
#[allow(clippy::print_stdout, reason = "shown where a test fails")]
fn a_rank_that_does_not_come_is_named() {
    for_each_group(|gpus, group| {
        let last = gpus.len() - 1;
        let [x, y] = [0; 2].map(|_| alloc::<bf16>(&gpus[0], 8 << 20));
        let begun = Instant::now();
        // What is small, then what is large: only the first wait is long.
        group[0].sum(x.slice().range(0..4096)).unwrap();
        group[0].sum(y.slice()).unwrap();
        assert_eq!(group[0].check(), Ok(()));
        gpus[0].synchronize().unwrap();
        println!("gave up after {:?}: {:?}", begun.elapsed(), group[0].check());
        assert!(begun.elapsed() > Duration::from_secs(19) && begun.elapsed() < Duration::from_secs(25));
        match group[0].check() {
            Err(GpuError::RankLost { rank: 0, missing, .. }) => assert!((1..=last).contains(&missing)),
            other => panic!("{other:?}"),
        }
        drop(group);

        // Another rank says that it will not come.
        let group = AllReduce::group(gpus, AllReducePath::Peers).unwrap();
        group[0].sum(x.slice().range(0..4096)).unwrap();
        thread::sleep(Duration::from_millis(50));
        let begun = Instant::now();
        group[last].abandon();
        gpus[0].synchronize().unwrap();
        println!("abandoned within {:?}", begun.elapsed());
        assert!(begun.elapsed() < Duration::from_secs(1));
        assert_eq!(group[0].check(), Err(GpuError::Abandoned { rank: 0 }));
    });
}

/// Again and again, whatever the half that was in use, with what is small and what is large.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn an_abandoned_group_is_of_use_again() {
    for_each_group(|gpus, mut group| {
        let ranks = gpus.len();
        for round in 0..4 {
            for len in [4096, 8 << 20] {
                let parts: Vec<_> = (0..ranks)
                    .map(|rank| vec![bf16::from_f32((rank + round) as f32); len])
                    .collect();
                let want = (0..ranks).map(|rank| (rank + round) as f32).sum::<f32>();
                let found = on_all(&mut group, |rank| {
                    let gpu = &gpus[rank.rank()];
                    let x = upload(gpu, &parts[rank.rank()]);
                    rank.sum(x.slice().range(0..len)).unwrap();
                    download::<bf16>(gpu, &x, len)
                });
                assert!(
                    found.iter().flatten().all(|x| x.to_f32() == want),
                    "round {round}"
                );
            }
            let x = alloc::<bf16>(&gpus[0], 4096);
            group[0].sum(x.slice()).unwrap();
            group[ranks - 1].abandon();
            gpus[0].synchronize().unwrap();
            assert!(group.iter().all(|rank| rank.check().is_err()));
            group.iter().for_each(|rank| rank.renew().unwrap());
            assert!(group.iter().all(|rank| rank.check().is_ok()));
        }
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn a_group_holds_what_is_said_and_gives_it_back() {
    for_each_group(|gpus, group| {
        let held = |gpu: &Gpu| gpu.budget().meters().by_component.get(Component::Communication);
        for gpu in gpus {
            assert_eq!(held(gpu), communication_bytes(gpus.len()) as u64);
        }
        drop(group);
        for gpu in gpus {
            assert_eq!(held(gpu), 0);
        }
    });
}

/// NCCL as an oracle, and as what is taken without peer access. Without the library, the error says so.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
#[allow(clippy::print_stdout, reason = "shown where a test fails")]
fn nccl_agrees() {
    let all = gpus();
    let mut rng = rng("NCCL");
    for ranks in [2, 4, 8].into_iter().filter(|&n| n <= all.len()) {
        let gpus = &all[..ranks];
        let before: Vec<u64> = gpus.iter().map(|gpu| gpu.memory_info().unwrap().free).collect();
        let begun = Instant::now();
        let mut group = match AllReduce::group(gpus, AllReducePath::Nccl) {
            Ok(group) => group,
            Err(DeviceError::Gpu(GpuError::NoLibrary { library })) => {
                println!("without {library}");
                assert_eq!(library, "libnccl.so.2");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let taken = gpus.iter().zip(&before);
        let taken: Vec<u64> = taken
            .map(|(gpu, before)| before - gpu.memory_info().unwrap().free)
            .collect();
        println!("NCCL takes {taken:?} bytes and {:?}", begun.elapsed());
        let mut ours = AllReduce::group(gpus, AllReducePath::Fastest).unwrap();
        println!("{}", ours[0].report());
        for (rows, n) in [(1, 4096), (64, 4096), (2048, 4096)] {
            let parts: Vec<_> = (0..ranks).map(|_| random(&mut rng, rows * n)).collect();
            let sum = |group: &mut [AllReduce]| {
                on_all(group, |rank| {
                    let gpu = &gpus[rank.rank()];
                    let x = upload(gpu, &parts[rank.rank()]);
                    rank.sum(x.slice().range(0..rows * n)).unwrap();
                    download::<bf16>(gpu, &x, rows * n)
                })
            };
            let (theirs, ours) = (sum(&mut group), sum(&mut ours));
            for (rank, (theirs, ours)) in theirs.iter().zip(&ours).enumerate() {
                let differences = theirs
                    .iter()
                    .zip(ours)
                    .map(|(a, b)| (a.to_f32() - b.to_f32()).abs());
                let (worst, count) = differences.fold((0.0_f32, 0), |(worst, count), difference| {
                    (worst.max(difference), count + usize::from(difference > 0.0))
                });
                println!(
                    "[{rows}, {n}] rank {rank}: {count} of {} differ, by {worst} at most",
                    ours.len()
                );
                // Of two, the sum is the same; of more, NCCL rounds in between.
                assert!(worst <= if ranks == 2 { 0.0 } else { 0.1 });
            }
        }
        let width = 5000;
        let gathered = on_all(&mut group, |rank| {
            let gpu = &gpus[rank.rank()];
            let mine = vec![rank.rank() as f32; 3 * width];
            let (mine, out) = (upload(gpu, &mine), poisoned::<f32>(gpu, ranks * 3 * width));
            rank.gather(
                mine.slice().range(0..3 * width),
                3,
                out.slice().range(0..ranks * 3 * width),
            )
            .unwrap();
            download::<f32>(gpu, &out, ranks * 3 * width)
        });
        for out in gathered {
            assert!(
                out.iter()
                    .enumerate()
                    .all(|(i, &x)| x == (i / width % ranks) as f32)
            );
        }
    }
}
