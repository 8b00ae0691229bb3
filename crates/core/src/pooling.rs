/// How the rows of a prompt, behind the last norm, become one vector: what an embedding model answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// The row of the last token, which has seen all others.
    Last,
    /// The mean of all rows.
    Mean,
}

impl Pooling {
    /// Name in reports, flags and keys, lowercase.
    pub fn name(self) -> &'static str {
        match self {
            Self::Last => "last",
            Self::Mean => "mean",
        }
    }

    /// Whether every row counts: then no token's computation can be left to the prefix cache.
    pub fn needs_every_row(self) -> bool {
        self == Self::Mean
    }
}

/// Sizes to which vectors may be cut: the model was trained so that their beginnings are vectors too
/// ([Matryoshka representations](https://arxiv.org/abs/2205.13147)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Matryoshka {
    /// None.
    #[default]
    No,
    /// Any.
    Any,
    /// These.
    Sizes(Vec<usize>),
}

impl Matryoshka {
    /// From what a model's configuration says.
    pub fn new(is_matryoshka: Option<bool>, sizes: Option<Vec<usize>>) -> Self {
        match (is_matryoshka, sizes) {
            (_, Some(sizes)) if !sizes.is_empty() => Self::Sizes(sizes),
            (Some(true), _) => Self::Any,
            _ => Self::No,
        }
    }

    /// Whether vectors may be cut to `size` elements.
    pub fn allows(&self, size: usize) -> bool {
        match self {
            Self::No => false,
            Self::Any => true,
            Self::Sizes(sizes) => sizes.contains(&size),
        }
    }
}
