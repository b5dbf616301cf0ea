// Attention over the paged pool: decoding rows, and the chunks of prompts.

#pragma once

#include "matmul.h"

namespace {

// The pool and one of its layers: a (block, kv head) holds block_size * dim elements of K, then as many of V. They are
// S, which is T, the type of queries, or e4m3: codes, which become words of T in registers. Codes of a pool that is
// ``scaled`` are those of numbers over a scale of their own, a float behind each K and each V, which is a power of two.
template <class S> struct Pool {
    const S* data;
    int64_t kv_heads, layers, layer, block_size, dim, page;  // page: elements of a block
    bool scaled;
    int64_t numbers() const { return block_size * dim; }
    int64_t stride() const { return numbers() + (scaled ? sizeof(float) : 0); }
    const S* keys(int64_t block, int64_t head) const {
        return data + block * page + ((head * layers + layer) * 2) * stride();
    }
    const S* values(int64_t block, int64_t head) const { return keys(block, head) + stride(); }
    // The scale of K or V, which begins at ``of``.
    float scale(const S* of) const {
        float found = 1;
        if (scaled) std::memcpy(&found, of + numbers(), sizeof found);
        return found;
    }
    float key_scale(int64_t block, int64_t head) const { return scale(keys(block, head)); }
    float value_scale(int64_t block, int64_t head) const { return scale(values(block, head)); }
};

// Words of T times a power of two, which is exact.
template <class T> inline vi scaled_words(vi words, float scale) {
    if constexpr (std::is_same_v<T, float>) {
        return (vi)((vf)words * scale);
    } else {
        const vu even = (vu)((vf)((vu)words << 16) * scale), odd = (vu)((vf)((vu)words & 0xffff0000u) * scale);
        return (vi)(even >> 16 | (odd & 0xffff0000u));
    }
}

struct Scores {
    float scale, value_scale, softcap;  // of products with keys as they are stored; of sums of such values; 0: none
    int64_t window;        // the last so many tokens; below 0: those of the query's own run of -window; 0: all
    const float* sinks;    // a further score of each query head, without a value; null: none

    // The first of the first ``context`` tokens that a query which is the last of them sees.
    int64_t first_seen(int64_t context) const {
        if (window < 0) return (context - 1) / -window * -window;
        return window ? std::max<int64_t>(0, context - window) : 0;
    }
    const float* sink(int64_t head) const { return sinks ? sinks + head : nullptr; }
};

// What makes sums of values that have ``total`` as the sum of their weights, relative to ``maximum``, a mean. A sink
// (null: none) takes its share.
inline float share_of(float total, float maximum, const float* sink) {
    if (!sink) return 1 / total;
    const float most = std::max(maximum, *sink), factor = std::exp(maximum - most);
    return factor / (total * factor + std::exp(*sink - most));
}

// The sums of LANES vectors, one in each lane.
inline vf sums_of(vf (&v)[LANES]) {
    constexpr vi even = each_lane([](int lane) { return 2 * lane; });
    constexpr vi odd = each_lane([](int lane) { return 2 * lane + 1; });
    for (int n = LANES; n > 1; n /= 2)
        for (int i = 0; i < n / 2; ++i) {
            vf a = v[2 * i], b = v[2 * i + 1];
            v[i] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
        }
    return v[0];
}

// Turns scores in place into weights relative to their maximum. Returns their sum.
inline float softmax(float* scores, int64_t count, float softcap, float* maximum) {
    const int64_t whole = count / LANES * LANES, padded = whole + (whole < count ? LANES : 0);
    for (int64_t i = count; i < padded; ++i) scores[i] = -1e30f;
    vf most = splat(-1e30f);
    for (int64_t i = 0; i < padded; i += LANES) {
        vf s = load(scores + i);
        if (softcap != 0) {
            s = softcap * tanh_of(s * (1 / softcap));
            if (i == whole) for (int64_t j = count; j < padded; ++j) s[j - i] = -1e30f;
            store(scores + i, s);
        }
        most = s > most ? s : most;
    }
    float top = most[0];
    for (int i = 1; i < LANES; ++i) top = std::max(top, most[i]);
    vf total = vf{};
    for (int64_t i = 0; i < padded; i += LANES) {
        vf p = exp_of_negative(load(scores + i) - top);
        if (i == whole) for (int64_t j = count; j < padded; ++j) p[j - i] = 0;
        store(scores + i, p);
        total += p;
    }
    *maximum = top;
    return sum_of(total);
}

// out [dim] = the sums of add_values, times ``factor``.
template <class T> inline void put_sums(const float* sums, float factor, int64_t dim, T* out) {
    if constexpr (std::is_same_v<T, float>)
        for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(sums + d) * factor);
    else
        for (int64_t d = 0; d < dim; d += 2 * LANES)
            store(reinterpret_cast<int32_t*>(out + d),
                  pair(load(sums + d) * factor, load(sums + d + LANES) * factor));
}

