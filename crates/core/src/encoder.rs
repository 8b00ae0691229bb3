use crate::{ImageGrid, ImageSpan, PatchShape, TokenId};

/// The most that an encoder of images is asked for: requests beyond it are refused, and its memory is measured with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderLimits {
    /// Patches of one image.
    pub max_patches: usize,
    /// Images of one prompt; 0 for none.
    pub max_images_per_prompt: usize,
}

/// What images a model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageInput {
    /// Id of each token that stands for a row of an image.
    pub placeholder: TokenId,
    /// What a patch is.
    pub patch: PatchShape,
    /// Rows and columns of patches that become one row of the encoder's output.
    pub merge: usize,
    /// The one grid that it takes, where it does not take any.
    pub only: Option<ImageGrid>,
    /// Whether tokens of a span see each other in the decoder, those that follow included. The keys of all of them must be there
    /// then: no run ends inside a span.
    pub mutual: bool,
    /// The most that it is asked for.
    pub limits: EncoderLimits,
}

impl ImageInput {
    /// Rows that the encoder makes of an image of this grid; `None` where it takes none such.
    pub fn rows(&self, grid: ImageGrid) -> Option<usize> {
        let ImageGrid { height, width, .. } = grid;
        let whole = height.is_multiple_of(self.merge) && width.is_multiple_of(self.merge);
        let fits = self.only.is_none_or(|only| only == grid);
        let rows = grid.patches() / (self.merge * self.merge);
        (whole && fits && rows > 0).then_some(rows)
    }

    /// Tokens that one step must have room for, whatever else is in it, so that prompts with images go on.
    pub fn tokens_at_once(&self) -> usize {
        match self.mutual {
            true => self.limits.max_patches / (self.merge * self.merge),
            false => 1,
        }
    }

    /// Says what is wrong with the images of a prompt.
    pub(crate) fn check(&self, prompt: &[TokenId], images: &[ImageSpan]) -> Result<(), String> {
        let EncoderLimits {
            max_patches,
            max_images_per_prompt,
        } = self.limits;
        // Of each image the first of its spans.
        let count = images.iter().filter(|span| span.first == 0).count();
        if count > max_images_per_prompt {
            return Err(format!(
                "there are {count} images, and this server takes at most {max_images_per_prompt} in a prompt"
            ));
        }
        let (mut free, mut index, mut left) = (0, 0, 0);
        for (at, span) in images.iter().enumerate() {
            let (grid, patches) = (span.image.grid, span.image.grid.patches());
            if patches > max_patches {
                return Err(format!(
                    "image {index} has {patches} patches, and this server takes at most {max_patches}"
                ));
            }
            let rows = self.rows(grid).unwrap_or_default();
            // It begins an image, or goes on where the span before ended.
            let (goes_on, rest) = match left {
                0 => (true, rows),
                left => (images[at - 1].image.hash == span.image.hash, left),
            };
            let is_whole = span.image.pixels.len() == patches * self.patch.bytes();
            if !goes_on || !is_whole || span.first + rest != rows || !(1..=rest).contains(&span.len) {
                return Err(format!(
                    "image {index} of {grid:?} does not fill its {} tokens",
                    span.len
                ));
            }
            let tokens = span
                .start
                .checked_add(span.len)
                .and_then(|end| prompt.get(span.start..end));
            let is_free = |span: &[TokenId]| span.iter().all(|&token| token == self.placeholder);
            if span.start < free || !tokens.is_some_and(is_free) {
                return Err(format!(
                    "image {index} is not at placeholders of its own (tokens {} to {})",
                    span.start,
                    span.start.saturating_add(span.len)
                ));
            }
            free = span.end();
            left = rest - span.len;
            index += usize::from(left == 0);
        }
        if left > 0 {
            return Err(format!("{left} rows of image {index} have no tokens"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Image, Limits, Request, RequestError, RequestId, RequestOptions};

    #[test]
    fn images_lie_in_order_at_placeholders_and_fill_them() {
        let input = ImageInput {
            placeholder: 7,
            patch: PatchShape { pixels: 1, frames: 2 },
            merge: 2,
            only: None,
            mutual: false,
            limits: EncoderLimits {
                max_patches: 16,
                max_images_per_prompt: 2,
            },
        };
        let span = |start, len, height, width| ImageSpan {
            start,
            len,
            first: 0,
            image: Arc::new(Image::blank(
                [0; 32],
                ImageGrid {
                    frames: 1,
                    height,
                    width,
                },
                input.patch,
            )),
        };
        let request = |images: Vec<ImageSpan>, input: Option<ImageInput>| {
            let options = RequestOptions {
                prompt: vec![1, 7, 7, 1, 7, 7, 7],
                images,
                ..Default::default()
            };
            let limits = Limits {
                images: input,
                max_model_len: 16,
                kv_capacity_tokens: 12,
                vocab_size: 10,
            };
            Request::new(RequestId(0), options, &limits)
        };
        let both = vec![span(1, 2, 2, 4), span(4, 3, 6, 2)];
        let found = request(both.clone(), Some(input)).unwrap();
        assert_eq!(found.images().unwrap()[..], both[..]);
        assert!(request(Vec::new(), None).unwrap().images().is_none());
        assert_eq!(request(both.clone(), None).unwrap_err(), RequestError::NoImages);
        // In two lines, with another token between them.
        let line = |start, len, first| ImageSpan {
            first,
            ..span(start, len, 4, 4)
        };
        let lines = |first: [usize; 2]| vec![line(1, 2, first[0]), line(4, 2, first[1])];
        let only = ImageInput {
            only: Some(both[0].image.grid),
            ..input
        };
        request(lines([0, 2]), Some(input)).unwrap();
        for (images, input) in [
            (lines([0, 1]), input),
            (lines([2, 0]), input),
            (lines([0, 0]), input),
            (vec![line(1, 2, 2)], input),
            (both.clone(), only),
        ] {
            let error = request(images, Some(input)).unwrap_err().to_string();
            assert!(error.contains("does not fill"), "{error}");
        }
        let error = request(vec![line(1, 2, 0)], Some(input)).unwrap_err().to_string();
        assert!(error.contains("2 rows of image 0 have no tokens"), "{error}");
        let mut short = span(4, 3, 6, 2);
        Arc::make_mut(&mut short.image).pixels.pop();
        for (images, said) in [
            (
                vec![span(4, 3, 6, 2), span(1, 2, 2, 4)],
                "image 1 is not at placeholders",
            ),
            (
                vec![span(4, 2, 2, 4), span(5, 2, 2, 4)],
                "image 1 is not at placeholders",
            ),
            (vec![span(2, 2, 2, 4)], "image 0 is not at placeholders"),
            (vec![span(6, 2, 2, 4)], "image 0 is not at placeholders"),
            (vec![span(usize::MAX, 2, 2, 4)], "image 0 is not at placeholders"),
            (vec![span(1, 2, 2, 2)], "does not fill its 2 tokens"),
            (vec![span(1, 2, 1, 8)], "does not fill its 2 tokens"),
            (vec![short], "does not fill its 3 tokens"),
            (
                vec![span(1, 5, 10, 2)],
                "has 20 patches, and this server takes at most 16",
            ),
            (vec![span(1, 1, 2, 2); 3], "at most 2 in a prompt"),
        ] {
            let error = request(images, Some(input)).unwrap_err();
            assert!(matches!(error, RequestError::Images(_)), "{error:?}");
            assert!(error.to_string().contains(said), "{error} is not {said}");
        }
    }
}
