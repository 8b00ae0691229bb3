//! What computes which layers fastest, measured at start.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::thread;

use half::bf16;
use plimsoll_device::cuda::{GpuError, GpuSlice};
use serde::{Deserialize, Serialize};

use super::ahead::Ahead;
use super::cublas_lt::{Operands, Shape};
use super::fewer_rows::{FewerRows, Found, PAUSED_ROWS, is_paused};
use super::key::Kind;
use super::race::{Race, TimedWay};
use super::timer::{Recorded, Timer};
use super::{Choice, GpuLinear, GpuValues, Key, LinearOutput, Linears, int4_products};

/// A measurement reads about this many bytes of weights, in at most so many products: enough to outweigh that the first product has no
/// kernel ahead to start beside.
const BYTES: usize = 768 << 20;
const MOST_CALLS: usize = 8;
/// Up to so many rows, products of FP8 weights are computed in bf16 if they can be.
const LONE_ROWS: usize = 2;
/// Bytes of gates and ups that the kernel that activates and quantises them reads in a microsecond on an H200, beside other kernels. Where a
/// product of FP8 weights applies the activation, what quantises its outputs reads half as many.
const ACTIVATED_BYTES: f32 = 2e6;
/// From so many rows on, one product is long enough.
const MANY_ROWS: usize = 512;
/// Up to so many rows, weights in few bits may be streamed again for each part of them: in bf16 they would be written and read.
const MOST_STREAMED_ROWS: usize = 64;
/// Candidates.
const MOST_CUTS: usize = 12;

/// See [`Linears::measure_together`].
type Agree<'a, E> = dyn FnMut(&mut [TimedWay]) -> Result<(), E> + 'a;

/// Layers of one shape, and the numbers of rows they will see.
#[derive(Clone, Copy, Debug)]
pub struct LinearUse<'a> {
    /// They are measured in turn, so several keep the weights out of the cache, as in a step.
    pub layers: &'a [&'a GpuLinear],
    /// What becomes of their sums.
    pub output: LinearOutput,
    /// Rows to measure for; other numbers are computed as the next larger one of these is.
    pub rows: &'a [usize],
}

impl<'a> LinearUse<'a> {
    /// One for all of its layers.
    ///
    /// # Panics
    /// If there are none.
    pub(super) fn first(&self) -> &'a GpuLinear {
        self.layers.first().expect("a layer to measure")
    }

    /// Of so many rows.
    ///
    /// # Panics
    /// If its layers differ in shape.
    fn key(&self, rows: usize) -> Key {
        let key = self.first().key(rows, self.output);
        let alike = self
            .layers
            .iter()
            .all(|layer| layer.key(rows, self.output) == key);
        assert!(alike, "layers of one shape");
        key
    }

    /// Whether so many rows can be measured there.
    pub(super) fn fits(&self, rows: usize, scratch: &LinearScratch<'_>) -> bool {
        let first = self.first();
        rows > 0
            && rows * first.k <= scratch.x.len()
            && rows * first.n * self.output.bytes() <= scratch.out.len()
    }
}

/// Device memory to measure in: as much as the most rows need.
#[derive(Clone, Copy, Debug)]
pub struct LinearScratch<'a> {
    /// Inputs: random, as few changing bits would let products run faster than they do on real ones.
    pub x: GpuSlice<'a, bf16>,
    /// Outputs.
    pub out: GpuSlice<'a, u8>,
    /// Matrices of few bits as `bf16`: as much as [`dequantised_room`](super::dequantised_room) says.
    pub weights: GpuSlice<'a, bf16>,
}

/// The way that was fastest.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearChoice {
    /// Rows.
    pub rows: usize,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// What becomes of the sums.
    pub output: LinearOutput,
    /// What its weights are.
    pub values: GpuValues,
    /// The way, in words.
    pub path: String,
    /// Microseconds it took, with the pause after it where there is one.
    pub us: f32,
}

impl fmt::Display for LinearChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rows,
            n,
            k,
            output,
            values,
            path,
            us,
        } = self;
        let values = values.suffix();
        write!(f, "[{rows}, {k}]{values} -> {n} {output:?}: {path}, {us:.1} us")
    }
}

