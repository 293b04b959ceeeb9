// F16: sixteen floats with one set of operations on every instruction set, so that a kernel is written once and gives
// the same bits on all of them: one AVX-512 register, two AVX2 registers, or an array. Included by one .cpp per
// instruction set, inside its own namespace (PALIMPSEST_ISA), so that the linker never mixes them up.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

constexpr Index kWidth = 16;

inline Index smaller(Index a, Index b) { return a < b ? a : b; }
inline Index larger(Index a, Index b) { return a > b ? a : b; }
inline Index divide_up(Index a, Index b) { return (a + b - 1) / b; }

struct BFloat16 {
    std::uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
    std::uint32_t bits = std::uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Rounds to nearest, ties to even, as torch does.
inline BFloat16 to_bfloat16(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {0x7fc0};
    return {std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

struct KvInt8 {
    std::int8_t code;
};
inline float to_float(KvInt8 x) { return x.code; }

#if defined(__AVX512F__)

struct F16 {
    __m512 v;
    static F16 zero() { return {_mm512_setzero_ps()}; }
    static F16 set(float x) { return {_mm512_set1_ps(x)}; }
    static F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static F16 load(const BFloat16* p) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
    }
    static F16 load(const KvInt8* p) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
};
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 maximum(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
// Lanes below n from x, the others `other`.
inline F16 keep_first(F16 x, Index n, F16 other) {
    return {_mm512_mask_mov_ps(other.v, __mmask16(n >= kWidth ? 0xffff : (1u << n) - 1), x.v)};
}
// x times 2^n, where n stands in the low bits of `exponent`.
inline F16 scale_by_power(F16 x, F16 exponent) {
    __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(exponent.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.v), shifted))};
}
// Each lane holds two bfloat16 (the lower half first in memory): one of them as floats.
inline F16 widen_low(F16 pair) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pair.v), 16))}; }
inline F16 widen_high(F16 pair) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pair.v), _mm512_set1_epi32(0xffff0000)))};
}
// Each lane holds four int8: number `which` of them as floats.
template <int which>
inline F16 widen_byte(F16 four) {
    __m512i top = _mm512_slli_epi32(_mm512_castps_si512(four.v), 24 - 8 * which);
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24))};
}

#elif defined(__AVX2__)

struct F16 {
    __m256 lo, hi;
    static F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static F16 set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static F16 load(const BFloat16* p) {
        auto widen = [](const BFloat16* q) {
            __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
            return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
        };
        return {widen(p), widen(p + 8)};
    }
    static F16 load(const KvInt8* p) {
        __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
    }
    void store(float* p) const {
        _mm256_storeu_ps(p, lo);
        _mm256_storeu_ps(p + 8, hi);
    }
};
inline F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 maximum(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 keep_first(F16 x, Index n, F16 other) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    auto below = [&](int count) { return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane)); };
    return {_mm256_blendv_ps(other.lo, x.lo, below(int(n))), _mm256_blendv_ps(other.hi, x.hi, below(int(n) - 8))};
}
inline F16 scale_by_power(F16 x, F16 exponent) {
    auto scale = [](__m256 v, __m256 e) {
        __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(e), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), shifted));
    };
    return {scale(x.lo, exponent.lo), scale(x.hi, exponent.hi)};
}
inline F16 widen_low(F16 pair) {
    auto widen = [](__m256 v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16)); };
    return {widen(pair.lo), widen(pair.hi)};
}
inline F16 widen_high(F16 pair) {
    __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0xffff0000));
    return {_mm256_and_ps(pair.lo, mask), _mm256_and_ps(pair.hi, mask)};
}
template <int which>
inline F16 widen_byte(F16 four) {
    auto widen = [](__m256 v) {
        __m256i top = _mm256_slli_epi32(_mm256_castps_si256(v), 24 - 8 * which);
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(top, 24));
    };
    return {widen(four.lo), widen(four.hi)};
}

#else

