//! `plimsoll selftest`: drives a running server at the limits it proved, and says whether it held.
//!
//! It passes where every request was answered as it should be, the server's own meters say that no step allocated, failed or
//! went above what was there before, and everything was given back; and where the limits were really reached. A test that did
//! not get there is inconclusive, which is no pass.

mod answer;
mod job;
mod learn;
mod limits;
mod load;
mod page;
mod pictures;
mod plan;
mod server;
#[cfg(test)]
mod simulation;
mod stage;
mod tally;
mod verdict;
mod watch;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use parking_lot::Mutex;
use strum::IntoEnumIterator;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use self::job::Job;
use self::learn::learn;
use self::load::Load;
use self::plan::{Backlog, Permit, Plan, Turn, allowance};
use self::server::{Outcome, Server};
use self::stage::Stage;
use self::tally::Tally;
use self::verdict::{Goal, Measurements, Subject, Verdict};
use self::watch::{Reading, Watch};
use crate::args::{duration, whole};
use crate::client::ClientArgs;
use crate::error::Error;
use crate::progress::seconds_bar;
use crate::terminal;

/// `plimsoll selftest`.
#[derive(Clone, Debug, Args)]
pub struct SelftestArgs {
    /// URL of the server, or unix:PATH of its socket; it should have no other clients
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    url: String,
    /// How long to load the server, such as 60s or 8m; half of this must be enough to fill a fresh KV cache once
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    duration: Duration,
    /// How long to wait until the server is ready and idle
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    wait: Duration,
    /// Time after which a request without an answer counts as hanging
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = duration)]
    request_timeout: Duration,
    /// Seed of the requests
    #[arg(long, value_name = "SEED", default_value_t = 0, value_parser = whole::<u64>)]
    seed: u64,
    /// Kinds of load [default: all; `pictures` for models that take images]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST")]
    stages: Option<Vec<Stage>>,
    /// Credentials for the server.
    #[command(flatten)]
    client: ClientArgs,
}

/// Between two looks at whether a stage is over.
const TICK: Duration = Duration::from_millis(50);
/// How long new clients have before there may be more of them.
const GROW: Duration = Duration::from_millis(500);
/// Clients at once, well below the sockets that a process may have by default.
const MOST_CLIENTS: usize = 600;
/// What a request that failed waits before the next, lest a dead server be asked in a tight loop.
const AFTER_FAILURE: Duration = Duration::from_millis(200);
/// How long the server may take to give everything back: at least, for a step that is under way.
const SETTLE: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(60)];

/// Runs the test and prints the verdict: for people on stderr, as one line of JSON on stdout.
pub async fn run(args: SelftestArgs) -> Result<(), Error> {
    let (http, base) = args.client.server("--url", &args.url)?;
    let server = Server::new(http, base);
    let watch = Watch::default();
    let before = wait_until_idle(&server, &watch, args.wait).await?;
    let load = learn(&server, args.seed).await.map_err(Error::NothingToTest)?;
    let stages = stages(args.stages.as_deref(), &load).map_err(Error::NothingToTest)?;
    let test = Arc::new(Test {
        server,
        load,
        stages,
        watch,
        tally: Mutex::default(),
        request_timeout: args.request_timeout,
    });
    let verdict = test.drive(&args, before).await;
    #[allow(clippy::print_stderr, reason = "for people; stdout is for machines")]
    {
        eprintln!("{}", verdict.table(terminal::stderr_columns()));
    }
    // The verdict is the exit code, whether or not anybody reads the line.
    let _ = writeln!(std::io::stdout(), "{}", verdict.json());
    verdict.into_result()
}

async fn wait_until_idle(server: &Server, watch: &Watch, patience: Duration) -> Result<Reading, Error> {
    let end = Instant::now() + patience;
    loop {
        let state = match server.ready().await {
            Ok(()) => watch.look(server).await,
            Err(problem) => Err(problem),
        };
        let problem = match state {
            Ok(reading) if reading.is_idle() => return Ok(reading),
            Ok(reading) => format!(
                "it has {} requests of other clients, and a selftest needs an idle server",
                reading.in_flight
            ),
            Err(problem) => problem,
        };
        if Instant::now() >= end {
            let message = format!(
                "no idle server within {} s: {problem}; see --url and --wait",
                patience.as_secs_f64()
            );
            return Err(Error::NothingToTest(message));
        }
        sleep(TICK).await;
    }
}

/// The kinds of load to run, in their order.
fn stages(wanted: Option<&[Stage]>, load: &Load) -> Result<Vec<Stage>, String> {
    let takes = |stage: &Stage| *stage != Stage::Pictures || load.pictures.is_some();
    match wanted {
        None => Ok(Stage::iter().filter(takes).collect()),
        Some(wanted) if wanted.iter().all(takes) => {
            Ok(Stage::iter().filter(|stage| wanted.contains(stage)).collect())
        }
        Some(_) => Err(format!(
            "--stages has `pictures`, but {} takes no images, or none that fit its context",
            load.model
        )),
    }
}

