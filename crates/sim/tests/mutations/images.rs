//! Bugs in what is known of images.

use super::list::{Mutation, bug, edit};

const JOURNAL: &str = "kv/prefix/journal.rs";
const PREFIX: &str = "kv/prefix.rs";
const IMAGES: &str = "scheduler/scheduler/images.rs";
const ROOM: &str = "scheduler/scheduler/room.rs";
const SEQUENCE: &str = "scheduler/sequence.rs";

pub(crate) const IMAGE_MUTATIONS: [Mutation; 9] = [
    bug(
        "different images share KV",
        &[
            edit(PREFIX, "&& «*self.images[id.index()] == *content.images»", "true"),
            edit(
                PREFIX,
                "let seed =\n            «(content.images.iter()).fold(self.seed, |seed, image| xxh3_64_with_seed(&image.hash, seed))»;",
                "self.seed",
            ),
        ],
    ),
    bug(
        "a prefix is looked up without its images",
        &[edit(SEQUENCE, "images: «self.request.images()»,", "None")],
    ),
    bug(
        "a run does not say which images its prompt has",
        &[edit(
            SEQUENCE,
            "images: «self.sequence.request.images().cloned()»,",
            "None",
        )],
    ),
    bug(
        "a step has rows of two images",
        &[edit(
            IMAGES,
            "return «hash == image.hash» && !self.is_put_off();",
            "true",
        )],
    ),
    bug(
        "a step has rows of an image of which it encodes a part",
        &[edit(IMAGES, "});\n        «share >= 1.0»", "true")],
    ),
    bug(
        "requests that generate wait for a whole image",
        &[edit(
            ROOM,
            "StepImage::none(self.images, «encode»)",
            "encode.filter(|_| false)",
        )],
    ),
    bug(
        "an image is taken for encoded because another one is",
        &[edit(
            IMAGES,
            "_ if «self.kept.contains(&Some(*hash))»",
            "self.kept[0].is_some()",
        )],
    ),
    bug(
        "a run ends among tokens that see each other",
        &[edit(ROOM, "«request.has_mutual_spans()»", "false")],
    ),
    bug(
        "a router takes the images of a block for those of another",
        &[edit(
            JOURNAL,
            "images.extend(held.images.iter().map(|&image| («blocks.len()», image)));",
            "0",
        )],
    ),
];
