use std::collections::BTreeSet;
use std::fmt;

use plimsoll_core::{SamplingParams, StepPlan};

/// Summary of a step for logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// Requests in the step.
    pub rows: usize,
    /// Tokens it computed.
    pub tokens: usize,
    /// Longest context: tokens of one request, those before the step included.
    pub longest_context: usize,
    /// Patches of the image that it encodes a part of, or of which it has rows; 0 without one.
    pub image_patches: usize,
    /// Kinds of sampling, sorted: `greedy`, `random`, `top`, `penalties`, `bias`, `logprobs`, `mask`; and `prompt_logprobs`.
    pub sampling: BTreeSet<&'static str>,
}

impl From<&StepPlan> for StepShape {
    fn from(plan: &StepPlan) -> Self {
        let specs = plan.runs.iter().filter_map(|run| run.sample.as_ref());
        Self {
            rows: plan.runs.len(),
            tokens: plan.num_tokens(),
            longest_context: plan.runs.iter().map(|run| run.end()).max().unwrap_or(0),
            image_patches: image_patches(plan),
            sampling: specs
                .flat_map(|spec| kinds(&spec.params).chain(spec.constrained.then_some("mask")))
                .chain((plan.num_scored() > 0).then_some("prompt_logprobs"))
                .collect(),
        }
    }
}

/// Patches of the image of a step, of which there is one at most.
pub(crate) fn image_patches(plan: &StepPlan) -> usize {
    let encoded = plan.encode.iter().map(|encode| &encode.image);
    let read = plan.runs.iter().flat_map(|run| run.image_rows());
    let mut images = encoded.chain(read.map(|(span, _)| &span.image));
    images.next().map_or(0, |image| image.grid.patches())
}

fn kinds(params: &SamplingParams) -> impl Iterator<Item = &'static str> {
    // `top_k` is the vocabulary's size where it is off, which only the model knows.
    let top = params.top_p() < 1.0 || params.min_p() > 0.0;
    [
        (params.is_greedy(), "greedy"),
        (!params.is_greedy(), "random"),
        (!params.is_greedy() && top, "top"),
        (params.needs_history(), "penalties"),
        (!params.logit_bias().is_empty(), "bias"),
        (params.logprobs().is_some(), "logprobs"),
    ]
    .into_iter()
    .filter_map(|(is, kind)| is.then_some(kind))
}

impl fmt::Display for StepShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sampling: Vec<_> = self.sampling.iter().copied().collect();
        let (rows, tokens, sampling) = (self.rows, self.tokens, sampling.join("+"));
        let (longest_context, image_patches) = (self.longest_context, self.image_patches);
        write!(
            f,
            "rows={rows} tokens={tokens} longest_context={longest_context} image_patches={image_patches} sampling={sampling}"
        )
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use plimsoll_core::{
        Image, ImageGrid, ImageSpan, PartialEncode, PatchShape, RequestId, Run, RunInput, SampleSpec,
        SamplingOptions,
    };

    use super::*;

    fn run(start: usize, tokens: usize, sampling: Option<SamplingOptions>) -> Run {
        let sample = sampling.map(|options| SampleSpec {
            params: SamplingParams::new(&options, 100).unwrap().into(),
            seed: 0,
            index: 0,
            history: Vec::new(),
            prompt_len: 1,
            constrained: false,
        });
        Run {
            request: RequestId(0),
            start,
            input: RunInput::Known(vec![1; tokens]),
            images: None,
            tables: Vec::new(),
            state: None,
            sample,
            score: None,
            pool: None,
        }
    }

    #[test]
    fn a_shape_names_everything_that_takes_memory() {
        let greedy = SamplingOptions {
            temperature: Some(0.0),
            presence_penalty: Some(1.0),
            ..Default::default()
        };
        let random = SamplingOptions {
            top_p: Some(0.5),
            logprobs: Some(3),
            ..Default::default()
        };
        let grid = ImageGrid {
            frames: 1,
            height: 3,
            width: 4,
        };
        let patch = PatchShape { pixels: 1, frames: 1 };
        let image = Arc::new(Image::blank([1; 32], grid, patch));
        let span = ImageSpan {
            start: 3,
            len: 12,
            first: 0,
            image: Arc::clone(&image),
        };
        let plan = StepPlan {
            step: 0,
            runs: vec![
                run(500, 1, Some(greedy)),
                run(0, 30, Some(random)),
                run(7, 2, None),
            ],
            encode: Some(PartialEncode { image, share: 0.5 }),
        };
        assert_eq!(
            StepShape::from(&plan).to_string(),
            "rows=3 tokens=33 longest_context=501 image_patches=12 sampling=greedy+logprobs+penalties+random+top"
        );
        let read = StepPlan {
            runs: vec![Run {
                images: Some([span].into()),
                ..run(0, 30, None)
            }],
            ..StepPlan::default()
        };
        assert_eq!(StepShape::from(&read).image_patches, 12);
        assert_eq!(
            StepShape::from(&StepPlan::default()).to_string(),
            "rows=0 tokens=0 longest_context=0 image_patches=0 sampling="
        );
    }
}
