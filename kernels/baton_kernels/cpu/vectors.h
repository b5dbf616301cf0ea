// Numbers, words and vectors, which every kernel uses: see native.cpp.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

#include <omp.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
// Whether a matmul of bfloat16 multiplies floats: where there is no instruction for pairs, or a slow one. (With AVX2
// floats are no faster.)
#if defined(__AVX512F__) && (!defined(__AVX512BF16__) || defined(BATON_SLOW_BF16_PAIRS))
#define BF16_AS_FLOATS
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};
// FP8 as it is stored: a sign, 4 bits of exponent (bias 7) and 3 of mantissa; no infinity, and 0x7f is no number.
struct e4m3 {
    uint8_t bits;
};

// Lanes of a register (the compiler would take longer vectors apart, through memory), and vectors of a panel in a
// register tile: with the tile's rows they make 24 sums where there are 32 registers, 12 of 16.
#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_VECS = 4;
#elif defined(__AVX2__)
constexpr int LANES = 8, TILE_VECS = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, TILE_VECS = 4;
#else
constexpr int LANES = 4, TILE_VECS = 2;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
constexpr int PANEL = 64;  // columns of a packed panel
constexpr int VECS = PANEL / LANES;
constexpr int STRIPE = TILE_VECS * LANES;  // columns that lie together, as a tile reads them
// Most rows of a register tile, and most rows of a tile with half as many vectors.
constexpr int TILE_ROWS = 6, WIDE_ROWS = 12;

constexpr int LINE = 16;  // words of a cache line
constexpr int BYTES_AHEAD = 3072;  // bytes of a panel between the words in use and the words prefetched
// Most rows that share the words made of codes, and the most steps whose words are kept: both stay in L2.
constexpr int MOST_ROWS = 64 * TILE_ROWS, MOST_STEPS = 256;

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint8_t vb __attribute__((vector_size(LANES)));
typedef uint16_t vw __attribute__((vector_size(4 * LANES)));
typedef int16_t vs __attribute__((vector_size(4 * LANES)));
typedef int8_t vc __attribute__((vector_size(2 * LANES)));

