//! Kernels of cuBLASLt, loaded while other ways are measured. The library loads a kernel when a product by it is launched or captured for
//! the first time, which takes 2 to 4 ms (on a machine with an H200), as long as all its measurements.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, Scope};

use plimsoll_device::cuda::{GpuError, SideStream};

use super::cublas_lt::{Algorithm, CublasLt, Operands, Shape};

/// Algorithms of a product that are measured.
const MOST_ALGORITHMS: usize = 3;

/// Products of the library, in the order in which they are measured.
#[derive(Debug)]
pub(super) struct Ahead<'a> {
    lt: &'a CublasLt,
    products: Vec<Product>,
    /// The next one whose kernels are to be loaded.
    next: AtomicUsize,
    /// The one that is measured now: kernels of those before it are of no use any more.
    measured: AtomicUsize,
}

#[derive(Debug)]
struct Product {
    shape: Shape,
    operands: Operands,
    algorithms: OnceLock<Vec<Algorithm>>,
}

impl<'a> Ahead<'a> {
    /// Of these products, of which those that come again count once.
    pub(super) fn new(lt: &'a CublasLt, products: impl IntoIterator<Item = (Shape, Operands)>) -> Self {
        let mut all: Vec<Product> = Vec::new();
        for (shape, operands) in products {
            if all.iter().all(|product| product.shape != shape) {
                all.push(Product {
                    shape,
                    operands,
                    algorithms: OnceLock::new(),
                });
            }
        }
        Self {
            lt,
            products: all,
            next: AtomicUsize::new(0),
            measured: AtomicUsize::new(0),
        }
    }

    /// Loads kernels on a thread of its own, until all are there or [`Self::end`] is called.
    pub(super) fn start<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        // Whatever fails here fails again where it is measured; without a thread, kernels are loaded there.
        let load = || drop(self.load());
        let _ = Builder::new()
            .name("load-cublas".to_owned())
            .spawn_scoped(scope, load);
    }

    /// A product's algorithms to be measured, the one that cuBLAS thinks fastest first; perhaps none.
    pub(super) fn algorithms(&self, shape: &Shape) -> Result<Vec<Algorithm>, GpuError> {
        match self.products.iter().find(|product| product.shape == *shape) {
            Some(product) => product.ask(self.lt).cloned(),
            None => self.lt.algorithms(shape, MOST_ALGORITHMS),
        }
    }

    /// The measurement of a product begins.
    pub(super) fn begin(&self, shape: &Shape) {
        if let Some(at) = self.products.iter().position(|product| product.shape == *shape) {
            self.measured.fetch_max(at, Ordering::Relaxed);
        }
    }

    /// All are measured.
    pub(super) fn end(&self) {
        self.measured.store(usize::MAX, Ordering::Relaxed);
    }

    fn load(&self) -> Result<(), GpuError> {
        let stream = SideStream::new(self.lt.gpu())?;
        loop {
            let at = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(product) = self.products.get(at) else {
                return Ok(());
            };
            let is_of_use = || self.measured.load(Ordering::Relaxed) <= at;
            if !is_of_use() {
                continue;
            }
            for algorithm in product.ask(self.lt)?.iter().take_while(|_| is_of_use()) {
                // What fails here fails where it is measured, too.
                let _ = stream.rehearse(|stream| {
                    // SAFETY: it is not run.
                    unsafe {
                        self.lt
                            .run_on(stream, &product.shape, algorithm, &product.operands)
                    }
                });
            }
        }
    }
}

impl Product {
    fn ask(&self, lt: &CublasLt) -> Result<&Vec<Algorithm>, GpuError> {
        if let Some(known) = self.algorithms.get() {
            return Ok(known);
        }
        let algorithms = lt.algorithms(&self.shape, MOST_ALGORITHMS)?;
        Ok(self.algorithms.get_or_init(|| algorithms))
    }
}
