//! What is sent: every worst case that the profile proved, and every feature. All follows from the seed but the timing.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::{Map, Value, json};

use super::answer::Expected;
use super::job::{Job, Leave};
use super::limits::Limits;
use super::pictures::{Kind, Pictures, message};
use super::stage::Stage;

/// What a feature adds to a request.
struct Feature {
    name: &'static str,
    /// The only one that has it, if it is not both.
    endpoint: Option<Endpoint>,
    fields: Fields,
}

type Fields = fn(&mut Draw<'_>) -> Value;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    Completions,
    Chat,
}

impl Endpoint {
    const BOTH: [Self; 2] = [Self::Completions, Self::Chat];

    fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// Chance, and what it may draw from.
struct Draw<'a> {
    rng: StdRng,
    load: &'a Load,
}

const fn of(endpoint: Option<Endpoint>, name: &'static str, fields: Fields) -> Feature {
    Feature {
        name,
        endpoint,
        fields,
    }
}

const fn feature(name: &'static str, fields: Fields) -> Feature {
    of(None, name, fields)
}

const COMPLETIONS: Option<Endpoint> = Some(Endpoint::Completions);
const CHAT: Option<Endpoint> = Some(Endpoint::Chat);

/// Every sampling feature of the API, and every form of a request.
const FEATURES: [Feature; 18] = [
    feature("greedy", |_| json!({"temperature": 0})),
    feature(
        "temperature",
        |d| json!({"temperature": d.rng.random_range(0.1..2.0)}),
    ),
    feature("top_p", |d| json!({"top_p": d.rng.random_range(0.1..1.0)})),
    feature("top_k", |d| json!({"top_k": d.rng.random_range(1..100)})),
    feature("min_p", |d| json!({"min_p": d.rng.random_range(0.0..0.3)})),
    feature(
        "presence_penalty",
        |d| json!({"presence_penalty": d.rng.random_range(-2.0..2.0)}),
    ),
    feature(
        "frequency_penalty",
        |d| json!({"frequency_penalty": d.rng.random_range(-2.0..2.0)}),
    ),
    feature(
        "repetition_penalty",
        |d| json!({"repetition_penalty": d.rng.random_range(0.5..2.0)}),
    ),
    feature("logit_bias", |d| {
        let biases = (0..8).map(|_| (d.token().to_string(), json!(d.rng.random_range(-50.0..50.0))));
        json!({"logit_bias": biases.collect::<Map<_, _>>()})
    }),
    feature("seed", |d| json!({"seed": d.rng.random_range(0..1 << 30)})),
    feature("stop", |_| json!({"stop": ["e", "\n", "ing"]})),
    feature(
        "stop_token_ids",
        |d| json!({"stop_token_ids": [d.token(), d.token()]}),
    ),
    feature("eos", |_| json!({"ignore_eos": false})),
    feature("n", |d| json!({"n": d.load.limits.max_num_seqs.min(3)})),
    of(COMPLETIONS, "logprobs", |_| json!({"logprobs": TOP})),
    of(COMPLETIONS, "echo", |_| json!({"echo": true})),
    of(
        CHAT,
        "logprobs",
        |_| json!({"logprobs": true, "top_logprobs": TOP}),
    ),
    feature("all at once", |d| {
        json!({
            "temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.02, "presence_penalty": 0.4,
            "frequency_penalty": 0.2, "repetition_penalty": 1.1, "seed": 7, "logit_bias": {d.token().to_string(): -5},
        })
    }),
];

/// Most `logprobs` that the API gives.
const TOP: usize = 20;
/// Prompts that begin alike.
const PREFIXES: u64 = 2;
/// Tokens generated where only the feature counts.
const SHORT: usize = 4;

/// More requests than a turn of a stage sends.
const TURN: u64 = 1 << 32;

/// The first request of a stage's turn, the first of which is 0: no prompt comes again, as the server would have it already.
pub(super) const fn first_of_turn(turn: u64) -> u64 {
    turn * TURN
}

/// Draws of their own, apart from those of a stage's requests.
const APART: u64 = 1 << 48;

