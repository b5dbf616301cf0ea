// The choice of experts for each token, by the rules of baton_kernels.routing_rule.

#pragma once

#include "vectors.h"

namespace {

constexpr int MOST_EXPERTS = 1024, MOST_CHOSEN = 64;  // Python looks to it
enum { SOFTMAX, SIGMOID, SPARSEMIXER };

// This structure has the layout of the ctypes one in baton_kernels.cpu.experts.
struct Routing {
    const float* bias;  // added to the scores for the choice; null: none
    int64_t experts, top_k, groups, top_groups, group_best, scores, renormalize;
    float least_sum, scale, jitter;
};

// The largest of the values offered, the largest first; of equal values, the first offered. Whatever the values are,
// NaN too, no index is there twice.
struct Largest {
    int64_t most, count = 0;
    float values[MOST_CHOSEN] = {};
    int32_t indices[MOST_CHOSEN] = {};
    explicit Largest(int64_t most) : most(most) {}
    void offer(float value, int64_t index) {
        if (count == most && value <= values[count - 1]) return;
        int64_t at = count < most ? count++ : most - 1;
        for (; at > 0 && value > values[at - 1]; --at) values[at] = values[at - 1], indices[at] = indices[at - 1];
        values[at] = value, indices[at] = int32_t(index);
    }
};

// exp(logit - largest) of each logit, and returns the sum. ``to`` has room for whole vectors.
inline float exponentials(const float* logits, int64_t count, float largest, float* to) {
    const vi lane = each_lane([](int i) { return i; });
    vf total = vf{};
    for (int64_t i = 0; i < count; i += LANES) {
        float tail[LANES] = {};
        const float* from = logits + i;
        if (i + LANES > count) std::memcpy(tail, from, 4 * (count - i)), from = tail;
        const vf e = exp_of_negative(load(from) - largest);
        store(to + i, e);
        total += lane < int32_t(std::min<int64_t>(LANES, count - i)) ? e : vf{};
    }
    return sum_of(total);
}

inline void scores_of(const Routing& r, const float* logits, float* scores) {
    if (r.scores == SOFTMAX) {
        const float total = exponentials(logits, r.experts, *std::max_element(logits, logits + r.experts), scores);
        for (int64_t i = 0; i < r.experts; ++i) scores[i] /= total;
        return;
    }
    for (int64_t i = 0; i < r.experts; i += LANES) {
        float tail[LANES] = {};
        const float* from = logits + i;
        if (i + LANES > r.experts) std::memcpy(tail, from, 4 * (r.experts - i)), from = tail;
        store(scores + i, 1.0f / (1.0f + exp_of(-load(from))));
    }
}

// One expert after the other: each weight is a softmax over the experts that are nearly as good, among those left.
inline void sparsemixer(const Routing& r, const float* logits, int32_t* chosen, float* weights) {
    alignas(64) float near[MOST_EXPERTS], scores[MOST_EXPERTS];
    bool taken[MOST_EXPERTS] = {};
    for (int64_t k = 0; k < r.top_k; ++k) {
        Largest best(1);
        for (int64_t i = 0; i < r.experts; ++i)
            if (!taken[i]) best.offer(logits[i], i);
        const float largest = best.values[0];
        int64_t count = 0;
        for (int64_t i = 0; i < r.experts; ++i) {
            const bool far = largest - logits[i] > 2 * r.jitter * std::max(std::abs(logits[i]), largest);
            if (!taken[i] && !far) near[count++] = logits[i];
        }
        chosen[k] = best.indices[0];
        weights[k] = 1 / exponentials(near, count, largest, scores);
        taken[chosen[k]] = true;
    }
}

inline Largest choose(const Routing& r, const float* choice) {
    Largest best(r.top_k);
    const int64_t size = r.experts / r.groups;
    bool kept[MOST_EXPERTS] = {};
    Largest groups(r.top_groups);
    for (int64_t g = 0; g < r.groups && r.groups > 1; ++g) {
        Largest two(std::min(r.group_best, size));
        for (int64_t i = g * size; i < (g + 1) * size; ++i) two.offer(choice[i], i);
        groups.offer(two.values[0] + (two.count > 1 ? two.values[1] : 0), g);
    }
    for (int64_t g = 0; g < groups.count; ++g) kept[groups.indices[g]] = true;
    for (int64_t i = 0; i < r.experts; ++i)
        if (r.groups == 1 || kept[i / size]) best.offer(choice[i], i);
    return best;
}

inline void route_token(const Routing& r, const float* logits, int32_t* chosen, float* weights) {
    if (r.scores == SPARSEMIXER) return sparsemixer(r, logits, chosen, weights);
    alignas(64) float scores[MOST_EXPERTS], choice[MOST_EXPERTS];
    scores_of(r, logits, scores);
    // Without a bias, logits are in the order of the scores, and differ where scores are rounded to 0 or 1.
    const float* by = r.bias || r.groups > 1 ? choice : logits;
    if (by == choice)
        for (int64_t i = 0; i < r.experts; ++i) choice[i] = scores[i] + (r.bias ? r.bias[i] : 0);
    const Largest best = choose(r, by);
    float total = 0;
    for (int64_t k = 0; k < r.top_k; ++k) total += scores[best.indices[k]];
    const float factor = r.renormalize ? r.scale / std::max(total, r.least_sum) : r.scale;
    for (int64_t k = 0; k < r.top_k; ++k) chosen[k] = best.indices[k], weights[k] = scores[best.indices[k]] * factor;
}

// logits [tokens, experts] -> the chosen experts [tokens, top_k] and their weights.
inline void route(const Routing& r, const float* logits, int64_t tokens, int32_t* chosen, float* weights, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 16)
    for (int64_t t = 0; t < tokens; ++t)
        route_token(r, logits + t * r.experts, chosen + t * r.top_k, weights + t * r.top_k);
}

}  // namespace
