//! Images in prompts: which tokens stand for them.

use std::borrow::Cow;
use std::sync::Arc;

use plimsoll_core::{Image, ImageSpan, TokenId};
use plimsoll_images::{ImageError, Markers, Overrides, Pixels, Plan, Processor};
use plimsoll_text::Tokenizer;

/// How a model takes images: its processor, and the tokens of its prompts.
#[derive(Debug)]
pub struct ImageInput {
    processor: Processor,
    /// The text that a chat template writes for an image, and what becomes of it.
    wrap: Option<(String, String)>,
    line_end: Option<TokenId>,
    last_line_end: Option<TokenId>,
}

/// An image of a prompt.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    pub(crate) plan: Plan,
    /// Absent where tokens are only counted.
    pub(crate) image: Option<Arc<Image>>,
}

impl ImageInput {
    /// For a processor and tokenizer of one model.
    ///
    /// # Errors
    /// A text that names the token which the tokenizer lacks.
    pub fn new(processor: Processor, tokenizer: &Tokenizer) -> Result<Self, String> {
        let text = |id: TokenId| {
            let text = tokenizer.token_str(id);
            match tokenizer.special_token(&text) == Some(id) {
                true => Ok(text),
                false => Err(format!(
                    "token {id}, which stands for images, is no special token of the tokenizer"
                )),
            }
        };
        let id = |name: Option<&str>| {
            let id = name.map(|name| {
                let id = tokenizer.special_token(name);
                id.ok_or_else(|| format!("the tokenizer has no token {name}, which prompts with images need"))
            });
            id.transpose()
        };
        let markers = processor.markers();
        let placeholder = text(markers.placeholder)?;
        let wrap = match (markers.written, markers.wrap) {
            (Some(written), Some(wrap)) => {
                let (written, end, around) = (text(written)?, text(wrap.end)?, wrap.text);
                let whole = format!("{around}{written}{placeholder}{end}{around}");
                Some((written, whole))
            }
            _ => None,
        };
        Ok(Self {
            wrap,
            line_end: id(markers.line_end)?,
            last_line_end: id(markers.last_line_end)?,
            processor,
        })
    }

    /// What resizes images.
    pub fn processor(&self) -> &Processor {
        &self.processor
    }