struct Decode {
    const void* q;
    void* out;
    const int64_t* tables;
    const int64_t* contexts;
    int64_t rows, heads, width;
};

template <class S> constexpr int64_t AHEAD = sizeof(S) > 1 ? 32 : 64;  // tokens
constexpr int64_t SHARE = 512;  // tokens of one task: constant, so that a sum has one order
constexpr int64_t STRIDE = SHARE + LANES;

// Swaps, in each pair of rows N apart, the off-diagonal pieces of their 2 x 2 matrices of N-wide pieces.
template <int N> inline void swap_pieces(vi (&m)[LANES]) {
    constexpr vi first = each_lane([](int lane) { return lane & N ? lane - N + LANES : lane; });
    constexpr vi second = each_lane([](int lane) { return lane & N ? lane + LANES : lane + N; });
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
        if (!(i & N)) {
            vi a = m[i], b = m[i + N];
            m[i] = __builtin_shuffle(a, b, first);
            m[i + N] = __builtin_shuffle(a, b, second);
        }
}

// Transposes a square of words.
inline void transpose(vi (&m)[LANES]) {
    swap_pieces<1>(m);
    swap_pieces<2>(m);
    if constexpr (LANES > 4) swap_pieces<4>(m);
    if constexpr (LANES > 8) swap_pieces<8>(m);
}

// The products of H queries with up to a vector of keys, each key's words times a query's: scores [H, stride].
template <class T, int H>
inline void scores_of(const int32_t* query, int64_t row, const int32_t* columns, float scale, int64_t stride,
                      float* scores) {
    vf acc[H];
    for (int h = 0; h < H; ++h) acc[h] = vf{};
    for (int64_t w = 0; w < row; ++w) {
        vi column = load(columns + w * LANES);
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) acc[h] = step<T>(acc[h], column, splat(query[h * row + w]));
    }
    for (int h = 0; h < H; ++h) store(scores + h * stride, acc[h] * scale);
}

// Converts whole vectors: the numbers behind ``count`` exist and are 0.
template <class T> inline void to_weights(const float* from, int64_t count, T* to) {
    for (int64_t i = 0; i < count; i += LANES) put(to + i, load(from + i));
}

// Prefetches the line at p, which is number d of a row, once for each line of a row.
template <class S> inline void prefetch(const S* p, int64_t d) {
    if (sizeof(S) > 1 || d % (4 * LINE) == 0) __builtin_prefetch(p, 0, 2);
}

