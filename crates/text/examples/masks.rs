//! What structured output costs the CPU with a tokenizer: reading its vocabulary, compiling, beginning a sequence, a mask, and what a
//! sequence holds, as JSON. Sequences go where chance leads, under each of a few grammars.
//!
//! `cargo run --release -p plimsoll-text --example masks -- DIRECTORY`, of a model with a `tokenizer.json`.
#![expect(clippy::print_stdout, reason = "the result")]

use std::path::Path;
use std::time::{Duration, Instant};

use plimsoll_core::{Constraints, Progress};
use plimsoll_text::Tokenizer;
use plimsoll_text::grammar::{GrammarCompiler, GrammarSpec};
use serde_json::{Value, json};

const SEQUENCES: u64 = 20;
const TOKENS: usize = 200;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args().nth(1).ok_or("which directory?")?;
    let tokenizer = Tokenizer::from_dir(Path::new(&directory))?;
    let compiler = GrammarCompiler::new(tokenizer.clone(), tokenizer.eos_ids());
    let began = Instant::now();
    compiler.prepare();
    let vocabulary = began.elapsed();
    let mut grammars = serde_json::Map::new();
    for (name, spec) in grammars_of_interest() {
        let began = Instant::now();
        let compiled = compiler.compile(&spec.into())?;
        let compile = began.elapsed();
        let (mut masks, mut begins, mut accepts) = (Vec::new(), Vec::new(), Vec::new());
        let (mut sequences, before) = (Vec::new(), resident());
        for seed in 0..SEQUENCES {
            let mut constraints = Constraints::new(vec![compiled.constraint(&[])]);
            let mut mask = vec![0; tokenizer.vocab_size().div_ceil(32)];
            let mut random = seed;
            for index in 0..TOKENS {
                let began = Instant::now();
                constraints.fill(&mut mask);
                // The first mask is known since the grammar was compiled.
                if index > 0 {
                    masks.push(began.elapsed());
                }
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let token = choose(&mask, random >> 33);
                let began = Instant::now();
                let progress = constraints.accept(token)?;
                // With the first token a sequence gets lexer and parser of its own.
                match index {
                    0 => begins.push(began.elapsed()),
                    _ => accepts.push(began.elapsed()),
                }
                if progress == Progress::Complete {
                    break;
                }
            }
            sequences.push(constraints);
        }
        let taken = before
            .zip(resident())
            .map(|(before, now)| now.saturating_sub(before) / SEQUENCES);
        let began = Instant::now();
        drop(sequences);
        let freed = began.elapsed() / SEQUENCES as u32;
        let figures = json!({
            "compile_ms": micros(compile) / 1e3,
            "begin_us": figures(begins),
            "mask_us": figures(masks),
            "accept_us": figures(accepts),
            "bytes_per_sequence": taken,
            "free_us": micros(freed).round(),
        });
        grammars.insert(name.to_owned(), figures);
    }
    let report = json!({
        "tokenizer": directory,
        "vocab_size": tokenizer.vocab_size(),
        "vocabulary_ms": micros(vocabulary) / 1e3,
        "grammars": grammars,
    });
    println!("{report:#}");
    Ok(())
}

fn grammars_of_interest() -> [(&'static str, GrammarSpec); 4] {
    let schema = json!({
        "type": "array",
        "minItems": 10000,
        "items": {
            "type": "object",
            "additionalProperties": false,
            "required": ["name", "age", "tags", "note"],
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    });
    let lark = "start: (word \" \")+\nword: /[a-z]+/ | /[0-9]+/ | \"(\" word \")\"";
    [
        ("json_object", GrammarSpec::JsonObject),
        ("json_schema", GrammarSpec::JsonSchema { schema, strict: true }),
        ("regex", GrammarSpec::Regex("([a-zA-Z]{1,12}[ ,.])+".into())),
        ("lark", GrammarSpec::Lark(lark.into())),
    ]
}

/// Bytes of this process in memory, where Linux tells.
fn resident() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

/// One of the allowed tokens.
fn choose(mask: &[u32], random: u64) -> u32 {
    let count: u32 = mask.iter().map(|word| word.count_ones()).sum();
    let mut left = (random % u64::from(count.max(1))) as u32;
    for (index, word) in mask.iter().enumerate() {
        if left < word.count_ones() {
            let mut bits = (0..32).filter(|bit| word >> bit & 1 == 1);
            return 32 * index as u32 + bits.nth(left as usize).unwrap_or(0);
        }
        left -= word.count_ones();
    }
    0
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn figures(mut times: Vec<Duration>) -> Value {
    times.sort_unstable();
    let at = |part: f64| {
        times
            .get((times.len() as f64 * part) as usize)
            .map(|&time| micros(time).round())
    };
    let mean = micros(times.iter().sum::<Duration>()) / times.len().max(1) as f64;
    json!({ "count": times.len(), "mean": mean.round(), "p50": at(0.5), "p99": at(0.99), "max": at(0.9999999) })
}
