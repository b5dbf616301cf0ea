// Sums of a row's numbers.

#pragma once

#include "vectors.h"

namespace {

// The numbers of a row from p on, as a vector or as one number.
template <class V, class T> inline V get(const T* p) {
    if constexpr (std::is_same_v<V, vf>) return floats(p);
    else return to_float(*p);
}

// Calls f(i, a V) for a row's numbers: in vectors as far as they go, then one by one.
template <class F> inline void along(int64_t size, F f) {
    const int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) f(i, vf{});
    for (int64_t i = whole; i < size; ++i) f(i, 0.0f);
}

// The sum of the vectors and numbers that are added to it.
struct Sum {
    vf lanes = vf{};
    float rest = 0;
    void operator+=(vf v) { lanes += v; }
    void operator+=(float x) { rest += x; }
    float total() const { return sum_of(lanes) + rest; }
};

}  // namespace