// sums [H, result] += weights [H, stride] times the values of ``count`` slots, each value read once. As many numbers
// from ``soon`` on are prefetched meanwhile.
template <class T, int H, class S>
inline void add_values(const S* values, const S* soon, const T* weights, int64_t stride, int64_t count,
                       int64_t dim, int64_t result, float* sums) {
    const int64_t row = dim / PER_WORD<T>;
    for (int64_t w = 0; w < row; w += LANES) {
        const int64_t d = w * PER_WORD<T>;
        const S *v = values + d, *next = soon + d;
        vf acc[H][PER_WORD<T>];
        for (int h = 0; h < H; ++h)
            for (int i = 0; i < PER_WORD<T>; ++i) acc[h][i] = load(sums + h * result + PER_WORD<T> * w + i * LANES);
        if constexpr (std::is_same_v<T, float>) {
            for (int64_t t = 0; t < count; ++t) {
                prefetch(next + t * dim, d);
                vf value = (vf)words_from<T>(v + t * dim);
#pragma GCC unroll 8
                for (int h = 0; h < H; ++h) acc[h][0] += weights[h * stride + t] * value;
            }
        } else {
            // Two slots at a time make words of their even numbers, and of their odd ones.
            for (int64_t t = 0; t < count; t += 2) {
                const bool two = t + 1 < count;
                prefetch(next + t * dim, d);
                prefetch(next + (t + 1) * dim, d);
                vu a = (vu)words_from<T>(v + t * dim), b = two ? (vu)words_from<T>(v + (t + 1) * dim) : vu{};
                vi even = (vi)((a & 0xffffu) | (b << 16)), odd = (vi)((a >> 16) | (b & 0xffff0000u));
#pragma GCC unroll 8
                for (int h = 0; h < H; ++h) {
                    int32_t word;
                    std::memcpy(&word, weights + h * stride + t, sizeof word);
                    acc[h][0] = step<T>(acc[h][0], even, splat(word));
                    acc[h][1] = step<T>(acc[h][1], odd, splat(word));
                }
            }
        }
        for (int h = 0; h < H; ++h)
            for (int i = 0; i < PER_WORD<T>; ++i) store(sums + h * result + PER_WORD<T> * w + i * LANES, acc[h][i]);
    }
}

// Calls f(integral constant H, first) for heads in runs of at most HEADS.
constexpr int HEADS = 8;
template <class F> inline void in_heads(int64_t group, F f) {
    for (int64_t g = 0; g < group; g += HEADS) {
        switch (std::min<int64_t>(HEADS, group - g)) {
            case 1: f(std::integral_constant<int, 1>{}, g); break;
            case 2: f(std::integral_constant<int, 2>{}, g); break;
            case 3: f(std::integral_constant<int, 3>{}, g); break;
            case 4: f(std::integral_constant<int, 4>{}, g); break;
            case 5: f(std::integral_constant<int, 5>{}, g); break;
            case 6: f(std::integral_constant<int, 6>{}, g); break;
            case 7: f(std::integral_constant<int, 7>{}, g); break;
            default: f(std::integral_constant<int, 8>{}, g);
        }
    }
}

constexpr int64_t SHARED = 3;  // query heads of a kv head from which on transposing the keys pays
constexpr int64_t MAX_WORDS = 256;

// The tokens of one task, and the addresses to prefetch. Pages lie anywhere, so the machine's prefetcher does not
// find them. They are prefetched a line at a time while as much is read: more at once than the processor keeps track
// of would hold up the current reads. AHEAD tokens later comes a key, and behind the last key the first values.
template <class S> struct Stretch {
    const Pool<S>& pool;
    const int64_t* table;
    int64_t head, first, stop;
    const S* key(int64_t token) const { return at(pool.keys(table[token / pool.block_size], head), token); }
    const S* value(int64_t token) const { return at(pool.values(table[token / pool.block_size], head), token); }
    const S* after_key(int64_t token) const {
        token += AHEAD<S>;
        return token < stop ? key(token) : value(std::min(first + token - stop, stop - 1));
    }
    const S* after_value(int64_t token) const { return value(std::min(token + AHEAD<S>, stop - 1)); }

  private:
    const S* at(const S* page, int64_t token) const { return page + token % pool.block_size * pool.dim; }
};

