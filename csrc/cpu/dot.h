// Exact dot products of small integers for sixteen outputs at a time, on every instruction set.
//
// A step is 64 bytes of weights: four neighbours on the k axis of output 0, then of output 1, ... 15. It meets four
// values of x, the same for all outputs. Products and sums are whole numbers that fit, so their order shows nowhere.
#pragma once

#include "vec.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

// Four neighbouring int8 values of x as they lie in memory.
inline std::int32_t load_four(const std::int8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, 4);
    return four;
}

#if defined(__AVX512F__)

// Sixteen int32.
struct I16 {
    __m512i v;
    static I16 set(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
};
inline I16 operator-(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline F16 to_floats(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

// 64 bytes.
struct Step {
    __m512i v;
    static Step load(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
    Step low_nibbles() const { return {_mm512_and_si512(v, _mm512_set1_epi8(15))}; }
    Step high_nibbles() const { return {_mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15))}; }
};

#if defined(__AVX512VNNI__)

// Bytes w + 128. The instruction takes them as they are, so 128 sum(x) goes off beforehand.
struct Signed {
    Step bytes;
    explicit Signed(Step s) : bytes(s) {}
    static I16 start(std::int32_t sum) { return I16::set(-128 * sum); }
};
inline I16 add_dot(I16 acc, const Signed& w, std::int32_t x) {
    return {_mm512_dpbusd_epi32(acc.v, w.bytes.v, _mm512_set1_epi32(x))};
}

// Sums of products with nibbles.
struct NibbleSums {
    __m512i v;
    static NibbleSums zero() { return {_mm512_setzero_si512()}; }
    I16 total() const { return {v}; }
};
inline NibbleSums add_dot(NibbleSums acc, Step w, std::int32_t x) {
    return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(x))};
}

#else

// Bytes w + 128 as |w| and sign: |w| (x with the sign of w) is w x, and products of bytes are unsigned by signed.
struct Signed {
    __m512i size;
    __mmask64 negative;
    explicit Signed(Step s) {
        __m512i w = _mm512_xor_si512(s.v, _mm512_set1_epi8(-128));
        size = _mm512_abs_epi8(w);
        negative = _mm512_movepi8_mask(w);
    }
    static I16 start(std::int32_t) { return I16::set(0); }
};
inline I16 add_dot(I16 acc, const Signed& w, std::int32_t x) {
    __m512i all = _mm512_set1_epi32(x);
    __m512i turned = _mm512_mask_sub_epi8(all, w.negative, _mm512_setzero_si512(), all);
    __m512i pairs = _mm512_maddubs_epi16(w.size, turned);
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}

// Sums of products with nibbles in 16 bits: 16 products of at most 15 * 127 fit.
struct NibbleSums {
    __m512i v;
    static NibbleSums zero() { return {_mm512_setzero_si512()}; }
    I16 total() const { return {_mm512_madd_epi16(v, _mm512_set1_epi16(1))}; }
};
inline NibbleSums add_dot(NibbleSums acc, Step w, std::int32_t x) {
    return {_mm512_add_epi16(acc.v, _mm512_maddubs_epi16(w.v, _mm512_set1_epi32(x)))};
}

#endif

#elif defined(__AVX2__)

struct I16 {
    __m256i lo, hi;
    static I16 set(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
};
inline I16 operator-(I16 a, I16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline F16 to_floats(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

struct Step {
    __m256i lo, hi;
    static Step load(const std::uint8_t* p) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
    }
    Step low_nibbles() const {
        __m256i mask = _mm256_set1_epi8(15);
        return {_mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask)};
    }
    Step high_nibbles() const { return Step{_mm256_srli_epi16(lo, 4), _mm256_srli_epi16(hi, 4)}.low_nibbles(); }
};

// Bytes w + 128. |w| (x with the sign of w) is w x, and products of bytes are unsigned by signed.
struct Signed {
    __m256i lo, hi;
    explicit Signed(Step s)
        : lo(_mm256_xor_si256(s.lo, _mm256_set1_epi8(-128))), hi(_mm256_xor_si256(s.hi, _mm256_set1_epi8(-128))) {}
    static I16 start(std::int32_t) { return I16::set(0); }
};
inline I16 add_dot(I16 acc, const Signed& w, std::int32_t x) {
    __m256i all = _mm256_set1_epi32(x), ones = _mm256_set1_epi16(1);
    auto add = [&](__m256i sum, __m256i bytes) {
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(all, bytes));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    };
    return {add(acc.lo, w.lo), add(acc.hi, w.hi)};
}

// Sums of products with nibbles in 16 bits: 16 products of at most 15 * 127 fit.
struct NibbleSums {
    __m256i lo, hi;
    static NibbleSums zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    I16 total() const {
        __m256i ones = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(lo, ones), _mm256_madd_epi16(hi, ones)};
    }
};
inline NibbleSums add_dot(NibbleSums acc, Step w, std::int32_t x) {
    __m256i all = _mm256_set1_epi32(x);
    return {_mm256_add_epi16(acc.lo, _mm256_maddubs_epi16(w.lo, all)),
            _mm256_add_epi16(acc.hi, _mm256_maddubs_epi16(w.hi, all))};
}

#else

struct I16 {
    std::int32_t v[kWidth];
    static I16 set(std::int32_t x) {
        I16 result;
        for (std::int32_t& lane : result.v) lane = x;
        return result;
    }
};
inline I16 operator-(const I16& a, const I16& b) {
    I16 result;
    for (int i = 0; i < kWidth; i++) result.v[i] = a.v[i] - b.v[i];
    return result;
}
inline F16 to_floats(const I16& a) {
    return F16::make([&](int i) { return float(a.v[i]); });
}

struct Step {
    std::uint8_t v[4 * kWidth];
    static Step load(const std::uint8_t* p) {
        Step result;
        std::memcpy(result.v, p, sizeof result.v);
        return result;
    }
    Step low_nibbles() const {
        Step result;
        for (int i = 0; i < 4 * kWidth; i++) result.v[i] = v[i] & 15;
        return result;
    }
    Step high_nibbles() const {
        Step result;
        for (int i = 0; i < 4 * kWidth; i++) result.v[i] = v[i] >> 4;
        return result;
    }
};

inline I16 add_products(I16 acc, const Step& w, int offset, std::int32_t x) {
    std::int8_t four[4];
    std::memcpy(four, &x, 4);
    for (int i = 0; i < kWidth; i++)
        for (int k = 0; k < 4; k++) acc.v[i] += (w.v[4 * i + k] - offset) * four[k];
    return acc;
}

// Bytes w + 128.
struct Signed {
    Step bytes;
    explicit Signed(const Step& s) : bytes(s) {}
    static I16 start(std::int32_t) { return I16::set(0); }
};
inline I16 add_dot(const I16& acc, const Signed& w, std::int32_t x) { return add_products(acc, w.bytes, 128, x); }

// Sums of products with nibbles.
struct NibbleSums {
    I16 v;
    static NibbleSums zero() { return {I16::set(0)}; }
    I16 total() const { return v; }
};
inline NibbleSums add_dot(const NibbleSums& acc, const Step& w, std::int32_t x) {
    return {add_products(acc.v, w, 0, x)};
}

#endif

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
