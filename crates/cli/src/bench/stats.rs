//! Means and percentiles, as NumPy (and so vLLM's benchmark) computes them.

use serde::Serialize;

/// What a report says about one series of measurements.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Summary {
    /// Arithmetic mean.
    pub mean: f64,
    /// 50th percentile.
    pub median: f64,
    /// Population standard deviation.
    pub std: f64,
    /// `(p, value)` for each percentile asked for.
    pub percentiles: Vec<(f64, f64)>,
}

impl Summary {
    /// Of `values` in any order; all zero where there are none.
    pub(super) fn of(mut values: Vec<f64>, percentiles: &[f64]) -> Self {
        if values.is_empty() {
            return Self {
                percentiles: percentiles.iter().map(|&p| (p, 0.0)).collect(),
                ..Self::default()
            };
        }
        values.sort_by(f64::total_cmp);
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count;
        Self {
            mean,
            median: percentile(&values, 50.0),
            std: variance.sqrt(),
            percentiles: percentiles.iter().map(|&p| (p, percentile(&values, p))).collect(),
        }
    }
}

/// Linear interpolation between the closest ranks of `sorted`, which must not be empty.
fn percentile(sorted: &[f64], p: f64) -> f64 {
    let rank = p / 100.0 * (sorted.len() - 1) as f64;
    let (below, above) = (rank.floor() as usize, rank.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * rank.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_numpy() {
        // numpy.percentile([4, 1, 3, 2, 10], [25, 90, 99]), .mean(), .std()
        let summary = Summary::of(vec![4.0, 1.0, 3.0, 2.0, 10.0], &[25.0, 90.0, 99.0]);
        assert_eq!((summary.mean, summary.median), (4.0, 3.0));
        assert!((summary.std - 3.162_277_660_168_379_5).abs() < 1e-12);
        let expected = [(25.0, 2.0), (90.0, 7.6), (99.0, 9.76)];
        for ((p, value), (q, wanted)) in summary.percentiles.into_iter().zip(expected) {
            assert!(
                p == q && (value - wanted).abs() < 1e-9,
                "p{p}: {value} instead of {wanted}"
            );
        }
    }

    #[test]
    fn nothing_measured_is_zero() {
        assert_eq!(Summary::of(Vec::new(), &[99.0]).percentiles, [(99.0, 0.0)]);
    }
}
