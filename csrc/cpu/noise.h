// The noise of engine/noise.py, and the masses of engine/draw.py: every operation is rounded by itself, as there.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace palimpsest::cpu {
namespace {  // each translation unit keeps its own copy, for its instruction set

constexpr std::uint64_t kGamma = 0x9E3779B97F4A7C15;

[[maybe_unused]] inline std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

[[maybe_unused]] inline std::uint64_t noise_bits(std::uint64_t key, Index id) {
    return mix(key + kGamma * std::uint64_t(id + 1));
}

// No noise of these bits is larger, but for rounding (below 1e-4): -log(-log u) <= -log(1 - u), where 1 - u is at least
// h / 2^24, h the upper 24 bits inverted, and log2(2^e (1 + m)) >= e + m, which stand in exponent and mantissa of h as
// a float.
[[maybe_unused]] inline float most_noise(std::uint64_t bits) {
    constexpr float kLn2 = 0.69314718f;
    float h = float(std::int32_t(~bits >> 40));
    std::int32_t log2;
    std::memcpy(&log2, &h, 4);
    return kLn2 * (24.0f + 127.0f) - float(log2) * (kLn2 / 8388608.0f);
}

// Below any z + most_noise that could reach `best`.
[[maybe_unused]] inline float just_below(double best) {
    float value = float(best);
    return value - 1e-3f - 1e-6f * std::fabs(value);
}

// e^x * 2^38 as a whole number, for x <= 0.
[[maybe_unused]] inline std::int64_t mass(double x) {
    constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number, in the low bits
    x = x > -40.0 ? x : -40.0;
    double shifted = x * (1.0 / 0.6931471805599453094) + kMagic, n = shifted - kMagic;
    double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10, power = 1.0;
    for (int k = 11; k > 0; k--) power = power * r * (1.0 / k) + 1.0;
    std::int64_t bits;
    std::memcpy(&bits, &shifted, 8);
    bits = std::int64_t(std::uint64_t(bits + 1023 + 38) << 52);
    double scale;
    std::memcpy(&scale, &bits, 8);
    double rounded = power * scale + kMagic;
    std::memcpy(&bits, &rounded, 8);
    return bits - 0x4338000000000000;  // the bits of kMagic
}

}  // namespace
}  // namespace palimpsest::cpu
