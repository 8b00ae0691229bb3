//! Rows of an image: what they are made of, and how they come to the decoder.

use half::bf16;
use plimsoll_kernels::cuda::{EncoderKernels, KeptRows};
use rand::Rng;

use super::{BF16, GUARD, random_order, upload_guarded, written};
use crate::common::{assert_close, gpu, poisoned, random, rng, upload, widen};

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn encoder_makes_rows_of_squares_of_patches() {
    let gpu = gpu();
    let kernels = EncoderKernels::load(&gpu).unwrap();
    let mut rng = rng("squares");
    for _ in 0..20 {
        let merge = rng.random_range(1..=4);
        let [lines, columns] = [0; 2].map(|_| rng.random_range(1..=9));
        let (width, n) = (columns * merge, [8, 48, 200, 1024][rng.random_range(0..4)]);
        let x = random(&mut rng, lines * merge * width * n);
        let (mut want, mut means) = (Vec::new(), Vec::new());
        for (line, column) in (0..lines).flat_map(|line| (0..columns).map(move |column| (line, column))) {
            for element in 0..n {
                let before = want.len();
                for (y, x_at) in (0..merge).flat_map(|y| (0..merge).map(move |x| (y, x))) {
                    let patch = (line * merge + y) * width + column * merge + x_at;
                    want.push(x[patch * n + element].to_f32());
                }
                let own = want[before..].iter().map(|&x: &f32| f64::from(x));
                means.push(own.sum::<f64>() / (merge * merge) as f64);
            }
        }
        let from = upload(&gpu, &x);
        let out = poisoned::<bf16>(&gpu, x.len() + GUARD);
        let [from, to] = [&from, &out].map(|slab| slab.slice().range(0..x.len()));
        kernels.gather_squares(from, [n, width, merge], to).unwrap();
        let about = format!("{lines} x {columns} squares of {merge} x {merge} patches of {n}");
        assert!(written(&gpu, &out, x.len()) == want, "{about}");
        let out = poisoned::<bf16>(&gpu, means.len() + GUARD);
        let to = out.slice().range(0..means.len());
        kernels.average_squares(from, [n, width, merge], to).unwrap();
        assert_close(&about, &written(&gpu, &out, means.len()), &means, BF16);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU: make test-gpu"]
fn encoder_rows_are_kept_by_page_and_taken_again() {
    let gpu = gpu();
    let kernels = EncoderKernels::load(&gpu).unwrap();
    let mut rng = rng("kept rows");
    for _ in 0..20 {
        let (page, rows, n): (usize, usize, usize) =
            (16, rng.random_range(1..70), 8 * rng.random_range(1..30));
        let parts = rng.random_range(1..4);
        let part = rng.random_range(0..parts);
        let used = rows.div_ceil(page);
        let pages: Vec<i32> = (0..used).map(|index| (2 * (used - index)) as i32).collect();
        let kept_rows = page * (2 * used + 1);
        let x = random(&mut rng, rows * n);
        let kept = poisoned::<bf16>(&gpu, kept_rows * parts * n);
        let (from, list) = (upload(&gpu, &x), upload(&gpu, &pages));
        let kept = KeptRows {
            rows: kept.slice().range(0..kept_rows * parts * n),
            stride: parts * n,
            column: part * n,
        };
        let list = (list.slice().range(0..used), page);
        let order = random_order(&mut rng, rows);
        let order_on_gpu = order.as_ref().map(|order| upload(&gpu, order));
        let order_of = order_on_gpu.as_ref().map(|order| order.slice().range(0..rows));
        kernels
            .keep_rows(from.slice().range(0..x.len()), rows, order_of, list, kept)
            .unwrap();
        // Where each row of the image is in x.
        let mut places: Vec<usize> = (0..rows).collect();
        for (at, &row) in order.iter().flatten().enumerate() {
            places[row as usize] = at;
        }
        // Rows of a step, some of which are an image's.
        let batch = random(&mut rng, 40 * n);
        let count = rng.random_range(0..30);
        let taken: Vec<(usize, usize)> = (0..count).map(|i| (i + 3, rng.random_range(0..rows))).collect();
        let pairs: Vec<i32> = taken
            .iter()
            .flat_map(|&(to, row)| [to as i32, pages[row / page] * page as i32 + (row % page) as i32])
            .collect();
        let pairs_on_gpu = upload(&gpu, &pairs);
        let pairs = pairs_on_gpu.slice().range(0..pairs.len());
        for adds in [false, true] {
            let mut want = widen(&batch);
            for &(to, row) in &taken {
                for i in 0..n {
                    let (old, new) = (want[to * n + i], x[places[row] * n + i].to_f32());
                    want[to * n + i] = if adds {
                        bf16::from_f32(old + new).to_f32()
                    } else {
                        new
                    };
                }
            }
            let slab = upload_guarded(&gpu, &batch);
            let hidden = slab.slice().range(0..batch.len());
            match adds {
                false => kernels.put_rows(kept, pairs, hidden, 40),
                true => kernels.add_rows(kept, pairs, hidden, 40),
            }
            .unwrap();
            assert_eq!(
                written(&gpu, &slab, batch.len()),
                want,
                "{rows} rows of {n}, adds: {adds}"
            );
        }
    }
}
