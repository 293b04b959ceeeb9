// Sixteen vectors of sixteen 32-bit elements, rows to columns, in registers.
#pragma once

#include "vec.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

#if defined(__AVX512F__)

inline void transpose(F16 (&r)[kWidth]) {
    __m512 t[kWidth];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
        t[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
    }
    auto low = [&](int a, int b) {
        return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[a]), _mm512_castps_pd(t[b])));
    };
    auto high = [&](int a, int b) {
        return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[a]), _mm512_castps_pd(t[b])));
    };
    __m512 u[kWidth];  // u[4 i + j] holds in its 128-bit lane l the rows 4 i .. 4 i + 3 of column 4 l + j
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        u[i] = low(i, i + 2);
        u[i + 1] = high(i, i + 2);
        u[i + 2] = low(i + 1, i + 3);
        u[i + 3] = high(i + 1, i + 3);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512 even_top = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88),
               odd_top = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xdd);
        __m512 even_bottom = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88),
               odd_bottom = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xdd);
        r[j].v = _mm512_shuffle_f32x4(even_top, even_bottom, 0x88);
        r[4 + j].v = _mm512_shuffle_f32x4(odd_top, odd_bottom, 0x88);
        r[8 + j].v = _mm512_shuffle_f32x4(even_top, even_bottom, 0xdd);
        r[12 + j].v = _mm512_shuffle_f32x4(odd_top, odd_bottom, 0xdd);
    }
}

#elif defined(__AVX2__)

inline void transpose8(__m256 (&r)[8]) {
    __m256 t[8], u[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        r[j] = _mm256_permute2f128_ps(u[j], u[j + 4], 0x20);
        r[j + 4] = _mm256_permute2f128_ps(u[j], u[j + 4], 0x31);
    }
}

inline void transpose(F16 (&r)[kWidth]) {
    __m256 block[4][8];  // rows 0..7 left and right, rows 8..15 left and right
    for (int i = 0; i < 8; i++) {
        block[0][i] = r[i].lo, block[1][i] = r[i].hi;
        block[2][i] = r[8 + i].lo, block[3][i] = r[8 + i].hi;
    }
    for (auto& b : block) transpose8(b);
    for (int i = 0; i < 8; i++) {
        r[i] = {block[0][i], block[2][i]};
        r[8 + i] = {block[1][i], block[3][i]};
    }
}

#else

inline void transpose(F16 (&r)[kWidth]) {
    for (int i = 0; i < kWidth; i++)
        for (int j = 0; j < i; j++) {
            float swap = r[i].v[j];
            r[i].v[j] = r[j].v[i];
            r[j].v[i] = swap;
        }
}

#endif

// How many elements of one weight row fill a vector, and the columns that a transposed block of them holds.
template <class T>
struct Block;

template <>
struct Block<float> {
    static constexpr int kDepth = kWidth;
    static F16 column(const F16 (&t)[kWidth], int k) { return t[k]; }
};

template <>
struct Block<BFloat16> {
    static constexpr int kDepth = 2 * kWidth;
    static F16 column(const F16 (&t)[kWidth], int k) { return k % 2 == 0 ? widen_low(t[k / 2]) : widen_high(t[k / 2]); }
};

// How many elements further on the cache is asked for a block: the hardware sees sixteen short streams and fetches too
// little by itself. Twice, as a core drops requests while too many are under way.
struct Ahead {
    Index far, near;
};

// (Not a call: gcc 12 drops calls of functions that do nothing but prefetch.)
template <int R, class T>
__attribute__((always_inline)) inline void prefetch_rows(const T* const* rows, Index k, Index ahead) {
#pragma GCC unroll 16
    for (int j = 0; j < R; j++) __builtin_prefetch(rows[j] + k + ahead, 0, 2);
}

template <int R, class T>
__attribute__((always_inline)) inline void prefetch_rows(const T* const* rows, Index k, Ahead ahead) {
    prefetch_rows<R>(rows, k, ahead.far);
    prefetch_rows<R>(rows, k, ahead.near);
}

