// Matmul with packed weights, which are words or codes that become words.

#pragma once

#include "activation.h"
#include "codes.h"
#include "sums.h"

namespace {

// The index of the word of a column and a step among packed words: stripe by stripe, in each stripe step by step.
inline int64_t place(int64_t column, int64_t step, int64_t steps) {
    return column / STRIPE * STRIPE * steps + step * STRIPE + column % STRIPE;
}

// A panel as a tile of V vectors from the first reads it: vector first + j of step s, as words; ``ahead`` prefetches.
struct Words {
    const int32_t* panel;
    int64_t steps;  // steps of the packed panel
    const int32_t* at(int64_t s, int j) const { return panel + place(j * LANES, s, steps); }
    template <int V> [[gnu::always_inline]] vi word(int64_t s, int first, int j) const {
        return load(at(s, first + j));
    }
    template <int V> [[gnu::always_inline]] void ahead(int64_t s, int first) const {
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j)
            if (j * LANES % LINE == 0) __builtin_prefetch(at(s, first + j) + BYTES_AHEAD / 4);
    }
};

// Codes whose words are kept, as a slice of a panel, for the rows that follow.
template <class F, class T> struct Kept : Codes<F, T> {
    int32_t* slice;
    template <int V> [[gnu::always_inline]] vi word(int64_t s, int first, int j) const {
        const vi made = Codes<F, T>::template word<V>(s, first, j);
        store(slice + place((first + j) * LANES, s, MOST_STEPS), made);
        return made;
    }
};

// A slice of kept words; ``ahead`` prefetches the codes of the next.
template <class F, class T> struct Slice : Words {
    NextSlice<F, T> codes;
    template <int V> [[gnu::always_inline]] void ahead(int64_t s, int first) const {
        codes.template ahead<V>(s, first);
    }
};

// Words that are cached since the first rows were multiplied; ``ahead`` prefetches others, ``lines`` cache lines a
// step.
struct Cached : Words {
    const int32_t* others;
    int lines;
    template <int V> [[gnu::always_inline]] void ahead(int64_t s, int first) const {
#pragma GCC unroll 4
        for (int j = first; j < first + V; ++j) {
            const int line = j * LANES / LINE;
            if (j * LANES % LINE == 0 && line < lines) __builtin_prefetch(others + (s * lines + line) * LINE);
        }
    }
};

