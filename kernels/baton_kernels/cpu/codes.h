// Weights kept as codes of 8 or 4 bits, which become words in registers, and the scales of their groups.

#pragma once

#include "vectors.h"

namespace {

// These have the numbers of FORMATS and SCALE_TYPES in baton_kernels.cpu.packing.
enum : int { WORDS, INT8, FP8, INT4, FP4 };
enum : int { FLOAT_SCALES, BF16_SCALES, HALF_SCALES, E4M3_SCALES, E8M0_SCALES };

// Packed weights, with the layout of the ctypes structure in baton_kernels.cpu.packing. ``packed`` has panels of 64
// columns. What there is of each column is in the order of the panels' columns.
struct Matrix {
    const void* packed;
    const float *factors, *bias;  // factors: of codes; bias null: none
    const void* scales;           // [panels, groups, 64]; null: one group, and only the factors
    const int8_t* zeros;          // as the scales, what is subtracted from codes; null: nothing
    const int32_t* order;         // the input that each column of the codes is multiplied with; null: in order
    int64_t group;                // inputs of a group, at most MOST_STEPS and even; 0: no scales
    int format, scale_type;
};

constexpr int MOST_GROUPS = 32;  // of a slice, whose scales are floats on the stack

// The numbers that small floats stand for, from the low bits of each lane up: mantissa, exponent, sign.
template <int EXPONENT, int MANTISSA> [[gnu::always_inline]] inline vf from_small_floats(vu bits) {
    constexpr uint32_t bias = (1 << (EXPONENT - 1)) - 1;
    const vu magnitude = bits & ((1u << (EXPONENT + MANTISSA)) - 1);
    const vf normal = (vf)((magnitude << (23 - MANTISSA)) + ((127 - bias) << 23));
    const vf subnormal = 2 * normal - 1.0f / (1 << (bias - 1));  // exact
    return (vf)((vu)(magnitude < (1u << MANTISSA) ? subnormal : normal) | bits >> (EXPONENT + MANTISSA) << 31);
}

// A format gives the codes' numbers times ONE: ``number`` those of the codes whose lowest bits are ``bit`` of each
// lane, and ``word`` those of both codes of column vector q, as pairs. All are exact in bfloat16.
template <class F> [[gnu::always_inline]] inline vi word_of(vi lanes, int q) {
    return (vi)((vu)F::number(lanes, F::BITS * q) >> 16 | (vu)F::number(lanes, 16 + F::BITS * q));
}

struct Int8 {
    static constexpr int BITS = 8;
    static constexpr float ONE = 1 << 24;  // each code is read at the top of a lane
    [[gnu::always_inline]] static vf number(vi lanes, int bit) {
        return __builtin_convertvector((lanes << (24 - bit)) & int32_t(0xff000000), vf);
    }
    [[gnu::always_inline]] static vi word(vi lanes, int q) { return word_of<Int8>(lanes, q); }
};

#if defined(__AVX512VBMI__)
// The bytes of the bfloat16 that e4m3 codes without their sign stand for.
struct Fp8Bytes {
    uint8_t low[128], high[128];
    constexpr Fp8Bytes() : low(), high() {
        for (int code = 0; code < 128; ++code) {
            int exponent = code / 8 + 120, mantissa = code % 8;
            if (code && code < 8) {
                for (exponent = 121; mantissa < 8; --exponent) mantissa *= 2;
                mantissa %= 8;
            }
            const int bits = code ? exponent << 7 | mantissa << 4 : 0;
            low[code] = uint8_t(bits), high[code] = uint8_t(bits >> 8);
        }
    }
};
constexpr Fp8Bytes FP8_BYTES;
[[gnu::always_inline]] inline __m512i fp8_bytes(const uint8_t (&bytes)[128], vi codes) {
    return _mm512_permutex2var_epi8(_mm512_loadu_si512(bytes), (__m512i)codes, _mm512_loadu_si512(bytes + 64));
}
#endif

struct Fp8 {  // e4m3
    static constexpr int BITS = 8;
    static constexpr float ONE = 1;
    [[gnu::always_inline]] static vf number(vi lanes, int bit) {
        return from_small_floats<4, 3>((vu)lanes >> bit & 0xff);
    }
#if defined(__AVX512VBMI__)
    // Two tables give both bytes of all bfloat16; a product of pairs would take subnormal ones for 0.
    [[gnu::always_inline]] static vi word(vi lanes, int q) {
        const __m512i low = fp8_bytes(FP8_BYTES.low, lanes);
        const __m512i high = fp8_bytes(FP8_BYTES.high, lanes) | ((__m512i)lanes & _mm512_set1_epi8(char(0x80)));
        const __m512i of_low = _mm512_set1_epi16(0xff);
        if (q) return (vi)(_mm512_srli_epi16(low, 8) | _mm512_andnot_si512(of_low, high));
        return (vi)((low & of_low) | _mm512_slli_epi16(high, 8));
    }
#else
    [[gnu::always_inline]] static vi word(vi lanes, int q) { return word_of<Fp8>(lanes, q); }
#endif
};

#if defined(__AVX512BW__)
// The bfloat16 of all 4-bit codes; their floats are these with 16 more bits.
[[gnu::always_inline]] inline vf looked_up(const uint16_t (&values)[16], vi lanes, int bit) {
    const vf table = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)values)), 16);
    return (vf)_mm512_permutexvar_ps((__m512i)((vu)lanes >> bit), (__m512)table);
}
[[gnu::always_inline]] inline vi words_looked_up(const uint16_t (&values)[16], vi lanes, int q) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)values));
    return (vi)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)lanes, 4 * q), table);
}
#endif

