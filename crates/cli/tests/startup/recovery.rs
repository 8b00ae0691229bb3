//! What happens to a live server when its device's memory goes away.

use plimsoll_device::Budget;
use plimsoll_server::Memory;

use crate::{BUDGET, Model, answers, stop};

/// U18: serving takes nothing from the device, so a neighbour that takes all of it disturbs nobody.
#[tokio::test(flavor = "multi_thread")]
async fn u18_a_neighbour_that_takes_all_memory_disturbs_no_request() {
    let model = Model::new();
    for flags in ["", "--max-total-token-num 1024"] {
        let budget = Budget::new(BUDGET);
        let ready = model.start(flags, &budget).unwrap();
        let standing = ready.standing.clone();
        let expected = answers(&ready.engine).await;
        let at_rest = budget.meters();
        budget.set_peers(BUDGET);
        budget.set_cap(Some(0));
        assert_eq!(answers(&ready.engine).await, expected);
        let meters = standing.meters();
        assert_eq!((meters.reserved, meters.headroom()), (at_rest.reserved, 0));
        assert_eq!(
            meters.reserved_high, meters.reserved,
            "the mark is as low as at ready"
        );
        assert!(standing.proved_peak() >= meters.reserved_high);
        assert_eq!(standing.allocations_after_ready(), 0);
        assert_eq!(ready.engine.stats().high_water_above_proof, 0);
        stop(ready, &budget).await;
    }
}
