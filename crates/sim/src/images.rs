//! What is encoded when a step has rows of an image: by the definition, not as the scheduler has it.

use std::collections::HashSet;

use plimsoll_core::{PartialEncode, Run, RunInput, StepPlan};

type Hash = [u8; 32];

/// The images of the steps so far.
#[derive(Debug, Default)]
pub(crate) struct EncodedImages {
    /// Of which a part is encoded.
    begun: Option<Hash>,
    /// Those that are encoded and of which rows are kept, the latest last.
    kept: Vec<Hash>,
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
        if let Some((hash, share)) = encode {
            if self.begun != Some(hash) {
                // It takes the room of one of two.
                self.begun = Some(hash);
                self.kept.drain(..self.kept.len().saturating_sub(1));
            }
            if share == 1.0 {
                self.keep(hash);
            }
        }
        let Some(&hash) = rows.iter().next() else {
            return Ok(());
        };
        let generates = |run: &Run| matches!(run.input, RunInput::LastSampled);
        if spared && !self.kept.contains(&hash) && plan.runs.iter().any(generates) {
            return Err("requests that generate wait for a whole image".to_owned());
        }
        if !self.kept.contains(&hash) {
            // The memory of the encode was needed.
            self.begun = None;
        }
        self.keep(hash);
        Ok(())
    }

    fn keep(&mut self, hash: Hash) {
        self.begun = self.begun.filter(|begun| *begun != hash);
        self.kept.retain(|kept| *kept != hash);
        self.kept.push(hash);
        let room = 2 - usize::from(self.begun.is_some());
        self.kept.drain(..self.kept.len().saturating_sub(room));
    }
}
