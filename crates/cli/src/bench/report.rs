//! What every benchmark prints: a table for people on stdout, JSON with commit, hardware and flags in a file.

use serde_json::{Map, Value, json};

use crate::error::Error;
use crate::hardware;
use crate::report_file::ReportFile;
use crate::secrets;
use crate::terminal;
use crate::version;

/// The flag that names the file of a report.
pub(super) const OUTPUT_JSON: &str = "--output-json";

/// Rows of a table, in order, and the JSON object beside it.
#[derive(Debug, Default)]
pub(super) struct Report {
    rows: Vec<(String, String)>,
    json: Map<String, Value>,
    /// What rates are over.
    seconds: f64,
}

impl Report {
    /// A report that knows the machine, the build and the command line.
    pub(super) fn new(benchmark: &str) -> Self {
        let mut json = Map::new();
        json.insert("benchmark".into(), benchmark.into());
        json.insert("version".into(), env!("CARGO_PKG_VERSION").into());
        json.insert("commit".into(), version::COMMIT.into());
        json.insert("hardware".into(), hardware());
        json.insert("command".into(), secrets::hidden(std::env::args()).into());
        Self {
            json,
            ..Self::default()
        }
    }

    /// A heading in the table.
    pub(super) fn section(&mut self, title: &str) {
        self.rows.push((title.to_owned(), String::new()));
    }

    /// A number in the table and in the JSON.
    pub(super) fn number(&mut self, label: &str, key: &str, value: f64) {
        self.rows.push((label.to_owned(), format!("{value:.2}")));
        self.json.insert(key.to_owned(), json!(value));
    }

    /// How long everything took, which the rates that follow refer to.
    pub(super) fn duration(&mut self, label: &str, key: &str, seconds: f64) {
        self.seconds = seconds;
        self.number(label, key, seconds);
    }

    /// A count in each second of [`Self::duration`].
    pub(super) fn rate(&mut self, label: &str, key: &str, count: usize) {
        self.number(label, key, count as f64 / self.seconds);
    }

    /// A count in the table and in the JSON.
    pub(super) fn count(&mut self, label: &str, key: &str, value: usize) {
        self.rows.push((label.to_owned(), value.to_string()));
        self.json.insert(key.to_owned(), json!(value));
    }

    /// Something that only the JSON holds.
    pub(super) fn detail(&mut self, key: &str, value: impl Into<Value>) {
        self.json.insert(key.to_owned(), value.into());
    }

    /// The table, in as many columns as there are; labels are broken where they are longer than that leaves room for.
    pub(super) fn table(&self, title: &str, columns: Option<usize>) -> String {
        const WIDTH: usize = 58;
        const VALUES: usize = 15;
        let width = columns.map_or(WIDTH, |columns| columns.min(WIDTH));
        let longest = self.rows.iter().map(|(_, value)| value.len()).max();
        let values = if width < WIDTH {
            longest.unwrap_or(0)
        } else {
            VALUES
        };
        let labels = width.saturating_sub(values + 1);
        let mut text = format!("{title:=^width$}\n");
        for (label, value) in &self.rows {
            if value.is_empty() {
                text += &format!("{label:-^width$}\n");
                continue;
            }
            let lines = terminal::wrapped(&format!("{label}:"), labels);
            let (last, others) = lines.split_last().expect("a label has words");
            others.iter().for_each(|line| text += &format!("{line}\n"));
            text += &format!("{last:<labels$} {value:>values$}\n");
        }
        text + &"=".repeat(width)
    }

    /// Prints the table, and writes the JSON to the file of [`OUTPUT_JSON`], if there is one.
    #[allow(clippy::print_stdout, reason = "the table is what the command is for")]
    pub(super) fn publish(self, title: &str, file: &ReportFile) -> Result<(), Error> {
        println!("{}", self.table(title, terminal::stdout_columns()));
        file.write(&Value::Object(self.json))
    }
}

fn hardware() -> Value {
    json!({
        "cpu": hardware::cpu(),
        "threads": std::thread::available_parallelism().map(usize::from).ok(),
        "memory": hardware::field("/proc/meminfo", "MemTotal"),
        "os": std::env::consts::OS,
        "arch": std::env::consts::ARCH,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_holds_what_the_table_shows() {
        let mut report = Report::new("test");
        report.section("Section");
        report.number("Throughput (tok/s)", "throughput", 12.345);
        report.count("Requests", "requests", 7);
        let table = report.table(" Title ", None);
        assert!(table.contains("Throughput (tok/s):                                  12.35"));
        let narrow = report.table(" Title ", Some(25));
        let lines: Vec<_> = narrow.lines().collect();
        assert_eq!(
            lines[2..4],
            ["Throughput (tok/s): 12.35", "Requests:               7"]
        );
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("out.json");
        let json = ReportFile::new(OUTPUT_JSON, Some(file.clone())).unwrap();
        report.publish(" Title ", &json).unwrap();
        let json: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        assert_eq!(
            (&json["throughput"], &json["requests"]),
            (&json!(12.345), &json!(7))
        );
        assert!(json["commit"].is_string() && json["hardware"]["threads"].is_u64());
    }
}
