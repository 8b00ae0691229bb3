//! How tokens are spread over the experts of a model.

use std::fmt::Write;

use plimsoll_core::{ExpertLoads, ExpertSpread};

use super::catalog::{EXPERT_HOTTEST, EXPERT_IMBALANCE, Name};
use super::{head, label};

/// Most series of a metric by layer, whatever the model.
const MAX_SERIES: usize = 128;

/// Appends the metrics, with `labels`. In models of more layers with experts than there may be series, one is of several
/// consecutive layers: it has the number of the first of them, and the largest value.
pub(super) fn write(page: &mut String, labels: &str, loads: &ExpertLoads) {
    let layers = loads.spread();
    let together = layers.len().div_ceil(MAX_SERIES).max(1);
    let mut write = |Name(name, _, help): Name, value: fn(&ExpertSpread) -> f64| {
        page.push_str(&head(name, "gauge", help));
        for layers in layers.chunks(together) {
            let layer = label("layer", &layers[0].layer.to_string());
            let largest = layers.iter().map(value).fold(0.0, f64::max);
            let _ = writeln!(page, "{name}{{{labels},{layer}}} {largest}");
        }
        page.push('\n');
    };
    write(EXPERT_IMBALANCE, |spread| spread.imbalance);
    write(EXPERT_HOTTEST, |spread| spread.hottest);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_never_more_series_than_may_be() {
        let loads = ExpertLoads::new((0..300).map(|layer| (layer >= 10).then_some([4, 1])));
        for layer in 10..300 {
            // Of the third of the layers that share a series, all go to one expert.
            let to = if layer == 12 { 1 } else { 4 };
            loads.count(layer, (0..to).map(|expert| (expert, 4 / to)));
        }
        let mut page = String::new();
        write(&mut page, "a=\"b\"", &loads);
        for name in [EXPERT_IMBALANCE.0, EXPERT_HOTTEST.0] {
            let values: Vec<_> = page.lines().filter(|line| line.starts_with(name)).collect();
            assert_eq!(values.len(), 290usize.div_ceil(3));
            assert!(values.len() <= MAX_SERIES);
            assert!(values[1].contains("layer=\"13\""), "{}", values[1]);
        }
        assert!(page.contains("plimsoll_expert_imbalance_ratio{a=\"b\",layer=\"10\"} 4\n"));
        assert!(page.contains("plimsoll_expert_imbalance_ratio{a=\"b\",layer=\"13\"} 1\n"));
        assert!(page.contains("plimsoll_expert_hottest_token_ratio{a=\"b\",layer=\"13\"} 0.25\n"));
    }
}
