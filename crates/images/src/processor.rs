use std::sync::Arc;

use plimsoll_core::{Image, Levels, PatchShape, TokenId};
use serde_json::Value;

use crate::config::Fields;
use crate::decode::Pixels;
use crate::error::{ImageError, ProcessorError};
use crate::families::Rule;
use crate::patches::{self, Cut};
use crate::plan::{Overrides, Plan, Worst};
use crate::resize::{Filter, resize};
use crate::worst::worst;

/// How one model's images are prepared, and where they stand in its prompts.
#[derive(Clone, Debug, PartialEq)]
pub struct Processor {
    rule: Rule,
    cut: Cut,
    filter: Filter,
    levels: Arc<Levels>,
    worst: Worst,
    markers: Markers,
}

/// Tokens and texts by which a prompt holds images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Markers {
    /// The token of which each row of an image takes one.
    pub placeholder: TokenId,
    /// The token that the chat template writes once for an image, where that is not the placeholder.
    pub written: Option<TokenId>,
    /// Around a `written` token: what replaces it is `before`, its own text, one placeholder, `after`'s text, `behind`.
    pub wrap: Option<Wrap>,
    /// The special token between two lines of an image.
    pub line_end: Option<&'static str>,
    /// The special token behind its last line.
    pub last_line_end: Option<&'static str>,
}

/// What stands around the placeholders of an image beside the token that the template writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrap {
    /// Text before the written token and behind the last.
    pub text: &'static str,
    /// The token behind the placeholders.
    pub end: TokenId,
}

/// Most pixels of a side or a bound, so that products stay far below an overflow.
const MAX_SIDE: usize = 1 << 16;
const MAX_AREA: usize = 1 << 30;
const MAX_PATCH: usize = 256;
const MAX_MERGE: usize = 16;

pub(crate) const CONFIG: &str = "config.json";
const PREPROCESSOR: &str = "preprocessor_config.json";

/// OpenAI's CLIP, the default of Qwen and Pixtral.
const CLIP: ([f32; 3], [f32; 3]) = (
    [0.481_454_66, 0.457_827_5, 0.408_210_73],
    [0.268_629_54, 0.261_302_6, 0.275_777_1],
);

/// The worst picture, with the bytes of its patches.
fn largest(rule: Rule, cut: Cut) -> Option<Worst> {
    let worst = worst(rule)?;
    Some(Worst {
        plan: sized(worst.plan, cut),
        ..worst
    })
}

impl Processor {
    /// Of a model's files: `preprocessor_config.json`, or `image_processor` of `processor_config.json`, and `config.json`.
    ///
    /// # Errors
    /// [`ProcessorError`] for an unknown processor, for a field that is unknown or out of range, and where the files contradict
    /// each other.
    pub fn new(preprocessor: &Value, config: &Value) -> Result<Self, ProcessorError> {
        let mut fields = Fields::new(PREPROCESSOR, preprocessor)?;
        let mut model = Fields::new(CONFIG, config)?;
        let mut vision = match model.object("vision_config")? {
            Some(vision) => vision,
            None => return Err(model.wrong("`vision_config` is missing")),
        };
        let name = fields.text("image_processor_type")?;
        let name = match name {
            Some(name) => name,
            // Older files name the class so.
            None => match fields.text("feature_extractor_type")? {
                Some(name) => name,
                None => return Err(fields.wrong("`image_processor_type` is missing")),
            },
        };
        let family = name.strip_suffix("Fast").unwrap_or(&name);
        let common = Common::read(&mut fields, family)?;
        let (rule, frames, markers) = match family {
            "Qwen2VLImageProcessor" => qwen(&mut fields, &mut vision, &mut model)?,
            "Gemma3ImageProcessor" => gemma(&mut fields, &mut vision, &mut model)?,
            "PixtralImageProcessor" => pixtral(&mut fields, &mut vision, &mut model)?,
            _ => {
                return Err(fields.wrong(format!(
                    "the image processor `{name}` is not supported; supported are Qwen2VLImageProcessor, \
                     Gemma3ImageProcessor and PixtralImageProcessor"
                )));
            }
        };
        let wrong = fields.wrong("no picture can be resized by these settings");
        fields.finish()?;
        let cut = Cut {
            patch: rule.patch(),
            merge: rule.merge(),
            frames,
        };
        Ok(Self {
            rule,
            cut,
            filter: common.filter,
            levels: Arc::new(patches::levels(common.mean, common.std, common.scale)),
            worst: largest(rule, cut).ok_or(wrong)?,
            markers,
        })
    }

    /// The same for pictures of at most so many pixels after resizing, where the processor resizes to an area; fewer than the
    /// processor's own.
    ///
    /// # Errors
    /// Where no picture is so small.
    pub fn bounded(self, max_pixels: usize) -> Result<Self, ProcessorError> {
        let rule = self.rule.bounded(max_pixels);
        let worst = largest(rule, self.cut).ok_or_else(|| ProcessorError {
            file: PREPROCESSOR,
            message: format!("`max_pixels` of {max_pixels} leaves no picture"),
        })?;
        Ok(Self { rule, worst, ..self })
    }

