//! Requests as they come: random, of every kind of load that a server meets.

use std::fmt;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// One request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visit {
    /// When it comes, in seconds; with [`Kind::Closed`], when another has ended.
    pub(crate) at: f64,
    /// Its tokens.
    pub(crate) prompt: usize,
    /// Tokens it generates.
    pub(crate) output: usize,
}

/// How requests come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// So many clients, each of which sends a request when it has the answer to the one before.
    Closed(usize),
    /// Independent of each other.
    Poisson,
    /// All at once.
    Flood,
    /// Several at once, again and again.
    Bursts,
}

#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    pub(crate) kind: Kind,
    pub(crate) visits: Vec<Visit>,
    pub(crate) max_num_seqs: usize,
    description: String,
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.description)
    }
}

impl Traffic {
    /// `count` equal requests.
    pub(crate) fn equal(kind: Kind, count: usize, prompt: usize, output: usize) -> Self {
        let visit = Visit {
            at: 0.0,
            prompt,
            output,
        };
        Self {
            kind,
            visits: vec![visit; count],
            max_num_seqs: 512,
            description: format!("{kind:?}: {count} x {prompt}/{output}"),
        }
    }

    /// Chats of `chats` readers, and a prompt of `prompt` tokens each second beside them.
    pub(crate) fn beside_long_prompts(chats: usize, prompt: usize, seconds: usize) -> Self {
        let chats = Self::equal(Kind::Poisson, chats, 512, 1500);
        let long = (0..seconds).map(|second| Visit {
            at: 0.5 + second as f64,
            prompt,
            output: 8,
        });
        Self {
            visits: chats.visits.iter().copied().chain(long).collect(),
            description: format!("{} readers, {prompt} tokens a second", chats.visits.len()),
            ..chats
        }
    }

    /// From a seed.
    pub(crate) fn random(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let rng = &mut rng;
        let (prompt, output) = (spread(rng, 32.0, 16_384.0), spread(rng, 16.0, 1024.0));
        let variation = rng.random_range(0.0..1.5);
        // No more than a device computes in a few minutes.
        let most = 4e6 / (prompt + 8.0 * output);
        let count = spread(rng, 64.0, 800.0).min(most).max(64.0) as usize;
        // Seconds of a device per request, roughly; the load is that over the time between two.
        let work = prompt * 21.5e-6 + output * 50e-6;
        let load = spread(rng, 0.3, 3.0);
        let between = work / load;
        let kind = match rng.random_range(0..4) {
            0 => Kind::Closed((spread(rng, 2.0, 256.0) as usize).min(count / 4)),
            1 => Kind::Poisson,
            2 => Kind::Flood,
            _ => Kind::Bursts,
        };
        let has_long = rng.random_bool(0.3);
        let mut now = 0.0;
        let visits = (0..count).map(|_| {
            let mut vary = |mean: f64| mean * f64::exp(rng.random_range(-variation..=variation));
            let (mut prompt, output) = (vary(prompt), vary(output));
            if has_long && rng.random_bool(0.1) {
                prompt = spread(rng, 4000.0, 40_000.0);
            }
            now -= (1.0 - rng.random::<f64>()).ln() * between;
            Visit {
                at: match kind {
                    Kind::Closed(_) | Kind::Flood => 0.0,
                    Kind::Poisson => now,
                    Kind::Bursts => now - now % (50.0 * between),
                },
                prompt: (prompt as usize).clamp(1, 60_000),
                output: (output as usize).max(2),
            }
        });
        let visits = visits.collect();
        let max_num_seqs = [64, 256, 512, 1024][rng.random_range(0..4)];
        let long = if has_long { ", some long ones" } else { "" };
        Self {
            kind,
            visits,
            max_num_seqs,
            description: format!(
                "{kind:?} seed {seed}: {count} of about {prompt:.0}/{output:.0} (e^{variation:.1}){long}, load {load:.1}, \
                 at most {max_num_seqs} at once"
            ),
        }
    }
}

/// Every order of magnitude is as likely.
pub(crate) fn spread(rng: &mut StdRng, least: f64, most: f64) -> f64 {
    least * (rng.random::<f64>() * (most / least).ln()).exp()
}