/// The fastest way for some number of rows; none where `activation(gate) * up` should be a kernel of its own.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Measured {
    pub(super) rows: usize,
    pub(super) choice: Option<Choice>,
    pub(super) us: f32,
}

/// What was measured, by rising number of rows.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Measurements(pub(super) HashMap<Kind, Vec<Measured>>);

impl Measurements {
    /// The entry for the next larger number of rows, or else for the most.
    pub(super) fn find(&self, key: &Key) -> Option<&Measured> {
        let rows = self.0.get(&key.into())?;
        rows.iter()
            .find(|entry| entry.rows >= key.shape.m)
            .or(rows.last())
    }

    pub(super) fn insert(&mut self, key: &Key, choice: Option<Choice>, us: f32) {
        let entries = self.0.entry(key.into()).or_default();
        let rows = key.shape.m;
        entries.retain(|entry| entry.rows != rows);
        let at = entries.partition_point(|entry| entry.rows < rows);
        entries.insert(at, Measured { rows, choice, us });
    }

    fn list(&self) -> Vec<LinearChoice> {
        let entries = self.0.iter().flat_map(|(kind, entries)| {
            entries.iter().map(|entry| LinearChoice {
                rows: entry.rows,
                n: kind.n,
                k: kind.k,
                output: kind.output,
                values: kind.values,
                path: entry
                    .choice
                    .map_or("activation on its own".to_owned(), |choice| choice.to_string()),
                us: entry.us,
            })
        });
        let mut list: Vec<_> = entries.collect();
        list.sort_by_key(|choice| (choice.n, choice.k, choice.output.mode(), choice.rows));
        list
    }
}

impl Operands {
    /// For measurements: a layer with inputs and outputs in scratch memory.
    pub(super) fn within(scratch: &LinearScratch<'_>, layer: &GpuLinear) -> Self {
        Self {
            x: scratch.x.ptr(),
            // Any number will do.
            x_scales: scratch.x.ptr(),
            out: scratch.out.ptr(),
            room: scratch.weights.ptr(),
            ..layer.operands()
        }
    }
}