    /// What becomes of a picture of this size: cheap, and all that is needed to count the tokens of a prompt.
    ///
    /// # Errors
    /// [`ImageError`] where the processor refuses the size, or `overrides` are out of range.
    pub fn plan(&self, width: usize, height: usize, overrides: &Overrides) -> Result<Plan, ImageError> {
        if width == 0 || height == 0 {
            return Err(ImageError::AspectRatio {
                width,
                height,
                most: 1,
            });
        }
        let plan = self.rule.plan(width, height, overrides)?;
        let (patches, most) = (plan.grid.patches(), self.worst.plan.grid.patches());
        match patches > most {
            true => Err(ImageError::TooManyPatches { patches, most }),
            false => Ok(sized(plan, self.cut)),
        }
    }

    /// Resizes a picture and cuts it into patches. Takes long.
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn process(&self, pixels: &Pixels, overrides: &Overrides) -> Result<Image, ImageError> {
        let plan = self.plan(pixels.width, pixels.height, overrides)?;
        let resized;
        let pixels = match (pixels.width, pixels.height) == (plan.width, plan.height) {
            true => pixels,
            false => {
                resized = resize(pixels, plan.width, plan.height, self.filter);
                &resized
            }
        };
        let patches = patches::patches(pixels, plan.grid, self.cut);
        Ok(patches::image(plan.grid, patches, Arc::clone(&self.levels)))
    }

    /// The picture of which the encoder needs the most memory: none that is admitted has more patches or rows.
    pub fn worst_image(&self) -> &Worst {
        &self.worst
    }

    /// What a patch is.
    pub fn patch(&self) -> PatchShape {
        self.cut.shape()
    }

    /// How prompts hold images.
    pub fn markers(&self) -> &Markers {
        &self.markers
    }
}

fn sized(plan: Plan, cut: Cut) -> Plan {
    Plan {
        pixel_bytes: plan.grid.patches() * cut.shape().bytes(),
        ..plan
    }
}

/// What all processors have.
struct Common {
    filter: Filter,
    mean: [f32; 3],
    std: [f32; 3],
    scale: f64,
}

impl Common {
    fn read(fields: &mut Fields, family: &str) -> Result<Self, ProcessorError> {
        for name in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
            fields.only(name, true)?;
        }
        fields.only("do_center_crop", false)?;
        fields.ignore(&[
            "processor_class",
            "feature_extractor_type",
            "data_format",
            "input_data_format",
            "default_to_square",
            "return_tensors",
            "disable_grouping",
            "device",
            "do_pad",
            "pad_size",
            "crop_size",
        ]);
        let siglip = family == "Gemma3ImageProcessor";
        let (mean, std) = if siglip { ([0.5; 3], [0.5; 3]) } else { CLIP };
        // Pillow's numbers.
        let filter = match (fields.number("resample")?, siglip) {
            (Some(2.0), _) | (None, true) => Filter::Bilinear,
            (Some(3.0), _) | (None, false) => Filter::Bicubic,
            (Some(other), _) => {
                return Err(fields.wrong(format!(
                    "`resample` = {other} is not supported, only 2 (bilinear) and 3 (bicubic) are"
                )));
            }
        };
        let std = fields.colours("image_std")?.unwrap_or(std);
        let scale = fields.number("rescale_factor")?.unwrap_or(1.0 / 255.0);
        if std.contains(&0.0) || scale <= 0.0 {
            return Err(fields.wrong("`image_std` and `rescale_factor` must not be 0"));
        }
        Ok(Self {
            filter,
            mean: fields.colours("image_mean")?.unwrap_or(mean),
            std,
            scale,
        })
    }
}

/// A setting that both files have, which must agree.
fn agreed(
    fields: &mut Fields,
    model: &mut Fields,
    (name, in_model): (&str, &str),
    most: usize,
    default: usize,
) -> Result<usize, ProcessorError> {
    let (here, there) = (fields.count(name, most)?, model.count(in_model, most)?);
    match (here, there) {
        (Some(a), Some(b)) if a != b => {
            Err(fields.wrong(format!("`{name}` = {a}, but config.json has `{in_model}` = {b}")))
        }
        (a, b) => Ok(a.or(b).unwrap_or(default)),
    }
}

fn token(model: &mut Fields, names: [&str; 2]) -> Result<TokenId, ProcessorError> {
    let read = |model: &mut Fields, name| {
        let token = model.take(name).and_then(|id| id.as_u64());
        token.and_then(|id| TokenId::try_from(id).ok())
    };
    let token = read(model, names[0]).or_else(|| read(model, names[1]));
    token.ok_or_else(|| model.wrong(format!("`{}` or `{}` must be a token", names[0], names[1])))
}

type Family = (Rule, usize, Markers);

