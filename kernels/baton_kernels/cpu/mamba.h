// Mamba-2: see baton_kernels.mamba.

#pragma once

#include "activation.h"
#include "causal_conv.h"

namespace {

constexpr int64_t SCAN_BLOCK = 64;  // tokens that the chunked form takes together
constexpr float LEAST_DECAY = 1e-30f;  // smaller products of decays count as 0: denormal numbers are slow

// The layout of the ctypes one in baton_kernels.cpu.mamba.
struct Mamba {
    UnitCells cells;
    int64_t heads, head_dim, groups, unit_groups, state_dim;  // heads of a unit; groups of all units, and of one
    Taps conv;
    const float *a_log, *d, *dt_bias;
    float least_dt, most_dt;

    int64_t head_size() const { return head_dim * state_dim; }
    int64_t all_heads() const { return cells.units * heads; }
    int64_t inner() const { return all_heads() * head_dim; }
    int64_t of_groups() const { return unit_groups * state_dim; }
    int64_t channels() const { return heads * head_dim + 2 * of_groups(); }
    int64_t columns() const { return 2 * inner() + 2 * groups * state_dim + all_heads(); }
    // The inputs kept in a cell.
    int64_t kept() const { return heads * head_size(); }

    // f(column of a projected row, channel of the unit, their number) for x, B and C.
    template <class F> void parts(int64_t unit, F f) const {
        const int64_t size = heads * head_dim, group = unit * groups / cells.units * state_dim;
        f(inner() + unit * size, int64_t(0), size);
        f(2 * inner() + group, size, of_groups());
        f(2 * inner() + groups * state_dim + group, size + of_groups(), of_groups());
    }

    // The time step of each head from a projected row, and how far it decays the head's state: [all_heads] of both.
    void steps(const float* row, float* dts, float* decays) const;
};

template <class V> inline V silu_of(V x) {
    if constexpr (std::is_same_v<V, vf>) return silu(x);
    else return x / (1 + std::exp(-x));
}

// log(1 + e^x) = max(x, 0) + log(1 + u), where u = e^-|x|. The latter is 2 artanh(s) with s = u / (2 + u), of at most
// 1/3: the first terms of its series have a relative error of 2e-8.
inline vf soft_step(vf x) {
    const vf u = exp_of_negative(x > 0.0f ? -x : x), s = u / (2.0f + u), t = s * s;
    vf p = splat(1.0f / 13);
    for (const int n : {11, 9, 7, 5, 3, 1}) p = p * t + 1.0f / n;
    return (x > 0.0f ? x : vf{}) + 2.0f * s * p;
}

inline void Mamba::steps(const float* row, float* dts, float* decays) const {
    const float* const given = row + columns() - all_heads();
    const auto of = [&](vf x, vf log) {
        x = soft_step(x);
        x = x > least_dt ? x : splat(least_dt);
        x = x < most_dt ? x : splat(most_dt);
        return std::pair<vf, vf>(x, exp_of_negative(-exp_of(log) * x));
    };
    const int64_t heads = all_heads();
    for (int64_t i = 0; i < heads; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, heads - i);
        vf x{}, log{};
        for (int64_t j = 0; j < count; ++j) x[j] = given[i + j] + dt_bias[i + j], log[j] = a_log[i + j];
        const auto [dt, decay] = of(x, log);
        for (int64_t j = 0; j < count; ++j) dts[i + j] = dt[j], decays[i + j] = decay[j];
    }
}

// The sum of a vector's numbers, in halves.
inline float folded(vf v) {
    for (int width = LANES / 2; width; width /= 2) v += __builtin_shuffle(v, each_lane([=](int i) { return i ^ width; }));
    return v[0];
}

