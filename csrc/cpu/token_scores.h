// What a loss needs of rows of logits: the log-probability of one token each and the entropy; and their gradient.
//
// Order: the sum of exponentials is that of log_sum_exp.h, bit for bit; the entropy's sum takes the same tiles and
// lanes, and its tiles are added in order in double precision.
#pragma once

#include "elementwise.h"
#include "log_sum_exp.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

constexpr float kLowestExponent = -87.3f;  // where exp ends: -inf times 0 would not be a number

inline void divide(float* x, float by, Index n) {
    F16 divisor = F16::set(by);
    Index i = 0;
    for (; i + kWidth <= n; i += kWidth) (F16::load(x + i) / divisor).store(x + i);
    if (i < n) store_first(load_first(x + i, n - i) / divisor, x + i, n - i);
}

// log(sum) - mean of (x - top), with x the logits, weighted by e^(x - top).
inline float fold_entropy(const TileSum* tiles, const float* weighted, Index count) {
    float top = tiles[0].top;
    for (Index i = 1; i < count; i++) top = tiles[i].top > top ? tiles[i].top : top;
    double total = 0.0, moment = 0.0;
    for (Index i = 0; i < count; i++) {
        if (tiles[i].top == -INFINITY) continue;
        double below = double(tiles[i].top) - double(top), scale = std::exp(below);
        total += scale * tiles[i].sum;
        moment += scale * (weighted[i] + below * tiles[i].sum);
    }
    return float(std::log(total) - moment / total);
}

inline void token_scores(const TokenScoresCall& c, TileSum* tiles, float* weighted) {
    Index each = (c.n + kVocabularyTile - 1) / kVocabularyTile;
    share_evenly(c.rows * each, c.rows * c.n > kSerial, [&](Index i) {
        Index start = i % each * kVocabularyTile, some = smaller(kVocabularyTile, c.n - start);
        float* x = c.logits + i / each * c.n + start;
        if (c.temperature != 1.0f) divide(x, c.temperature, some);
        F16 moments = F16::zero(), lowest = F16::set(kLowestExponent);
        tiles[i] = tile_sum(x, some, [&](F16 e, F16 d) { moments = fma(e, maximum(lowest, d), moments); });
        weighted[i] = sum(moments);
    });
    share_evenly(c.rows, false, [&](Index r) {
        c.log_sums[r] = fold_sums(tiles + r * each, each);
        c.logprobs[r] = c.logits[r * c.n + c.targets[r]] - c.log_sums[r];
        c.entropies[r] = fold_entropy(tiles + r * each, weighted + r * each, each);
    });
}

// With p the softmax of the scaled logits z and H its entropy: d logprob / dz = onehot - p, dH / dz = -p (log p + H).
inline void token_scores_grad(const TokenScoresCall& c, const float* logprob_grads, const float* entropy_grads) {
    Index each = (c.n + kVocabularyTile - 1) / kVocabularyTile;
    share_evenly(c.rows * each, c.rows * c.n > kSerial, [&](Index i) {
        Index r = i / each, start = i % each * kVocabularyTile, some = smaller(kVocabularyTile, c.n - start);
        float* x = c.logits + r * c.n + start;
        float of_logprob = logprob_grads[r] / c.temperature;
        F16 by_logprob = F16::set(of_logprob), by_entropy = F16::set(entropy_grads[r] / c.temperature);
        F16 log_sum = F16::set(c.log_sums[r]), entropy = F16::set(c.entropies[r]), lowest = F16::set(kLowestExponent);
        auto gradient = [&](F16 z) {
            F16 log_p = maximum(lowest, z - log_sum);
            return (F16::zero() - exp(log_p)) * fma(by_entropy, log_p + entropy, by_logprob);
        };
        Index k = 0;
        for (; k + kWidth <= some; k += kWidth) gradient(F16::load(x + k)).store(x + k);
        if (k < some) store_first(gradient(load_first(x + k, some - k)), x + k, some - k);
        Index target = c.targets[r] - start;
        if (target >= 0 && target < some) x[target] += of_logprob;
    });
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
