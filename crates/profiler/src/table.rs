//! A report for people: the device's memory as one bar, and where every byte of it went.

use std::fmt::{self, Write};

use plimsoll_core::human_bytes;

use crate::report::{Memory, Sizing};
use crate::{Bound, Compared, Prediction, Report};

/// Cells of the bar, where the terminal is no narrower.
const CELLS: usize = 80;

/// Names of parts, in the order of the bar, each with the letter that fills its cells. No letter stands for two.
const LETTERS: [(&str, char); 13] = [
    ("weights", 'w'),
    ("kv", 'K'),
    ("states", 'S'),
    ("arena", 'a'),
    ("staging", 's'),
    ("encoder", 'e'),
    ("communication", 'm'),
    ("graphs", 'g'),
    ("canary", 'c'),
    ("runtime", 'r'),
    (SLACK, '-'),
    (PEERS, 'x'),
    (FREE, '.'),
];

const SLACK: &str = "allocator slack";
const PEERS: &str = "other processes";
const FREE: &str = "free";

/// A part of the device's memory.
struct Part {
    name: &'static str,
    letter: char,
    bytes: u64,
}

impl Report {
    /// Where every byte went, for people: a bar of the device's memory, one line a component, the sum of the parts, and what
    /// that is in requests. On a terminal of so many `columns` the bar fits.
    pub fn table(&self, columns: Option<usize>) -> String {
        let loading = self.loading.map(|loading| format!("\n  {loading}"));
        let ranks = (self.ranks > 1).then(|| {
            let Self { rank, ranks, .. } = self;
            format!(
                "\n  rank {rank} of {ranks}, all of which serve so many tokens, each with a part of the model"
            )
        });
        format!(
            "{}\n{}{}{}",
            self.ready.table(columns),
            self.sizing,
            ranks.unwrap_or_default(),
            loading.unwrap_or_default()
        )
    }
}

impl Prediction {
    /// As [`Report::table`].
    pub fn table(&self, columns: Option<usize>) -> String {
        format!("{}\n{}", self.ready.table(columns), self.sizing)
    }
}

/// In requests.
impl fmt::Display for Sizing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kv_tokens,
            kv_pages,
            block_size,
            groups,
            states,
            full_length_requests,
            max_model_len,
            bound,
            ..
        } = self;
        let unit = if groups.len() > 1 { "pages" } else { "blocks" };
        write!(
            f,
            "  {kv_tokens} tokens of KV ({kv_pages} {unit} of {block_size}): {full_length_requests:.1} requests of {max_model_len} \
             tokens; {}",
            reason(*bound)
        )?;
        for group in groups.iter().filter(|_| groups.len() > 1) {
            let kind = group
                .window
                .map_or("full".to_owned(), |window| format!("window of {window}"));
            let shared = match group.sharing_layers {
                0 => String::new(),
                layers => format!(", read by {layers} more"),
            };
            write!(
                f,
                "\n  {:>3} layers, {kind}{shared}: {} bytes a token ({} lost to rounding), {} pages a block, {} tokens of a request \
                 of {max_model_len}",
                group.layers,
                group.bytes_per_token,
                group.rounding_bytes,
                group.pages_per_block,
                group.request_tokens
            )?;
        }
        if let Some(states) = states {
            write!(
                f,
                "\n  {:>3} layers, states: {} in each of {} slots, as much as {} tokens of KV; at most {} requests at once",
                states.layers,
                human_bytes(states.bytes_per_request),
                states.slots,
                states.tokens_per_request,
                states.slots - states.snapshots
            )?;
        }
        Ok(())
    }
}

/// Why a KV cache is as large as it is.
fn reason(bound: Bound) -> String {
    match bound {
        Bound::Memory => "limited by memory".to_owned(),
        Bound::Useful => "limited by default (--max-total-token-num sets it)".to_owned(),
        Bound::PinnedTokens | Bound::PinnedBytes => format!("set by --{}", bound.name()),
        Bound::OtherRank => "limited by the memory of another rank".to_owned(),
    }
}

