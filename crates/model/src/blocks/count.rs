use std::convert::Infallible;

use super::{Decoder, Inspector, Matrix, Stack, Vector};
use crate::DecoderSpec;

impl DecoderSpec {
    /// Elements of all weights, all ranks' together: not the scales of those in eight bits or four, and an embedding that is the head too only once.
    pub fn num_parameters(&self) -> u64 {
        self.count(true)
    }

    /// Those of this part, where the network is divided among ranks.
    pub fn num_parameters_of_rank(&self) -> u64 {
        self.count(false)
    }

    fn count(&self, of_all: bool) -> u64 {
        let mut count = Count { sum: 0, of_all };
        let Ok(_) = Decoder::visit(self, &mut count);
        count.sum
    }

    /// Those that are read for one token: all but the experts to which it does not go.
    pub fn num_active_parameters(&self) -> u64 {
        let idle = self.mixtures().map(|moe| {
            let inner = (moe.intermediate_size * self.shard.ranks) as u64;
            let hidden = self.hidden_size as u64;
            let biases = if moe.bias { 2 * inner + hidden } else { 0 };
            let expert = (3 * inner).saturating_mul(hidden).saturating_add(biases);
            expert.saturating_mul((moe.experts - moe.top_k) as u64)
        });
        self.num_parameters()
            .saturating_sub(idle.fold(0, u64::saturating_add))
    }
}

struct Count {
    sum: u64,
    /// As they are stored, or a rank's part of them.
    of_all: bool,
}

impl Count {
    fn add(&mut self, rows: usize, cols: usize) {
        let elements = (rows as u64).saturating_mul(cols as u64);
        self.sum = self.sum.saturating_add(elements);
    }

    fn add_matrix(&mut self, matrix: &Matrix) {
        let [rows, cols] = match self.of_all {
            true => matrix.stored_shape(),
            false => matrix.shape(),
        };
        self.add(rows, cols);
    }

    fn add_vector(&mut self, vector: &Vector) {
        let len = match self.of_all {
            true => vector.stored_shape().iter().product(),
            false => vector.len,
        };
        self.add(len, 1);
    }
}

impl Inspector for Count {
    type Error = Infallible;

    fn vector(&mut self, vector: &Vector) -> Result<(), Infallible> {
        self.add_vector(vector);
        Ok(())
    }

    fn linear(&mut self, stack: &Stack) -> Result<(), Infallible> {
        stack.parts.iter().for_each(|part| self.add_matrix(part));
        stack.biases().for_each(|bias| self.add_vector(&bias));
        Ok(())
    }

    fn embedding(&mut self, table: &Matrix) -> Result<(), Infallible> {
        self.add_matrix(table);
        Ok(())
    }
}
