//! Positions in three dimensions (mRoPE, [Qwen2-VL](https://arxiv.org/abs/2409.12191)).

use std::ops::Range;

use plimsoll_core::ImageSpan;

/// Position in time, row and column of each token of `range`, of a prompt with these images, `merge × merge` of whose patches
/// are a row. Text has the same in all three, and goes on behind an image by the larger of its sides.
pub(crate) fn positions(images: &[ImageSpan], merge: usize, range: Range<usize>) -> Vec<[u32; 3]> {
    let mut found = Vec::with_capacity(range.len());
    // How far positions of text lie below its indices.
    let mut lag = 0;
    let mut at = range.start;
    let text = |found: &mut Vec<[u32; 3]>, tokens: Range<usize>, lag: usize| {
        found.extend(tokens.map(|token| [(token - lag) as u32; 3]));
    };
    for span in images {
        text(&mut found, at..span.start.clamp(at, range.end), lag);
        let (columns, rows) = (span.image.grid.width / merge, span.image.grid.height / merge);
        let first = span.start - lag;
        found.extend(span.rows_in(&range).map(|row| {
            let place = [row / (rows * columns), row / columns % rows, row % columns];
            place.map(|offset| (first + offset) as u32)
        }));
        lag += span.len - rows.max(columns).min(span.len);
        at = at.max(span.end()).min(range.end.max(at));
        if span.end() >= range.end {
            return found;
        }
    }
    text(&mut found, at..range.end, lag);
    found
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use plimsoll_core::{Image, ImageGrid, PatchShape};

    fn span(start: usize, height: usize, width: usize) -> ImageSpan {
        ImageSpan {
            start,
            len: height * width / 4,
            first: 0,
            image: Arc::new(Image::blank(
                [0; 32],
                ImageGrid {
                    frames: 1,
                    height,
                    width,
                },
                PatchShape { pixels: 1, frames: 1 },
            )),
        }
    }

    #[test]
    fn text_goes_on_behind_the_larger_side() {
        let images = [span(2, 4, 6), span(9, 8, 2), span(14, 2, 2)];
        let all = positions(&images, 2, 0..18);
        let text = |at: u32| [at; 3];
        let expected = [
            text(0),
            text(1),
            [2, 2, 2],
            [2, 2, 3],
            [2, 2, 4],
            [2, 3, 2],
            [2, 3, 3],
            [2, 3, 4],
            text(5),
            [6, 6, 6],
            [6, 7, 6],
            [6, 8, 6],
            [6, 9, 6],
            text(10),
            text(11),
            text(12),
            text(13),
            text(14),
        ];
        assert_eq!(all, expected);
        for start in 0..18 {
            for end in start..=18 {
                assert_eq!(
                    positions(&images, 2, start..end),
                    expected[start..end],
                    "{start}..{end}"
                );
            }
        }
        assert_eq!(positions(&[], 2, 3..5), [[3; 3], [4; 3]]);
    }
}