    /// A rendered prompt with one placeholder for each image. Texts of messages are guarded, so only the template's own marks
    /// are found.
    pub(crate) fn with_placeholders<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match &self.wrap {
            Some((written, whole)) => text.replace(written, whole).into(),
            None => text.into(),
        }
    }

    /// A prompt of images and then a text, without what a chat template writes around either. Blocks its thread while it resizes
    /// images. Placeholders in the text become other tokens.
    ///
    /// # Errors
    /// Where the model's processor refuses an image.
    pub fn prompt(
        &self,
        pictures: &[Pixels],
        text: &[TokenId],
    ) -> Result<(Vec<TokenId>, Vec<ImageSpan>), ImageError> {
        let overrides = Overrides::default();
        let prepared = pictures.iter().map(|pixels| {
            Ok(Prepared {
                plan: self.processor.plan(pixels.width, pixels.height, &overrides)?,
                image: Some(Arc::new(self.processor.process(pixels, &overrides)?)),
            })
        });
        let prepared = prepared.collect::<Result<Vec<_>, ImageError>>()?;
        let Markers { placeholder, .. } = *self.processor.markers();
        let text = text.iter().map(|&token| match token == placeholder {
            true => token.checked_sub(1).unwrap_or(1),
            false => token,
        });
        let tokens: Vec<TokenId> = std::iter::repeat_n(placeholder, pictures.len())
            .chain(text)
            .collect();
        let prompt = self.expand(&tokens, &prepared);
        Ok(prompt.expect("a placeholder for each image"))
    }

    /// Replaces each placeholder by the tokens of its image, in order. `Err` has the number of placeholders, if it is another
    /// than that of the images.
    pub(crate) fn expand(
        &self,
        tokens: &[TokenId],
        images: &[Prepared],
    ) -> Result<(Vec<TokenId>, Vec<ImageSpan>), usize> {
        let Markers { placeholder, .. } = *self.processor.markers();
        let found = tokens.iter().filter(|&&token| token == placeholder).count();
        if found != images.len() {
            return Err(found);
        }
        let rows: usize = images.iter().map(|image| image.plan.rows).sum();
        let (mut expanded, mut spans) = (Vec::with_capacity(tokens.len() + rows), Vec::new());
        let mut images = images.iter();
        for &token in tokens {
            let image = match token == placeholder {
                true => images.next(),
                false => None,
            };
            let Some(Prepared { plan, image }) = image else {
                expanded.push(token);
                continue;
            };
            for line in 1..=plan.layout.lines {
                let len = plan.layout.per_line;
                let (start, first) = (expanded.len(), (line - 1) * len);
                expanded.resize(start + len, placeholder);
                spans.extend(image.clone().map(|image| ImageSpan {
                    start,
                    len,
                    first,
                    image,
                }));
                expanded.extend(match line == plan.layout.lines {
                    true => self.last_line_end,
                    false => self.line_end,
                });
            }
        }
        Ok((expanded, spans))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const PLACEHOLDER: TokenId = 256;

    /// Pixtral's, with squares of 4 x 4 pixels.
    fn in_lines() -> ImageInput {
        let settings =
            json!({ "image_processor_type": "PixtralImageProcessor", "size": { "longest_edge": 64 } });
        let config = json!({ "image_token_index": PLACEHOLDER, "vision_config": { "patch_size": 4 } });
        ImageInput {
            processor: Processor::new(&settings, &config).unwrap(),
            wrap: None,
            line_end: Some(7),
            last_line_end: Some(8),
        }
    }

    fn prepared(input: &ImageInput, width: usize, height: usize, fill: u8) -> Prepared {
        let pixels = plimsoll_images::Pixels {
            width,
            height,
            rgb: vec![fill; width * height * 3],
        };
        let overrides = Overrides::default();
        Prepared {
            plan: input.processor.plan(width, height, &overrides).unwrap(),
            image: Some(Arc::new(input.processor.process(&pixels, &overrides).unwrap())),
        }
    }

    #[test]
    fn spans_cover_rows_of_the_encoder_and_nothing_else() {
        let input = in_lines();
        let images = [prepared(&input, 12, 8, 1), prepared(&input, 4, 4, 2)];
        let (tokens, spans) = input
            .expand(&[1, PLACEHOLDER, 2, PLACEHOLDER, 3], &images)
            .unwrap();
        let p = PLACEHOLDER;
        assert_eq!(tokens, [1, p, p, p, 7, p, p, p, 8, 2, p, 8, 3]);
        let places: Vec<_> = spans
            .iter()
            .map(|span| (span.start, span.len, span.first))
            .collect();
        assert_eq!(places, [(1, 3, 0), (5, 3, 3), (10, 1, 0)]);
        let owners = [0, 0, 1].map(|i| images[i].image.clone().unwrap());
        assert!(
            spans
                .iter()
                .zip(owners)
                .all(|(span, owner)| Arc::ptr_eq(&span.image, &owner))
        );
        let pixels = |width, height| Pixels {
            width,
            height,
            rgb: vec![1; width * height * 3],
        };
        let (tokens, spans) = input.prompt(&[pixels(4, 4), pixels(8, 4)], &[1, p]).unwrap();
        assert_eq!(tokens, [p, 8, p, p, 8, 1, p - 1]);
        assert_eq!(spans.len(), 2);
        let error = input.prompt(&[pixels(65, 1)], &[1]).unwrap_err();
        assert!(matches!(error, ImageError::AspectRatio { .. }), "{error}");
        assert_eq!(input.expand(&[p, p, p], &images), Err(3));
        assert_eq!(input.expand(&[1], &images), Err(0));
    }

    #[test]
    fn a_tokenizer_without_the_tokens_is_refused() {
        let tokenizer = Tokenizer::bytes();
        let settings =
            json!({ "image_processor_type": "PixtralImageProcessor", "size": { "longest_edge": 64 } });
        let new = |id: TokenId| {
            let config = json!({ "image_token_index": id, "vision_config": { "patch_size": 4 } });
            ImageInput::new(Processor::new(&settings, &config).unwrap(), &tokenizer).unwrap_err()
        };
        assert!(new(65).contains("token 65"), "{}", new(65));
        assert!(new(PLACEHOLDER).contains("[IMG_BREAK]"), "{}", new(PLACEHOLDER));
    }
}