// Decodes one row for one kv head, the tokens from first to stop: group × (maximum, sum, sums [dim]).
template <class T, class S>
void decode_part(const T* q, const Pool<S>& pool, const int64_t* table, int64_t head, int64_t group, int64_t first,
                 int64_t stop, const Scores& how, float* scores, T* weights, float* results) {
    const int64_t row = pool.dim / PER_WORD<T>, size = pool.block_size, result = 2 + pool.dim;
    const Stretch<S> tokens{pool, table, head, first, stop};
    alignas(64) int32_t columns[MAX_WORDS * LANES];
    for (int64_t t = first; t < stop;) {
        const int64_t offset = t % size, count = std::min({size - offset, stop - t, int64_t(LANES)});
        const S *k = tokens.key(t), *soon = tokens.after_key(t);
        const float scale = how.scale * pool.key_scale(table[t / size], head);
        float* to = scores + (t - first);  // numbers beyond ``count`` are written again, or not read
        if (group >= SHARED) {
            for (int64_t w = 0; w < row; w += LANES) {
                const int64_t d = w * PER_WORD<T>;
                vi key[LANES];
                for (int i = 0; i < LANES; ++i) {
                    prefetch(soon + i * pool.dim + d, d);
                    key[i] = i < count ? words_from<T>(k + i * pool.dim + d) : vi{};
                }
                transpose(key);
                for (int i = 0; i < LANES; ++i) store(columns + (w + i) * LANES, key[i]);
            }
            in_heads(group, [&](auto heads, int64_t g) {
                scores_of<T, heads>(words(q + g * pool.dim), row, columns, scale, STRIDE, to + g * STRIDE);
            });
        } else {
            for (int64_t g = 0; g < group; ++g) {
                const int32_t* query = words(q + g * pool.dim);
                vf acc[LANES];
                for (int i = 0; i < LANES; ++i) {
                    acc[i] = vf{};
                    if (i < count)
                        for (int64_t w = 0; w < row; w += LANES) {
                            const int64_t d = w * PER_WORD<T>;
                            if (g == 0) prefetch(soon + i * pool.dim + d, d);
                            acc[i] = step<T>(acc[i], words_from<T>(k + i * pool.dim + d), load(query + w));
                        }
                }
                store(to + g * STRIDE, sums_of(acc) * scale);
            }
        }
        t += count;
    }
    for (int64_t g = 0; g < group; ++g) {
        float* of_head = results + g * result;
        of_head[1] = softmax(scores + g * STRIDE, stop - first, how.softcap, of_head);
        to_weights(scores + g * STRIDE, stop - first, weights + g * STRIDE);
        std::fill(of_head + 2, of_head + result, 0.0f);
    }
    for (int64_t t = first; t < stop;) {
        const int64_t count = std::min(size - t % size, stop - t);
        const S *v = tokens.value(t), *soon = tokens.after_value(t);
        if (pool.scaled) {
            const float scale = pool.value_scale(table[t / size], head);
            for (int64_t g = 0; g < group; ++g) {
                T* weight = weights + g * STRIDE + (t - first);
                for (int64_t i = 0; i < count; ++i) put(weight + i, to_float(weight[i]) * scale);
            }
        }
        in_heads(group, [&](auto heads, int64_t g) {
            add_values<T, heads>(v, soon, weights + g * STRIDE + (t - first), STRIDE, count, pool.dim, result,
                                 results + g * result + 2);
        });
        t += count;
    }
}

