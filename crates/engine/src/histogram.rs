/// Counts of observations by fixed upper bounds: a Prometheus histogram.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    /// An empty histogram; `bounds` ascend, and a last bucket without bound is implied.
    pub fn new(bounds: &'static [f64]) -> Self {
        debug_assert!(bounds.is_sorted());
        Self {
            bounds,
            counts: vec![0; bounds.len() + 1],
            sum: 0.0,
        }
    }

    /// Counts `value` in the first bucket whose bound is not below it.
    pub fn observe(&mut self, value: f64) {
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        self.counts[bucket] += 1;
        self.sum += value;
    }

    /// Upper bounds with the number of observations at or below each, infinity last.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        bounds.zip(self.counts.iter().scan(0, |total, &count| {
            *total += count;
            Some(*total)
        }))
    }

    /// Number of observations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of the observations.
    pub fn sum(&self) -> f64 {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let mut histogram = Histogram::new(&[1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 2.0, 9.0] {
            histogram.observe(value);
        }
        assert_eq!(
            histogram.cumulative().collect::<Vec<_>>(),
            [(1.0, 2), (2.0, 4), (f64::INFINITY, 5)]
        );
        assert_eq!((histogram.count(), histogram.sum()), (5, 14.0));
    }
}
