// Attention over latents (MLA): one vector of each token, which all heads of queries read, as a key and, in its first
// numbers, as a value.

#pragma once

#include "attention.h"

namespace {

constexpr int64_t LATENTS = 64;      // latents of a tile: they stay in the caches between scores and sums
constexpr int QUERY_TILE = 4;        // heads of a register tile of scores
constexpr int LATENT_TILE = LANES / QUERY_TILE;  // and its latents: their products fill one vector
constexpr int64_t QUERY_BYTES = 20480;  // of queries that stay in the first cache beside latents

// The pool and one of its layers, with the rows that read it.
template <class T> struct Latents {
    const T* data;
    int64_t layers, layer, block_size, width;
    // The addresses of LATENTS tokens from the first one on, at least one before ``stop``; behind the last one, the
    // last one again.
    void find(const int64_t* table, int64_t first, int64_t stop, const T** found) const {
        int64_t block = first / block_size, offset = first % block_size, i = 0;
        while (i < LATENTS && first + i < stop) {
            const T* latent = data + ((table[block] * layers + layer) * block_size + offset) * width;
            const int64_t run = std::min({block_size - offset, LATENTS - i, stop - first - i});
            for (int64_t j = 0; j < run; ++j) found[i + j] = latent + j * width;
            i += run, ++block, offset = 0;
        }
        for (; i < LATENTS; ++i) found[i] = found[i - 1];
    }
};

// ``shape``: layers, block_size and width of the pool.
template <class T> Latents<T> latents_of(const void* data, const int64_t* shape, int64_t layer) {
    return {static_cast<const T*>(data), shape[0], layer, shape[1], shape[2]};
}

// The cache lines of the latents to come, in order: so that the processor's own prefetcher sees where they lead.
class Ahead {
  public:
    template <class T> Ahead(const T* const* rows, int64_t count, int64_t row)
        : rows(reinterpret_cast<const int32_t* const*>(rows)), count(count), row(row), next(nullptr), end(nullptr) {}
    void line() {
        if (next == end) {
            if (count == 0) return;
            next = *rows++, end = next + row, --count;
        }
        __builtin_prefetch(next, 0, 2);
        next += LINE;
    }
    void rest() { while (count || next != end) line(); }

