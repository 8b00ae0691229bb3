use bytemuck::{Pod, Zeroable};
use plimsoll_core::{Logprobs, SampleSpec, TokenId, TokenLogprob};
use plimsoll_device::cuda::{Function, Gpu, GpuError, GpuSlice, Launch, Module};

/// Threads of a block: `kSampleThreads` of `kernels/include/select.cuh`.
const THREADS: u32 = 512;
/// Blocks that share a row where blocks can.
const PARTS: u32 = 8;
/// Bytes of shared memory a block has anyway, and what the driver keeps of it.
const STATIC_SHARED: usize = 45 << 10;
/// Colder rows are as good as greedy, and this has an inverse.
const LEAST_TEMPERATURE: f32 = 1e-30;
/// Most likeliest tokens of a row.
const MAX_LOGPROBS: usize = 20;

/// Choosing tokens on the GPU: `kernels/sample.cu`, the twin of [`sample`](crate::sample()).
#[derive(Debug)]
pub struct SampleKernels {
    gpu: Gpu,
    sample: Function,
    rank: Function,
    parts: u32,
    /// Bytes of shared memory that may hold logits.
    cache: usize,
    _module: Module,
}

/// Parameters of one row, as the kernel reads them.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct SampleRow {
    seed: u64,
    index: u64,
    /// 0 is greedy.
    temperature: f32,
    top_p: f32,
    min_p: f32,
    repetition: f32,
    frequency: f32,
    presence: f32,
    top_k: u32,
    /// -1: none.
    logprobs: i32,
    /// First of its tokens in the flat array.
    history: i32,
    history_len: i32,
    prompt_len: i32,
    /// First of its pairs in the flat array.
    bias: i32,
    bias_len: i32,
    flags: u32,
}

const SKIP: u32 = 1;
const MASKED: u32 = 2;

/// Something added to the logit of a token.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct TokenBias {
    token: i32,
    bias: f32,
}

/// What the rows of a step refer to: flat arrays that are uploaded with them.
#[derive(Clone, Debug, Default)]
pub struct SampleLists {
    /// Tokens before, of rows with penalties.
    pub history: Vec<i32>,
    /// Logit biases.
    pub biases: Vec<TokenBias>,
}

impl SampleLists {
    /// Elements of both lists.
    pub fn lens(&self) -> [usize; 2] {
        [self.history.len(), self.biases.len()]
    }

    /// Adds what the row of `spec` refers to: see [`SampleRow::new`].
    pub fn add(&mut self, spec: &SampleSpec, pending: Option<usize>) {
        if spec.params.needs_history() {
            let tokens = spec.history.iter().map(|&token| token as i32);
            self.history
                .extend(tokens.chain(pending.map(|row| -1 - row as i32)));
        }
        let biases = spec.params.logit_bias().iter();
        self.biases.extend(biases.map(|&(token, bias)| TokenBias {
            token: token as i32,
            bias,
        }));
    }
}

impl SampleRow {
    /// The row of `spec`. What it refers to is added to `lists`.
    ///
    /// `pending` is for a history whose last token is not known yet: the row of this step's inputs that holds it (it is
    /// read from [`SampleArgs::resolved`]); `spec.history` then ends before it.
    pub fn new(spec: &SampleSpec, pending: Option<usize>, lists: &mut SampleLists) -> Self {
        let row = Self::behind(spec, pending, lists.lens());
        lists.add(spec, pending);
        row
    }

    /// As [`Self::new`], of lists to which what it refers to will be added behind so many elements of both.
    pub fn behind(spec: &SampleSpec, pending: Option<usize>, [history, bias]: [usize; 2]) -> Self {
        let params = &*spec.params;
        let history_len = match params.needs_history() {
            true => spec.history.len() + usize::from(pending.is_some()),
            false => 0,
        };
        Self {
            seed: spec.seed,
            index: spec.index as u64,
            temperature: match params.temperature() {
                0.0 => 0.0,
                above => above.max(LEAST_TEMPERATURE),
            },
            top_p: params.top_p(),
            min_p: params.min_p(),
            repetition: params.repetition_penalty(),
            frequency: params.frequency_penalty(),
            presence: params.presence_penalty(),
            top_k: u32::try_from(params.top_k()).unwrap_or(u32::MAX),
            logprobs: params.logprobs().map_or(-1, |k| k.min(MAX_LOGPROBS) as i32),
            history: history as i32,
            history_len: history_len as i32,
            prompt_len: spec.prompt_len as i32,
            bias: bias as i32,
            bias_len: params.logit_bias().len() as i32,
            flags: 0,
        }
    }