/// Makes requests for one server.
#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) limits: Limits,
    /// Name of the model in requests.
    pub(super) model: String,
    /// Prompt tokens are drawn below it.
    pub(super) vocab_size: u32,
    /// Whether there is a chat template, and room for what it adds.
    pub(super) chat: bool,
    /// The pictures that requests may have, if they may have any.
    pub(super) pictures: Option<Pictures>,
    pub(super) seed: u64,
}

impl Load {
    /// The `index`-th request of a stage; `None` where it has no more.
    pub(super) fn job(&self, stage: Stage, index: u64) -> Option<Job> {
        let mut draw = self.draw(stage, index);
        let longest = self.limits.longest();
        let job = match stage {
            Stage::Features => return self.feature_jobs(index, &mut draw),
            Stage::Longest => {
                let output = [1, SHORT, 32][index as usize % 3].min(longest / 2).max(1);
                draw.completion(stage, longest.saturating_sub(output), output)
            }
            Stage::Rows => {
                // Short, so that every row gets its blocks, and of two tokens for each row: in most steps nobody ends.
                let prompt = draw.up_to(self.limits.block_size / 2);
                let least = (2 * self.limits.max_num_seqs).max(32);
                let output = draw.rng.random_range(least..=least + least / 2).min(longest / 2);
                draw.completion(stage, prompt, output)
            }
            Stage::Mixed if index.is_multiple_of(8) => {
                let prompt = draw.rng.random_range(longest / 2..=longest);
                draw.completion(stage, prompt, SHORT)
            }
            Stage::Mixed => {
                let prompt = draw.up_to(32);
                let output = draw.rng.random_range(16..=128).min(longest / 2);
                draw.completion(stage, prompt, output)
            }
            Stage::Prefixes => draw.prefixed(stage),
            Stage::Disconnects => {
                let mut job = draw.mix();
                job.leave = Some(match job.streams() {
                    true => Leave::Events(draw.rng.random_range(0..8)),
                    false => Leave::Millis(draw.rng.random_range(0..300)),
                });
                job
            }
            Stage::Pictures => {
                let pictures = self.pictures.as_ref()?;
                // All rows begin with one of the largest.
                let first = stage.concurrency(&self.limits) as u64;
                let kind = match index.checked_sub(first) {
                    None => Kind::Largest,
                    Some(later) => Kind::nth(later),
                };
                let mut job = draw.pictured(stage, pictures, kind);
                if index >= first && draw.rng.random_bool(0.1) {
                    job.leave = Some(Leave::Millis(draw.rng.random_range(0..500)));
                }
                job
            }
            Stage::Full => {
                let (clients, place) = (stage.concurrency(&self.limits), (index % TURN) as usize);
                let (prompt, output) = self.limits.filling_lengths(place % clients, clients);
                // Beyond as many as there are rows, each takes the place of one that ended before the cache was full: outputs were too
                // short for the prompts that were computed meanwhile, so the next ones are longer.
                let waves = if index < TURN {
                    place / self.limits.rows()
                } else {
                    0
                };
                draw.completion(stage, prompt, output * (1 + waves))
            }
            Stage::Mix => {
                let mut job = draw.mix();
                if draw.rng.random_bool(0.05) && job.streams() {
                    job.leave = Some(Leave::Events(draw.rng.random_range(0..32)));
                }
                job
            }
        };
        Some(Job { stage, ..job })
    }

    /// Requests of [`Stage::Features`]: each feature at each endpoint that has it, whole and as a stream.
    pub(super) fn feature_count(&self) -> u64 {
        self.feature_list().count() as u64 * 2
    }

    /// Short requests, to be sent twice with nobody else there: chance is theirs alone. Too short to share KV.
    pub(super) fn repeatable(&self) -> Vec<Job> {
        let fields = [
            json!({"temperature": 0}),
            json!({"temperature": 1.0, "top_p": 0.9, "seed": 11}),
        ];
        let jobs = (0..).zip(fields).map(|(index, fields)| {
            let mut draw = self.draw(Stage::Mix, APART + index);
            let mut job = draw.completion(Stage::Mix, self.limits.block_size - 1, 2 * SHORT);
            job.label = "repeated";
            draw.apply(&mut job, fields);
            job
        });
        jobs.collect()
    }