// A block of sixteen rows, transposed: rows[j][k .. k + kDepth) becomes lane j of the columns. ahead: an Index or
// Ahead.
template <class T, class Distance>
inline void load_transposed(const T* const (&rows)[kWidth], Index k, F16 (&t)[kWidth], Distance ahead) {
    prefetch_rows<kWidth>(rows, k, ahead);
#pragma GCC unroll 16
    for (int j = 0; j < kWidth; j++) t[j] = F16::load(reinterpret_cast<const float*>(rows[j] + k));
    transpose(t);
}

// The same for the last `rest` < kDepth columns of the rows; what lies beyond them is 0.
template <class T>
inline void load_transposed_rest(const T* const (&rows)[kWidth], Index k, Index rest, F16 (&t)[kWidth]) {
    T block[kWidth][Block<T>::kDepth] = {};
    const T* copies[kWidth];
    for (int j = 0; j < kWidth; j++) {
        std::memcpy(block[j], rows[j] + k, rest * sizeof(T));
        copies[j] = block[j];
    }
    load_transposed(copies, 0, t, Index(0));
}

// Eight columns of sixteen rows, 32 bits wide, and how many columns of elements those are. A smaller block than above:
// while one is multiplied the next is transposed.
template <class T>
struct Columns;

template <>
struct Columns<float> {
    static constexpr int kDepth = 8;
    static F16 column(const F16 (&t)[8], int k) { return t[k]; }
};

template <>
struct Columns<BFloat16> {
    static constexpr int kDepth = 16;
    static F16 column(const F16 (&t)[8], int k) { return k % 2 == 0 ? widen_low(t[k / 2]) : widen_high(t[k / 2]); }
};

template <>
struct Columns<KvInt8> {
    static constexpr int kDepth = 32;
    static F16 column(const F16 (&t)[8], int k) {
        F16 four = t[k / 4];
        return k % 4 == 0   ? widen_byte<0>(four)
               : k % 4 == 1 ? widen_byte<1>(four)
               : k % 4 == 2 ? widen_byte<2>(four)
                            : widen_byte<3>(four);
    }
};

// rows[j][k .. k + kDepth) becomes lane j of the columns.
template <class T>
inline void load_columns(const T* const (&rows)[kWidth], Index k, F16 (&t)[8]) {
    auto at = [&](int j) { return reinterpret_cast<const float*>(rows[j] + k); };
#if defined(__AVX512F__)
    __m512 u[2][4];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        auto pair = [&](int j) {
            __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps(at(8 * half + j)));
            return _mm512_insertf32x8(low, _mm256_loadu_ps(at(8 * half + 4 + j)), 1);
        };
        __m512 a = pair(0), b = pair(1), c = pair(2), d = pair(3);
        __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
        __m512d ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        __m512d cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
        // u[half][i]: column i of rows 0 .. 3, column 4 + i of the same, and both of rows 4 .. 7
        u[half][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
        u[half][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
        u[half][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high));
        u[half][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i].v = _mm512_shuffle_f32x4(u[0][i], u[1][i], 0x88);
        t[4 + i].v = _mm512_shuffle_f32x4(u[0][i], u[1][i], 0xdd);
    }
#elif defined(__AVX2__)
    __m256 low[8], high[8];
    for (int i = 0; i < 8; i++) low[i] = _mm256_loadu_ps(at(i)), high[i] = _mm256_loadu_ps(at(8 + i));
    transpose8(low);
    transpose8(high);
    for (int i = 0; i < 8; i++) t[i] = {low[i], high[i]};
#else
    for (int j = 0; j < kWidth; j++)
        for (int i = 0; i < 8; i++) std::memcpy(&t[i].v[j], at(j) + i, 4);
#endif
}

// The same for the last `rest` < kDepth columns of the rows; what lies beyond them is 0.
template <class T>
inline void load_columns_rest(const T* const (&rows)[kWidth], Index k, Index rest, F16 (&t)[8]) {
    T block[kWidth][Columns<T>::kDepth] = {};
    const T* copies[kWidth];
    for (int j = 0; j < kWidth; j++) {
        std::memcpy(block[j], rows[j] + k, rest * sizeof(T));
        copies[j] = block[j];
    }
    load_columns(copies, 0, t);
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
