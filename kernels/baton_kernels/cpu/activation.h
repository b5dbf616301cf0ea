// The activations of an MLP, on vectors.

#pragma once

#include "vectors.h"

namespace {

// An activation has the layout of the ctypes one in baton_kernels.cpu.linear.
enum : int { LINEAR, SILU, GELU_TANH, CLAMPED_SWIGLU, RELU2, SCALED_SILU };
struct Activation {
    int kind;
    float number;  // the bound of CLAMPED_SWIGLU, the factor of SCALED_SILU
};

// x / 2 (1 + tanh(y)) = x / (1 + e^-2y), where y = sqrt(2 / pi) (x + 0.044715 x^3)
inline vf gelu_tanh(vf x) {
    const vf y = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp_of(-2.0f * y));
}
inline vf relu2(vf x) { return x > 0.0f ? x * x : vf{}; }
inline vf clamped_swiglu(vf gate, vf up, float limit) {
    gate = gate < limit ? gate : splat(limit);
    up = up < limit ? up : splat(limit);
    up = up > -limit ? up : splat(-limit);
    return gate / (1.0f + exp_of(-1.702f * gate)) * (up + 1.0f);
}

// row [count] = f of each vector.
template <class F> inline void on_each(float* row, int count, F f) {
    for (int j = 0; j < count; j += LANES) store(row + j, f(load(row + j), j));
}

// row [count], whole vectors, activated in place.
inline void activate(float* row, int count, const Activation& a) {
    switch (a.kind) {
        case SILU: return on_each(row, count, [](vf x, int) { return silu(x); });
        case GELU_TANH: return on_each(row, count, [](vf x, int) { return gelu_tanh(x); });
        case RELU2: return on_each(row, count, [](vf x, int) { return relu2(x); });
    }
}

// row [2 count], gates and then as many ups: the first half becomes their gated product.
inline void gate(float* row, int count, const Activation& a) {
    const float* ups = row + count;
    switch (a.kind) {
        case SILU: return on_each(row, count, [=](vf x, int j) { return silu(x) * load(ups + j); });
        case GELU_TANH: return on_each(row, count, [=](vf x, int j) { return gelu_tanh(x) * load(ups + j); });
        case CLAMPED_SWIGLU:
            return on_each(row, count, [=, &a](vf x, int j) { return clamped_swiglu(x, load(ups + j), a.number); });
        case RELU2: return on_each(row, count, [=](vf x, int j) { return relu2(x) * load(ups + j); });
        case SCALED_SILU: return on_each(row, count, [=, &a](vf x, int j) { return silu(x * a.number) * load(ups + j); });
    }
}

}  // namespace
