//! `plimsoll bench serve`: load on a running server, with vLLM's options and vLLM's definitions.
//!
//! Of one request that streams: TTFT = first chunk - send; ITL = gaps between chunks; E2E = last chunk - send;
//! TPOT = (E2E - TTFT) / (output tokens - 1), for requests of more than one output token. Waiting for a place under
//! `--max-concurrency` is not part of any of them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use futures::future::join_all;
use futures::{StreamExt, TryStreamExt};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use reqwest::header::CONTENT_TYPE;
use serde_json::{Value, json};
use strum::{EnumIter, IntoEnumIterator, IntoStaticStr};
use tokio::sync::Semaphore;

use super::dataset::{RandomDataset, Sample};
use super::mm::{DatasetArgs, DatasetName};
use super::report::{OUTPUT_JSON, Report};
use super::stats::Summary;
use crate::args::{positive, ratio, whole};
use crate::client::{ClientArgs, LAST_EVENT, Lines, connection, event_data, json_of, refusal};
use crate::error::Error;
use crate::progress::count_bar;
use crate::report_file::ReportFile;

/// `plimsoll bench serve`.
#[derive(Clone, Debug, Args)]
pub struct ServeBenchArgs {
    /// URL of the server, or unix:PATH of its socket
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    base_url: String,
    /// Credentials for the server.
    #[command(flatten)]
    client: ClientArgs,
    /// Name of the model [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// What prompts hold.
    #[command(flatten)]
    dataset: DatasetArgs,
    /// Requests to send
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = positive)]
    num_prompts: usize,
    /// Warm-up requests before the measurement, with other prompts
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive)]
    num_warmups: usize,
    /// Mean prompt length in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 1024, value_parser = positive)]
    random_input_len: usize,
    /// Mean output length in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = positive)]
    random_output_len: usize,
    /// Fraction by which lengths vary around their mean, in [0, 1)
    #[arg(long, value_name = "RATIO", default_value_t = 0.0, value_parser = ratio)]
    random_range_ratio: f64,
    /// Length of a prefix common to all prompts, in addition to their length
    #[arg(long, value_name = "TOKENS", default_value_t = 0, value_parser = whole::<usize>)]
    random_prefix_len: usize,
    /// Token ids are drawn below this; at most the model's vocabulary
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = positive)]
    random_vocab_size: usize,
    /// Requests per second, arriving as a Poisson process; inf sends all at once
    #[arg(long, value_name = "RATE", default_value = "inf", value_parser = rate)]
    request_rate: f64,
    /// Maximum number of concurrent requests [default: no limit]
    #[arg(long, value_name = "N", value_parser = positive)]
    max_concurrency: Option<usize>,
    /// Same seed, same prompts, lengths and arrivals
    #[arg(long, value_name = "SEED", default_value_t = 0, value_parser = whole::<u64>)]
    seed: u64,
    /// Generate the full output length even where the model would stop
    #[arg(long)]
    ignore_eos: bool,
    /// Sampling temperature
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f64,
    /// Metrics to show: ttft, tpot, itl, e2el
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "ttft,tpot,itl,e2el",
        value_name = "LIST"
    )]
    percentile_metrics: Vec<Metric>,
    /// Percentiles to show
    #[arg(long, value_delimiter = ',', default_value = "90,99", value_name = "LIST", value_parser = percent)]
    metric_percentiles: Vec<f64>,
    /// Write everything measured to this file, as JSON
    #[arg(long, value_name = "FILE")]
    output_json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
enum Metric {
    Ttft,
    Tpot,
    Itl,
    E2el,
}

impl Metric {
    fn title(self) -> &'static str {
        match self {
            Self::Ttft => "Time to First Token",
            Self::Tpot => "Time per Output Token (excl. 1st token)",
            Self::Itl => "Inter-token Latency",
            Self::E2el => "End-to-end Latency",
        }
    }

    fn key(self) -> &'static str {
        self.into()
    }
}

fn rate(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|&r| r > 0.0)
        .ok_or_else(|| "a number above 0, or inf, is expected".to_owned())
}

fn percent(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|p| (0.0..=100.0).contains(p))
        .ok_or_else(|| "a number in [0, 100] is expected".to_owned())
}

/// What one request took.
#[derive(Clone, Debug, Default)]
struct Outcome {
    ttft: Duration,
    gaps: Vec<Duration>,
    total: Duration,
    prompt_tokens: usize,
    output_tokens: usize,
    images: usize,
}

