//! What holds between the scheduler's maps at any time.

use super::Scheduler;

impl Scheduler {
    /// Audits the bookkeeping, blocks included; see [`plimsoll_kv::KvManager::check_invariants`]. For tests and leak audits.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.waiting.check_invariants(self.running.keys().copied())?;
        if self.places.len() != self.waiting.len() + self.running.len() {
            return Err("a request is lost or in two places".into());
        }
        for running in self.running.values() {
            let known = running.sequence.tokens.len() + usize::from(running.sampling);
            let computed = running.table.computed();
            let settled = running.in_flight > 0 || (!running.sampling && computed == running.planned);
            if !(computed <= running.planned && running.planned <= known && settled) {
                return Err(format!("inconsistent: {running:?}"));
            }
        }
        if let Some((id, _)) = self.leaving.iter().find(|(_, leaving)| leaving.in_flight == 0) {
            return Err(format!("{id} has left and keeps its blocks"));
        }
        let tables = self.running.values().map(|running| &running.table);
        self.kv
            .check_invariants(tables.chain(self.leaving.values().map(|leaving| &leaving.table)))
    }
}