    /// A row whose logits are not looked at; its token is 0.
    pub fn padding() -> Self {
        Self {
            flags: SKIP,
            ..Self::zeroed()
        }
    }

    /// A row whose `top` likeliest tokens are wanted, whatever follows it. [`SampleKernels::rank`] is for what does.
    pub fn likeliest(top: usize) -> Self {
        Self {
            logprobs: top.min(MAX_LOGPROBS) as i32,
            top_p: 1.0,
            repetition: 1.0,
            top_k: u32::MAX,
            ..Self::zeroed()
        }
    }

    /// The same row, choosing only among the tokens of its mask.
    pub fn masked(self) -> Self {
        Self {
            flags: self.flags | MASKED,
            ..self
        }
    }

    /// Whether it has a mask.
    pub fn is_masked(&self) -> bool {
        self.flags & MASKED != 0
    }
}

/// Log-probabilities of a row, where asked for.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct RowLogprobs {
    sampled: f32,
    len: u32,
    tokens: [TokenId; MAX_LOGPROBS],
    logprobs: [f32; MAX_LOGPROBS],
}

impl From<&RowLogprobs> for Logprobs {
    fn from(row: &RowLogprobs) -> Self {
        let pairs = row.tokens.iter().zip(&row.logprobs).take(row.len as usize);
        Self {
            sampled: row.sampled,
            top: pairs
                .map(|(&token, &logprob)| TokenLogprob { token, logprob })
                .collect(),
        }
    }
}

/// Where a given token stands in its row.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct TokenRank {
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// 1 for the likeliest. Equal logits rank by lower token id.
    pub rank: u32,
}

/// Inputs and outputs of [`SampleKernels::rank`], all in device memory, one per row.
#[derive(Clone, Copy, Debug)]
pub struct RankArgs<'a> {
    /// `[rows, vocab]`, as [`SampleKernels::sample`] of [`SampleRow::likeliest`] rows left them.
    pub logits: GpuSlice<'a, f32>,
    /// The tokens asked about.
    pub targets: GpuSlice<'a, i32>,
    /// What was sampled. Where that is -1, what is found about the target means nothing.
    pub best: GpuSlice<'a, i32>,
    /// Log-probabilities of what was sampled.
    pub likeliest: GpuSlice<'a, RowLogprobs>,
    /// Out.
    pub ranks: GpuSlice<'a, TokenRank>,
}

/// Inputs and outputs of a step's sampling, all in device memory.
#[derive(Clone, Copy, Debug)]
pub struct SampleArgs<'a> {
    /// `[rows, vocab]`; changed in place.
    pub logits: GpuSlice<'a, f32>,
    /// One per row of logits.
    pub rows: GpuSlice<'a, SampleRow>,
    /// [`SampleLists::history`], as long as any of the rows needs.
    pub history: GpuSlice<'a, i32>,
    /// [`SampleLists::biases`].
    pub biases: GpuSlice<'a, TokenBias>,
    /// The step's input tokens, for histories whose last token is pending.
    pub resolved: GpuSlice<'a, i32>,
    /// `[rows, ceil(vocab / 32)]`: bit `t % 32` of word `t / 32` is 1 if token `t` is allowed. Read for masked rows only.
    pub masks: Option<GpuSlice<'a, u32>>,
    /// Out: the token per row, or -1 where the logits are not numbers
    /// ([`SampleError::NotFinite`](crate::SampleError::NotFinite)).
    pub sampled: GpuSlice<'a, i32>,
    /// Out, for rows that asked: their log-probabilities.
    pub logprobs: GpuSlice<'a, RowLogprobs>,
}

