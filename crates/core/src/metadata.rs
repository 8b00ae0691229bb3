use std::collections::BTreeMap;

/// Metadata of a model file (GGUF's key-value section), independent of the library that read it.
pub type Metadata = BTreeMap<String, MetaValue>;

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum MetaValue {
    /// Any signed integer.
    Int(i64),
    /// Any unsigned integer.
    UInt(u64),
    /// Any float.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// Text.
    Str(String),
    /// A list; GGUF's are of one type.
    List(Vec<MetaValue>),
}

impl MetaValue {
    /// The value as an unsigned integer, if it is one.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::UInt(v) => Some(v),
            Self::Int(v) => u64::try_from(v).ok(),
            _ => None,
        }
    }

    /// The value as a number.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::Float(v) => Some(v),
            Self::UInt(v) => Some(v as f64),
            Self::Int(v) => Some(v as f64),
            _ => None,
        }
    }

    /// The value as a flag.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// The value as text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(v) => Some(v),
            _ => None,
        }
    }

    /// The value as a list.
    pub fn as_list(&self) -> Option<&[MetaValue]> {
        match self {
            Self::List(v) => Some(v),
            _ => None,
        }
    }
}
