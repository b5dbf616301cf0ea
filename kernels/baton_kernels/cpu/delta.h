// Linear attention: the convolutions, gates and states of the heads of one layer. See baton_kernels.delta_rule.

#pragma once

#include "rows.h"

#if defined(__FMA__) && !defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// These structures have the layout of the ctypes ones in baton_kernels.cpu.delta.
struct DeltaLayer {
    int64_t key_heads, shared;             // shared: value heads of a key head
    int64_t key_dim, value_dim, taps;      // taps: inputs that the convolutions keep
    const float* conv;                     // [taps + 1, channels]; null: there is none
    const float *a_log, *dt_bias;          // of value heads, and of their channels if ``by_channel``; dt_bias null: 0
    const float* norm;                     // [value_dim]; null: none
    float eps, scale, lower_bound;         // scale: of the queries; lower_bound 0: none
    int by_channel, unit_vectors, sigmoid; // a decay of each channel; queries and keys of length 1; the gate's kind
};

// Rows of one kind of numbers, ``stride`` apart; null: there are none.
struct DeltaRows {
    const void* at;
    int64_t stride;
};

struct DeltaSegment {
    int64_t start, length;
    const int64_t *source, *target;
};

struct DeltaStep {
    DeltaRows qkv, decay, beta, gate;
    void* out;  // [tokens, value heads, value_dim]
    float* pages;
    int64_t page, per_page, first, size, width;  // numbers of a page; the layer's first cell; pages of a state
    const int64_t *sources, *targets;            // of the decoding sequences, and of their rows
    int64_t decodes, queries;                    // decoding sequences, and the rows of each
    const DeltaSegment* segments;
    int64_t num_segments;
};

constexpr int64_t DELTA_RUN = 32;        // most tokens whose queries, keys and values are made at once
// Vectors of a state's row that are computed together: of many tokens, for which such a part of the state stays in L1,
// and of few, whose states are read in the order in which they lie.
constexpr int DELTA_VECS = 2, DELTA_WIDE = LANES == 16 ? 8 : 4;
constexpr int64_t DELTA_COLUMNS = DELTA_VECS * LANES;
constexpr int64_t DELTA_IN_PLACE = 2;    // most tokens whose states are not copied

// sum + a b, rounded once where there is an instruction for it. The compiler leaves the order of such sums as it is, so
// that the sums of a run are the same bits however the run is cut.
inline vf plus_product(vf sum, vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

// log(1 + e^x)
inline vf softplus(vf x) {
    const vf e = exp_of_negative(x > 0.0f ? -x : x), s = e / (2.0f + e), square = s * s;
    vf p = splat(1.0f / 13);
    p = p * square + 1.0f / 11;
    p = p * square + 1.0f / 9;
    p = p * square + 1.0f / 7;
    p = p * square + 1.0f / 5;
    p = p * square + 1.0f / 3;
    p = p * square + 1.0f;
    return (x > 0.0f ? x : vf{}) + 2.0f * s * p;
}
inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp_of(-x)); }

// What a run of tokens does to some columns of a head's state, in the order of the tokens.
struct DeltaBlock {
    const float* source;          // [key_dim, from the next row ``source_stride``]; null: zeros
    float* target;
    int64_t source_stride, stride;
    const float *q, *k, *faded;   // [tokens, key_dim]; faded: keys times decays, if those are by channel
    const float *decay, *beta;    // [tokens, key_dim] or [tokens]; [tokens], null: nothing is corrected
    const float* v;               // [tokens, value_dim], from these columns on
    float* out;                   // likewise
    int64_t tokens, key_dim, value_dim;
    const float* ahead;           // a state like ``source`` that is read next and prefetched; null: none
};

// keys [key_dim] times the state's rows.
template <int V>
inline void predict(const float* keys, const float* state, int64_t stride, int64_t key_dim, vf (&sums)[2][V]) {
    for (auto& sum : sums)
        for (vf& lanes : sum) lanes = vf{};
    if (!state) return;
    for (int64_t d = 0; d < key_dim; d += 2)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h)
