//! Linear layers of many rows by the kernels for Hopper (`linear_hopper_many.cu`): every tile against `x Wᵀ + b` in `f64`. On other GPUs
//! these tests have nothing to do.

use half::bf16;
use plimsoll_device::cuda::Gpu;
use plimsoll_kernels::cuda::{
    Fp8Scaling, GpuValues, LinearOutput, LinearPath, LinearRoom, LinearTile, Linears,
};
use rand::Rng;
use rand::rngs::StdRng;

use crate::common;
use crate::fp8;
use crate::fused::ACTIVATIONS;
use crate::linear::{Case, TOLERANCE, check, check_chain, forward, linears, written};

/// Of k: fewer than the 4 or 5 of the ring, as many, more, and several turns of it.
const STAGES: [usize; 7] = [1, 3, 4, 5, 6, 10, 14];

fn tiles() -> impl Iterator<Item = LinearTile> {
    LinearTile::all(GpuValues::Bf16).iter().copied()
}

/// Checks a case as [`check`] does, and that a tile is what computes all of it.
fn check_tile(gpu: &Gpu, linears: &mut Linears, tile: LinearTile, case: &Case) {
    linears.fix(Some(LinearPath::Many(tile)));
    let (layer, m) = (case.layer(gpu), case.rows());
    let what = case.what(&tile.to_string());
    assert!(
        linears.is_own(m, &layer, LinearOutput::Bf16),
        "{what}: not its own"
    );
    // Outputs in f32 have no bias.
    assert!(
        case.has_bias() || linears.is_own(m, &layer, LinearOutput::F32),
        "{what}: not its own"
    );
    if layer.outputs().is_multiple_of(16) && !case.has_bias() {
        for activation in ACTIVATIONS {
            assert!(linears.fuses_glu(m, &layer, activation), "{what}: {activation:?}");
        }
    }
    check(gpu, linears, case, &tile.to_string());
}

/// A number of rows that one block takes, or for which blocks share weights.
fn rows(rng: &mut StdRng, tile: LinearTile, shared: bool) -> usize {
    match shared {
        false => rng.random_range(65..=tile.rows),
        true => rng.random_range(tile.rows + 1..=512),
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn every_tile_matches_reference() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("linear, many rows");
    let mut linears = linears(&gpu);
    for tile in tiles() {
        for shared in [false, true] {
            for (bias, stages) in [false, true]
                .into_iter()
                .flat_map(|bias| STAGES.map(|of| (bias, of)))
            {
                let m = rows(&mut rng, tile, shared);
                // Gated products too, without a bias.
                let n = 8 * rng.random_range(1..=60) * if bias { 1 } else { 2 };
                // The last stage may not be whole.
                let k = 64 * stages - [0, 8, 40][rng.random_range(0..3)];
                let case = Case::random(&mut rng, m, n, k, bias);
                check_tile(&gpu, &mut linears, tile, &case);
            }
        }
    }
}

/// More tiles than run at once: blocks take one after the other, and the ring goes on from one to the next.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn blocks_take_several_tiles() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("linear, many rows, several tiles");
    let mut linears = linears(&gpu);
    for tile in tiles() {
        for shared in [false, true] {
            let m = rows(&mut rng, tile, shared).min(tile.rows + 70);
            let cluster = if shared { 2 } else { 1 };
            let n = tile.weights * (2 * 132 / cluster + 9) - 16;
            let case = Case::random(&mut rng, m, n, 144, false);
            check_tile(&gpu, &mut linears, tile, &case);
        }
    }
}

/// Other numbers of rows, and rows that are no whole pieces of 16 bytes, are cuBLASLt's.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn what_is_not_theirs() {
    let gpu = common::gpu();
    let mut rng = common::rng("linear, not many rows");
    let mut linears = linears(&gpu);
    for tile in tiles() {
        linears.fix(Some(LinearPath::Many(tile)));
        for (m, n, k) in [(64, 128, 256), (513, 128, 256), (100, 132, 256), (100, 128, 260)] {
            let case = Case::random(&mut rng, m, n, k, true);
            let layer = case.layer(&gpu);
            assert!(
                !linears.is_own(m, &layer, LinearOutput::Bf16),
                "{}",
                case.what("own")
            );
            check(&gpu, &linears, &case, "cuBLASLt");
        }
    }
}

