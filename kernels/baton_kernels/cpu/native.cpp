// Baton's kernels for CPUs: matmul with packed weights, attention over the paged pool, and operations on rows.
// Written once for every machine, in vectors of as many 32-bit lanes as its registers have; only the dot product of
// two bfloat16 pairs has an instruction of its own where there is one.
//
// Numbers are float or bfloat16 (kinds 0 and 1). Both are handled as 32-bit *words*: one float, or two adjacent
// bfloat16, the first in the lower half. A *step* multiplies one word of each row by one of each column and adds
// to a float, so both kinds share every loop. The sums of a matmul and of a decoding row run in one order, whatever
// else is in the batch: their results do not depend on it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#include <omp.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
// Whether a matmul of bfloat16 multiplies floats: where there is no instruction for pairs, or a slow one. (With AVX2
// floats are no faster.)
#if defined(__AVX512F__) && (!defined(__AVX512BF16__) || defined(BATON_SLOW_BF16_PAIRS))
#define BF16_AS_FLOATS
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/mman.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

// Lanes of a register (the compiler would take longer vectors apart, through memory), and vectors of a panel in a
// register tile: with the tile's rows they make 24 sums where there are 32 registers, 12 of 16.
#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_VECS = 4;
#elif defined(__AVX2__)
constexpr int LANES = 8, TILE_VECS = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, TILE_VECS = 4;
#else
constexpr int LANES = 4, TILE_VECS = 2;
#endif
constexpr int PANEL = 64;  // columns of a packed panel
constexpr int VECS = PANEL / LANES;
constexpr int STRIPE = TILE_VECS * LANES;  // columns that lie together, as a tile reads them
// Most rows of a register tile, and most rows of a tile with half as many vectors.
constexpr int TILE_ROWS = 6, WIDE_ROWS = 12;

constexpr int LINE = 16;  // words of a cache line
constexpr int BYTES_AHEAD = 3072;  // bytes of a panel between the words in use and the words prefetched
// Most rows that share the words made of int8, and the steps whose words are kept: both stay in L2.
constexpr int INT8_ROWS = 64 * TILE_ROWS, INT8_STEPS = 256;

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

inline vf load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
inline vi load(const int32_t* p) { vi v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline void store(int32_t* p, vi v) { std::memcpy(p, &v, sizeof v); }
inline vf splat(float x) { return x - vf{}; }
inline vi splat(int32_t x) { return x - vi{}; }

template <class T> constexpr int PER_WORD = 4 / sizeof(T);
template <class T> inline const int32_t* words(const T* p) { return reinterpret_cast<const int32_t*>(p); }

inline vf low(vi w) { return (vf)((vu)w << 16); }
inline vf high(vi w) { return (vf)((vu)w & 0xffff0000u); }

// acc + a · b, word by word.
template <class T> inline vf step(vf acc, vi a, vi b);
template <> inline vf step<float>(vf acc, vi a, vi b) { return acc + (vf)a * (vf)b; }
template <> inline vf step<bf16>(vf acc, vi a, vi b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    return acc + low(a) * low(b) + high(a) * high(b);
#endif
}

// f(lane) in each lane.
template <class F, int... I> constexpr vi each_lane(F f, std::integer_sequence<int, I...>) { return vi{f(I)...}; }
template <class F> constexpr vi each_lane(F f) { return each_lane(f, std::make_integer_sequence<int, LANES>{}); }

// Two floats, each rounded to the nearest bfloat16 (ties to even), as one word.
inline vi pair(vf first, vf second) {
    vu a = (vu)first, b = (vu)second;
    a = (a + 0x7fffu + ((a >> 16) & 1u)) >> 16;
    b = (b + 0x7fffu + ((b >> 16) & 1u)) & 0xffff0000u;
    return (vi)(a | b);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint16_t rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
// Floats as bfloat16.
inline void put_halves(bf16* to, vf x) {
    const vu bits = (vu)x;
    const vh halves = __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, vh);
    std::memcpy(to, &halves, sizeof halves);
}
inline vf widened(const bf16* from) {
    vh halves;
    std::memcpy(&halves, from, sizeof halves);
    return (vf)(__builtin_convertvector(halves, vu) << 16);
}
inline vf floats(const float* p) { return load(p); }
inline vf floats(const bf16* p) { return widened(p); }
inline void put(float* p, vf x) { store(p, x); }
inline void put(bf16* p, vf x) { put_halves(p, x); }
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) { p->bits = rounded(x); }

// e^x for x of at most 0; an x below -87 counts as -87.
// (2^whole · 2^rest, the latter by the polynomial of degree 5 with the least relative error on [-1/2, 1/2], 1e-7.)
inline vf exp_of_negative(vf x) {
    x = x > -87.0f ? x : splat(-87.0f);
    const vf scaled = x * 1.44269504088896341f;
    const vi whole = __builtin_convertvector(scaled - 0.5f, vi);  // truncation: scaled <= 0
    const vf rest = scaled - __builtin_convertvector(whole, vf);
    vf p = splat(1.327647129e-3f);
    p = p * rest + 9.675540961e-3f;
    p = p * rest + 5.550713092e-2f;
    p = p * rest + 2.402212024e-1f;
    p = p * rest + 6.931469440e-1f;
    p = p * rest + 1.0f;
    return (vf)((vi)p + (whole << 23));
}

