//! Every linear layer: cuBLASLt, and for few rows kernels of our own that stream the weights: `kernels/linear.cu`, for weights of four
//! bits `kernels/linear_int4_few.cu` too, and on Hopper `kernels/linear_hopper.cu` and `kernels/linear_hopper_int4.cu` for up to 32 rows,
//! `kernels/linear_int4_rows.cu` for up to 24, and `kernels/linear_hopper_many.cu` for 65 to 512 rows in bf16 and for 33 to 512 in e4m3
//! with factors of rows. There, layers of one row that follow each other can be one launch ([`GpuChain`], small ones [`GpuRowLayers`]).
//!
//! With e4m3 weights, cuBLASLt, `linear_hopper.cu` and `linear_hopper_many.cu` take inputs quantised to e4m3, and `linear.cu` takes bf16
//! inputs. On GPUs whose tensor cores do not know e4m3, `linear.cu` computes any number of rows, in parts. Weights of four bits and in
//! GGUF's types meet bf16 inputs: with more rows than are streamed, those of four bits in a kernel for warp groups, which GPUs of Hopper's
//! generation have (`kernels/int4_products.cu`), and with many, and elsewhere, in cuBLASLt, for which they become bf16 in room of the
//! caller's.

mod ahead;
mod chain;
mod choice;
mod cublas_lt;
mod cuts;
mod dequantised;
mod exchange;
mod fewer_rows;
mod gguf;
mod hopper;
mod int4;
mod int4_products;
mod int4_rows;
mod kept;
mod key;
mod layers;
mod many;
mod matrix;
mod mxfp4;
mod output;
mod race;
mod stream;
mod timer;
mod tune;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use half::bf16;
use plimsoll_device::Pod;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab, GpuSlice};

use super::{GpuNorm, has_hopper_kernels};
use crate::Activation;
use chain::ChainKernel;
pub use chain::{AddNormed, ChainUse, GpuChain, SumNorms};
use choice::Choice;
pub use choice::LinearPath;
pub(super) use cublas_lt::find as find_cublas;
use cublas_lt::{CublasLt, Operands, Shape};
pub use cublas_lt::{FP8_CAPABILITY, LinearLibrary, Preparing};
pub use cuts::LinearCut;
use hopper::HopperKernels;
use int4_products::Int4Products;
use int4_rows::Int4RowsKernels;
use layers::LayerKernels;
pub use layers::{GpuRowAttention, GpuRowLayer, GpuRowLayers, RowLayerProducts, RowLayersUse};
use many::ManyKernels;
use matrix::pitch;
use stream::{NormOperands, StreamKernels};
use tune::Measurements;

pub use dequantised::{MOST_DEQUANTISED, dequantised_room};
pub use gguf::GgufKernels;
pub use int4::Int4Kernels;
pub use kept::{LinearWays, StaleWays};
use key::Key;
pub use many::LinearTile;
pub use matrix::{
    EXPERT_WINDOW, FP8_BLOCK, Fp8Scaling, GpuFp8Rows, GpuInputs, GpuLinear, GpuMatrix, GpuRows, GpuValues,
    GpuWeight, INT4_ROWS, INT4_WINDOW, Int4Group, PART_OUTPUTS, expert_int4_pitch, int4_pitch, mxfp4_pitch,
};
pub use mxfp4::mxfp4_word;
pub use output::LinearOutput;
pub use race::TimedWay;
pub use tune::{LinearChoice, LinearScratch, LinearUse};

/// What computes linear layers.
///
/// A row's result depends on that row alone and is the same in every run, but not to the bit on how many rows there are.
#[derive(Debug)]
pub struct Linears {
    gpu: Gpu,
    lt: CublasLt,
    stream: StreamKernels,
    hopper: HopperKernels,
    chain: ChainKernel,
    layers: LayerKernels,
    int4: Int4Kernels,
    int4_rows: Int4RowsKernels,
    int4_products: Int4Products,
    many: ManyKernels,
    gguf: GgufKernels,
    measurements: Measurements,
    /// Libraries' ways for the numbers of rows seen so far.
    chosen: Mutex<HashMap<Key, Choice>>,
    fixed: Option<LinearPath>,
}

