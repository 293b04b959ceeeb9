// y = x W^T + b with W in the checkpoint's [out, in] rows, read in place.
//
// Order: that of chains.h over the `in` axis, then the bias. Two forms keep it:
//   few rows   sixteen rows of W at a time are transposed in registers and used at once: W is read once, nothing is
//   stored; many rows  a block of W is transposed into a thread's buffer and used for all rows of x.
#pragma once

#include "chains.h"
#include "team.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

#if defined(__AVX512F__)
constexpr int kFewRows = 24;
#else
constexpr int kFewRows = 8;
#endif
// Of the form for many rows: what one task computes at most, and the least rows worth a transposed copy of the weights.
constexpr Index kTaskOutputs = 192, kTaskRows = 384, kLeastTaskRows = 96;
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

struct LinearCall {
    const float* x;
    Index x_stride;
    const void* weight;
    const void* bias;
    bool bias_bf16;
    float* y;
    Index rows, in, out;
};

// ---- few rows ----

template <class T>
void linear_few_rows(const LinearCall& c) {
    share_evenly(divide_up(c.out, kWidth), c.out * c.in > 65536, [&](Index group) {
        Index n = group * kWidth;
        const T* weight_rows[kWidth];
        row_pointers(static_cast<const T*>(c.weight), c.in, c.out, n, weight_rows);
        F16 bias = c.bias ? load_bias(c.bias, c.bias_bf16, n, c.out) : F16::zero();
        for (Index m = 0; m < c.rows; m += kPassRows)
            with_rows<kPassRows>(smaller(kPassRows, c.rows - m), [&](auto count) {
                constexpr int R = decltype(count)::value;
                F16 total[R] = {};
                sixteen_chains<R, T>(c.x + m * c.x_stride, c.x_stride, weight_rows, c.in, total, kWidth * c.in);
                for (int r = 0; r < R; r++)
                    store_outputs(c.bias ? total[r] + bias : total[r], c.y + (m + r) * c.out + n,
                                  smaller(kWidth, c.out - n));
            });
    });
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
    set_zero(acc);
    auto load = [panel](Index k, F16(&w)[kTileVectors]) {
        const float* column = panel + k * kPanel;
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++) {
            w[v] = F16::load(column + v * kWidth);
            __builtin_prefetch(column + kPanelAhead * kPanel + v * kWidth);
        }
    };
    panel_chains(x, 0, depth, load, acc);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++)
            add_outputs(acc[r][v], y + r * y_stride + v * kWidth, valid - v * kWidth, first);
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
            with_rows<kTileRows>(rows, [&](auto count) {
                for (Index n = n0; n < n1; n += kPanel)
                    tile<decltype(count)::value>(x, panels + (n - n0) * kBlock, depth, c.y + m * c.out + n, c.out,
                                                 c.out - n, start == 0);
            });
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

// Cuts the work into enough tasks for all threads. (How it is cut does not show in the results.)
template <class T>
void linear_many_rows(const LinearCall& c) {
    Index wanted = 2 * max_threads();
    Index across = divide_up(c.out, kTaskOutputs);
    Index down = divide_up(c.rows, kTaskRows);
    if (across * down < wanted) down = larger(down, smaller(divide_up(wanted, across), c.rows / kLeastTaskRows));
    if (across * down < wanted) across = smaller(divide_up(wanted, down), divide_up(c.out, kPanel));
    Index task_outputs = divide_up(divide_up(c.out, across), kPanel) * kPanel;
    Index task_rows = divide_up(divide_up(c.rows, down), kTileRows) * kTileRows;
    across = divide_up(c.out, task_outputs);
    down = divide_up(c.rows, task_rows);
    share_by_demand(across * down, true, [&](Index task) {
        Index n = task % across * task_outputs, m = task / across * task_rows;
        linear_task<T>(c, m, smaller(m + task_rows, c.rows), n, smaller(n + task_outputs, c.out));
    });
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