inline vf load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
inline vi load(const int32_t* p) { vi v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline void store(int32_t* p, vi v) { std::memcpy(p, &v, sizeof v); }
inline vf splat(float x) { return x - vf{}; }
inline vi splat(int32_t x) { return x - vi{}; }

template <class T> constexpr int PER_WORD = 4 / sizeof(T);
template <class T> inline const int32_t* words(const T* p) { return reinterpret_cast<const int32_t*>(p); }

inline vf low(vi w) { return (vf)((vu)w << 16); }
inline vf high(vi w) { return (vf)((vu)w & 0xffff0000u); }

// acc + a · b, word by word.
template <class T> inline vf step(vf acc, vi a, vi b);
template <> inline vf step<float>(vf acc, vi a, vi b) { return acc + (vf)a * (vf)b; }
template <> inline vf step<bf16>(vf acc, vi a, vi b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    return acc + low(a) * low(b) + high(a) * high(b);
#endif
}

// f(lane) in each lane.
template <class F, int... I> constexpr vi each_lane(F f, std::integer_sequence<int, I...>) { return vi{f(I)...}; }
template <class F> constexpr vi each_lane(F f) { return each_lane(f, std::make_integer_sequence<int, LANES>{}); }
template <class F, int... I> constexpr vw each_half(F f, std::integer_sequence<int, I...>) { return vw{f(I)...}; }
template <class F> constexpr vw each_half(F f) { return each_half(f, std::make_integer_sequence<int, 2 * LANES>{}); }

// Two floats, each rounded to the nearest bfloat16 (ties to even), as one word.
inline vi pair(vf first, vf second) {
    vu a = (vu)first, b = (vu)second;
    a = (a + 0x7fffu + ((a >> 16) & 1u)) >> 16;
    b = (b + 0x7fffu + ((b >> 16) & 1u)) & 0xffff0000u;
    return (vi)(a | b);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint16_t rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
// Floats as bfloat16.
inline void put_halves(bf16* to, vf x) {
    const vu bits = (vu)x;
    const vh halves = __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, vh);
    std::memcpy(to, &halves, sizeof halves);
}
inline vf widened(const bf16* from) {
    vh halves;
    std::memcpy(&halves, from, sizeof halves);
    return (vf)(__builtin_convertvector(halves, vu) << 16);
}
inline vf floats(const float* p) { return load(p); }
inline vf floats(const bf16* p) { return widened(p); }

// Bytes in lanes of twice their size. (The compiler would take the vectors apart.)
inline vw sign_extended(const e4m3* p) {
#if defined(__AVX512BW__)
    return (vw)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return (vw)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    vc bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return (vw)__builtin_convertvector(bytes, vs);
#endif
}

// Codes of e4m3 as floats, and as words of T: the numbers from p on. Codes below 8 have no leading one. No number on the
// way is below float's normal ones, as many processors take a hundred times as long for those.
inline vf floats(const e4m3* p) {
    vb codes;
    std::memcpy(&codes, p, sizeof codes);
    const vu lanes = __builtin_convertvector(__builtin_convertvector(codes, vh), vu), size = lanes & 0x7fu;
    const vu normal = (size << 20) + (120u << 23);
    const vu small = (vu)((vf)((size << 20) + (121u << 23)) - 0x1p-6f);
    return (vf)((size < 8 ? small : normal) | (lanes & 0x80u) << 24);
}
template <class T> inline vi words_from(const T* p) { return load(words(p)); }
template <class T> inline vi words_from(const e4m3* p);
template <> inline vi words_from<float>(const e4m3* p) { return (vi)floats(p); }
template <> inline vi words_from<bf16>(const e4m3* p) {
    constexpr vw small = each_half([](int lane) {
        constexpr uint16_t multiples[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // of 2^-9
        return multiples[lane % 8];
    });
    const vw lanes = sign_extended(p), normal = (lanes << 4 & 0x87f0) + 0x3c00;
    return (vi)((lanes & 0x78 ? normal : __builtin_shuffle(small, lanes)) | (lanes & 0x8000));
}

// The codes of e4m3 nearest to x (ties to even); what is larger than 448 becomes 448.
inline vb to_e4m3(vf x) {
    constexpr uint32_t largest = 0x43e00000, infinite = 0x7f800000;
    const vu size = (vu)x & 0x7fffffffu, least = size < largest ? size : largest - vu{};
    const vu normal = ((least + 0x7ffffu + (least >> 20 & 1u)) >> 20) - (120u << 3);
    const vu small = (vu)((vf)least + 0x1p14f) - 0x46800000u;  // below 2^-6 codes are multiples of 2^-9
    const vu code = least < 0x3c800000u ? small : normal;
    return __builtin_convertvector((size > infinite ? 0x7fu - vu{} : code) | (vu)x >> 31 << 7, vb);
}
inline void put(float* p, vf x) { store(p, x); }
inline void put(bf16* p, vf x) { put_halves(p, x); }
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) { p->bits = rounded(x); }

// e^x for x of at most 0; an x below -87 counts as -87.
// (2^whole · 2^rest, the latter by the polynomial of degree 5 with the least relative error on [-1/2, 1/2], 1e-7.)
inline vf exp_of_negative(vf x) {
    x = x > -87.0f ? x : splat(-87.0f);
    const vf scaled = x * 1.44269504088896341f;
    const vi whole = __builtin_convertvector(scaled - 0.5f, vi);  // truncation: scaled <= 0
    const vf rest = scaled - __builtin_convertvector(whole, vf);
    vf p = splat(1.327647129e-3f);
    p = p * rest + 9.675540961e-3f;
    p = p * rest + 5.550713092e-2f;
    p = p * rest + 2.402212024e-1f;
    p = p * rest + 6.931469440e-1f;
    p = p * rest + 1.0f;
    return (vf)((vi)p + (whole << 23));
}

inline vf exp_of(vf x) {  // any x: e^x is at most 2^126
    vf positive = x > 87.0f ? splat(87.0f) : x;
    vf small = exp_of_negative(x > 0.0f ? -positive : positive);
    return x > 0.0f ? 1.0f / small : small;
}

inline vf silu(vf x) { return x / (1.0f + exp_of(-x)); }
inline vf tanh_of(vf x) {
    vf e = exp_of(-2.0f * (x < 0.0f ? -x : x));
    vf t = (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -t : t;
}

inline float sum_of(vf v) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += v[i];
    return total;
}

}  // namespace