inline vf exp_of(vf x) {  // any x: e^x is at most 2^126
    vf positive = x > 87.0f ? splat(87.0f) : x;
    vf small = exp_of_negative(x > 0.0f ? -positive : positive);
    return x > 0.0f ? 1.0f / small : small;
}

inline vf silu(vf x) { return x / (1.0f + exp_of(-x)); }
inline vf tanh_of(vf x) {
    vf e = exp_of(-2.0f * (x < 0.0f ? -x : x));
    vf t = (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -t : t;
}

inline float sum_of(vf v) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += v[i];
    return total;
}

// ---- matmul ---------------------------------------------------------------------------------------------------

// The index of the word of a column and a step among packed words: stripe by stripe, in each stripe step by step.
inline int64_t place(int64_t column, int64_t step, int64_t steps) {
    return column / STRIPE * STRIPE * steps + step * STRIPE + column % STRIPE;
}

// A panel as a tile reads it: vector j of step s, as words; ``ahead`` prefetches.
struct Words {
    const int32_t* panel;
    int64_t steps;  // steps of the packed panel
    const int32_t* at(int64_t s, int j) const { return panel + place(j * LANES, s, steps); }
    vi operator()(int64_t s, int j) const { return load(at(s, j)); }
    void ahead(int64_t s, int j) const { __builtin_prefetch(at(s, j) + BYTES_AHEAD / 4); }
};

// Int8 weights that become words in registers. They lie in streams of one vector a step. A lane holds four bytes: the
// words of four columns of a panel with floats, of two columns with bfloat16.
template <class T> struct Int8 {
    // The scale of the words: each byte is read at the top of a lane.
    static constexpr float ONE = 1 << 24;
    static constexpr int STEP = 4 * LANES;  // bytes of a stream

    const int8_t* panel;
    int64_t apart;  // from a stream to the next

    // The index of number n of the word of column c of step s.
    int64_t place(int64_t s, int c, int n) const {
        const int byte = c / LANES * PER_WORD<T> + n;
        return byte / 4 * apart + s * STEP + c % LANES * 4 + byte % 4;
    }
    vf bytes(int64_t s, int byte) const {
        vi lanes;
        std::memcpy(&lanes, panel + byte / 4 * apart + s * STEP, sizeof lanes);
        return __builtin_convertvector((lanes << (24 - byte % 4 * 8)) & int32_t(0xff000000), vf);
    }
    vi operator()(int64_t s, int j) const {
        if constexpr (PER_WORD<T> == 1) return (vi)bytes(s, j);
        else return (vi)((vu)bytes(s, 2 * j) >> 16 | (vu)bytes(s, 2 * j + 1));  // exact: seven bits
    }
    void ahead(int64_t s, int j) const {
        const int byte = j * PER_WORD<T>;
        if (byte % 4 == 0) __builtin_prefetch(panel + byte / 4 * apart + s * STEP + BYTES_AHEAD / 2);
    }
    Int8 from(int64_t step) const { return {panel + step * STEP, apart}; }
};

// Int8 weights whose words are kept, as a slice of a panel, for the rows that follow.
template <class T> struct Kept : Int8<T> {
    int32_t* slice;
    vi operator()(int64_t s, int j) const {
        const vi word = Int8<T>::operator()(s, j);
        store(slice + place(j * LANES, s, INT8_STEPS), word);
        return word;
    }
};

// A slice of kept words; ``ahead`` prefetches the next slice's bytes.
template <class T> struct Slice : Words {
    Int8<T> next;
    void ahead(int64_t s, int j) const { next.ahead(s, j); }
};

// Words that are cached since the first rows were multiplied; ``ahead`` prefetches others, ``lines`` cache lines a
// step.
struct Cached : Words {
    const int32_t* others;
    int lines;
    void ahead(int64_t s, int j) const {
        const int line = j * LANES / LINE;
        if (line < lines) __builtin_prefetch(others + (s * lines + line) * LINE);
    }
};

// acc[r] += row r of a (its words lie lda apart from the next row's) times V vectors of a panel from the first.
template <class T, int R, int V, class B>
inline void tile(const int32_t* a, int64_t lda, B b, int first, int64_t steps, vf (&acc)[R][V]) {
    for (int64_t s = 0; s < steps; ++s) {
        vi column[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) {
            if (j * LANES % LINE == 0) b.ahead(s, first + j);
            column[j] = b(s, first + j);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            vi row = splat(a[r * lda + s]);
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) acc[r][j] = step<T>(acc[r][j], column[j], row);
        }
    }
}

#if defined(BF16_AS_FLOATS)
// A tile for machines where two multiplications of floats take less time than one of pairs: rows are made floats
// once, in L1, and columns as they come, first the one half of each word, then the other.
constexpr int64_t FLOAT_STEPS = 512;

