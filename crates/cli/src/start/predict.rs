//! What a start would find, from the configuration of the model and the device alone.

use plimsoll_core::{Component, Oom, RefusedBy};
use plimsoll_profiler::{Footprint, Knob, Prediction, ProfileError, ProfileSpec, Setting};

use super::spec::{limits, profile_spec};
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
    let limits = limits(settings, device)?;
    let (facts, footprint) = device.footprint(limits.step)?;
    let total = footprint.idle().total;
    Ok((profile_spec(settings, device, limits, &facts, total), footprint))
}

/// `error` of a start, with the size of the device that is predicted to be enough where nothing could be measured, or where what was
/// measured is a part of the worst step, which bounds that size from above only.
pub(crate) fn with_enough_memory(
    settings: &EngineSettings,
    backend: &dyn Backend,
    mut error: Error,
) -> Error {
    if error.exit_code() == 4 {
        backend.log_neighbours();
    }
    let measured = error.diagnostic().map(|diagnostic| {
        let is_unmeasured = diagnostic.knobs.is_empty() && diagnostic.measured_peak.is_none();
        (is_unmeasured, device_memory(&diagnostic.knobs))
    });
    let bound = match measured {
        Some((true, _)) => None,
        Some((false, Some(bytes))) => Some(bytes),
        None if matches!(error, Error::WeightsDoNotFit(_)) => None,
        _ => return error,
    };
    let refused = outline(settings, backend)
        .ok()
        .and_then(|(spec, footprint)| plimsoll_profiler::predict(&spec, &*footprint).err());
    let Some(ProfileError::DoesNotFit(predicted)) = refused else {
        return error;
    };
    match (device_memory(&predicted.knobs), bound, &mut error) {
        (Some(bytes), None, _) => Error::NeedsLargerDevice {
            error: Box::new(error),
            bytes,
        },
        (Some(bytes), Some(bound), Error::Profile(ProfileError::DoesNotFit(diagnostic)))
            if bytes < bound - bound / 20 =>
        {
            let knob = Knob {
                settings: vec![Setting::DeviceMemory(bytes)],
                effect: "a larger budget, as predicted".to_owned(),
            };
            for knob in &mut diagnostic.knobs {
                if matches!(knob.settings[..], [Setting::DeviceMemory(_), ..]) {
                    knob.effect = "a larger budget, an upper bound".to_owned();
                }
            }
            diagnostic.knobs.insert(0, knob);
            error
        }
        _ => error,
    }
}

/// The larger device among what is advised.
fn device_memory(knobs: &[Knob]) -> Option<u64> {
    knobs.iter().find_map(|knob| match knob.settings[..] {
        [Setting::DeviceMemory(bytes)] => Some(bytes),
        _ => None,
    })
}
