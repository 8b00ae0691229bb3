//! Measured choices of linear layers in a form that can be stored: a later start that takes them over measures nothing and chooses alike.

use std::collections::{HashMap, HashSet};

use plimsoll_device::cuda::GpuError;
use serde::{Deserialize, Serialize};

use super::cublas_lt::Shape;
use super::key::{ChainKind, Kind};
use super::tune::{Measured, Measurements};
use super::{Choice, GpuLinear, Key, LinearOutput, LinearScratch, LinearUse, Linears, Operands};

/// The fastest ways of linear layers, as measured: valid for GPUs of the same kind and the same kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearWays {
    /// cuBLASLt's version: no other understands the words of its algorithms.
    cublas_lt: usize,
    layers: Vec<KeptLayers>,
    /// What was faster in one launch than one by one.
    chains: Vec<ChainKind>,
    /// Products of whole layers that were faster in one launch with their attention than these products alone otherwise.
    whole_layers: Vec<[Kind; 4]>,
}

/// Layers that are computed alike, and their ways by rising number of rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptLayers {
    layers: Kind,
    ways: Vec<Measured>,
}

/// Why stored ways cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StaleWays {
    /// Measured with another version of the library.
    #[error("they were measured with version {then} of cuBLASLt, and this is {now}")]
    Library {
        /// The version that they were measured with.
        then: usize,
        /// The version of this process.
        now: usize,
    },
    /// Layers of another model, or measured for other numbers of rows.
    #[error("no choice is stored for {0}")]
    Unknown(String),
    /// A way that this GPU does not have.
    #[error("this GPU cannot compute {0} that way")]
    Refused(String),
    /// A product failed.
    #[error("{product}: {error}")]
    Failed {
        /// Its shape and its way.
        product: String,
        /// Why.
        error: GpuError,
    },
}

impl LinearWays {
    fn new(
        cublas_lt: usize,
        measured: &Measurements,
        chains: &HashSet<ChainKind>,
        whole_layers: &HashSet<[Kind; 4]>,
    ) -> Self {
        let layers = measured.0.iter().map(|(kind, entries)| KeptLayers {
            layers: *kind,
            // JSON has no infinite numbers. Without such a way, the next start measures again.
            ways: (entries.iter().copied())
                .filter(|entry| entry.us.is_finite())
                .collect(),
        });
        Self {
            cublas_lt,
            layers: layers.collect(),
            chains: chains.iter().copied().collect(),
            whole_layers: whole_layers.iter().copied().collect(),
        }
    }

    /// Those of these products, if there is one of each that `can` be taken.
    fn of(
        &self,
        products: &[Key],
        cublas_lt: usize,
        can: impl Fn(&Key, Choice) -> bool,
    ) -> Result<Measurements, StaleWays> {
        if self.cublas_lt != cublas_lt {
            return Err(StaleWays::Library {
                then: self.cublas_lt,
                now: cublas_lt,
            });
        }
        let kept: HashMap<_, _> = (self.layers.iter())
            .map(|kept| (kept.layers, &kept.ways))
            .collect();
        let mut found = Measurements::default();
        for key in products {
            let ways = kept.get(&Kind::from(key)).into_iter().copied().flatten();
            let way = ways.clone().find(|way| way.rows == key.shape.m);
            let way = way.ok_or_else(|| StaleWays::Unknown(key.to_string()))?;
            if way.choice.is_some_and(|choice| !can(key, choice)) {
                return Err(StaleWays::Refused(key.to_string()));
            }
            found.insert(key, way.choice, way.us);
        }
        Ok(found)
    }
}

impl Linears {
    /// What was measured, to be kept.
    pub fn ways(&self) -> LinearWays {
        let (chains, whole) = (&self.chain.faster, &self.layers.faster);
        LinearWays::new(self.lt.version(), &self.measurements, chains, whole)
    }

