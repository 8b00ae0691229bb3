use plimsoll_core::{EncoderLimits, ImageInput, PatchShape};
use plimsoll_kernels::Activation;

use super::*;
use crate::PatchWindows;
use crate::encoder_spec::families;

/// Of Qwen2.5-VL's kind, with windows of so many rows along a side, if there are any.
fn spec(side: Option<usize>) -> EncoderSpec {
    EncoderSpec {
        family: &families::QWEN2_5,
        input: ImageInput {
            placeholder: 5,
            patch: PatchShape {
                pixels: 16,
                frames: 2,
            },
            merge: 2,
            only: None,
            mutual: false,
            limits: EncoderLimits {
                max_patches: 1 << 16,
                max_images_per_prompt: 1,
            },
        },
        patch_shape: vec![3, 2, 4, 4],
        hidden_size: 48,
        heads: 3,
        intermediate_size: 56,
        mlp: EncoderMlp::Gated(Activation::Silu),
        layers: 3,
        eps: 1e-6,
        positions_per_side: None,
        theta: Some(1e4),
        windows: side.map(|side| PatchWindows {
            side,
            full_layers: vec![1],
        }),
        merger_eps: 1e-6,
        out_size: 128,
        features: Vec::new(),
    }
}

/// Parts follow each other, are of one frame or of whole frames, and fit into what they are given; windows are whole.
#[test]
fn parts_are_all_patches_and_whole_windows() {
    for side in [None, Some(1), Some(4), Some(7), Some(30)] {
        let spec = spec(side);
        for [frames, height, width] in [
            [1, 2, 2],
            [1, 64, 64],
            [3, 20, 34],
            [2, 64, 66],
            [1, 2, 4096],
            [9, 2, 2],
        ] {
            let grid = ImageGrid {
                frames,
                height,
                width,
            };
            let (frame, patches) = (height * width, grid.patches());
            let order = PatchOrder::new(&spec, grid);
            let layout = EncoderLayout::new(&spec, patches).unwrap();
            let lens = order.segments(true);
            assert_eq!(lens.is_empty(), side.is_none());
            assert!(lens.is_empty() || lens.len() < layout.windows.len());
            assert_eq!(layout.order.len(), side.map_or(0, |_| patches / 4));
            let (mut next, mut next_window) = (0, 0);
            for part in parts(grid, &order) {
                let about = format!("{side:?}, {grid:?}: {part:?}");
                let Part { rows, windows } = part;
                assert!(rows.start == next && !rows.is_empty(), "{about}");
                assert!(2 * rows.len() * 56 <= layout.inner.len(), "{about}");
                assert!(rows.len() * 56 <= layout.activated.len(), "{about}");
                let in_one = rows.start / frame == (rows.end - 1) / frame;
                let whole = rows.start % frame == 0 && rows.end % frame == 0;
                assert!(in_one || whole && side.is_none(), "{about}");
                if side.is_some() {
                    assert!(windows.start == next_window, "{about}");
                    assert_eq!(lens[windows.clone()].iter().sum::<usize>(), rows.len(), "{about}");
                    assert!(rows.len() <= PART || windows.len() == 1, "{about}");
                }
                (next, next_window) = (rows.end, windows.end);
            }
            assert_eq!((next, next_window), (patches, lens.len()), "{side:?}, {grid:?}");
        }
    }
}