impl Outcome {
    /// TPOT in seconds; `None` for a single token.
    fn tpot(&self) -> Option<f64> {
        let decode = (self.total - self.ttft).as_secs_f64();
        (self.output_tokens > 1).then(|| decode / (self.output_tokens - 1) as f64)
    }
}

/// Runs the benchmark.
pub async fn run(args: ServeBenchArgs) -> Result<(), Error> {
    let file = ReportFile::new(OUTPUT_JSON, args.output_json.clone())?;
    let images = args.dataset.images()?;
    let client = Client::connect(&args).await?;
    let dataset = RandomDataset {
        input_len: args.random_input_len,
        output_len: args.random_output_len,
        range_ratio: args.random_range_ratio,
        prefix_len: args.random_prefix_len,
        vocab_size: args.random_vocab_size,
        images,
        seed: args.seed,
    };
    // Images take long to draw: before the time begins.
    let client = Arc::new(client);
    let samples = dataset.generate(args.num_warmups + args.num_prompts);
    let mut warmups = client.prepare(samples).await?;
    let samples = warmups.split_off(args.num_warmups);
    // One request alone: it must work before a thousand are sent.
    let first = warmups.swap_remove(0);
    client.complete(first).await.map_err(failed_warmup)?;
    let at_once = ServeBenchArgs {
        request_rate: f64::INFINITY,
        ..args.clone()
    };
    let hidden = indicatif::ProgressBar::hidden();
    for result in send_all(Arc::clone(&client), warmups, &at_once, &hidden).await {
        result.map_err(failed_warmup)?;
    }

    let bar = count_bar("requests", samples.len() as u64);
    let begin = Instant::now();
    let results = send_all(client, samples, &args, &bar).await;
    let duration = begin.elapsed();
    bar.finish_and_clear();

    let (outcomes, errors): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    let outcomes: Vec<Outcome> = outcomes.into_iter().flatten().collect();
    let errors: Vec<String> = errors.into_iter().filter_map(Result::err).collect();
    report(&args, &outcomes, &errors, duration).publish(" Serving Benchmark Result ", &file)?;
    match errors.first() {
        Some(first) => Err(Error::Bench(format!(
            "{} requests failed, the first: {first}",
            errors.len()
        ))),
        None => Ok(()),
    }
}

fn failed_warmup(error: String) -> Error {
    Error::Bench(format!("a first request failed: {error}"))
}

async fn send_all(
    client: Arc<Client>,
    requests: Vec<Prepared>,
    args: &ServeBenchArgs,
    bar: &indicatif::ProgressBar,
) -> Vec<Result<Outcome, String>> {
    let places = args.max_concurrency.map(|n| Arc::new(Semaphore::new(n)));
    let mut rng = StdRng::seed_from_u64(args.seed);
    let begin = tokio::time::Instant::now();
    let mut due = Duration::ZERO;
    let mut tasks = Vec::with_capacity(requests.len());
    for request in requests {
        if args.request_rate.is_finite() {
            tokio::time::sleep_until(begin + due).await;
            // Exponential gaps make a Poisson process.
            let uniform: f64 = rng.random();
            due += Duration::from_secs_f64(-(1.0 - uniform).ln() / args.request_rate);
        }
        let (client, places, bar) = (Arc::clone(&client), places.clone(), bar.clone());
        tasks.push(tokio::spawn(async move {
            let _place = match &places {
                Some(places) => Some(places.acquire().await.map_err(|e| e.to_string())?),
                None => None,
            };
            let result = client.complete(request).await;
            bar.inc(1);
            result
        }));
    }
    let results = join_all(tasks).await.into_iter();
    results
        .map(|task| task.unwrap_or_else(|error| Err(error.to_string())))
        .collect()
}

struct Client {
    http: reqwest::Client,
    base: String,
    model: String,
    ignore_eos: bool,
    temperature: f64,
    /// Tokens of a word of one letter, and of the beginning that all prompts have, where prompts are chats.
    chats: Option<(f64, usize)>,
}

/// A request as it is sent.
struct Prepared {
    path: &'static str,
    body: Vec<u8>,
    images: usize,
}

