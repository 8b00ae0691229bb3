//! Neighbours on the device that start, grow, shrink and go while a server starts.

use std::sync::{Arc, Mutex};

use plimsoll_core::BlockSize;
use plimsoll_device::{Budget, Supply};
use plimsoll_profiler::{Arithmetic, Outcome, Report};
use plimsoll_server::Memory;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::{BUDGET, Model, answers, stop};

/// So many tokens would be of use that memory is the bound.
const FLAGS: &str = "--max-num-seqs 32 --max-model-len 4096 --mem-fraction 0.95";

/// Most bytes that neighbours take here: what is left holds weights, probe, margins and the longest request.
const MOST: u64 = BUDGET / 2;

/// About as often is a machine asked during a start.
const LOOKS: u64 = 150;

/// A machine whose neighbours may change each time somebody looks.
#[derive(Debug)]
pub(crate) struct Machine {
    /// Bytes of all.
    total: u64,
    neighbours: Mutex<Neighbours>,
}

#[derive(Debug)]
struct Neighbours {
    rng: StdRng,
    /// Bytes they take now.
    bytes: u64,
    /// Chance of a change at a look.
    restless: f64,
    /// What a look found: what this process held, and what was left.
    answers: Vec<(u64, u64)>,
}

impl Machine {
    /// One of `total` bytes without neighbours until [`Self::set`] says so, and its account.
    pub(crate) fn quiet(total: u64) -> (Arc<Self>, Budget) {
        let neighbours = Neighbours {
            bytes: 0,
            restless: 0.0,
            answers: Vec::new(),
            rng: StdRng::seed_from_u64(0),
        };
        let machine = Arc::new(Self {
            total,
            neighbours: Mutex::new(neighbours),
        });
        (Arc::clone(&machine), Budget::shared(total, machine))
    }

    /// One of [`BUDGET`] bytes.
    fn new(seed: u64) -> Arc<Self> {
        let mut rng = StdRng::seed_from_u64(seed);
        let neighbours = Neighbours {
            // Nobody at first, or somebody already.
            bytes: if rng.random_bool(0.5) {
                0
            } else {
                rng.random_range(0..=MOST)
            },
            restless: [0.0, 2.0 / LOOKS as f64, 0.1, 1.0][rng.random_range(0..4)],
            answers: Vec::new(),
            rng,
        };
        Arc::new(Self {
            total: BUDGET,
            neighbours: Mutex::new(neighbours),
        })
    }

    /// Neighbours hold so many bytes from now on, or what there is.
    pub(crate) fn set(&self, bytes: u64) {
        let mut neighbours = self.neighbours.lock().unwrap();
        (neighbours.bytes, neighbours.restless) = (bytes, 0.0);
    }

    /// Whether a look found `peers` bytes in the hands of others.
    fn has_said(&self, peers: u64) -> bool {
        let neighbours = self.neighbours.lock().unwrap();
        neighbours
            .answers
            .iter()
            .any(|&(held, left)| self.total.saturating_sub(held).saturating_sub(left) == peers)
    }
}

impl Supply for Machine {
    fn left(&self, reserved: u64) -> Option<u64> {
        let mut neighbours = self.neighbours.lock().unwrap();
        let Neighbours {
            rng, bytes, restless, ..
        } = &mut *neighbours;
        if rng.random_bool(*restless) {
            *bytes = match rng.random_range(0..3) {
                0 => 0,
                1 => rng.random_range(0..=MOST),
                _ => (*bytes + rng.random_range(0..1 << 20)).min(MOST),
            };
        }
        let left = self
            .total
            .saturating_sub(reserved)
            .saturating_sub(neighbours.bytes);
        neighbours.answers.push((reserved, left));
        Some(left)
    }
}

/// Blocks that the sum in the report comes to.
fn justified(arithmetic: &Arithmetic) -> usize {
    let Arithmetic {
        total,
        non_kv,
        peers,
        canary,
        fragmentation_buffer,
        mem_fraction,
        page_bytes,
        ..
    } = *arithmetic;
    let room = total - non_kv - peers - canary - fragmentation_buffer;
    ((room as f64 * mem_fraction) as u64 / page_bytes) as usize
}

/// Checks that the KV cache is what its own meters justify, within one block, or for each retry 5 % less.
fn assert_justified(report: &Report, name: &str) {
    let arithmetic = report.arithmetic.as_ref().expect("a size that was measured");
    let justified = justified(arithmetic);
    let tokens = BlockSize::default().tokens();
    assert_eq!(report.attempts.last().unwrap().outcome, Outcome::Proved, "{name}");
    assert!(report.attempts.len() <= 4, "{name}");
    let last = report.attempts.last().unwrap().kv_tokens / tokens;
    assert_eq!(last, report.sizing.kv_pages, "{name}");
    // The sum is that of the attempt that followed it; cuts come after.
    let cuts = (0..4)
        .find(|&cuts| (justified as f64 * 0.95_f64.powi(cuts) - last as f64).abs() <= 1.0 + f64::from(cuts));
    assert!(
        cuts.is_some(),
        "{name}: {last} blocks, {justified} justified\n{report:#?}"
    );
    assert!(
        cuts < Some(report.attempts.len() as i32),
        "{name}: {cuts:?} cuts without a cause\n{report:#?}"
    );
}