template <int R, int V> inline void add_products(const vf (&column)[V], const float* rows, vf (&acc)[R][V]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const vf row = splat(rows[r * 2 * FLOAT_STEPS]);
#pragma GCC unroll 4
        // Explicit, so that the compiler adds the two halves one after the other: summed up first, they would not fit
        // into the registers.
        for (int j = 0; j < V; ++j) acc[r][j] = (vf)_mm512_fmadd_ps((__m512)column[j], (__m512)row, (__m512)acc[r][j]);
    }
}

template <int R, int V, class B>
inline void tile_of_floats(const int32_t* a, int64_t lda, B b, int first, int64_t steps, vf (&sums)[R][V]) {
    alignas(64) float rows[R][2 * FLOAT_STEPS];
    vf acc[R][V];
    std::memcpy(&acc, &sums, sizeof acc);
    for (int64_t from = 0; from < steps; from += FLOAT_STEPS) {
        const int64_t count = std::min(FLOAT_STEPS, steps - from);
        for (int r = 0; r < R; ++r) {
            const bf16* row = reinterpret_cast<const bf16*>(a + r * lda + from);
            int64_t i = 0;
            for (; i + LANES <= 2 * count; i += LANES) store(rows[r] + i, widened(row + i));
            for (; i < 2 * count; ++i) rows[r][i] = to_float(row[i]);
        }
        for (int64_t s = 0; s < count; ++s) {
            vi words[V];
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) {
                b.ahead(from + s, first + j);
                words[j] = b(from + s, first + j);
            }
            vf column[V];
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) column[j] = low(words[j]);
            add_products<R, V>(column, &rows[0][2 * s], acc);
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) column[j] = high(words[j]);
            add_products<R, V>(column, &rows[0][2 * s + 1], acc);
        }
    }
    std::memcpy(&sums, &acc, sizeof acc);
}
#endif

// R rows of a times one panel: sums [R, 64], whose rows lie ``stride`` floats apart. ``more``: add to the sums.
template <class T, int R, int V = TILE_VECS, class B>
inline void tile_to(const int32_t* a, int64_t lda, B b, int64_t steps, float* sums, int64_t stride, bool more) {
    for (int j = 0; j < VECS; j += V) {
        vf acc[R][V];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < V; ++i) acc[r][i] = more ? load(sums + r * stride + (j + i) * LANES) : vf{};
#if defined(BF16_AS_FLOATS)
        if constexpr (std::is_same_v<T, bf16>) tile_of_floats<R, V>(a, lda, b, j, steps, acc);
        else
#endif
            tile<T, R, V>(a, lda, b, j, steps, acc);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < V; ++i) store(sums + r * stride + (j + i) * LANES, acc[r][i]);
    }
}

template <class T, class B>
inline void rows_by(int rows, const int32_t* a, int64_t lda, B b, int64_t steps, float* sums, int64_t stride,
                    bool more = false) {
    switch (rows) {
        case 1: return tile_to<T, 1>(a, lda, b, steps, sums, stride, more);
        case 2: return tile_to<T, 2>(a, lda, b, steps, sums, stride, more);
        case 3: return tile_to<T, 3>(a, lda, b, steps, sums, stride, more);
        case 4: return tile_to<T, 4>(a, lda, b, steps, sums, stride, more);
        case 5: return tile_to<T, 5>(a, lda, b, steps, sums, stride, more);
        case 6: return tile_to<T, 6>(a, lda, b, steps, sums, stride, more);
    }
    // Half as many vectors at a time, for int8: no word is made twice.
    if constexpr (std::is_same_v<B, Int8<T>>) switch (rows) {
        case 7: return tile_to<T, 7, TILE_VECS / 2>(a, lda, b, steps, sums, stride, more);
        case 8: return tile_to<T, 8, TILE_VECS / 2>(a, lda, b, steps, sums, stride, more);
        case 9: return tile_to<T, 9, TILE_VECS / 2>(a, lda, b, steps, sums, stride, more);
        case 10: return tile_to<T, 10, TILE_VECS / 2>(a, lda, b, steps, sums, stride, more);
        case 11: return tile_to<T, 11, TILE_VECS / 2>(a, lda, b, steps, sums, stride, more);
        case 12: return tile_to<T, 12, TILE_VECS / 2>(a, lda, b, steps, sums, stride, more);
    }
}
template <class T>
inline void rows_to(int rows, const int32_t* a, int64_t lda, Words b, int64_t steps, float* sums, int64_t stride) {
    rows_by<T>(rows, a, lda, b, steps, sums, stride);
}

// Calls f(first, count) for rows in tiles of nearly equal height, at most ``highest``.
template <class F> inline void in_tiles(int64_t rows, int64_t highest, F f) {
    int64_t tiles = (rows + highest - 1) / highest;
    for (int64_t t = 0, first = 0; t < tiles; ++t) {
        int64_t count = (rows - first + (tiles - t) - 1) / (tiles - t);
        f(first, count);
        first += count;
    }
}
template <class F> inline void in_tiles(int64_t rows, F f) { in_tiles(rows, TILE_ROWS, f); }