#pragma GCC unroll 8
            for (int j = 0; j < V; ++j)
                sums[h][j] = plus_product(sums[h][j], splat(keys[d + h]), load(state + (d + h) * stride + j * LANES));
}

// One token. ``next``: the keys of the token behind it, whose sums are made of the new state as it is written.
template <bool BY_CHANNEL, bool NEXT, int V>
inline void advance(const DeltaBlock& b, int64_t t, const float* from, int64_t from_stride, const float* next,
                    vf (&predicted)[2][V]) {
    const float *q = b.q + t * b.key_dim, *k = b.k + t * b.key_dim;
    const float* decays = b.decay + (BY_CHANNEL ? t * b.key_dim : t);
    vf change[V], sums[2][V] = {}, following[2][V] = {};
    for (int j = 0; j < V; ++j) {
        change[j] = load(b.v + t * b.value_dim + j * LANES);
        if (b.beta) {
            const vf known = predicted[0][j] + predicted[1][j];
            change[j] = b.beta[t] * (change[j] - (BY_CHANNEL ? known : decays[0] * known));
        }
    }
    for (int64_t d = 0; d < b.key_dim; d += 2)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const vf fading = splat(decays[BY_CHANNEL ? d + h : 0]), key = splat(k[d + h]), query = splat(q[d + h]);
#pragma GCC unroll 8
            for (int j = 0; j < V; ++j) {
                if (V > DELTA_VECS && b.ahead && j * LANES % LINE == 0)
                    __builtin_prefetch(b.ahead + (d + h) * b.stride + j * LANES, 0, 2);
                vf state = key * change[j];
                if (from) state = plus_product(state, fading, load(from + (d + h) * from_stride + j * LANES));
                store(b.target + (d + h) * b.stride + j * LANES, state);
                sums[h][j] = plus_product(sums[h][j], query, state);
                if constexpr (NEXT) following[h][j] = plus_product(following[h][j], splat(next[d + h]), state);
            }
        }
    for (int j = 0; j < V; ++j) store(b.out + t * b.value_dim + j * LANES, sums[0][j] + sums[1][j]);
    std::memcpy(&predicted, &following, sizeof predicted);
}

template <bool BY_CHANNEL, int V> __attribute__((noinline)) void run_block(const DeltaBlock& b) {
    vf predicted[2][V];
    const float* keys = BY_CHANNEL ? b.faded : b.k;
    if (b.beta) predict(keys, b.source, b.source_stride, b.key_dim, predicted);
    const float* from = b.source;
    int64_t stride = b.source_stride;
    for (int64_t t = 0; t < b.tokens; ++t) {
        const bool more = b.beta && t + 1 < b.tokens;
        if (more) advance<BY_CHANNEL, true, V>(b, t, from, stride, keys + (t + 1) * b.key_dim, predicted);
        else advance<BY_CHANNEL, false, V>(b, t, from, stride, nullptr, predicted);
        from = b.target, stride = b.stride;
    }
}

// The memory of one thread.
struct DeltaMemory {
    std::unique_ptr<float[]> all;
    float *q, *k, *faded, *decay, *beta, *v, *out, *block;
    explicit DeltaMemory(const DeltaLayer& l)
        : all(new float[DELTA_RUN * (4 * l.key_dim + 2 * l.value_dim + 1) + DELTA_COLUMNS * l.key_dim]) {
        float* at = all.get();
        for (float** part : {&q, &k, &faded, &decay}) *part = at, at += DELTA_RUN * l.key_dim;
        for (float** part : {&v, &out}) *part = at, at += DELTA_RUN * l.value_dim;
        beta = at, at += DELTA_RUN;
        block = at;
    }
};