impl SampleKernels {
    /// Loads `kernels/sample.cu`.
    ///
    /// # Errors
    /// [`GpuError`] if this binary carries no code for this GPU.
    pub fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = super::load(gpu, "sample")?;
        let sample = module.function("sample")?;
        let clusters = gpu.info().compute_capability >= (9, 0);
        let cache = gpu.info().max_shared_bytes.saturating_sub(STATIC_SHARED);
        sample.allow_shared(cache)?;
        Ok(Self {
            gpu: gpu.clone(),
            sample,
            rank: module.function("rank_targets")?,
            parts: if clusters { PARTS } else { 1 },
            cache,
            _module: module,
        })
    }

    /// With one block per row, as on GPUs without clusters.
    pub fn without_clusters(self) -> Self {
        Self { parts: 1, ..self }
    }

    /// Samples one token per row, with the meaning and the order of [`sample`](crate::sample()). Masks apply before all else.
    ///
    /// Given the same logits the token is the same, except where the draw falls so close to the boundary between two
    /// tokens that the rounding of the twin's sums decides (here they are exact).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn sample(&self, args: &SampleArgs<'_>) -> Result<(), GpuError> {
        let rows = args.rows.len();
        if rows == 0 {
            return Ok(());
        }
        let vocab = args.logits.len() / rows;
        assert!(
            vocab > 0 && args.logits.len() == rows * vocab && i32::try_from(vocab).is_ok(),
            "logits are not [rows, vocab]"
        );
        assert_eq!(
            (args.sampled.len(), args.logprobs.len()),
            (rows, rows),
            "one output per row"
        );
        if let Some(masks) = args.masks {
            assert_eq!(masks.len(), rows * vocab.div_ceil(32), "one mask per row");
        }
        // The mass of weight 1: all weights together stay below 2^63.
        let unit = (1u64 << (62 - vocab.ilog2())) as f32;
        // What a block reads again and again: the logits of its warps, each a multiple of 32.
        let warps = self.parts * THREADS / 32;
        let range = vocab.div_ceil(warps as usize).next_multiple_of(32) * THREADS as usize / 32;
        let bytes = range * size_of::<f32>();
        let cached = bytes <= self.cache;
        let launch = Launch::new([rows as u32 * self.parts, 1, 1], THREADS)
            .cluster(self.parts)
            .shared(if cached { bytes } else { 0 })
            .pdl(true);
        let values = [
            args.logits.into(),
            (vocab as u32).into(),
            self.parts.into(),
            unit.into(),
            u32::from(cached).into(),
            args.rows.into(),
            args.history.into(),
            args.resolved.into(),
            args.biases.into(),
            args.masks.map_or(0, |masks| masks.ptr()).into(),
            args.sampled.into(),
            args.logprobs.into(),
        ];
        // SAFETY: these are the arguments the kernel declares; lengths are checked, indices in the rows are `SampleRow`'s.
        unsafe { self.gpu.launch(&self.sample, launch, &values) }
    }

    /// Finds the log-probability and the rank of a given token per row: with [`Self::sample`] before it the twin of
    /// [`score`](crate::score()).
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    pub fn rank(&self, args: &RankArgs<'_>) -> Result<(), GpuError> {
        let rows = args.targets.len();
        if rows == 0 {
            return Ok(());
        }
        let vocab = args.logits.len() / rows;
        assert!(
            vocab > 0 && args.logits.len() == rows * vocab && i32::try_from(vocab).is_ok(),
            "logits are not [rows, vocab]"
        );
        assert_eq!(
            [args.best.len(), args.likeliest.len(), args.ranks.len()],
            [rows; 3],
            "one of each per row"
        );
        let values = [
            args.logits.into(),
            (vocab as u32).into(),
            args.targets.into(),
            args.best.into(),
            args.likeliest.into(),
            args.ranks.into(),
        ];
        let launch = Launch::new([rows as u32, 1, 1], THREADS).pdl(true);
        // SAFETY: these are the arguments the kernel declares, lengths are checked; targets are tokens of the vocabulary.
        unsafe { self.gpu.launch(&self.rank, launch, &values) }
    }
}