/// One run.
struct Test {
    server: Server,
    load: Load,
    stages: Vec<Stage>,
    watch: Watch,
    tally: Mutex<Tally>,
    request_timeout: Duration,
}

/// Where the workers of a turn get their requests.
#[derive(Debug)]
struct Feed {
    stage: Stage,
    /// When the time of the turn is over.
    end: Instant,
    next: AtomicU64,
    over: AtomicBool,
    backlog: Mutex<Backlog>,
    /// Held by the one worker at a time that goes on looking for a request for which there is time.
    gate: tokio::sync::Mutex<()>,
}

impl Test {
    async fn drive(self: &Arc<Self>, args: &SelftestArgs, before: Reading) -> Verdict {
        let begin = Instant::now();
        let deadline = begin + args.duration;
        let watcher = tokio::spawn({
            let test = Arc::clone(self);
            async move { test.watch.run(&test.server).await }
        });
        let bar = seconds_bar("selftest", args.duration.as_secs().max(1));
        let mut workers = JoinSet::new();
        let all = async {
            self.repeat().await;
            let mut plan = Plan::new(&self.stages);
            while let Some(turn) = plan.next(|stage| self.is_reached(stage)) {
                self.turn(&turn, deadline, &mut workers, &bar).await;
            }
        };
        // What is not done by then is cut off.
        let _ = timeout_at(deadline, all).await;
        workers.shutdown().await;
        bar.finish_and_clear();
        let seconds = begin.elapsed();
        let stage_seconds = self.tally(|tally| tally.stage_seconds(Instant::now()));
        watcher.abort();

        let settle = args.duration.clamp(SETTLE[0], SETTLE[1]);
        let after = match self.watch.until_idle(&self.server, settle).await {
            Ok(after) => {
                let found = after.complaints(&before).into_iter().chain(after.leak());
                found.for_each(|what| self.watch.found(what));
                after
            }
            Err(problem) => {
                self.watch.found(format!("at the end: {problem}"));
                self.watch.last()
            }
        };
        if let Err(problem) = self.server.ready().await {
            self.watch.found(format!("at the end: {problem}"));
        }
        let measured = Measurements {
            seconds,
            stage_seconds,
            before,
            after,
            peaks: self.watch.peaks(),
            pace: self.watch.pace(),
        };
        let subject = Subject {
            url: args.url.clone(),
            model: self.load.model.clone(),
            seed: args.seed,
            limits: self.load.limits.clone(),
            pictures: self.load.pictures,
        };
        let (requests, goals) = (self.tally(|tally| tally.ended()), self.goals());
        Verdict::new(subject, &measured, requests, goals, self.watch.findings())
    }

    /// The same request twice, alone both times: the same text.
    async fn repeat(&self) {
        for job in self.load.repeatable() {
            let texts = [
                self.complete(&job, || false).await,
                self.complete(&job, || false).await,
            ];
            if let [Some(first), Some(second)] = &texts
                && first != second
            {
                self.watch.found(format!(
                    "the same request with the same seed gave two texts: {first:?} and {second:?}"
                ));
            }
        }
    }

    /// Loads the server with one stage until its turn is over and its requests are answered.
    async fn turn(
        self: &Arc<Self>,
        turn: &Turn,
        deadline: Instant,
        workers: &mut JoinSet<()>,
        bar: &ProgressBar,
    ) {
        let (stage, begin) = (turn.stage, Instant::now());
        let end = begin + turn.time(deadline.saturating_duration_since(begin));
        let mut clients = stage.concurrency(&self.load.limits);
        let first = self.tally(|tally| tally.begin(stage, begin));
        let feed = Arc::new(Feed {
            stage,
            end,
            next: AtomicU64::new(first),
            over: AtomicBool::new(false),
            backlog: Mutex::default(),
            gate: tokio::sync::Mutex::default(),
        });
        self.employ(clients, &feed, workers);
        let mut grown = begin;
        while !workers.is_empty() {
            sleep(TICK).await;
            while workers.try_join_next().is_some() {}
            self.show(stage, deadline, bar);
            if stage == Stage::Rows && grown.elapsed() > GROW && self.has_room() && clients < MOST_CLIENTS {
                let more = self.load.limits.max_num_seqs.div_ceil(4);
                self.employ(more, &feed, workers);
                clients += more;
                grown = Instant::now();
            }
            let over = turn.is_over(Instant::now() >= end, self.is_reached(stage));
            feed.over.store(over, Ordering::Relaxed);
        }
    }

