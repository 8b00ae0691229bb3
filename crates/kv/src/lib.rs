//! Paged KV bookkeeping: pages, blocks, tables, reference counts, prefix cache. Pure: no device, no threads, no clock.
//!
//! A request's tokens live in blocks of a fixed number of tokens (PagedAttention, Kwon et al. 2023), named in order by its
//! [`BlockTable`]. A table is opened, grown ([`KvManager::reserve`]) before each step, told what the step computed
//! ([`KvManager::commit`]) and consumed by [`KvManager::release`]. Full blocks whose content is computed enter the prefix
//! cache; they stay there after the last release until their memory is needed, least recently used first. The changes of the
//! cache can be recorded for others ([`KvManager::record_events`]).
//!
//! Layers that keep the same form a group ([`plimsoll_core::CacheGroups`]), and a table has blocks of each. Those behind a
//! sliding window go back to the pool while the request runs. All groups share one pool of pages. Layers that keep a state of
//! fixed size have no blocks: a table has a slot for the states of all of them, from its opening to its release. Such a
//! state is that of all tokens so far and no others, so a prefix is shared only up to a place at which somebody left a snapshot
//! behind: another slot, which belongs to a cached block and goes with it, or when slots are short.
//!
//! Two rules keep sharing safe. A block enters the cache only when the step that computed it has been applied. And a
//! shared block is never written: [`KvManager::open`] shares only full blocks before the last token, so that at least
//! this token is computed, into a block of the request's own.

mod content;
mod free_list;
mod manager;
mod no_room;
mod pool;
mod prefix;
mod slots;
mod state;
mod table;

pub use manager::{GroupStats, KnownPrefix, KvManager, KvStats, Sharing};
pub use no_room::{NoRoom, OutOfPages};
pub use slots::SlotStats;
pub use table::BlockTable;