template <class Out> inline void put_vec(Out* out, int64_t at, int64_t limit, const float* values);
template <> inline void put_vec<float>(float* out, int64_t at, int64_t limit, const float* values) {
    if (at + LANES <= limit) store(out + at, load(values));
    else for (int64_t i = at; i < limit; ++i) out[i] = values[i - at];
}
template <> inline void put_vec<bf16>(bf16* out, int64_t at, int64_t limit, const float* values) {
    if (at + LANES <= limit) put_halves(out + at, load(values));
    else for (int64_t i = at; i < limit; ++i) put(out + i, values[i - at]);
}

// Rows of a times one panel: calls done(row, its 64 sums) for each. The panel ``next`` is prefetched meanwhile, but
// not during the first rows, which need the whole memory bandwidth.
template <class T, class F>
inline void times_words(const int32_t* a, int64_t rows, const int32_t* panel, const int32_t* next, int64_t steps, F done) {
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int lines = tiles < 3 ? 4 : tiles < 5 ? 2 : 1;  // prefetches all of it before the last row
    const int32_t* const end = next + steps * PANEL;
    in_tiles(rows, [&](int64_t first, int64_t count) {
        alignas(64) float sums[TILE_ROWS * PANEL];
        const int32_t* x = a + first * steps;
        if (first == 0) rows_by<T>(int(count), x, steps, Words{panel, steps}, steps, sums, PANEL);
        else {
            const Cached b{{panel, steps}, next, next < end ? lines : 0};
            rows_by<T>(int(count), x, steps, b, steps, sums, PANEL);
            next += steps * lines * LINE;
        }
        for (int64_t r = 0; r < count; ++r) done(first + r, sums + r * PANEL);
    });
}

// Rows of a times one panel of int8, in tiles of at most ``highest`` rows.
template <class T, class F>
inline void times_int8(const int32_t* a, int64_t rows, int64_t highest, Int8<T> b, int64_t steps, F done) {
    in_tiles(rows, highest, [&](int64_t first, int64_t count) {
        alignas(64) float sums[WIDE_ROWS * PANEL];
        rows_by<T>(int(count), a + first * steps, steps, b, steps, sums, PANEL);
        for (int64_t r = 0; r < count; ++r) done(first + r, sums + r * PANEL);
    });
}

// Rows of a times one panel of int8, for up to INT8_ROWS rows: slice by slice of the panel, the first rows make the
// words for all. The sums run in the same order.
template <class T, class F>
inline void times_slices(const int32_t* a, int64_t rows, Int8<T> b, int64_t steps, F done) {
    alignas(64) float sums[INT8_ROWS * PANEL];
    alignas(64) int32_t slice[INT8_STEPS * PANEL];
    for (int64_t from = 0; from < steps; from += INT8_STEPS) {
        const int64_t count = std::min<int64_t>(INT8_STEPS, steps - from);
        const Int8<T> narrow = b.from(from), next = b.from(from + count);
        in_tiles(rows, [&](int64_t first, int64_t n) {
            const int32_t* x = a + first * steps + from;
            float* to = sums + first * PANEL;
            if (first == 0) rows_by<T>(int(n), x, steps, Kept<T>{{narrow}, slice}, count, to, PANEL, from > 0);
            else rows_by<T>(int(n), x, steps, Slice<T>{{slice, INT8_STEPS}, next}, count, to, PANEL, from > 0);
        });
    }
    for (int64_t r = 0; r < rows; ++r) done(r, sums + r * PANEL);
}

struct Linear {
    const void *x, *packed;
    const float *scales, *bias;  // in the order of the panels' columns; null: none. Scales are for int8
    void* out;
    int64_t rows, inputs, outputs;
    int gated;
};

template <class T, class Out> void linear(const Linear& l, int threads) {
    const int64_t width = l.gated ? PANEL / 2 : PANEL;  // outputs of a panel
    const int64_t panels = (l.outputs + width - 1) / width, steps = l.inputs / PER_WORD<T>;
    const int32_t* a = words(static_cast<const T*>(l.x));
    Out* out = static_cast<Out*>(l.out);
    // A prompt's rows are split into runs, so that there are tasks for many threads.
    const int64_t whole = l.scales ? std::min<int64_t>(l.rows, INT8_ROWS) : l.rows;
    const int64_t run = l.rows <= 4 * TILE_ROWS || panels >= 4 * threads ? whole : 16 * TILE_ROWS;
    const int64_t runs = l.rows ? (l.rows + run - 1) / run : 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < panels * runs; ++task) {
        const int64_t panel = task / runs, start = task % runs * run, rows = std::min(run, l.rows - start);
        const int64_t column = panel * width, limit = std::min(l.outputs, column + width);
        const auto done = [&](int64_t r, float* row) {
            if (l.scales)
                for (int j = 0; j < PANEL; ++j) row[j] *= l.scales[panel * PANEL + j] / Int8<T>::ONE;
            if (l.bias)
                for (int j = 0; j < PANEL; ++j) row[j] += l.bias[panel * PANEL + j];
            if (l.gated)
                for (int j = 0; j < PANEL / 2; j += LANES)
                    store(row + j, silu(load(row + j)) * load(row + PANEL / 2 + j));
            Out* to = out + (start + r) * l.outputs;
            for (int64_t j = 0; j < width && column + j < limit; j += LANES)
                put_vec<Out>(to, column + j, limit, row + j);
        };
        const int32_t* x = a + start * steps;
        const int32_t* b = static_cast<const int32_t*>(l.packed) + panel * steps * PANEL;
        const Int8<T> narrow{static_cast<const int8_t*>(l.packed) + panel * l.inputs * PANEL, steps * Int8<T>::STEP};
        // The probable next panel of this thread: as many panels on as there are threads.
        if (!l.scales) times_words<T>(x, rows, b, b + threads * steps * PANEL, steps, done);
        else if (rows <= WIDE_ROWS) times_int8<T>(x, rows, WIDE_ROWS, narrow, steps, done);
        else times_slices<T>(x, rows, narrow, steps, done);
    }
}

