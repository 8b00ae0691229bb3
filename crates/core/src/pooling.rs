/// How the rows of a prompt after the final norm become one vector, in an embedding model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// The row of the last token, which attends to all others.
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

    /// True if every row counts: then every token must be computed, whatever the prefix cache holds.
    pub fn needs_every_row(self) -> bool {
        self == Self::Mean
    }
}

/// Sizes to which vectors may be truncated, as the model was trained for
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