    /// Takes over what another process measured for these uses, all of it or nothing: each product is computed once, by which libraries
    /// load its kernel now, and not when a request waits for it.
    ///
    /// # Errors
    /// [`StaleWays`], after which [`Self::measure`] is to be called.
    ///
    /// # Panics
    /// If a use has no layers.
    pub fn take_over<'a>(
        &mut self,
        ways: &LinearWays,
        uses: impl IntoIterator<Item = &'a LinearUse<'a>>,
        scratch: LinearScratch<'_>,
    ) -> Result<(), StaleWays> {
        let (mut keys, mut layers): (Vec<Key>, Vec<&GpuLinear>) = (Vec::new(), Vec::new());
        for one in uses {
            for &rows in one.rows.iter().filter(|&&rows| one.fits(rows, &scratch)) {
                // What is activated by the product is measured without that, too.
                let plain = (one.output.stacked() > 1).then_some(LinearOutput::Bf16);
                for output in plain.into_iter().chain([one.output]) {
                    keys.push(one.first().key(rows, output));
                    layers.push(one.first());
                }
            }
        }
        let can = |key: &Key, choice| self.can_take(key, choice, &scratch);
        let found = ways.of(&keys, self.lt.version(), can)?;
        let failed = |(key, choice): (&Key, Choice), error| StaleWays::Failed {
            product: format!("{key}: {choice}"),
            error,
        };
        let mut last = None;
        for (key, layer) in keys.iter().zip(layers) {
            let choice = found.find(key).and_then(|way| way.choice);
            let Some(choice) = choice else { continue };
            last = Some((key, choice));
            // SAFETY: the scratch was found large enough; the stream orders what follows.
            let launched = unsafe { self.launch(key, choice, &Operands::within(&scratch, layer)) };
            launched.map_err(|error| failed((key, choice), error))?;
        }
        if let Some(last) = last {
            self.gpu.synchronize().map_err(|error| failed(last, error))?;
        }
        self.measurements = found;
        self.chain.faster = ways.chains.iter().copied().collect();
        self.layers.faster = ways.whole_layers.iter().copied().collect();
        self.known().clear();
        Ok(())
    }

    /// Forgets what was measured or taken over.
    pub fn forget(&mut self) {
        self.measurements = Measurements::default();
        self.chain.faster.clear();
        self.layers.faster.clear();
        self.known().clear();
    }

    /// Whether this GPU can compute a product so. Which cuts fill a GPU may differ between two of a kind, so any that is possible will do.
    fn can_take(&self, key: &Key, choice: Choice, scratch: &LinearScratch<'_>) -> bool {
        let own = self.own_ways(key);
        let (shape, cuts) = (&key.shape, &self.stream.cuts);
        match choice {
            Choice::Lt(algorithm) => {
                self.asks_library(key, &own, scratch) && self.lt.can(&key.shape.first_slice(), &algorithm)
            }
            Choice::Stream(cut) => {
                let m = shape.m.min(cuts.most_rows(shape.values));
                cuts.possible(&Shape { m, ..*shape }, key.output).contains(&cut)
            }
            choice => own.contains(&choice),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cublas_lt::{Algorithm, Shape};
    use super::super::{Fp8Scaling, GpuValues, Int4Group, LinearCut, LinearTile};
    use super::*;
    use crate::{Activation, GgufFormat};

    const VERSION: usize = 130_100;

    fn key(m: usize, values: GpuValues, output: LinearOutput) -> Key {
        Key {
            shape: Shape {
                m,
                n: 4096,
                k: 1024,
                wide: output == LinearOutput::F32,
                bias: false,
                values,
                pitch: 4096,
            },
            output,
        }
    }

    /// Each kind of way, of each kind of weights and output.
    fn measured() -> Vec<(Key, Option<Choice>, f32)> {
        let cut = LinearCut {
            row_warps: 2,
            cluster: 4,
            blocks_per_sm: 1,
        };
        let tile = LinearTile::all(GpuValues::Fp8(Fp8Scaling::Rows))[1];
        let algorithm = Algorithm::from_words([66 << 32 | 24, u64::MAX, 0, 1, 0, 0, 0, 0]);
        let gated = LinearOutput::Glu(Activation::GeluTanh);
        vec![
            (
                key(1, GpuValues::Bf16, LinearOutput::Bf16),
                Some(Choice::Stream(cut)),
                10.7,
            ),
            (
                key(8, GpuValues::Bf16, LinearOutput::Bf16),
                Some(Choice::Hopper(132)),
                0.1,
            ),
            (
                key(8192, GpuValues::Bf16, LinearOutput::Bf16),
                Some(Choice::Lt(algorithm)),
                343.8,
            ),
            (key(8, GpuValues::Bf16, gated), None, 57.8),
            (
                key(64, GpuValues::Fp8(Fp8Scaling::Rows), gated),
                Some(Choice::Many(tile)),
                30.0,
            ),
            (
                key(4, GpuValues::Int4(Int4Group::Of64), LinearOutput::Bf16),
                Some(Choice::Int4Rows(2)),
                5.0,
            ),
            (
                key(64, GpuValues::Int4(Int4Group::Of128), LinearOutput::Bf16),
                Some(Choice::Int4(8)),
                9.0,
            ),
            (
                key(2, GpuValues::Gguf(GgufFormat::Q4_0), LinearOutput::F32),
                Some(Choice::Stream(cut)),
                1e-3,
            ),
        ]
    }

    fn kept() -> (Vec<Key>, Measurements, LinearWays) {
        let mut measurements = Measurements::default();
        for (key, choice, us) in measured() {
            measurements.insert(&key, choice, us);
        }
        let keys: Vec<Key> = measured().into_iter().map(|(key, ..)| key).collect();
        let chain = ChainKind {
            layers: [&keys[0], &keys[4], &keys[5]].map(Kind::from),
            sum_norms: true,
        };
        let whole = [&keys[0], &keys[1], &keys[3], &keys[2]].map(Kind::from);
        let ways = LinearWays::new(VERSION, &measurements, &[chain].into(), &[whole].into());
        (keys, measurements, ways)
    }

    #[test]
    fn what_was_measured_comes_back_from_json() {
        let (keys, measurements, ways) = kept();
        let text = serde_json::to_string_pretty(&ways).unwrap();
        let read: LinearWays = serde_json::from_str(&text).unwrap();
        assert_eq!(read, ways);
        assert_eq!(read.of(&keys, VERSION, |_, _| true).unwrap(), measurements);
        assert_eq!((read.chains.len(), read.whole_layers.len()), (1, 1));
        // Only what is asked for.
        let one = read.of(&keys[..1], VERSION, |_, _| true).unwrap();
        assert!(one.find(&keys[0]).is_some() && one.find(&keys[4]).is_none());
    }

    #[test]
    fn all_ways_hold_or_none() {
        let (keys, _, ways) = kept();
        let stale = |result: Result<Measurements, StaleWays>| result.unwrap_err().to_string();
        let other = stale(ways.of(&keys, VERSION + 1, |_, _| true));
        assert!(other.contains("130100") && other.contains("130101"), "{other}");
        // Another number of rows, and another shape.
        for change in [
            |key: &mut Key| key.shape.m = 3,
            |key: &mut Key| key.shape.bias = true,
        ] {
            let mut keys = keys.clone();
            change(&mut keys[1]);
            let unknown = stale(ways.of(&keys, VERSION, |_, _| true));
            assert!(unknown.starts_with("no choice is stored for"), "{unknown}");
        }
        // A way of each kind that this GPU does not have.
        for (refused, choice, _) in measured() {
            let Some(choice) = choice else { continue };
            let stale = stale(ways.of(&keys, VERSION, |key, way| *key != refused || way != choice));
            assert_eq!(stale, format!("this GPU cannot compute {refused} that way"));
        }
    }

    /// A way that took no time that could be told is measured again.
    #[test]
    fn what_failed_is_not_kept() {
        let mut measurements = Measurements::default();
        let key = key(64, GpuValues::Bf16, LinearOutput::Glu(Activation::Silu));
        measurements.insert(&key, None, f32::INFINITY);
        let ways = LinearWays::new(VERSION, &measurements, &HashSet::new(), &HashSet::new());
        let text = serde_json::to_string(&ways).unwrap();
        let read: LinearWays = serde_json::from_str(&text).unwrap();
        assert!(matches!(
            read.of(&[key], VERSION, |_, _| true),
            Err(StaleWays::Unknown(_))
        ));
    }

    #[test]
    fn other_forms_are_refused() {
        let whole = serde_json::to_value(kept().2).unwrap();
        let refused = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut json = whole.clone();
            change(&mut json);
            assert!(serde_json::from_value::<LinearWays>(json).is_err());
        };
        refused(&|json| json["more"] = 1.into());
        refused(&|json| json["cublas_lt"] = "130100".into());
        refused(&|json| json["layers"][0]["ways"][0]["rows"] = (-1).into());
        // Those of a build that did not tell layers with norms of sums from others.
        refused(&|json| json["chains"][0] = json["chains"][0]["layers"].clone());
        refused(&|json| drop(json["chains"][0].as_object_mut().unwrap().remove("sum_norms")));
        // Those of a build that did not measure whole layers say nothing of them.
        refused(&|json| drop(json.as_object_mut().unwrap().remove("whole_layers")));
        refused(&|json| drop(json["whole_layers"][0].as_array_mut().unwrap().pop()));
        refused(&|json| json["layers"][0]["ways"][0]["choice"] = serde_json::json!({ "Magic": 1 }));
        for words in ["", "1 2 3 4 5 6 7 8 9", "1 g", "1 10000000000000000"] {
            refused(&|json| json["layers"][0]["ways"][0]["choice"] = serde_json::json!({ "Lt": words }));
        }
    }
}