struct Int4 {  // two's complement
    static constexpr int BITS = 4;
    static constexpr float ONE = 1 << 28;  // each code is read at the top of a lane
#if defined(__AVX512BW__)
    static constexpr uint16_t VALUES[16] = {0, 0x4d80, 0x4e00, 0x4e40, 0x4e80, 0x4ea0, 0x4ec0, 0x4ee0,
                                            0xcf00, 0xcee0, 0xcec0, 0xcea0, 0xce80, 0xce40, 0xce00, 0xcd80};
    [[gnu::always_inline]] static vf number(vi lanes, int bit) { return looked_up(VALUES, lanes, bit); }
    [[gnu::always_inline]] static vi word(vi lanes, int q) { return words_looked_up(VALUES, lanes, q); }
#else
    [[gnu::always_inline]] static vf number(vi lanes, int bit) {
        return __builtin_convertvector((lanes << (28 - bit)) & int32_t(0xf0000000), vf);
    }
    [[gnu::always_inline]] static vi word(vi lanes, int q) { return word_of<Int4>(lanes, q); }
#endif
};

struct Fp4 {  // e2m1
    static constexpr int BITS = 4;
    static constexpr float ONE = 1;
#if defined(__AVX512BW__)
    static constexpr uint16_t VALUES[16] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                            0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    [[gnu::always_inline]] static vf number(vi lanes, int bit) { return looked_up(VALUES, lanes, bit); }
    [[gnu::always_inline]] static vi word(vi lanes, int q) { return words_looked_up(VALUES, lanes, q); }
#else
    [[gnu::always_inline]] static vf number(vi lanes, int bit) {
        return from_small_floats<2, 1>((vu)lanes >> bit & 0xf);
    }
    [[gnu::always_inline]] static vi word(vi lanes, int q) { return word_of<Fp4>(lanes, q); }
#endif
};

// f(a format) for a Matrix's.
template <class F> inline void by_format(int format, F f) {
    switch (format) {
        case INT8: return f(Int8{});
        case FP8: return f(Fp8{});
        case INT4: return f(Int4{});
        case FP4: return f(Fp4{});
    }
}
inline float one_of(int format) {
    float one = 1;
    by_format(format, [&](auto of) { one = decltype(of)::ONE; });
    return one;
}