// One key head over a run of rows that follow each other, from one cell to another. A cell has the states of its value
// heads, [shared, key_dim, value_dim], then the last inputs of the convolutions, [taps, query | key | values].
template <class T> struct DeltaUnit {
    const DeltaLayer& l;
    const DeltaStep& s;
    const DeltaMemory& m;
    int64_t unit;

    int64_t states() const { return l.shared * l.key_dim * l.value_dim; }
    int64_t channels() const { return 2 * l.key_dim + l.shared * l.value_dim; }
    const T* row(const DeltaRows& rows, int64_t t) const { return static_cast<const T*>(rows.at) + t * rows.stride; }

    // The place of channel c of a cell in a row of all heads' queries, keys and values.
    int64_t column(int64_t c) const {
        if (c < l.key_dim) return unit * l.key_dim + c;
        if (c < 2 * l.key_dim) return (l.key_heads + unit - 1) * l.key_dim + c;
        return 2 * l.key_heads * l.key_dim + unit * l.shared * l.value_dim + c - 2 * l.key_dim;
    }

    // Inputs of the convolution of channels from c on, for token t of the segment that begins in row ``start``: tokens
    // before it are in the cell.
    vf input(const float* cell, int64_t start, int64_t t, int64_t c, int64_t col) const {
        if (t >= 0) return floats(row(s.qkv, start + t) + col);
        return cell ? load(cell + states() + (l.taps + t) * channels() + c) : vf{};
    }

    // Tokens t to t + count of the segment, channels c to c + size -> out [count, size].
    void convolve(const float* cell, int64_t start, int64_t t, int64_t count, int64_t c, int64_t size, float* out) const {
        const int64_t col = column(c), all = 2 * l.key_heads * l.key_dim + l.key_heads * l.shared * l.value_dim;
        for (int64_t i = 0; i < count; ++i)
            for (int64_t x = 0; x < size; x += LANES) {
                vf sum = vf{};
                if (!l.conv) sum = floats(row(s.qkv, start + t + i) + col + x);
                else {
                    for (int64_t j = 0; j <= l.taps; ++j)
                        sum += load(l.conv + j * all + col + x) * input(cell, start, t + i - l.taps + j, c + x, col + x);
                    sum = silu(sum);
                }
                store(out + i * size + x, sum);
            }
    }

    // The inputs behind a segment of so many tokens. In place, they move towards the first.
    void keep_inputs(const float* source, float* target, int64_t start, int64_t length) const {
        for (int64_t j = 0; j < l.taps; ++j)
            for (int64_t c = 0; c < channels(); c += LANES) {
                const vf kept = input(source, start, length - l.taps + j, c, column(c));
                store(target + states() + j * channels() + c, kept);
            }
    }

    // Rows [count, key_dim] times ``factor``, and made of length 1 before if the layer does so.
    void scale(float* rows, int64_t count, float factor) const {
        for (float* x = rows; x < rows + count * l.key_dim; x += l.key_dim) {
            float by = factor;
            if (l.unit_vectors) {
                vf squares = vf{};
                for (int64_t i = 0; i < l.key_dim; i += LANES) squares += load(x + i) * load(x + i);
                by *= 1.0f / std::sqrt(sum_of(squares) + 1e-6f);
            }
            for (int64_t i = 0; i < l.key_dim; i += LANES) store(x + i, by * load(x + i));
        }
    }

    vf faded(vf x, float rate) const {
        if (l.lower_bound) return exp_of_negative(l.lower_bound * sigmoid(rate * x));
        return exp_of_negative(-rate * softplus(x));
    }

    // The decays and betas of a value head for rows from ``first`` on.
    void gates(int64_t head, int64_t first, int64_t count) const {
        const float rate = std::exp(l.a_log[head]);
        for (int64_t i = 0; i < count; ++i) {
            if (s.beta.at) m.beta[i] = sigmoid(splat(to_float(row(s.beta, first + i)[head])))[0];
            if (!s.decay.at) m.decay[i] = exp_of_negative(splat(-rate))[0];
            else if (!l.by_channel) {
                const float x = to_float(row(s.decay, first + i)[head]) + (l.dt_bias ? l.dt_bias[head] : 0);
                m.decay[i] = faded(splat(x), rate)[0];
            } else
                for (int64_t d = 0; d < l.key_dim; d += LANES) {
                    vf x = floats(row(s.decay, first + i) + head * l.key_dim + d);
                    if (l.dt_bias) x += load(l.dt_bias + head * l.key_dim + d);
                    const vf decay = faded(x, rate);
                    store(m.decay + i * l.key_dim + d, decay);
                    store(m.faded + i * l.key_dim + d, decay * load(m.k + i * l.key_dim + d));
                }
        }
    }

    void finish(int64_t head, int64_t first, int64_t count) const {
        const int64_t heads = l.key_heads * l.shared, dim = l.value_dim;
        for (int64_t i = 0; i < count; ++i) {
            const float* x = m.out + i * dim;
            T* to = static_cast<T*>(s.out) + ((first + i) * heads + head) * dim;
            vf squares = vf{};
            for (int64_t c = 0; c < dim; c += LANES) squares += load(x + c) * load(x + c);
            const float factor = l.norm ? inverse_rms(sum_of(squares), dim, l.eps) : 1;
            for (int64_t c = 0; c < dim; c += LANES) {
                vf y = factor * load(x + c);
                if (l.norm) y *= load(l.norm + c);
                if (s.gate.at) {
                    const vf gate = floats(row(s.gate, first + i) + head * dim + c);
                    y *= l.sigmoid ? sigmoid(gate) : silu(gate);
                }
                put(to + c, y);
            }
        }
    }

    template <int V> void compute(const DeltaBlock& b) const {
        if (l.by_channel) run_block<true, V>(b);
        else run_block<false, V>(b);
    }

    // Few tokens of one value head. ``ahead``: the state that is read next; null: not known.
    void advance_in_place(DeltaBlock b, const float* source, float* target, const float* ahead) const {
        const int64_t dim = l.value_dim;
        b.source_stride = b.stride = dim;
        for (int64_t c = 0; c < dim;) {
            const bool wide = c + DELTA_WIDE * LANES <= dim;
            DeltaBlock part = b;
            part.source = source ? source + c : nullptr, part.target = target + c;
            part.v += c, part.out += c;
            part.ahead = ahead ? ahead + c : nullptr;
            if (wide) compute<DELTA_WIDE>(part);
            else compute<DELTA_VECS>(part);
            c += wide ? DELTA_WIDE * LANES : DELTA_COLUMNS;
        }
    }

    // Some columns of one value head.
    void advance_columns(DeltaBlock& b, const float* source, float* target) const {
        const int64_t dim = l.value_dim;
        b.source = b.target = m.block;
        b.source_stride = b.stride = DELTA_COLUMNS;
        for (int64_t d = 0; d < l.key_dim; ++d)
            for (int64_t c = 0; c < DELTA_COLUMNS; c += LANES)
                store(m.block + d * DELTA_COLUMNS + c, source ? load(source + d * dim + c) : vf{});
        compute<DELTA_VECS>(b);
        for (int64_t d = 0; d < l.key_dim; ++d)
            for (int64_t c = 0; c < DELTA_COLUMNS; c += LANES)
                store(target + d * dim + c, load(m.block + d * DELTA_COLUMNS + c));
    }

    // Tokens t to t + count of a segment: at most DELTA_RUN. ``source``, ``from``: the cells in front of the segment and
    // of these tokens; ``next``: the cell that is read next, null: not known.
    void run(const float* source, const float* from, float* target, int64_t start, int64_t t, int64_t count,
             const float* next) const {
        convolve(source, start, t, count, 0, l.key_dim, m.q);
        convolve(source, start, t, count, l.key_dim, l.key_dim, m.k);
        scale(m.q, count, l.scale);
        scale(m.k, count, 1);
        for (int64_t i = 0; i < l.shared; ++i) {
            const int64_t head = unit * l.shared + i, at = i * l.key_dim * l.value_dim;
            convolve(source, start, t, count, 2 * l.key_dim + i * l.value_dim, l.value_dim, m.v);
            gates(head, start + t, count);
            DeltaBlock b{nullptr, nullptr, 0, 0, m.q, m.k, m.faded, m.decay, s.beta.at ? m.beta : nullptr, m.v, m.out,
                         count, l.key_dim, l.value_dim, nullptr};
            const float* behind = i + 1 < l.shared ? (from ? from + at + l.key_dim * l.value_dim : nullptr) : next;
            if (count <= DELTA_IN_PLACE) advance_in_place(b, from ? from + at : nullptr, target + at, behind);
            else
                for (int64_t c = 0; c < l.value_dim; c += DELTA_COLUMNS) {
                    b.v = m.v + c, b.out = m.out + c;
                    advance_columns(b, from ? from + at + c : nullptr, target + at + c);
                }
            finish(head, start + t, count);
        }
    }

    void segment(const float* source, float* target, int64_t start, int64_t length, const float* next = nullptr) const {
        for (int64_t t = 0; t < length; t += DELTA_RUN)
            run(source, t ? target : source, target, start, t, std::min(DELTA_RUN, length - t), next);
        keep_inputs(source, target, start, length);
    }

    // The cell in a state's pages; null: there is none.
    float* cell(const int64_t* table) const {
        const int64_t number = s.first + unit, page = table[number / s.per_page];
        return page < 0 ? nullptr : s.pages + page * s.page + number % s.per_page * s.size;
    }

    void decode(int64_t sequence, const float* next) const {
        const float* source = cell(s.sources + sequence * s.width);
        for (int64_t r = sequence * s.queries; r < (sequence + 1) * s.queries; ++r) {
            float* target = cell(s.targets + r * s.width);
            if (!target) {  // padding
                const int64_t size = l.shared * l.value_dim;
                T* const out = static_cast<T*>(s.out) + (r * l.key_heads + unit) * size;
                std::memset(static_cast<void*>(out), 0, size * sizeof(T));
                continue;
            }
            segment(source, target, r, 1, next);
            source = target;
        }
    }
};

