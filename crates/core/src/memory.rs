use std::fmt;

/// What a byte of device memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    /// The model's parameters.
    Weights,
    /// The paged KV cache.
    Kv,
    /// The step arena: activations, logits, attention scratch, sampler.
    Arena,
    /// Block tables, token ids and other per-step inputs and outputs.
    Staging,
    /// Captured graphs.
    Graphs,
    /// Held back while a size is proved.
    Canary,
    /// Runtime of the device: context, modules, libraries.
    Runtime,
}

impl Component {
    /// All components, in the order in which reports show them.
    pub const ALL: [Self; 7] = [
        Self::Weights,
        Self::Kv,
        Self::Arena,
        Self::Staging,
        Self::Graphs,
        Self::Canary,
        Self::Runtime,
    ];

    /// Name in logs, reports and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Kv => "kv",
            Self::Arena => "arena",
            Self::Staging => "staging",
            Self::Graphs => "graphs",
            Self::Canary => "canary",
            Self::Runtime => "runtime",
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes by component.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ComponentBytes([u64; Component::ALL.len()]);

impl ComponentBytes {
    /// Bytes of one component.
    pub fn get(&self, component: Component) -> u64 {
        self.0[component as usize]
    }

    /// For writing one component.
    pub fn get_mut(&mut self, component: Component) -> &mut u64 {
        &mut self.0[component as usize]
    }

    /// Sum over all components.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Components with their bytes, in report order.
    pub fn iter(&self) -> impl Iterator<Item = (Component, u64)> + '_ {
        Component::ALL.into_iter().map(|c| (c, self.get(c)))
    }
}

/// One reading of a device's meters, in bytes. `used`, `reserved` and their high-water marks are this process's own, so a
/// neighbour on the device cannot corrupt them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meters {
    /// Capacity of the device.
    pub total: u64,
    /// Bytes nobody uses, as the device reports them.
    pub free: u64,
    /// Bytes live inside our allocations.
    pub used: u64,
    /// Bytes our allocators hold from the device; at least `used`.
    pub reserved: u64,
    /// Highest `used` since the marks were reset.
    pub used_high: u64,
    /// Highest `reserved` since the marks were reset.
    pub reserved_high: u64,
    /// `reserved` by component.
    pub by_component: ComponentBytes,
    /// Allocations since the process started.
    pub allocations: u64,
}

impl Meters {
    /// Bytes other processes use: what is neither free nor ours, floored at 0.
    pub fn peers(&self) -> u64 {
        self.total.saturating_sub(self.free).saturating_sub(self.reserved)
    }

    /// Bytes that allocators hold from the device without using them.
    pub fn fragmentation(&self) -> u64 {
        self.reserved.saturating_sub(self.used)
    }

    /// Bytes that this process could still take: what neither it nor its neighbours hold, the margins that were kept free
    /// when the KV cache was sized included.
    pub fn headroom(&self) -> u64 {
        self.total
            .saturating_sub(self.reserved)
            .saturating_sub(self.peers())
    }
}

/// Device memory ran out. A type from the allocator up, never a string.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "out of device memory: {requested} bytes for {component} asked for, {} of {} in use, {} free",
    meters.reserved, meters.total, meters.free
)]
pub struct Oom {
    /// Bytes of the allocation that failed.
    pub requested: u64,
    /// What they were for.
    pub component: Component,
    /// Who had no room.
    pub refused_by: RefusedBy,
    /// The meters at that moment.
    pub meters: Box<Meters>,
}

/// Why an engine state could not be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// Device memory ran out: a smaller state may fit.
    #[error(transparent)]
    Oom(#[from] Oom),
    /// The driver or a kernel failed, in its own words: no other size helps.
    #[error("the device failed: {0}")]
    Device(String),
}

/// What had no room for an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedBy {
    /// The device, or what is granted of it: with fewer bytes held there, it may succeed.
    Device,
    /// The scratch of a state, whose size is fixed ([`crate::Scratch::Fixed`]): the same step fails again, however much of
    /// the device is free, and all others run as before.
    FixedScratch,
}
