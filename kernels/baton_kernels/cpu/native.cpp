// Baton's kernels for CPUs: matmul with packed weights, attention over the paged pool, and operations on rows; here
// the functions that Python calls.
// Written once for every machine, in vectors of as many 32-bit lanes as its registers have; only the dot product of
// two bfloat16 pairs has an instruction of its own where there is one.
//
// Numbers are float or bfloat16 (kinds 0 and 1). Both are handled as 32-bit *words*: one float, or two adjacent
// bfloat16, the first in the lower half. A *step* multiplies one word of each row by one of each column and adds
// to a float, so both kinds share every loop. The sums of a matmul and of a decoding row run in one order, whatever
// else is in the batch: their results do not depend on it.

#if defined(__linux__)
#include <malloc.h>
#endif

#include "delta.h"
#include "experts.h"
#include "layers.h"
#include "mamba.h"

namespace {

// Calls f(a T, an S): the types of activations, and of the numbers of a pool.
template <class F> void in_types(int kind, int codes, F f) {
    if (kind) codes ? f(bf16{}, e4m3{}) : f(bf16{}, bf16{});
    else codes ? f(0.0f, e4m3{}) : f(0.0f, 0.0f);
}

}  // namespace

// Kinds are 0 for float and 1 for bfloat16.
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

