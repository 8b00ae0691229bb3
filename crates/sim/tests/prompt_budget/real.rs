//! The same loads with the real scheduler: the reduced server says what it would say.

use plimsoll_core::{
    BlockSize, CacheGroups, KvConfig, Limits, Request, RequestId, RequestOptions, Run, Sampled, StepLimits,
    StepOutput, StepPlan,
};
use plimsoll_scheduler::{Scheduler, SchedulerConfig};
use plimsoll_sim::{StepModel, StepSize};

use crate::server::{Policy, serve};
use crate::traffic::{Kind, Traffic};
use crate::{MOST, adaptive, chunk};

fn request(id: usize, traffic: &Traffic, limits: &Limits) -> Request {
    let options = RequestOptions {
        // No two prompts begin alike.
        prompt: vec![id as u32; traffic.visits[id].prompt],
        max_tokens: Some(traffic.visits[id].output),
        ..Default::default()
    };
    Request::new(RequestId(id as u64), options, limits).unwrap()
}

fn answer(plan: &StepPlan) -> StepOutput {
    let sampled = |_| Sampled {
        token: 1,
        logprobs: None,
    };
    StepOutput {
        samples: plan
            .runs
            .iter()
            .map(|run| run.sample.as_ref().map(sampled))
            .collect(),
        ..Default::default()
    }
}

fn size(plan: &StepPlan) -> StepSize {
    let mut size = StepSize::default();
    let generates = |run: &Run| run.sample.as_ref().is_some_and(|sample| sample.index > 0);
    for run in &plan.runs {
        if generates(run) {
            size.decoding += 1;
            size.context += run.start;
        } else {
            size.add_prompt(run.start, run.input.len());
        }
    }
    size
}

/// Requests per second, and the longest step in which a request generated.
fn serve_really(traffic: &Traffic, clients: usize, device: &StepModel) -> (f64, f64) {
    let kv = KvConfig {
        block_size: BlockSize::default(),
        num_pages: 1 << 18,
        groups: CacheGroups::default(),
        state_slots: 0,
    };
    let step = StepLimits {
        max_num_batched_tokens: MOST,
        max_num_seqs: traffic.max_num_seqs,
        max_model_len: 1 << 16,
    };
    let limits = Limits {
        max_model_len: step.max_model_len,
        kv_capacity_tokens: kv.capacity_tokens(),
        vocab_size: 1 << 17,
        images: None,
    };
    let mut scheduler = Scheduler::new(SchedulerConfig {
        limits: step,
        kv,
        state_chunk: chunk(device),
        enable_prefix_caching: true,
        patience: 1000,
    });
    scheduler.limit_prompts(Some(adaptive(device)));
    let (mut seconds, mut steps, mut sent) = (0.0, Vec::new(), 0);
    loop {
        let stats = scheduler.stats();
        let missing = clients - stats.waiting - stats.running;
        let until = traffic.visits.len().min(sent + missing);
        for id in sent..until {
            scheduler.submit(request(id, traffic, &limits));
        }
        sent = until;
        let plan = scheduler.plan();
        if plan.is_empty() {
            break;
        }
        let size = size(&plan);
        seconds += device.seconds(&size);
        steps.extend((size.decoding > 0).then(|| (device.seconds(&size), size.decoding)));
        scheduler.apply(&plan, answer(&plan));
    }
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    let itl_p99 = crate::server::quantile(&steps, 0.99);
    (traffic.visits.len() as f64 / seconds, 1e3 * itl_p99)
}

#[test]
fn the_scheduler_does_what_is_simulated() {
    let device = StepModel::H200_8B;
    for clients in [4, 64, 256] {
        let traffic = Traffic::equal(Kind::Closed(clients), 6 * clients, 512, 128);
        let simulated = serve(&traffic, &device, &Policy::Adaptive(&adaptive(&device)), MOST);
        let (rate, itl_p99) = serve_really(&traffic, clients, &device);
        let whole = traffic.visits.len() as f64
            / (simulated.seconds / simulated.requests as f64 * traffic.visits.len() as f64);
        println!(
            "{clients}: {rate:.2} and {whole:.2} req/s, ITL p99 {itl_p99:.1} and {:.1} ms",
            simulated.itl_p99
        );
        assert!((rate / whole - 1.0).abs() < 0.05);
        assert!((itl_p99 / simulated.itl_p99 - 1.0).abs() < 0.05);
    }
}