template <class T, class S> void decode(const Decode& d, const Pool<S>& pool, const Scores& how, int threads) {
    const int64_t group = d.heads / pool.kv_heads, result = 2 + pool.dim;
    const T* q = static_cast<const T*>(d.q);
    T* out = static_cast<T*>(d.out);
    int64_t shares = 1;
    for (int64_t r = 0; r < d.rows; ++r) {
        const int64_t seen = d.contexts[r] - how.first_seen(d.contexts[r]);
        shares = std::max(shares, (seen + SHARE - 1) / SHARE);
    }
    // [rows, heads, shares, (maximum, sum, sums [dim])]
    std::unique_ptr<float[]> parts(new float[shares == 1 ? 0 : d.rows * d.heads * shares * result]);
#pragma omp parallel num_threads(threads)
    {
        std::unique_ptr<float[]> scores(new float[group * STRIDE]);
        std::unique_ptr<T[]> weights(new T[group * STRIDE]);
        std::unique_ptr<float[]> own(new float[group * result]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < d.rows * pool.kv_heads * shares; ++task) {
            const int64_t share = task % shares, head = task / shares % pool.kv_heads;
            const int64_t r = task / shares / pool.kv_heads, context = d.contexts[r];
            const int64_t first = how.first_seen(context) + share * SHARE, stop = std::min(context, first + SHARE);
            if (first >= stop) continue;
            const int64_t h = r * d.heads + head * group;
            decode_part<T>(q + h * pool.dim, pool, d.tables + r * d.width, head, group, first, stop, how,
                           scores.get(), weights.get(), own.get());
            for (int64_t g = 0; g < group; ++g) {
                const float* of_head = own.get() + g * result;
                if (shares == 1)
                    put_sums<T>(of_head + 2,
                                share_of(of_head[1], of_head[0], how.sink(head * group + g)) * how.value_scale,
                                pool.dim, out + (h + g) * pool.dim);
                else std::copy_n(of_head, result, parts.get() + ((h + g) * shares + share) * result);
            }
        }
        if (shares > 1) {
#pragma omp for schedule(static)
            for (int64_t h = 0; h < d.rows * d.heads; ++h) {
                const int64_t context = d.contexts[h / d.heads];
                const int64_t count = (context - how.first_seen(context) + SHARE - 1) / SHARE;
                const float* of_head = parts.get() + h * shares * result;
                float most = -1e30f, total = 0;
                for (int64_t s = 0; s < count; ++s) most = std::max(most, of_head[s * result]);
                std::fill_n(own.get(), pool.dim, 0.0f);
                for (int64_t s = 0; s < count; ++s) {
                    const float* part = of_head + s * result;
                    const float factor = std::exp(part[0] - most);
                    total += factor * part[1];
                    for (int64_t i = 0; i < pool.dim; ++i) own[i] += factor * part[2 + i];
                }
                const float share = share_of(total, most, how.sink(h % d.heads)) * how.value_scale;
                put_sums<T>(own.get(), share, pool.dim, out + h * pool.dim);
            }
        }
    }
}

constexpr int64_t QUERIES = 8 * TILE_ROWS;  // queries of a tile of scores
constexpr int64_t KEYS = 4 * PANEL;

struct Chunk {
    const void* q;  // the queries of the chunk from its first row on, [length, heads, dim]
    void* out;
    const int64_t* table;
    int64_t length, context, heads;
};

// The buffers of one task of a chunk's attention.
template <class T> struct Workspace {
    std::unique_ptr<int32_t[]> keys, values;  // packed, for every block of KEYS keys
    alignas(64) float scores[QUERIES * KEYS];
    alignas(64) T weights[QUERIES * KEYS];
    std::unique_ptr<float[]> sums;  // [QUERIES, dim in whole panels]
    alignas(64) float part[QUERIES * PANEL];
    float most[QUERIES], total[QUERIES];
};

// Words of the numbers at one place of a value and, where two numbers make a word, of the next value (or of none).
template <class T, class S> inline vi in_words(const S* value, float scale, const S* next, float next_scale) {
    if constexpr (PER_WORD<T> == 1) {
        return (vi)(floats(value) * scale);
    } else {
        const vu first = (vu)(floats(value) * scale) >> 16;
        return (vi)(next ? first | (vu)(floats(next) * next_scale) : first);
    }
}