// Gives whole pages back to the system. What was in them is lost; they read as zeros.
void baton_give_back(void* start, int64_t size) {
#if defined(__linux__)
    const uintptr_t page = sysconf(_SC_PAGESIZE), from = (uintptr_t(start) + page - 1) / page * page;
    const uintptr_t to = (uintptr_t(start) + size) / page * page;
    if (to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
#endif
}

// Gives back to the system what was allocated and is free.
void baton_trim() {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

void baton_pack(int kind, const void* weight, int64_t outputs, int64_t inputs, int gated, int32_t* packed,
                int threads) {
    if (kind) pack(static_cast<const bf16*>(weight), outputs, inputs, gated, packed, threads);
    else pack(static_cast<const float*>(weight), outputs, inputs, gated, packed, threads);
}

void baton_pack_codes(int format, const uint8_t* codes, int64_t outputs, int64_t inputs, int gated, uint8_t* packed,
                      int threads) {
    by_format(format, [&](auto of) { pack_codes<decltype(of)>(codes, outputs, inputs, gated, packed, threads); });
}

// The rows [count] of a weight that baton_pack packed, as words, [count, steps].
void baton_packed_rows(const int32_t* packed, int64_t steps, const int64_t* rows, int64_t count, int32_t* out) {
    for (int64_t i = 0; i < count; ++i) {
        const int32_t* panel = packed + rows[i] / PANEL * PANEL * steps;
        for (int64_t s = 0; s < steps; ++s) out[i * steps + s] = panel[place(rows[i] % PANEL, s, steps)];
    }
}

void baton_linear(int kind, int out_kind, const void* projection, const void* x, int64_t rows, void* out, int threads) {
    const Projection& l = *static_cast<const Projection*>(projection);
    if (!kind) linear(l, static_cast<const float*>(x), rows, static_cast<float*>(out), threads);
    else if (out_kind) linear(l, static_cast<const bf16*>(x), rows, static_cast<bf16*>(out), threads);
    else linear(l, static_cast<const bf16*>(x), rows, static_cast<float*>(out), threads);
}

void baton_route(const void* routing, const float* logits, int64_t tokens, int32_t* chosen, float* weights,
                 int threads) {
    route(*static_cast<const Routing*>(routing), logits, tokens, chosen, weights, threads);
}

// The bytes of memory that baton_experts wants for so many tokens' experts in all.
int64_t baton_experts_memory(int kind, const void* experts, int64_t pairs) {
    const Experts& e = *static_cast<const Experts*>(experts);
    return kind ? PairMemory<bf16>(e, pairs, nullptr).size : PairMemory<float>(e, pairs, nullptr).size;
}

void baton_experts(int kind, const void* experts, const void* x, const int32_t* chosen, const float* weights, void* out,
                   int64_t tokens, int64_t top_k, int weighs_input, void* memory, int threads) {
    const Experts& e = *static_cast<const Experts*>(experts);
    const Chosen c{chosen, weights, tokens, top_k, weighs_input};
    if (kind) run_experts(e, static_cast<const bf16*>(x), c, static_cast<bf16*>(out), memory, threads);
    else run_experts(e, static_cast<const float*>(x), c, static_cast<float*>(out), memory, threads);
}

// ``norm`` and ``post``: null for none.
void baton_add_norm(int kind, int out_kind, const void* x, float* residual, const void* norm, const void* post,
                    float factor, int64_t rows, int64_t size, void* out, int threads) {
    const Norm none{};
    const Norm& n = norm ? *static_cast<const Norm*>(norm) : none;
    const Norm& p = post ? *static_cast<const Norm*>(post) : none;
    const auto* floats = static_cast<const float*>(x);
    if (!out_kind) add_norm(floats, residual, n, p, factor, rows, size, static_cast<float*>(out), threads);
    else if (!kind) add_norm(floats, residual, n, p, factor, rows, size, static_cast<bf16*>(out), threads);
    else add_norm(static_cast<const bf16*>(x), residual, n, p, factor, rows, size, static_cast<bf16*>(out), threads);
}

void baton_squares_of_heads(int kind, const void* qkv, int64_t columns, int64_t q_size, int64_t k_size, int64_t rows,
                            float* squares, int threads) {
    const Heads h{nullptr, nullptr, columns, q_size, k_size, 0, 0};
    if (kind) squares_of_heads(static_cast<const bf16*>(qkv), h, rows, squares, threads);
    else squares_of_heads(static_cast<const float*>(qkv), h, rows, squares, threads);
}

void baton_scale_heads(int kind, void* qkv, const void* q, const void* k, int64_t columns, int64_t q_size,
                       int64_t k_size, float eps, float offset, int64_t rows, const float* squares,
                       const int64_t* sizes, int threads) {
    const Heads h{q, k, columns, q_size, k_size, eps, offset};
    if (kind) scale_heads(static_cast<bf16*>(qkv), h, rows, squares, sizes, threads);
    else scale_heads(static_cast<float*>(qkv), h, rows, squares, sizes, threads);
}

// ``codes``: whether the pool is of e4m3. The factors are those of what becomes codes, the scales those of numbers that
// are codes.
void baton_rotate_and_store(int kind, int codes, const void* pool, const int64_t* shape, int64_t layer, const void* qkv,
                            void* q, const float* cos, const float* sin, const void* q_norm, const void* k_norm,
                            float eps, float offset, const int64_t* blocks, const int64_t* offsets, int64_t tokens,
                            int64_t heads, float k_factor, float v_factor, int threads) {
    const Rotate r{qkv, q, cos, sin, q_norm, k_norm, blocks, offsets, eps, offset, tokens, heads, k_factor, v_factor};
    in_types(kind, codes, [&](auto t, auto s) {
        rotate_and_store<decltype(t)>(r, pool_of<decltype(s)>(pool, shape, layer), threads);
    });
}

void baton_decode(int kind, int codes, const void* pool, const int64_t* shape, int64_t layer, const void* q, void* out,
                  const int64_t* tables, const int64_t* contexts, int64_t rows, int64_t heads, int64_t width,
                  float scale, float value_scale, float softcap, int64_t window, const float* sinks, int threads) {
    const Decode d{q, out, tables, contexts, rows, heads, width};
    const Scores how{scale, value_scale, softcap, window, sinks};
    in_types(kind, codes, [&](auto t, auto s) {
        decode<decltype(t)>(d, pool_of<decltype(s)>(pool, shape, layer), how, threads);
    });
}

void baton_prefill(int kind, int codes, const void* pool, const int64_t* shape, int64_t layer, const void* q, void* out,
                   const int64_t* table, int64_t length, int64_t context, int64_t heads, float scale,
                   float value_scale, float softcap, int64_t window, const float* sinks, int threads) {
    const Chunk c{q, out, table, length, context, heads};
    const Scores how{scale, value_scale, softcap, window, sinks};
    in_types(kind, codes, [&](auto t, auto s) {
        prefill<decltype(t)>(c, pool_of<decltype(s)>(pool, shape, layer), how, threads);
    });
}

void baton_delta(int kind, const void* layer, const void* step, int threads) {
    const DeltaLayer& l = *static_cast<const DeltaLayer*>(layer);
    const DeltaStep& s = *static_cast<const DeltaStep*>(step);
    if (kind) run_delta<bf16>(l, s, threads);
    else run_delta<float>(l, s, threads);
}

// ``shape``: layers, block_size and width of the pool. ``tables``: [rows, blocks].
void baton_attend_latents(int kind, const void* pool, const int64_t* shape, int64_t layer, const void* q, void* out,
                          const int64_t* tables, const int64_t* contexts, int64_t rows, int64_t heads,
                          int64_t value_dim, int64_t blocks, float scale, int threads) {
    const LatentRows r{q, out, tables, contexts, rows, heads, value_dim, blocks, scale};
    if (kind) attend_latents(r, latents_of<bf16>(pool, shape, layer), threads);
    else attend_latents(r, latents_of<float>(pool, shape, layer), threads);
}

// ``norms``: of the latents of queries, and of keys and values.
void baton_store_latents(int kind, const void* pool, const int64_t* shape, int64_t layer, const void* down, void* q,
                         const void* norms, const float* cos, const float* sin, const int64_t* blocks,
                         const int64_t* offsets, int64_t tokens, int64_t q_rank, int64_t kv_rank, int64_t rope_dim,
                         int threads) {
    const Norm* n = static_cast<const Norm*>(norms);
    const LatentInput in{down, q, n, n + 1, cos, sin, blocks, offsets, tokens, q_rank, kv_rank, rope_dim};
    if (kind) store_latents(in, latents_of<bf16>(pool, shape, layer), threads);
    else store_latents(in, latents_of<float>(pool, shape, layer), threads);
}

void baton_absorb(int kind, const void* q, const void* up, void* out, const float* cos, const float* sin,
                  const float* factors, int64_t tokens, int64_t heads, int64_t nope_dim, int64_t rope_dim,
                  int64_t value_dim, int64_t rank, int threads) {
    const HeadRows r{q, up, out, tokens, heads, nope_dim, value_dim, rank};
    if (kind) absorb<bf16>(r, cos, sin, factors, rope_dim, threads);
    else absorb<float>(r, cos, sin, factors, rope_dim, threads);
}

void baton_make_values(int kind, const void* sums, const void* up, void* out, int64_t tokens, int64_t heads,
                       int64_t nope_dim, int64_t value_dim, int64_t rank, int threads) {
    const HeadRows r{sums, up, out, tokens, heads, nope_dim, value_dim, rank};
    if (kind) make_values<bf16>(r, threads);
    else make_values<float>(r, threads);
}

void baton_layers(int kind, int codes, const void* stack, int64_t count, const void* step, int threads) {
    const Stack& m = *static_cast<const Stack*>(stack);
    const Step& of = *static_cast<const Step*>(step);
    in_types(kind, codes, [&](auto t, auto s) { run_layers<decltype(t), decltype(s)>(m, count, of, threads); });
}

void baton_short_conv_decode(const void* cells, const void* conv, const void* tables, const float* rows, float* out,
                             int threads) {
    const ShortConv s{*static_cast<const Taps*>(conv), rows, out};
    short_conv_decode(s, *static_cast<const UnitCells*>(cells), *static_cast<const StateTables*>(tables), threads);
}

void baton_short_conv_prefill(const void* cells, const void* conv, const int64_t* source, const int64_t* target,
                              int64_t start, int64_t length, const float* rows, float* out, int threads) {
    const ShortConv s{*static_cast<const Taps*>(conv), rows, out};
    short_conv_prefill(s, *static_cast<const UnitCells*>(cells), source, target, start, length, threads);
}

void baton_mamba_decode(const void* layer, const void* tables, const float* projected, float* mixed, float* steps,
                        float* out, int threads) {
    mamba_decode(*static_cast<const Mamba*>(layer), *static_cast<const StateTables*>(tables), projected, mixed, steps,
                 out, threads);
}

// The floats that baton_mamba_prefill wants.
int64_t baton_mamba_memory(const void* layer, int64_t length, int threads) {
    return ScanMemory(*static_cast<const Mamba*>(layer), length).size(threads);
}

void baton_mamba_prefill(const void* layer, const int64_t* source, const int64_t* target, const float* projected,
                         int64_t length, float* memory, float* out, int threads) {
    mamba_prefill(*static_cast<const Mamba*>(layer), source, target, projected, length, memory, out, threads);
}

// ``kind``: the type of the result.
void baton_gated_norm(int kind, const void* norm, float* y, const float* gate, int64_t stride, int64_t rows,
                      int64_t numbers, void* out, int threads) {
    const GatedNorm& n = *static_cast<const GatedNorm*>(norm);
    if (kind) gated_norm(n, y, gate, stride, rows, numbers, static_cast<bf16*>(out), threads);
    else gated_norm(n, y, gate, stride, rows, numbers, static_cast<float*>(out), threads);
}
}
