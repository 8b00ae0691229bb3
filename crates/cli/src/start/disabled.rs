//! Features that a start runs without: logged, and listed in the report.

use plimsoll_kernels::instruction_set;
use plimsoll_profiler::Disabled;
use plimsoll_server::EmbeddingInfo;

use super::weights::Weights;
use crate::args::EngineArgs;
use crate::device::DeviceChoice;

/// The path that a server of embeddings is without.
pub(crate) const TEXT_GENERATION: &str = "text generation";

/// What `args` and the hardware switch off; `stored_as` is the number format of weights that were converted,
/// `embedding` says how vectors are made instead of text.
pub(super) fn disabled(
    weights: &Weights,
    stored_as: Option<&'static str>,
    embedding: Option<&EmbeddingInfo>,
    args: &EngineArgs,
) -> Vec<Disabled> {
    let mut list = List::default();
    match weights {
        Weights::Cpu(..) => {
            on_cpu(&mut list, instruction_set());
            if args.device.device == DeviceChoice::Auto {
                list.add(
                    "GPU",
                    "not in use; the device line of the log says why".to_owned(),
                );
            }
        }
        Weights::Gpu(model) => {
            let capability = model.gpu().info().compute_capability;
            on_gpu(
                &mut list,
                capability,
                model.spec().layers[0].attention().head_dim,
                args,
            );
        }
        Weights::Sim(..) => {}
    }
    if let Some(stored) = stored_as {
        let reason = format!("stored as {stored}, a GPU computes with them as bfloat16");
        list.add("weights as they are stored", reason);
    }
    if !args.limits.prefix_caching() {
        let reason = "every prompt is computed from the beginning (--no-enable-prefix-caching)";
        list.add("prefix caching", reason.to_owned());
    }
    if let Some(embedding) = embedding {
        for_embeddings(&mut list, embedding, args);
    }
    if !args.memory.profile_cache() {
        let reason = "measurements are not kept for the next start (--no-profile-cache)";
        list.add("profile cache", reason.to_owned());
    }
    list.0
}

fn for_embeddings(list: &mut List, embedding: &EmbeddingInfo, args: &EngineArgs) {
    let (pooling, size) = (embedding.pooling.name(), embedding.size);
    let reason = format!(
        "the model is served for embeddings (--runner): {pooling} pooling, vectors of {size} numbers"
    );
    list.add(TEXT_GENERATION, reason);
    if embedding.pooling.needs_every_row() && args.limits.prefix_caching() {
        let reason = "a mean takes every token's row, so every prompt is computed from the beginning";
        list.add("prefix caching", reason.to_owned());
    }
}

fn on_cpu(list: &mut List, instruction_set: &str) {
    if instruction_set != "avx512-vnni" {
        let reason = format!("this CPU does not have all of it: {instruction_set} is used");
        list.add("AVX-512 VNNI kernels", reason);
    }
    let reason = "a CPU computes one step at a time";
    list.add("step overlap", reason.to_owned());
}

fn on_gpu(list: &mut List, capability: (u32, u32), head_dim: usize, args: &EngineArgs) {
    let (major, minor) = capability;
    if args.device.enforce_eager() {
        let reason = "every kernel is launched separately (--enforce-eager)";
        list.add("CUDA graphs", reason.to_owned());
    }
    if capability != (9, 0) {
        let reason =
            format!("made for compute capability 9.0, this GPU has {major}.{minor}: portable ones are used");
        list.add("Hopper prefill attention", reason);
    } else if head_dim == 96 {
        let reason = "not made for heads of 96: the portable kernel is used";
        list.add("Hopper prefill attention", reason.to_owned());
    }
    if capability < (9, 0) {
        let reason = format!("they need compute capability 9.0, this GPU has {major}.{minor}");
        list.add("thread block clusters in sampling", reason);
    }
}

#[derive(Default)]
struct List(Vec<Disabled>);

impl List {
    fn add(&mut self, path: &'static str, reason: String) {
        self.0.push(Disabled { path, reason });
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use plimsoll_core::{Matryoshka, Pooling};

    use super::*;
    use crate::args::{Cli, Command};

    fn args(flags: &str) -> EngineArgs {
        let argv = ["plimsoll", "serve"].into_iter().chain(flags.split_whitespace());
        match Cli::try_parse_from(argv).unwrap().command {
            Command::Serve(args) => args.engine,
            other => panic!("not serve: {other:?}"),
        }
    }

    fn paths(fill: impl FnOnce(&mut List)) -> Vec<&'static str> {
        let mut list = List::default();
        fill(&mut list);
        list.0.iter().map(|disabled| disabled.path).collect()
    }

    #[test]
    fn what_hardware_and_flags_switch_off_is_named() {
        let gpu = |capability, head_dim, flags| {
            let args = args(flags);
            paths(|list| on_gpu(list, capability, head_dim, &args))
        };
        assert!(gpu((9, 0), 128, "").is_empty());
        assert_eq!(
            gpu((9, 0), 96, "--enforce-eager"),
            ["CUDA graphs", "Hopper prefill attention"]
        );
        assert_eq!(
            gpu((8, 6), 128, ""),
            ["Hopper prefill attention", "thread block clusters in sampling"]
        );
        assert_eq!(gpu((12, 0), 128, ""), ["Hopper prefill attention"]);
        let embedding = |pooling| EmbeddingInfo {
            pooling,
            normalize: true,
            size: 1,
            matryoshka: Matryoshka::No,
        };
        let served = |pooling| paths(|list| for_embeddings(list, &embedding(pooling), &args("")));
        assert_eq!(served(Pooling::Last), [TEXT_GENERATION]);
        assert_eq!(served(Pooling::Mean), [TEXT_GENERATION, "prefix caching"]);
        assert_eq!(paths(|list| on_cpu(list, "avx512-vnni")), ["step overlap"]);
        assert_eq!(
            paths(|list| on_cpu(list, "scalar")),
            ["AVX-512 VNNI kernels", "step overlap"]
        );
    }
}