// Packs keys and values of the tokens from first to stop as operands, in blocks of KEYS tokens. Each key is a column
// of its words. A block's values are columns, one for each of their dim numbers, of as many words as the block's keys
// fill.
template <class T, class S>
void pack_context(const Pool<S>& pool, const int64_t* table, int64_t head, int64_t first, int64_t stop,
                  Workspace<T>& work) {
    const int64_t row = pool.dim / PER_WORD<T>, size = pool.block_size;
    const int64_t wide = (pool.dim + PANEL - 1) / PANEL * PANEL;
    const int64_t blocks = (stop - first + KEYS - 1) / KEYS, steps = KEYS / PER_WORD<T>;
    const int64_t key_words = KEYS * row, value_words = steps * wide;
    work.keys.reset(new int32_t[blocks * key_words]());
    work.values.reset(new int32_t[blocks * value_words]());
    for (int64_t t = first; t < stop; t += LANES) {
        const int64_t block = (t - first) / KEYS, at = (t - first) % KEYS, count = std::min<int64_t>(LANES, stop - t);
        const S* k[LANES];
        float key_scales[LANES], value_scales[LANES + 1] = {};
        for (int64_t i = 0; i < count; ++i) {
            const int64_t page = table[(t + i) / size];
            k[i] = pool.keys(page, head) + (t + i) % size * pool.dim;
            key_scales[i] = pool.key_scale(page, head), value_scales[i] = pool.value_scale(page, head);
        }
        int32_t* key = work.keys.get() + block * key_words + place(at, 0, row);
        for (int64_t w = 0; w < row; w += LANES) {
            vi words_of[LANES];
            for (int64_t i = 0; i < LANES; ++i) {
                words_of[i] = i < count ? words_from<T>(k[i] + w * PER_WORD<T>) : vi{};
                if (pool.scaled && i < count) words_of[i] = scaled_words<T>(words_of[i], key_scales[i]);
            }
            transpose(words_of);
            for (int64_t i = 0; i < LANES; ++i) store(key + (w + i) * STRIPE, words_of[i]);
        }
        int32_t* value = work.values.get() + block * value_words;
        for (int64_t i = 0; i < count; i += PER_WORD<T>) {
            const S* v = pool.values(table[(t + i) / size], head) + (t + i) % size * pool.dim;
            const S* next = nullptr;
            if (PER_WORD<T> == 2 && i + 1 < count)
                next = pool.values(table[(t + i + 1) / size], head) + (t + i + 1) % size * pool.dim;
            for (int64_t d = 0; d < pool.dim; d += LANES)
                store(value + place(d, (at + i) / PER_WORD<T>, steps),
                      in_words<T>(v + d, value_scales[i], next ? next + d : nullptr, value_scales[i + 1]));
        }
    }
}

// One tile of queries against one block of keys, which begins at the token ``at``.
template <class T>
void attend_tile(const T* q, int64_t stride, int64_t rows, int64_t position, int64_t at, int64_t block,
                 int64_t dim, const Scores& how, Workspace<T>& work) {
    const int64_t row = dim / PER_WORD<T>, wide = (dim + PANEL - 1) / PANEL * PANEL;
    const int64_t count = std::min(KEYS, position + rows - at);  // keys that the last row sees
    const int64_t panels = (count + PANEL - 1) / PANEL, padded = panels * PANEL;
    for (int64_t p = 0; p < panels; ++p)
        in_tiles(rows, [&](int64_t r, int64_t n) {
            rows_to<T>(int(n), words(q + r * stride), stride / PER_WORD<T>,
                       Words{work.keys.get() + block * KEYS * row + p * row * PANEL, row}, row,
                       work.scores + r * KEYS + p * PANEL, KEYS);
        });
    for (int64_t r = 0; r < rows; ++r) {
        float* s = work.scores + r * KEYS;
        const int64_t sees = position + r + 1 - at;  // keys of this block up to the row's own
        const int64_t stop = std::clamp<int64_t>(sees, 0, padded);
        const int64_t begin = std::clamp<int64_t>(how.first_seen(position + r + 1) - at, 0, padded);
        vf most = splat(work.most[r]);
        for (int64_t i = 0; i < padded; i += LANES) {
            vf v = load(s + i) * how.scale;
            if (how.softcap != 0) v = how.softcap * tanh_of(v * (1 / how.softcap));
            if (i < begin || i + LANES > stop) {
                constexpr vi lanes = each_lane([](int lane) { return lane; });
                const vi key = lanes + int32_t(i);
                v = (key >= int32_t(begin)) & (key < int32_t(stop)) ? v : splat(-1e30f);
            }
            store(s + i, v);
            most = v > most ? v : most;
        }
        float top = most[0];
        for (int i = 1; i < LANES; ++i) top = std::max(top, most[i]);
        vf total = vf{};
        for (int64_t i = 0; i < padded; i += LANES) {
            vf v = load(s + i);
            vf p = v > -1e29f ? exp_of_negative(v - top) : vf{};
            total += p;
            store(s + i, p);
        }
        to_weights(s, padded, work.weights + r * KEYS);
        const float factor = top > work.most[r] ? std::exp(work.most[r] - top) : 1.0f;
        if (factor != 1.0f)
            for (int64_t d = 0; d < wide; d += LANES)
                store(work.sums.get() + r * wide + d, load(work.sums.get() + r * wide + d) * factor);
        work.total[r] = work.total[r] * factor + sum_of(total);
        work.most[r] = top;
    }
    for (int64_t d = 0; d < wide; d += PANEL) {
        const int64_t steps = KEYS / PER_WORD<T>;
        const Words values{work.values.get() + block * steps * wide + d * steps, steps};
        in_tiles(rows, [&](int64_t r, int64_t n) {
            rows_to<T>(int(n), words(work.weights + r * KEYS), KEYS / PER_WORD<T>, values, padded / PER_WORD<T>,
                       work.part, PANEL);
            for (int64_t i = 0; i < n; ++i) {
                float* sums = work.sums.get() + (r + i) * wide + d;
                for (int j = 0; j < PANEL; j += LANES)
                    store(sums + j, load(sums + j) + load(work.part + i * PANEL + j));
            }
        });
    }
}