// acc[r] += row r of a (its words lie lda apart from the next row's) times V vectors of a panel from the first, in the
// steps between two.
template <class T, int R, int V, class B>
[[gnu::always_inline]] inline void tile(const int32_t* a, int64_t lda, const B& b, int first, int64_t start,
                                        int64_t end, vf (&acc)[R][V]) {
    for (int64_t s = start; s < end; ++s) {
        vi column[V];
        b.template ahead<V>(s, first);
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) column[j] = b.template word<V>(s, first, j);
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
inline void tile_of_floats(const int32_t* a, int64_t lda, const B& b, int first, int64_t start, int64_t end,
                           vf (&sums)[R][V]) {
    alignas(64) float rows[R][2 * FLOAT_STEPS];
    vf acc[R][V];
    std::memcpy(&acc, &sums, sizeof acc);
    for (int64_t from = start; from < end; from += FLOAT_STEPS) {
        const int64_t count = std::min(FLOAT_STEPS, end - from);
        for (int r = 0; r < R; ++r) {
            const bf16* row = reinterpret_cast<const bf16*>(a + r * lda + from);
            int64_t i = 0;
            for (; i + LANES <= 2 * count; i += LANES) store(rows[r] + i, widened(row + i));
            for (; i < 2 * count; ++i) rows[r][i] = to_float(row[i]);
        }
        for (int64_t s = 0; s < count; ++s) {
            vi words[V];
            b.template ahead<V>(from + s, first);
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) words[j] = b.template word<V>(from + s, first, j);
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

template <class T, int R, int V, class B>
[[gnu::always_inline]] inline void add_steps(const int32_t* a, int64_t lda, const B& b, int first, int64_t start,
                                             int64_t end, vf (&acc)[R][V]) {
#if defined(BF16_AS_FLOATS)
    if constexpr (std::is_same_v<T, bf16>) return tile_of_floats<R, V>(a, lda, b, first, start, end, acc);
#endif
    tile<T, R, V>(a, lda, b, first, start, end, acc);
}

// R rows of a times one panel: sums [R, 64], whose rows lie ``stride`` floats apart.
template <class T, int R, class B>
inline void tile_to(const int32_t* a, int64_t lda, const B& b, int64_t steps, float* sums, int64_t stride) {
    for (int j = 0; j < VECS; j += TILE_VECS) {
        vf acc[R][TILE_VECS] = {};
        add_steps<T, R, TILE_VECS>(a, lda, b, j, 0, steps, acc);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < TILE_VECS; ++i) store(sums + r * stride + (j + i) * LANES, acc[r][i]);
    }
}

template <class T, class B>
inline void rows_by(int rows, const int32_t* a, int64_t lda, const B& b, int64_t steps, float* sums, int64_t stride) {
    switch (rows) {
        case 1: return tile_to<T, 1>(a, lda, b, steps, sums, stride);
        case 2: return tile_to<T, 2>(a, lda, b, steps, sums, stride);
        case 3: return tile_to<T, 3>(a, lda, b, steps, sums, stride);
        case 4: return tile_to<T, 4>(a, lda, b, steps, sums, stride);
        case 5: return tile_to<T, 5>(a, lda, b, steps, sums, stride);
        case 6: return tile_to<T, 6>(a, lda, b, steps, sums, stride);
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

// The groups of a slice of a panel of codes.
struct Groups {
    int64_t steps, size;  // of the slice, and of a group
    int number;
    const float* of_x;    // the sums of x in each group, from the slice's first on; null: there are no zeros
    int64_t stride;       // from a row's to the next's
    alignas(64) float scales[MOST_GROUPS * PANEL], zeros[MOST_GROUPS * PANEL];  // the zeros: see widen_zeros

    Groups(const Matrix& m, int64_t panel, int64_t first, int64_t steps, int64_t size, const float* sums_of_x,
           int64_t stride)
        : steps(steps), size(size), number(int((steps + size - 1) / size)),
          of_x(sums_of_x ? sums_of_x + first : nullptr), stride(stride) {
        const int64_t at = (panel * stride + first) * PANEL, count = number * PANEL;
        if (m.scales) widen_scales(m.scale_type, m.scales, at, count, scales);
        else std::fill_n(scales, count, 1.0f);
        if (of_x) widen_zeros(m.zeros, at, count, one_of(m.format), zeros);
    }
};

// Whether the sums of a group and those of all groups before it fit into the registers, for so many rows and vectors.
constexpr bool fit_registers(int rows, int vectors) { return (2 * rows + 1) * vectors + 2 <= REGISTERS; }
constexpr int LONG_GROUP = 64;  // steps from which on it is better to multiply more vectors than to have both there

// sums [R, 64] += R rows of a times a slice of codes, V vectors at a time, the products of each group added up by
// themselves. A function of its own, whatever calls it: all of its registers are then for the sums.
template <class T, int R, int V, class B>
[[gnu::noinline]] void add_groups(const int32_t* a, int64_t lda, const B& b, const Groups& g, int64_t row,
                                  float* sums) {
    constexpr bool KEPT = fit_registers(R, V);
#pragma GCC unroll 2
    for (int j = 0; j < VECS; j += V) {
        vf total[R][V];
        const auto each = [&](auto f) {
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int i = 0; i < V; ++i) f(r, i, sums + r * PANEL + (j + i) * LANES);
        };
        if (KEPT) each([&](int r, int i, float* from) { total[r][i] = load(from); });
        for (int k = 0; k < g.number; ++k) {
            const float *scales = g.scales + k * PANEL + j * LANES, *zeros = g.zeros + k * PANEL + j * LANES;
            vf acc[R][V] = {};
            if (g.of_x)
                each([&](int r, int i, float*) {
                    acc[r][i] = load(zeros + i * LANES) * g.of_x[(row + r) * g.stride + k];
                });
            add_steps<T, R, V>(a, lda, b, j, k * g.size, std::min(g.steps, (k + 1) * g.size), acc);
            each([&](int r, int i, float* to) {
                if (KEPT) total[r][i] += acc[r][i] * load(scales + i * LANES);
                else store(to, load(to) + acc[r][i] * load(scales + i * LANES));
            });
        }
        if (KEPT) each([&](int r, int i, float* to) { store(to, total[r][i]); });
    }
}

template <class T, int R, class B>
inline void add_tile(const int32_t* a, int64_t lda, const B& b, const Groups& g, int64_t row, float* sums) {
    // Of many rows half as many vectors at a time, so that no word is made twice.
    if constexpr (R > TILE_ROWS) return add_groups<T, R, TILE_VECS / 2>(a, lda, b, g, row, sums);
    if constexpr (!fit_registers(R, TILE_VECS))
        if (g.size < LONG_GROUP) return add_groups<T, R, TILE_VECS / 2>(a, lda, b, g, row, sums);
    if constexpr (R <= TILE_ROWS) add_groups<T, R, TILE_VECS>(a, lda, b, g, row, sums);
}

// The same for as many rows as a tile may have, from ``row`` on.
template <class T, class B>
inline void add_rows(int rows, const int32_t* a, int64_t lda, const B& b, const Groups& g, int64_t row, float* sums) {
    switch (rows) {
        case 1: return add_tile<T, 1>(a, lda, b, g, row, sums);
        case 2: return add_tile<T, 2>(a, lda, b, g, row, sums);
        case 3: return add_tile<T, 3>(a, lda, b, g, row, sums);
        case 4: return add_tile<T, 4>(a, lda, b, g, row, sums);
        case 5: return add_tile<T, 5>(a, lda, b, g, row, sums);
        case 6: return add_tile<T, 6>(a, lda, b, g, row, sums);
    }
}
template <class T, class B>
inline void add_wide_rows(int rows, const int32_t* a, int64_t lda, const B& b, const Groups& g, float* sums) {
    switch (rows) {
        case 7: return add_tile<T, 7>(a, lda, b, g, 0, sums);
        case 8: return add_tile<T, 8>(a, lda, b, g, 0, sums);
        case 9: return add_tile<T, 9>(a, lda, b, g, 0, sums);
        case 10: return add_tile<T, 10>(a, lda, b, g, 0, sums);
        case 11: return add_tile<T, 11>(a, lda, b, g, 0, sums);
        case 12: return add_tile<T, 12>(a, lda, b, g, 0, sums);
    }
    add_rows<T>(rows, a, lda, b, g, 0, sums);
}

// Rows of x [rows, inputs] and, for a weight with zero points, the sums of each of its groups: [rows, groups].
template <class T> struct Rows {
    const T* x;
    const float* sums;
    int64_t inputs, number;
    Rows from(int64_t row, int64_t count, int64_t group) const {
        return {x + row * inputs, sums ? sums + row * (inputs / group) : nullptr, inputs, count};
    }
};

// The groups whose sums of x a weight needs.
inline int64_t summed_groups(const Matrix& m, int64_t inputs) { return m.zeros ? inputs / m.group : 0; }
template <class T> inline void sum_groups(const T* x, int64_t group, int64_t groups, float* sums) {
    for (int64_t k = 0; k < groups; ++k) {
        Sum sum;
        along(group, [&](int64_t i, auto v) { sum += get<decltype(v)>(x + k * group + i); });
        sums[k] = sum.total();
    }
}

// Rows (at most MOST_ROWS) times one panel of codes: sums [rows, 64]. Slice by slice of the panel; the first of many
// rows make a slice's words for all. The sums run in the same order for any number of rows. ``next``: the probable
// next panel of the calling thread.
template <class F, class T>
[[gnu::noinline]] void times_codes(const Matrix& m, const Rows<T>& rows, int64_t panel, int64_t next, float* sums) {
    const int64_t steps = rows.inputs / PER_WORD<T>, size = m.group ? m.group / PER_WORD<T> : MOST_STEPS;
    const int64_t longest = std::min<int64_t>(MOST_STEPS / size, MOST_GROUPS) * size;
    const auto codes_at = [&](int64_t of_panel, int64_t step) {
        const int64_t pair = (of_panel * rows.inputs + step * PER_WORD<T>) / 2;
        return static_cast<const uint8_t*>(m.packed) + Lanes<F>::at(pair, 0);
    };
    std::fill_n(sums, rows.number * PANEL, 0.0f);
    for (int64_t from = 0; from < steps; from += longest) {
        const int64_t count = std::min(longest, steps - from), end = from + count;
        const Groups groups(m, panel, from / size, count, size, rows.sums, steps / size);
        const NextSlice<F, T> ahead{end < steps ? codes_at(panel, end) : codes_at(next, 0), count};
        const Codes<F, T> codes{ahead, codes_at(panel, from)};
        const int32_t* const a = words(rows.x) + from;
        if (rows.number <= WIDE_ROWS) {
            add_wide_rows<T>(int(rows.number), a, steps, codes, groups, sums);
            continue;
        }
        alignas(64) int32_t kept[MOST_STEPS * PANEL];
        in_tiles(rows.number, [&](int64_t first, int64_t n) {
            const int32_t* x = a + first * steps;
            float* const to = sums + first * PANEL;
            if (first == 0) add_rows<T>(int(n), x, steps, Kept<F, T>{codes, kept}, groups, first, to);
            else add_rows<T>(int(n), x, steps, Slice<F, T>{{kept, MOST_STEPS}, ahead}, groups, first, to);
        });
    }
}

// Rows times one panel, and the bias: calls done(row, its 64 sums) for each. ``next``: see times_codes.
template <class T, class F>
inline void times_panel(const Matrix& m, const Rows<T>& rows, int64_t panel, int64_t next, F done) {
    const float* const bias = m.bias ? m.bias + panel * PANEL : nullptr;
    const auto finish = [&](int64_t r, float* row) {
        if (bias)
            for (int j = 0; j < PANEL; ++j) row[j] += bias[j];
        done(r, row);
    };
    if (m.format == WORDS) {
        const int32_t* const b = static_cast<const int32_t*>(m.packed);
        const int64_t steps = rows.inputs / PER_WORD<T>, size = steps * PANEL;
        return times_words<T>(words(rows.x), rows.number, b + panel * size, b + next * size, steps, finish);
    }
    alignas(64) float sums[MOST_ROWS * PANEL], factors[PANEL];
    by_format(m.format, [&](auto of) { times_codes<decltype(of), T>(m, rows, panel, next, sums); });
    const float one = one_of(m.format);
    for (int j = 0; j < PANEL; ++j) factors[j] = m.factors[panel * PANEL + j] / one;
    for (int64_t r = 0; r < rows.number; ++r) {
        float* const row = sums + r * PANEL;
        for (int j = 0; j < PANEL; ++j) row[j] *= factors[j];
        finish(r, row);
    }
}

// A row of x, each number times ``factor``, in the order of a weight's codes (null: as it is).
template <class T> inline void take_row(const T* from, int64_t size, const int32_t* order, float factor, T* to) {
    int64_t i = 0;
    if (!order)
        for (; i + LANES <= size; i += LANES) put(to + i, floats(from + i) * factor);
    for (; i < size; ++i) put(to + i, to_float(from[order ? order[i] : i]) * factor);
}

// A weight and what follows its product. The layout is that of the ctypes structure in baton_kernels.cpu.linear.
struct Projection : Matrix {
    int64_t inputs, outputs;
    int gated;
    Activation activation;
};

// What a weight's kernels take besides x: x in the order of its codes, and the sums of its groups.
template <class T> struct Prepared {
    std::unique_ptr<T[]> ordered;
    std::unique_ptr<float[]> sums;
    Rows<T> rows;

    Prepared(const Matrix& m, int64_t inputs, const T* x, int64_t number, int threads)
        : rows{x, nullptr, inputs, number} {
        const int64_t groups = summed_groups(m, inputs);
        if (!m.order && !groups) return;
        if (m.order) ordered.reset(new T[number * inputs]), rows.x = ordered.get();
        if (groups) sums.reset(new float[number * groups]), rows.sums = sums.get();
#pragma omp parallel for num_threads(threads) if (number > 16)
        for (int64_t r = 0; r < number; ++r) {
            if (m.order) take_row(x + r * inputs, inputs, m.order, 1, ordered.get() + r * inputs);
            if (groups) sum_groups(rows.x + r * inputs, m.group, groups, sums.get() + r * groups);
        }
    }
};

template <class T, class Out>
void linear(const Projection& l, const T* x, int64_t rows, Out* out, int threads) {
    const int64_t width = l.gated ? PANEL / 2 : PANEL;  // outputs of a panel
    const int64_t panels = (l.outputs + width - 1) / width;
    const Prepared<T> prepared(l, l.inputs, x, rows, threads);
    // A prompt's rows are split into runs, so that there are tasks for many threads.
    const int64_t whole = l.format == WORDS ? rows : std::min<int64_t>(rows, MOST_ROWS);
    const int64_t run = rows <= 4 * TILE_ROWS || panels >= 4 * threads ? whole : 16 * TILE_ROWS;
    const int64_t runs = rows ? (rows + run - 1) / run : 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < panels * runs; ++task) {
        const int64_t panel = task / runs, start = task % runs * run, count = std::min(run, rows - start);
        const int64_t column = panel * width, limit = std::min(l.outputs, column + width);
        const Rows<T> some = prepared.rows.from(start, count, l.group);
        times_panel(l, some, panel, panel + threads, [&](int64_t r, float* row) {
            if (l.gated) gate(row, PANEL / 2, l.activation);
            else if (l.activation.kind != LINEAR) activate(row, PANEL, l.activation);
            Out* to = out + (start + r) * l.outputs;
            for (int64_t j = 0; j < width && column + j < limit; j += LANES)
                put_vec<Out>(to, column + j, limit, row + j);
        });
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

// Packs codes [outputs, inputs] of a format, of which bytes hold one or two, the even input's in the low half. Int4
// becomes two's complement of what is in excess of 8.
template <class F>
void pack_codes(const uint8_t* codes, int64_t outputs, int64_t inputs, int gated, uint8_t* packed, int threads) {
    using L = Lanes<F>;
    const int64_t panels = panels_of(outputs, gated), row_bytes = inputs * F::BITS / 8;
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels; ++panel) {
        uint8_t* const to = packed + L::at(panel * inputs / 2, 0);
        std::memset(to, 0, L::at(inputs / 2, 0));
        for (int c = 0; c < PANEL; ++c) {
            const int64_t row = row_of(panel, c, outputs, gated);
            if (row < 0) continue;
            const uint8_t* const from = codes + row * row_bytes;
            const int j = c / LANES, bit = j % L::TOGETHER * F::BITS;
            for (int64_t pair = 0; pair < inputs / 2; ++pair) {
                uint32_t even, odd, lane;
                if (F::BITS == 8) even = from[2 * pair], odd = from[2 * pair + 1];
                else even = from[pair] & 15, odd = from[pair] >> 4;
                if (std::is_same_v<F, Int4>) even ^= 8, odd ^= 8;
                uint8_t* const at = to + L::at(pair, j) + c % LANES * 4;
                std::memcpy(&lane, at, sizeof lane);
                lane |= even << bit | odd << (16 + bit);
                std::memcpy(at, &lane, sizeof lane);
            }
        }
    }
}

}  // namespace
