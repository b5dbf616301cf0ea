// Latent attention's work on rows: latents from a projection to the pool, queries before they are absorbed, and values
// of what absorbed queries yield.

#pragma once

#include "latent.h"
#include "rows.h"

namespace {

struct LatentInput {
    const void* down;  // [tokens, columns]: of each token q_rank, kv_rank and rope_dim numbers
    void* q;           // [tokens, q_rank]
    const Norm *q_norm, *kv_norm;
    const float *cos, *sin;  // [tokens, rope_dim]
    const int64_t *blocks, *offsets;
    int64_t tokens, q_rank, kv_rank, rope_dim;
};

// Norms the latents of queries, and puts those of keys and values, normed, and the rotated part of the key into the
// pool.
template <class T> void store_latents(const LatentInput& in, const Latents<T>& pool, int threads) {
    Rotate rotation{};
    rotation.cos = in.cos, rotation.sin = in.sin;
    const int64_t columns = in.q_rank + in.kv_rank + in.rope_dim;
#pragma omp parallel for num_threads(threads) if (in.tokens > 16)
    for (int64_t t = 0; t < in.tokens; ++t) {
        const T* row = static_cast<const T*>(in.down) + t * columns;
        if (in.q_rank) {
            T* q = static_cast<T*>(in.q) + t * in.q_rank;
            RowNorm<T, T>(row, in.q_rank, *in.q_norm).each(in.q_rank, [&](int64_t i, auto v) { put(q + i, v); });
        }
        row += in.q_rank;
        T* slot = const_cast<T*>(pool.data) +
                  ((in.blocks[t] * pool.layers + pool.layer) * pool.block_size + in.offsets[t]) * pool.width;
        RowNorm<T, T>(row, in.kv_rank, *in.kv_norm).each(in.kv_rank, [&](int64_t i, auto v) { put(slot + i, v); });
        rotate_head<T>(row + in.kv_rank, nullptr, rotation, t, in.rope_dim, slot + in.kv_rank);
    }
}

struct HeadRows {
    const void* x;
    const void* up;  // [heads, nope_dim + value_dim, rank]: what makes each head's key and value of a latent
    void* out;
    int64_t tokens, heads, nope_dim, value_dim, rank;
};

constexpr int64_t TOKENS_OF_TASK = 64;

// Calls f(head, first token, stop) in parallel.
template <class F> inline void by_heads(const HeadRows& r, int threads, F f) {
    const int64_t runs = (r.tokens + TOKENS_OF_TASK - 1) / TOKENS_OF_TASK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < r.heads * runs; ++task) {
        const int64_t from = task % runs * TOKENS_OF_TASK;
        f(task / runs, from, std::min(r.tokens, from + TOKENS_OF_TASK));
    }
}

// x [tokens, heads, nope_dim + rope_dim], not rotated -> out [tokens, heads, rank + rope_dim]: each head's query as it
// reads latents, times the token's factor (null: 1).
template <class T>
void absorb(const HeadRows& r, const float* cos, const float* sin, const float* factors, int64_t rope_dim,
            int threads) {
    Rotate rotation{};
    rotation.cos = cos, rotation.sin = sin;
    const int64_t query = r.nope_dim + rope_dim, width = r.rank + rope_dim;
    by_heads(r, threads, [&](int64_t head, int64_t from, int64_t stop) {
        const T* keys = static_cast<const T*>(r.up) + head * (r.nope_dim + r.value_dim) * r.rank;
        std::unique_ptr<float[]> sums(new float[HEADS * r.rank]);
        T weights[HEADS * LATENTS];
        const T* rows[LATENTS];
        Ahead none(rows, 0, 0);
        const float ones[HEADS] = {1, 1, 1, 1, 1, 1, 1, 1};
        in_heads(stop - from, [&](auto count, int64_t first) {
            std::fill_n(sums.get(), count * r.rank, 0.0f);
            for (int64_t n = 0; n < r.nope_dim; n += LATENTS) {
                const int64_t some = std::min(LATENTS, r.nope_dim - n);
                for (int64_t i = 0; i < LATENTS; ++i) rows[i] = keys + std::min(n + i, r.nope_dim - 1) * r.rank;
                for (int64_t k = 0; k < count; ++k) {
                    const T* x = static_cast<const T*>(r.x) + ((from + first + k) * r.heads + head) * query + n;
                    std::copy_n(x, some, weights + k * LATENTS);
                    std::fill(weights + k * LATENTS + some, weights + (k + 1) * LATENTS, T{});
                }
                add_latents<T, count, false>(rows, none, weights, ones, (some + 1) / 2 * 2, r.rank, sums.get());
            }
            for (int64_t k = 0; k < count; ++k) {
                const int64_t t = from + first + k;
                const float factor = factors ? factors[t] : 1;
                T* out = static_cast<T*>(r.out) + (t * r.heads + head) * width;
                put_latent_sums<T>(sums.get() + k * r.rank, factor, r.rank, out);
                const T* x = static_cast<const T*>(r.x) + (t * r.heads + head) * query + r.nope_dim;
                rotate_head<T>(x, nullptr, rotation, t, rope_dim, out + r.rank);
                if (factors)
                    for (int64_t i = r.rank; i < width; ++i) put(out + i, to_float(out[i]) * factor);
            }
        });
    });
}

// x [tokens, heads, rank], sums of latents -> out [tokens, heads, value_dim].
template <class T> void make_values(const HeadRows& r, int threads) {
    by_heads(r, threads, [&](int64_t head, int64_t from, int64_t stop) {
        const T* values =
            static_cast<const T*>(r.up) + (head * (r.nope_dim + r.value_dim) + r.nope_dim) * r.rank;
        alignas(64) float products[QUERY_TILE * LATENTS];
        const T* rows[LATENTS];
        Ahead none(rows, 0, 0);
        for (int64_t v = 0; v < r.value_dim; v += LATENTS) {
            const int64_t some = std::min(LATENTS, r.value_dim - v);
            for (int64_t i = 0; i < LATENTS; ++i) rows[i] = values + std::min(v + i, r.value_dim - 1) * r.rank;
            for (int64_t t = from; t < stop; t += QUERY_TILE) {
                const T* x[QUERY_TILE];
                for (int i = 0; i < QUERY_TILE; ++i)
                    x[i] = static_cast<const T*>(r.x) + (std::min(t + i, stop - 1) * r.heads + head) * r.rank;
                for (int64_t l = 0; l < some; l += LATENT_TILE)
                    latent_scores<T, 0>(x, rows + l, none, r.rank / PER_WORD<T>, 1, products + l);
                for (int64_t i = 0; i < std::min<int64_t>(QUERY_TILE, stop - t); ++i) {
                    T* out = static_cast<T*>(r.out) + ((t + i) * r.heads + head) * r.value_dim + v;
                    for (int64_t d = 0; d < some; d += LANES) put_vec(out, d, some, products + i * LATENTS + d);
                }
            }
        }
    });
}

}  // namespace
