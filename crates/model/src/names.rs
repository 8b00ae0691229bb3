//! What checkpoints put in front of the names of tensors and modules. Ours are those of a network of text with a head.

/// In front of all names but the head's.
const PREFIX: &str = "model.";

/// In front of the names of an encoder of images.
pub(crate) const TOWER: &str = "visual.";
/// The same of one that was a model by itself.
pub(crate) const VISION_TOWER: &str = "vision_tower.";
/// The same of SigLIP.
pub(crate) const SIGLIP: &str = "vision_tower.vision_model.";
/// In front of the names of what is between such a one and the network of text.
pub(crate) const PROJECTOR: &str = "multi_modal_projector.";
/// All of these, but for parts of others.
pub(crate) const TOWERS: [&str; 3] = [TOWER, VISION_TOWER, PROJECTOR];

/// The matrix of a classifier's head.
pub(crate) const CLASSIFIER: &str = "score.weight";

/// In front of the network of text in models of images and text.
const LANGUAGE_MODEL: &str = "model.language_model.";

/// What stands in place of `model.`, and what in front of the names that have none.
pub(crate) type Prefixes = (&'static str, &'static str);

/// As we have it.
pub(crate) const OWN: Prefixes = (PREFIX, "");

/// In a network without a head, and in models of images and text as newer and as older versions of transformers save them.
pub(crate) const OTHERS: [Prefixes; 3] = [
    ("", ""),
    (LANGUAGE_MODEL, ""),
    ("language_model.model.", "language_model."),
];

/// A name under other prefixes.
pub(crate) fn stored(name: &str, (model, head): Prefixes) -> String {
    if TOWERS.iter().any(|tower| name.starts_with(tower)) {
        // What encodes images stands beside the network of text.
        let beside = if model == LANGUAGE_MODEL { PREFIX } else { "" };
        return format!("{beside}{name}");
    }
    match name.strip_prefix(PREFIX) {
        Some(name) => format!("{model}{name}"),
        None => format!("{head}{name}"),
    }
}

/// The same name as newer versions of transformers store it, where that is another: SigLIP has one module less.
pub(crate) fn newer(stored: &str) -> Option<String> {
    stored
        .contains(SIGLIP)
        .then(|| stored.replacen(SIGLIP, VISION_TOWER, 1))
}
