use crate::{ImageGrid, ImageSpan, TokenId};

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
    /// Values of a patch.
    pub patch_values: usize,
    /// Rows and columns of patches that become one row of the encoder's output.
    pub merge: usize,
    /// The most that it is asked for.
    pub limits: EncoderLimits,
}

impl ImageInput {
    /// Rows that the encoder makes of an image of this grid; `None` where it takes none such.
    pub fn rows(&self, grid: ImageGrid) -> Option<usize> {
        let ImageGrid { height, width, .. } = grid;
        let whole = height.is_multiple_of(self.merge) && width.is_multiple_of(self.merge);
        let rows = grid.patches() / (self.merge * self.merge);
        (whole && rows > 0).then_some(rows)
    }

    /// Says what is wrong with the images of a prompt.
    pub(crate) fn check(&self, prompt: &[TokenId], images: &[ImageSpan]) -> Result<(), String> {
        let EncoderLimits {
            max_patches,
            max_images_per_prompt,
        } = self.limits;
        if images.len() > max_images_per_prompt {
            return Err(format!(
                "there are {} images, and this server takes at most {max_images_per_prompt} in a prompt",
                images.len()
            ));
        }
        let mut free = 0;
        for (index, ImageSpan { start, len, image }) in images.iter().enumerate() {
            let (grid, patches) = (image.grid, image.grid.patches());
            if patches > max_patches {
                return Err(format!(
                    "image {index} has {patches} patches, and this server takes at most {max_patches}"
                ));
            }
            if image.patches.len() != patches * self.patch_values || self.rows(grid) != Some(*len) {
                return Err(format!(
                    "image {index} of {grid:?} does not fill its {len} tokens"
                ));
            }
            let span = start.checked_add(*len).and_then(|end| prompt.get(*start..end));
            let is_free = |span: &[TokenId]| span.iter().all(|&token| token == self.placeholder);
            if *start < free || !span.is_some_and(is_free) {
                return Err(format!(
                    "image {index} is not at placeholders of its own (tokens {start} to {})",
                    start.saturating_add(*len)
                ));
            }
            free = start + len;
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
            patch_values: 3,
            merge: 2,
            limits: EncoderLimits {
                max_patches: 16,
                max_images_per_prompt: 2,
            },
        };
        let span = |start, len, height, width| ImageSpan {
            start,
            len,
            image: Arc::new(Image {
                hash: [0; 32],
                grid: ImageGrid {
                    frames: 1,
                    height,
                    width,
                },
                patches: vec![0.0; height * width * 3],
            }),
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
        assert_eq!(request(both, None).unwrap_err(), RequestError::NoImages);
        let mut short = span(4, 3, 6, 2);
        Arc::make_mut(&mut short.image).patches.pop();
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
