// Products of many rows, with the rows in the lanes: x is transposed, and W is read in place, an element for all lanes.
//
// Order: that of chains.h. (Transposing W instead takes shuffles, which stand in the way of the multiply-adds, and pays
// only where x has so few rows that most lanes would idle.)
#pragma once

#include <cstdlib>
#include <new>

#include "chains.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

// Outputs at once, and columns of x that stay in registers beside them.
#if defined(__AVX512F__)
constexpr int kLaneOutputs = kWidth, kChunk = 4;
#else
constexpr int kLaneOutputs = 4, kChunk = 2;
#endif

// acc[j] continues its chain over the columns k .. k + count of rows[j].
inline void advance_lanes(const float* columns, const float* const* rows, Index k, Index count,
                          F16 (&acc)[kLaneOutputs]) {
    Index end = k + count;
    for (; k + kChunk <= end; k += kChunk) {
        F16 column[kChunk];
#pragma GCC unroll 4
        for (int i = 0; i < kChunk; i++) column[i] = F16::load(columns + (k + i) * kWidth);
#pragma GCC unroll 16
        for (int j = 0; j < kLaneOutputs; j++)
#pragma GCC unroll 4
            for (int i = 0; i < kChunk; i++) acc[j] = fma(F16::set(rows[j][k + i]), column[i], acc[j]);
    }
    for (; k < end; k++) {
        F16 column = F16::load(columns + k * kWidth);
#pragma GCC unroll 16
        for (int j = 0; j < kLaneOutputs; j++) acc[j] = fma(F16::set(rows[j][k]), column, acc[j]);
    }
}

// total[j]: the sums over k of x[lane][k] rows[j][k]. ahead(k): how many elements further on the cache is asked for.
template <class Ahead>
inline void lane_chains(const float* columns, const float* const* rows, Index in, F16 (&total)[kLaneOutputs],
                        Ahead ahead) {
    for (Index start = 0; start < in; start += kBlock) {
        F16 acc[kLaneOutputs];
#pragma GCC unroll 16
        for (int j = 0; j < kLaneOutputs; j++) acc[j] = F16::zero();
        for (Index k = start, end = smaller(start + kBlock, in); k < end; k += kWidth) {
            prefetch_rows<kLaneOutputs>(rows, k, ahead(k));
            advance_lanes(columns, rows, k, smaller(kWidth, end - k), acc);
        }
#pragma GCC unroll 16
        for (int j = 0; j < kLaneOutputs; j++) total[j] = start == 0 ? acc[j] : total[j] + acc[j];
    }
}

// Floats that begin with a line of the cache.
struct LaneBuffer {
    float* data;
    explicit LaneBuffer(Index count)
        : data(static_cast<float*>(std::aligned_alloc(64, divide_up(count, kWidth) * kWidth * sizeof(float)))) {
        if (!data) throw std::bad_alloc();
    }
    LaneBuffer(const LaneBuffer&) = delete;
    ~LaneBuffer() { std::free(data); }
};

// Some rows of x, transposed, sixteen at a time: [in][16]. Lanes beyond the last row repeat it, and nobody looks at
// their results.
struct LaneRows {
    Index rows, in;
    LaneBuffer columns;

    LaneRows(const float* x, Index x_stride, Index rows, Index in)
        : rows(rows), in(in), columns(divide_up(rows, kWidth) * kWidth * in) {
        for (Index m = 0; m < rows; m += kWidth) {
            const float* from[kWidth];
            for (Index j = 0; j < kWidth; j++) from[j] = x + smaller(m + j, rows - 1) * x_stride;
            for (Index k = 0; k < in; k += kWidth) {
                F16 t[kWidth];
                Index some = smaller(kWidth, in - k);
                if (some == kWidth)
                    load_transposed(from, k, t, kWidth);
                else
                    load_transposed_rest(from, k, some, t);
                for (Index i = 0; i < some; i++) t[i].store(columns.data + m * in + (k + i) * kWidth);
            }
        }
    }

    // outputs[r]: sixteen outputs of row m + r, for m a multiple of sixteen.
    template <class Ahead>
    void sixteen_outputs(Index m, const float* const (&weights)[kWidth], F16 (&outputs)[kWidth], Ahead ahead) const {
        for (int j = 0; j < kWidth; j += kLaneOutputs) {
            F16 total[kLaneOutputs];
            lane_chains(columns.data + m * in, weights + j, in, total, ahead);
            for (int i = 0; i < kLaneOutputs; i++) outputs[j + i] = total[i];
        }
        transpose(outputs);
    }
};

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