/// A layer's input before its norm, all `[m, k]`.
#[derive(Clone, Copy, Debug)]
pub struct GpuResidual<'a> {
    /// The residual stream.
    pub hidden: GpuSlice<'a, bf16>,
    /// What is added to it.
    pub delta: GpuSlice<'a, bf16>,
    /// Of the sum.
    pub norm: GpuNorm<'a>,
    /// Takes the sum, rounded; not the memory of `hidden` or `delta`.
    pub sum: GpuSlice<'a, bf16>,
}

/// Room for what layers of few bits need besides inputs and outputs, whose contents nobody else needs.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinearRoom<'a> {
    /// Their weights as `bf16`, where cuBLASLt computes the product: as much as [`dequantised_room`] says, or more.
    pub weights: Option<GpuSlice<'a, bf16>>,
    /// Their inputs in [their order](GpuLinear::order), if they have one: `[m, k]` or more.
    pub inputs: Option<GpuSlice<'a, bf16>>,
}

impl Linears {
    /// Bytes of device memory that [`Self::load`] wants.
    pub const WORKSPACE_BYTES: usize =
        cublas_lt::WORKSPACE + exchange::BYTES + chain::CHAIN_BYTES + layers::LAYER_BYTES;

    /// Opens cuBLASLt and loads the kernels. `workspace` is used by every product.
    ///
    /// # Errors
    /// [`GpuError`] if the library is missing or does not start, or there are no kernels for this GPU.
    pub fn load(gpu: &Gpu, workspace: GpuSlab) -> Result<Self, GpuError> {
        Self::load_with(&LinearLibrary::open(gpu)?, gpu, workspace)
    }