/// What lies between the rows of outputs stays as it is.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn rows_of_outputs_may_be_wider() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("linear, many rows, wider outputs");
    let mut linears = linears(&gpu);
    for tile in tiles() {
        linears.fix(Some(LinearPath::Many(tile)));
        let (m, n, k) = (rng.random_range(65..=512), 8 * rng.random_range(20..=60), 320);
        let pitch = n + 8 * rng.random_range(1..=5);
        let case = Case::random(&mut rng, m, n, k, true);
        let (layer, x) = (case.layer(&gpu), common::upload(&gpu, &case.x));
        let is_own = linears.is_own(m, &layer, LinearOutput::Bf16);
        assert!(is_own, "{}: not its own", case.what(&tile.to_string()));
        let out: Vec<bf16> = written(&gpu, m * pitch, |out| {
            let out = out.slice().range(0..m * pitch);
            linears.forward_in(LinearRoom::default(), x.slice(), &layer, LinearOutput::Bf16, out)
        });
        let (outputs, between): (Vec<&[bf16]>, Vec<&[bf16]>) =
            out.chunks_exact(pitch).map(|row| row.split_at(n)).unzip();
        let what = case.what(&format!("{tile} in rows of {pitch}"));
        let outputs = common::widen(&outputs.concat());
        common::assert_close(&what, &outputs, &case.reference(), TOLERANCE);
        let between = between.concat();
        assert!(
            between.iter().all(|x| x.to_bits() == 0xffff),
            "{what}: written between rows"
        );
    }
}

/// Same bits in every run, whatever the other rows hold.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn rows_are_independent() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("linear, many rows, rows");
    let mut linears = linears(&gpu);
    let (n, k) = (520, 1024);
    for tile in tiles() {
        linears.fix(Some(LinearPath::Many(tile)));
        for m in [70, 300] {
            let mut case = Case::random(&mut rng, m, n, k, true);
            let is_own = linears.is_own(m, &case.layer(&gpu), LinearOutput::Bf16);
            assert!(is_own, "{}: not its own", case.what(&tile.to_string()));
            let bits = |case: &Case| -> Vec<u16> {
                let out = forward(&gpu, &linears, case);
                out.iter().map(|x| x.to_bits()).collect()
            };
            let first = bits(&case);
            assert!(first == bits(&case), "{tile}, {m} rows: two runs");
            case.x[k..].fill(bf16::NAN);
            assert_eq!(first[..n], bits(&case)[..n], "{tile}: NaN in other rows");
        }
    }
}

/// All tiles add up the products of an output in the same order.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn tiles_give_the_same_bits() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("linear, many rows, tiles");
    let mut linears = linears(&gpu);
    for m in [100, 180, 400] {
        let (n, k) = (456, 1000);
        let case = Case::random(&mut rng, m, n, k, false);
        let (layer, x) = (case.layer(&gpu), common::upload(&gpu, &case.x));
        let found = tiles().map(|tile| {
            linears.fix(Some(LinearPath::Many(tile)));
            let is_own = linears.is_own(m, &layer, LinearOutput::F32);
            assert!(is_own, "{}: not its own", case.what(&tile.to_string()));
            let out: Vec<f32> = written(&gpu, m * n, |out| {
                linears.forward_f32(x.slice(), &layer, out.slice().range(0..m * n))
            });
            (tile, out.iter().map(|x| x.to_bits()).collect())
        });
        let found: Vec<(LinearTile, Vec<u32>)> = found.collect();
        for (tile, bits) in &found {
            assert!(*bits == found[0].1, "{}", case.what(&tile.to_string()));
        }
    }
}

/// Inputs and outputs of the layers of [`check_chain`].
const CHAIN_WIDTH: usize = 1024;

