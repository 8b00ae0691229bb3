//! `plimsoll bench latency` and `throughput`: the engine in this process, without HTTP, with vLLM's options.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use futures::{StreamExt, TryStreamExt};
use plimsoll_core::{DeviceTime, Event, ImageSpan, Request, RequestOptions, SamplingOptions, TokenId};
use plimsoll_engine::{EngineHandle, SecondsByKind, StepSeconds};
use plimsoll_images::{DecodeLimits, decode};
use plimsoll_server::{ImageInput, Memory};
use plimsoll_text::grammar::{CompiledGrammar, GrammarCompiler, GrammarSpec};
use tokio::sync::Semaphore;

use super::dataset::{RandomDataset, Sample};
use super::report::{OUTPUT_JSON, Report};
use super::stats::Summary;
use crate::args::{EngineArgs, LatencyArgs, ThroughputArgs};
use crate::backend::{self, Backend};
use crate::error::Error;
use crate::logging::{self, Kind};
use crate::picture::Picture;
use crate::progress::count_bar;
use crate::report_file::ReportFile;
use crate::settings::EngineSettings;
use crate::source::resolve;
use crate::start::{Loaded, Serving, StartTimes, Text};

/// Latency of batches, one after the other.
pub async fn latency(args: LatencyArgs) -> Result<(), Error> {
    let batch = args.batch_size;
    let file = ReportFile::new(OUTPUT_JSON, args.output_json)?;
    let mut bench = Bench::start(args.engine, batch, batch).await?;
    bench.guide(args.guided_json.as_deref())?;
    let dataset = bench.dataset(args.input_len, args.output_len, 0.0);
    let iterations = args.num_iters_warmup + args.num_iters;
    // Prompts of their own for every batch: no prefix cache flatters the result.
    let samples = dataset.generate(iterations * args.batch_size);
    let bar = count_bar("batches", iterations as u64);
    let mut totals = Vec::with_capacity(args.num_iters);
    let mut prefills = Vec::with_capacity(args.num_iters);
    let mut together = Together::default();
    let mut idle_before = None;
    for (iteration, batch) in samples.chunks(args.batch_size).enumerate() {
        if iteration == args.num_iters_warmup {
            idle_before = bench.device_time();
            if args.profile {
                bench.backend.watch(true)?;
            }
        }
        let timing = bench.run(batch, &indicatif::ProgressBar::hidden()).await?;
        bar.inc(1);
        if iteration >= args.num_iters_warmup {
            totals.push(timing.total.as_secs_f64());
            prefills.push(timing.first_tokens.as_secs_f64());
            together.add(timing.together);
        }
    }
    bar.finish_and_clear();
    if args.profile {
        bench.backend.watch(false)?;
    }

    let prefill: f64 = prefills.iter().sum();
    let decode = totals.iter().sum::<f64>() - prefill;
    let batches = (args.num_iters * args.batch_size) as f64;
    let mut report = Report::new("latency");
    report.count("Batch size", "batch_size", args.batch_size);
    report.count("Prompt tokens per request", "input_len", args.input_len);
    report.count("Generated tokens per request", "output_len", args.output_len);
    report.count("Batches", "num_iters", args.num_iters);
    let throughput = batches * args.input_len as f64 / prefill;
    report.number("Prompt throughput (tok/s)", "prompt_throughput", throughput);
    if args.output_len > 1 {
        let (label, key) = ("Generation throughput (tok/s)", "generation_throughput");
        report.number(label, key, batches * (args.output_len - 1) as f64 / decode);
    }
    if let Some(seconds) = together.seconds_per_step() {
        // Without the steps that compute prompts as well, of which a large batch of long ones has many.
        report.number("Step, all generating (ms)", "whole_batch_step_ms", 1e3 * seconds);
    }
    bench.report_idle(&mut report, idle_before);
    report.detail("latencies", totals.clone());
    let summary = Summary::of(totals, &[10.0, 25.0, 50.0, 75.0, 90.0, 99.0]);
    report.section("Latency of a batch");
    report.number("Mean (s)", "avg_latency", summary.mean);
    for (p, value) in summary.percentiles {
        report.number(&format!("P{p} (s)"), &format!("p{p}_latency"), value);
    }
    bench.end().await;
    report.publish(" Latency Benchmark Result ", &file)
}