impl Linears {
    /// Measures which way is fastest for each use; what does not fit in `scratch` is left out.
    ///
    /// # Errors
    /// [`GpuError`] of the device.
    ///
    /// # Panics
    /// If the layers of a use differ in shape or there are none.
    pub fn measure(&mut self, uses: &[LinearUse<'_>], scratch: LinearScratch<'_>) -> Result<(), GpuError> {
        self.measure_all(uses, scratch, true, &mut |_| Ok::<_, GpuError>(()))
    }

    /// As [`Self::measure`], on several GPUs at once that compute the same and are to come to the same bits, so that they choose alike.
    /// `agree` gets the ways of a product and replaces their times by those that count for all: infinite ones where a GPU has no such
    /// way. GPUs of one kind do not have all of them alike, as chips differ in which of their parts are in use.
    ///
    /// # Errors
    /// [`GpuError`] of the device, and those of `agree`.
    ///
    /// # Panics
    /// As [`Self::measure`].
    pub fn measure_together<E: From<GpuError>>(
        &mut self,
        uses: &[LinearUse<'_>],
        scratch: LinearScratch<'_>,
        agree: &mut Agree<'_, E>,
    ) -> Result<(), E> {
        // All GPUs need all ways, among which they agree.
        self.measure_all(uses, scratch, false, agree)
    }

    /// `stops` at ways that are good enough.
    fn measure_all<E: From<GpuError>>(
        &mut self,
        uses: &[LinearUse<'_>],
        scratch: LinearScratch<'_>,
        stops: bool,
        agree: &mut Agree<'_, E>,
    ) -> Result<(), E> {
        let timer = Timer::new(&self.gpu)?;
        let ahead = Ahead::new(&self.lt, self.library_products(uses, &scratch));
        let clock = Clock {
            linears: self,
            scratch,
            stops,
            timer,
            own: RefCell::default(),
            ahead: &ahead,
        };
        let all = || {
            uses.iter()
                .flat_map(|one| one.rows.iter().map(move |&rows| (one, rows)))
        };
        let found = thread::scope(|scope| {
            // Our own ways first: kernels of cuBLASLt are loaded meanwhile.
            ahead.start(scope);
            clock.measure_own(all());
            let mut found = Vec::new();
            let measured = all().try_for_each(|(one, rows)| clock.measure(one, rows, &mut found, agree));
            ahead.end();
            measured.map(|()| found)
        })?;
        for (key, choice, us) in found {
            self.measurements.insert(&key, choice, us);
        }
        self.known().clear();
        Ok(())
    }

    /// Products of cuBLASLt that are measured for these uses, in their order, perhaps with some that turn out not to be.
    fn library_products(
        &self,
        uses: &[LinearUse<'_>],
        scratch: &LinearScratch<'_>,
    ) -> Vec<(Shape, Operands)> {
        let mut products = Vec::new();
        for one in uses {
            for &rows in one.rows.iter().filter(|&&rows| one.fits(rows, scratch)) {
                let plain = match one.output.stacked() {
                    1 => one.output,
                    _ => LinearOutput::Bf16,
                };
                let key = one.first().key(rows, plain);
                if self.asks_library(&key, &self.own_ways(&key), scratch) {
                    let operands = Operands::within(scratch, one.first());
                    let weight = match key.shape.is_dequantised() {
                        true => operands.room,
                        false => operands.weight,
                    };
                    products.push((key.shape.first_slice(), Operands { weight, ..operands }));
                }
            }
        }
        products
    }

    /// Microseconds of a layer, with the pause after it where there is one, as [`Self::measure`] found.
    pub(super) fn measured_us(&self, linear: &GpuLinear, rows: usize, output: LinearOutput) -> Option<f32> {
        let found = self.measurements.find(&linear.key(rows, output));
        found.map(|measured| measured.us)
    }

    /// Launches a layer of one row as [`Self::measure`] found it fastest, within the memory that it was measured in.
    pub(super) fn launch_measured(
        &self,
        linear: &GpuLinear,
        output: LinearOutput,
        scratch: &LinearScratch<'_>,
    ) -> Result<(), GpuError> {
        for product in linear.products() {
            let measured = |output| {
                let key = product.key(1, output);
                Some((key, self.measurements.find(&key)?.choice?))
            };
            let whole = measured(output);
            // What is to be activated was measured without that, too.
            let way = whole.or_else(|| measured(LinearOutput::Bf16));
            let (key, choice) = way.expect("a layer that was measured");
            // SAFETY: the scratch was found large enough; the stream orders what follows.
            unsafe { self.launch(&key, choice, &Operands::within(scratch, product))? };
            if whole.is_none() {
                // For the launch of the activation.
                self.stream.pause()?;
            }
        }
        Ok(())
    }

    /// Our own ways of a product that are worth a measurement.
    pub(super) fn own_ways(&self, key: &Key) -> Vec<Choice> {
        let shape = &key.shape;
        let part = match shape.is_dequantised() && shape.m <= MOST_STREAMED_ROWS && key.output.stacked() == 1
        {
            true => shape.m.min(self.stream.cuts.most_rows(shape.values)),
            false => shape.m,
        };
        let cuts = self.stream.cuts.of(&Shape { m: part, ..*shape }, key.output);
        let mut ways: Vec<Choice> = cuts.into_iter().take(MOST_CUTS).map(Choice::Stream).collect();
        if self.hopper.can(shape, key.output) && !is_lone_fp8(key, &ways) {
            ways.push(self.hopper.choice());
        }
        let tiles = self.many.tiles(shape, key.output);
        ways.extend(tiles.into_iter().map(Choice::Many));
        let slabs = self.int4_rows.slabs(shape, key.output);
        ways.extend(slabs.map(Choice::Int4Rows));
        if ways.is_empty() || shape.m >= int4_products::LEAST_ROWS {
            let parts = self.int4_products.parts(shape, key.output);
            ways.extend(parts.into_iter().map(Choice::Int4));
        }
        ways
    }

    /// Whether cuBLASLt's ways of a product are worth a measurement, beside these of our own, and there is room for them.
    pub(super) fn asks_library(&self, key: &Key, own: &[Choice], scratch: &LinearScratch<'_>) -> bool {
        let slice = key.shape.first_slice();
        let has_room = !key.shape.is_dequantised() || slice.n * slice.k <= scratch.weights.len();
        key.output.stacked() == 1 && has_room && !is_lone_fp8(key, own)
    }

    /// What [`Self::measure`] found.
    pub fn choices(&self) -> Vec<LinearChoice> {
        self.measurements.list()
    }
}

/// One or two rows of FP8 weights that are streamed: quantising the inputs costs more than products of e4m3 values save, and the kernels of
/// `linear.cu` can compute the norm as well.
fn is_lone_fp8(key: &Key, own: &[Choice]) -> bool {
    let is_streamed = matches!(own.first(), Some(Choice::Stream(_)));
    key.shape.scaling().is_some() && key.shape.m <= LONE_ROWS && is_streamed
}

struct Clock<'a> {
    linears: &'a Linears,
    scratch: LinearScratch<'a>,
    stops: bool,
    timer: Timer,
    /// Of products whose own ways were measured, and nothing else.
    own: RefCell<HashMap<Key, Race>>,
    ahead: &'a Ahead<'a>,
}

impl Clock<'_> {
    /// Measures our own ways of these products.
    fn measure_own<'a>(&self, products: impl Iterator<Item = (&'a LinearUse<'a>, usize)>) {
        let mut found = Vec::new();
        for (one, rows) in products.filter(|(one, rows)| one.fits(*rows, &self.scratch)) {
            let key = one.key(rows);
            if one.output.stacked() == 1 {
                let race = self.own(one, &key, &found);
                found.extend(race.best().map(|(choice, us)| (key, Some(choice), us)));
                self.own.borrow_mut().insert(key, race);
            }
        }
    }

    fn measure<E: From<GpuError>>(
        &self,
        one: &LinearUse<'_>,
        rows: usize,
        found: &mut Vec<Found>,
        agree: &mut Agree<'_, E>,
    ) -> Result<(), E> {
        let (first, key) = (one.first(), one.key(rows));
        if !one.fits(rows, &self.scratch) {
            return Ok(());
        }
        if one.output.stacked() == 1 {
            let (choice, us) = self.fastest(one, &key, found, agree)??;
            found.push((key, Some(choice), us));
            return Ok(());
        }
        let plain = first.key(rows, LinearOutput::Bf16);
        let known = found.iter().find(|(key, ..)| *key == plain);
        let (choice, us) = match known.and_then(|&(_, choice, us)| Some((choice?, us))) {
            Some(known) => known,
            None => {
                let (choice, us) = self.fastest(one, &plain, found, agree)??;
                found.push((plain, Some(choice), us));
                (choice, us)
            }
        };
        let apart = match rows > PAUSED_ROWS && rows <= MANY_ROWS && plain.shape.scaling().is_none() {
            true => {
                let paused = self.record(one, &plain, choice, true).and_then(|paused| {
                    self.timer.start(&paused)?;
                    self.timer.finish(&paused, f32::INFINITY)
                });
                let mut ways = [TimedWay {
                    way: choice.number(),
                    us: paused.unwrap_or(f32::INFINITY),
                }];
                agree(&mut ways)?;
                ways[0].us
            }
            false => us,
        };
        let linears = self.linears;
        let fuses = linears.hopper.can(&key.shape, key.output)
            || !linears.many.tiles(&key.shape, key.output).is_empty()
            || !linears.stream.cuts.of(&key.shape, key.output).is_empty();
        let fused = match fuses {
            true => self.fastest(one, &key, found, agree)?.ok(),
            false => None,
        };
        // Of FP8 weights, what is activated must be quantised, which stays a launch, but becomes shorter.
        let saved = match rows > PAUSED_ROWS && plain.shape.scaling().is_some() {
            true => (rows * key.shape.n * size_of::<bf16>()) as f32 / ACTIVATED_BYTES,
            false => 0.0,
        };
        found.push(match fused {
            // `apart` includes a pause, which stands for the launch of the activation. Not so beyond `MANY_ROWS`, where products take
            // much longer, nor for FP8 weights with more than `PAUSED_ROWS` rows, for which `saved` counts.
            Some((choice, us)) if us < apart + saved => (key, Some(choice), us),
            _ => (key, None, apart),
        });
        Ok(())
    }

    /// Our own ways of a product, measured until one is good enough.
    fn own(&self, one: &LinearUse<'_>, key: &Key, found: &[Found]) -> Race {
        let ways = self.linears.own_ways(key);
        let asks = self.linears.asks_library(key, &ways, &self.scratch);
        let mut race = Race::new(ways, asks);
        self.run(one, key, &mut race, self.fewer_rows(found, key));
        race
    }

    fn fewer_rows(&self, found: &[Found], key: &Key) -> Option<FewerRows> {
        FewerRows::of(found, key).filter(|_| self.stops)
    }

    /// The fastest way and its microseconds, or why no way works.
    fn fastest<E: From<GpuError>>(
        &self,
        one: &LinearUse<'_>,
        key: &Key,
        found: &[Found],
        agree: &mut Agree<'_, E>,
    ) -> Result<Result<(Choice, f32), GpuError>, E> {
        let (linears, slice) = (self.linears, key.shape.first_slice());
        self.ahead.begin(&slice);
        let known = self.own.borrow_mut().remove(key);
        let mut race = known.unwrap_or_else(|| self.own(one, key, found));
        let fewer = self.fewer_rows(found, key);
        if fewer.is_none_or(|fewer| race.fastest > fewer.enough()) {
            if race.asks {
                let likely = fewer.and_then(|fewer| fewer.likely());
                let likely = likely.filter(
                    |likely| matches!(likely, Choice::Lt(algorithm) if linears.lt.can(&slice, algorithm)),
                );
                race.extend(likely);
                race.extend(self.ahead.algorithms(&slice)?.into_iter().map(Choice::Lt));
            }
            if race.ways.is_empty() {
                match linears.slow_cut(key) {
                    Ok(cut) => race.extend([Choice::Stream(cut)]),
                    Err(error) => return Ok(Err(error)),
                }
            }
            self.run(one, key, &mut race, fewer);
        }
        agree(&mut race.times)?;
        Ok(race.best().ok_or(race.failure))
    }

    /// Measures ways that were not yet, until one is good enough beside what fewer rows took. That which is likely to be comes first.
    fn run(&self, one: &LinearUse<'_>, key: &Key, race: &mut Race, fewer: Option<FewerRows>) {
        let likely = fewer.and_then(|fewer| fewer.likely());
        likely.into_iter().for_each(|likely| race.put_next(likely));
        let record = |choice: &Choice| self.record(one, key, *choice, is_paused(key));
        let mut next = None;
        let mut last: Option<Recorded>;
        while let Some(&choice) = race.ways.get(race.times.len()) {
            let recorded = next.take().unwrap_or_else(|| record(&choice));
            let started = recorded.and_then(|recorded| self.timer.start(&recorded).map(|()| recorded));
            // While the GPU computes, the host cleans up and prepares what follows, unless that is unlikely to be needed.
            last = None;
            if likely != Some(choice) {
                next = race.ways.get(race.times.len() + 1).map(record);
            }
            let time = started.and_then(|started| {
                let time = self.timer.finish(&started, race.fastest);
                last = Some(started);
                time
            });
            let us = race.add(time);
            if fewer.is_some_and(|fewer| us <= fewer.enough()) {
                break;
            }
        }
    }

    /// Products like this one, perhaps with a pause after each.
    fn record(
        &self,
        one: &LinearUse<'_>,
        key: &Key,
        choice: Choice,
        is_paused: bool,
    ) -> Result<Recorded, GpuError> {
        let m = key.shape.m;
        let calls = match m < MANY_ROWS {
            true => (BYTES / (key.output.stacked() * key.shape.weight_bytes())).clamp(2, MOST_CALLS),
            false => 1,
        };
        self.timer.record(calls, |call| {
            let layer = one.layers[call % one.layers.len()];
            let operands = Operands::within(&self.scratch, layer);
            // SAFETY: the scratch was found large enough; the stream orders what follows.
            unsafe { self.linears.launch(key, choice, &operands)? };
            match is_paused {
                true => self.linears.stream.pause(),
                false => Ok(()),
            }
        })
    }
}
