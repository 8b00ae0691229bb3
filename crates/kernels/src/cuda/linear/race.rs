//! Ways of a product that are measured one after the other.

use plimsoll_device::cuda::GpuError;

use super::Choice;

/// A way of a product that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimedWay {
    /// The same on all GPUs that have it, below 2^24.
    pub way: u32,
    /// Microseconds, with the pause after it where there is one; infinite where it failed.
    pub us: f32,
}

/// Ways of a product, and what they take.
#[derive(Debug)]
pub(super) struct Race {
    pub(super) ways: Vec<Choice>,
    /// Of the first of them, which were measured.
    pub(super) times: Vec<TimedWay>,
    /// The least of these.
    pub(super) fastest: f32,
    /// Of the last way that failed.
    pub(super) failure: GpuError,
    /// Whether ways of the library are to be measured, too.
    pub(super) asks: bool,
}

impl Race {
    /// Of ways that were not measured.
    pub(super) fn new(ways: Vec<Choice>, asks: bool) -> Self {
        Self {
            ways,
            times: Vec::new(),
            fastest: f32::INFINITY,
            failure: GpuError::NoCommonWay,
            asks,
        }
    }

    /// Adds ways that are not there yet.
    pub(super) fn extend(&mut self, ways: impl IntoIterator<Item = Choice>) {
        for way in ways {
            if !self.ways.contains(&way) {
                self.ways.push(way);
            }
        }
    }

    /// Makes a way the next to be measured, if it is there and was not.
    pub(super) fn put_next(&mut self, way: Choice) {
        let left = &mut self.ways[self.times.len()..];
        if let Some(at) = left.iter().position(|other| *other == way) {
            left[..=at].rotate_right(1);
        }
    }

    /// The next way took so long.
    pub(super) fn add(&mut self, time: Result<f32, GpuError>) -> f32 {
        let us = time.unwrap_or_else(|error| {
            self.failure = error;
            f32::INFINITY
        });
        self.fastest = self.fastest.min(us);
        let way = self.ways[self.times.len()].number();
        self.times.push(TimedWay { way, us });
        us
    }

    /// The fastest way. Of equal ones everywhere the same, in whatever order they are.
    pub(super) fn best(&self) -> Option<(Choice, f32)> {
        let times = self.ways.iter().zip(&self.times);
        let best = times
            .filter(|(_, time)| time.us.is_finite())
            .min_by(|(_, a), (_, b)| a.us.total_cmp(&b.us).then(a.way.cmp(&b.way)));
        best.map(|(choice, time)| (*choice, time.us))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_stays_ahead_of_what_is_likely() {
        let [a, b, c, d] = [1, 2, 3, 4].map(Choice::Hopper);
        let mut race = Race::new(vec![a, b], true);
        assert_eq!(race.add(Ok(5.0)), 5.0);
        race.extend([b, c, a, d]);
        assert_eq!(race.ways, [a, b, c, d]);
        // Neither one that was measured nor one that is not there.
        race.put_next(a);
        race.put_next(Choice::Hopper(9));
        assert_eq!(race.ways, [a, b, c, d]);
        race.put_next(d);
        assert_eq!(race.ways, [a, d, b, c]);
        let failed = race.add(Err(GpuError::NoCommonWay));
        assert_eq!((failed, race.fastest), (f32::INFINITY, 5.0));
        assert_eq!(race.best(), Some((a, 5.0)));
        race.add(Ok(4.0));
        assert_eq!(race.best(), Some((b, 4.0)));
        let ways: Vec<_> = race.times.iter().map(|time| time.way).collect();
        assert_eq!(ways, [a, d, b].map(Choice::number));
        // Of equal ones the one with the smaller number.
        race.add(Ok(4.0));
        assert_eq!(race.best(), Some((b, 4.0)));
    }
}
