//! Mixtures of experts: each token goes to a few of many MLPs ([Shazeer et al.](https://arxiv.org/abs/1701.06538)).
//!
//! Rows are grouped by expert, so that a step reads the weights of each expert once, and buffers have room for all rows to go
//! to one expert: what a step takes does not depend on where they go. Each row is multiplied as if it were alone, and its sum
//! runs over its experts in ascending order, so its result does not depend on the rows beside it either.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use plimsoll_core::Oom;
use plimsoll_device::Arena;

use crate::activation::{ExpertActivation, expert_activation};
use crate::linear::Linear;
use crate::parallel::{Disjoint, run_ranges};
use crate::simd::{InPlace, LANES, Lanes, Level, Simd, dispatch, exp, times_sigmoid};

/// Over which experts the weights of a row's experts sum to 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterSoftmax {
    /// All: the softmax comes before the choice, and what is chosen is not normalised again.
    All,
    /// Those that are chosen: the softmax comes after the choice, or before it and what is chosen is divided by its sum,
    /// which is the same.
    Chosen,
}

/// One row's way to one expert.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Route {
    /// Index of the expert.
    pub expert: u32,
    /// The row.
    pub row: u32,
    /// What the expert's output is multiplied by.
    pub weight: f32,
}

/// How logits of experts become weights.
#[derive(Clone, Copy, Debug)]
pub struct Router<'a> {
    /// Over which experts weights sum to 1.
    pub softmax: RouterSoftmax,
    /// Multiplies the logits first.
    pub scale: f32,
    /// `[experts]`: multiplies the weights of each expert (Gemma 4).
    pub expert_scale: Option<&'a [f32]>,
}

impl Router<'_> {
    /// Without scales.
    pub fn plain(softmax: RouterSoftmax) -> Self {
        Self {
            softmax,
            scale: 1.0,
            expert_scale: None,
        }
    }
}

/// Chooses the experts of each row: `logits` is `[rows, experts]`, `routes` gets as many for each row as there is room for,
/// at most `experts`, those with the largest logits, of equal ones the first. They are sorted by expert, then by row. The
/// logits are lost.
///
/// A row with logits that are not numbers gets weights that are none.
pub fn route(logits: &mut [f32], experts: usize, router: Router<'_>, routes: &mut [Route]) {
    route_at(Level::detect(), logits, experts, router, routes);
}

fn route_at(level: Level, logits: &mut [f32], experts: usize, router: Router<'_>, routes: &mut [Route]) {
    let rows = logits.len() / experts;
    assert_eq!(logits.len(), rows * experts, "logits are not [rows, {experts}]");
    let chosen = routes.len() / rows.max(1);
    assert_eq!(routes.len(), rows * chosen, "routes are not [rows, n]");
    assert!((1..=experts).contains(&chosen), "{chosen} of {experts} experts");
    assert!(
        router.expert_scale.is_none_or(|scales| scales.len() == experts),
        "a scale for each of {experts} experts"
    );
    {
        let (logits, routes) = (Disjoint::new(logits), Disjoint::new(routes));
        run_ranges(rows, (4096 / experts).max(1), &|rows| {
            for row in rows {
                // SAFETY: rows are disjoint.
                let (logits, routes) = unsafe {
                    (
                        logits.part(row * experts, experts),
                        routes.part(row * chosen, chosen),
                    )
                };
                route_row(level, row, logits, router, routes);
            }
        });
    }
    routes.sort_unstable_by_key(|route| (route.expert, route.row));
}

fn route_row(level: Level, row: usize, logits: &mut [f32], router: Router<'_>, routes: &mut [Route]) {
    logits.iter_mut().for_each(|logit| *logit *= router.scale);
    // What is no number is the largest, so that it reaches the weights.
    let key = |logit: f32| if logit.is_nan() { f32::INFINITY } else { logit };
    let mut last: Option<usize> = None;
    for route in &mut *routes {
        let is_before = |a: usize, b: usize| {
            let (x, y) = (key(logits[a]), key(logits[b]));
            x > y || (x == y && a < b)
        };
        let left = (0..logits.len()).filter(|&expert| last.is_none_or(|last| is_before(last, expert)));
        let best = left.reduce(|best, next| if is_before(next, best) { next } else { best });
        let expert = best.expect("no more are chosen than there are");
        *route = Route {
            expert: expert as u32,
            row: row as u32,
            weight: logits[expert],
        };
        last = Some(expert);
    }
    let max = routes[0].weight;
    for some in routes.chunks_mut(LANES) {
        let mut weights = [0f32; LANES];
        let weights = &mut weights[..some.len()];
        weights
            .iter_mut()
            .zip(&*some)
            .for_each(|(to, route)| *to = route.weight);
        dispatch(level, InPlace(weights, Exp { max }));
        some.iter_mut()
            .zip(weights)
            .for_each(|(route, weight)| route.weight = *weight);
    }
    let sum: f32 = match router.softmax {
        RouterSoftmax::All => {
            dispatch(level, InPlace(logits, Exp { max }));
            logits.iter().sum()
        }
        RouterSoftmax::Chosen => routes.iter().map(|route| route.weight).sum(),
    };
    // `exp` makes a number of what is none.
    let poison = if max.is_finite() { 0.0 } else { f32::NAN };
    for route in routes {
        route.weight = route.weight / sum + poison;
        if let Some(scales) = router.expert_scale {
            route.weight *= scales[route.expert as usize];
        }
    }
}

