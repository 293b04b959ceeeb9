// The table of CPU kernels, compiled once per instruction set. Plain pointers: torch is not known here.
//
// Exactness: every output element is reduced in one order, written in the comment of its kernel, that depends on
// neither the number of rows, nor threads, nor the instruction set. Vectors are 16 floats wide everywhere (vec.h).
#pragma once

#include <cstdint>

namespace palimpsest::cpu {

using Index = std::int64_t;

struct Kernels {
    const char* isa;

    // out[r][i] = x[r][i] / sqrt(mean(x[r]^2) + eps) * weight[i]; x rows lie x_stride floats apart, out is dense.
    void (*rms_norm)(const float* x, const void* weight, bool weight_bf16, float* out, Index rows, Index n,
                     Index x_stride, float eps);

    // y[r][o] = sum_k x[r][k] weight[o][k] + bias[o]; x rows lie x_stride floats apart, the rest is dense; bias may be
    // null.
    void (*linear)(const float* x, Index x_stride, const void* weight, bool weight_bf16, const void* bias,
                   bool bias_bf16, float* y, Index rows, Index in, Index out);
};

// How many threads a parallel loop may use: what torch.set_num_threads says, as torch and this module share one OpenMP.
Index max_threads();

// The table for "scalar", "avx2" or "avx512"; nullptr when this machine or this build lacks it.
const Kernels* find_kernels(const char* isa);

// The fastest table that this machine runs.
const Kernels& best_kernels();

}  // namespace palimpsest::cpu
