// The two shapes in which a sum of products is taken, and the one order that both keep.
//
// Order: the k axis is cut into blocks of kBlock; within a block a sum is one FMA chain over rising k that starts at 0;
// the block sums are added in order. Lanes are outputs, so no two terms of a sum meet in another order, however many
// rows, threads or vector registers there are.
#pragma once

#include "transpose.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

constexpr Index kBlock = 256;

// Rows of x that stay in registers: with columns that are transposed there, and with columns from a panel.
#if defined(__AVX512F__)
constexpr int kPassRows = 8, kTileRows = 12, kTileVectors = 2;
#else
constexpr int kPassRows = 4, kTileRows = 6, kTileVectors = 1;
#endif
constexpr Index kPanel = kTileVectors * kWidth;  // outputs of a tile

template <int R>
struct Count {
    static constexpr int value = R;
};

// Calls function(Count<rows>) for 1 <= rows <= R: the number of rows is a constant in the innermost loops.
template <int R, class Function>
inline void with_rows(Index rows, Function function) {
    if (rows == R)
        function(Count<R>{});
    else if constexpr (R > 1)
        with_rows<R - 1>(rows, function);
}

// acc[r] continues its chain over columns k .. k + count of the transposed block.
template <int R, class T>
inline void advance(const float* x, Index x_stride, const F16 (&t)[kWidth], F16 (&acc)[R]) {
#pragma GCC unroll 32
    for (int k = 0; k < Block<T>::kDepth; k++) {
        F16 column = Block<T>::column(t, k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r] = fma(F16::set(x[r * x_stride + k]), column, acc[r]);
    }
}

template <int R, class T>
__attribute__((noinline)) void advance_rest(const float* x, Index x_stride, const T* const (&rows)[kWidth], Index k,
                                            Index rest, F16 (&acc)[R]) {
    F16 t[kWidth];
    load_transposed_rest(rows, k, rest, t);
    for (int i = 0; i < rest; i++) {
        F16 column = Block<T>::column(t, i);
        for (int r = 0; r < R; r++) acc[r] = fma(F16::set(x[r * x_stride + k + i]), column, acc[r]);
    }
}

// total[r] = the sums over k of x[r][k] rows[j][k], one per lane j. ahead(k): what load_transposed asks for at column
// k.
template <int R, class T, class Ahead>
inline void sixteen_chains(const float* x, Index x_stride, const T* const (&rows)[kWidth], Index in, F16 (&total)[R],
                           Ahead ahead) {
    constexpr Index depth = Block<T>::kDepth;
    for (Index start = 0; start < in; start += kBlock) {
        Index end = smaller(start + kBlock, in), k = start;
        F16 acc[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r] = F16::zero();
        for (; k + depth <= end; k += depth) {
            F16 t[kWidth];
            load_transposed(rows, k, t, ahead(k));
            advance<R, T>(x + k, x_stride, t, acc);
        }
        if (k < end) advance_rest<R, T>(x, x_stride, rows, k, end - k, acc);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) total[r] = start == 0 ? acc[r] : total[r] + acc[r];
    }
}

// acc[r][v] continues its chain over k = from .. to of x[r][k] (rows x_stride apart) times column k, which load(k, w)
// puts in w.
template <int R, class Load>
inline void panel_chains(const float* x, Index x_stride, Index from, Index to, Load load, F16 (&acc)[R][kTileVectors]) {
#pragma GCC unroll 4
    for (Index k = from; k < to; k++) {
        F16 w[kTileVectors];
        load(k, w);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            F16 value = F16::set(x[r * x_stride + k]);
#pragma GCC unroll 2
            for (int v = 0; v < kTileVectors; v++) acc[r][v] = fma(value, w[v], acc[r][v]);
        }
    }
}

template <int R>
inline void set_zero(F16 (&acc)[R][kTileVectors]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++) acc[r][v] = F16::zero();
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
