use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use plimsoll_kernels::{GgufFormat, WeightType};

use super::EMBEDDING;

/// Block types of the matrices of a GGUF file, by the names of their modules. Those in floats are not among them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct GgufTypes {
    types: Arc<HashMap<String, WeightType>>,
    /// Each once, that of most matrices first.
    all: Arc<[WeightType]>,
    /// A GPU keeps the bits of matrices of layers.
    kept_in_layers: bool,
}

impl GgufTypes {
    pub(crate) fn new(types: HashMap<String, WeightType>) -> Self {
        let mut counts: Vec<(WeightType, usize)> = Vec::new();
        for dtype in types.values() {
            match counts.iter_mut().find(|(known, _)| known == dtype) {
                Some((_, count)) => *count += 1,
                None => counts.push((*dtype, 1)),
            }
        }
        counts.sort_by_key(|&(dtype, count)| (Reverse(count), dtype.name()));
        let is_kept = |(module, dtype): (&String, &WeightType)| {
            module != EMBEDDING && module != "lm_head" && GgufFormat::of(*dtype).is_some()
        };
        Self {
            kept_in_layers: types.iter().any(is_kept),
            all: counts.into_iter().map(|(dtype, _)| dtype).collect(),
            types: Arc::new(types),
        }
    }

    pub(crate) fn of(&self, module: &str) -> Option<WeightType> {
        self.types.get(module).copied()
    }

    /// Each once, that of most matrices first.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.all.iter().map(|dtype| dtype.name())
    }

    pub(super) fn only_on_cpus(&self) -> impl Iterator<Item = &'static str> {
        let others = self.all.iter().filter(|dtype| GgufFormat::of(**dtype).is_none());
        others.map(|dtype| dtype.name())
    }

    /// A GPU keeps the bits of matrices of layers.
    pub(crate) fn are_kept_in_layers(&self) -> bool {
        self.kept_in_layers
    }
}

#[cfg(test)]
mod tests {
    use crate::quantization::{MatrixFormat, Quantization};

    use super::*;

    fn types(of: &[(&str, WeightType)]) -> Quantization {
        let types = of.iter().map(|&(module, dtype)| (module.to_owned(), dtype));
        Quantization::of_gguf(GgufTypes::new(types.collect()))
    }

    #[test]
    fn the_type_of_most_matrices_is_named_first() {
        let mixed = types(&[
            ("a", WeightType::Q6K),
            ("b", WeightType::Q4K),
            ("c", WeightType::Q4K),
            (EMBEDDING, WeightType::Q2K),
        ]);
        assert_eq!(mixed.name().as_deref(), Some("Q4_K, Q2_K, Q6_K"));
        assert_eq!(mixed.only_on_cpus(), ["Q2_K"]);
        assert!(mixed.is_some() && !mixed.is_fp8() && !mixed.is_online());
        assert_eq!(mixed.format("b"), MatrixFormat::Gguf(WeightType::Q4K));
        assert_eq!(mixed.format("b").gguf(), Some(GgufFormat::Q4K));
        assert_eq!(mixed.format(EMBEDDING).gguf(), None);
        assert_eq!(mixed.format("d"), MatrixFormat::Plain);
    }

    #[test]
    fn tables_alone_are_no_layers() {
        let of = |module| types(&[(module, WeightType::Q4K)]).gguf.are_kept_in_layers();
        assert!(!of(EMBEDDING) && !of("lm_head") && of("model.layers.0.mlp.up_proj"));
        assert!(!types(&[("a", WeightType::Q3K)]).gguf.are_kept_in_layers());
        assert!(!types(&[]).is_some());
    }
}
