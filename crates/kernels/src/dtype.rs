/// How the elements of a weight matrix are stored in a checkpoint: a float type, or one of ggml's block formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "ggml's names, as GGUF files use them")]
#[allow(non_camel_case_types)]
pub enum WeightType {
    F32,
    F16,
    Bf16,
    /// Eight bits, `e4m3`, without the scale that belongs to them; there are no kernels for it on a CPU.
    F8E4M3,
    /// Bytes that mean something together with another tensor; there are no kernels for them.
    U8,
    /// Words of four bytes, likewise: packed codes, indices.
    I32,
    /// Words of eight bytes, likewise: sizes.
    I64,
    /// Four bits, `e2m1`, with a power of two for each 32, as ggml orders them
    /// ([OCP Microscaling Formats](https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf)).
    Mxfp4,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Q8K,
}

impl WeightType {
    /// By the number that GGUF files have for it (`enum ggml_type`); `None` for types without kernels.
    pub fn from_ggml(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            9 => Self::Q8_1,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            15 => Self::Q8K,
            30 => Self::Bf16,
            39 => Self::Mxfp4,
            _ => return None,
        })
    }

    /// As formats and files name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F8E4M3 => "F8_E4M3",
            Self::U8 => "U8",
            Self::I32 => "I32",
            Self::I64 => "I64",
            Self::Mxfp4 => "MXFP4",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q8_1 => "Q8_1",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Q8K => "Q8_K",
        }
    }

    /// Elements and bytes of one block (`ggml-common.h`).
    const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::F8E4M3 | Self::U8 => (1, 1),
            Self::I32 => (1, 4),
            Self::I64 => (1, 8),
            Self::Mxfp4 => (32, 17),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q8_1 => (32, 36),
            Self::Q2K => (256, 84),
            Self::Q3K => (256, 110),
            Self::Q4K => (256, 144),
            Self::Q5K => (256, 176),
            Self::Q6K => (256, 210),
            Self::Q8K => (256, 292),
        }
    }

    /// Elements in one block: every row holds a whole number of blocks.
    pub fn block_len(self) -> usize {
        self.block().0
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.block().1
    }

    /// Bytes of a row of `cols` elements; `None` where `cols` is not a whole number of blocks.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        cols.is_multiple_of(self.block_len())
            .then(|| (cols / self.block_len()).checked_mul(self.block_bytes()))
            .flatten()
    }
}

/// A weight matrix as it lies in a checkpoint: row-major, `rows` outputs by `cols` inputs, no padding, any alignment.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    dtype: WeightType,
    rows: usize,
    cols: usize,
    data: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// Checks the shape against the number of bytes.
    pub fn new(dtype: WeightType, rows: usize, cols: usize, data: &'a [u8]) -> Result<Self, WeightError> {
        let row_bytes = dtype.row_bytes(cols).filter(|&bytes| bytes > 0);
        match row_bytes.and_then(|bytes| bytes.checked_mul(rows)) {
            Some(bytes) if bytes == data.len() => Ok(Self {
                dtype,
                rows,
                cols,
                data,
            }),
            _ => Err(WeightError::Shape {
                dtype,
                rows,
                cols,
                bytes: data.len(),
            }),
        }
    }

    /// Storage of the elements.
    pub fn dtype(&self) -> WeightType {
        self.dtype
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The blocks of one row.
    pub fn row(&self, row: usize) -> &'a [u8] {
        let bytes = self.data.len() / self.rows.max(1);
        &self.data[row * bytes..(row + 1) * bytes]
    }
}

/// Why weights cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WeightError {
    /// Bytes and shape disagree.
    #[error(
        "{bytes} bytes are not a {rows} x {cols} matrix of {dtype:?}, whose rows are whole blocks of {} elements in \
         {} bytes: the file is damaged or describes its tensors wrongly",
        dtype.block_len(), dtype.block_bytes()
    )]
    Shape {
        /// Storage of the elements.
        dtype: WeightType,
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
        /// Bytes given.
        bytes: usize,
    },
    /// Parts of one stacked layer take inputs of different width.
    #[error("the parts of a stacked layer must take equally many inputs, these take {0:?}")]
    Parts(Vec<usize>),
    /// The bias does not fit the outputs.
    #[error("a bias of {bias} elements does not fit a layer of {outputs} outputs")]
    Bias {
        /// Elements of the bias.
        bias: usize,
        /// Outputs of the layer.
        outputs: usize,
    },
    /// No kernel for this element type.
    #[error("weights of type {0} are not supported; f32, f16, bf16 and ggml's quantised types are")]
    UnsupportedDtype(String),
    /// Device memory ran out.
    #[error(transparent)]
    Oom(#[from] plimsoll_core::Oom),
}
