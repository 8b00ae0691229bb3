//! What a start would find, from the configuration of the model and the device alone.

use plimsoll_core::{Component, Oom, RefusedBy};
use plimsoll_profiler::{Footprint, Prediction, ProfileError, ProfileSpec, Setting};

use super::spec::{profile_spec, step_limits};
use crate::backend::{Backend, Device};
use crate::error::Error;
use crate::settings::EngineSettings;

/// What [`super::Loaded::prove`] would find on `device`.
///
/// # Errors
/// As [`super::Loaded::new`], as far as configuration and headers tell; [`Error::Predicted`]: what it would end with.
pub fn predict(settings: &EngineSettings, device: &dyn Device) -> Result<Prediction, Error> {
    let (spec, footprint) = outline(settings, device)?;
    let idle = footprint.idle();
    let (weights, room) = (
        idle.by_component.get(Component::Weights),
        idle.total.saturating_sub(idle.peers()),
    );
    let predicted = match idle.reserved > room {
        true => Err(Error::WeightsDoNotFit(Oom {
            requested: weights,
            component: Component::Weights,
            refused_by: RefusedBy::Device,
            meters: Box::new(idle),
        })),
        false => plimsoll_profiler::predict(&spec, &*footprint).map_err(Error::from),
    };
    predicted.map_err(|error| Error::Predicted(Box::new(error)))
}

fn outline(
    settings: &EngineSettings,
    device: &dyn Device,
) -> Result<(ProfileSpec, Box<dyn Footprint>), Error> {
    let limits = step_limits(settings, device)?;
    let (facts, footprint) = device.footprint(limits)?;
    let total = footprint.idle().total;
    Ok((profile_spec(settings, device, limits, &facts, total), footprint))
}

/// `error` of a start, with the size of the device that would be enough where nothing could be measured.
pub(crate) fn with_enough_memory(settings: &EngineSettings, backend: &dyn Backend, error: Error) -> Error {
    if error.exit_code() == 4 {
        backend.log_neighbours();
    }
    let unmeasured = match &error {
        Error::WeightsDoNotFit(_) => true,
        error => error
            .diagnostic()
            .is_some_and(|diagnostic| diagnostic.knobs.is_empty() && diagnostic.measured_peak.is_none()),
    };
    if !unmeasured {
        return error;
    }
    let refused = outline(settings, backend)
        .ok()
        .and_then(|(spec, footprint)| plimsoll_profiler::predict(&spec, &*footprint).err());
    let knobs = match refused {
        Some(ProfileError::DoesNotFit(diagnostic)) => diagnostic.knobs,
        _ => Vec::new(),
    };
    let bytes = knobs.iter().find_map(|knob| match knob.settings[..] {
        [Setting::DeviceMemory(bytes)] => Some(bytes),
        _ => None,
    });
    match bytes {
        Some(bytes) => Error::NeedsLargerDevice {
            error: Box::new(error),
            bytes,
        },
        None => error,
    }
}
