// All layers of a model in one call.

#pragma once

#include "experts.h"
#include "latent_rows.h"

namespace {

// These structures have the layout of the ctypes ones in baton_kernels.cpu.layers.
struct Mixture {  // of experts
    Projection router;                       // its outputs are floats
    Routing routing;
    Experts experts;
    Projection shared_gate_up, shared_down;  // an MLP for every token; packed null: none
    Projection shared_gate;                  // its factor's logit; packed null: none
    int weighs_input, router_is_float;       // whether the router's weights are floats, whatever the type
};

struct LatentLayer {     // attention over latents; a layer's qkv is then the projection to latents
    Projection queries;  // of their latent, or of the layer's input if they have none
    Norm norms[2];       // of the latent of queries (if they have one), and of that of keys and values
    const void* up;      // see HeadRows
    int64_t q_rank, kv_rank, nope_dim, rope_dim, value_dim;  // q_rank 0: queries have no latent
};

struct Layer {
    Norm input_norm, mlp_norm;          // of the residual stream
    Norm attention_post, mlp_post;      // of what is added to it
    const void *q_norm, *k_norm;        // null: none
    const float* sinks;                 // null: none
    Projection qkv, o, gate_up, down;
    const Mixture* mixture;             // in place of gate_up and down; null: none
    const LatentLayer* latent;          // null: attention is over K and V
    int64_t window, angles;             // as in Scores; the index of the rotation
    int64_t table, index;               // where its KV is: a table's blocks, and its index in them
    float head_eps, head_offset, softcap, factor;  // softcap 0: none; the factor of what is added to the stream
    int whole_heads;                    // whether q_norm and k_norm are over all heads together
    float k_scale, v_scale;             // of a pool of e4m3; 1 for others
};

struct Stack {
    const Layer* layers;
    int64_t hidden, heads;
    float scale;
};

struct Angles {
    const float *cos, *sin;  // [tokens, dim]
};

struct Run {  // a chunk of a prompt
    int64_t start, length, context;
    const int64_t* table;
};

struct Table {  // a step's blocks as the layers of one table see them
    const int64_t *shape, *blocks;  // of the pool; of each token
    const int64_t* tables;          // of the decoding rows, [decodes, width]
    const Run* runs;
    int64_t width;
    const int64_t* contexts;        // of latents: of all rows, each of which ``tables`` has a line for
};

struct Step {
    const void* pool;
    float* residual;  // [tokens, hidden], changed
    void* delta;      // [tokens, hidden]: the last layer's output for the residual stream
    // [tokens, hidden + outputs of qkv, o's inputs twice and the widest MLP's down's inputs]; with latents, before the
    // last of them also q_rank, and for each head a query, an absorbed query and a sum of latents
    void* scratch;
    const Angles* angles;  // the rotations that layers choose from
    const Table* tables;
    const int64_t *offsets, *contexts;  // of each token; of the decoding rows
    const float* factors;               // [tokens]: of the queries of latents; null: 1
    double* seconds;  // null, or where the seconds of matmuls and of attention are added
    int64_t tokens, decodes, num_runs;
};

// Calls f, and adds its time to ``seconds`` unless that is null.
template <class F> inline void timed(double* seconds, F f) {
    const double began = seconds ? omp_get_wtime() : 0;
    f();
    if (seconds) *seconds += omp_get_wtime() - began;
}

// The memory of a layer's experts, and of all that follow.
template <class T> struct MixtureMemory {
    std::unique_ptr<float[]> inputs, logits, weights;  // [tokens, hidden], [tokens, experts], [tokens, top_k]
    std::unique_ptr<int32_t[]> chosen;                 // [tokens, top_k]
    std::unique_ptr<uint8_t[]> pairs;
    std::unique_ptr<T[]> shared;                       // [tokens, hidden]
    MixtureMemory(const Mixture& m, int64_t tokens)
        : logits(new float[tokens * m.routing.experts]),
          weights(new float[tokens * m.routing.top_k]),
          chosen(new int32_t[tokens * m.routing.top_k]),
          pairs(new uint8_t[PairMemory<T>(m.experts, tokens * m.routing.top_k, nullptr).size]) {
        if (m.router_is_float) inputs.reset(new float[tokens * m.experts.hidden]);
        if (m.shared_down.packed) shared.reset(new T[tokens * m.experts.hidden]);
    }
};

// out [tokens, hidden] += part, times the sigmoid of each token's logit (null: times 1).
template <class T> void add_part(const T* part, const float* logits, int64_t tokens, int64_t hidden, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 16)
    for (int64_t t = 0; t < tokens; ++t) {
        const float factor = logits ? 1.0f / (1.0f + std::exp(-logits[t])) : 1.0f;
        for (int64_t i = t * hidden; i < (t + 1) * hidden; ++i) put(out + i, to_float(out[i]) + to_float(part[i]) * factor);
    }
}