/// Throughput of many requests that are all there from the start.
pub async fn throughput(args: ThroughputArgs) -> Result<(), Error> {
    let queue = args.num_prompts.max(args.num_warmups);
    let file = ReportFile::new(OUTPUT_JSON, args.output_json)?;
    let images = args.dataset.images()?;
    let mut bench = Bench::start(args.engine, 0, queue).await?;
    bench.guide(args.guided_json.as_deref())?;
    if images.is_some() && bench.images.is_none() {
        let message = "--dataset-name random-mm has images, and the model is served for text alone";
        return Err(Error::Bench(message.to_owned()));
    }
    let dataset = RandomDataset {
        images,
        ..bench.dataset(args.input_len, args.output_len, args.random_range_ratio)
    };
    let mut warmups = dataset.generate(args.num_warmups + args.num_prompts);
    let samples = warmups.split_off(args.num_warmups);
    bench.run(&warmups, &indicatif::ProgressBar::hidden()).await?;
    let idle_before = bench.device_time();
    let before = bench.engine.stats();
    let bar = count_bar("requests", args.num_prompts as u64);
    let timing = bench.run(&samples, &bar).await?;
    bar.finish_and_clear();

    let prompt = timing.prompt_tokens;
    let output: usize = samples.iter().map(|sample| sample.output_len).sum();
    let mut report = Report::new("throughput");
    report.count("Requests", "num_requests", samples.len());
    report.duration("Elapsed time (s)", "elapsed_time", timing.total.as_secs_f64());
    report.count("Prompt tokens", "total_prompt_tokens", prompt);
    report.count("Generated tokens", "total_output_tokens", output);
    report.rate("Requests (req/s)", "requests_per_second", samples.len());
    report.rate("Prompt throughput (tok/s)", "prompt_throughput", prompt);
    if dataset.images.is_some() {
        let images: usize = samples.iter().map(|sample| sample.images.len()).sum();
        report.count("Images", "total_images", images);
        report.rate("Image throughput (img/s)", "image_throughput", images);
    }
    report.rate("Generation throughput (tok/s)", "output_throughput", output);
    report.rate("Total throughput (tok/s)", "tokens_per_second", prompt + output);
    let preemptions = bench.engine.stats().scheduler.preemptions - before.scheduler.preemptions;
    report.count("Preemptions", "num_preemptions", preemptions as usize);
    bench.report_steps(&mut report, before.seconds_by_kind);
    bench.report_idle(&mut report, idle_before);
    bench.end().await;
    report.publish(" Throughput Benchmark Result ", &file)
}

struct Bench {
    engine: EngineHandle,
    backend: Arc<dyn Backend>,
    seed: u64,
    text: Text,
    /// What all outputs are.
    grammar: Option<CompiledGrammar>,
    /// How prompts take images, if they do.
    images: Option<Arc<ImageInput>>,
    /// For requests that have images and no token yet: as many as run at once, lest all images be in memory at once.
    places: Semaphore,
    /// For decoding and resizing, which takes all of a core.
    turns: Semaphore,
}

/// How long requests that were submitted together took.
struct Timing {
    /// Until every request had its first token.
    first_tokens: Duration,
    /// Until every request was done.
    total: Duration,
    /// Between the two, as long as none was done.
    together: Together,
    /// Of all prompts, those of images included.
    prompt_tokens: usize,
}

/// What became of one request.
struct Generated {
    /// When its tokens came, of which there is at least one.
    tokens: Vec<Duration>,
    /// Of its prompt, those of images included.
    prompt_tokens: usize,
}

/// Steps in which every request of a batch generated a token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Together {
    seconds: f64,
    steps: f64,
}

impl Together {
    /// Of requests whose tokens came at these times: from the last first token to the first last one.
    fn of(requests: &[&[Duration]]) -> Self {
        let begin = requests.iter().filter_map(|tokens| tokens.first()).max();
        let end = requests.iter().filter_map(|tokens| tokens.last()).min();
        let (Some(begin), Some(end)) = (begin, end) else {
            return Self::default();
        };
        let tokens = requests.iter().flat_map(|tokens| tokens.iter());
        let within = tokens.filter(|at| (begin < *at) && (*at <= end)).count();
        Self {
            seconds: end.saturating_sub(*begin).as_secs_f64(),
            steps: within as f64 / requests.len() as f64,
        }
    }

    fn add(&mut self, other: Self) {
        self.seconds += other.seconds;
        self.steps += other.steps;
    }

    fn seconds_per_step(self) -> Option<f64> {
        (self.steps > 0.0).then(|| self.seconds / self.steps)
    }
}