    /// As [`Self::load`], where cuBLASLt is open.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_with(library: &LinearLibrary, gpu: &Gpu, workspace: GpuSlab) -> Result<Self, GpuError> {
        let fp8_products = gpu.info().compute_capability >= FP8_CAPABILITY;
        Self::with_products(library, gpu, workspace, fp8_products)
    }

    /// As [`Self::load`] on a GPU whose tensor cores do not know e4m3 values, for tests.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn without_fp8_products(gpu: &Gpu, workspace: GpuSlab) -> Result<Self, GpuError> {
        Self::with_products(&LinearLibrary::open(gpu)?, gpu, workspace, false)
    }

    fn with_products(
        library: &LinearLibrary,
        gpu: &Gpu,
        workspace: GpuSlab,
        fp8_products: bool,
    ) -> Result<Self, GpuError> {
        exchange::clear(gpu, &workspace)?;
        let workspace = Arc::new(workspace);
        Ok(Self {
            gpu: gpu.clone(),
            lt: library.with(&workspace, fp8_products),
            stream: StreamKernels::load(gpu)?,
            hopper: HopperKernels::load(gpu, &workspace, fp8_products)?,
            chain: ChainKernel::load(gpu, &workspace)?,
            layers: LayerKernels::load(gpu, &workspace)?,
            int4: Int4Kernels::load(gpu)?,
            int4_rows: Int4RowsKernels::load(gpu, &workspace)?,
            int4_products: Int4Products::load(gpu)?,
            many: ManyKernels::load(gpu, fp8_products)?,
            gguf: GgufKernels::load(gpu)?,
            measurements: Measurements::default(),
            chosen: Mutex::default(),
            fixed: None,
        })
    }

    /// Streams weights as on a GPU whose blocks have no more shared memory than that, for tests.
    ///
    /// # Panics
    /// If kernels made for Hopper run: those that stream weights always have the room that there is.
    pub fn limit_shared(&mut self, bytes: usize) {
        assert!(!has_hopper_kernels(&self.gpu), "build with CUDA_ARCHS=compute_90");
        let most = &mut self.stream.cuts.most_shared;
        *most = bytes.min(*most);
    }

    /// What dequantises tables in GGUF's types.
    pub fn gguf(&self) -> &GgufKernels {
        &self.gguf
    }

    /// Computes everything in one way from now on, for tests and benchmarks.
    pub fn fix(&mut self, path: Option<LinearPath>) {
        self.fixed = path;
        self.known().clear();
    }

    /// Whether a kernel of our own computes a product of `m` rows in one launch.
    pub fn is_own(&self, m: usize, linear: &GpuLinear, output: LinearOutput) -> bool {
        self.own(&linear.key(m, output)).is_some()
    }

    /// Whether kernels of our own can compute one row of a layer: they read the weights as fast as the GPU's memory is.
    pub fn has_own(&self, linear: &GpuLinear, output: LinearOutput) -> bool {
        linear.products().iter().all(|part| {
            let Key { shape, output } = part.key(1, output);
            !self.stream.cuts.of(&shape, output).is_empty() || self.hopper.can(&shape, output)
        })
    }

    /// How `m` rows must be quantised for a layer, or for those of its products that take them so; `None` for as they are.
    ///
    /// # Errors
    /// [`GpuError`] of cuBLASLt.
    pub fn input_scaling(
        &self,
        m: usize,
        linear: &GpuLinear,
        output: LinearOutput,
    ) -> Result<Option<Fp8Scaling>, GpuError> {
        for part in linear.products() {
            let key = part.key(m, output);
            if key.shape.scaling().is_some()
                && let Some(scaling) = self.choice(&key)?.input_scaling(&key)
            {
                return Ok(Some(scaling));
            }
        }
        Ok(None)
    }

    /// `x` `[m, k]` to `out` `[m, n]`.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit, or `x` is not as [`Self::input_scaling`] says.
    pub fn forward<'a>(
        &self,
        x: impl Into<GpuRows<'a>>,
        linear: &GpuLinear,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let x = x.into();
        assert_eq!(
            out.len(),
            x.len() / linear.k * linear.n,
            "out of [m, {}]",
            linear.n
        );
        self.forward_in(LinearRoom::default(), x, linear, LinearOutput::Bf16, out)
    }

    /// As [`Self::forward`], of weights in four bits or GGUF's types too. For [`LinearOutput::Glu`], where [`Self::fuses_glu`] says so,
    /// `activation(gate) * up` to `out` `[m, n / 2]`, of a layer whose outputs are gate, then up. Rows of `out` may be wider than the
    /// outputs: what is behind them stays as it is.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// As this, if there is less room than the layer needs, for `f32` outputs, or for gated ones of other numbers of rows.
    pub fn forward_in<'a>(
        &self,
        room: LinearRoom<'_>,
        x: impl Into<GpuInputs<'a>>,
        linear: &GpuLinear,
        output: LinearOutput,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        assert!(output != LinearOutput::F32, "logits are `forward_f32`'s");
        let is_gated = matches!(output, LinearOutput::Glu(_));
        let is_whole = linear.products().len() == 1;
        assert!(!is_gated || linear.bias.is_none() && is_whole, "ask `fuses_glu`");
        self.run(room, x.into(), linear, out, output)
    }

    /// As [`Self::forward`] with `f32` outputs: logits.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit, the layer has a bias, or its matrix needs room.
    pub fn forward_f32(
        &self,
        x: GpuSlice<'_, bf16>,
        linear: &GpuLinear,
        out: GpuSlice<'_, f32>,
    ) -> Result<(), GpuError> {
        self.forward_f32_in(LinearRoom::default(), x, linear, out)
    }

    /// As [`Self::forward_f32`], of weights in GGUF's types too.
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// As this, or if there is less room than the layer needs.
    pub fn forward_f32_in(
        &self,
        room: LinearRoom<'_>,
        x: GpuSlice<'_, bf16>,
        linear: &GpuLinear,
        out: GpuSlice<'_, f32>,
    ) -> Result<(), GpuError> {
        assert!(linear.bias.is_none(), "a bias with f32 outputs");
        assert_eq!(
            out.len(),
            x.len() / linear.k * linear.n,
            "out of [m, {}]",
            linear.n
        );
        self.run(room, x.into(), linear, out, LinearOutput::F32)
    }

    /// Whether [`Self::forward_in`] can, and should, give [`LinearOutput::Glu`] for `m` rows; if not, [`Self::forward`] and then `glu`.
    pub fn fuses_glu(&self, m: usize, gate_up: &GpuLinear, activation: Activation) -> bool {
        gate_up.products().len() == 1
            && gate_up.bias.is_none()
            && gate_up.n.is_multiple_of(2)
            && self.own(&gate_up.key(m, LinearOutput::Glu(activation))).is_some()
    }

    /// Whether [`Self::forward_norm`] can be used for `m` rows; if not, `add_rms_norm` and then [`Self::forward`] or
    /// [`Self::forward_in`].
    pub fn fuses_norm(&self, m: usize, linear: &GpuLinear, output: LinearOutput) -> bool {
        // Each part's blocks would compute it again.
        if linear.products().len() > 1 {
            return false;
        }
        let key = linear.key(m, output);
        let fuses = match output {
            LinearOutput::Glu(activation) => self.fuses_glu(m, linear, activation),
            LinearOutput::Bf16 | LinearOutput::F32 => true,
        };
        let can = match self.own(&key) {
            Some(Choice::Stream(cut)) => self.stream.cuts.can_norm(&key.shape, cut),
            Some(Choice::Int4Rows(slabs)) => self.int4_rows.can_norm(&key.shape, output, slabs),
            _ => false,
        };
        fuses && linear.order().is_none() && can
    }

    /// The norm of `input` to `out` `[m, n]`, or `[m, n / 2]` for [`LinearOutput::Glu`], for the rows for which
    /// [`Self::fuses_norm`].
    ///
    /// # Errors
    /// [`GpuError`] of the launch.
    ///
    /// # Panics
    /// If a length does not fit, for other numbers of rows or for `f32` outputs.
    pub fn forward_norm(
        &self,
        input: &GpuResidual<'_>,
        linear: &GpuLinear,
        output: LinearOutput,
        out: GpuSlice<'_, bf16>,
    ) -> Result<(), GpuError> {
        let GpuResidual {
            hidden,
            delta,
            norm,
            sum,
        } = *input;
        let mut key = linear.key(hidden.len() / linear.k, output);
        let Shape { m, n, k, .. } = key.shape;
        assert!(output != LinearOutput::F32, "logits are not normalised here");
        assert_eq!(
            (hidden.len(), norm.weight.len()),
            (m * k, k),
            "hidden of [m, {k}]"
        );
        assert_eq!(
            (delta.len(), sum.len()),
            (m * k, m * k),
            "delta and sum of [{m}, {k}]"
        );
        let read = [hidden.ptr(), delta.ptr()];
        assert!(
            !read.contains(&sum.ptr()),
            "the sum overwrites what other blocks read"
        );
        if m == 0 {
            return Ok(());
        }
        assert!(self.fuses_norm(m, linear, output), "ask `fuses_norm`");
        key.shape.pitch = pitch(out.len(), m, n);
        let choice = self.own(&key).expect("as `fuses_norm` says");
        let operands = Operands {
            x: hidden.ptr(),
            out: out.ptr(),
            ..linear.operands()
        };
        let norm = NormOperands {
            delta: delta.ptr(),
            weight: norm.weight.ptr(),
            sum: sum.ptr(),
            eps: norm.eps,
        };
        // SAFETY: the lengths were checked; slices cannot outlive their memory, and what follows on the stream is ordered.
        unsafe { self.launch_norm(&key, choice, &operands, &norm) }
    }

    fn run<T: Pod>(
        &self,
        room: LinearRoom<'_>,
        x: GpuInputs<'_>,
        linear: &GpuLinear,
        out: GpuSlice<'_, T>,
        output: LinearOutput,
    ) -> Result<(), GpuError> {
        let (m, n, k) = (x.len() / linear.k, linear.n / output.stacked(), linear.k);
        assert_eq!(x.len(), m * k, "x of [m, {k}]");
        if let Some(rows) = x.fp8 {
            assert_eq!(rows.values.len(), m * k, "x of [m, {k}]");
            assert_eq!(rows.scales.len(), rows.scaling.input_scales(m, k), "scales of x");
        }
        if m == 0 {
            return Ok(());
        }
        let (mut to, pitch) = (out.ptr(), pitch(out.len(), m, n));
        for part in linear.products() {
            self.run_part(room, x, part, output, to, pitch)?;
            to += (part.n * output.bytes()) as u64;
        }
        Ok(())
    }

    /// The outputs of a part, in rows of `pitch`, from the device address `out` on.
    fn run_part(
        &self,
        room: LinearRoom<'_>,
        x: GpuInputs<'_>,
        linear: &GpuLinear,
        output: LinearOutput,
        out: u64,
        pitch: usize,
    ) -> Result<(), GpuError> {
        let (m, k) = (x.len() / linear.k, linear.k);
        let mut key = linear.key(m, output);
        key.shape.pitch = pitch;
        let choice = self.choice(&key)?;
        let x = x.of(choice.input_scaling(&key)).expect("ask `input_scaling`");
        let x = match (linear.order(), x) {
            (Some(order), GpuRows::Bf16(rows)) => {
                let room = room.inputs.expect("room for inputs in another order");
                let ordered = room.range(0..m * k);
                self.int4.reorder(rows, order, ordered)?;
                ordered.into()
            }
            _ => x,
        };
        let (x, x_scales) = x.addresses();
        let room = match room.weights.filter(|_| key.shape.is_dequantised()) {
            Some(room) => {
                let most = dequantised_room(key.shape.n, k);
                assert!(room.len() >= most, "room for a matrix of [{}, {k}]", key.shape.n);
                room.ptr()
            }
            None => 0,
        };
        let operands = Operands {
            x,
            x_scales,
            out,
            room,
            ..linear.operands()
        };
        // SAFETY: the lengths were checked; slices cannot outlive their memory, and what follows on the stream is ordered.
        unsafe { self.launch(&key, choice, &operands) }
    }

    /// # Safety
    /// As [`CublasLt::run`].
    unsafe fn launch(&self, key: &Key, choice: Choice, operands: &Operands) -> Result<(), GpuError> {
        let (Key { shape, output }, none) = (key, NormOperands::default());
        // SAFETY: the caller's promise; a cut is only chosen for products that it can compute.
        unsafe {
            match choice {
                Choice::Stream(cut) => self.stream_rows(key, cut, operands),
                Choice::Hopper(_) => self.hopper.run(shape, *output, operands),
                Choice::Int4Rows(slabs) => self.int4_rows.run(shape, *output, slabs, operands, &none),
                Choice::Int4(parts) => self.int4_products.run(shape, parts, operands),
                Choice::Many(tile) => self.many.run(shape, *output, tile, operands),
                Choice::Lt(_) if matches!(output, LinearOutput::Glu(_)) => {
                    panic!("cuBLAS has no gated activations: ask `fuses_glu`")
                }
                Choice::Lt(algorithm) if shape.is_dequantised() => {
                    assert!(operands.room != 0, "room for a matrix that is not streamed");
                    self.dequantised_product(key, &algorithm, operands)
                }
                Choice::Lt(algorithm) => self.lt.run(shape, &algorithm, operands),
            }
        }
    }

    /// # Safety
    /// As [`CublasLt::run`]; [`Self::fuses_norm`] must say that this is possible.
    unsafe fn launch_norm(
        &self,
        key: &Key,
        choice: Choice,
        operands: &Operands,
        norm: &NormOperands,
    ) -> Result<(), GpuError> {
        let Key { shape, output } = key;
        // SAFETY: the caller's promise.
        unsafe {
            match choice {
                Choice::Stream(cut) => self.stream.run(shape, *output, cut, operands, norm),
                Choice::Int4Rows(slabs) => self.int4_rows.run(shape, *output, slabs, operands, norm),
                _ => panic!("{choice} makes no norms"),
            }
        }
    }

    /// # Safety
    /// As [`CublasLt::run`].
    unsafe fn stream_rows(&self, key: &Key, cut: LinearCut, operands: &Operands) -> Result<(), GpuError> {
        let Shape { m, k, pitch, .. } = key.shape;
        let most = self.stream.cuts.most_rows(key.shape.values);
        let (row, out_row) = (k * size_of::<bf16>(), pitch * key.output.bytes());
        for first in (0..m).step_by(most) {
            let shape = Shape {
                m: (m - first).min(most),
                ..key.shape
            };
            let operands = Operands {
                x: operands.x + (first * row) as u64,
                out: operands.out + (first * out_row) as u64,
                ..*operands
            };
            // SAFETY: the caller's promise, of some of the rows.
            unsafe {
                let none = NormOperands::default();
                self.stream.run(&shape, key.output, cut, &operands, &none)?;
            }
        }
        Ok(())
    }
}

impl GpuLinear {
    /// Without input and output.
    fn operands(&self) -> Operands {
        let (weight, weight_scales) = match &self.matrix {
            GpuMatrix::Bf16(weight) => (weight.slice().ptr(), 0),
            GpuMatrix::Fp8 { values, scales, .. } => (values.slice().ptr(), scales.slice().ptr()),
            GpuMatrix::Int4 { codes, groups, .. } => (codes.slice().ptr(), groups.slice().ptr()),
            GpuMatrix::Gguf { rows, .. } => (rows.slice().ptr(), 0),
            GpuMatrix::Parts(_) => panic!("each part is a product"),
            GpuMatrix::Mxfp4(_) | GpuMatrix::ExpertInt4 { .. } => panic!("experts are no linear layers"),
        };
        Operands {
            x: 0,
            x_scales: 0,
            weight,
            weight_scales,
            bias: self.bias.as_ref().map_or(0, |bias| bias.slice().ptr()),
            out: 0,
            room: 0,
        }
    }
}
