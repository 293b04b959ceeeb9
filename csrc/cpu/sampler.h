// The passes over a row of logits that drawing a token takes. z = logits / temperature is made as it is needed.
#pragma once

#include "log_sum_exp.h"
#include "noise.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

constexpr Index kLook = 64;  // ids looked at together

// out[0 .. kLook) = z of the n logits that are there (at most kLook count); behind them -inf.
inline void look(const float* logits, Index n, float temperature, float* out) {
    if (n >= kLook) {
        for (Index i = 0; i < kLook; i++) out[i] = logits[i] / temperature;
    } else {
        for (Index i = 0; i < kLook; i++) out[i] = i < n ? logits[i] / temperature : -INFINITY;
    }
}

inline bool any_at_least(const float* x, float least) {
    std::int32_t any = 0;
    for (Index i = 0; i < kLook; i++) any |= x[i] >= least;
    return any;
}

// The largest z + noise of z[0 .. n), the ids from `first` on, whose largest z is `top`.
inline Candidate best_of_tile(const float* z, Index n, Index first, std::uint64_t key, float top) {
    Candidate best{-INFINITY, first};
    if (!(std::fabs(top) < INFINITY)) return best;  // nothing can be drawn here, or the row is in error
    float least = just_below(double(top) - 3.7);    // no noise is below -3.61
    float some[kLook], most[kLook];
    for (Index i = 0; i < n; i += kLook) {
        look(z + i, n - i, 1.0f, some);
        for (Index j = 0; j < kLook; j++) most[j] = some[j] + most_noise(noise_bits(key, first + i + j));
        if (!any_at_least(most, least)) continue;
        for (Index j = 0; j < kLook; j++) {
            if (!(most[j] >= least)) continue;
            double value = double(some[j]) + gumbel(noise_bits(key, first + i + j));
            if (value > best.value) {
                best = {value, first + i + j};
                least = just_below(value) > least ? just_below(value) : least;
            }
        }
    }
    return best;
}

inline DrawnTile draw_tile(const DrawRow& row, const float* logits, Index first, Index n) {
    float scaled[kVocabularyTile];
    const float* z = logits + first;
    if (row.temperature != 1) {
        for (Index i = 0; i < n; i++) scaled[i] = z[i] / row.temperature;
        z = scaled;
    }
    TileSum sum = tile_sum(z, n, [](F16, F16) {});
    return {sum, row.is_plain() ? best_of_tile(z, n, first, row.key, sum.top) : Candidate{-INFINITY, first}};
}

inline std::int64_t whole_mass(const DrawRow& row, const float* logits, Index n, float top) {
    std::int64_t total = 0;
    float z[kLook];
    for (Index i = 0; i < n; i += kLook) {
        look(logits + i, n - i, row.temperature, z);
        for (Index j = 0; j < kLook; j++) total += mass(double(z[j]) - double(top));
    }
    return total;
}

inline Index gather(const DrawRow& row, const float* logits, Index n, float floor, Ranked* found) {
    Index count = 0;
    float z[kLook];
    for (Index i = 0; i < n; i += kLook) {
        look(logits + i, n - i, row.temperature, z);
        if (!any_at_least(z, floor)) continue;
        for (Index j = 0; j < kLook && i + j < n; j++)
            if (z[j] >= floor) found[count++] = {z[j], i + j};
    }
    return count;
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
