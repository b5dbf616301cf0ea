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

    float dt(const float* row, int64_t head) const {
        const float x = row[columns() - all_heads() + head] + dt_bias[head];
        const float soft = x > 20 ? x : std::log1p(std::exp(x));
        return std::min(std::max(soft, least_dt), most_dt);
    }
    float decay(float dt, int64_t head) const { return std::exp(-std::exp(a_log[head]) * dt); }
};

template <class V> inline V silu_of(V x) {
    if constexpr (std::is_same_v<V, vf>) return silu(x);
    else return x / (1 + std::exp(-x));
}

// The states of the rows of decoding sequences are read once and written once, each to its row's target. ``mixed``
// [units, rows, channels]: memory for what the convolutions yield.
inline void mamba_decode(const Mamba& m, const StateTables& t, const float* projected, float* mixed, float* out,
                         int threads) {
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
                const float dt = m.dt(projected + row * m.columns(), head), decay = m.decay(dt, head);
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
                    y[p] = sum.total() + m.d[head] * x[p];
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
    for (; r < rows; ++r) tiles(r, std::integral_constant<int, 1>{});
}

inline int64_t in_lanes(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// The memory of a run of ``length`` rows.
struct ScanMemory {
    int64_t blocks, mixed, scores, own;  // numbers of each part; ``own``: of each thread
    ScanMemory(const Mamba& m, int64_t length)
        : blocks((length + SCAN_BLOCK - 1) / SCAN_BLOCK), mixed(m.cells.units * length * m.channels()),
          scores(m.cells.units * m.unit_groups * blocks * SCAN_BLOCK * SCAN_BLOCK),
          own(SCAN_BLOCK * (3 * in_lanes(m.head_dim) + SCAN_BLOCK + 2) + m.state_dim * std::max(in_lanes(m.head_dim), SCAN_BLOCK)) {}
    int64_t size(int threads) const { return mixed + scores + threads * own; }
};

// C of each token of a block times B of each token: scores [SCAN_BLOCK, SCAN_BLOCK]. ``turned``: [state_dim, SCAN_BLOCK].
inline void scan_scores(const Mamba& m, const float* b, const float* c, int64_t channels, int64_t length, float* turned,
                        float* scores) {
    for (int64_t n = 0; n < m.state_dim; ++n)
        for (int64_t s = 0; s < SCAN_BLOCK; ++s) turned[n * SCAN_BLOCK + s] = s < length ? b[s * channels + n] : 0;
    std::fill_n(scores, SCAN_BLOCK * SCAN_BLOCK, 0.0f);
    add_product(scores, SCAN_BLOCK, c, channels, 1, turned, SCAN_BLOCK, length, SCAN_BLOCK, m.state_dim);
}

// One block of one head: rows of x, B and C in ``mixed``, the first at x, b and c. ``state`` [state_dim, head_dim in
// lanes] changes; y has rows of ``inner`` numbers. ``own``: memory of this thread.
inline void scan_block(const Mamba& m, int64_t head, const float* projected, const float* x, const float* b,
                       const float* c, int64_t channels, const float* scores, int64_t length, float* state, float* own,
                       float* y) {
    const int64_t width = in_lanes(m.head_dim), dim = m.head_dim;
    float *const in = own, *const read = in + SCAN_BLOCK * width, *const late = read + SCAN_BLOCK * width;
    float *const weights = late + SCAN_BLOCK * width, *const line = weights + SCAN_BLOCK * SCAN_BLOCK;
    float* const since = line + SCAN_BLOCK;  // the decay since the block's start
    std::fill_n(line, SCAN_BLOCK, 0.0f);
    float all = 1;
    for (int64_t l = 0; l < length; ++l) {
        for (int64_t p = 0; p < width; ++p) in[l * width + p] = p < dim ? x[l * channels + p] : 0;
        const float dt = m.dt(projected + l * m.columns(), head), decay = m.decay(dt, head);
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
    float *const mixed = memory, *const scores = mixed + sizes.mixed, *const owns = scores + sizes.scores;
    const int64_t per_group = m.heads / m.unit_groups, square = SCAN_BLOCK * SCAN_BLOCK;
#pragma omp parallel num_threads(threads)
    {
        float* const own = owns + omp_get_thread_num() * sizes.own;
        float* const state = own + SCAN_BLOCK * (3 * width + SCAN_BLOCK + 2);
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
            for (int64_t n = 0; n < m.state_dim; ++n)
                for (int64_t p = 0; p < width; ++p)
                    state[n * width + p] =
                        from && p < m.head_dim ? from[of_unit * m.head_size() + p * m.state_dim + n] : 0;
            for (int64_t block = 0; block < sizes.blocks; ++block) {
                const int64_t first = block * SCAN_BLOCK;
                const float* const row = mixed + (unit * length + first) * channels;
                const float* const b = row + m.heads * m.head_dim + group * m.state_dim;
                scan_block(m, head, projected + first * m.columns(), row + of_unit * m.head_dim, b, b + m.of_groups(),
                           channels, scores + ((unit * m.unit_groups + group) * sizes.blocks + block) * square,
                           std::min(SCAN_BLOCK, length - first), state, own, out + first * m.inner() + head * m.head_dim);
            }
            for (int64_t p = 0; p < m.head_dim; ++p)
                for (int64_t n = 0; n < m.state_dim; ++n) to[p * m.state_dim + n] = state[n * width + p];
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

// y [rows, numbers] and gate, whose rows are ``stride`` numbers apart -> out [rows, numbers].
template <class T>
void gated_norm(const GatedNorm& n, const float* y, const float* gate, int64_t stride, int64_t rows, int64_t numbers,
                T* out, int threads) {
    const int64_t size = numbers / n.groups;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < rows * n.groups; ++task) {
        const int64_t row = task / n.groups, group = task % n.groups;
        const float *const from = y + row * numbers + group * size, *const by = gate + row * stride + group * size;
        const auto gated = [&](int64_t i, auto v) {
            using V = decltype(v);
            return get<V>(from + i) * silu_of(get<V>(by + i));
        };
        float factor = 1;
        if (n.weight) {
            float squares = n.squares ? n.squares[task] : 0;
            if (!n.squares) {
                Sum sum;
                along(size, [&](int64_t i, auto v) {
                    const auto x = n.gate_first ? gated(i, v) : get<decltype(v)>(from + i);
                    sum += x * x;
                });
                squares = sum.total();
            }
            factor = inverse_rms(squares, n.size, n.eps);
        }
        along(size, [&](int64_t i, auto v) {
            auto x = gated(i, v) * factor;
            if (n.weight) x *= get<decltype(v)>(n.weight + group * size + i);
            put(out + row * numbers + group * size + i, x);
        });
    }
}

}  // namespace
