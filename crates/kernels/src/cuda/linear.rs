//! Every linear layer: cuBLASLt, and for small batches kernels of our own (`kernels/linear.cu`) that stream the weights.

mod cublas;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab, GpuSlice};

use cublas::{Algorithm, CublasLt, Operands, Shape};

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

/// What computes linear layers.
///
/// A row's result depends on that row alone and is the same in every run, but not to the bit on how many rows there are.
#[derive(Debug)]
pub struct Linears {
    lt: CublasLt,
    algorithms: RefCell<HashMap<Shape, Algorithm>>,
}

impl Linears {
    /// Bytes of device memory that [`Self::load`] wants.
    pub const WORKSPACE_BYTES: usize = cublas::WORKSPACE;

    /// Opens cuBLASLt and loads the kernels. `workspace` is used by every product.
    ///
    /// # Errors
    /// [`GpuError`] if the library is missing or does not start.
    pub fn load(gpu: &Gpu, workspace: GpuSlab) -> Result<Self, GpuError> {
        Ok(Self {
            lt: CublasLt::open(gpu, workspace)?,
            algorithms: RefCell::default(),
        })
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
        self.run(x, linear, out, false)
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
        self.run(x, linear, out, true)
    }

    /// Whether [`Self::forward_silu_mul`] can be used for `m` rows.
    pub fn fuses_silu_mul(&self, m: usize, linear: &GpuLinear) -> bool {
        let _ = (m, linear);
        false
    }

    fn run<T: Pod>(
        &self,
        x: GpuSlice<'_, bf16>,
        linear: &GpuLinear,
        out: GpuSlice<'_, T>,
        wide: bool,
    ) -> Result<(), GpuError> {
        let shape = linear.shape(x.len(), wide);
        assert_eq!(x.len(), shape.m * shape.k, "x of [m, {}]", shape.k);
        assert_eq!(out.len(), shape.m * shape.n, "out of [{}, {}]", shape.m, shape.n);
        if shape.m == 0 {
            return Ok(());
        }
        let operands = Operands {
            x: x.ptr(),
            weight: linear.weight.slice().ptr(),
            bias: linear.bias.as_ref().map_or(0, |bias| bias.slice().ptr()),
            out: out.ptr(),
        };
        let algorithm = self.algorithm(&shape)?;
        // SAFETY: the lengths were checked; slices cannot outlive their memory, and what follows on the stream is ordered.
        unsafe { self.lt.run(&shape, &algorithm, &operands) }
    }

    fn algorithm(&self, shape: &Shape) -> Result<Algorithm, GpuError> {
        if let Some(known) = self.algorithms.borrow().get(shape) {
            return Ok(*known);
        }
        let best = self.lt.algorithms(shape, 1)?[0];
        self.algorithms.borrow_mut().insert(*shape, best);
        Ok(best)
    }
}

impl GpuLinear {
    fn shape(&self, elements: usize, wide: bool) -> Shape {
        Shape {
            m: elements / self.k,
            n: self.n,
            k: self.k,
            wide,
            bias: self.bias.is_some(),
        }
    }
}