// The states of the rows of decoding sequences are read once and written once, each to its row's target. ``mixed``
// [units, rows, channels]: memory for what the convolutions yield; ``steps`` [rows, 2, all_heads]: for time steps and
// decays.
inline void mamba_decode(const Mamba& m, const StateTables& t, const float* projected, float* mixed, float* steps,
                         float* out, int threads) {
    const int64_t rows = t.sequences * t.queries, units = m.cells.units, channels = m.channels(), taps = m.conv.taps;
    const int64_t per_group = m.heads / m.unit_groups;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < t.sequences * units; ++task) {
            const int64_t sequence = task / units, unit = task % units;
            const float* from = m.cells.of(t.sources + sequence * t.width, unit);
            for (int64_t row = sequence * t.queries; row < (sequence + 1) * t.queries; ++row) {
                float* const to = m.cells.of(t.targets + row * t.width, unit);
                if (!to) continue;
                float* const step = steps + row * 2 * m.all_heads();
                if (!unit) m.steps(projected + row * m.columns(), step, step + m.all_heads());
                float* const yield = mixed + (unit * rows + row) * channels;
                m.parts(unit, [&](int64_t column, int64_t channel, int64_t size) {
                    const float* const x = projected + row * m.columns() + column;
                    const float* const kept = from ? from + m.kept() + channel : nullptr;
                    const auto before = [&](int64_t back, int64_t i, auto v) {
                        return input_before(kept, taps, channels, 0, back, i, v,
                                            [&](int64_t, int64_t j, auto w) { return get<decltype(w)>(x + j); });
                    };
                    m.conv.from(unit * channels + channel).row(size, before, [&](int64_t i, auto sum) {
                        put(yield + channel + i, silu_of(sum));
                    });
                    keep_last(kept, to + m.kept() + channel, taps, channels, size, 1,
                              [&](int64_t, int64_t i, auto v) { return get<decltype(v)>(x + i); });
                });
                from = to;
            }
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < t.sequences * m.all_heads(); ++task) {
            const int64_t sequence = task / m.all_heads(), head = task % m.all_heads();
            const int64_t unit = head / m.heads, of_unit = head % m.heads;
            const float* from = m.cells.of(t.sources + sequence * t.width, unit);
            for (int64_t row = sequence * t.queries; row < (sequence + 1) * t.queries; ++row) {
                float* const to = m.cells.of(t.targets + row * t.width, unit);
                float* const y = out + row * m.inner() + head * m.head_dim;
                if (!to) {
                    std::fill_n(y, m.head_dim, 0.0f);
                    continue;
                }
                const float* const x = mixed + (unit * rows + row) * channels + of_unit * m.head_dim;
                const float* const b = mixed + (unit * rows + row) * channels + m.heads * m.head_dim +
                                       of_unit / per_group * m.state_dim;
                const float* const c = b + m.of_groups();
                const float* const step = steps + row * 2 * m.all_heads() + head;
                const float dt = step[0], decay = step[m.all_heads()];
                const float* old = from ? from + of_unit * m.head_size() : nullptr;
                float* next = to + of_unit * m.head_size();
                for (int64_t p = 0; p < m.head_dim; ++p, next += m.state_dim) {
                    const float added = dt * x[p];
                    Sum sum;
                    along(m.state_dim, [&](int64_t i, auto v) {
                        using V = decltype(v);
                        V s = get<V>(b + i) * added;
                        if (old) s += get<V>(old + i) * decay;
                        put(next + i, s);
                        sum += s * get<V>(c + i);
                    });
                    y[p] = folded(sum.lanes) + sum.rest + m.d[head] * x[p];
                    if (old) old += m.state_dim;
                }
                from = to;
            }
        }
    }
}