// Whether a segment goes on where the one before ends.
inline bool goes_on(const DeltaSegment& before, const DeltaSegment& s) {
    return s.source[0] >= 0 && s.source[0] == before.target[0] && s.start == before.start + before.length;
}

template <class T> void run_delta(const DeltaLayer& l, const DeltaStep& s, int threads) {
    // Chains: the segments of a chunk. ``ends[i]``: the segment behind the last of chain i.
    std::unique_ptr<int64_t[]> ends(new int64_t[s.num_segments + 1]);
    int64_t chains = 0;
    for (int64_t i = 1; i <= s.num_segments; ++i)
        if (i == s.num_segments || !goes_on(s.segments[i - 1], s.segments[i])) ends[chains++] = i;
    const int64_t decodes = s.decodes * l.key_heads, share = std::max<int64_t>(1, std::min<int64_t>(8, decodes / threads / 4));
#pragma omp parallel num_threads(threads)
    {
        const DeltaMemory memory(l);
#pragma omp for schedule(dynamic) nowait
        for (int64_t task = 0; task < chains * l.key_heads; ++task) {
            const DeltaUnit<T> unit{l, s, memory, task % l.key_heads};
            const int64_t i = task / l.key_heads;
            for (int64_t j = i ? ends[i - 1] : 0; j < ends[i]; ++j) {
                const DeltaSegment& g = s.segments[j];
                unit.segment(unit.cell(g.source), unit.cell(g.target), g.start, g.length);
            }
        }
#pragma omp for schedule(dynamic, share)
        for (int64_t task = 0; task < decodes; ++task) {
            const DeltaUnit<T> unit{l, s, memory, task % l.key_heads};
            const int64_t behind = std::min(task + 1, decodes - 1);
            const DeltaUnit<T> next{l, s, memory, behind % l.key_heads};
            unit.decode(task / l.key_heads, next.cell(s.sources + behind / l.key_heads * s.width));
        }
    }
}

}  // namespace