// A mixture of x [tokens, hidden]. ``inner`` has room for the inner rows of the MLP for every token.
template <class T>
void run_mixture(const Mixture& m, const MixtureMemory<T>& memory, const T* x, int64_t tokens, T* inner, T* out,
                 int threads) {
    const int64_t hidden = m.experts.hidden;
    if (m.router_is_float) {
        for (int64_t i = 0; i < tokens * hidden; ++i) memory.inputs[i] = to_float(x[i]);
        linear(m.router, memory.inputs.get(), tokens, memory.logits.get(), threads);
    } else {
        linear(m.router, x, tokens, memory.logits.get(), threads);
    }
    route(m.routing, memory.logits.get(), tokens, memory.chosen.get(), memory.weights.get(), threads);
    const Chosen chosen{memory.chosen.get(), memory.weights.get(), tokens, m.routing.top_k, m.weighs_input};
    run_experts(m.experts, x, chosen, out, memory.pairs.get(), threads);
    if (!m.shared_down.packed) return;
    linear(m.shared_gate_up, x, tokens, inner, threads);
    linear(m.shared_down, inner, tokens, memory.shared.get(), threads);
    float* const logits = m.shared_gate.packed ? memory.weights.get() : nullptr;  // no longer needed
    if (logits) linear(m.shared_gate, x, tokens, logits, threads);
    add_part(memory.shared.get(), logits, tokens, hidden, out, threads);
}

// Attention over latents of normed [tokens, hidden], whose projection is ``down``: attended [tokens, heads, value_dim].
// ``memory``: the rest of the scratch, of which the end is returned.
template <class T, class F>
T* run_latents(const Layer& layer, const Stack& m, const Step& s, const T* normed, const T* down, T* memory, T** attended,
               F times, int threads) {
    const LatentLayer& l = *layer.latent;
    const Table& table = s.tables[layer.table];
    const Angles& angles = s.angles[layer.angles];
    const Latents<T> pool = latents_of<T>(s.pool, table.shape, layer.index);
    const auto take = [&](int64_t numbers) { return std::exchange(memory, memory + s.tokens * numbers); };
    T* const source = take(l.q_rank);
    T* const q = take(l.queries.outputs);
    T* const wide = take(m.heads * pool.width);
    T* const sums = take(m.heads * l.kv_rank);
    *attended = take(m.heads * l.value_dim);
    const LatentInput in{down, source, l.norms, l.norms + 1, angles.cos, angles.sin, table.blocks, s.offsets,
                         s.tokens, l.q_rank, l.kv_rank, l.rope_dim};
    store_latents(in, pool, threads);
    times(l.queries, l.q_rank ? source : normed, q);
    HeadRows rows{q, l.up, wide, s.tokens, m.heads, l.nope_dim, l.value_dim, l.kv_rank};
    absorb<T>(rows, angles.cos, angles.sin, s.factors, l.rope_dim, threads);
    timed(s.seconds ? s.seconds + 1 : nullptr, [&] {
        attend_latents(LatentRows{wide, sums, table.tables, table.contexts, s.tokens, m.heads, l.kv_rank, table.width,
                                  m.scale}, pool, threads);
    });
    rows.x = sums, rows.out = *attended;
    make_values<T>(rows, threads);
    return memory;
}

