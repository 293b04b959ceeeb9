// RMSNorm (arXiv 1910.07467, eq. 4).
//
// Order: lane l sums the squares of elements l, l + 16, l + 32, ... by FMA; then the lanes by halving.
#pragma once

#include "team.h"
#include "vec.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

template <class T>
void rms_norm_row(const float* x, const T* weight, float* out, Index n, float eps) {
    Index whole = n / kWidth * kWidth;
    F16 squares = F16::zero();
    for (Index i = 0; i < whole; i += kWidth) {
        F16 v = F16::load(x + i);
        squares = fma(v, v, squares);
    }
    F16 rest = load_first(x + whole, n - whole);
    squares = fma(rest, rest, squares);
    F16 scale = F16::set(1.0f / std::sqrt(sum(squares) / float(n) + eps));
    for (Index i = 0; i < whole; i += kWidth) (F16::load(x + i) * scale * F16::load(weight + i)).store(out + i);
    store_first(rest * scale * load_first(weight + whole, n - whole), out + whole, n - whole);
}

inline void rms_norm(const float* x, const void* weight, bool weight_bf16, float* out, Index rows, Index n,
                     Index x_stride, float eps) {
    share_evenly(rows, rows * n > 16384, [&](Index r) {
        if (weight_bf16)
            rms_norm_row(x + r * x_stride, static_cast<const BFloat16*>(weight), out + r * n, n, eps);
        else
            rms_norm_row(x + r * x_stride, static_cast<const float*>(weight), out + r * n, n, eps);
    });
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