// The weight's row that is column c of a panel, or -1: with ``gated`` a panel has 32 rows of each half.
inline int64_t row_of(int64_t panel, int c, int64_t outputs, int gated) {
    const int64_t half = outputs / 2, of_half = panel * 32 + c % 32;
    if (gated) return of_half < half ? of_half + (c < 32 ? 0 : half) : -1;
    return panel * PANEL + c < outputs ? panel * PANEL + c : -1;
}
inline int64_t panels_of(int64_t outputs, int gated) {
    return gated ? (outputs / 2 + 31) / 32 : (outputs + PANEL - 1) / PANEL;
}

// Packs weight [outputs, inputs] into words of columns, 64 for a panel, panel by panel.
template <class T>
void pack(const T* weight, int64_t outputs, int64_t inputs, int gated, int32_t* packed, int threads) {
    const int64_t steps = inputs / PER_WORD<T>, panels = panels_of(outputs, gated);
    const int32_t* rows = words(weight);
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int c = 0; c < PANEL; ++c) {
            const int64_t row = row_of(panel, c, outputs, gated);
            int32_t* to = packed + place(panel * PANEL + c, 0, steps);
            for (int64_t s = 0; s < steps; ++s) to[s * STRIPE] = row < 0 ? 0 : rows[row * steps + s];
        }
}

// Packs an int8 weight, for x of T.
template <class T>
void pack_int8(const int8_t* weight, int64_t outputs, int64_t inputs, int gated, int8_t* packed, int threads) {
    const int64_t panels = panels_of(outputs, gated);
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int c = 0; c < PANEL; ++c) {
            const int64_t row = row_of(panel, c, outputs, gated);
            int8_t* to = packed + panel * inputs * PANEL;
            const Int8<T> layout{to, inputs / PER_WORD<T> * Int8<T>::STEP};
            for (int64_t i = 0; i < inputs; ++i)
                to[layout.place(i / PER_WORD<T>, c, i % PER_WORD<T>)] = row < 0 ? 0 : weight[row * inputs + i];
        }
}

// ---- attention --------------------------------------------------------------------------------------------------

// The pool and one of its layers: a (block, kv head) holds block_size * dim elements of K, then as many of V.
template <class T> struct Pool {
    const T* data;
    int64_t kv_heads, layers, layer, block_size, dim;
    const T* keys(int64_t block, int64_t head) const {
        return data + (((block * kv_heads + head) * layers + layer) * 2) * block_size * dim;
    }
    const T* values(int64_t block, int64_t head) const { return keys(block, head) + block_size * dim; }
};

struct Scores {
    float scale, softcap;  // softcap 0: none
    int64_t window;        // 0: none
};

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

constexpr int64_t AHEAD = 32;  // tokens
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

