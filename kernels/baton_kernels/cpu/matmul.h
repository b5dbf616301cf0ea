// Matmul with packed weights of floats, bfloat16 and int8.

#pragma once

#include "activation.h"

namespace {

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
    Activation activation;
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
            if (l.gated) gate(row, PANEL / 2, l.activation);
            else if (l.activation.kind != LINEAR) activate(row, PANEL, l.activation);
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

}  // namespace
