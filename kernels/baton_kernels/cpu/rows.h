// Operations on rows: norms, and rotation with the store into the pool.

#pragma once

#include "attention.h"

namespace {

inline float inverse_rms(float squares, int64_t size, float eps) { return 1 / std::sqrt(squares / size + eps); }

template <class In, class Out>
void add_norm(const In* x, float* residual, const Out* weight, float eps, int64_t rows, int64_t size, Out* out,
              int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t whole = size / LANES * LANES;
        const In* added = x + r * size;
        float* sum = residual + r * size;
        Out* to = out + r * size;
        vf in_lanes = vf{};
        for (int64_t i = 0; i < whole; i += LANES) {
            const vf v = x ? load(sum + i) + floats(added + i) : load(sum + i);
            store(sum + i, v);
            in_lanes += v * v;
        }
        float squares = sum_of(in_lanes);
        for (int64_t i = whole; i < size; ++i) {
            if (x) sum[i] += to_float(added[i]);
            squares += sum[i] * sum[i];
        }
        const float factor = inverse_rms(squares, size, eps);
        for (int64_t i = 0; i < whole; i += LANES) put(to + i, load(sum + i) * factor * floats(weight + i));
        for (int64_t i = whole; i < size; ++i) put(to + i, sum[i] * factor * to_float(weight[i]));
    }
}

struct Rotate {
    const void* qkv;  // [tokens, heads + 2 kv_heads, dim]
    void* q;          // [tokens, heads, dim]
    const float *cos, *sin;  // [tokens, dim]
    const void *q_norm, *k_norm;
    const int64_t *blocks, *offsets;
    float eps;
    int64_t tokens, heads;
};

template <class T> inline void rotate_head(const T* x, const T* norm, const Rotate& r, int64_t token, int64_t dim, T* out) {
    const float *cos = r.cos + token * dim, *sin = r.sin + token * dim;
    const int64_t half = dim / 2;
    float factor = 1;
    if (norm) {
        vf squares = vf{};
        for (int64_t i = 0; i < dim; i += LANES) squares += floats(x + i) * floats(x + i);
        factor = inverse_rms(sum_of(squares), dim, r.eps);
    }
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = floats(x + i) * factor, b = floats(x + i + half) * factor;
        if (norm) a *= floats(norm + i), b *= floats(norm + i + half);
        put(out + i, a * load(cos + i) + b * load(sin + i));
        put(out + i + half, b * load(cos + i + half) + a * load(sin + i + half));
    }
    for (; i < half; ++i) {  // half a head of floats need not be whole vectors
        float a = to_float(x[i]) * factor, b = to_float(x[i + half]) * factor;
        if (norm) a *= to_float(norm[i]), b *= to_float(norm[i + half]);
        put(out + i, a * cos[i] + b * sin[i]);
        put(out + i + half, b * cos[i + half] + a * sin[i + half]);
    }
}

template <class T> void rotate_and_store(const Rotate& r, const Pool<T>& pool, int threads) {
    const int64_t dim = pool.dim, all = r.heads + 2 * pool.kv_heads;
#pragma omp parallel for num_threads(threads) if (r.tokens > 8)
    for (int64_t t = 0; t < r.tokens; ++t) {
        const T* token = static_cast<const T*>(r.qkv) + t * all * dim;
        for (int64_t h = 0; h < r.heads; ++h)
            rotate_head<T>(token + h * dim, static_cast<const T*>(r.q_norm), r, t, dim,
                           static_cast<T*>(r.q) + (t * r.heads + h) * dim);
        for (int64_t h = 0; h < pool.kv_heads; ++h) {
            T* k = const_cast<T*>(pool.keys(r.blocks[t], h)) + r.offsets[t] * dim;
            T* v = const_cast<T*>(pool.values(r.blocks[t], h)) + r.offsets[t] * dim;
            rotate_head<T>(token + (r.heads + h) * dim, static_cast<const T*>(r.k_norm), r, t, dim, k);
            std::copy_n(token + (r.heads + pool.kv_heads + h) * dim, dim, v);
        }
    }
}

template <class T> Pool<T> pool_of(const void* data, const int64_t* shape, int64_t layer) {
    return {static_cast<const T*>(data), shape[1], shape[2], layer, shape[4], shape[5]};
}

}  // namespace