// sums [H, result] += weights [H, stride] times the values of ``count`` slots, each value read once. As many words
// from ``soon`` on are prefetched meanwhile.
template <class T, int H>
inline void add_values(const T* values, const int32_t* soon, const T* weights, int64_t stride, int64_t count,
                       int64_t dim, int64_t result, float* sums) {
    const int64_t row = dim / PER_WORD<T>;
    for (int64_t w = 0; w < row; w += LANES) {
        const int32_t* v = words(values) + w;
        vf acc[H][PER_WORD<T>];
        for (int h = 0; h < H; ++h)
            for (int i = 0; i < PER_WORD<T>; ++i) acc[h][i] = load(sums + h * result + PER_WORD<T> * w + i * LANES);
        if constexpr (std::is_same_v<T, float>) {
            for (int64_t t = 0; t < count; ++t) {
                __builtin_prefetch(soon + t * row + w, 0, 2);
                vf value = (vf)load(v + t * row);
#pragma GCC unroll 8
                for (int h = 0; h < H; ++h) acc[h][0] += weights[h * stride + t] * value;
            }
        } else {
            // Two slots at a time make words of their even numbers, and of their odd ones.
            for (int64_t t = 0; t < count; t += 2) {
                const bool two = t + 1 < count;
                __builtin_prefetch(soon + t * row + w, 0, 2);
                __builtin_prefetch(soon + (t + 1) * row + w, 0, 2);
                vu a = (vu)load(v + t * row), b = two ? (vu)load(v + (t + 1) * row) : vu{};
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
template <class T> struct Stretch {
    const Pool<T>& pool;
    const int64_t* table;
    int64_t head, first, stop;
    const int32_t* key(int64_t token) const { return at(pool.keys(table[token / pool.block_size], head), token); }
    const int32_t* value(int64_t token) const { return at(pool.values(table[token / pool.block_size], head), token); }
    const int32_t* after_key(int64_t token) const {
        token += AHEAD;
        return token < stop ? key(token) : value(std::min(first + token - stop, stop - 1));
    }
    const int32_t* after_value(int64_t token) const { return value(std::min(token + AHEAD, stop - 1)); }

  private:
    const int32_t* at(const T* page, int64_t token) const {
        return words(page + token % pool.block_size * pool.dim);
    }
};

// Decodes one row for one kv head, the tokens from first to stop: group × (maximum, sum, sums [dim]).
template <class T>
void decode_part(const T* q, const Pool<T>& pool, const int64_t* table, int64_t head, int64_t group, int64_t first,
                 int64_t stop, const Scores& how, float* scores, T* weights, float* results) {
    const int64_t row = pool.dim / PER_WORD<T>, size = pool.block_size, result = 2 + pool.dim;
    const Stretch<T> tokens{pool, table, head, first, stop};
    alignas(64) int32_t columns[MAX_WORDS * LANES];
    for (int64_t t = first; t < stop;) {
        const int64_t offset = t % size, count = std::min({size - offset, stop - t, int64_t(LANES)});
        const int32_t *k = tokens.key(t), *soon = tokens.after_key(t);
        float* to = scores + (t - first);  // numbers beyond ``count`` are written again, or not read
        if (group >= SHARED) {
            for (int64_t w = 0; w < row; w += LANES) {
                vi key[LANES];
                for (int i = 0; i < LANES; ++i) {
                    __builtin_prefetch(soon + i * row + w, 0, 2);
                    key[i] = i < count ? load(k + i * row + w) : vi{};
                }
                transpose(key);
                for (int i = 0; i < LANES; ++i) store(columns + (w + i) * LANES, key[i]);
            }
            in_heads(group, [&](auto heads, int64_t g) {
                scores_of<T, heads>(words(q + g * pool.dim), row, columns, how.scale, STRIDE, to + g * STRIDE);
            });
        } else {
            for (int64_t g = 0; g < group; ++g) {
                const int32_t* query = words(q + g * pool.dim);
                vf acc[LANES];
                for (int i = 0; i < LANES; ++i) {
                    acc[i] = vf{};
                    if (i < count)
                        for (int64_t w = 0; w < row; w += LANES) {
                            if (g == 0) __builtin_prefetch(soon + i * row + w, 0, 2);
                            acc[i] = step<T>(acc[i], load(k + i * row + w), load(query + w));
                        }
                }
                store(to + g * STRIDE, sums_of(acc) * how.scale);
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
        const int64_t offset = t % size, count = std::min(size - offset, stop - t);
        const T* v = pool.values(table[t / size], head) + offset * pool.dim;
        const int32_t* soon = tokens.after_value(t);
        in_heads(group, [&](auto heads, int64_t g) {
            add_values<T, heads>(v, soon, weights + g * STRIDE + (t - first), STRIDE, count, pool.dim, result,
                                 results + g * result + 2);
        });
        t += count;
    }
}

template <class T> void decode(const Decode& d, const Pool<T>& pool, const Scores& how, int threads) {
    const int64_t group = d.heads / pool.kv_heads, result = 2 + pool.dim;
    const T* q = static_cast<const T*>(d.q);
    T* out = static_cast<T*>(d.out);
    int64_t shares = 1;
    for (int64_t r = 0; r < d.rows; ++r) {
        const int64_t seen = how.window ? std::min(how.window, d.contexts[r]) : d.contexts[r];
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
            const int64_t begin = how.window ? std::max<int64_t>(0, context - how.window) : 0;
            const int64_t first = begin + share * SHARE, stop = std::min(context, first + SHARE);
            if (first >= stop) continue;
            const int64_t h = r * d.heads + head * group;
            decode_part<T>(q + h * pool.dim, pool, d.tables + r * d.width, head, group, first, stop, how,
                           scores.get(), weights.get(), own.get());
            for (int64_t g = 0; g < group; ++g)
                if (shares == 1)
                    put_sums<T>(own.get() + g * result + 2, 1 / own[g * result + 1], pool.dim,
                                out + (h + g) * pool.dim);
                else
                    std::copy_n(own.get() + g * result, result, parts.get() + ((h + g) * shares + share) * result);
        }
        if (shares > 1) {
#pragma omp for schedule(static)
            for (int64_t h = 0; h < d.rows * d.heads; ++h) {
                const int64_t context = d.contexts[h / d.heads];
                const int64_t seen = how.window ? std::min(how.window, context) : context;
                const int64_t count = (seen + SHARE - 1) / SHARE;
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
                put_sums<T>(own.get(), 1 / total, pool.dim, out + h * pool.dim);
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
inline vi in_words(const float* value, const float*) { return (vi)load(value); }
inline vi in_words(const bf16* value, const bf16* next) {
    const vu first = (vu)widened(value) >> 16;
    return (vi)(next ? first | (vu)widened(next) : first);
}

// Packs keys and values of the tokens from first to stop as operands, in blocks of KEYS tokens. Each key is a column
// of its words. A block's values are columns, one for each of their dim numbers, of as many words as the block's keys
// fill.
template <class T>
void pack_context(const Pool<T>& pool, const int64_t* table, int64_t head, int64_t first, int64_t stop,
                  Workspace<T>& work) {
    const int64_t row = pool.dim / PER_WORD<T>, size = pool.block_size;
    const int64_t wide = (pool.dim + PANEL - 1) / PANEL * PANEL;
    const int64_t blocks = (stop - first + KEYS - 1) / KEYS, steps = KEYS / PER_WORD<T>;
    const int64_t key_words = KEYS * row, value_words = steps * wide;
    work.keys.reset(new int32_t[blocks * key_words]());
    work.values.reset(new int32_t[blocks * value_words]());
    for (int64_t t = first; t < stop; t += LANES) {
        const int64_t block = (t - first) / KEYS, at = (t - first) % KEYS, count = std::min<int64_t>(LANES, stop - t);
        const int32_t* k[LANES];
        for (int64_t i = 0; i < count; ++i)
            k[i] = words(pool.keys(table[(t + i) / size], head)) + (t + i) % size * row;
        int32_t* key = work.keys.get() + block * key_words + place(at, 0, row);
        for (int64_t w = 0; w < row; w += LANES) {
            vi words_of[LANES];
            for (int64_t i = 0; i < LANES; ++i) words_of[i] = i < count ? load(k[i] + w) : vi{};
            transpose(words_of);
            for (int64_t i = 0; i < LANES; ++i) store(key + (w + i) * STRIPE, words_of[i]);
        }
        int32_t* value = work.values.get() + block * value_words;
        for (int64_t i = 0; i < count; i += PER_WORD<T>) {
            const T* v = pool.values(table[(t + i) / size], head) + (t + i) % size * pool.dim;
            const T* next = nullptr;
            if (PER_WORD<T> == 2 && i + 1 < count)
                next = pool.values(table[(t + i + 1) / size], head) + (t + i + 1) % size * pool.dim;
            for (int64_t d = 0; d < pool.dim; d += LANES)
                store(value + place(d, (at + i) / PER_WORD<T>, steps), in_words(v + d, next ? next + d : nullptr));
        }
    }
}

// One tile of queries against one block of keys, which begins at the token ``at``.
template <class T>
void attend_tile(const T* q, int64_t stride, int64_t rows, int64_t position, int64_t at, int64_t block,
                 const Pool<T>& pool, const Scores& how, Workspace<T>& work) {
    const int64_t row = pool.dim / PER_WORD<T>, wide = (pool.dim + PANEL - 1) / PANEL * PANEL;
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
        const int64_t begin = how.window ? std::clamp<int64_t>(sees - how.window, 0, padded) : 0;
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

template <class T>
void chunk_part(const Chunk& c, const Pool<T>& pool, const Scores& how, int64_t head, int64_t from, int64_t to,
                Workspace<T>& work) {
    const int64_t group = c.heads / pool.kv_heads, cached = c.context - c.length;
    const int64_t wide = (pool.dim + PANEL - 1) / PANEL * PANEL, stride = c.heads * pool.dim;
    const int64_t oldest = how.window ? std::max<int64_t>(0, cached + from + 1 - how.window) : 0;
    pack_context<T>(pool, c.table, head, oldest, cached + to, work);
    work.sums.reset(new float[QUERIES * wide]);
    for (int64_t g = 0; g < group; ++g)
        for (int64_t first = from; first < to; first += QUERIES) {
            const int64_t rows = std::min(QUERIES, to - first), position = cached + first;
            const T* q = static_cast<const T*>(c.q) + first * stride + (head * group + g) * pool.dim;
            std::fill_n(work.most, rows, -1e30f);
            std::fill_n(work.total, rows, 0.0f);
            std::fill_n(work.sums.get(), rows * wide, 0.0f);
            const int64_t begin = how.window ? std::max(oldest, position + 1 - how.window) : oldest;
            for (int64_t block = (begin - oldest) / KEYS; oldest + block * KEYS < position + rows; ++block)
                attend_tile<T>(q, stride, rows, position, oldest + block * KEYS, block, pool, how, work);
            for (int64_t r = 0; r < rows; ++r) {
                T* out = static_cast<T*>(c.out) + (first + r) * stride + (head * group + g) * pool.dim;
                const float *sums = work.sums.get() + r * wide, factor = 1 / work.total[r];
                for (int64_t d = 0; d < pool.dim; d += LANES) put(out + d, load(sums + d) * factor);
            }
        }
}

template <class T> void prefill(const Chunk& c, const Pool<T>& pool, const Scores& how, int threads) {
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

// ---- row by row -------------------------------------------------------------------------------------------------

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

// ---- all layers of a model in one call --------------------------------------------------------------------------

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

// ---- the functions that Python calls: kinds are 0 for float and 1 for bfloat16 -----------------------------------

extern "C" {

// Ends the threads that have computed for the calling thread; the next kernel it calls starts others.
void baton_release_threads() { omp_pause_resource_all(omp_pause_soft); }

// Binds each thread that computes for the calling thread, itself included, to a core of its own.
void baton_bind_threads(const int* cores, int threads) {
#if defined(__linux__)
#pragma omp parallel num_threads(threads)
    {
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(cores[omp_get_thread_num()], &own);
        sched_setaffinity(0, sizeof own, &own);  // on failure the thread stays unbound
    }
#endif
}

// Asks for fewer and larger pages, before the memory is first written.
void baton_advise(void* start, int64_t size) {
#if defined(__linux__)
    const uintptr_t page = 2 << 20, from = (uintptr_t(start) + page - 1) / page * page;
    const uintptr_t to = (uintptr_t(start) + size) / page * page;
    if (to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
}

void baton_pack(int kind, const void* weight, int64_t outputs, int64_t inputs, int gated, int32_t* packed,
                int threads) {
    if (kind) pack(static_cast<const bf16*>(weight), outputs, inputs, gated, packed, threads);
    else pack(static_cast<const float*>(weight), outputs, inputs, gated, packed, threads);
}

// ``kind``: the type of the activations.
void baton_pack_int8(int kind, const int8_t* weight, int64_t outputs, int64_t inputs, int gated, int8_t* packed,
                     int threads) {
    if (kind) pack_int8<bf16>(weight, outputs, inputs, gated, packed, threads);
    else pack_int8<float>(weight, outputs, inputs, gated, packed, threads);
}

// ``scales``: the scales of an int8 weight; null for others.
void baton_linear(int kind, int out_kind, const void* x, const void* packed, const float* scales, const float* bias,
                  void* out, int64_t rows, int64_t inputs, int64_t outputs, int gated, int threads) {
    const Linear l{x, packed, scales, bias, out, rows, inputs, outputs, gated};
    if (!kind) linear<float, float>(l, threads);
    else if (out_kind) linear<bf16, bf16>(l, threads);
    else linear<bf16, float>(l, threads);
}

void baton_add_norm(int kind, int out_kind, const void* x, float* residual, const void* weight, float eps,
                    int64_t rows, int64_t size, void* out, int threads) {
    if (out_kind) {
        const auto* w = static_cast<const bf16*>(weight);
        auto* o = static_cast<bf16*>(out);
        if (kind) add_norm(static_cast<const bf16*>(x), residual, w, eps, rows, size, o, threads);
        else add_norm(static_cast<const float*>(x), residual, w, eps, rows, size, o, threads);
    } else {
        add_norm(static_cast<const float*>(x), residual, static_cast<const float*>(weight), eps, rows, size,
                 static_cast<float*>(out), threads);
    }
}

void baton_rotate_and_store(int kind, const void* pool, const int64_t* shape, int64_t layer, const void* qkv, void* q,
                            const float* cos, const float* sin, const void* q_norm, const void* k_norm, float eps,
                            const int64_t* blocks, const int64_t* offsets, int64_t tokens, int64_t heads,
                            int threads) {
    const Rotate r{qkv, q, cos, sin, q_norm, k_norm, blocks, offsets, eps, tokens, heads};
    if (kind) rotate_and_store(r, pool_of<bf16>(pool, shape, layer), threads);
    else rotate_and_store(r, pool_of<float>(pool, shape, layer), threads);
}

void baton_decode(int kind, const void* pool, const int64_t* shape, int64_t layer, const void* q, void* out,
                  const int64_t* tables, const int64_t* contexts, int64_t rows, int64_t heads, int64_t width,
                  float scale, float softcap, int64_t window, int threads) {
    const Decode d{q, out, tables, contexts, rows, heads, width};
    const Scores how{scale, softcap, window};
    if (kind) decode(d, pool_of<bf16>(pool, shape, layer), how, threads);
    else decode(d, pool_of<float>(pool, shape, layer), how, threads);
}

void baton_prefill(int kind, const void* pool, const int64_t* shape, int64_t layer, const void* q, void* out,
                   const int64_t* table, int64_t length, int64_t context, int64_t heads, float scale, float softcap,
                   int64_t window, int threads) {
    const Chunk c{q, out, table, length, context, heads};
    const Scores how{scale, softcap, window};
    if (kind) prefill(c, pool_of<bf16>(pool, shape, layer), how, threads);
    else prefill(c, pool_of<float>(pool, shape, layer), how, threads);
}

void baton_layers(int kind, const void* stack, int64_t count, const void* step, int threads) {
    const Stack& m = *static_cast<const Stack*>(stack);
    const Step& s = *static_cast<const Step*>(step);
    if (kind) run_layers<bf16>(m, count, s, threads);
    else run_layers<float>(m, count, s, threads);
}
}
