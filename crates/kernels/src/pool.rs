/// Adds the rows of `x`, `[rows, n]`, to `sum`, `[n]`, one after another.
///
/// In `f64`: sums of `f32` are exact there unless rows differ by many orders of magnitude, so it hardly ever matters where
/// a prompt was cut.
pub fn sum_rows(x: &[f32], sum: &mut [f64]) {
    assert!(
        !sum.is_empty() && x.len().is_multiple_of(sum.len()),
        "{} elements are not rows of {}",
        x.len(),
        sum.len()
    );
    for row in x.chunks_exact(sum.len()) {
        sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
    }
}