impl Bench {
    /// With room for `least` requests at once, and `queue` that wait.
    async fn start(args: EngineArgs, least: usize, queue: usize) -> Result<Self, Error> {
        logging::init(&args.log, Kind::Command)?;
        let mut settings = EngineSettings::new(args)?;
        settings.least_num_seqs = least;
        let (settings, times) = (Arc::new(settings), StartTimes::begin());
        let source = resolve(&settings, times.progress()).await?;
        let work = move || {
            let (backend, _lock) = backend::open(&source, &settings)?;
            let loaded = Loaded::new(&source, &settings, Arc::clone(&backend), &times)?;
            if loaded.embedding().is_some() {
                return Err(Error::Bench(
                    "the model is served for embeddings and generates no tokens; see --runner".to_owned(),
                ));
            }
            let serving = Serving {
                max_queue: queue,
                ..Serving::default()
            };
            let started = loaded.spawn(loaded.prove()?, serving)?;
            settings.report_file.write(&started.memory.report())?;
            let images = loaded
                .processor
                .map(|processor| ImageInput::new(processor, &loaded.text.tokenizer).map(Arc::new));
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            Ok(Self {
                backend,
                seed: settings.fixed_seed(),
                text: loaded.text,
                grammar: None,
                images: images.transpose().map_err(Error::ImageTokens)?,
                places: Semaphore::new(started.report.sizing.max_num_seqs + threads),
                turns: Semaphore::new(threads),
                engine: started.engine,
            })
        };
        tokio::task::spawn_blocking(work).await?
    }

    /// Generates JSON from here on, if there is a schema.
    fn guide(&mut self, schema: Option<&Path>) -> Result<(), Error> {
        let Some(path) = schema else { return Ok(()) };
        let failed = |error: &dyn std::fmt::Display| Error::Bench(format!("{}: {error}", path.display()));
        let schema = std::fs::read_to_string(path).map_err(|error| failed(&error))?;
        let schema = serde_json::from_str(&schema).map_err(|error| failed(&error))?;
        let compiler = GrammarCompiler::new(self.text.tokenizer.clone(), &self.text.eos_token_ids);
        let spec = GrammarSpec::JsonSchema { schema, strict: true };
        self.grammar = Some(compiler.compile(&spec.into()).map_err(|error| failed(&error))?);
        Ok(())
    }

    /// Frees the state while the driver is still there: it is gone when the process ends.
    async fn end(self) {
        self.engine.drain(Duration::from_secs(10)).await;
    }

    /// How a GPU has spent its time so far.
    fn device_time(&self) -> Option<DeviceTime> {
        self.engine.stats().device_time
    }

    /// The part of its time that a GPU has waited for the next step since `before`.
    fn report_idle(&self, report: &mut Report, before: Option<DeviceTime>) {
        if let (Some(now), Some(before)) = (self.device_time(), before) {
            let spent = now.since(before);
            let (busy, idle) = (spent.busy_seconds, spent.idle_seconds);
            let percent = 100.0 * idle / (busy + idle).max(1e-9);
            report.number("GPU idle (%)", "gpu_idle_percent", percent);
        }
    }

    /// How long the steps in which requests generated have taken since `before`, also as a percentage of what
    /// the steps measured at start predict.
    fn report_steps(&self, report: &mut Report, before: SecondsByKind) {
        let now = self.engine.stats().seconds_by_kind;
        for (kind, key, now, before) in [
            ("Decode steps", "decode_steps", now.decode, before.decode),
            ("Mixed steps", "mixed_steps", now.mixed, before.mixed),
        ] {
            let StepSeconds { actual, expected } = now.since(before);
            if expected > 0.0 {
                report.number(&format!("{kind} (s)"), &format!("{key}_time"), actual);
                let percent = 100.0 * actual / expected;
                report.number(
                    &format!("{kind} (% of expected)"),
                    &format!("{key}_percent"),
                    percent,
                );
            }
        }
    }

    fn dataset(&self, input_len: usize, output_len: usize, range_ratio: f64) -> RandomDataset {
        let vocab_size = self.engine.limits().vocab_size;
        RandomDataset {
            input_len,
            output_len,
            range_ratio,
            prefix_len: 0,
            vocab_size,
            images: None,
            seed: self.seed,
        }
    }

    /// Submits all at once; every request generates its full length.
    async fn run(&self, samples: &[Sample], bar: &indicatif::ProgressBar) -> Result<Timing, Error> {
        let files = drawn(samples).await?;
        let begin = Instant::now();
        let requests = samples.iter().zip(files);
        let requests = requests.map(|(sample, files)| self.request(sample, files, begin, bar));
        let times = try_join_all(requests).await?;
        let tokens: Vec<&[Duration]> = times.iter().map(|request| &*request.tokens).collect();
        let latest = |at: Option<Option<&Duration>>| at.flatten().copied().unwrap_or_default();
        Ok(Timing {
            first_tokens: latest(tokens.iter().map(|tokens| tokens.first()).max()),
            total: begin.elapsed(),
            together: Together::of(&tokens),
            prompt_tokens: times.iter().map(|request| request.prompt_tokens).sum(),
        })
    }

