//! Matrix products by cuBLASLt, which is opened at run time.
//!
//! cuBLAS thinks in columns: the row-major `[m, n]` output is its `n x m` matrix, the weights `[n, k]` its `k x n` one, which
//! it transposes. So `n` is its first dimension and a bias runs along it.

use std::ffi::c_void;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, JoinHandle};

use cudarc::cublas::sys::cublasOperation_t;
use cudarc::cublaslt::sys;
use cudarc::driver::sys::CUstream;
use libloading::Library;
use plimsoll_device::cuda::{Gpu, GpuError, GpuSlab};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Fp8Scaling, GpuValues};

/// Bytes of workspace that cuBLAS wants on recent GPUs.
pub(super) const WORKSPACE: usize = 32 << 20;

/// Words of an algorithm.
const ALGORITHM_WORDS: usize = 8;

/// The first compute capability whose tensor cores multiply e4m3 values.
pub const FP8_CAPABILITY: (u32, u32) = (8, 9);

/// One matrix product: `out[m, n] = x[m, k] · weight[n, k]ᵀ + bias[n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// `f32` output instead of `bf16`.
    pub(super) wide: bool,
    pub(super) bias: bool,
    /// Of weights, and where they are in e4m3 and cuBLASLt computes the product, of x.
    pub(super) values: GpuValues,
    /// Outputs from one row of `out` to the next: `n`, or more where others lie between.
    pub(super) pitch: usize,
}

impl Shape {
    /// Bytes of weights, without what they share.
    pub(super) fn weight_bytes(&self) -> usize {
        let &Self { n, k, values, .. } = self;
        match values {
            GpuValues::Bf16 => 2 * n * k,
            GpuValues::Fp8(_) => n * k,
            GpuValues::Int4(_) => n * k / 2,
            GpuValues::Gguf(format) => n * format.pitch(k),
        }
    }

    /// Of e4m3 values.
    pub(super) fn scaling(&self) -> Option<Fp8Scaling> {
        self.values.scaling()
    }
}

/// Device addresses of a product's matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    pub(super) x: u64,
    /// Factors of e4m3 values, 0 for none.
    pub(super) x_scales: u64,
    pub(super) weight: u64,
    pub(super) weight_scales: u64,
    /// 0 for none.
    pub(super) bias: u64,
    pub(super) out: u64,
    /// For weights of few bits as bf16; 0 for none.
    pub(super) room: u64,
}

impl Operands {
    /// For descriptions of a product that nobody computes: the library looks whether pointers are there.
    const ANYWHERE: Self = {
        let aligned = 256;
        Self {
            x: aligned,
            x_scales: aligned,
            weight: aligned,
            weight_scales: aligned,
            bias: aligned,
            out: aligned,
            room: 0,
        }
    };
}

/// How cuBLASLt computes a product; good for other `m` too, unless it says no.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Algorithm(sys::cublasLtMatmulAlgo_t);

impl Algorithm {
    /// What makes an algorithm, in numbers of the library, which mean the same everywhere.
    const ATTRIBUTES: [(sys::cublasLtMatmulAlgoConfigAttributes_t, usize); 9] = {
        use sys::cublasLtMatmulAlgoConfigAttributes_t as attribute;
        [
            (attribute::CUBLASLT_ALGO_CONFIG_ID, 4),
            (attribute::CUBLASLT_ALGO_CONFIG_TILE_ID, 4),
            (attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID, 4),
            (attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4),
            (attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4),
            (attribute::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4),
            (attribute::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4),
            (attribute::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2),
            (attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2),
        ]
    };

    /// Of these attributes: the same for all ranks, which are threads of one process.
    pub(super) fn hash(&self) -> u32 {
        let mut hasher = DefaultHasher::new();
        Self::ATTRIBUTES
            .map(|(attribute, bytes)| self.value(attribute, bytes))
            .hash(&mut hasher);
        hasher.finish() as u32
    }

    #[cfg(test)]
    pub(super) fn from_words(words: [u64; ALGORITHM_WORDS]) -> Self {
        Self(sys::cublasLtMatmulAlgo_t { data: words })
    }

    /// An attribute of so many bytes, at most four; 0 if the algorithm has none.
    fn value(&self, attribute: sys::cublasLtMatmulAlgoConfigAttributes_t, bytes: usize) -> u32 {
        let (mut value, mut written) = (0_u32, 0);
        // SAFETY: the library writes at most the size given; the value stays 0 if it refuses.
        unsafe {
            let to = (&raw mut value).cast();
            let _ = sys::cublasLtMatmulAlgoConfigGetAttribute(&self.0, attribute, to, bytes, &mut written);
        }
        value
    }
}

