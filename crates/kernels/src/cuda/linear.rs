//! Every linear layer: cuBLASLt, and for small batches kernels of our own (`kernels/linear.cu`) that stream the weights.

mod cublas;
mod cublas_lt;
mod stream;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab, GpuSlice};

use cublas::Cublas;
use cublas_lt::{Algorithm, CublasLt, Operands, Shape};
use stream::{Cut, Output, StreamKernels};

/// Weights in a slab that is shared with others and lives as long as any of them.
#[derive(Clone, Debug)]
pub struct GpuWeight {
    slab: Arc<GpuSlab>,
    elements: Range<usize>,
}

impl GpuWeight {
    /// `elements` of a slab seen as `bf16`.
    ///
    /// # Panics
    /// If the slab has fewer.
    pub fn new(slab: &Arc<GpuSlab>, elements: Range<usize>) -> Self {
        let this = Self {
            slab: slab.clone(),
            elements,
        };
        this.slice();
        this
    }

    /// The elements.
    pub fn slice(&self) -> GpuSlice<'_, bf16> {
        self.slab.slice().range(self.elements.clone())
    }
}

/// One linear layer, `y = x Wᵀ + b`.
#[derive(Clone, Debug)]
pub struct GpuLinear {
    weight: GpuWeight,
    bias: Option<GpuWeight>,
    n: usize,
    k: usize,
}

impl GpuLinear {
    /// From `weight` `[n, k]` and `bias` `[n]`.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn new(weight: GpuWeight, bias: Option<GpuWeight>, n: usize, k: usize) -> Self {
        assert_eq!(weight.slice().len(), n * k, "weight of [{n}, {k}]");
        assert!(
            bias.as_ref().is_none_or(|bias| bias.slice().len() == n),
            "bias of [{n}]"
        );
        Self { weight, bias, n, k }
    }

    /// Output features.
    pub fn outputs(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn inputs(&self) -> usize {
        self.k
    }
}

/// How products of a shape are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Stream(Cut),
    Lt(Algorithm),
    Cublas,
}

/// Products that are computed alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    shape: Shape,
    output: Output,
}

/// What computes linear layers.
///
/// A row's result depends on that row alone and is the same in every run, but not to the bit on how many rows there are.
#[derive(Debug)]
pub struct Linears {
    /// Before `lt`, whose workspace it uses.
    cublas: Option<Cublas>,
    lt: CublasLt,
    stream: StreamKernels,
    choices: RefCell<HashMap<Key, Choice>>,
    fixed: Option<LinearPath>,
}

/// A way to compute linear layers, to be fixed in tests and benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearPath {
    /// cuBLASLt, with its own first choice.
    CublasLt,
    /// cuBLAS, where it is installed and there is no bias; cuBLASLt otherwise.
    Cublas,
    /// Our kernels for few rows, cut in one of the ways there are; where that one cannot be used, cuBLASLt.
    Stream {
        /// Warps of a thread block side by side along the features: 1, 2, 4 or 8.
        row_warps: usize,
        /// Thread blocks that share the inputs: 1, 2, 4 or 8.
        cluster: usize,
    },
}

impl Linears {
    /// Bytes of device memory that [`Self::load`] wants.
    pub const WORKSPACE_BYTES: usize = cublas_lt::WORKSPACE;

    /// Opens cuBLASLt and loads the kernels. `workspace` is used by every product.
    ///
    /// # Errors
    /// [`GpuError`] if the library is missing or does not start, or there are no kernels for this GPU.
    pub fn load(gpu: &Gpu, workspace: GpuSlab) -> Result<Self, GpuError> {
        let cublas = Cublas::open(gpu, &workspace)?;
        Ok(Self {
            cublas,
            lt: CublasLt::open(gpu, workspace)?,
            stream: StreamKernels::load(gpu)?,
            choices: RefCell::default(),
            fixed: None,
        })
    }

    /// Computes everything in one way from now on, for tests and benchmarks.
    pub fn fix(&mut self, path: Option<LinearPath>) {
        self.fixed = path;
        self.choices.borrow_mut().clear();
    }

    /// `x` `[m, k]` to `out` `[m, n]`.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit.
    pub fn forward(
        &self,
        x: GpuSlice<'_, bf16>,
        linear: &GpuLinear,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        self.run(x, linear, out, Output::Bf16)
    }

