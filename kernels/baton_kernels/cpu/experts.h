// The MLPs of a mixture's experts, each for the tokens that chose it.

#pragma once

#include "activation.h"
#include "matmul.h"
#include "routing.h"

namespace {

// This structure has the layout of the ctypes one in baton_kernels.cpu.experts.
struct Experts {
    Matrix gate_up, down;  // of all experts, expert by expert
    Activation activation;
    int64_t experts, hidden, inner, gated;
};

// The experts of each token, and their weights: [tokens, top_k].
struct Chosen {
    const int32_t* experts;
    const float* weights;
    int64_t tokens, top_k;
    int weighs_input;
};

struct ExpertRun {  // rows of one expert
    int64_t expert, start, rows;
};

// A call's memory. A *pair* is a token and one of its experts; rows are pairs in the order of their experts.
template <class T> struct PairMemory {
    int64_t* counts;    // [experts]: the rows of each expert, and then where the next one is put
    ExpertRun* runs;    // at most one for each pair
    int32_t *pairs, *rows;  // the pair of each row, and the row of each pair; -1: its expert is none of these
    T *x, *inner;       // [pairs, hidden] and [pairs, inner]: inputs of both matmuls
    float* products;    // [pairs, hidden]
    float *x_sums, *inner_sums;  // [pairs, groups]: of weights with zero points
    int64_t size;       // in bytes

    PairMemory(const Experts& e, int64_t number, void* memory) : size(0) {
        const auto take = [&](auto*& to, int64_t count) {
            to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(uintptr_t(memory) + size);
            size += (count * sizeof *to + 63) / 64 * 64;
        };
        take(counts, e.experts);
        take(runs, number);
        take(pairs, number);
        take(rows, number);
        take(x, number * e.hidden);
        take(inner, number * e.inner);
        take(products, number * e.hidden);
        take(x_sums, number * summed_groups(e.gate_up, e.hidden));
        take(inner_sums, number * summed_groups(e.down, e.inner));
    }
};

// Sorts pairs by expert, and splits each expert's into runs. Returns the number of runs. Many rows of few experts make
// shorter runs, so that there are tasks for many threads.
template <class T>
int64_t sort_pairs(const Experts& e, const Chosen& c, const PairMemory<T>& m, int64_t panels, int threads) {
    const int64_t number = c.tokens * c.top_k;
    const auto is_here = [&](int64_t pair) { return uint64_t(c.experts[pair]) < uint64_t(e.experts); };
    std::fill_n(m.counts, e.experts, 0);
    for (int64_t p = 0; p < number; ++p)
        if (is_here(p)) ++m.counts[c.experts[p]];
    const int64_t chosen = e.experts - std::count(m.counts, m.counts + e.experts, 0);
    const int64_t longest = chosen * panels >= 8 * threads ? MOST_ROWS : 16 * TILE_ROWS;
    int64_t runs = 0, start = 0;
    for (int64_t i = 0; i < e.experts; ++i) {
        const int64_t count = m.counts[i];
        in_tiles(count, longest, [&](int64_t first, int64_t rows) { m.runs[runs++] = {i, start + first, rows}; });
        m.counts[i] = start;
        start += count;
    }
    for (int64_t p = 0; p < number; ++p) {
        m.rows[p] = is_here(p) ? int32_t(m.counts[c.experts[p]]++) : -1;
        if (m.rows[p] >= 0) m.pairs[m.rows[p]] = int32_t(p);
    }
    return runs;
}

// The sum of a token's products, in the order of its experts.
template <class T> inline void add_up(const float* products, const int32_t* rows, int64_t top_k, int64_t size, T* out) {
    const auto sum = [&](auto zero, int64_t at, auto read) {
        for (int64_t k = 0; k < top_k; ++k)
            if (rows[k] >= 0) zero += read(products + rows[k] * size + at);
        return zero;
    };
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) put(out + i, sum(vf{}, i, [](const float* p) { return load(p); }));
    for (; i < size; ++i) put(out + i, sum(0.0f, i, [](const float* p) { return *p; }));
}