/// As the words that it is made of, in hexadecimal digits without those at the end that are 0. The library's documentation allows to keep
/// them ("trivially serialized and later restored"), for the same version of it.
impl Serialize for Algorithm {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let words = &self.0.data;
        let last = words.iter().rposition(|word| *word != 0).unwrap_or(0);
        let words: Vec<_> = words[..=last].iter().map(|word| format!("{word:x}")).collect();
        serializer.serialize_str(&words.join(" "))
    }
}

impl<'de> Deserialize<'de> for Algorithm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut words = [0; ALGORITHM_WORDS];
        let given: Vec<_> = text.split(' ').collect();
        if given.len() > words.len() {
            return Err(D::Error::custom("an algorithm of more words than there are"));
        }
        for (word, digits) in words.iter_mut().zip(given) {
            *word = u64::from_str_radix(digits, 16).map_err(D::Error::custom)?;
        }
        Ok(Self(sys::cublasLtMatmulAlgo_t { data: words }))
    }
}

impl fmt::Display for Algorithm {
    /// Kind, tile, stages and parts of k, by the library's numbers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use sys::cublasLtMatmulAlgoConfigAttributes_t as attribute;
        let kind = self.value(attribute::CUBLASLT_ALGO_CONFIG_ID, 4);
        let tile = self.value(attribute::CUBLASLT_ALGO_CONFIG_TILE_ID, 4);
        let stages = self.value(attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID, 4);
        let parts = self.value(attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4);
        write!(f, "{kind} tile {tile} stages {stages} parts {parts}")
    }
}

/// The thread of [`LinearLibrary::prepare`]. Dropping this waits for the thread: a process must not end while it is inside the library.
#[derive(Debug)]
#[must_use]
pub struct Preparing(Option<JoinHandle<()>>);

impl Drop for Preparing {
    fn drop(&mut self) {
        // It neither panics nor has a result.
        let _ = self.0.take().map(JoinHandle::join);
    }
}

/// cuBLASLt, opened for one GPU.
#[derive(Clone, Debug)]
pub struct LinearLibrary(Arc<Handle>);

impl LinearLibrary {
    /// Opens the library.
    ///
    /// # Errors
    /// [`GpuError`] if it is missing or does not start.
    pub fn open(gpu: &Gpu) -> Result<Self, GpuError> {
        Ok(Self(Arc::new(Handle::open(gpu)?)))
    }

    /// Asks it for products of `bf16` on a thread of its own. It takes long to answer the first time: 100 ms, and 50 ms for sums in `f32` (on
    /// a machine with an H200).
    pub fn prepare(&self) -> Preparing {
        let handle = Arc::clone(&self.0);
        let ask = move || {
            for wide in [false, true] {
                let shape = Shape {
                    m: 16,
                    n: 4096,
                    k: 4096,
                    wide,
                    bias: false,
                    values: GpuValues::Bf16,
                    pitch: 4096,
                };
                // If this fails, the next call says so.
                let _ = handle.algorithms(&shape, 1);
            }
        };
        // If no thread can be started, the first measurement takes that time.
        Preparing(Builder::new().name("ask-cublas".to_owned()).spawn(ask).ok())
    }

    /// With room for products.
    pub(super) fn with(&self, workspace: &Arc<GpuSlab>, fp8_products: bool) -> CublasLt {
        CublasLt {
            handle: Arc::clone(&self.0),
            workspace: Arc::clone(workspace),
            fp8_products,
        }
    }
}

#[derive(Debug)]
struct Handle {
    gpu: Gpu,
    raw: sys::cublasLtHandle_t,
}

// SAFETY: cuBLASLt's functions may be called from any thread.
unsafe impl Send for Handle {}
// SAFETY: by several at a time, too.
unsafe impl Sync for Handle {}

/// The library, and what a GPU gives to its products.
#[derive(Debug)]
pub(super) struct CublasLt {
    handle: Arc<Handle>,
    workspace: Arc<GpuSlab>,
    /// Tensor cores multiply e4m3 values.
    fp8_products: bool,
}

/// Whether the library is on this machine. It stays open: to open it takes a tenth of a second (on a machine with an H200), and as long
/// each time after nobody had it open.
pub(in crate::cuda) fn find() -> Result<(), GpuError> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        let names = cudarc::get_lib_name_candidates("cublasLt");
        // SAFETY: what it does when it is opened is meant for any program, and it is never closed.
        let mut opened = names.iter().map(|name| unsafe { Library::new(name) });
        opened.find_map(Result::ok)
    });
    match library {
        Some(_) => Ok(()),
        None => Err(GpuError::NoLibrary {
            library: "libcublasLt.so.13".to_owned(),
        }),
    }
}

