//! Whole layers of one row in steps that follow each other without a wait of the host.

use half::bf16;
use plimsoll_device::cuda::{Gpu, GpuError};
use plimsoll_kernels::cuda::{GpuChain, Linears, has_hopper_kernels};
use rand::Rng;

use super::{Case, Memory, Place, SIZES, State, part, size, slot_of};
use crate::common;

const CONTEXTS: [usize; 5] = [0, 1, 250, 3000, 9000];

/// Between two replays, as the server does it.
fn go_to(gpu: &Gpu, place: &Place, memory: &Memory) {
    let to = &memory.place;
    for (from, to) in [
        (&place.run, &to.run),
        (&place.slot, &to.slot),
        (&place.position, &to.position),
    ] {
        gpu.copy(from.slice::<u8>(), part(to, from.bytes()))
            .expect("a copy");
    }
}

/// A graph that was captured once serves all contexts. Many steps under way, with steps of two rows and chains of products between them,
/// which exchange values in the same workspace, leave the bits of steps that are waited for.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn steps_under_way_leave_the_same_bits() {
    let Some(gpu) = common::hopper() else { return };
    let linears = crate::linear::linears(&gpu);
    let mut rng = common::rng("steps_under_way_leave_the_same_bits");
    let longest = CONTEXTS[CONTEXTS.len() - 1];
    let case = Case::random(&gpu, &mut rng, SIZES[0], longest, 3);
    let memory = Memory::new(&gpu, &case);
    let graph = gpu
        .capture(|| memory.forward(&case, &linears, 0..case.layers.len()))
        .expect("a capture");
    let tokens = case.layout.block_size.tokens();
    let places = CONTEXTS.map(|cached| case.place(&gpu, cached, slot_of(&case.blocks, tokens, cached)));
    for (place, cached) in places.iter().zip(CONTEXTS) {
        memory.put(&gpu, &case.state());
        go_to(&gpu, place, &memory);
        graph.launch().expect("a replay");
        let replayed = memory.state(&gpu, &case);
        let launched = memory.run(&gpu, &linears, &case, 0..case.layers.len(), &case.state());
        assert!(
            replayed.bits() == launched.bits(),
            "{}, context {cached}",
            case.what
        );
    }

    // Two rows, and a layer's products of one row.
    let (width, projected) = (case.size.width, case.projected.len());
    let (rows, chained) = (
        common::random(&mut rng, 2 * width),
        common::random(&mut rng, width),
    );
    let (x, hidden) = (common::upload(&gpu, &rows), common::upload(&gpu, &chained));
    let out = common::poisoned::<bf16>(&gpu, 2 * projected);
    let activated = common::poisoned::<bf16>(&gpu, case.size.inner);
    let others = gpu.capture(|| {
        let layer = &case.layers[0];
        linears.forward(
            part::<bf16>(&x, 2 * width),
            &layer.projections.device,
            part(&out, 2 * projected),
        )?;
        linears.forward_chain(&GpuChain {
            x: part(&x, width),
            output: &layer.output.device,
            hidden: part(&hidden, width),
            norm: memory.norm(&case, 0, 1),
            gate_up: &layer.gate_up.device,
            activation: case.activation,
            activated: part(&activated, case.size.inner),
            down: &layer.down.device,
            sum_norms: None,
            next: None,
        })
    });
    let others = others.expect("a capture");
    let steps: Vec<(usize, usize)> = (0..40)
        .map(|_| (rng.random_range(0..CONTEXTS.len()), rng.random_range(0..3)))
        .collect();
    let run = |waits: bool| -> (Vec<u16>, Vec<bf16>, Vec<bf16>) {
        memory.put(&gpu, &case.state());
        gpu.upload(&chained, part(&hidden, width)).expect("a copy");
        let launch = |graph: &plimsoll_device::cuda::Graph| {
            graph.launch().expect("a replay");
            if waits {
                gpu.synchronize().expect("no error");
            }
        };
        for &(place, kind) in &steps {
            go_to(&gpu, &places[place], &memory);
            launch(&graph);
            match kind {
                0 => launch(&others),
                1 => launch(&graph),
                _ => {}
            }
        }
        let state = memory.state(&gpu, &case);
        assert!(state.hidden.iter().all(|x| x.is_finite()), "{}", case.what);
        (
            state.bits(),
            common::download(&gpu, &hidden, width),
            common::download(&gpu, &out, 2 * projected),
        )
    };
    let want = run(true);
    for _ in 0..5 {
        assert!(run(false) == want, "{}: other bits", case.what);
    }
}

/// Where all tags have been used, the words that blocks exchange are cleared.
#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn tags_of_layers_begin_again() {
    const LAYERS: usize = Linears::MOST_ROW_LAYERS;
    /// Launches of so many layers until tags begin again, behind two of one layer.
    const LAUNCHES: usize = (0xffff - 2) / LAYERS;
    let gpu = common::gpu();
    if !has_hopper_kernels(&gpu) {
        return;
    }
    let linears = crate::linear::linears(&gpu);
    let mut rng = common::rng("tags_of_layers_begin_again");
    // The latter has words that the former's launches do not write: most inputs of `down`, and what other splits attend to.
    let short = Case::random(&gpu, &mut rng, size(512, 2, 1, 64, 128), 3, LAYERS);
    let long = Case::random(&gpu, &mut rng, size(512, 2, 1, 64, 1024), 700, 1);
    let [of_short, of_long] = [&short, &long].map(|case| Memory::new(&gpu, case));
    let run_short = |layers: usize| {
        let after = of_short.run(&gpu, &linears, &short, 0..layers, &short.state());
        after.hidden
    };
    let run_long = |before: &State| of_long.run(&gpu, &linears, &long, 0..1, before).hidden;
    let want_long = run_long(&long.state());
    // These words keep tag 2, which is that of the same layer with other inputs below.
    let mut other = long.state();
    other.projected = common::random(&mut rng, other.projected.len());
    assert_ne!(run_long(&other), want_long);
    let want_short = run_short(LAYERS);
    let graph = gpu.capture(|| {
        (1..LAUNCHES).try_for_each(|_| of_short.forward(&short, &linears, 0..LAYERS))?;
        Ok::<_, GpuError>(())
    });
    graph.expect("a capture").launch().expect("a replay");
    run_short(1);
    assert_eq!(run_long(&long.state()), want_long, "tag 2 again");
    assert_eq!(run_short(LAYERS), want_short, "the tags behind it");
}