template <int R, int V>
inline void add_product_tile(float* out, int64_t width, const float* a, int64_t a_row, int64_t a_step, const float* b,
                             int64_t b_step, int64_t steps) {
    vf sums[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = load(out + r * width + v * LANES);
    for (int64_t k = 0; k < steps; ++k) {
        vf line[V];
        for (int v = 0; v < V; ++v) line[v] = load(b + k * b_step + v * LANES);
        for (int r = 0; r < R; ++r) {
            const float x = a[r * a_row + k * a_step];
            for (int v = 0; v < V; ++v) sums[r][v] += x * line[v];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(out + r * width + v * LANES, sums[r][v]);
}

// out [rows, columns] += a [rows, steps] b [steps, columns], whole vectors of columns.
inline void add_product(float* out, int64_t width, const float* a, int64_t a_row, int64_t a_step, const float* b,
                        int64_t b_step, int64_t rows, int64_t columns, int64_t steps) {
    const auto tiles = [&](int64_t r, auto height) {
        constexpr int R = decltype(height)::value;
        int64_t c = 0;
        for (; c + STRIPE <= columns; c += STRIPE)
            add_product_tile<R, TILE_VECS>(out + r * width + c, width, a + r * a_row, a_row, a_step, b + c, b_step, steps);
        for (; c < columns; c += LANES)
            add_product_tile<R, 1>(out + r * width + c, width, a + r * a_row, a_row, a_step, b + c, b_step, steps);
    };
    int64_t r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS) tiles(r, std::integral_constant<int, TILE_ROWS>{});
    for (; r + 4 <= rows; r += 4) tiles(r, std::integral_constant<int, 4>{});
    for (; r + 2 <= rows; r += 2) tiles(r, std::integral_constant<int, 2>{});
    if (r < rows) tiles(r, std::integral_constant<int, 1>{});
}

// Rows of as many numbers as there are rows become columns: in each round, halves of two rows change places.
template <int WIDTH = 1> inline void turn_square(vf (&rows)[LANES]) {
    if constexpr (WIDTH < LANES) {
        constexpr vi first = each_lane([](int j) { return j & WIDTH ? LANES + j - WIDTH : j; });
        constexpr vi second = each_lane([](int j) { return j & WIDTH ? LANES + j : j + WIDTH; });
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; ++i) {
            const int at = i / WIDTH * 2 * WIDTH + i % WIDTH;
            const vf a = rows[at], b = rows[at + WIDTH];
            rows[at] = __builtin_shuffle(a, b, first);
            rows[at + WIDTH] = __builtin_shuffle(a, b, second);
        }
        turn_square<2 * WIDTH>(rows);
    }
}

// from [rows, columns], whose rows are ``stride`` apart -> to [columns, rows], likewise ``width``.
inline void turn(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to, int64_t width) {
    const int64_t whole_rows = rows / LANES * LANES, whole_columns = columns / LANES * LANES;
    for (int64_t r = 0; r < whole_rows; r += LANES)
        for (int64_t c = 0; c < whole_columns; c += LANES) {
            vf square[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) square[i] = load(from + (r + i) * stride + c);
            turn_square(square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) store(to + (c + i) * width + r, square[i]);
        }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) to[c * width + r] = from[r * stride + c];
}