// x [tokens, hidden] -> out [tokens, hidden]. ``memory`` has the size of ``PairMemory``. Sums of a token do not depend
// on other tokens.
template <class T>
void run_experts(const Experts& e, const T* x, const Chosen& c, T* out, void* memory, int threads) {
    const int64_t number = c.tokens * c.top_k, width = e.gated ? PANEL / 2 : PANEL;
    const int64_t inner_panels = (e.inner + width - 1) / width, hidden_panels = (e.hidden + PANEL - 1) / PANEL;
    const PairMemory<T> m(e, number, memory);
    const int64_t runs = sort_pairs(e, c, m, inner_panels, threads);
    const int64_t x_groups = summed_groups(e.gate_up, e.hidden), inner_groups = summed_groups(e.down, e.inner);
    const Rows<T> all_x{m.x, x_groups ? m.x_sums : nullptr, e.hidden, number};
    const Rows<T> all_inner{m.inner, inner_groups ? m.inner_sums : nullptr, e.inner, number};
    const auto panel_of = [&](int64_t task, int64_t panels) { return m.runs[task / panels].expert * panels + task % panels; };
    const auto next_of = [&](int64_t task, int64_t panels) {  // the probable next one of this thread
        return panel_of(std::min(task + threads, runs * panels - 1), panels);
    };
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t p = 0; p < number; ++p)
            if (m.rows[p] >= 0) {
                T* const to = m.x + m.rows[p] * e.hidden;
                take_row(x + p / c.top_k * e.hidden, e.hidden, e.gate_up.order, c.weighs_input ? c.weights[p] : 1, to);
                sum_groups(to, e.gate_up.group, x_groups, m.x_sums + m.rows[p] * x_groups);
            }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < runs * inner_panels; ++task) {
            const ExpertRun run = m.runs[task / inner_panels];
            const int64_t panel = panel_of(task, inner_panels), column = task % inner_panels * width;
            const auto done = [&](int64_t r, float* row) {
                T* to = m.inner + (run.start + r) * e.inner;
                if (e.gated) gate(row, width, e.activation);
                else activate(row, width, e.activation);
                for (int64_t j = 0; j < width && column + j < e.inner; j += LANES)
                    put_vec<T>(to, column + j, e.inner, row + j);
            };
            times_panel(e.gate_up, all_x.from(run.start, run.rows, e.gate_up.group), panel, next_of(task, inner_panels), done);
        }
        if (inner_groups) {
#pragma omp for
            for (int64_t p = 0; p < number; ++p)
                if (m.rows[p] >= 0)
                    sum_groups(m.inner + m.rows[p] * e.inner, e.down.group, inner_groups,
                               m.inner_sums + m.rows[p] * inner_groups);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < runs * hidden_panels; ++task) {
            const ExpertRun run = m.runs[task / hidden_panels];
            const int64_t panel = panel_of(task, hidden_panels), column = task % hidden_panels * PANEL;
            const auto done = [&](int64_t r, float* row) {
                const int64_t at = run.start + r;
                const float factor = c.weighs_input ? 1 : c.weights[m.pairs[at]];
                for (int64_t j = 0; j < PANEL && column + j < e.hidden; j += LANES) {
                    store(row + j, load(row + j) * factor);
                    put_vec<float>(m.products + at * e.hidden, column + j, e.hidden, row + j);
                }
            };
            times_panel(e.down, all_inner.from(run.start, run.rows, e.down.group), panel, next_of(task, hidden_panels), done);
        }
#pragma omp for
        for (int64_t t = 0; t < c.tokens; ++t)
            add_up(m.products, m.rows + t * c.top_k, c.top_k, e.hidden, out + t * e.hidden);
    }
}

}  // namespace
