use std::fmt;

/// What a byte of device memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    /// The model's parameters.
    Weights,
    /// The paged KV cache.
    Kv,
    /// States of fixed size, one for each request that runs.
    States,
    /// The step arena: activations, logits, attention scratch, sampler.
    Arena,
    /// Block tables, token ids and other per-step inputs and outputs.
    Staging,
    /// The encoder of images at its largest, and the embeddings it keeps.
    Encoder,
    /// What the GPUs of one server exchange sums through.
    Communication,
    /// Captured graphs.
    Graphs,
    /// Held back while a size is proved.
    Canary,
    /// Runtime of the device: context, modules, libraries.
    Runtime,
}

impl Component {
    /// All components, in the order in which reports show them.
    pub const ALL: [Self; 10] = [
        Self::Weights,
        Self::Kv,
        Self::States,
        Self::Arena,
        Self::Staging,
        Self::Encoder,
        Self::Communication,
        Self::Graphs,
        Self::Canary,
        Self::Runtime,
    ];

    /// Name in logs, reports and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Kv => "kv",
            Self::States => "states",
            Self::Arena => "arena",
            Self::Staging => "staging",
            Self::Encoder => "encoder",
            Self::Communication => "communication",
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

/// One reading of a device's memory counters, in bytes. `used`, `reserved` and their high-water marks count this process
/// only: other processes on the device do not change them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meters {
    /// Capacity of the device.
    pub total: u64,
    /// Free bytes, as the device reports them.
    pub free: u64,
    /// Bytes of live allocations of this process.
    pub used: u64,
    /// Bytes that this process's allocators hold of the device; at least `used`.
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
    /// Bytes that other processes use: neither free nor held by this process, at least 0.
    pub fn peers(&self) -> u64 {
        self.total.saturating_sub(self.free).saturating_sub(self.reserved)
    }

    /// Bytes that allocators hold from the device without using them.
    pub fn fragmentation(&self) -> u64 {
        self.reserved.saturating_sub(self.used)
    }

    /// Bytes that this process could still allocate: neither it nor other processes hold them. Includes the margins that
    /// were kept free when the KV cache was sized.
    pub fn headroom(&self) -> u64 {
        self.total
            .saturating_sub(self.reserved)
            .saturating_sub(self.peers())
    }
}

/// Device memory ran out. Typed from the allocator to the exit code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "out of device memory: {component} asked for {}, {} of {} are in use, {} free",
    human_bytes(*requested), human_bytes(meters.reserved), human_bytes(meters.total), human_bytes(meters.free)
)]
pub struct Oom {
    /// Bytes of the allocation that failed.
    pub requested: u64,
    /// Component that the memory was for.
    pub component: Component,
    /// What had no room.
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
    /// Another of the ranks that build a state together could not: its own error says why.
    #[error("rank {0} could not build its part of the state")]
    OtherRank(usize),
    /// A rank is gone, or did not come in time.
    #[error("{0}")]
    RankLost(String),
}

/// What had no room for an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedBy {
    /// The device, or this process's budget of it: it may succeed when less is held there.
    Device,
    /// The scratch of a state, whose size is fixed ([`crate::Scratch::Fixed`]): the same step fails again, however much of
    /// the device is free, and all others run as before.
    FixedScratch,
}

/// Bytes in binary units, for people.
pub fn human_bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / 1048576.0),
        0x4000_0000..0x100_0000_0000 => format!("{:.2} GiB", bytes as f64 / 1073741824.0),
        _ => format!("{:.2} TiB", bytes as f64 / 1099511627776.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_for_people() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (150 << 20, "150.0 MiB"),
            (3 << 29, "1.50 GiB"),
            (5 << 39, "2.50 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(human_bytes(bytes), text);
        }
    }
}