/// For people: a line for each number, with the error in percent; two where a terminal of so many `columns` is too narrow.
pub fn comparison_table(compared: &[Compared], columns: Option<usize>) -> String {
    let narrow = columns.is_some_and(|columns| columns < 65);
    let row = |name: &str, numbers: [&str; 3]| {
        let [predicted, measured, error] = numbers;
        match narrow {
            true => format!("  {name}\n  {predicted:>14}{measured:>14}{error:>9}"),
            false => format!("  {name:<26}{predicted:>14}{measured:>14}{error:>9}"),
        }
    };
    let rows = compared.iter().map(|compared| {
        let number = |value: u64| match compared.name.ends_with("tokens") {
            true => value.to_string(),
            false => human_bytes(value),
        };
        let error = compared
            .error
            .map_or("-".to_owned(), |error| format!("{:+.2} %", error * 100.0));
        let numbers = [&number(compared.predicted), &number(compared.measured), &error];
        row(compared.name, numbers.map(String::as_str))
    });
    let head = row("", ["predicted", "measured", "error"]);
    let lines: Vec<_> = std::iter::once(head).chain(rows).collect();
    lines.join("\n")
}

impl Memory {
    /// A bar of the device's memory, at most `columns` wide, then one line a component, the sum of the parts last. ASCII,
    /// without a newline at the end.
    pub fn table(&self, columns: Option<usize>) -> String {
        let parts = self.parts();
        let total: u64 = parts.iter().map(|part| part.bytes).sum();
        let cells = columns.map_or(CELLS, |columns| columns.saturating_sub("  []".len()).min(CELLS));
        let mut text = format!("  [{}]", bar(&parts, total, cells));
        for part in &parts {
            let share = 100.0 * part.bytes as f64 / total.max(1) as f64;
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                "\n  {} {:<16}{:>11} {share:>6.1} %",
                part.letter,
                part.name,
                human_bytes(part.bytes)
            );
        }
        let _ = write!(text, "\n    {:<16}{:>11}", "total", human_bytes(total));
        text
    }

    /// The bar of at most `columns`, and a line that says what its letters are, without parts below a thousandth.
    pub fn short(&self, columns: usize) -> [String; 2] {
        let mut parts = self.parts();
        let total: u64 = parts.iter().map(|part| part.bytes).sum();
        parts.retain(|part| part.bytes >= total / 1000);
        let cells = columns.saturating_sub("[]".len()).min(CELLS);
        let legend = parts
            .iter()
            .map(|part| format!("{} {} {}", part.letter, part.name, human_bytes(part.bytes)));
        let legend: Vec<_> = legend.collect();
        [
            format!("[{}]", bar(&parts, total, cells)),
            format!("{}; {} in all", legend.join(", "), human_bytes(total)),
        ]
    }

    /// What takes bytes, and what is free even if that is none.
    fn parts(&self) -> Vec<Part> {
        let bytes = |name: &str| match name {
            SLACK => self.unattributed,
            PEERS => self.peers,
            FREE => self.free,
            _ => {
                let line = self.components.iter().find(|line| line.name == name);
                line.map_or(0, |line| line.bytes)
            }
        };
        let parts = LETTERS.map(|(name, letter)| Part {
            name,
            letter,
            bytes: bytes(name),
        });
        parts
            .into_iter()
            .filter(|part| part.bytes > 0 || part.name == FREE)
            .collect()
    }
}