template <class T, class S>
void chunk_part(const Chunk& c, const Pool<S>& pool, const Scores& how, int64_t head, int64_t from, int64_t to,
                Workspace<T>& work) {
    const int64_t group = c.heads / pool.kv_heads, cached = c.context - c.length;
    const int64_t wide = (pool.dim + PANEL - 1) / PANEL * PANEL, stride = c.heads * pool.dim;
    const int64_t oldest = how.first_seen(cached + from + 1);
    pack_context<T>(pool, c.table, head, oldest, cached + to, work);
    work.sums.reset(new float[QUERIES * wide]);
    for (int64_t g = 0; g < group; ++g)
        for (int64_t first = from; first < to; first += QUERIES) {
            const int64_t rows = std::min(QUERIES, to - first), position = cached + first;
            const T* q = static_cast<const T*>(c.q) + first * stride + (head * group + g) * pool.dim;
            const float* sink = how.sink(head * group + g);
            std::fill_n(work.most, rows, sink ? *sink : -1e30f);
            std::fill_n(work.total, rows, sink ? 1.0f : 0.0f);
            std::fill_n(work.sums.get(), rows * wide, 0.0f);
            const int64_t begin = how.first_seen(position + 1);
            for (int64_t block = (begin - oldest) / KEYS; oldest + block * KEYS < position + rows; ++block)
                attend_tile<T>(q, stride, rows, position, oldest + block * KEYS, block, pool.dim, how, work);
            for (int64_t r = 0; r < rows; ++r) {
                T* out = static_cast<T*>(c.out) + (first + r) * stride + (head * group + g) * pool.dim;
                const float *sums = work.sums.get() + r * wide, factor = how.value_scale / work.total[r];
                for (int64_t d = 0; d < pool.dim; d += LANES) put(out + d, load(sums + d) * factor);
            }
        }
}

template <class T, class S> void prefill(const Chunk& c, const Pool<S>& pool, const Scores& how, int threads) {
    // Heads are enough tasks unless there are fewer heads than threads: then each head is split into runs of queries,
    // and each run packs the keys and values that it sees for itself.
    const int64_t runs = std::min<int64_t>((c.length + QUERIES - 1) / QUERIES,
                                           pool.kv_heads % threads == 0 ? 1 : (2 * threads) / pool.kv_heads + 1);
#pragma omp parallel num_threads(threads)
    {
        std::unique_ptr<Workspace<T>> work(new Workspace<T>);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < pool.kv_heads * runs; ++task) {
            const int64_t part = runs - 1 - task / pool.kv_heads;  // the last runs see most keys: they come first
            chunk_part<T>(c, pool, how, task % pool.kv_heads, c.length * part / runs, c.length * (part + 1) / runs,
                          *work);
        }
    }
}

}  // namespace