  private:
    const int32_t* const* rows;
    int64_t count, row;
    const int32_t *next, *end;
};

struct LatentRows {
    const void* q;  // [rows, heads, width]
    void* out;      // [rows, heads, value_dim]
    const int64_t* tables;
    const int64_t* contexts;
    int64_t rows, heads, value_dim, blocks;
    float scale;
};

// The buffers of a thread.
template <class T> struct LatentWork {
    std::unique_ptr<float[]> scores;  // [heads in whole tiles, LATENTS]
    std::unique_ptr<T[]> weights;     // likewise
    std::unique_ptr<float[]> factors, most, total;
    std::unique_ptr<float[]> sums;  // [heads, padded value_dim]
    const T* latents[LATENTS];
    const T* soon[LATENTS];
    LatentWork(int64_t heads, int64_t padded)
        : scores(new float[(heads + QUERY_TILE) * LATENTS]), weights(new T[heads * LATENTS]),
          factors(new float[heads]), most(new float[heads]), total(new float[heads]),
          sums(new float[heads * padded]) {}
};

// The products of QUERY_TILE heads with LATENT_TILE latents: scores [QUERY_TILE, LATENTS], from the first on. Meanwhile
// LINES at a time are prefetched.
template <class T, int LINES>
inline void latent_scores(const T* const (&q)[QUERY_TILE], const T* const* latents, Ahead& ahead, int64_t row,
                          float scale, float* scores) {
    vf acc[QUERY_TILE][LATENT_TILE];
#pragma GCC unroll 4
    for (int h = 0; h < QUERY_TILE; ++h)
#pragma GCC unroll 4
        for (int l = 0; l < LATENT_TILE; ++l) acc[h][l] = vf{};
    for (int64_t w = 0; w < row; w += LANES) {
        vi query[QUERY_TILE];
#pragma GCC unroll 4
        for (int h = 0; h < QUERY_TILE; ++h) query[h] = load(words(q[h]) + w);
#pragma GCC unroll 4
        for (int l = 0; l < LATENT_TILE; ++l) {
            const vi latent = load(words(latents[l]) + w);
            if (l < LINES) ahead.line();
#pragma GCC unroll 4
            for (int h = 0; h < QUERY_TILE; ++h) acc[h][l] = step<T>(acc[h][l], latent, query[h]);
        }
    }
    // A copy: an array that is changed in place would be kept in memory all the time.
    vf products[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) products[i] = acc[i / LATENT_TILE][i % LATENT_TILE];
    alignas(64) float sums[LANES];
    store(sums, sums_of(products) * scale);
    for (int h = 0; h < QUERY_TILE; ++h)
        std::memcpy(scores + h * LATENTS, sums + h * LATENT_TILE, sizeof(float) * LATENT_TILE);
}

// Two rows of numbers as words of which each has a number of both: those of the lower and of the upper half of each
// 128 bits.
typedef uint16_t vhalves __attribute__((vector_size(4 * LANES)));
template <int HALF, int... I>
constexpr vhalves interleaving(std::integer_sequence<int, I...>) {
    return vhalves{uint16_t(I / 8 * 8 + HALF * 4 + I % 8 / 2 + (I % 2) * 2 * LANES)...};
}
template <int HALF> inline vi interleaved(vi a, vi b) {
    constexpr vhalves order = interleaving<HALF>(std::make_integer_sequence<int, 2 * LANES>{});
    return (vi)__builtin_shuffle((vhalves)a, (vhalves)b, order);
}

// sums [H, padded] times the heads' factors, plus weights [H, LATENTS] times ``count`` latents' first numbers. The
// sums of bfloat16 are in the order of interleaved words. With PREFETCHES, lines are prefetched meanwhile.
template <class T, int H, bool PREFETCHES>
inline void add_latents(const T* const* latents, Ahead& ahead, const T* weights, const float* factors, int64_t count,
                        int64_t padded, float* sums) {
    for (int64_t d = 0; d < padded; d += 2 * LANES) {
        vf acc[H][2];
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h)
            for (int i = 0; i < 2; ++i) acc[h][i] = load(sums + h * padded + d + i * LANES) * factors[h];
        if constexpr (std::is_same_v<T, float>) {
            for (int64_t t = 0; t < count; ++t) {
                if (PREFETCHES) ahead.line();
                const vf first = load(latents[t] + d), second = load(latents[t] + d + LANES);
#pragma GCC unroll 8
                for (int h = 0; h < H; ++h) {
                    const vf weight = splat(weights[h * LATENTS + t]);
                    acc[h][0] += weight * first;
                    acc[h][1] += weight * second;
                }
            }
        } else {
            for (int64_t t = 0; t < count; t += 2) {
                if (PREFETCHES) ahead.line();
                const vi a = load(words(latents[t] + d)), b = load(words(latents[t + 1] + d));
                const vi lower = interleaved<0>(a, b), upper = interleaved<1>(a, b);
#pragma GCC unroll 8
                for (int h = 0; h < H; ++h) {
                    int32_t word;
                    std::memcpy(&word, weights + h * LATENTS + t, sizeof word);
                    const vi weight = splat(word);
                    acc[h][0] = step<T>(acc[h][0], lower, weight);
                    acc[h][1] = step<T>(acc[h][1], upper, weight);
                }
            }
        }
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h)
            for (int i = 0; i < 2; ++i) store(sums + h * padded + d + i * LANES, acc[h][i]);
    }
}

