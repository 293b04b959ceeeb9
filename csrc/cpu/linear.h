// y = x W^T + b with W in the checkpoint's [out, in] rows, read in place.
//
// Order: the `in` axis is cut into blocks of kBlock; within a block an output is one FMA chain over rising k that
// starts at 0; the block sums are added in order, then the bias. Lanes are outputs, so no two terms of a sum meet in
// another order, however many rows, threads or vector registers there are. Two forms keep it:
//   few rows   sixteen rows of W at a time are transposed in registers and used at once: W is read once, nothing is
//   stored; many rows  a block of W is transposed into a thread's buffer and used for all rows of x.
#pragma once

#include "transpose.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

constexpr Index kBlock = 256;

// Many rows: rows x vectors of outputs that stay in registers. Few rows: rows in registers, and the most rows of that
// form.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTileVectors = 2, kPassRows = 8, kFewRows = 24;
#else
constexpr int kTileRows = 6, kTileVectors = 1, kPassRows = 4, kFewRows = 8;
#endif
constexpr Index kPanel = kTileVectors * kWidth;  // outputs of a tile
constexpr Index kTaskOutputs = 192, kTaskRows = 384;
constexpr Index kPanelAhead = 8;  // columns of a panel that the cache is asked for in advance: they come from L2

// Pointers to sixteen rows of W from row n on; beyond the last one they repeat it, and nobody looks at the results.
template <class T>
inline void row_pointers(const T* w, Index in, Index out, Index n, const T* (&rows)[kWidth]) {
    for (Index j = 0; j < kWidth; j++) rows[j] = w + smaller(n + j, out - 1) * in;
}

template <class T>
inline F16 load_bias(const T* bias, Index valid) {
    return valid == kWidth ? F16::load(bias) : load_first(bias, valid);
}

inline F16 load_bias(const void* bias, bool is_bf16, Index n, Index out) {
    Index valid = smaller(kWidth, out - n);
    return is_bf16 ? load_bias(static_cast<const BFloat16*>(bias) + n, valid)
                   : load_bias(static_cast<const float*>(bias) + n, valid);
}

inline void store_outputs(F16 v, float* y, Index valid) {
    if (valid == kWidth)
        v.store(y);
    else
        store_first(v, y, valid);
}

// ---- few rows ----

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

// Sixteen outputs of R rows.
template <int R, class T>
inline void few_rows_group(const float* x, Index x_stride, const T* const (&rows)[kWidth], Index in, F16 (&total)[R]) {
    constexpr Index depth = Block<T>::kDepth;
    for (Index start = 0; start < in; start += kBlock) {
        Index end = smaller(start + kBlock, in), k = start;
        F16 acc[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r] = F16::zero();
        for (; k + depth <= end; k += depth) {
            F16 t[kWidth];
            load_transposed(rows, k, t, kWidth * in);
            advance<R, T>(x + k, x_stride, t, acc);
        }
        if (k < end) advance_rest<R, T>(x, x_stride, rows, k, end - k, acc);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) total[r] = start == 0 ? acc[r] : total[r] + acc[r];
    }
}

struct LinearCall {
    const float* x;
    Index x_stride;
    const void* weight;
    const void* bias;
    bool bias_bf16;
    float* y;
    Index rows, in, out;
};

// Sixteen outputs, from n on, of rows m .. m + R.
template <int R, class T>
void few_rows_task(const LinearCall& c, const T* const (&weight_rows)[kWidth], Index m, Index n) {
    F16 total[R] = {};
    few_rows_group<R, T>(c.x + m * c.x_stride, c.x_stride, weight_rows, c.in, total);
    F16 bias = c.bias ? load_bias(c.bias, c.bias_bf16, n, c.out) : F16::zero();
    for (int r = 0; r < R; r++)
        store_outputs(c.bias ? total[r] + bias : total[r], c.y + (m + r) * c.out + n, smaller(kWidth, c.out - n));
}

template <int R, class T>
void few_rows_dispatch(const LinearCall& c, const T* const (&weight_rows)[kWidth], Index m, Index n, Index rows) {
    if (rows == R)
        few_rows_task<R, T>(c, weight_rows, m, n);
    else if constexpr (R > 1)
        few_rows_dispatch<R - 1, T>(c, weight_rows, m, n, rows);
}

template <class T>
void linear_few_rows(const LinearCall& c) {
#pragma omp parallel for schedule(static) if (c.out * c.in > 65536)
    for (Index n = 0; n < c.out; n += kWidth) {
        const T* weight_rows[kWidth];
        row_pointers(static_cast<const T*>(c.weight), c.in, c.out, n, weight_rows);
        for (Index m = 0; m < c.rows; m += kPassRows)
            few_rows_dispatch<kPassRows, T>(c, weight_rows, m, n, smaller(kPassRows, c.rows - m));
    }
}

// ---- many rows ----