/// `width` cells in proportion, at least one for a part that is there, as far as there are cells; the largest part makes up for
/// that.
fn bar(parts: &[Part], total: u64, width: usize) -> String {
    let share = |bytes: u64| (u128::from(bytes) * width as u128 / u128::from(total.max(1))) as usize;
    let mut cells: Vec<usize> = parts
        .iter()
        .map(|part| share(part.bytes).max(usize::from(part.bytes > 0)))
        .collect();
    if let Some(largest) = (0..parts.len()).max_by_key(|&at| parts[at].bytes) {
        let others = cells.iter().sum::<usize>() - cells[largest];
        cells[largest] = width.saturating_sub(others);
    }
    parts
        .iter()
        .zip(cells)
        .flat_map(|(part, cells)| (0..cells).map(|_| part.letter))
        .take(width)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use plimsoll_core::{Component, Meters};
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    fn memory(parts: &[(Component, u64)], peers: u64, free: u64) -> Memory {
        let mut meters = Meters::default();
        for &(component, bytes) in parts {
            *meters.by_component.get_mut(component) = bytes;
        }
        meters.reserved = meters.by_component.total();
        (meters.total, meters.free) = (meters.reserved + peers + free, free);
        Memory::from(&meters)
    }

    #[test]
    fn every_component_has_a_letter_of_its_own() {
        let letters: HashSet<char> = LETTERS.iter().map(|&(_, letter)| letter).collect();
        assert_eq!(letters.len(), LETTERS.len());
        for component in Component::ALL {
            assert!(
                LETTERS.iter().any(|&(name, _)| name == component.name()),
                "{component}"
            );
        }
    }

    #[test]
    fn a_bar_and_a_line_for_each_part() {
        let parts = [
            (Component::Weights, 30 << 20),
            (Component::Kv, 50 << 20),
            (Component::Arena, 1),
        ];
        let table = memory(&parts, 10 << 20, (10 << 20) - 1).table(None);
        let lines: Vec<&str> = table.lines().collect();
        let expected = format!(
            "  [{}{}a{}{}]",
            "w".repeat(24),
            "K".repeat(40),
            "x".repeat(8),
            ".".repeat(7)
        );
        assert_eq!(lines[0], expected);
        assert_eq!(lines[2], "  K kv                 50.0 MiB   50.0 %");
        assert_eq!(lines[6], "    total             100.0 MiB");
        assert!(table.is_ascii());
    }

    #[test]
    fn a_table_fits_a_narrow_terminal() {
        let parts = [
            (Component::Weights, 92 << 20),
            (Component::Kv, 720 << 20),
            (Component::Staging, 1 << 20),
        ];
        let memory = memory(&parts, 1023 << 20, 8 << 30);
        for line in memory.table(Some(40)).lines() {
            assert!(line.len() <= 40, "{line}");
        }
        let [bar, legend] = memory.short(29);
        assert_eq!(bar, "[wKxx.......................]");
        assert_eq!(
            legend,
            "w weights 92.0 MiB, K kv 720.0 MiB, x other processes 1023.0 MiB, . free 8.00 GiB; 9.79 GiB in all"
        );
        let compared = Compared {
            name: "peak of all that is not KV",
            predicted: 1 << 20,
            measured: 1 << 30,
            error: Some(-0.999),
        };
        for (columns, lines) in [(None, 2), (Some(80), 2), (Some(40), 4)] {
            let table = comparison_table(&[compared], columns);
            assert_eq!(table.lines().count(), lines, "{table}");
            assert!(
                table
                    .lines()
                    .all(|line| columns.is_none_or(|columns| line.len() <= columns)),
                "{table}"
            );
        }
    }

    /// Whatever the sizes, the bar is as wide, and nothing that takes memory is missing from it.
    #[test]
    fn the_bar_shows_every_part() {
        for seed in (0..300).chain([rand::random()]) {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut bytes = || rng.random::<u64>() >> rng.random_range(8..64);
            let parts = Component::ALL.map(|component| (component, bytes()));
            let memory = memory(&parts, bytes(), bytes());
            let parts = memory.parts();
            let bar = bar(&parts, memory.total, CELLS);
            assert_eq!(bar.len(), CELLS, "seed {seed}");
            for part in parts.iter().filter(|part| part.bytes > 0) {
                assert!(bar.contains(part.letter), "seed {seed}: {}", part.name);
            }
        }
    }
}
