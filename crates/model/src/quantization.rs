//! Which matrices are stored in few bits, and how.

mod gguf;
mod int4;

use std::fmt;

use plimsoll_core::untrusted::quotable;
use plimsoll_kernels::{GgufFormat, WeightType};
use regex::{RegexSet, RegexSetBuilder};

use crate::names;

pub(crate) use gguf::GgufTypes;
pub(crate) use int4::INT4_WORD;
pub use int4::{Int4Format, Int4Groups, Int4Packing};

/// Outputs and inputs that share a scale of [`Fp8Scales::Block`].
pub const FP8_BLOCK: usize = 128;

/// Inputs that share a scale of [`MatrixFormat::Mxfp4`].
pub const MXFP4_BLOCK: usize = 32;

/// The module of the table of tokens.
pub(crate) const EMBEDDING: &str = "model.embed_tokens";

/// How a matrix `[outputs, inputs]` is stored, and kept on a device that computes in its format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatrixFormat {
    /// In a float type.
    #[default]
    Plain,
    /// In a block type of GGUF's.
    Gguf(WeightType),
    /// Stored as `e4m3` bytes and scales: an element is byte × scale.
    Fp8 {
        /// What has a scale of its own.
        scales: Fp8Scales,
        /// A scale of the inputs is stored beside it. It is checked and not needed: inputs are quantised with a scale for
        /// each token, which is at least as accurate.
        input_scale: bool,
    },
    /// Of an expert, in four bits, `e2m1`, with a power of two for each [`MXFP4_BLOCK`] inputs.
    Mxfp4,
    /// Stored as integers of four bits, with scales and zeros.
    Int4(Int4Format),
    /// Stored as [`Self::Plain`], kept as `e4m3` bytes with a scale for each output (`--quantization fp8`).
    ToFp8,
}

/// What has a scale of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Scales {
    /// The matrix.
    Tensor,
    /// Each output.
    Channel,
    /// Each block of [`FP8_BLOCK`] outputs by as many inputs; the last ones may be smaller.
    Block,
}

impl MatrixFormat {
    fn name(self) -> Option<&'static str> {
        Some(match self {
            Self::Plain => return None,
            Self::Gguf(dtype) => dtype.name(),
            Self::Mxfp4 => "mxfp4",
            Self::Int4(format) => format.name(),
            Self::Fp8 {
                scales: Fp8Scales::Tensor,
                ..
            } => "fp8-tensor",
            Self::Fp8 {
                scales: Fp8Scales::Channel,
                ..
            }
            | Self::ToFp8 => "fp8-channel",
            Self::Fp8 {
                scales: Fp8Scales::Block,
                ..
            } => "fp8-block",
        })
    }

    /// What has a scale of its own where the matrix is kept in eight bits. A matrix with one scale is kept with the same for
    /// all outputs, as it may be stacked with others.
    pub fn kept_scales(self) -> Option<Fp8Scales> {
        match self {
            Self::Plain | Self::Gguf(_) | Self::Mxfp4 | Self::Int4(_) => None,
            Self::Fp8 {
                scales: Fp8Scales::Block,
                ..
            } => Some(Fp8Scales::Block),
            Self::Fp8 { .. } | Self::ToFp8 => Some(Fp8Scales::Channel),
        }
    }

    /// The block type in which a GPU can keep the matrix.
    pub(crate) fn gguf(self) -> Option<GgufFormat> {
        match self {
            Self::Gguf(dtype) => GgufFormat::of(dtype),
            _ => None,
        }
    }

    /// Each matrix is stored by itself, whatever the others are in.
    pub(crate) fn may_be_mixed(self) -> bool {
        matches!(self, Self::Plain | Self::Gguf(_))
    }
}

impl Fp8Scales {
    /// Rows and columns of the scales of a matrix.
    pub fn shape(self, outputs: usize, inputs: usize) -> [usize; 2] {
        match self {
            Self::Tensor => [1, 1],
            Self::Channel => [outputs, 1],
            Self::Block => [outputs.div_ceil(FP8_BLOCK), inputs.div_ceil(FP8_BLOCK)],
        }
    }
}