/// Kernels that start before the ones ahead have ended read what these wrote.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn chain_in_a_graph_of_many_rows() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("linear, many rows, chain");
    let mut linears = linears(&gpu);
    for tile in tiles() {
        linears.fix(Some(LinearPath::Many(tile)));
        let shared = rng.random_bool(0.5);
        let m = rows(&mut rng, tile, shared).min(tile.rows + 40);
        let layer = Case::random(&mut rng, m, CHAIN_WIDTH, CHAIN_WIDTH, false).layer(&gpu);
        let is_own = linears.is_own(m, &layer, LinearOutput::Bf16);
        assert!(is_own, "{tile}, {m} rows: not its own");
        check_chain(&gpu, &linears, &mut rng, m);
    }
}

/// Checks a case in e4m3, and that a tile is what computes all of it.
fn check_fp8(ways: &mut fp8::Ways<'_>, tile: LinearTile, case: &fp8::Case) {
    let linears = &mut ways.linears;
    linears.fix(Some(LinearPath::Many(tile)));
    let (layer, m) = (case.layer(ways.gpu), case.rows());
    let is_own = linears.is_own(m, &layer, LinearOutput::Bf16);
    assert!(is_own, "{tile}, {m} rows: not its own");
    if layer.outputs().is_multiple_of(16) && layer.bias().is_none() {
        for activation in ACTIVATIONS {
            let fuses = linears.fuses_glu(m, &layer, activation);
            assert!(fuses, "{tile}, {m} rows, {activation:?}: not its own");
        }
    }
    case.check(ways, &tile.to_string());
}

fn fp8_tiles() -> impl Iterator<Item = LinearTile> {
    LinearTile::all(GpuValues::Fp8(Fp8Scaling::Rows)).iter().copied()
}

/// Fewer rows than a block has, as many, and rows of several blocks.
fn fp8_rows(rng: &mut StdRng, tile: LinearTile) -> [usize; 3] {
    let few = rng.random_range(33..=tile.rows);
    [few, tile.rows, rng.random_range(tile.rows + 1..=512)]
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn every_fp8_tile_matches_reference() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("linear, many rows, fp8");
    let mut ways = fp8::Ways::new(&gpu, false);
    for tile in fp8_tiles() {
        for m in fp8_rows(&mut rng, tile) {
            for bias in [false, true] {
                // Of each part: a stage, as many as in the ring or about as many, and several turns of it.
                for stages in [1, 5, 10, 19] {
                    let n = 8 * rng.random_range(1..=30) * if bias { 1 } else { 2 };
                    // The last stage may not be whole.
                    let k = 128 * tile.parts * stages - [0, 16, 80][rng.random_range(0..3)];
                    let case = fp8::Case::random(&mut rng, Fp8Scaling::Rows, [m, n, k], bias);
                    check_fp8(&mut ways, tile, &case);
                }
            }
        }
    }
}

/// More tiles than run at once.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fp8_blocks_take_several_tiles() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("linear, many rows, fp8, several tiles");
    let mut ways = fp8::Ways::new(&gpu, false);
    for tile in fp8_tiles() {
        for m in fp8_rows(&mut rng, tile) {
            let m = m.min(tile.rows + 70);
            let cluster = tile.parts * if m > tile.rows { 2 } else { 1 };
            let n = tile.weights * (2 * 132 / cluster + 9) - 16;
            let case = fp8::Case::random(&mut rng, Fp8Scaling::Rows, [m, n, 144 * tile.parts], false);
            check_fp8(&mut ways, tile, &case);
        }
    }
}

/// Same bits in every run, whatever the other rows hold.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn fp8_rows_are_independent() {
    let Some(gpu) = common::hopper() else { return };
    let mut rng = common::rng("linear, many rows, fp8, rows");
    let mut ways = fp8::Ways::new(&gpu, false);
    for tile in fp8_tiles() {
        ways.linears.fix(Some(LinearPath::Many(tile)));
        for m in fp8_rows(&mut rng, tile) {
            fp8::Case::random(&mut rng, Fp8Scaling::Rows, [m, 520, 1024], true)
                .check_rows(&ways, &tile.to_string());
        }
    }
}