// Turns a tile's scores [LATENTS], of which ``count`` are real, into weights relative to the largest so far. Returns
// what the sums so far are to be multiplied with.
template <class T> inline float tile_weights(float* scores, int64_t count, float* most, float* total, T* weights) {
    float own;
    const float sum = softmax(scores, count, 0, &own);
    const float top = std::max(*most, own), before = std::exp(*most - top), now = std::exp(own - top);
    *total = *total * before + sum * now;
    *most = top;
    for (int64_t t = 0; t < LATENTS; t += LANES) {
        const vf weight = t < count ? load(scores + t) * now : vf{};
        put(weights + t, weight);
    }
    return before;
}

// The scores of all heads and a tile's ``count`` latents. As many heads at a time as stay in the first cache.
template <class T>
void tile_scores(const T* q, const LatentRows& r, int64_t width, int64_t count, Ahead& ahead, LatentWork<T>& work) {
    const int64_t row = width / PER_WORD<T>, fit = std::max<int64_t>(1, QUERY_BYTES / (QUERY_TILE * 4 * row));
    for (int64_t from = 0; from < r.heads; from += fit * QUERY_TILE) {
        const int64_t to = std::min(r.heads, from + fit * QUERY_TILE);
        for (int64_t l = 0; l < count; l += LATENT_TILE)
            for (int64_t h = from; h < to; h += QUERY_TILE) {
                const T* queries[QUERY_TILE];
                for (int i = 0; i < QUERY_TILE; ++i) queries[i] = q + std::min(h + i, r.heads - 1) * width;
                float* scores = work.scores.get() + h * LATENTS + l;
                // Half of the latents to come, while the first heads are computed.
                if (h == 0 && r.heads <= QUERY_TILE)
                    latent_scores<T, 2>(queries, work.latents + l, ahead, row, r.scale, scores);
                else if (h < 2 * QUERY_TILE)
                    latent_scores<T, 1>(queries, work.latents + l, ahead, row, r.scale, scores);
                else latent_scores<T, 0>(queries, work.latents + l, ahead, row, r.scale, scores);
            }
    }
}

// One row's tokens from first to stop: work's sums, most and total.
template <class T>
void latent_part(const T* q, const Latents<T>& pool, const int64_t* table, const LatentRows& r, int64_t first,
                 int64_t stop, int64_t padded, LatentWork<T>& work) {
    const int64_t row = pool.width / PER_WORD<T>;
    pool.find(table, first, stop, work.soon);
    std::fill_n(work.most.get(), r.heads, -1e30f);
    std::fill_n(work.total.get(), r.heads, 0.0f);
    std::fill_n(work.sums.get(), r.heads * padded, 0.0f);
    for (int64_t t = first; t < stop; t += LATENTS) {
        const int64_t count = std::min(LATENTS, stop - t);
        // Behind the last one, the last one again: its products are not read, and its weight is 0.
        std::copy_n(work.soon, LATENTS, work.latents);
        if (t + LATENTS < stop) pool.find(table, t + LATENTS, stop, work.soon);
        // The next tile is prefetched all the time: more at once than the processor keeps track of would hold up reads.
        Ahead ahead(work.soon, std::clamp<int64_t>(stop - t - LATENTS, 0, LATENTS), row);
        tile_scores(q, r, pool.width, count, ahead, work);
        for (int64_t h = 0; h < r.heads; ++h)
            work.factors[h] = tile_weights<T>(work.scores.get() + h * LATENTS, count, &work.most[h], &work.total[h],
                                              work.weights.get() + h * LATENTS);
        in_heads(r.heads, [&](auto heads, int64_t h) {
            const auto add = h ? add_latents<T, heads, false> : add_latents<T, heads, true>;
            add(work.latents, ahead, work.weights.get() + h * LATENTS, work.factors.get() + h, (count + 1) / 2 * 2,
                padded, work.sums.get() + h * padded);
        });
        ahead.rest();
    }
}

