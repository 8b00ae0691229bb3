use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many tokens went to each expert of each layer that has any. Counts are halved again and again, so that later tokens weigh
/// more and none is ever too large.
#[derive(Debug)]
pub struct ExpertLoads {
    layers: Vec<Option<Layer>>,
}

#[derive(Debug)]
struct Layer {
    /// Experts that each token goes to.
    top_k: usize,
    counts: Mutex<Counts>,
}

#[derive(Debug)]
struct Counts {
    /// Of each expert.
    rows: Box<[u64]>,
    sum: u64,
}

/// How tokens are spread over the experts of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertSpread {
    /// Index of the layer.
    pub layer: usize,
    /// Tokens of the expert with the most, as a multiple of what each would have if all had as many: from 1 to the number of
    /// experts divided by that of experts to which each token goes.
    pub imbalance: f64,
    /// Part of all tokens that went to that expert, at most 1.
    pub hottest: f64,
}

impl ExpertLoads {
    /// Counts of a layer are halved when it has given this many tokens to experts.
    const HALVED_AT: u64 = 1 << 16;

    /// Of a model with these layers: how many experts each has, and to how many of them each token goes. Layers without experts
    /// are `None`.
    pub fn new(layers: impl IntoIterator<Item = Option<[usize; 2]>>) -> Self {
        let layer = |[experts, top_k]: [usize; 2]| Layer {
            top_k,
            counts: Mutex::new(Counts {
                rows: vec![0; experts].into(),
                sum: 0,
            }),
        };
        Self {
            layers: layers.into_iter().map(|of| of.map(layer)).collect(),
        }
    }

    /// Counts what steps gave to experts of `layer`: pairs of an expert and a number of tokens.
    ///
    /// # Panics
    /// If the layer has no experts, or not this one.
    pub fn count(&self, layer: usize, routed: impl Iterator<Item = (usize, usize)>) {
        let layer = self.layers[layer].as_ref().expect("a layer with experts");
        let mut counts = layer.lock();
        for (expert, tokens) in routed {
            counts.rows[expert] += tokens as u64;
            counts.sum += tokens as u64;
        }
        while counts.sum >= Self::HALVED_AT * layer.top_k as u64 {
            counts.rows.iter_mut().for_each(|rows| *rows /= 2);
            counts.sum = counts.rows.iter().sum();
        }
    }

    /// Forgets all that was counted.
    pub fn clear(&self) {
        for layer in self.layers.iter().flatten() {
            let mut counts = layer.lock();
            counts.rows.fill(0);
            counts.sum = 0;
        }
    }

    /// Tokens counted for each expert of a layer, halved as they were; `None` if it has no experts.
    pub fn counts(&self, layer: usize) -> Option<Vec<u64>> {
        let layer = self.layers.get(layer)?.as_ref()?;
        Some(layer.lock().rows.to_vec())
    }

    /// How tokens are spread over the experts of each layer that has counted any, in order.
    pub fn spread(&self) -> Vec<ExpertSpread> {
        let layers = self.layers.iter().enumerate();
        let layers = layers.filter_map(|(index, layer)| Some((index, layer.as_ref()?)));
        let spread = layers.filter_map(|(index, layer)| {
            let counts = layer.lock();
            let (most, sum) = (*counts.rows.iter().max()? as f64, counts.sum as f64);
            (sum > 0.0).then(|| ExpertSpread {
                layer: index,
                imbalance: most * counts.rows.len() as f64 / sum,
                hottest: most * layer.top_k as f64 / sum,
            })
        });
        spread.collect()
    }
}

impl Layer {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        // Counts are whole whatever a thread did.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_that_of_late_tokens() {
        // A layer without experts, then one of 8, of which each token goes to 2.
        let loads = ExpertLoads::new([None, Some([8, 2])]);
        assert_eq!(loads.spread(), []);
        loads.count(1, (0..8).map(|expert| (expert, 5)));
        assert_eq!(
            (loads.counts(0), loads.counts(1), loads.counts(2)),
            (None, Some(vec![5; 8]), None)
        );
        let [even] = loads.spread()[..] else {
            panic!("one layer")
        };
        assert_eq!((even.layer, even.imbalance, even.hottest), (1, 1.0, 0.25));
        // From here on, all tokens go to the first two.
        for _ in 0..64 {
            loads.count(1, (0..2).map(|expert| (expert, 8192)));
        }
        let [hot] = loads.spread()[..] else {
            panic!("one layer")
        };
        assert!(
            (hot.imbalance - 4.0).abs() < 1e-3 && (hot.hottest - 1.0).abs() < 1e-3,
            "{hot:?}"
        );
        // However many tokens are counted at once, they soon matter little.
        for tokens in [1 << 20, 1 << 13, 1 << 13, 1 << 13] {
            loads.count(
                1,
                (0..if tokens > 1 << 13 { 2 } else { 8 }).map(|expert| (expert, tokens)),
            );
        }
        assert!(loads.spread()[0].imbalance < 1.5, "{loads:?}");
        loads.clear();
        assert_eq!(loads.spread(), []);
    }
}