    async fn request(
        &self,
        sample: &Sample,
        files: Vec<Vec<u8>>,
        begin: Instant,
        bar: &indicatif::ProgressBar,
    ) -> Result<Generated, Error> {
        let (prompt, images, mut place) = match (&self.images, files.is_empty()) {
            (Some(input), false) => {
                let closed = |error: tokio::sync::AcquireError| Error::Internal(error.to_string());
                let place = self.places.acquire().await.map_err(closed)?;
                let _turn = self.turns.acquire().await.map_err(closed)?;
                let (input, text) = (Arc::clone(input), sample.prompt.clone());
                let read = move || read_prompt(&input, &files, &text);
                let (prompt, images) = tokio::task::spawn_blocking(read).await??;
                (prompt, images, Some(place))
            }
            _ => (sample.prompt.clone(), Vec::new(), None),
        };
        let prompt_tokens = prompt.len();
        let constraints = self.grammar.iter().map(|grammar| grammar.constraint(&[]));
        let options = RequestOptions {
            prompt,
            images,
            max_tokens: Some(sample.output_len),
            // Greedy, and without stop tokens: the work is the same whatever the model says.
            sampling: SamplingOptions {
                temperature: Some(0.0),
                ..SamplingOptions::default()
            },
            seed: self.seed,
            constraints: constraints.collect(),
            ..RequestOptions::default()
        };
        let failed = |error: &dyn std::fmt::Display| Error::Bench(error.to_string());
        let request =
            Request::new(self.engine.next_id(), options, &self.engine.limits()).map_err(|e| failed(&e))?;
        let mut events = self.engine.submit(request).map_err(|e| failed(&e))?;
        let mut tokens = Vec::with_capacity(sample.output_len);
        while let Some(event) = events.next().await {
            match event {
                Event::Admitted { .. } | Event::Prompt(_) => {}
                Event::Token(_) => {
                    tokens.push(begin.elapsed());
                    drop(place.take());
                }
                Event::Pooled(_) => return Err(failed(&"a vector came for a text")),
                Event::Failed(error) => return Err(failed(&error)),
            }
        }
        bar.inc(1);
        if tokens.len() < sample.output_len {
            let message = format!(
                "a text under the schema of --guided-json ended after {} tokens; it must be longer",
                tokens.len()
            );
            return Err(Error::Bench(message));
        }
        Ok(Generated {
            tokens,
            prompt_tokens,
        })
    }
}

/// The files of the images of each sample, which take long to draw.
async fn drawn(samples: &[Sample]) -> Result<Vec<Vec<Vec<u8>>>, Error> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let of_sample = |sample: &Sample| {
        let images = sample.images.clone();
        async move {
            if images.is_empty() {
                return Ok(Vec::new());
            }
            let draw = move || images.iter().map(Picture::file).collect::<Result<Vec<_>, _>>();
            tokio::task::spawn_blocking(draw).await?.map_err(Error::Bench)
        }
    };
    let files = futures::stream::iter(samples.iter().map(of_sample)).buffered(threads);
    files.try_collect().await
}

/// A prompt that begins with the images of these files.
fn read_prompt(
    input: &ImageInput,
    files: &[Vec<u8>],
    text: &[TokenId],
) -> Result<(Vec<TokenId>, Vec<ImageSpan>), Error> {
    let pixels = files.iter().map(|file| decode(file, &DecodeLimits::default()));
    let prompt = pixels
        .collect::<Result<Vec<_>, _>>()
        .and_then(|pixels| input.prompt(&pixels, text));
    prompt.map_err(|error| Error::Bench(format!("an image of --random-mm-bucket-config: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_count_while_all_generate() {
        let at =
            |seconds: &[u64]| -> Vec<Duration> { seconds.iter().copied().map(Duration::from_secs).collect() };
        // The second prompt is computed for 10 s while the first request generates; from 12 s on the second is alone.
        let (first, second) = (at(&[1, 5, 10, 11, 12]), at(&[10, 11, 12, 13, 14]));
        let mut together = Together::of(&[&first, &second]);
        let expected = Together {
            seconds: 2.0,
            steps: 2.0,
        };
        assert_eq!(together, expected);
        together.add(expected);
        assert_eq!(together.seconds_per_step(), Some(1.0));
        // One is done before the other begins.
        let apart = Together::of(&[&at(&[1, 2]), &at(&[3, 4])]);
        assert_eq!(apart.seconds_per_step(), None);
    }
}
