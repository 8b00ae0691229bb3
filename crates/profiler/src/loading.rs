//! Device memory while a model was loaded.

use std::fmt;

use plimsoll_core::human_bytes;
use serde::Serialize;

/// What loading may hold beside the weights: matrices are converted in fixed pieces, and products are measured in scratch of a fixed
/// size, so it does not grow with the model.
const MOST_BESIDE_WEIGHTS: u64 = 1 << 30;

/// Device memory while a model was loaded, in bytes, beyond what was held before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Loading {
    /// The most that was held at one time.
    pub peak: u64,
    /// Of that, the weights, which stay.
    pub weights: u64,
    /// What the peak is to stay below: the weights and a GiB.
    pub bound: u64,
}

impl Loading {
    /// From what was held before, the most that was held since, and the weights that are held now.
    pub fn new(before: u64, most: u64, weights: u64) -> Self {
        Self {
            peak: most.saturating_sub(before),
            weights,
            bound: weights.saturating_add(MOST_BESIDE_WEIGHTS),
        }
    }

    /// Whether the peak stayed below its bound.
    pub fn is_bounded(&self) -> bool {
        self.peak <= self.bound
    }
}

impl fmt::Display for Loading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let beside = human_bytes(self.peak.saturating_sub(self.weights));
        let (peak, weights) = (human_bytes(self.peak), human_bytes(self.weights));
        write!(
            f,
            "loading held at most {peak}: {weights} of weights and {beside} more"
        )?;
        match self.is_bounded() {
            true => Ok(()),
            false => write!(f, ", which is more than {}", human_bytes(MOST_BESIDE_WEIGHTS)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_what_was_held_beyond_what_was_there() {
        const GIB: u64 = 1 << 30;
        let loading = Loading::new(2 * GIB, 7 * GIB, 5 * GIB - (GIB >> 1));
        assert_eq!((loading.peak, loading.bound), (5 * GIB, 5 * GIB + (GIB >> 1)));
        assert!(loading.is_bounded());
        assert_eq!(
            loading.to_string(),
            "loading held at most 5.00 GiB: 4.50 GiB of weights and 512.0 MiB more"
        );
        let loading = Loading::new(0, 7 * GIB, 5 * GIB);
        assert!(!loading.is_bounded() && loading.to_string().ends_with("more than 1.00 GiB"));
    }
}