/// Neighbours that take or free memory never end a start in which a size fits, and never spoil what it is.
#[tokio::test(flavor = "multi_thread")]
async fn neighbours_that_come_and_go_never_end_a_start() {
    let model = Model::new();
    let (mut alone, mut retried, mut beside) = (0, 0, 0);
    for seed in 0..60 {
        let machine = Machine::new(seed);
        let budget = Budget::shared(BUDGET, machine.clone());
        let ready = model
            .start(FLAGS, &budget)
            .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let name = format!("seed {seed}");
        assert_justified(&ready.report, &name);
        let peers = ready.report.arithmetic.as_ref().unwrap().peers;
        assert!(machine.has_said(peers), "{name}: nobody said {peers}");
        alone += usize::from(peers == 0);
        beside += usize::from(peers > 0);
        retried += usize::from(ready.report.attempts.len() > 1);
        // Whatever they do later: it is seen, and serving needs none of it.
        for bytes in [0, MOST, BUDGET] {
            machine.set(bytes);
            let [meters] = ready.memory.meters()[..] else {
                panic!("one rank")
            };
            assert_eq!(meters.reserved + meters.free + meters.peers(), BUDGET, "{name}");
            let room = BUDGET - meters.reserved;
            assert_eq!(meters.peers(), bytes.min(room), "{name}");
            assert_eq!(budget.meters(), meters, "{name}");
        }
        assert!(
            answers(&ready.engine)
                .await
                .iter()
                .all(|tokens| tokens.len() == 24),
            "{name}"
        );
        stop(ready, &budget).await;
    }
    // All of it has happened.
    assert!(
        alone > 5 && beside > 20 && retried > 5,
        "{alone} alone, {beside} beside others, {retried} with retries"
    );
}

/// A neighbour's memory is worth as many tokens as it would hold, whenever it came.
#[tokio::test(flavor = "multi_thread")]
async fn a_neighbour_costs_what_it_takes() {
    let model = Model::new();
    let mut blocks = Vec::new();
    for bytes in [0, 4 << 20] {
        let machine = Machine::new(0);
        machine.set(bytes);
        let budget = Budget::shared(BUDGET, machine);
        let ready = model
            .start(&format!("{FLAGS} --mem-fraction 1.0"), &budget)
            .unwrap();
        assert_eq!(ready.report.attempts.len(), 1);
        assert_eq!(ready.report.baseline.peers, bytes);
        blocks.push((
            ready.report.sizing.kv_pages as u64,
            ready.report.arithmetic.as_ref().unwrap().page_bytes,
        ));
        stop(ready, &budget).await;
    }
    let [(alone, page_bytes), (beside, _)] = blocks[..] else {
        panic!("two starts")
    };
    assert!(
        (alone - beside).abs_diff((4 << 20) / page_bytes) <= 1,
        "{blocks:?}"
    );
}

/// A machine of [`BUDGET`] bytes that two servers share; each sees what the other has really taken.
#[derive(Debug, Default)]
struct Shared(Mutex<Option<Budget>>);

impl Supply for Shared {
    fn left(&self, reserved: u64) -> Option<u64> {
        let other = self
            .0
            .lock()
            .unwrap()
            .as_ref()
            .map_or(0, |other| other.meters().reserved);
        Some(BUDGET.saturating_sub(reserved).saturating_sub(other))
    }
}

/// Each is told that the whole machine is its own; one after the other, they share it.
#[tokio::test(flavor = "multi_thread")]
async fn two_servers_fit_the_machine_that_both_were_promised() {
    let model = Model::new();
    let flags = "--max-num-seqs 32 --max-model-len 4096 --mem-fraction 0.5";
    let first = Budget::shared(BUDGET, Arc::new(Shared::default()));
    let second = Budget::shared(BUDGET, Arc::new(Shared(Mutex::new(Some(first.clone())))));
    let one = model.start(flags, &first).unwrap();
    let two = model.start(flags, &second).unwrap();
    assert_eq!(two.report.baseline.peers, first.meters().reserved);
    for report in [&one.report, &two.report] {
        assert_justified(report, "two servers");
    }
    assert!(first.meters().reserved + second.meters().reserved <= BUDGET);
    assert!(two.report.sizing.kv_tokens < one.report.sizing.kv_tokens / 3 * 2);
    stop(two, &second).await;
    stop(one, &first).await;
}