inline int64_t in_lanes(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// The memory of a run of ``length`` rows.
struct ScanMemory {
    int64_t blocks, mixed, steps, scores, own;  // numbers of each part; ``own``: of each thread
    ScanMemory(const Mamba& m, int64_t length)
        : blocks((length + SCAN_BLOCK - 1) / SCAN_BLOCK), mixed(m.cells.units * length * m.channels()),
          steps(2 * length * m.all_heads()),
          scores(m.cells.units * m.unit_groups * blocks * SCAN_BLOCK * SCAN_BLOCK),
          own(SCAN_BLOCK * (3 * in_lanes(m.head_dim) + SCAN_BLOCK + 2) + m.state_dim * std::max(in_lanes(m.head_dim), SCAN_BLOCK)) {}
    int64_t size(int threads) const { return mixed + steps + scores + threads * own; }
};

// C of each token of a block times B of each token: scores [SCAN_BLOCK, SCAN_BLOCK]. ``turned``: [state_dim, SCAN_BLOCK].
inline void scan_scores(const Mamba& m, const float* b, const float* c, int64_t channels, int64_t length, float* turned,
                        float* scores) {
    if (length < SCAN_BLOCK) std::fill_n(turned, m.state_dim * SCAN_BLOCK, 0.0f);
    turn(b, channels, length, m.state_dim, turned, SCAN_BLOCK);
    std::fill_n(scores, SCAN_BLOCK * SCAN_BLOCK, 0.0f);
    add_product(scores, SCAN_BLOCK, c, channels, 1, turned, SCAN_BLOCK, length, SCAN_BLOCK, m.state_dim);
}

// One block of one head: rows of x, B and C in ``mixed``, the first at x, b and c. ``state`` [state_dim, head_dim in
// lanes] changes; ``steps`` as in mamba_decode; y has rows of ``inner`` numbers. ``own``: memory of this thread.
inline void scan_block(const Mamba& m, int64_t head, const float* steps, const float* x, const float* b, const float* c,
                       int64_t channels, const float* scores, int64_t length, float* state, float* own,
                       float* y) {
    const int64_t width = in_lanes(m.head_dim), dim = m.head_dim;
    float *const in = own, *const read = in + SCAN_BLOCK * width, *const late = read + SCAN_BLOCK * width;
    float *const weights = late + SCAN_BLOCK * width, *const line = weights + SCAN_BLOCK * SCAN_BLOCK;
    float* const since = line + SCAN_BLOCK;  // the decay since the block's start
    std::fill_n(line, SCAN_BLOCK, 0.0f);
    float all = 1;
    for (int64_t l = 0; l < length; ++l) {
        std::copy_n(x + l * channels, dim, in + l * width);
        std::fill(in + l * width + dim, in + (l + 1) * width, 0.0f);
        const float* const step = steps + l * 2 * m.all_heads() + head;
        const float dt = step[0], decay = step[m.all_heads()];
        all = all * decay < LEAST_DECAY ? 0 : all * decay;
        since[l] = all;
        for (int64_t s = 0; s < SCAN_BLOCK; s += LANES) {
            vf w = load(line + s) * decay;
            store(line + s, w < LEAST_DECAY ? vf{} : w);
        }
        line[l] = dt;
        for (int64_t s = 0; s < SCAN_BLOCK; s += LANES)
            store(weights + l * SCAN_BLOCK + s, load(line + s) * load(scores + l * SCAN_BLOCK + s));
    }
    std::fill_n(read, length * width, 0.0f);
    add_product(read, width, c, channels, 1, state, width, length, width, m.state_dim);
    for (int64_t l = 0; l < length; ++l)
        for (int64_t p = 0; p < width; p += LANES) {
            const vf own_x = load(in + l * width + p);
            store(read + l * width + p, load(read + l * width + p) * since[l] + own_x * m.d[head]);
            store(late + l * width + p, own_x * line[l]);
        }
    // Rows of a tile see the tokens before the last of them alone.
    for (int64_t l = 0; l < length; l += TILE_ROWS) {
        const int64_t rows = std::min<int64_t>(TILE_ROWS, length - l);
        add_product(read + l * width, width, weights + l * SCAN_BLOCK, SCAN_BLOCK, 1, in, width, rows, width, l + rows);
    }
    for (int64_t l = 0; l < length; ++l) std::copy_n(read + l * width, dim, y + l * m.inner());
    for (int64_t i = 0; i < m.state_dim * width; i += LANES) store(state + i, load(state + i) * all);
    add_product(state, width, b, 1, channels, late, width, m.state_dim, width, length);
}

// A run of rows of one sequence, block by block. ``memory``: as many floats as ``ScanMemory`` says.
inline void mamba_prefill(const Mamba& m, const int64_t* source, const int64_t* target, const float* projected,
                          int64_t length, float* memory, float* out, int threads) {
    const ScanMemory sizes(m, length);
    const int64_t units = m.cells.units, channels = m.channels(), taps = m.conv.taps, width = in_lanes(m.head_dim);
    float *const mixed = memory, *const steps = mixed + sizes.mixed, *const scores = steps + sizes.steps;
    float* const owns = scores + sizes.scores;
    const int64_t per_group = m.heads / m.unit_groups, square = SCAN_BLOCK * SCAN_BLOCK;
#pragma omp parallel num_threads(threads)
    {
        float* const own = owns + omp_get_thread_num() * sizes.own;
        float* const state = own + SCAN_BLOCK * (3 * width + SCAN_BLOCK + 2);
#pragma omp for schedule(static) nowait
        for (int64_t l = 0; l < length; ++l) {
            float* const step = steps + l * 2 * m.all_heads();
            m.steps(projected + l * m.columns(), step, step + m.all_heads());
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < units * sizes.blocks; ++task) {
            const int64_t unit = task / sizes.blocks, first = task % sizes.blocks * SCAN_BLOCK;
            const float* const from = m.cells.of(source, unit);
            m.parts(unit, [&](int64_t column, int64_t channel, int64_t size) {
                const float* const kept = from ? from + m.kept() + channel : nullptr;
                const Taps conv = m.conv.from(unit * channels + channel);
                for (int64_t l = first; l < std::min(length, first + SCAN_BLOCK); ++l) {
                    const auto before = [&](int64_t back, int64_t i, auto v) {
                        return input_before(kept, taps, channels, l, back, i, v, [&](int64_t r, int64_t j, auto w) {
                            return get<decltype(w)>(projected + r * m.columns() + column + j);
                        });
                    };
                    float* const yield = mixed + (unit * length + l) * channels + channel;
                    conv.row(size, before, [&](int64_t i, auto sum) { put(yield + i, silu_of(sum)); });
                }
            });
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < units * m.unit_groups * sizes.blocks; ++task) {
            const int64_t group = task / sizes.blocks, first = task % sizes.blocks * SCAN_BLOCK;
            const float* const b = mixed + (group / m.unit_groups * length + first) * channels + m.heads * m.head_dim +
                                   group % m.unit_groups * m.state_dim;
            const int64_t rows = std::min(SCAN_BLOCK, length - first);
            scan_scores(m, b, b + m.of_groups(), channels, rows, state, scores + task * square);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t head = 0; head < m.all_heads(); ++head) {
            const int64_t unit = head / m.heads, of_unit = head % m.heads, group = of_unit / per_group;
            const float* const from = m.cells.of(source, unit);
            float* const to = m.cells.of(target, unit) + of_unit * m.head_size();
            if (!from || width > m.head_dim) std::fill_n(state, m.state_dim * width, 0.0f);
            if (from) turn(from + of_unit * m.head_size(), m.state_dim, m.head_dim, m.state_dim, state, width);
            for (int64_t block = 0; block < sizes.blocks; ++block) {
                const int64_t first = block * SCAN_BLOCK;
                const float* const row = mixed + (unit * length + first) * channels;
                const float* const b = row + m.heads * m.head_dim + group * m.state_dim;
                scan_block(m, head, steps + first * 2 * m.all_heads(), row + of_unit * m.head_dim, b, b + m.of_groups(),
                           channels, scores + ((unit * m.unit_groups + group) * sizes.blocks + block) * square,
                           std::min(SCAN_BLOCK, length - first), state, own, out + first * m.inner() + head * m.head_dim);
            }
            turn(state, width, m.state_dim, m.head_dim, to, m.state_dim);
        }
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < units; ++unit) {
            const float* const from = m.cells.of(source, unit);
            float* const to = m.cells.of(target, unit);
            m.parts(unit, [&](int64_t column, int64_t channel, int64_t size) {
                keep_last(from ? from + m.kept() + channel : nullptr, to + m.kept() + channel, taps, channels, size, length,
                          [&](int64_t l, int64_t i, auto v) {
                              return get<decltype(v)>(projected + l * m.columns() + column + i);
                          });
            });
        }
    }
}

