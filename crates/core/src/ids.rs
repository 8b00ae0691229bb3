use std::fmt;

/// A token of the model's vocabulary.
pub type TokenId = u32;

/// Identifies a request, uniquely in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// Tenant of a request, such as an API key, for fair queueing; 0 if tenants are not distinguished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub u64);

/// Where one state of fixed size is kept, in models whose layers have such states: that of a request, or a snapshot of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateSlot(pub u32);

impl StateSlot {
    /// The slot's index, for addressing storage.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Index of one physical page of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct PageId(pub u32);

impl PageId {
    /// The page's index, for addressing storage.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