struct F16 {
    float v[kWidth];
    template <class Function>
    static F16 make(Function function) {
        F16 result;
        for (int i = 0; i < kWidth; i++) result.v[i] = function(i);
        return result;
    }
    static F16 zero() { return set(0.0f); }
    static F16 set(float x) {
        return make([&](int) { return x; });
    }
    template <class T>
    static F16 load(const T* p) {
        return make([&](int i) { return to_float(p[i]); });
    }
    void store(float* p) const { std::memcpy(p, v, sizeof v); }
};
inline F16 operator+(const F16& a, const F16& b) {
    return F16::make([&](int i) { return a.v[i] + b.v[i]; });
}
inline F16 operator*(const F16& a, const F16& b) {
    return F16::make([&](int i) { return a.v[i] * b.v[i]; });
}
inline F16 fma(const F16& a, const F16& b, const F16& c) {
    return F16::make([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline F16 operator-(const F16& a, const F16& b) {
    return F16::make([&](int i) { return a.v[i] - b.v[i]; });
}
inline F16 operator/(const F16& a, const F16& b) {
    return F16::make([&](int i) { return a.v[i] / b.v[i]; });
}
inline F16 maximum(const F16& a, const F16& b) {
    return F16::make([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 keep_first(const F16& x, Index n, const F16& other) {
    return F16::make([&](int i) { return i < n ? x.v[i] : other.v[i]; });
}
inline F16 scale_by_power(const F16& x, const F16& exponent) {
    return F16::make([&](int i) {
        std::uint32_t bits, n;
        std::memcpy(&bits, &x.v[i], 4);
        std::memcpy(&n, &exponent.v[i], 4);
        bits += n << 23;
        float scaled;
        std::memcpy(&scaled, &bits, 4);
        return scaled;
    });
}
inline F16 widen_half(const F16& pair, int shift) {
    return F16::make([&](int i) {
        std::uint32_t bits;
        std::memcpy(&bits, &pair.v[i], 4);
        return to_float(BFloat16{std::uint16_t(bits >> shift)});
    });
}
inline F16 widen_low(const F16& pair) { return widen_half(pair, 0); }
inline F16 widen_high(const F16& pair) { return widen_half(pair, 16); }
template <int which>
inline F16 widen_byte(const F16& four) {
    return F16::make([&](int i) {
        std::int8_t bytes[4];
        std::memcpy(bytes, &four.v[i], 4);
        return float(bytes[which]);
    });
}

#endif

// The first n (< 16) elements at p, the rest 0.
template <class T>
inline F16 load_first(const T* p, Index n) {
    float lanes[kWidth] = {};
    for (Index i = 0; i < n; i++) lanes[i] = to_float(p[i]);
    return F16::load(lanes);
}

inline void store_first(F16 x, float* p, Index n) {
    float lanes[kWidth];
    x.store(lanes);
    std::memcpy(p, lanes, n * sizeof(float));
}

// The sum of the lanes, by halving: lane i takes lane i + 8, then i + 4, i + 2, i + 1. And the largest of them.
#if defined(__AVX2__)

#if defined(__AVX512F__)
inline __m256 lower(F16 x) { return _mm512_castps512_ps256(x.v); }
inline __m256 upper(F16 x) { return _mm512_extractf32x8_ps(x.v, 1); }
#else
inline __m256 lower(F16 x) { return x.lo; }
inline __m256 upper(F16 x) { return x.hi; }
#endif

inline float sum(F16 x) {
    __m256 eight = _mm256_add_ps(lower(x), upper(x));
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

inline float largest(F16 x) {
    __m256 eight = _mm256_max_ps(lower(x), upper(x));
    __m128 v = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
}

#else

inline float sum(F16 x) {
    for (int half = kWidth / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x.v[i] += x.v[i + half];
    return x.v[0];
}

inline float largest(F16 x) {
    float result = x.v[0];
    for (float lane : x.v) result = lane > result ? lane : result;
    return result;
}

#endif

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
