// The gradients of y = x W^T + b: dx = dy W, dW = dy^T x, db = the sum of dy's rows.
//
// Order: that of chains.h, over the outputs for dx and over the rows for dW and db. Each element of dx depends on its
// own row alone; dW and db depend on the order of the rows.
#pragma once

#include "team.h"
#include "tile.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

// What one task computes at most, and the unit of its rows: whole tiles, whole transposed blocks.
constexpr Index kProductRows = 192, kProductColumns = 192, kProductUnit = 48;
static_assert(kProductUnit % kTileRows == 0 && kProductUnit % kWidth == 0 && kProductRows % kProductUnit == 0);

// The matrix in its own layout: rows `stride` elements apart, dense along the columns.
template <class T>
struct Plain {
    const T* data;
    Index stride, columns;

    // to[i][k]: rows first .. last, columns start .. start + depth.
    void left(Index first, Index last, Index start, Index depth, float* to) const {
        for (Index r = first; r < last; r++)
            std::memcpy(to + (r - first) * kBlock, data + r * stride + start, depth * sizeof(float));
    }

    // to[k][j]: rows start .. start + depth, kPanel columns from n on.
    void right(Index n, Index start, Index depth, float* to) const {
        for (Index k = 0; k < depth; k++) {
            const T* from = data + (start + k) * stride + n;
            for (Index j = 0; j < kPanel; j += kWidth) {
                Index valid = columns - n - j;
                F16 v = valid >= kWidth ? F16::load(from + j) : load_first(from + j, larger(valid, 0));
                v.store(to + k * kPanel + j);
            }
        }
    }
};

// The transpose of a dense matrix [rows, columns].
struct Transposed {
    const float* data;
    Index rows, columns;

    // to[i][k]: columns first .. last of the matrix, rows start .. start + depth. Writes whole blocks of kWidth.
    void left(Index first, Index last, Index start, Index depth, float* to) const {
        for (Index k = 0; k < depth; k += kWidth) {
            const float* from[kWidth];
            for (Index j = 0; j < kWidth; j++) from[j] = data + smaller(start + k + j, rows - 1) * columns;
            for (Index m = first; m < last; m += kWidth) {
                F16 block[kWidth];
                if (m + kWidth <= columns)
                    load_transposed(from, m, block, kWidth * columns);
                else
                    load_transposed_rest(from, m, columns - m, block);
                for (Index i = 0; i < kWidth; i++) block[i].store(to + (m - first + i) * kBlock + k);
            }
        }
    }
};

// The part m0 .. m1, n0 .. n1 of y = left right, or y += left right; y dense with `columns` columns.
template <class Left, class Right>
void product_task(const Left& left, const Right& right, float* y, Index columns, Index depth, bool add, Index m0,
                  Index m1, Index n0, Index n1) {
    alignas(64) float rows[kProductRows * kBlock];
    alignas(64) float panels[kProductColumns * kBlock];
    for (Index start = 0; start < depth; start += kBlock) {
        Index some = smaller(kBlock, depth - start);
        left.left(m0, m1, start, some, rows);
        for (Index n = n0; n < n1; n += kPanel) right.right(n, start, some, panels + (n - n0) * kBlock);
        for (Index m = m0; m < m1; m += kTileRows)
            with_rows<kTileRows>(smaller(kTileRows, m1 - m), [&](auto count) {
                for (Index n = n0; n < n1; n += kPanel)
                    tile<decltype(count)::value>(rows + (m - m0) * kBlock, kBlock, panels + (n - n0) * kBlock, some,
                                                 y + m * columns + n, columns, columns - n, start == 0 && !add);
            });
    }
}

// y[m][n] = (y[m][n] +) sum over k of left[m][k] right[k][n], cut into enough tasks for all threads.
template <class Left, class Right>
void product(const Left& left, const Right& right, float* y, Index rows, Index columns, Index depth, bool add = false) {
    if (depth == 0 && !add) std::memset(y, 0, rows * columns * sizeof(float));
    Index wanted = 2 * max_threads(), task_rows = kProductRows, task_columns = kProductColumns;
    auto tasks = [&] { return divide_up(rows, task_rows) * divide_up(columns, task_columns); };
    while (tasks() < wanted && task_rows > kProductUnit) task_rows /= 2;
    while (tasks() < wanted && task_columns > 2 * kPanel) task_columns = divide_up(task_columns, 2 * kPanel) * kPanel;
    Index across = divide_up(columns, task_columns), count = tasks();
    share_by_demand(count, true, [&](Index task) {
        Index n = task % across * task_columns, m = task / across * task_rows;
        product_task(left, right, y, columns, depth, add, m, smaller(m + task_rows, rows), n,
                     smaller(n + task_columns, columns));
    });
}

inline void linear_input_grad(const float* dy, const void* weight, bool weight_bf16, float* dx, Index rows, Index in,
                              Index out) {
    Plain<float> left{dy, out, out};
    if (weight_bf16)
        product(left, Plain<BFloat16>{static_cast<const BFloat16*>(weight), in, in}, dx, rows, in, out);
    else
        product(left, Plain<float>{static_cast<const float*>(weight), in, in}, dx, rows, in, out);
}

inline void linear_weight_grad(const float* dy, const float* x, Index x_stride, float* dw, Index rows, Index in,
                               Index out, bool add) {
    product(Transposed{dy, rows, out}, Plain<float>{x, x_stride, in}, dw, out, in, rows, add);
}

// out[i] = sum over r of x[r][i]: blocks of kBlock rows, each added up in order, then the blocks in order.
inline void column_sums(const float* x, float* out, Index rows, Index n) {
    share_evenly(divide_up(n, kWidth), rows * n > 32768, [&](Index group) {
        const float* from = x + group * kWidth;
        Index valid = smaller(kWidth, n - group * kWidth);
        F16 total = F16::zero();
        for (Index start = 0; start < rows; start += kBlock) {
            F16 block = F16::zero();
            for (Index r = start; r < smaller(start + kBlock, rows); r++)
                block = block + (valid == kWidth ? F16::load(from + r * n) : load_first(from + r * n, valid));
            total = total + block;
        }
        store_outputs(total, out + group * kWidth, valid);
    });
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
