//! A step that hangs is detected, and no client waits for it for ever.

use super::*;
use crate::Activity;

const TIMEOUT: Duration = Duration::from_millis(400);

#[tokio::test]
async fn a_step_that_hangs_is_described_and_its_requests_end() {
    let rig = Rig::new(Shape {
        max_num_seqs: 2,
        ..Default::default()
    });
    rig.set(|script| &script.hold);
    let readers: Vec<_> = (1..=3)
        .map(|seed| tokio::spawn(read(rig.submit(seed, 5).unwrap())))
        .collect();
    let stall = tokio::time::timeout(PATIENCE, rig.engine.stalled(TIMEOUT))
        .await
        .expect("a hanging step is seen");
    assert!(stall.waited >= TIMEOUT, "{stall:?}");
    assert_eq!((stall.phase, stall.activity), (Phase::Running, Activity::Launch));
    let step = stall.step.clone().expect("a step hangs");
    assert!((1..=2).contains(&step.rows), "{step:?}");
    assert_eq!(
        (step.prefill_tokens, step.decode_tokens),
        (5 * step.rows, 0),
        "prompts of five tokens"
    );
    assert_eq!(step.longest_context, 5);
    let line = stall.to_string();
    assert!(
        line.contains(" prefill_tokens=") && line.contains("activity=launch"),
        "{line}"
    );

    rig.engine.give_up("told to give up");
    for reader in readers {
        assert!(
            reader
                .await
                .unwrap()
                .1
                .unwrap_err()
                .to_string()
                .contains("told to give up")
        );
    }
    assert_eq!(rig.engine.health().phase, Phase::Dead);
    assert!(matches!(rig.submit(9, 1), Err(SubmitError::Dead(_))));
    // A thread that comes back has nothing left to say.
    rig.script.hold.store(false, Ordering::SeqCst);
    assert_eq!(rig.engine.drain(PATIENCE).await, Drained::Failed(3));
    assert!(rig.engine.health().stalled_for.is_none());
}
