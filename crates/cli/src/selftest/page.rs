//! A page of `/metrics`, read.

/// One page.
#[derive(Clone, Debug, Default)]
pub(super) struct Page(Vec<Sample>);

#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: String,
    value: f64,
}

impl Page {
    /// Reads the text format of Prometheus; lines that are no samples are left out.
    pub(super) fn parse(text: &str) -> Self {
        let sample = |line: &str| {
            let (head, value) = line.trim().rsplit_once(' ')?;
            let (name, labels) = head.split_once('{').unwrap_or((head, "}"));
            Some(Sample {
                name: name.to_owned(),
                labels: labels.strip_suffix('}')?.to_owned(),
                value: value.parse().ok()?,
            })
        };
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Self(lines.filter_map(sample).collect())
    }

    /// The sum over all labels; the error is for people.
    pub(super) fn get(&self, name: &str) -> Result<f64, String> {
        self.sum(name, |_| true)
    }

    /// The sum over samples with this label.
    pub(super) fn labelled(&self, name: &str, label: &str, value: &str) -> Result<f64, String> {
        let pair = format!("{label}={value:?}");
        self.sum(name, |labels| labels.split(',').any(|label| label == pair))
    }

    fn sum(&self, name: &str, wanted: impl Fn(&str) -> bool) -> Result<f64, String> {
        let samples = self
            .0
            .iter()
            .filter(|sample| sample.name == name && wanted(&sample.labels));
        let mut values = samples.map(|sample| sample.value).peekable();
        match values.peek() {
            Some(_) => Ok(values.sum()),
            None => Err(format!("/metrics has no {name}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_samples_with_and_without_labels() {
        let page = Page::parse(
            "# HELP a An a.\n# TYPE a gauge\na{model=\"x y\",state=\"used\"} 3\na{state=\"total\"} 4\n\nb 1.5e3\nc{} nan?\n",
        );
        assert_eq!(page.get("a"), Ok(7.0));
        assert_eq!(page.labelled("a", "state", "used"), Ok(3.0));
        assert_eq!(page.get("b"), Ok(1500.0));
        assert!(page.get("c").is_err() && page.get("ab").is_err());
        assert!(page.labelled("a", "state", "cached").is_err());
    }
}