// The first ``count`` layers of the stack. Each computes the same as its kernels called one by one.
// The pool of K and V is of S.
template <class T, class S> void run_layers(const Stack& m, int64_t count, const Step& s, int threads) {
    double *matmul = s.seconds, *attention = s.seconds ? s.seconds + 1 : nullptr;
    T *const delta = static_cast<T*>(s.delta), *const normed = static_cast<T*>(s.scratch);
    std::unique_ptr<float[]> squares(new float[2 * s.tokens]);
    std::unique_ptr<MixtureMemory<T>> memory;  // all mixtures of a stack have the same sizes
    const auto times = [&](const Projection& p, const T* x, T* out) {
        timed(matmul, [&] { linear(p, x, s.tokens, out, threads); });
    };
    const auto add = [&](const T* x, const Norm& norm, const Norm& post, float factor) {
        add_norm(x, s.residual, norm, post, factor, s.tokens, m.hidden, normed, threads);
    };
    const auto attend = [&](const Layer& layer, T* qkv, T** attended) {
        const Table& table = s.tables[layer.table];
        const Pool<S> pool = pool_of<S>(s.pool, table.shape, layer.index);
        const Scores how{m.scale * layer.k_scale, layer.v_scale, layer.softcap, layer.window, layer.sinks};
        const int64_t row = m.heads * pool.dim;
        T* const q = qkv + s.tokens * layer.qkv.outputs;
        *attended = q + s.tokens * row;
        const Angles& angles = s.angles[layer.angles];
        Rotate r{qkv, q, angles.cos, angles.sin, layer.q_norm, layer.k_norm, table.blocks, s.offsets,
                 layer.head_eps, layer.head_offset, s.tokens, m.heads, 1 / layer.k_scale, 1 / layer.v_scale};
        if (layer.whole_heads) {
            const int64_t sizes[2] = {row, pool.kv_heads * pool.dim};
            const Heads h{r.q_norm, r.k_norm, layer.qkv.outputs, sizes[0], sizes[1], r.eps, r.offset};
            squares_of_heads(qkv, h, s.tokens, squares.get(), threads);
            scale_heads(qkv, h, s.tokens, squares.get(), sizes, threads);
            r.q_norm = r.k_norm = nullptr;
        }
        rotate_and_store<T>(r, pool, threads);
        timed(attention, [&] {
            const Decode rows{q, *attended, table.tables, s.contexts, s.decodes, m.heads, table.width};
            if (s.decodes) decode<T>(rows, pool, how, threads);
            for (const Run* c = table.runs; c < table.runs + s.num_runs; ++c) {
                const T* of_chunk = q + c->start * row;
                const Chunk chunk{of_chunk, *attended + c->start * row, c->table, c->length, c->context, m.heads};
                prefill<T>(chunk, pool, how, threads);
            }
        });
        return *attended + s.tokens * row;
    };
    for (int64_t i = 0; i < count; ++i) {
        const Layer &layer = m.layers[i], &before = m.layers[i ? i - 1 : 0];
        T *const qkv = normed + s.tokens * m.hidden, *const behind = qkv + s.tokens * layer.qkv.outputs, *attended;

        add(i ? delta : nullptr, layer.input_norm, before.mlp_post, before.factor);
        times(layer.qkv, normed, qkv);
        T* const inner = layer.latent ? run_latents<T>(layer, m, s, normed, qkv, behind, &attended, times, threads)
                                      : attend(layer, qkv, &attended);
        times(layer.o, attended, delta);
        add(delta, layer.mlp_norm, layer.attention_post, layer.factor);
        if (layer.mixture) {
            if (!memory) memory.reset(new MixtureMemory<T>(*layer.mixture, s.tokens));
            timed(matmul, [&] { run_mixture(*layer.mixture, *memory, normed, s.tokens, inner, delta, threads); });
            continue;
        }
        times(layer.gate_up, normed, inner);
        times(layer.down, inner, delta);
    }
}

}  // namespace
