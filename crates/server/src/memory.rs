//! What the server asks about the device's memory.

use plimsoll_core::{CacheKind, Component, KvConfig, Meters};
use plimsoll_engine::SchedulerStats;
use serde_json::Value;

use crate::wire::about::{KvGroupNow, StatesNow};

/// The source of `/memory` and the memory metrics.
pub trait Memory: Send + Sync + 'static {
    /// The report of the profile.
    fn report(&self) -> Value;

    /// Reads the meters of the device: of each rank in order, at least one. Calls the driver or the operating system, which may
    /// hang.
    fn meters(&self) -> Vec<Meters>;

    /// Device allocations since the server became ready, without those of rebuilding the engine's state.
    fn allocations_after_ready(&self) -> u64;

    /// Peak bytes that each rank held while the worst-case steps ran, as counted by the process, without the canary.
    fn proved_peaks(&self) -> Vec<u64>;

    /// Numbers of the start and of the profile of the state in use.
    fn start(&self) -> StartNumbers;
}

/// Numbers of a start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StartNumbers {
    /// Name and seconds of each stage, in order.
    pub stages: Vec<(&'static str, f64)>,
    /// KV cache sizes tried for the state in use; the last one was validated.
    pub tried: usize,
}

/// The cache groups of a KV cache.
pub(crate) fn kv_groups(kv: &KvConfig, stats: &SchedulerStats, meters: &Meters) -> Vec<KvGroupNow> {
    let page_bytes = meters.by_component.get(Component::Kv) / kv.num_pages.max(1) as u64;
    let column_bytes = page_bytes / kv.groups.columns_per_page() as u64;
    let groups = kv.groups.iter().zip(&stats.groups).map(|(group, stats)| {
        let (kind, window) = match group.kind {
            CacheKind::Full => ("full", None),
            CacheKind::Window(window) => ("window", Some(window)),
        };
        KvGroupNow {
            kind,
            window,
            layers: group.layers,
            sharing_layers: group.sharing_layers,
            pages_per_block: group.pages_per_block,
            blocks: kv.num_pages / group.pages_per_block,
            blocks_used: stats.used,
            blocks_cached: stats.cached,
            rounding_bytes: (stats.used * kv.groups.unused_columns(group)) as u64 * column_bytes,
        }
    });
    groups.collect()
}

/// The states of fixed size beside a KV cache, if there are any.
pub(crate) fn states(kv: &KvConfig, stats: &SchedulerStats, meters: &Meters) -> Option<StatesNow> {
    (stats.slots.total > 0).then(|| StatesNow {
        layers: kv.groups.state_layers(),
        slots: stats.slots.total,
        slots_used: stats.slots.used,
        slots_cached: stats.slots.snapshots,
        slot_bytes: meters.by_component.get(Component::States) / stats.slots.total as u64,
    })
}

#[cfg(test)]
mod tests {
    use plimsoll_core::{BlockSize, CacheLayout};

    use super::*;

    #[test]
    fn groups_say_what_they_hold_and_what_rounding_costs() {
        // Pages of 50 layers: the second group has room for one layer more than it has.
        let kinds = [vec![CacheKind::Full; 50], vec![CacheKind::Window(100); 99]].concat();
        let kv = KvConfig {
            block_size: BlockSize::default(),
            num_pages: 31,
            groups: CacheLayout::new(&kinds, usize::MAX).unwrap().groups,
            state_slots: 0,
        };
        let mut stats = SchedulerStats::default();
        (stats.groups[0].used, stats.groups[0].cached) = (5, 2);
        (stats.groups[1].used, stats.groups[1].cached) = (3, 1);
        let mut meters = Meters::default();
        // 7 bytes of a block in one layer.
        *meters.by_component.get_mut(Component::Kv) = 31 * 50 * 7;
        let groups = serde_json::to_value(kv_groups(&kv, &stats, &meters)).unwrap();
        let expected = serde_json::json!([
            { "kind": "full", "window": null, "layers": 50, "sharing_layers": 0, "pages_per_block": 1, "blocks": 31,
              "blocks_used": 5, "blocks_cached": 2, "rounding_bytes": 0 },
            { "kind": "window", "window": 100, "layers": 99, "sharing_layers": 0, "pages_per_block": 2, "blocks": 15,
              "blocks_used": 3, "blocks_cached": 1, "rounding_bytes": 3 * 7 },
        ]);
        assert_eq!(groups, expected);
    }
}