impl fmt::Display for Fp8Scales {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor => f.write_str("a scale per tensor"),
            Self::Channel => f.write_str("a scale per output"),
            Self::Block => write!(f, "a scale per {FP8_BLOCK} x {FP8_BLOCK}"),
        }
    }
}

impl fmt::Display for MatrixFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain => f.write_str("floats"),
            Self::Gguf(dtype) => f.write_str(dtype.name()),
            Self::Mxfp4 => f.write_str("MXFP4"),
            Self::Int4(format) => write!(f, "{format}"),
            Self::Fp8 { scales, .. } => write!(f, "FP8 with {scales}"),
            Self::ToFp8 => f.write_str("FP8, quantised at load,"),
        }
    }
}

/// What the matrices of linear layers that are stored in floats become at load (`--quantization`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnlineQuantization {
    /// [`MatrixFormat::ToFp8`].
    Fp8,
}

/// How the matrices of a model are stored, by the names of their modules.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quantization {
    /// The first that matches decides; the others are plain.
    pub(crate) groups: Vec<QuantizationGroup>,
    /// Modules that are plain although they match.
    pub(crate) ignored: ModuleNames,
    /// Layers hold scales of keys and values: checked, and used by a KV cache in eight bits alone.
    pub(crate) kv_scales: bool,
    /// Of a GGUF file, which has no groups.
    pub(crate) gguf: GgufTypes,
}

/// Modules of one format.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct QuantizationGroup {
    pub(crate) modules: ModuleNames,
    pub(crate) format: MatrixFormat,
}

impl Quantization {
    /// Every linear layer of the decoder is stored in floats and kept in eight bits; the head is no part of it, and what chooses
    /// experts is small and stays exact.
    pub(crate) fn to_fp8() -> Self {
        Self {
            groups: vec![QuantizationGroup {
                modules: ModuleNames::All,
                format: MatrixFormat::ToFp8,
            }],
            ignored: ModuleNames::named(
                &["lm_head", r"re:.*\.(?:gate|router|shared_expert_gate)$"].map(str::to_owned),
            )
            .expect("a name and an expression"),
            ..Self::default()
        }
    }

    /// That of a GGUF file.
    pub(crate) fn of_gguf(types: GgufTypes) -> Self {
        Self {
            gguf: types,
            ..Self::default()
        }
    }

    /// Whether a model stores any matrix in few bits, or is to be kept so.
    pub fn is_some(&self) -> bool {
        !self.groups.is_empty() || self.gguf.names().next().is_some()
    }

    /// Block types of a GGUF file that no GPU computes with: their matrices become floats there.
    pub fn only_on_cpus(&self) -> Vec<&'static str> {
        self.gguf.only_on_cpus().collect()
    }

    /// What has a scale of its own in matrices that are kept in eight bits.
    pub fn kept_scales(&self) -> impl Iterator<Item = Fp8Scales> {
        self.groups.iter().filter_map(|group| group.format.kept_scales())
    }

    /// Formats of matrices in integers of four bits.
    pub(crate) fn int4(&self) -> impl Iterator<Item = Int4Format> {
        self.groups.iter().filter_map(|group| match group.format {
            MatrixFormat::Int4(format) => Some(format),
            _ => None,
        })
    }

    /// Whether matrices are to be quantised at load.
    pub(crate) fn is_online(&self) -> bool {
        self.groups
            .iter()
            .any(|group| group.format == MatrixFormat::ToFp8)
    }

    /// Whether every format is one of eight bits.
    pub(crate) fn is_fp8(&self) -> bool {
        let is_fp8 = |group: &QuantizationGroup| group.format.kept_scales().is_some();
        self.gguf.names().next().is_none() && self.groups.iter().all(is_fp8)
    }

    /// How the matrix of a module is stored.
    pub fn format(&self, module: &str) -> MatrixFormat {
        if let Some(dtype) = self.gguf.of(module) {
            return MatrixFormat::Gguf(dtype);
        }
        let group = self.groups.iter().find(|group| group.modules.contains(module));
        match group {
            // A table, whatever names match: rows of it are taken, and nothing is multiplied.
            _ if module == EMBEDDING => MatrixFormat::Plain,
            Some(group) if !self.ignored.contains(module) => group.format,
            _ => MatrixFormat::Plain,
        }
    }

    /// For reports: the formats of linear layers, such as `fp8-channel`, or the block types of a GGUF file, those of most matrices first;
    /// `None` where all are in floats.
    pub fn name(&self) -> Option<String> {
        let mut names: Vec<&str> = self
            .groups
            .iter()
            .filter_map(|group| group.format.name())
            .chain(self.gguf.names())
            .collect();
        names.dedup();
        (!names.is_empty()).then(|| names.join(", "))
    }
}