// panel[k][lane]: `vectors` groups of sixteen rows of W from row n on, columns start .. start + depth, transposed.
template <class T>
void fill_panel(const T* w, Index in, Index out, Index n, Index start, Index depth, float* panel) {
    constexpr Index step = Block<T>::kDepth;
    for (int group = 0; group < kTileVectors; group++) {
        const T* rows[kWidth];
        row_pointers(w, in, out, n + group * kWidth, rows);
        float* to = panel + group * kWidth;
        F16 t[kWidth];
        Index k = 0;
        for (; k + step <= depth; k += step) {
            load_transposed(rows, start + k, t, kWidth * in);
#pragma GCC unroll 32
            for (int i = 0; i < step; i++) Block<T>::column(t, i).store(to + (k + i) * kPanel);
        }
        if (k < depth) {
            load_transposed_rest(rows, start + k, depth - k, t);
            for (int i = 0; i < depth - k; i++) Block<T>::column(t, i).store(to + (k + i) * kPanel);
        }
    }
}

inline void add_outputs(F16 v, float* y, Index valid, bool first) {
    if (valid >= kWidth)
        (first ? v : F16::load(y) + v).store(y);
    else if (valid > 0)
        store_first(first ? v : load_first(y, valid) + v, y, valid);
}

// R rows x one panel over one block of k. x: R rows, kBlock apart. Adds to y, or with `first` sets it.
template <int R>
void tile(const float* x, const float* panel, Index depth, float* y, Index y_stride, Index valid, bool first) {
    F16 acc[R][kTileVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++) acc[r][v] = F16::zero();
    for (Index k = 0; k < depth; k++) {
        F16 w[kTileVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++) w[v] = F16::load(panel + k * kPanel + v * kWidth);
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++) __builtin_prefetch(panel + (k + kPanelAhead) * kPanel + v * kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            F16 value = F16::set(x[r * kBlock + k]);
#pragma GCC unroll 2
            for (int v = 0; v < kTileVectors; v++) acc[r][v] = fma(value, w[v], acc[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++)
            add_outputs(acc[r][v], y + r * y_stride + v * kWidth, valid - v * kWidth, first);
}

using TileFunction = void (*)(const float*, const float*, Index, float*, Index, Index, bool);

template <int R>
TileFunction tile_of(Index rows) {
    if constexpr (R == 0)
        return nullptr;
    else
        return rows == R ? tile<R> : tile_of<R - 1>(rows);
}

// Rows of x into a tile's buffer; asks the cache for as many of the `more` rows that follow.
inline void copy_rows(const float* x, Index x_stride, Index rows, Index depth, float* to, Index more) {
    for (Index r = 0; r < rows; r++) {
        std::memcpy(to + r * kBlock, x + r * x_stride, depth * sizeof(float));
        if (r >= more) continue;
        for (Index k = 0; k < depth; k += kWidth) __builtin_prefetch(x + (rows + r) * x_stride + k, 0, 2);
    }
}

// The outputs n0 .. n1 of rows m0 .. m1.
template <class T>
void linear_task(const LinearCall& c, Index m0, Index m1, Index n0, Index n1) {
    alignas(64) float panels[kTaskOutputs * kBlock];
    alignas(64) float x[kTileRows * kBlock];
    for (Index start = 0; start < c.in; start += kBlock) {
        Index depth = smaller(kBlock, c.in - start);
        for (Index n = n0; n < n1; n += kPanel)
            fill_panel(static_cast<const T*>(c.weight), c.in, c.out, n, start, depth, panels + (n - n0) * kBlock);
        for (Index m = m0; m < m1; m += kTileRows) {
            Index rows = smaller(kTileRows, m1 - m);
            copy_rows(c.x + m * c.x_stride + start, c.x_stride, rows, depth, x, m1 - m - rows);
            TileFunction function = tile_of<kTileRows>(rows);
            for (Index n = n0; n < n1; n += kPanel)
                function(x, panels + (n - n0) * kBlock, depth, c.y + m * c.out + n, c.out, c.out - n, start == 0);
        }
    }
    if (!c.bias) return;
    for (Index m = m0; m < m1; m++)
        for (Index n = n0; n < n1; n += kWidth) {
            Index valid = smaller(kWidth, c.out - n);
            float* to = c.y + m * c.out + n;
            F16 sum =
                (valid == kWidth ? F16::load(to) : load_first(to, valid)) + load_bias(c.bias, c.bias_bf16, n, c.out);
            store_outputs(sum, to, valid);
        }
}

template <class T>
void linear_many_rows(const LinearCall& c) {
    Index across = (c.out + kTaskOutputs - 1) / kTaskOutputs, down = (c.rows + kTaskRows - 1) / kTaskRows;
#pragma omp parallel for schedule(dynamic, 1)
    for (Index task = 0; task < across * down; task++) {
        Index n = task % across * kTaskOutputs, m = task / across * kTaskRows;
        linear_task<T>(c, m, smaller(m + kTaskRows, c.rows), n, smaller(n + kTaskOutputs, c.out));
    }
}

template <class T>
void linear_rows(const LinearCall& c) {
    if (c.rows <= kFewRows)
        linear_few_rows<T>(c);
    else
        linear_many_rows<T>(c);
}

inline void linear(const float* x, Index x_stride, const void* weight, bool weight_bf16, const void* bias,
                   bool bias_bf16, float* y, Index rows, Index in, Index out) {
    LinearCall call{x, x_stride, weight, bias, bias_bf16, y, rows, in, out};
    if (weight_bf16)
        linear_rows<BFloat16>(call);
    else
        linear_rows<float>(call);
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