    fn feature_list(&self) -> impl Iterator<Item = (&'static Feature, Endpoint)> {
        let chat = self.chat;
        FEATURES.iter().flat_map(move |feature| {
            let endpoints = Endpoint::BOTH.into_iter();
            endpoints
                .filter(move |&endpoint| feature.endpoint.is_none_or(|only| only == endpoint))
                .filter(move |&endpoint| chat || endpoint == Endpoint::Completions)
                .map(move |endpoint| (feature, endpoint))
        })
    }

    fn feature_jobs(&self, index: u64, draw: &mut Draw<'_>) -> Option<Job> {
        let (feature, endpoint) = self.feature_list().nth((index / 2) as usize)?;
        let mut job = draw.short(Stage::Features, endpoint, SHORT);
        draw.stream(&mut job, !index.is_multiple_of(2));
        draw.with(&mut job, feature);
        Some(job)
    }

    fn draw(&self, stage: Stage, index: u64) -> Draw<'_> {
        // Odd multipliers keep stages and requests apart.
        let mixed = (index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ ((stage as u64) << 56);
        Draw {
            rng: StdRng::seed_from_u64(self.seed ^ mixed),
            load: self,
        }
    }
}

impl Draw<'_> {
    fn token(&mut self) -> u32 {
        self.rng.random_range(0..self.load.vocab_size)
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.token()).collect()
    }

    fn up_to(&mut self, most: usize) -> usize {
        self.rng.random_range(1..=most.max(1))
    }

    /// A completion of exact lengths, greedy or not, whole or a stream.
    fn completion(&mut self, stage: Stage, prompt: usize, output: usize) -> Job {
        let (prompt, output) = self.load.limits.fit(prompt, output);
        let prompt = self.tokens(prompt);
        self.continuing(stage, prompt, output)
    }

    fn continuing(&mut self, stage: Stage, prompt: Vec<u32>, output: usize) -> Job {
        let temperature = if self.rng.random_bool(0.5) { 0.0 } else { 1.0 };
        let tokens = prompt.len();
        let mut job = Job {
            stage,
            label: "completion",
            path: Endpoint::Completions.path(),
            expected: Expected {
                prompt_tokens: Some(tokens),
                choices: 1,
                max_tokens: output,
                may_stop: false,
                logprobs: None,
            },
            body: json!({
                "model": self.load.model, "prompt": prompt, "max_tokens": output, "temperature": temperature,
                "ignore_eos": true,
            }),
            leave: None,
            pictures: 0,
            tokens,
            shared: 0,
        };
        let streams = self.rng.random_bool(0.5);
        self.stream(&mut job, streams);
        job
    }

    fn short(&mut self, stage: Stage, endpoint: Endpoint, output: usize) -> Job {
        if endpoint == Endpoint::Completions {
            let prompt = self.up_to(32);
            return self.completion(stage, prompt, output);
        }
        let content = format!("Say {}", self.rng.random_range(0..1000));
        let mut job = self.completion(stage, 1, output);
        job.label = "chat";
        job.path = Endpoint::Chat.path();
        job.expected.prompt_tokens = None;
        if let Value::Object(body) = &mut job.body {
            body.remove("prompt");
            body.insert("messages".into(), json!([{"role": "user", "content": content}]));
        }
        job
    }

    /// A chat about pictures.
    fn pictured(&mut self, stage: Stage, pictures: &Pictures, kind: Kind) -> Job {
        // Answers last while others begin, so that all rows are taken.
        let output = match kind {
            Kind::Largest => self
                .load
                .limits
                .longest()
                .saturating_sub(pictures.text + pictures.tokens),
            _ => SHORT,
        };
        let many = (2 * self.load.limits.max_num_seqs).max(32);
        let mut job = self.short(stage, Endpoint::Chat, output.clamp(1, many));
        let drawn = pictures.of(kind, &mut self.rng);
        let content = &mut job.body["messages"][0]["content"];
        let text = content.as_str().unwrap_or_default();
        // All sizes are such that files can hold them.
        *content = message(&drawn, text).unwrap_or_default();
        (job.label, job.pictures) = (kind.label(), drawn.len());
        job.tokens = pictures.text + drawn.len() * pictures.tokens;
        job
    }

    /// One of few long beginnings, the same for all stages, and an end of its own.
    fn prefixed(&mut self, stage: Stage) -> Job {
        let which = self.rng.random_range(0..PREFIXES);
        let limits = &self.load.limits;
        let mut beginning = self.load.draw(Stage::Prefixes, APART + which);
        let shared = limits.longest() / 2;
        let mut prompt = beginning.tokens(shared);
        let end = self.up_to((limits.longest() / 4).min(64));
        prompt.extend(self.tokens(end));
        let (length, output) = limits.fit(prompt.len(), 16);
        prompt.truncate(length);
        let mut job = self.continuing(stage, prompt, output);
        job.label = "cached prefix";
        job.shared = shared.min(length - 1);
        job
    }

    /// A text, of one of several kinds.
    fn mixed_text(&mut self, kind: usize, longest: usize) -> Job {
        match kind {
            0 => self.prefixed(Stage::Mix),
            1 if self.load.chat => self.short(Stage::Mix, Endpoint::Chat, SHORT),
            2 => self.completion(Stage::Mix, longest - SHORT.min(longest - 1), SHORT),
            3 => {
                let prompt = self.up_to(longest);
                self.completion(Stage::Mix, prompt, 64)
            }
            _ => {
                let (prompt, output) = (self.up_to((longest / 8).max(32)), self.up_to(128));
                self.completion(Stage::Mix, prompt, output)
            }
        }
    }

    /// Anything.
    fn mix(&mut self) -> Job {
        let longest = self.load.limits.longest();
        let pictures = self.load.pictures.as_ref();
        let mut job = match (self.rng.random_range(0..10), pictures) {
            (4 | 5, Some(pictures)) => {
                let kind = Kind::nth(self.rng.random());
                self.pictured(Stage::Mix, pictures, kind)
            }
            (drawn, _) => self.mixed_text(drawn, longest),
        };
        let chat = job.path == Endpoint::Chat.path();
        for _ in 0..*[0, 0, 1, 2].choose(&mut self.rng).unwrap_or(&0) {
            // An echoed prompt cannot have log-probabilities.
            let fits = |feature: &&Feature| match feature.endpoint {
                Some(endpoint) => (endpoint == Endpoint::Chat) == chat && feature.name != "echo",
                None => true,
            };
            let all: Vec<_> = FEATURES.iter().filter(fits).collect();
            if let Some(feature) = all.choose(&mut self.rng) {
                self.with(&mut job, feature);
            }
        }
        job
    }

    fn with(&mut self, job: &mut Job, feature: &Feature) {
        job.label = feature.name;
        let fields = (feature.fields)(self);
        self.apply(job, fields);
    }

    /// Writes fields into a request, and what follows from them into what is expected.
    fn apply(&self, job: &mut Job, fields: Value) {
        let (Value::Object(fields), Value::Object(body)) = (fields, &mut job.body) else {
            return;
        };
        for (name, value) in fields {
            match (name.as_str(), &value) {
                ("stop" | "stop_token_ids", _) | ("ignore_eos", Value::Bool(false)) => {
                    job.expected.may_stop = true;
                }
                ("n", _) => job.expected.choices = value.as_u64().unwrap_or(1) as usize,
                ("logprobs" | "top_logprobs", Value::Number(count)) => {
                    job.expected.logprobs = count.as_u64().map(|count| count as usize);
                }
                _ => {}
            }
            body.insert(name, value);
        }
    }

    fn stream(&self, job: &mut Job, streams: bool) {
        let Value::Object(body) = &mut job.body else {
            return;
        };
        if streams {
            body.insert("stream".into(), true.into());
            body.insert("stream_options".into(), json!({"include_usage": true}));
        } else {
            body.remove("stream");
            body.remove("stream_options");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use strum::IntoEnumIterator;

    use super::*;
    use crate::picture::Size;

    fn load(longest: usize, chat: bool) -> Load {
        Load {
            limits: Limits {
                max_model_len: longest,
                max_num_seqs: 4,
                max_num_batched_tokens: 64,
                kv_tokens: 4 * longest,
                block_size: 16,
                groups: Vec::new(),
            },
            model: "m".into(),
            vocab_size: 50,
            chat,
            pictures: None,
            seed: 3,
        }
    }

    fn with_pictures(longest: usize) -> Load {
        let pictures = Pictures {
            most: 2,
            largest: Size {
                width: 64,
                height: 48,
            },
            tokens: 12,
            text: 8,
            ratio: 64,
        };
        Load {
            pictures: Some(pictures),
            ..load(longest, true)
        }
    }

    #[test]
    fn every_request_is_legal() {
        for load in [
            load(16, true),
            load(64, true),
            load(1000, true),
            with_pictures(64),
        ] {
            let longest = load.limits.longest();
            for stage in Stage::iter() {
                for job in (0..300).map_while(|index| load.job(stage, index)) {
                    let expected = &job.expected;
                    let (prompt, output) = (expected.prompt_tokens.unwrap_or(1), expected.max_tokens);
                    assert!(prompt >= 1 && output >= 1, "{job:?}");
                    assert!(prompt + output <= longest, "{job:?}");
                    assert_eq!(job.stage, stage);
                    let tokens = job.body["prompt"].as_array();
                    assert_eq!(tokens.map(Vec::len), expected.prompt_tokens, "{job:?}");
                    assert_eq!(job.body["stream"].is_null(), job.body["stream_options"].is_null());
                }
            }
        }
    }

    #[test]
    fn the_seed_decides() {
        let body = |load: &Load, stage, index| load.job(stage, index).map(|job| job.body);
        let (one, same) = (load(100, true), load(100, true));
        let other = Load {
            seed: 4,
            ..one.clone()
        };
        for stage in Stage::iter().filter(|&stage| stage != Stage::Pictures) {
            assert_eq!(body(&one, stage, 5), body(&same, stage, 5));
            assert_ne!(body(&one, stage, 5), body(&other, stage, 5));
            assert_ne!(body(&one, stage, 5), body(&one, stage, 6));
        }
    }

    #[test]
    fn each_feature_goes_to_each_endpoint_that_has_it() {
        for (chat, endpoints) in [(false, 17), (true, 33)] {
            let load = load(100, chat);
            assert_eq!(load.feature_count(), 2 * endpoints);
            let jobs = (0..).map_while(|index| load.job(Stage::Features, index));
            let seen: BTreeSet<_> = jobs.map(|job| (job.path, job.label, job.streams())).collect();
            assert_eq!(seen.len() as u64, load.feature_count());
        }
    }

    #[test]
    fn the_longest_are_of_full_length_and_prefixes_are_shared() {
        let load = load(1000, true);
        for index in 0..9 {
            let expected = load.job(Stage::Longest, index).unwrap().expected;
            assert_eq!(expected.prompt_tokens.unwrap() + expected.max_tokens, 1000);
        }
        let begins = (0..40).filter_map(|index| {
            let job = load.job(Stage::Prefixes, index)?;
            Some(job.body["prompt"].as_array()?[..500].to_vec())
        });
        let distinct: BTreeSet<_> = begins.map(|begin| format!("{begin:?}")).collect();
        assert_eq!(distinct.len() as u64, PREFIXES);
    }
    #[test]
    fn pictures_are_for_servers_that_take_them() {
        let text = load(100, true);
        assert!(text.job(Stage::Pictures, 0).is_none());
        let count = |load: &Load, stage| {
            let jobs = (0..200).filter_map(|index| load.job(stage, index));
            jobs.map(|job| job.pictures).sum::<usize>()
        };
        let load = with_pictures(100);
        for stage in [Stage::Disconnects, Stage::Mix] {
            assert_eq!(count(&text, stage), 0);
            assert!(count(&load, stage) > 20, "{stage:?}");
        }
        // Every client begins with the largest, of its own, and stays for the answer.
        let first = Stage::Pictures.concurrency(&load.limits) as u64;
        let mut seen = BTreeSet::new();
        for index in 0..first {
            let job = load.job(Stage::Pictures, index).unwrap();
            assert_eq!(
                (job.label, job.pictures, job.leave),
                ("the largest picture", 1, None)
            );
            seen.insert(job.body["messages"].to_string());
        }
        assert_eq!(seen.len() as u64, first);
        let later = (first..first + 200).filter_map(|index| load.job(Stage::Pictures, index));
        let (labels, left): (BTreeSet<_>, Vec<_>) = later.map(|job| (job.label, job.leave.is_some())).unzip();
        assert_eq!(labels.len(), 5);
        assert!((5..60).contains(&left.iter().filter(|&&left| left).count()));
    }
}
