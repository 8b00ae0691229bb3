//! The picture with the most patches.

use std::cmp::Reverse;

use crate::families::Rule;
use crate::plan::{Overrides, Worst};

/// The picture with the most patches that `rule` makes of any size and of any overrides that lower its bounds.
pub(crate) fn worst(rule: Rule) -> Option<Worst> {
    let sizes: Vec<(usize, usize)> = match rule {
        Rule::Square { pixels, .. } => vec![(pixels, pixels)],
        // Both sides can be the longest at once, and neither can be longer.
        Rule::Edge { longest, .. } => vec![(longest, longest)],
        Rule::Area {
            patch,
            merge,
            max_pixels,
            ..
        } => by_area(patch * merge, max_pixels),
    };
    let plans = sizes.into_iter().filter_map(|(width, height)| {
        let plan = rule.plan(width, height, &Overrides::default()).ok()?;
        Some(Worst { width, height, plan })
    });
    // Of equals that with the fewest pixels, which is soonest made; of those the first, the most nearly square.
    let order = |worst: &Worst| (worst.plan.grid.patches(), Reverse(worst.width * worst.height));
    plans.reduce(|best, next| match order(&next) > order(&best) {
        true => next,
        false => best,
    })
}

/// Sizes among which the worst is.
///
/// A picture within the bounds keeps its sides, rounded to the factor: the most cells are those of the sides `a` and `b` with the
/// largest `a * b <= max_pixels / factor²`, and every `a` is tried with each rounding of its side, up to the greatest ratio. The
/// other sizes are those that the rule scales: tiny ones up and long ones down, each of which it rounds away from its bound.
fn by_area(factor: usize, max_pixels: usize) -> Vec<(usize, usize)> {
    let cells = max_pixels / (factor * factor);
    let root = (max_pixels as f64).sqrt() as usize / factor;
    let mut sizes = Vec::new();
    for a in (1..=root.max(1)).rev() {
        let b = (cells / a).max(1);
        for height in [
            a * factor,
            a * factor + factor / 4,
            a * factor + factor.div_ceil(2) - 1,
        ] {
            sizes.push((b * factor, height));
            sizes.push(((200 * height).min(b * factor + factor / 2), height));
            sizes.push((200 * height, height));
        }
    }
    for side in [1, 3, 7] {
        sizes.extend((1..=200).map(|ratio| (side * ratio, side)));
        sizes.extend((1..=200).map(|ratio| (10_000 * side * ratio, 10_000 * side)));
    }
    sizes
}
