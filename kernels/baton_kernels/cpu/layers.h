// All layers of a model in one call.

#pragma once

#include "rows.h"

namespace {

// These five structures have the layout of the ctypes ones in baton_kernels.cpu.layers.
struct Projection {
    const void* packed;
    const float *scales, *bias;  // null: none
    int64_t inputs, outputs;
};

struct Layer {
    const void *input_norm, *post_norm;
    const void *q_norm, *k_norm;  // null: none
    Projection qkv, o, gate_up, down;
    int64_t window;  // 0: none
};

struct Stack {
    const Layer* layers;
    int64_t hidden, heads;
    float eps, head_eps, scale;
};

struct Run {  // a chunk of a prompt
    int64_t start, length, context;
    const int64_t* table;
};

struct Step {
    const void* pool;
    const int64_t* shape;
    float* residual;  // [tokens, hidden], changed
    void* delta;      // [tokens, hidden]: the last layer's output for the residual stream
    void* scratch;    // [tokens, hidden + outputs of qkv, o's inputs twice and down's inputs]
    const float *cos, *sin;
    const int64_t *blocks, *offsets;
    const int64_t *tables, *contexts;  // of the decoding rows
    const Run* runs;
    double* seconds;  // null, or where the seconds of matmuls and of attention are added
    int64_t tokens, decodes, width, num_runs;
};

// Calls f, and adds its time to ``seconds`` unless that is null.
template <class F> inline void timed(double* seconds, F f) {
    const double began = seconds ? omp_get_wtime() : 0;
    f();
    if (seconds) *seconds += omp_get_wtime() - began;
}

// The first ``count`` layers of the stack. Each computes the same as its kernels called one by one.
template <class T> void run_layers(const Stack& m, int64_t count, const Step& s, int threads) {
    double *matmul = s.seconds, *attention = s.seconds ? s.seconds + 1 : nullptr;
    T *const delta = static_cast<T*>(s.delta), *const normed = static_cast<T*>(s.scratch);
    const auto times = [&](const Projection& p, const T* x, T* out, int gated) {
        const Linear l{x, p.packed, p.scales, p.bias, out, s.tokens, p.inputs, p.outputs, gated};
        timed(matmul, [&] { linear<T, T>(l, threads); });
    };
    for (int64_t i = 0; i < count; ++i) {
        const Layer& layer = m.layers[i];
        const Pool<T> pool = pool_of<T>(s.pool, s.shape, i);
        const Scores how{m.scale, 0, layer.window};
        const int64_t row = m.heads * pool.dim;
        T* const qkv = normed + s.tokens * m.hidden;
        T* const q = qkv + s.tokens * layer.qkv.outputs;
        T* const attended = q + s.tokens * row;
        T* const inner = attended + s.tokens * row;
        const auto norm = [&](const T* x, const void* weight) {
            add_norm(x, s.residual, static_cast<const T*>(weight), m.eps, s.tokens, m.hidden, normed, threads);
        };

        norm(i ? delta : nullptr, layer.input_norm);
        times(layer.qkv, normed, qkv, 0);
        const Rotate r{qkv, q, s.cos, s.sin, layer.q_norm, layer.k_norm, s.blocks, s.offsets, m.head_eps, s.tokens, m.heads};
        rotate_and_store(r, pool, threads);
        timed(attention, [&] {
            if (s.decodes) decode(Decode{q, attended, s.tables, s.contexts, s.decodes, m.heads, s.width}, pool, how, threads);
            for (const Run* c = s.runs; c < s.runs + s.num_runs; ++c) {
                const T* of_chunk = q + c->start * row;
                prefill(Chunk{of_chunk, attended + c->start * row, c->table, c->length, c->context, m.heads}, pool, how, threads);
            }
        });
        times(layer.o, attended, delta, 0);
        norm(delta, layer.post_norm);
        times(layer.gate_up, normed, inner, 1);
        times(layer.down, inner, delta, 0);
    }
}

}  // namespace
