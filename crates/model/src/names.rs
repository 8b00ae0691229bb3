//! What checkpoints put in front of the names of tensors and modules. Ours are those of a network of text with a head.

/// In front of all names but the head's.
const PREFIX: &str = "model.";

/// In front of the names of an encoder of images.
pub(crate) const TOWER: &str = "visual.";

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
    if let Some(name) = name.strip_prefix(TOWER) {
        // What encodes images stands beside the network of text.
        let beside = if model == LANGUAGE_MODEL { PREFIX } else { "" };
        return format!("{beside}{TOWER}{name}");
    }
    match name.strip_prefix(PREFIX) {
        Some(name) => format!("{model}{name}"),
        None => format!("{head}{name}"),
    }
}
