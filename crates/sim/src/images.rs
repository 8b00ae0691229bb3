//! What is encoded when a step has rows of an image: by the definition, not as the scheduler has it.

use std::collections::HashSet;

use plimsoll_core::{PartialEncode, Run, RunInput, StepPlan};

type Hash = [u8; 32];

/// The images of the steps so far.
#[derive(Debug, Default)]
pub(crate) struct EncodedImages {
    /// Which was encoded last ahead of the steps that have rows of it, and how much of it.
    ahead: Option<(Hash, f64)>,
    /// Of which steps had rows.
    read: Vec<Hash>,
}

impl EncodedImages {
    /// Why a plan is not one: it has rows of one image at most, or encodes a part of one of which it has no rows. If readers are `spared`,
    /// a step in which requests generate finds its image encoded.
    pub(crate) fn check(&mut self, plan: &StepPlan, spared: bool) -> Result<(), String> {
        let rows = plan.runs.iter().flat_map(Run::image_rows);
        let rows: HashSet<Hash> = rows.map(|(span, _)| span.image.hash).collect();
        let encode = plan.encode.iter();
        let encode: Option<(Hash, f64)> = encode
            .map(|PartialEncode { image, share }| (image.hash, *share))
            .next();
        let images: HashSet<Hash> = rows.iter().copied().chain(encode.map(|(hash, _)| hash)).collect();
        if images.len() > 1 {
            return Err(format!("rows or parts of {} images in a step", images.len()));
        }
        if let Some((_, share)) = encode
            && !(share > 0.0 && (share == 1.0 || (share < 1.0 && rows.is_empty())))
        {
            return Err(format!("rows of an image of which {share} is encoded"));
        }
        self.ahead = encode.or(self.ahead);
        let Some(&hash) = rows.iter().next() else {
            return Ok(());
        };
        let generates = |run: &Run| matches!(run.input, RunInput::LastSampled);
        let is_encoded =
            self.ahead == Some((hash, 1.0)) || self.read.iter().rev().take(2).any(|read| *read == hash);
        if spared && !is_encoded && plan.runs.iter().any(generates) {
            return Err("requests that generate wait for a whole image".to_owned());
        }
        self.read.retain(|read| *read != hash);
        self.read.push(hash);
        Ok(())
    }
}
