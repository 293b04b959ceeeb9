// y = x W^T + b with W packed as int8 or int4 (engine/packed_weight.py), and x rounded to int8 here.
//
// Order: x is rounded per row and group of 32 on the k axis. The products of a group are summed as whole numbers,
// exactly. An output is the sum over rising groups of  float(dot) * (scale of x * scale of W), each followed, where W
// has minima, by (float(sum of x) * scale of x) * minimum; every multiplication and addition is rounded by itself. Then
// the bias. It is the order of the twin in engine/reference.py, bit for bit, on every instruction set.
#pragma once

#include "dot.h"
#include "linear.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

// Rows of x that stay in registers.
#if defined(__AVX512F__)
constexpr int kQuantisedRows = 8;
#else
constexpr int kQuantisedRows = 4;
#endif
constexpr Index kGroup = kQuantisedGroup;
constexpr float kLeastMagnitude = 1e-30f;  // smaller x count as 0: 127 / x would overflow

// Sixteen float16 as floats.
inline F16 load_halves(const std::uint16_t* p) {
#if defined(__AVX512F__)
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
#elif defined(__AVX2__)
    auto widen = [](const std::uint16_t* q) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
    };
    return {widen(p), widen(p + 8)};
#else
    return F16::make([&](int i) {
        std::uint32_t rest = p[i] & 0x7fff;
        float size = std::ldexp(float(rest), -24);  // right below the normal numbers
        if (rest >= 0x400) {
            rest = rest < 0x7c00 ? (rest << 13) + (112u << 23) : (rest << 13) | 0x7f800000;
            std::memcpy(&size, &rest, 4);
        }
        return p[i] & 0x8000 ? -size : size;
    });
#endif
}

// One group of x: values = round(x / scale), ties to even, with scale = max |x| / 127; `total` is the sum of the
// values.
inline void quantise_group(const float* x, std::int8_t* values, float* scale, std::int32_t* total) {
    std::uint32_t largest = 0;  // magnitudes compare as whole numbers, and what is no number as more than all of them
    for (Index i = 0; i < kGroup; i++) {
        std::uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float magnitude;
    std::memcpy(&magnitude, &largest, 4);
    float inverse = magnitude >= kLeastMagnitude ? 127.0f / magnitude : 0.0f;
    constexpr float magic =
        12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which stands in the low bits
    std::int32_t sum = 0;
    for (Index i = 0; i < kGroup; i++) {
        float shifted = x[i] * inverse + magic;
        std::uint32_t bits;
        std::memcpy(&bits, &shifted, 4);
        values[i] = std::int8_t(bits);
        sum += values[i];
    }
    *scale = magnitude / 127.0f;
    *total = sum;
}

// A row of x, filled up with zeros to whole groups.
inline void quantise_row(const float* x, Index in, std::int8_t* values, float* scales, std::int32_t* sums) {
    Index whole = in / kGroup;
    for (Index g = 0; g < whole; g++) quantise_group(x + g * kGroup, values + g * kGroup, scales + g, sums + g);
    if (whole * kGroup == in) return;
    float rest[kGroup] = {};
    std::memcpy(rest, x + whole * kGroup, (in - whole * kGroup) * sizeof(float));
    quantise_group(rest, values + whole * kGroup, scales + whole, sums + whole);
}

// dots: of one group of sixteen outputs with R rows from `row` on.
struct Int8 {
    static constexpr Index kBytes = kGroup * kWidth;

    template <int R>
    static void dots(const std::uint8_t* w, const QuantisedRows& x, Index row, Index group, bool, I16 (&result)[R]) {
        const std::int8_t* values = x.values + (row * x.groups + group) * kGroup;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) result[r] = Signed::start(x.sums[(row + r) * x.groups + group]);
#pragma GCC unroll 8
        for (int k = 0; k < kGroup; k += 4) {
            Signed step(Step::load(w + k * kWidth));
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                result[r] = add_dot(result[r], step, load_four(values + r * x.groups * kGroup + k));
        }
    }
};

// centred: 0 stands for -8.
struct Int4 {
    static constexpr Index kBytes = kGroup * kWidth / 2;

    template <int R>
    static void dots(const std::uint8_t* w, const QuantisedRows& x, Index row, Index group, bool centred,
                     I16 (&result)[R]) {
        const std::int8_t* values = x.values + (row * x.groups + group) * kGroup;
        NibbleSums sums[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] = NibbleSums::zero();
#pragma GCC unroll 4
        for (int k = 0; k < kGroup; k += 8) {
            Step pair = Step::load(w + k * kWidth / 2), low = pair.low_nibbles(), high = pair.high_nibbles();
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const std::int8_t* from = values + r * x.groups * kGroup + k;
                sums[r] = add_dot(add_dot(sums[r], low, load_four(from)), high, load_four(from + 4));
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
            result[r] = sums[r].total() - I16::set(centred ? 8 * x.sums[(row + r) * x.groups + group] : 0);
    }
};

// total[r] = sixteen outputs of row row + r, without the bias.
template <class Weights, int R>
void quantised_sums(const PackedWeight& w, const QuantisedRows& x, Index panel, Index row, F16 (&total)[R]) {
    const std::uint8_t* values = w.values + panel * x.groups * Weights::kBytes;
    const std::uint16_t* scales = w.scales + panel * w.scale_groups * kWidth;
    const std::uint16_t* minima = w.minima ? w.minima + panel * w.scale_groups * kWidth : nullptr;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r] = F16::zero();
    for (Index g = 0; g < x.groups; g++) {
        I16 dots[R];
        Weights::dots(values + g * Weights::kBytes, x, row, g, minima == nullptr, dots);
        F16 scale = load_halves(scales + (g >> w.scale_shift) * kWidth);
        const float* x_scales = x.scales + row * x.groups + g;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
            total[r] = total[r] + to_floats(dots[r]) * (F16::set(x_scales[r * x.groups]) * scale);
        if (!minima) continue;
        F16 minimum = load_halves(minima + (g >> w.scale_shift) * kWidth);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            float sum = float(x.sums[(row + r) * x.groups + g]) * x_scales[r * x.groups];
            total[r] = total[r] + F16::set(sum) * minimum;
        }
    }
}

template <int R>
void quantised_sums(const PackedWeight& w, const QuantisedRows& x, Index panel, Index row, F16 (&total)[R]) {
    if (w.bits == 8)
        quantised_sums<Int8, R>(w, x, panel, row, total);
    else
        quantised_sums<Int4, R>(w, x, panel, row, total);
}

// The outputs 16 panel .. 16 panel + 15 of rows first .. last of layer l.
inline void quantised_panel(const LinearCall& c, const QuantisedRows& x, Index l, Index panel, Index first,
                            Index last) {
    bool pair = layers_at_once(c) == 2;
    for (Index row = first; row < last; row += kQuantisedRows)
        with_rows<kQuantisedRows>(smaller(kQuantisedRows, last - row), [&](auto count) {
            constexpr int R = decltype(count)::value;
            F16 total[R], others[R] = {};
            quantised_sums<R>(c.layers[l].packed, x, panel, row, total);
            if (pair) quantised_sums<R>(c.layers[l + 1].packed, x, panel, row, others);
            for (int r = 0; r < R; r++) finish_outputs(c, l, row + r, panel * kWidth, total[r], others[r]);
        });
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
