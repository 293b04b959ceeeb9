// A tile of outputs in registers: rows of x from memory, columns from a panel.
#pragma once

#include "chains.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

constexpr Index kPanelAhead = 8;  // columns of a panel that the cache is asked for in advance: they come from L2

inline void add_outputs(F16 v, float* y, Index valid, bool first) {
    if (valid >= kWidth)
        (first ? v : F16::load(y) + v).store(y);
    else if (valid > 0)
        store_first(first ? v : load_first(y, valid) + v, y, valid);
}

// R rows x one panel over one block of k. x: R rows, x_stride apart. Adds to y, or with `first` sets it.
template <int R>
void tile(const float* x, Index x_stride, const float* panel, Index depth, float* y, Index y_stride, Index valid,
          bool first) {
    F16 acc[R][kTileVectors];
    set_zero(acc);
    auto load = [panel](Index k, F16(&w)[kTileVectors]) {
        const float* column = panel + k * kPanel;
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++) {
            w[v] = F16::load(column + v * kWidth);
            __builtin_prefetch(column + kPanelAhead * kPanel + v * kWidth);
        }
    };
    panel_chains(x, x_stride, 0, depth, load, acc);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++)
            add_outputs(acc[r][v], y + r * y_stride + v * kWidth, valid - v * kWidth, first);
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
