use candle_core::DType;
use candle_core::quantized::GgmlDType;

/// How the elements of a weight matrix are stored in a checkpoint: a float type, or one of ggml's block formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "ggml's names, as GGUF files use them")]
#[allow(non_camel_case_types)]
pub enum WeightType {
    F32,
    F16,
    Bf16,
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
    /// Elements in one block: every row holds a whole number of blocks.
    pub fn block_len(self) -> usize {
        GgmlDType::from(self).block_size()
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        GgmlDType::from(self).type_size()
    }

    /// Bytes of a row of `cols` elements; `None` where `cols` is not a whole number of blocks.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        cols.is_multiple_of(self.block_len())
            .then(|| cols / self.block_len() * self.block_bytes())
    }
}

impl From<GgmlDType> for WeightType {
    fn from(dtype: GgmlDType) -> Self {
        match dtype {
            GgmlDType::F32 => Self::F32,
            GgmlDType::F16 => Self::F16,
            GgmlDType::BF16 => Self::Bf16,
            GgmlDType::Q4_0 => Self::Q4_0,
            GgmlDType::Q4_1 => Self::Q4_1,
            GgmlDType::Q5_0 => Self::Q5_0,
            GgmlDType::Q5_1 => Self::Q5_1,
            GgmlDType::Q8_0 => Self::Q8_0,
            GgmlDType::Q8_1 => Self::Q8_1,
            GgmlDType::Q2K => Self::Q2K,
            GgmlDType::Q3K => Self::Q3K,
            GgmlDType::Q4K => Self::Q4K,
            GgmlDType::Q5K => Self::Q5K,
            GgmlDType::Q6K => Self::Q6K,
            GgmlDType::Q8K => Self::Q8K,
        }
    }
}

impl From<WeightType> for GgmlDType {
    fn from(dtype: WeightType) -> Self {
        match dtype {
            WeightType::F32 => Self::F32,
            WeightType::F16 => Self::F16,
            WeightType::Bf16 => Self::BF16,
            WeightType::Q4_0 => Self::Q4_0,
            WeightType::Q4_1 => Self::Q4_1,
            WeightType::Q5_0 => Self::Q5_0,
            WeightType::Q5_1 => Self::Q5_1,
            WeightType::Q8_0 => Self::Q8_0,
            WeightType::Q8_1 => Self::Q8_1,
            WeightType::Q2K => Self::Q2K,
            WeightType::Q3K => Self::Q3K,
            WeightType::Q4K => Self::Q4K,
            WeightType::Q5K => Self::Q5K,
            WeightType::Q6K => Self::Q6K,
            WeightType::Q8K => Self::Q8K,
        }
    }
}

impl TryFrom<DType> for WeightType {
    type Error = WeightError;

    fn try_from(dtype: DType) -> Result<Self, WeightError> {
        match dtype {
            DType::F32 => Ok(Self::F32),
            DType::F16 => Ok(Self::F16),
            DType::BF16 => Ok(Self::Bf16),
            other => Err(WeightError::UnsupportedDtype(format!("{other:?}"))),
        }
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
