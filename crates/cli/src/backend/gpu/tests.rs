use super::*;

#[test]
fn a_gpu_that_fills_while_a_model_loads_is_full_and_not_broken() {
    let failed = |code: &str| {
        let error = GpuError::Call {
            call: "cuModuleLoadData",
            code: code.into(),
            message: "said the driver".into(),
        };
        let holder = Holder {
            pid: 4711,
            name: None,
            bytes: Some(1 << 30),
        };
        not_loaded(ModelError::Gpu(error), 3, |_| vec![holder])
    };
    let full = failed("CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(full.exit_code(), 4);
    for part in ["cuda:3", "4711", "--device-memory"] {
        assert!(full.to_string().contains(part), "{full}");
    }
    assert_eq!(failed("CUDA_ERROR_ILLEGAL_ADDRESS").exit_code(), 7);
}

#[test]
fn what_a_gpu_does_without_is_named() {
    let [sixteen_bits, eight_bits] = [GpuKvElement::Bf16, GpuKvElement::Fp8].map(hopper_head_dims);
    let of = |capability| Kernels {
        capability,
        hopper: capability == (9, 0),
        hopper_head_dims: sixteen_bits,
    };
    let paths = |capability, head_dims: &[usize], eager| {
        let disabled = disabled(of(capability), head_dims, false, eager);
        disabled.iter().map(|disabled| disabled.path).collect::<Vec<_>>()
    };
    assert!(paths((9, 0), sixteen_bits, false).is_empty());
    assert_eq!(
        paths((9, 0), &[512], true),
        ["CUDA graphs", "Hopper prefill attention"]
    );
    let without = Kernels {
        hopper: false,
        ..of((9, 0))
    };
    let without = disabled(without, &[128], false, false);
    assert!(without.len() == 1 && without[0].reason.contains("90a in CUDA_ARCHS"));
    let heads = disabled(of((9, 0)), &[256, 512], false, false);
    assert!(heads.len() == 1 && heads[0].reason.contains("heads of 512"));
    assert_eq!(
        paths((8, 6), &[128], false),
        ["Hopper prefill attention", "thread block clusters in sampling"]
    );
    assert_eq!(paths((12, 0), &[128], false), ["Hopper prefill attention"]);
    let over_fp8 = |head_dims| {
        let kernels = Kernels {
            hopper_head_dims: eight_bits,
            ..of((9, 0))
        };
        disabled(kernels, head_dims, false, false)
    };
    assert!(over_fp8(eight_bits).is_empty());
    assert!(over_fp8(&[96])[0].reason.contains("heads of 96"));
    let fp8 = |capability| disabled(of(capability), &[128], true, false);
    assert!(fp8((9, 0)).is_empty());
    let products = |capability| {
        let disabled = fp8(capability);
        disabled.iter().any(|disabled| disabled.path == "FP8 products")
    };
    assert_eq!([(8, 6), (8, 9), (12, 0)].map(products), [true, false, false]);
}
