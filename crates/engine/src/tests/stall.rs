//! A step that hangs is detected, and no client waits for it for ever.

use super::*;
use crate::Activity;
use crate::stall::{Patience, look_every};

const TIMEOUT: Duration = Duration::from_secs(300);

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
    rig.until("a step that hangs", |rig| {
        rig.script.holding.load(Ordering::SeqCst)
    })
    .await;
    let (start, every) = (Instant::now(), look_every(TIMEOUT));
    let mut patience = Patience::new(every, start);
    let mut now = start;
    let stall = loop {
        now += every;
        let stall = rig.engine.look(&mut patience, TIMEOUT, now);
        assert_eq!(stall.is_some(), now == start + TIMEOUT, "{stall:?}");
        if let Some(stall) = stall {
            break stall;
        }
    };
    assert_eq!(stall.waited, TIMEOUT);
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

    // Too long for one look.
    let timeout = Duration::from_millis(20);
    let seen = tokio::time::timeout(PATIENCE, rig.engine.stalled(timeout)).await;
    assert_eq!(seen.expect("a hanging step is seen").step, stall.step);

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
