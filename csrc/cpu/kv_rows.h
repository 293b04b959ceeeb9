// A token's row in the pages of keys or values: head_dim elements, and with int8 their float32 scale behind them.
#pragma once

#include "vec.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

// Calls function(T{}) with the element type of the pages.
template <class Function>
inline void with_kv_type(KvType type, Function function) {
    if (type == KvType::float32) return function(float{});
    if (type == KvType::bfloat16) return function(BFloat16{});
    function(KvInt8{});
}

// Elements that a row takes.
template <class T>
inline Index row_size(Index head_dim) {
    return head_dim;
}
template <>
inline Index row_size<KvInt8>(Index head_dim) {
    return head_dim + Index(sizeof(float));
}

inline float row_scale(const KvInt8* row, Index head_dim) {
    float scale;
    std::memcpy(&scale, row + head_dim, sizeof scale);
    return scale;
}

inline void write_row(const float* x, float* row, Index head_dim) { std::memcpy(row, x, head_dim * sizeof(float)); }
inline void write_row(const float* x, BFloat16* row, Index head_dim) {
    for (Index i = 0; i < head_dim; i++) row[i] = to_bfloat16(x[i]);
}

// codes = x * (127 / largest) to the nearest whole number, ties to even, 0 where the largest magnitude is below 1e-30;
// scale = largest / 127. As the twin in engine/kv_rows.py, bit for bit.
inline void write_row(const float* x, KvInt8* row, Index head_dim) {
    std::uint32_t largest = 0;  // magnitudes compare as whole numbers, and what is no number as more than all of them
    for (Index i = 0; i < head_dim; i++) {
        std::uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float magnitude;
    std::memcpy(&magnitude, &largest, 4);
    float inverse = magnitude >= 1e-30f ? 127.0f / magnitude : 0.0f, scale = magnitude / 127.0f;
    constexpr float magic =
        12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which stands in the low bits
    for (Index i = 0; i < head_dim; i++) {
        float shifted = x[i] * inverse + magic;
        std::uint32_t bits;
        std::memcpy(&bits, &shifted, 4);
        row[i].code = std::int8_t(bits);
    }
    std::memcpy(row + head_dim, &scale, sizeof scale);
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