/// `exp(x - max)`.
struct Exp {
    max: f32,
}

impl Lanes for Exp {
    #[inline(always)]
    unsafe fn of<S: Simd>(&self, x: S::F) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { exp::<S>(S::sub(x, S::splat(self.max))) }
    }
}

/// The matrices of all experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertWeights<'a> {
    /// Gate and up, stacked, of each: from `[n]` to `[2 × inner]`.
    pub gate_up: &'a [Arc<Linear>],
    /// Of each: from `[inner]` to `[n]`.
    pub down: &'a [Arc<Linear>],
}

/// Room for all rows to go to one expert.
#[derive(Debug)]
pub struct ExpertBuffers<'a> {
    /// `[rows, n]`: inputs.
    pub gathered: &'a mut [f32],
    /// `[rows, 2 × inner]`.
    pub gate_up: &'a mut [f32],
    /// `[rows, inner]`.
    pub activated: &'a mut [f32],
    /// `[rows, n]`: outputs.
    pub out: &'a mut [f32],
}

/// `out = Σ weight × expert(x)` over the routes of each row, in order: `routes` as [`route`] leaves them, `x` and `out` are
/// `[rows, n]`. An expert to which no row goes is not read. What is taken from the arena depends on the number of rows alone.
///
/// # Errors
/// [`Oom`] if the arena has no room for quantised inputs.
pub fn experts(
    x: &[f32],
    routes: &[Route],
    weights: ExpertWeights<'_>,
    activation: ExpertActivation,
    buffers: ExpertBuffers<'_>,
    out: &mut [f32],
    arena: &Arena,
) -> Result<(), Oom> {
    let width = weights.gate_up[0].inputs();
    let rows = x.len() / width;
    assert_eq!(
        (x.len(), out.len()),
        (rows * width, rows * width),
        "x and out are [rows, {width}]"
    );
    let ExpertBuffers {
        gathered,
        gate_up,
        activated,
        out: projected,
    } = buffers;
    out.fill(0.0);
    for group in routes.chunk_by(|a, b| a.expert == b.expert) {
        let expert = group[0].expert as usize;
        let (up, down) = (&weights.gate_up[expert], &weights.down[expert]);
        let count = group.len();
        for (to, route) in gathered.chunks_exact_mut(width).zip(group) {
            to.copy_from_slice(&x[route.row as usize * width..][..width]);
        }
        let gate_up = &mut gate_up[..count * up.outputs()];
        up.forward_in_room(rows, &gathered[..count * width], gate_up, arena)?;
        let activated = &mut activated[..count * down.inputs()];
        expert_activation(activation, gate_up, down.inputs(), activated);
        let projected = &mut projected[..count * width];
        down.forward_in_room(rows, activated, projected, arena)?;
        add_weighted(projected, group, width, out);
    }
    Ok(())
}

/// Adds each row of `x` times its weight to its row of `out`.
fn add_weighted(x: &[f32], routes: &[Route], width: usize, out: &mut [f32]) {
    let out = Disjoint::new(out);
    run_ranges(routes.len(), (16384 / width).max(1), &|range| {
        for (route, x) in routes[range.clone()]
            .iter()
            .zip(x.chunks_exact(width).skip(range.start))
        {
            // SAFETY: an expert gets a row once.
            let out = unsafe { out.part(route.row as usize * width, width) };
            out.iter_mut()
                .zip(x)
                .for_each(|(out, x)| *out += route.weight * x);
        }
    });
}

/// Adds the output of an expert that every row goes to, `x`, `[rows, n]`, times the sigmoid of its gate, `[rows]`, to `out`.
pub fn add_gated(x: &[f32], gates: &mut [f32], out: &mut [f32]) {
    dispatch(Level::detect(), InPlace(gates, Sigmoid));
    let width = out.len() / gates.len().max(1);
    let rows = out
        .chunks_exact_mut(width)
        .zip(x.chunks_exact(width))
        .zip(&*gates);
    for ((out, x), gate) in rows {
        out.iter_mut().zip(x).for_each(|(out, x)| *out += gate * x);
    }
}

/// `1 / (1 + exp(-x))`.
struct Sigmoid;

impl Lanes for Sigmoid {
    #[inline(always)]
    unsafe fn of<S: Simd>(&self, x: S::F) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { times_sigmoid::<S>(S::splat(1.0), x) }
    }
}

#[cfg(test)]
mod tests;