/// Names of modules, as lists in config.json give them.
#[derive(Clone, Debug)]
pub(crate) enum ModuleNames {
    /// Every linear layer.
    All,
    /// Those that one of the expressions matches.
    Some(RegexSet),
}

impl ModuleNames {
    /// Names, and regular expressions behind `re:`, which match from a name's start on (compressed-tensors' `match_name`).
    pub(crate) fn named(names: &[String]) -> Result<Self, String> {
        Self::matching(names.iter().map(|name| match name.strip_prefix("re:") {
            Some(expression) => format!("^(?:{expression})"),
            None => format!("^{}$", regex::escape(name)),
        }))
    }

    /// Names, beginnings and ends of names and regular expressions (transformers' `should_convert_module`).
    pub(crate) fn parts(names: &[String]) -> Result<Self, String> {
        Self::matching(names.iter().map(|name| {
            let whole = regex::escape(name);
            format!(r"^(?:{name})(?:\.|$)|(?:^|\.){whole}$")
        }))
    }

    /// Anything that names contain (AutoAWQ's `exclude_layers_to_not_quantize`).
    pub(crate) fn containing(parts: &[String]) -> Result<Self, String> {
        Self::matching(parts.iter().map(|part| regex::escape(part)))
    }

    /// Names in which `*` stands for anything, and what is within modules of these names (ModelOpt).
    pub(crate) fn globs<'a>(names: impl IntoIterator<Item = &'a String>) -> Result<Self, String> {
        Self::matching(names.into_iter().map(|name| {
            let glob = regex::escape(name).replace(r"\*", ".*");
            format!(r"^{glob}(?:\.|$)")
        }))
    }

    fn matching(expressions: impl Iterator<Item = String>) -> Result<Self, String> {
        let expressions: Vec<String> = expressions.collect();
        // Thousands of names, and no expression that grows without end.
        let set = RegexSetBuilder::new(expressions).size_limit(64 << 20).build();
        // The first lines of a syntax error draw a picture.
        let last_line = |error: regex::Error| quotable(error.to_string().lines().last().unwrap_or_default());
        set.map(Self::Some).map_err(last_line)
    }

    /// Under any of the names that checkpoints have for it.
    fn contains(&self, module: &str) -> bool {
        match self {
            Self::All => true,
            Self::Some(set) => {
                let others = names::OTHERS.into_iter();
                set.is_match(module)
                    || others
                        .map(|as_in| names::stored(module, as_in))
                        .any(|name| set.is_match(&name))
            }
        }
    }
}

impl Default for ModuleNames {
    /// None.
    fn default() -> Self {
        Self::Some(RegexSet::empty())
    }
}

