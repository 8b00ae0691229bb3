// What becomes of the sums of a linear layer, and the activations of a gated MLP.
#pragma once

// `LinearOutput::mode` of crates/kernels/src/cuda/linear/stream.rs.
enum Mode { kBf16 = 0, kF32 = 1, kGlu = 2 };

// `Activation` of crates/kernels/src/activation.rs.
enum class Activation { kSilu, kGeluTanh };

// An activation of x is x * sigmoid(t): of SiLU t is x. The tanh form of GELU, x / 2 * (1 + tanh(u)) with
// u = sqrt(2 / pi) * (x + 0.044715 * x^3), is the same with t = 2 u, as (1 + tanh(u)) / 2 = sigmoid(2 u).
__device__ __forceinline__ float sigmoid_input(Activation activation, float x) {
    return activation == Activation::kSilu ? x : x * fmaf(0.0713548163f, x * x, 1.5957691216f);
}

// activation(gate) * up.
__device__ __forceinline__ float activated(Activation activation, float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-sigmoid_input(activation, gate))) * up;
}