    /// Clients that send the requests of `feed` one after the other until it has no more.
    fn employ(self: &Arc<Self>, clients: usize, feed: &Arc<Feed>, workers: &mut JoinSet<()>) {
        for _ in 0..clients {
            let (test, feed) = (Arc::clone(self), Arc::clone(feed));
            workers.spawn(async move {
                while let Some((job, permit)) = test.next(&feed).await {
                    test.complete(&job, || feed.over.load(Ordering::Relaxed)).await;
                    if let Some(permit) = permit {
                        feed.backlog.lock().remove(&permit);
                    }
                }
            });
        }
    }

    /// Whether rows are free and nobody waits for them: a server this fast needs more clients.
    fn has_room(&self) -> bool {
        let last = self.watch.last();
        last.waiting == 0 && !self.rows_are_full()
    }

    fn rows_are_full(&self) -> bool {
        self.watch.peaks().running >= self.load.limits.rows() as u64
    }

    /// The next request of `feed`. Those whose prompts the server has no time for are skipped: others may be shorter.
    async fn next(&self, feed: &Feed) -> Option<(Job, Option<Permit>)> {
        let mut gate = None;
        while !feed.over.load(Ordering::Relaxed) {
            let index = feed.next.fetch_add(1, Ordering::Relaxed);
            let job = self.load.job(feed.stage, index)?;
            if !job.is_measured() {
                return Some((job, None));
            }
            let left = feed.end.saturating_duration_since(Instant::now());
            let allowance = allowance(self.watch.pace(), left, self.load.limits.max_num_batched_tokens);
            let tokens = job.computed(self.watch.last().prefix_hits > 0);
            let permit = feed.backlog.lock().add(tokens, allowance);
            if permit.is_some() {
                return Some((job, permit));
            }
            match gate {
                None => gate = Some(feed.gate.lock().await),
                Some(_) => sleep(TICK).await,
            }
        }
        None
    }

    /// Sends a request until it is not refused for want of room, or is not wanted any more; the text of its choices.
    async fn complete(&self, job: &Job, give_up: impl Fn() -> bool) -> Option<Vec<String>> {
        self.tally(|tally| tally.started += 1);
        let end = Instant::now() + self.request_timeout;
        loop {
            let outcome = timeout_at(end, self.server.send(job)).await;
            let outcome = outcome.unwrap_or_else(|_| {
                let seconds = self.request_timeout.as_secs_f64();
                Outcome::Wrong(format!("no answer within {seconds} s"))
            });
            match outcome {
                Outcome::Busy(wait) => {
                    self.tally(|tally| tally.requests.busy += 1);
                    let again = Instant::now() + wait;
                    while Instant::now() < again {
                        if give_up() {
                            return None;
                        }
                        sleep(TICK).await;
                    }
                }
                Outcome::Done(answer) => {
                    self.tally(|tally| tally.answered(job, self.load.limits.longest()));
                    return Some(answer.choices.into_iter().map(|choice| choice.text).collect());
                }
                Outcome::Left => {
                    self.tally(|tally| tally.left(job));
                    return None;
                }
                Outcome::Wrong(what) => {
                    self.tally(|tally| tally.requests.wrong += 1);
                    self.watch.found(format!("{}: {what}", job.describe()));
                    sleep(AFTER_FAILURE).await;
                    return None;
                }
            }
        }
    }

    /// The limits of the server, and whether the load really went there.
    fn goals(&self) -> Vec<Goal> {
        self.stages.iter().filter_map(|&stage| self.goal(stage)).collect()
    }

    fn is_reached(&self, stage: Stage) -> bool {
        self.goal(stage).is_none_or(|goal| goal.is_reached())
    }

    fn goal(&self, stage: Stage) -> Option<Goal> {
        let peaks = self.watch.peaks();
        self.tally(|tally| tally.goal(stage, &self.load, &peaks))
    }

    fn show(&self, stage: Stage, deadline: Instant, bar: &ProgressBar) {
        let left = deadline.saturating_duration_since(Instant::now()).as_secs();
        bar.set_position(bar.length().unwrap_or(0).saturating_sub(left));
        let last = self.watch.last();
        let (done, wrong) = self.tally(|tally| (tally.requests.done, tally.requests.wrong));
        let kv = 100.0 * last.kv_used as f64 / last.kv_total.max(1) as f64;
        let running = last.running;
        bar.set_message(format!(
            "{}: {done} answered, {wrong} wrong, {running} running, KV {kv:.0} %",
            stage.name()
        ));
    }

    fn tally<T>(&self, act: impl FnOnce(&mut Tally) -> T) -> T {
        act(&mut self.tally.lock())
    }
}
