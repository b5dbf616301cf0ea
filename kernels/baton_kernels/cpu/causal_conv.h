// Causal convolutions of each channel by itself, and the cells that keep their last inputs.

#pragma once

#include "rows.h"

namespace {

// Where the states of one layer are: see baton_kernels.state_pages. The layout of the ctypes one in
// baton_kernels.cpu.causal_conv.
struct UnitCells {
    float* pages;
    int64_t stride, per_page, size, first, units;  // ``first``: the layer's first cell

    // A unit's cell in the state whose pages ``table`` names; null: there is none.
    float* of(const int64_t* table, int64_t unit) const {
        const int64_t cell = first + unit, page = table[cell / per_page];
        return page < 0 ? nullptr : pages + page * stride + cell % per_page * size;
    }
};

// The pages of a step's sequences: see ``StateRows``. [sequences, width] and [sequences * queries, width].
struct StateTables {
    const int64_t *sources, *targets;
    int64_t sequences, queries, width;
};

// A convolution of ``size`` channels among ``all``: weight [taps + 1, all], the token's own row last.
struct Taps {
    const float *weight, *bias;  // no bias: null
    int64_t all, taps;

    Taps from(int64_t channel) const { return {weight + channel, bias ? bias + channel : nullptr, all, taps}; }

    // f(i, sums of a vector of channels) of one row: ``input``(t, i, V) is the row t inputs before it.
    template <class In, class F> void row(int64_t size, In input, F f) const {
        along(size, [&](int64_t i, auto v) {
            using V = decltype(v);
            V sum = bias ? get<V>(bias + i) : V{};
            for (int64_t t = 0; t <= taps; ++t) sum += get<V>(weight + t * all + i) * input(taps - t, i, v);
            f(i, sum);
        });
    }
};

// kept [taps, width]: the inputs of ``size`` channels move up by ``length`` rows, of which x(l, i, V) is row l. From may
// be to; null is zeros.
template <class X>
inline void keep_last(const float* from, float* to, int64_t taps, int64_t width, int64_t size, int64_t length, X x) {
    for (int64_t t = 0; t < taps; ++t) {
        const int64_t at = t + length;  // among the inputs kept and these
        along(size, [&](int64_t i, auto v) {
            using V = decltype(v);
            if (at >= taps) put(to + t * width + i, x(at - taps, i, v));
            else put(to + t * width + i, from ? get<V>(from + at * width + i) : V{});
        });
    }
}

// Row l - t of a run of rows, or one of those kept before.
template <class V, class X>
inline V input_before(const float* kept, int64_t taps, int64_t width, int64_t l, int64_t t, int64_t i, V v, X x) {
    if (l >= t) return x(l - t, i, v);
    return kept ? get<V>(kept + (taps + l - t) * width + i) : V{};
}

// LFM2's convolution of a layer: rows of B, C and x [rows, 3 * all] -> C * conv(B * x), [rows, all].
struct ShortConv {
    Taps conv;
    const float* rows;
    float* out;
};

inline void short_conv_run(const ShortConv& s, int64_t channel, int64_t size, const float* from, float* to,
                           int64_t start, int64_t length) {
    const int64_t all = s.conv.all, taps = s.conv.taps;
    const float* const b = s.rows + start * 3 * all + channel;
    const auto product = [&](int64_t l, int64_t i, auto v) {
        using V = decltype(v);
        return get<V>(b + l * 3 * all + i) * get<V>(b + l * 3 * all + 2 * all + i);
    };
    const Taps conv = s.conv.from(channel);
    for (int64_t l = 0; l < length; ++l) {
        const auto before = [&](int64_t t, int64_t i, auto v) { return input_before(from, taps, size, l, t, i, v, product); };
        conv.row(size, before, [&](int64_t i, auto sum) {
            put(s.out + (start + l) * all + channel + i, sum * get<decltype(sum)>(b + l * 3 * all + all + i));
        });
    }
    keep_last(from, to, taps, size, size, length, product);
}

// The rows of decoding sequences. A row without a target is padding: its output is 0.
inline void short_conv_decode(const ShortConv& s, const UnitCells& cells, const StateTables& t, int threads) {
    const int64_t size = s.conv.all / cells.units;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < t.sequences * cells.units; ++task) {
        const int64_t sequence = task / cells.units, unit = task % cells.units;
        const float* from = cells.of(t.sources + sequence * t.width, unit);
        for (int64_t row = sequence * t.queries; row < (sequence + 1) * t.queries; ++row) {
            float* const to = cells.of(t.targets + row * t.width, unit);
            if (to) short_conv_run(s, unit * size, size, from, to, row, 1);
            else std::fill_n(s.out + row * s.conv.all + unit * size, size, 0.0f);
            if (to) from = to;
        }
    }
}

// A run of rows of one sequence: tables [width].
inline void short_conv_prefill(const ShortConv& s, const UnitCells& cells, const int64_t* source,
                               const int64_t* target, int64_t start, int64_t length, int threads) {
    const int64_t size = s.conv.all / cells.units;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t unit = 0; unit < cells.units; ++unit)
        short_conv_run(s, unit * size, size, cells.of(source, unit), cells.of(target, unit), start, length);
}

}  // namespace