// The norm of a layer's output: the layout of the ctypes one in baton_kernels.cpu.mamba.
struct GatedNorm {
    const float *weight, *squares;  // null: no norm; not known
    int64_t groups, size;           // groups here, and the numbers of a whole one
    float eps;
    int gate_first;
};

// y [rows, numbers] and gate, whose rows are ``stride`` numbers apart -> out [rows, numbers]. Changes y.
template <class T>
void gated_norm(const GatedNorm& n, float* y, const float* gate, int64_t stride, int64_t rows, int64_t numbers,
                T* out, int threads) {
    const int64_t size = numbers / n.groups;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < rows * n.groups; ++task) {
        const int64_t row = task / n.groups, group = task % n.groups;
        float* const own = y + row * numbers + group * size;
        const float* const by = gate + row * stride + group * size;
        Sum squares;
        along(size, [&](int64_t i, auto v) {
            using V = decltype(v);
            const V x = get<V>(own + i), opened = x * silu_of(get<V>(by + i));
            squares += n.gate_first ? opened * opened : x * x;
            put(own + i, opened);
        });
        const float factor = n.weight ? inverse_rms(n.squares ? n.squares[task] : squares.total(), n.size, n.eps) : 1;
        along(size, [&](int64_t i, auto v) {
            auto x = get<decltype(v)>(own + i) * factor;
            if (n.weight) x *= get<decltype(v)>(n.weight + group * size + i);
            put(out + row * numbers + group * size + i, x);
        });
    }
}

}  // namespace
