// Operations on rows: norms, and rotation with the store into the pool.

#pragma once

#include "attention.h"
#include "sums.h"

namespace {

inline float inverse_rms(float squares, int64_t size, float eps) { return 1 / std::sqrt(squares / size + eps); }

// A norm over rows, whose weights have the type of its results. Its layout is that of the ctypes one in
// baton_kernels.cpu.rows.
struct Norm {
    const void *weight, *bias;  // null: no norm, no bias
    float eps, offset;          // the offset is added to the weight
    int centered;               // whether the mean is subtracted first: a layer norm
};

// A norm of one row, whose numbers are T; ``W``: the type of the weights.
template <class W, class T> struct RowNorm {
    const T* row;
    const W *weight, *bias;
    float offset, mean = 0, factor;
    bool centered;
    // ``known``: the sum of the squares of the row's numbers; null: not known.
    RowNorm(const T* row, int64_t size, const Norm& n, const Sum* known = nullptr)
        : row(row), weight(static_cast<const W*>(n.weight)), bias(static_cast<const W*>(n.bias)), offset(n.offset),
          centered(n.centered) {
        if (centered) {
            Sum sum;
            along(size, [&](int64_t i, auto v) { sum += get<decltype(v)>(row + i); });
            mean = sum.total() / size;
        }
        Sum squares;
        if (known && !centered) squares = *known;
        else
            along(size, [&](int64_t i, auto v) {
                v = get<decltype(v)>(row + i) - mean;
                squares += v * v;
            });
        factor = inverse_rms(squares.total(), size, n.eps);
    }
    // Calls f(i, the normed numbers from i on), as ``along`` does.
    template <class F> void each(int64_t size, F f) const {
        if (!centered)
            along(size, [&](int64_t i, auto v) {
                v = get<decltype(v)>(row + i) * factor;
                f(i, v * (get<decltype(v)>(weight + i) + offset));
            });
        else
            along(size, [&](int64_t i, auto v) {
                v = (get<decltype(v)>(row + i) - mean) * factor * (get<decltype(v)>(weight + i) + offset);
                f(i, bias ? v + get<decltype(v)>(bias + i) : v);
            });
    }
};

// The residual [rows, size] grows by ``scale`` times x (null: nothing), or times the norm ``post`` of x; out [rows,
// size] is the norm of that.
template <class In, class Out>
void add_norm(const In* x, float* residual, const Norm& norm, const Norm& post, float scale, int64_t rows,
              int64_t size, Out* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (int64_t r = 0; r < rows; ++r) {
        const In* added = x + r * size;
        float* sum = residual + r * size;
        Out* to = out + r * size;
        Sum squares;  // of the residual
        const auto add = [&](int64_t i, auto more) {
            const auto v = get<decltype(more)>(sum + i) + more * scale;
            put(sum + i, v);
            squares += v * v;
        };
        if (x && post.weight) {
            const RowNorm<Out, In> normed(added, size, post);
            normed.each(size, add);
        } else if (x) {
            along(size, [&](int64_t i, auto v) { add(i, get<decltype(v)>(added + i)); });
        }
        if (norm.weight) {
            const RowNorm<Out, float> normed(sum, size, norm, x ? &squares : nullptr);
            normed.each(size, [&](int64_t i, auto v) { put(to + i, v); });
        } else {
            along(size, [&](int64_t i, auto v) { put(to + i, get<decltype(v)>(sum + i)); });
        }
    }
}

// The parts of a row of queries, keys and values, and the weights of the norms over whole parts.
struct Heads {
    const void *q, *k;
    int64_t columns, q_size, k_size;
    float eps, offset;
};

// squares [rows, 2]: the sums of the squares of a row's queries, and of its keys.
template <class T> void squares_of_heads(const T* qkv, const Heads& h, int64_t rows, float* squares, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (int64_t r = 0; r < rows; ++r) {
        const T* row = qkv + r * h.columns;
        for (int part = 0; part < 2; ++part) {
            Sum sum;
            along(part ? h.k_size : h.q_size, [&](int64_t i, auto v) {
                v = get<decltype(v)>(row + i);
                sum += v * v;
            });
            squares[2 * r + part] = sum.total();
            row += h.q_size;
        }
    }
}

// Norms queries and keys in place. ``sizes``: how many numbers the squares are the sums of.
template <class T>
void scale_heads(T* qkv, const Heads& h, int64_t rows, const float* squares, const int64_t* sizes, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (int64_t r = 0; r < rows; ++r) {
        T* row = qkv + r * h.columns;
        for (int part = 0; part < 2; ++part) {
            const T* weight = static_cast<const T*>(part ? h.k : h.q);
            const float factor = inverse_rms(squares[2 * r + part], sizes[part], h.eps);
            along(part ? h.k_size : h.q_size, [&](int64_t i, auto v) {
                using V = decltype(v);
                put(row + i, get<V>(row + i) * factor * (get<V>(weight + i) + h.offset));
            });
            row += h.q_size;
        }
    }
}

struct Rotate {
    const void* qkv;  // [tokens, heads + 2 kv_heads, dim]
    void* q;          // [tokens, heads, dim]
    const float *cos, *sin;  // [tokens, dim]
    const void *q_norm, *k_norm;
    const int64_t *blocks, *offsets;
    float eps, offset;  // the offset is added to the norms' weights
    int64_t tokens, heads;
    float k_factor, v_factor;  // of what becomes codes
};

// The codes of x, times ``factor``.
template <class T> inline void put_codes(const T* x, float factor, int64_t dim, e4m3* to) {
    for (int64_t d = 0; d < dim; d += LANES) {
        const vb codes = to_e4m3(floats(x + d) * factor);
        std::memcpy(to + d, &codes, sizeof codes);
    }
}

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
        if (norm) a *= floats(norm + i) + r.offset, b *= floats(norm + i + half) + r.offset;
        put(out + i, a * load(cos + i) + b * load(sin + i));
        put(out + i + half, b * load(cos + i + half) + a * load(sin + i + half));
    }
    for (; i < half; ++i) {  // half a head of floats need not be whole vectors
        float a = to_float(x[i]) * factor, b = to_float(x[i + half]) * factor;
        if (norm) a *= to_float(norm[i]) + r.offset, b *= to_float(norm[i + half]) + r.offset;
        put(out + i, a * cos[i] + b * sin[i]);
        put(out + i + half, b * cos[i + half] + a * sin[i + half]);
    }
}

