// The logarithm of the sum of exponentials of a row.
//
// Order: the row is cut into tiles of kVocabularyTile; a tile gives its largest element and the sum of e^(x - largest),
// by lane over rising elements, then the lanes by halving. The row's largest is that of the tiles; their sums, scaled
// to it, are added in order.
#pragma once

#include "math.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

// also(e, d): takes e^(x - largest) and x - largest of sixteen elements; e is 0 beyond the tile.
template <class Also>
inline TileSum tile_sum(const float* x, Index n, Also also) {
    F16 lowest = F16::set(-INFINITY), top = lowest, sums = F16::zero();
    Index whole = n / kWidth * kWidth, rest = n - whole;
    for (Index i = 0; i < whole; i += kWidth) top = maximum(top, F16::load(x + i));
    if (rest) top = maximum(top, keep_first(load_first(x + whole, rest), rest, lowest));
    float highest = largest(top);
    top = F16::set(highest == -INFINITY ? 0.0f : highest);  // -inf - -inf would not be a number
    auto add = [&](F16 e, F16 d) {
        sums = sums + e;
        also(e, d);
    };
    for (Index i = 0; i < whole; i += kWidth) {
        F16 d = F16::load(x + i) - top;
        add(exp(d), d);
    }
    if (rest) {
        F16 d = load_first(x + whole, rest) - top;
        add(keep_first(exp(d), rest, F16::zero()), d);
    }
    return {highest, sum(sums)};
}

inline float fold_sums(const TileSum* tiles, Index count) {
    float top = tiles[0].top;
    for (Index i = 1; i < count; i++) top = tiles[i].top > top ? tiles[i].top : top;
    float total = 0.0f;
    for (Index i = 0; i < count; i++)
        total = std::fma(tiles[i].sum, tiles[i].top == -INFINITY ? 1.0f : exp(tiles[i].top - top), total);
    return float(double(top) + std::log(double(total)));
}

// tiles: scratch for rows * (n / kVocabularyTile, rounded up).
inline void log_sum_exp(const float* x, Index x_stride, float* out, TileSum* tiles, Index rows, Index n) {
    Index each = (n + kVocabularyTile - 1) / kVocabularyTile;
    share_evenly(rows * each, rows * n > 8192, [&](Index i) {
        Index start = i % each * kVocabularyTile;
        tiles[i] = tile_sum(x + i / each * x_stride + start, smaller(kVocabularyTile, n - start), [](F16, F16) {});
    });
    share_evenly(rows, false, [&](Index r) { out[r] = fold_sums(tiles + r * each, each); });
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
