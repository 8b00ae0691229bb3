//! Dynamo's decoder and index, by lines. In: `batch SEQUENCE PAYLOAD` with a payload in hexadecimal, or `find SALT TOKENS` with
//! `-` for no salt and tokens separated by commas. Out, for each line: the events of the batch, or the blocks found.

use std::error::Error;
use std::io::{BufRead, Write};

use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::{BlockHashOptions, WorkerWithDpRank, compute_block_hash_for_seq};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};

const WORKER: u64 = 7;

fn main() -> Result<(), Box<dyn Error>> {
    let block_size: u32 = std::env::args().nth(1).ok_or("block size is missing")?.parse()?;
    let mut router = Router {
        block_size,
        normalizer: ZmqEventNormalizer::new(block_size),
        tree: RadixTree::new(),
    };
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words[..] {
            ["batch", sequence, payload] => router.apply(sequence.parse()?, &bytes(payload)?)?,
            ["find", salt, tokens] => router.find((salt != "-").then_some(salt), tokens)?,
            _ => return Err(format!("no such command: {line}").into()),
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

struct Router {
    block_size: u32,
    normalizer: ZmqEventNormalizer,
    tree: RadixTree,
}

impl Router {
    /// Applies a batch; a single event that the router would leave out is an error.
    fn apply(&mut self, sequence: u64, payload: &[u8]) -> Result<usize, Box<dyn Error>> {
        let batch = decode_event_batch(payload)?;
        let rank = batch.data_parallel_rank.ok_or("there is no rank")?;
        let worker = WorkerWithDpRank::new(WORKER, rank.cast_unsigned());
        let events = batch.events.len();
        for event in batch.events {
            let event = self
                .normalizer
                .preprocess_with_reason(event, worker)
                .map_err(|reason| format!("an event is left out: {}", reason.as_label()))?;
            let placed = self
                .normalizer
                .normalize_preprocessed(event, sequence, worker)
                .and_then(|placed| placed.into_router_event())
                .ok_or("an event means nothing")?;
            self.tree.apply_event(placed)?;
        }
        Ok(events)
    }

    /// Blocks at the beginning of `tokens` that the server has.
    fn find(&self, salt: Option<&str>, tokens: &str) -> Result<usize, Box<dyn Error>> {
        let tokens: Vec<u32> = tokens.split(',').map(str::parse).collect::<Result<_, _>>()?;
        let options = BlockHashOptions {
            cache_namespace: salt,
            ..BlockHashOptions::default()
        };
        let hashes = compute_block_hash_for_seq(&tokens, self.block_size, options);
        let scores = self.tree.find_matches(hashes, false).scores;
        Ok(scores.values().copied().max().unwrap_or(0).try_into()?)
    }
}

fn bytes(hexadecimal: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    (0..hexadecimal.len())
        .step_by(2)
        .map(|at| {
            Ok(u8::from_str_radix(
                hexadecimal.get(at..at + 2).ok_or("half a byte")?,
                16,
            )?)
        })
        .collect()
}