// Numbers PART * LANES and on of 2 * LANES, out of the two vectors of sums that add_latents makes of them.
template <class T, int PART> inline vf in_order(vf first, vf second) {
    if constexpr (std::is_same_v<T, float>) return PART ? second : first;
    // Of each 8 numbers, the first vector has the first 4, and the second vector the others.
    constexpr vi order = each_lane([](int lane) {
        const int four = PART * LANES / 4 + lane / 4;
        return four % 2 * LANES + four / 2 * 4 + lane % 4;
    });
    return __builtin_shuffle(first, second, order);
}

// out [value_dim] = sums, in the order of add_latents, times ``factor``.
template <class T> inline void put_latent_sums(const float* sums, float factor, int64_t value_dim, T* out) {
    for (int64_t d = 0; d < value_dim; d += 2 * LANES) {
        const vf first = load(sums + d) * factor, second = load(sums + d + LANES) * factor;
        alignas(64) float line[2 * LANES];
        store(line, in_order<T, 0>(first, second));
        store(line + LANES, in_order<T, 1>(first, second));
        put_vec(out, d, value_dim, line);
        if (d + LANES < value_dim) put_vec(out, d + LANES, value_dim, line + LANES);
    }
}

// softmax(scale · q · latents) · latents of every row, causal by its context.
template <class T> void attend_latents(const LatentRows& r, const Latents<T>& pool, int threads) {
    const int64_t padded = (r.value_dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES), result = 2 + padded;
    int64_t shares = 1;
    for (int64_t i = 0; i < r.rows; ++i) shares = std::max(shares, (r.contexts[i] + SHARE - 1) / SHARE);
    const T* q = static_cast<const T*>(r.q);
    T* out = static_cast<T*>(r.out);
    // [rows, heads, shares, (maximum, sum, sums)]
    std::unique_ptr<float[]> parts(new float[shares == 1 ? 0 : r.rows * r.heads * shares * result]);
#pragma omp parallel num_threads(threads)
    {
        LatentWork<T> work(r.heads, padded);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < r.rows * shares; ++task) {
            const int64_t i = task / shares, share = task % shares, first = share * SHARE;
            const int64_t stop = std::min(r.contexts[i], first + SHARE);
            if (r.contexts[i] == 0 && share == 0)  // padding
                std::memset(out + i * r.heads * r.value_dim, 0, sizeof(T) * r.heads * r.value_dim);
            if (first >= stop) continue;
            latent_part<T>(q + i * r.heads * pool.width, pool, r.tables + i * r.blocks, r, first, stop, padded, work);
            for (int64_t h = 0; h < r.heads; ++h) {
                const float* sums = work.sums.get() + h * padded;
                if (shares == 1) {
                    put_latent_sums<T>(sums, 1 / work.total[h], r.value_dim, out + (i * r.heads + h) * r.value_dim);
                    continue;
                }
                float* part = parts.get() + ((i * r.heads + h) * shares + share) * result;
                part[0] = work.most[h], part[1] = work.total[h];
                std::copy_n(sums, padded, part + 2);
            }
        }
        if (shares > 1) {
#pragma omp for schedule(static)
            for (int64_t h = 0; h < r.rows * r.heads; ++h) {
                const int64_t own = (r.contexts[h / r.heads] + SHARE - 1) / SHARE;
                float* first = parts.get() + h * shares * result;
                if (own == 0) continue;
                float top = first[0];
                for (int64_t s = 1; s < own; ++s) top = std::max(top, first[s * result]);
                float total = 0;
                for (int64_t s = 0; s < own; ++s) {
                    float* part = first + s * result;
                    const float factor = std::exp(part[0] - top);
                    total += part[1] * factor;
                    for (int64_t d = 0; d < padded; d += LANES) {
                        const vf value = load(part + 2 + d) * factor;
                        store(first + 2 + d, s ? load(first + 2 + d) + value : value);
                    }
                }
                put_latent_sums<T>(first + 2, 1 / total, r.value_dim, out + h * r.value_dim);
            }
        }
    }
}

}  // namespace