impl PartialEq for ModuleNames {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::All, Self::All) => true,
            (Self::Some(a), Self::Some(b)) => a.patterns() == b.patterns(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn exact_names_and_expressions_match_from_the_start() {
        let names = ModuleNames::named(&list(&[
            "lm_head",
            "model.layers.1.mlp.up_proj",
            "re:.*self_attn\\.o",
        ]))
        .unwrap();
        for (module, expected) in [
            ("lm_head", true),
            ("model.layers.1.mlp.up_proj", true),
            ("model.layers.11.mlp.up_proj", false),
            ("model.layers.1.mlp.up_proj.x", false),
            ("model.layers.7.self_attn.o_proj", true),
            ("model.layers.7.self_attn.q_proj", false),
        ] {
            assert_eq!(names.contains(module), expected, "{module}");
        }
    }

    #[test]
    fn parts_of_names_end_where_modules_do() {
        let names = ModuleNames::parts(&list(&[
            "lm_head",
            "model.layers.1",
            "mlp.gate",
            "model.layers.2.*proj",
        ]))
        .unwrap();
        for (module, expected) in [
            ("lm_head", true),
            ("model.layers.1.mlp.up_proj", true),
            ("model.layers.11.mlp.up_proj", false),
            ("model.layers.4.mlp.gate", true),
            ("model.layers.4.mlp.gate_proj", false),
            ("model.layers.2.mlp.down_proj", true),
        ] {
            assert_eq!(names.contains(module), expected, "{module}");
        }
    }

    #[test]
    fn stars_stand_for_anything() {
        let names = ModuleNames::globs(&list(&[
            "lm_head",
            "model.layers.1",
            "model.layers.2.self_attn*",
            "*.gate",
        ]))
        .unwrap();
        for (module, expected) in [
            ("lm_head", true),
            ("model.layers.1.mlp.up_proj", true),
            ("model.layers.11.mlp.up_proj", false),
            ("model.layers.2.self_attn.q_proj", true),
            ("model.layers.2.mlp.up_proj", false),
            ("model.layers.3.mlp.gate", true),
            ("model.layers.3.mlp.gate_proj", false),
        ] {
            assert_eq!(names.contains(module), expected, "{module}");
        }
    }

    /// Lists name modules as the whole model has them.
    #[test]
    fn names_of_models_of_images_are_known() {
        for name in [
            "model.language_model.layers.0.mlp.up_proj",
            "language_model.model.layers.0.mlp.up_proj",
            "layers.0.mlp.up_proj",
        ] {
            let names = ModuleNames::named(&list(&[name])).unwrap();
            assert!(names.contains("model.layers.0.mlp.up_proj"), "{name}");
            assert!(!names.contains("model.layers.0.mlp.gate_proj"), "{name}");
        }
        assert!(
            ModuleNames::parts(&list(&["language_model.lm_head"]))
                .unwrap()
                .contains("lm_head")
        );
    }

    #[test]
    fn expressions_that_are_none_are_errors() {
        for wrong in ["re:(", "re:(?!a)b", "re:a{1000}{1000}{1000}"] {
            assert!(ModuleNames::named(&list(&[wrong])).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_ignored_is_plain() {
        let online = Quantization::to_fp8();
        assert_eq!(online.format("lm_head"), MatrixFormat::Plain);
        assert_eq!(online.format("model.layers.0.mlp.up_proj"), MatrixFormat::ToFp8);
        for router in [
            "mlp.gate",
            "mlp.router",
            "block_sparse_moe.gate",
            "mlp.shared_expert_gate",
        ] {
            let module = format!("model.layers.0.{router}");
            assert_eq!(online.format(&module), MatrixFormat::Plain, "{module}");
        }
        assert_eq!(
            online.format("model.layers.0.mlp.experts.7.gate_proj"),
            MatrixFormat::ToFp8
        );
        assert_eq!(
            Quantization::default().format("model.layers.0.mlp.up_proj"),
            MatrixFormat::Plain
        );
        assert_eq!(Quantization::default().name(), None);
    }

    #[test]
    fn last_blocks_may_be_smaller() {
        assert_eq!(Fp8Scales::Block.shape(129, 256), [2, 2]);
        assert_eq!(Fp8Scales::Channel.shape(129, 256), [129, 1]);
    }
}