impl Client {
    async fn connect(args: &ServeBenchArgs) -> Result<Self, Error> {
        let (http, base) = args.client.server("--base-url", &args.base_url)?;
        let model = match &args.model {
            Some(model) => model.clone(),
            None => {
                let url = format!("{base}/v1/models");
                let response = http.get(&url).send().await.map_err(|error| {
                    let hint = "is the server running? --base-url names another one";
                    Error::Bench(format!("{base}: {}; {hint}", connection(&error)))
                })?;
                let models = json_of(response).await;
                let models = models.map_err(|what| Error::Bench(format!("{url}: {what}")))?;
                let first = models["data"][0]["id"].as_str();
                first
                    .ok_or_else(|| Error::Bench(format!("{base} lists no model; name one with --model")))?
                    .to_owned()
            }
        };
        let chats = match args.dataset.dataset_name {
            DatasetName::Random => None,
            DatasetName::RandomMm => Some((tokens_per_word(&http, &base).await?, args.random_prefix_len)),
        };
        Ok(Self {
            http,
            base,
            model,
            ignore_eos: args.ignore_eos,
            temperature: args.temperature,
            chats,
        })
    }

    /// Bodies of requests, on as many threads as there are.
    async fn prepare(self: &Arc<Self>, samples: Vec<Sample>) -> Result<Vec<Prepared>, Error> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let bar = count_bar("prompts", samples.len() as u64);
        let one = |sample| {
            let (client, bar) = (Arc::clone(self), bar.clone());
            async move {
                let prepared = tokio::task::spawn_blocking(move || client.request(&sample)).await;
                bar.inc(1);
                prepared?.map_err(Error::Bench)
            }
        };
        let prepared = futures::stream::iter(samples.into_iter().map(one)).buffered(threads);
        let prepared = prepared.try_collect().await;
        bar.finish_and_clear();
        prepared
    }

    fn request(&self, sample: &Sample) -> Result<Prepared, String> {
        let mut body = json!({
            "model": self.model,
            "max_tokens": sample.output_len,
            "temperature": self.temperature,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if self.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        let path = match self.chats {
            None => {
                body["prompt"] = json!(sample.prompt);
                "/v1/completions"
            }
            Some((tokens_per_word, prefix_len)) => {
                let mut content =
                    vec![json!({"type": "text", "text": sample.text(prefix_len, tokens_per_word)})];
                for image in &sample.images {
                    content.push(image.part()?);
                }
                body["messages"] = json!([{"role": "user", "content": content}]);
                "/v1/chat/completions"
            }
        };
        Ok(Prepared {
            path,
            body: body.to_string().into_bytes(),
            images: sample.images.len(),
        })
    }

    async fn complete(&self, prepared: Prepared) -> Result<Outcome, String> {
        let Prepared { path, body, images } = prepared;
        let begin = Instant::now();
        let request = self.http.post(format!("{}{path}", self.base));
        let request = request.header(CONTENT_TYPE, "application/json").body(body);
        let response = request.send().await.map_err(|e| e.to_string())?;
        let status = response.status();
        if !status.is_success() {
            let text = response.text().await.unwrap_or_default();
            return Err(refusal(status, &text));
        }
        let mut outcome = Outcome {
            images,
            ..Outcome::default()
        };
        let mut last = None;
        let mut begins = false;
        let mut lines = Lines::default();
        let mut stream = response.bytes_stream();
        while let Some(bytes) = stream.next().await {
            let now = Instant::now();
            lines.push(&bytes.map_err(|e| e.to_string())?);
            while let Some(line) = lines.next() {
                let Some(data) = event_data(&line).filter(|&data| data != LAST_EVENT) else {
                    continue;
                };
                let chunk: Value =
                    serde_json::from_str(data).map_err(|e| format!("a chunk is not JSON: {e}"))?;
                if let Some(error) = chunk.get("error") {
                    return Err(error.to_string());
                }
                let choices = chunk["choices"].as_array();
                if choices.is_some_and(|choices| !choices.is_empty()) {
                    match last.replace(now) {
                        None => outcome.ttft = now - begin,
                        // A chat begins with a chunk that comes with the first token and holds none.
                        Some(_) if begins => {}
                        Some(before) => outcome.gaps.push(now - before),
                    }
                    begins = chunk["choices"][0]["delta"]["role"].is_string();
                    outcome.total = now - begin;
                }
                if let Some(tokens) = chunk["usage"]["completion_tokens"].as_u64() {
                    outcome.output_tokens = tokens as usize;
                    outcome.prompt_tokens = chunk["usage"]["prompt_tokens"].as_u64().unwrap_or(0) as usize;
                }
            }
        }
        match last {
            Some(_) if outcome.output_tokens > 0 => Ok(outcome),
            Some(_) => Err("the server sent no usage".to_owned()),
            None => Err("the server sent no token".to_owned()),
        }
    }
}

/// Tokens that the server's model makes of a word of one letter.
async fn tokens_per_word(http: &reqwest::Client, base: &str) -> Result<f64, Error> {
    const WORDS: usize = 260;
    let letters = (0..WORDS).flat_map(|index| [' ', char::from(b'a' + (index % 26) as u8)]);
    let body = json!({"prompt": letters.collect::<String>(), "add_special_tokens": false});
    let sent = http.post(format!("{base}/tokenize")).json(&body).send().await;
    let failed =
        |what: &dyn std::fmt::Display| Error::Bench(format!("{base}/tokenize counts no tokens: {what}"));
    let response = sent.map_err(|error| failed(&connection(&error)))?;
    let answer = json_of(response).await.map_err(|what| failed(&what))?;
    let count = answer["count"].as_u64().ok_or_else(|| failed(&answer))?;
    Ok(count as f64 / WORDS as f64)
}

fn report(args: &ServeBenchArgs, outcomes: &[Outcome], errors: &[String], duration: Duration) -> Report {
    let sum = |f: fn(&Outcome) -> usize| outcomes.iter().map(f).sum::<usize>();
    let (input, output) = (sum(|o| o.prompt_tokens), sum(|o| o.output_tokens));
    let mut report = Report::new("serve");
    report.detail("base_url", args.base_url.clone());
    let is_finite = args.request_rate.is_finite();
    let rate = is_finite.then_some(args.request_rate);
    report.detail("request_rate", rate.map_or(json!("inf"), Value::from));
    report.detail("max_concurrency", json!(args.max_concurrency));
    report.detail("errors", errors.to_vec());
    report.count("Successful requests", "completed", outcomes.len());
    report.count("Failed requests", "failed", errors.len());
    report.duration("Benchmark duration (s)", "duration", duration.as_secs_f64());
    report.count("Total input tokens", "total_input_tokens", input);
    report.count("Total generated tokens", "total_output_tokens", output);
    let (done, total) = (outcomes.len(), input + output);
    let images = sum(|o| o.images);
    let has_images = args.dataset.dataset_name == DatasetName::RandomMm;
    if has_images {
        report.count("Total images", "total_images", images);
    }
    report.rate("Request throughput (req/s)", "request_throughput", done);
    if has_images {
        report.rate("Image throughput (img/s)", "image_throughput", images);
    }
    report.rate("Output token throughput (tok/s)", "output_throughput", output);
    report.rate("Total token throughput (tok/s)", "total_token_throughput", total);
    for metric in Metric::iter() {
        let values: Vec<f64> = match metric {
            Metric::Ttft => outcomes.iter().map(|o| o.ttft.as_secs_f64()).collect(),
            Metric::Tpot => outcomes.iter().filter_map(Outcome::tpot).collect(),
            Metric::Itl => {
                let gaps = outcomes.iter().flat_map(|o| &o.gaps);
                gaps.map(Duration::as_secs_f64).collect()
            }
            Metric::E2el => outcomes.iter().map(|o| o.total.as_secs_f64()).collect(),
        };
        let milliseconds = values.into_iter().map(|v| v * 1e3).collect();
        if !args.percentile_metrics.contains(&metric) {
            continue;
        }
        let summary = Summary::of(milliseconds, &args.metric_percentiles);
        let (key, name) = (metric.key(), metric.key().to_uppercase());
        report.section(metric.title());
        let number = |report: &mut Report, what: &str, value| {
            let json = format!("{}_{key}_ms", what.to_lowercase());
            report.number(&format!("{what} {name} (ms)"), &json, value);
        };
        number(&mut report, "Mean", summary.mean);
        number(&mut report, "Median", summary.median);
        report.detail(&format!("std_{key}_ms"), json!(summary.std));
        for (p, value) in summary.percentiles {
            number(&mut report, &format!("P{p}"), value);
        }
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tpot_leaves_the_first_token_out() {
        let ms = Duration::from_millis;
        let outcome = Outcome {
            ttft: ms(100),
            total: ms(400),
            output_tokens: 4,
            ..Outcome::default()
        };
        assert!((outcome.tpot().unwrap() - 0.1).abs() < 1e-9);
        let single = Outcome {
            output_tokens: 1,
            ..outcome
        };
        assert_eq!(single.tpot(), None);
    }
}