impl Handle {
    fn open(gpu: &Gpu) -> Result<Self, GpuError> {
        gpu.bind()?;
        find()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library is there; a place to write to.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&mut raw) })?;
        Ok(Self {
            gpu: gpu.clone(),
            raw,
        })
    }

    /// As [`CublasLt::algorithms`].
    fn algorithms(&self, shape: &Shape, most: usize) -> Result<Vec<Algorithm>, GpuError> {
        self.gpu.bind()?;
        let product = Product::new(shape, &Operands::ANYWHERE)?;
        let preference = Preference::new(WORKSPACE)?;
        // SAFETY: all-zero is valid for this struct.
        let mut found =
            vec![unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() }; most.max(1)];
        let mut count = 0;
        // SAFETY: all handles are alive; `found` has as many places as asked for.
        let asked = check("cublasLtMatmulAlgoGetHeuristic", unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.raw,
                product.operation.0,
                product.weight.0,
                product.x.0,
                product.out.0,
                product.out.0,
                preference.0,
                found.len() as i32,
                found.as_mut_ptr(),
                &mut count,
            )
        });
        if asked.as_ref().is_err_and(is_unsupported) {
            return Ok(Vec::new());
        }
        asked?;
        found.truncate(usize::try_from(count).unwrap_or(0));
        found.retain(|result| result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        Ok(found.iter().map(|result| Algorithm(result.algo)).collect())
    }
}

impl CublasLt {
    /// Of the library: 10000 × major + 100 × minor + patch.
    pub(super) fn version(&self) -> usize {
        // SAFETY: the library is open; the function takes nothing.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// Up to `most` algorithms for a product, the one that cuBLAS thinks fastest first; perhaps none.
    pub(super) fn algorithms(&self, shape: &Shape, most: usize) -> Result<Vec<Algorithm>, GpuError> {
        if shape.scaling().is_some() && !self.fp8_products {
            return Ok(Vec::new());
        }
        self.handle.algorithms(shape, most)
    }

    /// Whether an algorithm, perhaps found for another number of rows, can compute a product.
    pub(super) fn can(&self, shape: &Shape, algorithm: &Algorithm) -> bool {
        let Ok(product) = Product::new(shape, &Operands::ANYWHERE) else {
            return false;
        };
        // SAFETY: all-zero is valid for this struct; all handles are alive.
        let (status, result) = unsafe {
            let mut result = std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>();
            let status = sys::cublasLtMatmulAlgoCheck(
                self.handle.raw,
                product.operation.0,
                product.weight.0,
                product.x.0,
                product.out.0,
                product.out.0,
                &algorithm.0,
                &mut result,
            );
            (status, result)
        };
        status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && result.workspaceSize <= WORKSPACE
    }

    /// Where it runs.
    pub(super) fn gpu(&self) -> &Gpu {
        &self.handle.gpu
    }

    /// Launches a product on the GPU's stream.
    ///
    /// # Safety
    /// The operands must have the shape's sizes, be aligned to 16 bytes and live until the product is done.
    pub(super) unsafe fn run(
        &self,
        shape: &Shape,
        algorithm: &Algorithm,
        operands: &Operands,
    ) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe { self.run_on(self.gpu().stream(), shape, algorithm, operands) }
    }

    /// As [`Self::run`], on a stream of the GPU.
    ///
    /// # Safety
    /// As [`Self::run`], and no product may run on another stream meanwhile: they share the workspace.
    pub(super) unsafe fn run_on(
        &self,
        stream: CUstream,
        shape: &Shape,
        algorithm: &Algorithm,
        operands: &Operands,
    ) -> Result<(), GpuError> {
        self.handle.gpu.bind()?;
        let product = Product::new(shape, operands)?;
        let (alpha, beta) = (1.0_f32, 0.0_f32);
        let workspace = self.workspace.slice::<u8>().range(0..WORKSPACE);
        let address = |ptr: u64| ptr as usize as *mut c_void;
        // SAFETY: all handles are alive, the scale type is f32, the operands are the caller's promise; with beta 0 the output is
        // not read.
        check("cublasLtMatmul", unsafe {
            sys::cublasLtMatmul(
                self.handle.raw,
                product.operation.0,
                (&raw const alpha).cast(),
                address(operands.weight),
                product.weight.0,
                address(operands.x),
                product.x.0,
                (&raw const beta).cast(),
                address(operands.out),
                product.out.0,
                address(operands.out),
                product.out.0,
                &algorithm.0,
                address(workspace.ptr()),
                workspace.bytes(),
                stream.cast(),
            )
        })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.gpu.synchronize().is_ok() {
            // SAFETY: nothing uses the handle any more. A failure means that the context is gone.
            let _ = unsafe { sys::cublasLtDestroy(self.raw) };
        }
    }
}