fn qwen(fields: &mut Fields, vision: &mut Fields, model: &mut Fields) -> Result<Family, ProcessorError> {
    let patch = agreed(fields, vision, ("patch_size", "patch_size"), MAX_PATCH, 14)?;
    let merge = agreed(fields, vision, ("merge_size", "spatial_merge_size"), MAX_MERGE, 2)?;
    let frames = agreed(
        fields,
        vision,
        ("temporal_patch_size", "temporal_patch_size"),
        16,
        2,
    )?;
    let (least, most) = (
        fields.count("min_pixels", MAX_AREA)?,
        fields.count("max_pixels", MAX_AREA)?,
    );
    let mut bounds = (None, None);
    if let Some(mut size) = fields.object("size")? {
        bounds = (
            size.count("shortest_edge", MAX_AREA)?,
            size.count("longest_edge", MAX_AREA)?,
        );
        // Repeats the fields of these names beside it.
        if least.is_some() && most.is_some() {
            size.ignore(&["min_pixels", "max_pixels"]);
        }
        size.finish()?;
    }
    let min_pixels = least.or(bounds.0).unwrap_or(56 * 56);
    let max_pixels = most.or(bounds.1).unwrap_or(28 * 28 * 1280);
    if min_pixels > max_pixels || max_pixels < (patch * merge).pow(2) {
        return Err(fields.wrong(format!(
            "images of {min_pixels} to {max_pixels} pixels are not possible with squares of {} pixels",
            patch * merge
        )));
    }
    let rule = Rule::Area {
        patch,
        merge,
        min_pixels,
        max_pixels,
    };
    let markers = Markers {
        placeholder: token(model, ["image_token_id", "image_token_index"])?,
        written: None,
        wrap: None,
        line_end: None,
        last_line_end: None,
    };
    Ok((rule, frames, markers))
}

fn gemma(fields: &mut Fields, vision: &mut Fields, model: &mut Fields) -> Result<Family, ProcessorError> {
    fields.only("do_pan_and_scan", false)?;
    fields.ignore(&[
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    ]);
    let Some(mut size) = fields.object("size")? else {
        return Err(fields.wrong("`size` is missing"));
    };
    let (height, width) = (size.needed("height", MAX_SIDE)?, size.needed("width", MAX_SIDE)?);
    size.finish()?;
    let pixels = vision.needed("image_size", MAX_SIDE)?;
    if (height, width) != (pixels, pixels) {
        return Err(fields.wrong(format!(
            "`size` is {width} x {height}, but config.json has `vision_config.image_size` = {pixels}"
        )));
    }
    let patch = vision.needed("patch_size", MAX_PATCH)?;
    let rows = agreed(
        fields,
        model,
        ("image_seq_length", "mm_tokens_per_image"),
        MAX_SIDE,
        256,
    )?;
    let side = rows.isqrt();
    if side * side != rows || !pixels.is_multiple_of(patch) || !(pixels / patch).is_multiple_of(side) {
        return Err(fields.wrong(format!(
            "{rows} tokens for each image are not a square that divides {pixels} pixels in patches of {patch}"
        )));
    }
    let markers = Markers {
        placeholder: token(model, ["image_token_id", "image_token_index"])?,
        written: Some(token(model, ["boi_token_id", "boi_token_index"])?),
        wrap: Some(Wrap {
            text: "\n\n",
            end: token(model, ["eoi_token_id", "eoi_token_index"])?,
        }),
        line_end: None,
        last_line_end: None,
    };
    Ok((Rule::Square { pixels, patch, side }, 1, markers))
}

fn pixtral(fields: &mut Fields, vision: &mut Fields, model: &mut Fields) -> Result<Family, ProcessorError> {
    let Some(mut size) = fields.object("size")? else {
        return Err(fields.wrong("`size` is missing"));
    };
    let longest = size.needed("longest_edge", MAX_SIDE)?;
    size.finish()?;
    let patch = vision.needed("patch_size", MAX_PATCH)?;
    let merge = model.count("spatial_merge_size", MAX_MERGE)?.unwrap_or(1);
    // The reference takes those of config.json, too; the file may have them merged or not.
    if let Some(found) = fields.take("patch_size") {
        let fits = |side: &Value| [patch, patch * merge].iter().any(|&size| *side == size);
        let square = fits(&found["height"]) && found["height"] == found["width"];
        if !(square || fits(&found)) {
            return Err(fields.wrong(format!(
                "`patch_size` = {found}, but config.json has `vision_config.patch_size` = {patch}"
            )));
        }
    }
    let most = vision.count("image_size", MAX_SIDE)?;
    if let Some(most) = most.filter(|&most| longest.div_ceil(patch * merge) * merge > most / patch) {
        return Err(fields.wrong(format!(
            "`size.longest_edge` = {longest} is more than config.json's `vision_config.image_size` = {most}"
        )));
    }
    let markers = Markers {
        placeholder: token(model, ["image_token_index", "image_token_id"])?,
        written: None,
        wrap: None,
        line_end: Some("[IMG_BREAK]"),
        last_line_end: Some("[IMG_END]"),
    };
    let rule = Rule::Edge {
        patch,
        merge,
        longest,
    };
    Ok((rule, 1, markers))
}
