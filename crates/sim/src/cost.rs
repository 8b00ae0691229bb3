//! How long a real device takes for steps, for simulations of load.

use plimsoll_core::{
    MEASURED_DECODE_ROWS, MEASURED_MIXED_ROWS, OUTPUTS_BESIDE_PROMPTS, StepCost, StepCosts, larger_rows,
};

/// What a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepSize {
    /// Requests that generate a token.
    pub decoding: usize,
    /// Sum of their contexts, in tokens.
    pub context: usize,
    /// Tokens of prompts.
    pub prompt: usize,
    /// For each of them, the tokens of its prompt up to it, in sum.
    pub pairs: f64,
}

impl StepSize {
    /// `tokens` more tokens of a prompt behind the first `before`.
    pub fn add_prompt(&mut self, before: usize, tokens: usize) {
        self.prompt += tokens;
        self.pairs += tokens as f64 * (before as f64 + tokens as f64 / 2.0);
    }
}

/// Rows that products are computed in.
const TILE: f64 = 128.0;

/// Times of the parts of a step, in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct StepModel {
    /// Matrix products of a step, by rows: linear between, and beyond the last; but more rows than a tile has are computed in whole
    /// tiles.
    pub products: &'static [(f64, f64)],
    /// LM head, sampling and what else each step has, whatever its size.
    pub step: f64,
    /// Norms and activations, for each row.
    pub row: f64,
    /// More for each row of a prompt.
    pub prompt_row: f64,
    /// More for a step with prompts: it is no CUDA graph, and has a second attention.
    pub mixed: f64,
    /// Reading and writing the states of a request that generates.
    pub state: f64,
    /// Reading the KV of one token of context.
    pub context: f64,
    /// Attention of one token of a prompt to another.
    pub pair: f64,
}

impl StepModel {
    /// Llama 3.1 8B in bfloat16 on one H200: products fitted to the steps of a server with 64 and with 256 clients (512 prompt and 128
    /// output tokens), at whose load the GPU's power limit holds its clock at 1.52 to 1.57 of 1.98 GHz.
    pub const H200_8B: Self = Self {
        products: &[
            (1.0, 3330.0),
            (64.0, 4260.0),
            (128.0, 4660.0),
            (256.0, 6730.0),
            (384.0, 8870.0),
            (512.0, 11_670.0),
            (768.0, 16_900.0),
            (1024.0, 21_900.0),
            (1536.0, 35_850.0),
            (2048.0, 42_700.0),
            (4096.0, 85_300.0),
            (8192.0, 169_000.0),
        ],
        step: 490.0,
        row: 0.9,
        prompt_row: 0.45,
        mixed: 300.0,
        state: 0.0,
        context: 0.0295,
        pair: 0.000_525,
    };

    /// Qwen3.5-9B in bfloat16 on one H200: steps with prompts as the auto-profile times them, for many more sizes.
    pub const H200_HYBRID_9B: Self = Self {
        products: &[
            (1.0, 4500.0),
            (64.0, 5100.0),
            (128.0, 5600.0),
            (256.0, 7400.0),
            (384.0, 10_300.0),
            (512.0, 13_000.0),
            (640.0, 15_900.0),
            (768.0, 18_400.0),
            (896.0, 21_900.0),
            (1024.0, 23_500.0),
            (1280.0, 32_200.0),
            (1536.0, 36_800.0),
            (1792.0, 42_500.0),
            (2048.0, 50_200.0),
            (2304.0, 56_700.0),
            (3072.0, 69_200.0),
            (4096.0, 94_300.0),
            (6144.0, 140_700.0),
            (8192.0, 191_500.0),
        ],
        step: 0.0,
        row: 0.0,
        prompt_row: 0.0,
        mixed: 500.0,
        state: 31.0,
        context: 0.0081,
        pair: 0.000_26,
    };

    /// Qwen3-30B-A3B in bfloat16 on one H200, as the auto-profile times it: from a few rows on all experts are read.
    pub const H200_EXPERTS_30B: Self = Self {
        products: &[
            (1.0, 3700.0),
            (32.0, 11_400.0),
            (64.0, 13_900.0),
            (128.0, 15_300.0),
            (256.0, 15_500.0),
            (384.0, 16_700.0),
            (512.0, 18_000.0),
            (768.0, 21_200.0),
            (1024.0, 24_900.0),
            (1536.0, 32_000.0),
            (2048.0, 36_200.0),
            (4096.0, 61_300.0),
            (8192.0, 110_800.0),
        ],
        step: 200.0,
        row: 0.0,
        prompt_row: 0.0,
        mixed: 300.0,
        state: 4.0,
        context: 0.0311,
        pair: 0.000_52,
    };

    /// Seconds of a step.
    pub fn seconds(&self, size: &StepSize) -> f64 {
        let rows = (size.decoding + size.prompt) as f64;
        let prompts = match size.prompt {
            0 => 0.0,
            tokens => self.mixed + self.prompt_row * tokens as f64 + self.pair * size.pairs,
        };
        let micros = self.products(rows) + self.step + self.row * rows + prompts;
        let outputs = self.state * size.decoding as f64 + self.context * size.context as f64;
        (micros + outputs) * 1e-6
    }

    fn products(&self, rows: f64) -> f64 {
        let rows = match rows > TILE {
            true => (rows / TILE).ceil() * TILE,
            false => rows,
        };
        let after = self.products.partition_point(|&(known, _)| known < rows);
        let after = after.clamp(1, self.products.len() - 1);
        let ((from, least), (to, most)) = (self.products[after - 1], self.products[after]);
        let part = ((rows - from) / (to - from)).max(0.0);
        least + part * (most - least)
    }

    /// What the auto-profile would measure of it.
    ///
    /// # Panics
    /// Where these are no times.
    pub fn costs(&self, max_num_batched_tokens: usize) -> StepCosts {
        const CONTEXT: usize = 1;
        let timed = |decoding: usize, prompt: usize| {
            let mut size = StepSize {
                decoding,
                context: decoding * CONTEXT,
                ..StepSize::default()
            };
            let mut left = prompt;
            while left > 0 {
                let tokens = left.min(512);
                size.add_prompt(0, tokens);
                left -= tokens;
            }
            StepCost {
                rows: decoding + prompt,
                seconds: self.seconds(&size),
            }
        };
        let decode = MEASURED_DECODE_ROWS.map(|rows| timed(rows, 0));
        let of_rows = |rows: usize| timed(OUTPUTS_BESIDE_PROMPTS, rows - OUTPUTS_BESIDE_PROMPTS);
        let mixed = MEASURED_MIXED_ROWS.into_iter();
        let mixed = mixed.filter(|&rows| rows <= max_num_batched_tokens);
        let mut mixed: Vec<_> = mixed.map(of_rows).collect();
        while let Some(rows) = larger_rows(&mixed, max_num_batched_tokens) {
            mixed.push(of_rows(rows));
        }
        let costs = StepCosts::new(decode.into(), mixed, self.context * 1e-6);
        costs.expect("these are times")
    }
}