/// The library's descriptions of a product.
struct Product {
    operation: Operation,
    weight: Layout,
    x: Layout,
    out: Layout,
}

impl Product {
    fn new(shape: &Shape, operands: &Operands) -> Result<Self, GpuError> {
        let &Shape {
            m, n, k, wide, pitch, ..
        } = shape;
        let half = sys::cudaDataType_t::CUDA_R_16BF;
        let out = match wide {
            true => sys::cudaDataType_t::CUDA_R_32F,
            false => half,
        };
        let element = match shape.scaling() {
            None => half,
            Some(_) => sys::cudaDataType_t::CUDA_R_8F_E4M3,
        };
        Ok(Self {
            operation: Operation::new(shape, operands)?,
            weight: Layout::new(element, [k, n], k)?,
            x: Layout::new(element, [k, m], k)?,
            out: Layout::new(out, [n, m], pitch)?,
        })
    }
}

struct Operation(sys::cublasLtMatmulDesc_t);

impl Operation {
    fn new(shape: &Shape, operands: &Operands) -> Result<Self, GpuError> {
        use sys::cublasLtMatmulDescAttributes_t as attribute;
        use sys::cublasLtMatmulMatrixScale_t as scale;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place to write to.
        check("cublasLtMatmulDescCreate", unsafe {
            sys::cublasLtMatmulDescCreate(
                &mut handle,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType_t::CUDA_R_32F,
            )
        })?;
        let this = Self(handle);
        this.set(
            attribute::CUBLASLT_MATMUL_DESC_TRANSA,
            &cublasOperation_t::CUBLAS_OP_T,
        )?;
        if shape.bias {
            this.set(
                attribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
                &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            )?;
            this.set(attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &operands.bias)?;
        }
        if let Some(scaling) = shape.scaling() {
            let (weight, x) = match scaling {
                Fp8Scaling::Rows => (
                    scale::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
                    scale::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
                ),
                Fp8Scaling::Blocks => (
                    scale::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
                    scale::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                ),
            };
            this.set(attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &weight)?;
            this.set(attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &x)?;
            this.set(
                attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                &operands.weight_scales,
            )?;
            this.set(
                attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
                &operands.x_scales,
            )?;
            // Sums of fewer bits than f32 for some steps of k: what is lost is far below what rounding to e4m3 has lost. Scales of
            // blocks apply to each step, so there is nothing to gain.
            let fast = i8::from(scaling == Fp8Scaling::Rows);
            this.set(attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast)?;
        }
        Ok(this)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), GpuError> {
        // SAFETY: the library copies a value of that size.
        check("cublasLtMatmulDescSetAttribute", unsafe {
            sys::cublasLtMatmulDescSetAttribute(self.0, attribute, (&raw const *value).cast(), size_of::<T>())
        })
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: it is this value's; freeing host memory cannot fail.
        let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// A matrix by columns, which begin `pitch` elements apart.
    fn new(element: sys::cudaDataType_t, [rows, cols]: [usize; 2], pitch: usize) -> Result<Self, GpuError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place to write to.
        check("cublasLtMatrixLayoutCreate", unsafe {
            sys::cublasLtMatrixLayoutCreate(&mut handle, element, rows as u64, cols as u64, pitch as i64)
        })?;
        Ok(Self(handle))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: it is this value's; freeing host memory cannot fail.
        let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(workspace: usize) -> Result<Self, GpuError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place to write to.
        check("cublasLtMatmulPreferenceCreate", unsafe {
            sys::cublasLtMatmulPreferenceCreate(&mut handle)
        })?;
        let this = Self(handle);
        // SAFETY: the library copies a value of that size.
        check("cublasLtMatmulPreferenceSetAttribute", unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(
                this.0,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of::<usize>(),
            )
        })?;
        Ok(this)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: it is this value's; freeing host memory cannot fail.
        let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

/// The library has no kernels for this GPU and shape: of e4m3 values it wants more than of others.
fn is_unsupported(error: &GpuError) -> bool {
    matches!(error, GpuError::Call { code, .. } if code == "CUBLAS_STATUS_NOT_SUPPORTED")
}

fn check(call: &'static str, status: sys::cublasStatus_t) -> Result<(), GpuError> {
    match status {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        error => Err(GpuError::Call {
            call,
            code: format!("{error:?}"),
            message: "cuBLASLt".to_owned(),
        }),
    }
}
