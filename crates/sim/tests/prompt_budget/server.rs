//! A server reduced to what decides its times: who is in which step, in the order in which the scheduler serves.

use std::collections::VecDeque;

use plimsoll_scheduler::{Load, Population, PromptBudget};
use plimsoll_sim::{StepModel, StepSize};

use crate::chunk;
use crate::traffic::{Kind, Traffic};

/// How many tokens of prompts go into a step.
pub(crate) enum Policy<'a> {
    /// All steps have at most so many rows.
    Fixed(usize),
    Adaptive(&'a PromptBudget),
}

/// What clients saw.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    /// Until all had their answers, or 19 of 20, where others would have followed the last ones: these run in an emptier server.
    pub(crate) seconds: f64,
    /// Of one request, and of one second.
    pub(crate) requests: usize,
    /// Mean time to the first token, in ms.
    pub(crate) ttft: f64,
    /// 99th percentile.
    pub(crate) ttft_p99: f64,
    /// Median time between tokens, in ms.
    pub(crate) itl: f64,
    /// 99th percentile.
    pub(crate) itl_p99: f64,
}

impl Outcome {
    pub(crate) fn rate(&self) -> f64 {
        self.requests as f64 / self.seconds
    }
}

/// Of a request that generates.
struct Reader {
    visit: usize,
    generated: usize,
}

/// Serves `traffic` with steps of at most `most` rows.
pub(crate) fn serve(traffic: &Traffic, device: &StepModel, policy: &Policy<'_>, most: usize) -> Outcome {
    let (visits, chunk) = (&traffic.visits, chunk(device));
    let mut order: Vec<usize> = (0..visits.len()).collect();
    order.sort_by(|&a, &b| visits[a].at.total_cmp(&visits[b].at));
    let (mut now, mut ended, mut enough) = (0.0, 0, None);
    let mut arrivals = order.into_iter().peekable();
    let mut arrived = vec![0.0; visits.len()];
    // Prompts, with how much of each is computed.
    let mut waiting: VecDeque<(usize, usize)> = VecDeque::new();
    let mut readers: Vec<Reader> = Vec::new();
    let mut population = Population::default();
    let (mut first, mut between) = (Vec::new(), Vec::new());
    while ended < visits.len() {
        let present = waiting.len() + readers.len();
        let comes = |present: usize, at: f64, now: f64| match traffic.kind {
            Kind::Closed(clients) => present < clients,
            _ => at <= now,
        };
        let mut came = 0;
        while let Some(visit) = arrivals.next_if(|&visit| comes(present + came, visits[visit].at, now)) {
            arrived[visit] = if matches!(traffic.kind, Kind::Closed(_)) {
                now
            } else {
                visits[visit].at
            };
            waiting.push_back((visit, 0));
            came += 1;
            population.came(present + came);
        }
        if present + came == 0 {
            now = arrivals.peek().map_or(now, |&visit| visits[visit].at);
            continue;
        }
        let mut step = StepSize {
            decoding: readers.len(),
            context: readers
                .iter()
                .map(|reader| visits[reader.visit].prompt + reader.generated)
                .sum(),
            ..StepSize::default()
        };
        let mut places = traffic.max_num_seqs - readers.len();
        let load = Load {
            decoding: step.decoding,
            context: step.context,
            prompts: waiting.len().min(places),
            next_prompt: waiting.front().map_or(0, |&(visit, _)| visits[visit].prompt),
            encoding: false,
            steady: population.steady(waiting.len()),
        };
        let mut room = match policy {
            Policy::Fixed(rows) => rows.saturating_sub(step.decoding),
            Policy::Adaptive(budget) => budget.prompt_tokens(&load),
        };
        assert!(
            step.decoding + room <= most,
            "{load:?}: {room} tokens are too many"
        );
        let mut whole = Vec::new();
        while room > 0 && places > 0 {
            let Some((visit, computed)) = waiting.front_mut() else {
                break;
            };
            let left = visits[*visit].prompt - *computed;
            let tokens = match left > room {
                true => room / chunk * chunk,
                false => left,
            };
            if tokens == 0 {
                break;
            }
            step.add_prompt(*computed, tokens);
            *computed += tokens;
            room -= tokens;
            places -= 1;
            if *computed == visits[*visit].prompt {
                whole.push(*visit);
                waiting.pop_front();
            }
        }
        let seconds = device.seconds(&step);
        now += seconds;
        between.extend((step.decoding > 0).then_some((seconds, step.decoding)));
        readers.iter_mut().for_each(|reader| reader.generated += 1);
        let mut present = readers.len() + waiting.len() + whole.len();
        readers.retain(|reader| {
            let visit = &visits[reader.visit];
            let stays = reader.generated < visit.output;
            if !stays {
                (ended, present) = (ended + 1, present - 1);
                population.ended(visit.prompt, visit.output);
                population.left(present);
            }
            stays
        });
        first.extend(whole.iter().map(|&visit| now - arrived[visit]));
        readers.extend(whole.into_iter().map(|visit| Reader { visit, generated: 1 }));
        if enough.is_none() && ended * 20 >= visits.len() * 19 {
            enough = Some((now, ended));
        }
    }
    let (seconds, requests) = match traffic.kind {
        Kind::Flood => (now, ended),
        _ => enough.unwrap_or((now, ended)),
    };
    first.sort_by(f64::total_cmp);
    between.sort_by(|a, b| a.0.total_cmp(&b.0));
    Outcome {
        seconds,
        requests,
        ttft: 1e3 * first.iter().sum::<f64>() / first.len() as f64,
        ttft_p99: 1e3 * first[(first.len() - 1) * 99 / 100],
        itl: 1e3 * quantile(&between, 0.5),
        itl_p99: 1e3 * quantile(&between, 0.99),
    }
}

/// Of values with their counts, in ascending order.
pub(crate) fn quantile(values: &[(f64, usize)], part: f64) -> f64 {
    let total: usize = values.iter().map(|(_, count)| count).sum();
    let mut seen = 0;
    let reached = values.iter().find(|(_, count)| {
        seen += count;
        seen as f64 >= part * total as f64
    });
    reached.map_or(0.0, |(value, _)| *value)
}