// Codes of a panel: two inputs after two inputs, in vectors of 32-bit lanes. A lane has the two inputs of as many
// columns as fit, LANES apart: those of the even input in its lower half, the first column's in the lowest bits.
template <class F> struct Lanes {
    static constexpr int TOGETHER = 16 / F::BITS;  // columns in a lane
    static constexpr int PAIR = PANEL * F::BITS / 4;  // bytes of two inputs
    static int64_t at(int64_t pair, int j) { return pair * PAIR + j / TOGETHER * 4 * LANES; }
};

// The codes of the slice that comes next, prefetched evenly while a tile goes over all vectors of this one.
template <class F, class T> struct NextSlice {
    const uint8_t* next;
    int64_t steps;  // of this slice
    template <int V> [[gnu::always_inline]] void ahead(int64_t s, int first) const {
        __builtin_prefetch(next + (first * steps + s * V) * (PER_WORD<T> * Lanes<F>::PAIR / 2) / VECS);
    }
};

// A slice of a panel of codes as a tile reads it, for x of T.
template <class F, class T> struct Codes : NextSlice<F, T> {
    using L = Lanes<F>;
    const uint8_t* codes;

    const uint8_t* at(int64_t s, int j) const { return codes + L::at(s * PER_WORD<T> / 2, j); }
    template <int V> [[gnu::always_inline]] vi word(int64_t s, int first, int j) const {
        vi lanes;
        std::memcpy(&lanes, at(s, first + j), sizeof lanes);
        const int q = (V % L::TOGETHER ? first + j : j) % L::TOGETHER;
        if constexpr (PER_WORD<T> == 2) return F::word(lanes, q);
        else return (vi)F::number(lanes, int(s & 1) * 16 + F::BITS * q);
    }
    // A tile of all vectors needs the codes as fast as they come: it prefetches those it takes soon.
    template <int V> [[gnu::always_inline]] void ahead(int64_t s, int first) const {
        if constexpr (V < VECS) return NextSlice<F, T>::template ahead<V>(s, first);
#pragma GCC unroll 4
        for (int j = 0; j < V; j += L::TOGETHER) __builtin_prefetch(at(s, j) + BYTES_AHEAD);
    }
};

typedef uint8_t vb __attribute__((vector_size(LANES)));
template <class V> inline vu widened_to_lanes(const void* from, int64_t at) {
    V v;
    std::memcpy(&v, static_cast<const uint8_t*>(from) + at * sizeof v[0], sizeof v);
    return __builtin_convertvector(v, vu);
}

// Scales from number ``first`` on, as floats: to [count], whole vectors.
inline void widen_scales(int type, const void* scales, int64_t first, int64_t count, float* to) {
    const auto each = [&](auto f) {
        for (int64_t i = 0; i < count; i += LANES) store(to + i, f(first + i));
    };
    switch (type) {
        case FLOAT_SCALES: return each([&](int64_t i) { return load(static_cast<const float*>(scales) + i); });
        case BF16_SCALES: return each([&](int64_t i) { return widened(static_cast<const bf16*>(scales) + i); });
        case HALF_SCALES:
            return each([&](int64_t i) { return from_small_floats<5, 10>(widened_to_lanes<vh>(scales, i)); });
        case E4M3_SCALES:
            return each([&](int64_t i) { return from_small_floats<4, 3>(widened_to_lanes<vb>(scales, i)); });
        case E8M0_SCALES:
            return each([&](int64_t i) {
                const vu exponent = widened_to_lanes<vb>(scales, i);
                return (vf)(exponent == 0u ? vu{} + (1u << 22) : exponent << 23);  // 2^-127 is subnormal
            });
    }
}

// Minus the zero points from number ``first`` on, times ``one``: to [count], whole vectors.
inline void widen_zeros(const int8_t* zeros, int64_t first, int64_t count, float one, float* to) {
    for (int64_t i = 0; i < count; i += LANES) {
        const vi zero = (vi)(widened_to_lanes<vb>(zeros, first + i) << 24) >> 24;
        store(to + i, __builtin_convertvector(zero, vf) * -one);
    }
}

}  // namespace