    /// As [`Self::forward`] with `f32` outputs: logits.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit or the layer has a bias.
    pub fn forward_f32(
        &self,
        x: GpuSlice<'_, bf16>,
        linear: &GpuLinear,
        out: GpuSlice<'_, f32>,
    ) -> Result<(), GpuError> {
        assert!(linear.bias.is_none(), "a bias with f32 outputs");
        self.run(x, linear, out, Output::F32)
    }

    /// Whether [`Self::forward_silu_mul`] can, and should, be used for `m` rows; if not, [`Self::forward`] and then
    /// `silu_mul`.
    pub fn fuses_silu_mul(&self, m: usize, gate_up: &GpuLinear) -> bool {
        let key = gate_up.key(m, Output::SiluMul);
        gate_up.bias.is_none()
            && gate_up.n.is_multiple_of(2)
            && matches!(self.choice(&key), Ok(Choice::Stream(_)))
    }

    /// `silu(gate) * up` of `x` `[m, k]` to `out` `[m, n / 2]`, for the rows for which [`Self::fuses_silu_mul`]. `gate_up` is
    /// `[n, k]`: gate, then up.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit, or for other numbers of rows.
    pub fn forward_silu_mul(
        &self,
        x: GpuSlice<'_, bf16>,
        gate_up: &GpuLinear,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        assert!(gate_up.bias.is_none(), "a bias before silu");
        self.run(x, gate_up, out, Output::SiluMul)
    }

    fn run<T: Pod>(
        &self,
        x: GpuSlice<'_, bf16>,
        linear: &GpuLinear,
        out: GpuSlice<'_, T>,
        output: Output,
    ) -> Result<(), GpuError> {
        let key = linear.key(x.len() / linear.k, output);
        let Shape { m, n, k, .. } = key.shape;
        assert_eq!(x.len(), m * k, "x of [m, {k}]");
        assert_eq!(out.len(), m * n, "out of [{m}, {n}]");
        if m == 0 {
            return Ok(());
        }
        let operands = Operands {
            x: x.ptr(),
            weight: linear.weight.slice().ptr(),
            bias: linear.bias.as_ref().map_or(0, |bias| bias.slice().ptr()),
            out: out.ptr(),
        };
        let choice = self.choice(&key)?;
        // SAFETY: the lengths were checked; slices cannot outlive their memory, and what follows on the stream is ordered.
        unsafe { self.launch(&key, choice, &operands) }
    }

    /// # Safety
    /// As [`CublasLt::run`].
    unsafe fn launch(&self, key: &Key, choice: Choice, operands: &Operands) -> Result<(), GpuError> {
        // SAFETY: the caller's promise; a cut is only chosen for products that it can compute.
        unsafe {
            match choice {
                Choice::Stream(cut) => self.stream.run(&key.shape, key.output, cut, operands),
                Choice::Lt(_) | Choice::Cublas if key.output == Output::SiluMul => {
                    panic!("cuBLAS has no silu_mul: ask `fuses_silu_mul`")
                }
                Choice::Lt(algorithm) => self.lt.run(&key.shape, &algorithm, operands),
                Choice::Cublas => {
                    let cublas = self.cublas.as_ref().expect("chosen because it is there");
                    cublas.run(&key.shape, operands)
                }
            }
        }
    }

    fn choice(&self, key: &Key) -> Result<Choice, GpuError> {
        if let Some(known) = self.choices.borrow().get(key) {
            return Ok(*known);
        }
        let lt = || Ok::<_, GpuError>(Choice::Lt(self.lt.algorithms(&key.shape, 1)?[0]));
        let choice = match self.fixed {
            None => match self.stream.cuts(&key.shape, key.output).first() {
                Some(cut) => Choice::Stream(*cut),
                None => lt()?,
            },
            Some(LinearPath::Cublas) if self.cublas.is_some() && !key.shape.bias => Choice::Cublas,
            Some(LinearPath::CublasLt | LinearPath::Cublas) => lt()?,
            Some(LinearPath::Stream { row_warps, cluster }) => {
                let cut = Cut { row_warps, cluster };
                match self.stream.can(&key.shape, key.output, cut) {
                    true => Choice::Stream(cut),
                    false => lt()?,
                }
            }
        };
        self.choices.borrow_mut().insert(*key, choice);
        Ok(choice)
    }
}

impl GpuLinear {
    fn key(&self, m: usize, output: Output) -> Key {
        let n = if output == Output::SiluMul {
            self.n / 2
        } else {
            self.n
        };
        let shape = Shape {
            m,
            n,
            k: self.k,
            wide: output == Output::F32,
            bias: self.bias.is_some(),
        };
        Key { shape, output }
    }
}