// The least power of two that numbers up to ``most`` can be divided by to be codes, and at least 2^-100.
inline float least_scale(float most) {
    int exponent;
    const float part = std::frexp(std::min(most, std::numeric_limits<float>::max()), &exponent);
    return std::ldexp(1.0f, std::max(-100, exponent - (part <= 0.875f ? 9 : 8)));  // 448 is 0.875 * 2^9
}

// Puts x at ``offset`` of a block's vectors at ``to``, and widens their scale where x needs it: the codes of the
// block's other tokens are rounded again. The first token of a block begins with a scale of its own.
template <class T> void put_scaled(const T* x, int64_t offset, const Pool<e4m3>& pool, e4m3* to) {
    const int64_t dim = pool.dim;
    vf most = vf{};
    for (int64_t d = 0; d < dim; d += LANES) {
        const vf v = floats(x + d), size = v < 0 ? -v : v;
        most = size > most ? size : most;
    }
    float largest = most[0];
    for (int i = 1; i < LANES; ++i) largest = std::max(largest, most[i]);
    const float needed = least_scale(largest), before = offset ? pool.scale(to) : 0;
    const float scale = std::max(needed, before);
    if (offset && scale > before)
        for (int64_t d = 0; d < pool.numbers(); d += LANES) {
            const vb codes = to_e4m3(floats(to + d) * (before / scale));
            std::memcpy(to + d, &codes, sizeof codes);
        }
    std::memcpy(to + pool.numbers(), &scale, sizeof scale);
    put_codes(x, 1 / scale, dim, to + offset * dim);
}

// Stores the keys and values of a pool that is scaled, token after token: what is stored does not depend on how many
// tokens a step has.
template <class T> void store_scaled(const Rotate& r, const Pool<e4m3>& pool, int threads) {
    const int64_t dim = pool.dim, all = r.heads + 2 * pool.kv_heads;
#pragma omp parallel for num_threads(threads) if (r.tokens > 8)
    for (int64_t h = 0; h < pool.kv_heads; ++h)
        for (int64_t t = 0; t < r.tokens; ++t) {
            const T* const key = static_cast<const T*>(r.qkv) + (t * all + r.heads + h) * dim;
            alignas(64) T turned[MAX_WORDS * PER_WORD<T>];
            rotate_head<T>(key, static_cast<const T*>(r.k_norm), r, t, dim, turned);
            put_scaled<T>(turned, r.offsets[t], pool, const_cast<e4m3*>(pool.keys(r.blocks[t], h)));
            put_scaled<T>(key + pool.kv_heads * dim, r.offsets[t], pool,
                          const_cast<e4m3*>(pool.values(r.blocks[t], h)));
        }
}

template <class T, class S> void rotate_and_store(const Rotate& r, const Pool<S>& pool, int threads) {
    const int64_t dim = pool.dim, all = r.heads + 2 * pool.kv_heads;
    const bool scaled = pool.scaled;
    if constexpr (std::is_same_v<S, e4m3>)
        if (scaled) store_scaled<T>(r, pool, threads);
#pragma omp parallel for num_threads(threads) if (r.tokens > 8)
    for (int64_t t = 0; t < r.tokens; ++t) {
        const T* token = static_cast<const T*>(r.qkv) + t * all * dim;
        for (int64_t h = 0; h < r.heads; ++h)
            rotate_head<T>(token + h * dim, static_cast<const T*>(r.q_norm), r, t, dim,
                           static_cast<T*>(r.q) + (t * r.heads + h) * dim);
        for (int64_t h = 0; h < (scaled ? 0 : pool.kv_heads); ++h) {
            S* k = const_cast<S*>(pool.keys(r.blocks[t], h)) + r.offsets[t] * dim;
            S* v = const_cast<S*>(pool.values(r.blocks[t], h)) + r.offsets[t] * dim;
            const T* const key = token + (r.heads + h) * dim;
            const T* const value = token + (r.heads + pool.kv_heads + h) * dim;
            const T* const norm = static_cast<const T*>(r.k_norm);
            if constexpr (std::is_same_v<S, T>) {
                rotate_head<T>(key, norm, r, t, dim, k);
                std::copy_n(value, dim, v);
            } else {
                alignas(64) T turned[MAX_WORDS * PER_WORD<T>];
                rotate_head<T>(key, norm, r, t, dim, turned);
                put_codes(turned, r.k_factor, dim, k);
                put_codes(value, r.v_factor, dim, v);
            }
        }
    }
}

template <class S> Pool<S> pool_of(const void* data, const int64_t* shape, int64_t layer) {
    return {static_cast<const S*>(data), shape[1], shape[2], layer, shape[4], shape[5], shape[6], shape[7] != 0};
}

}  // namespace
