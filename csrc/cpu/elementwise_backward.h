// The gradients of silu_product and log_sum_exp: each element is computed on its own. (They are kernels because
// torch's exponential rounds an element by where it stands in a thread's share.)
#pragma once

#include "elementwise.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

// With s = 1 / (1 + e^-gate): the derivative of gate * s is s (1 + gate (1 - s)).
inline void silu_product_grad(F16 gate, F16 up, F16 dy, F16& dgate, F16& dup) {
    F16 one = F16::set(1.0f), s = one / (one + exp(F16::zero() - gate));
    dgate = dy * up * (s * fma(gate, one - s, one));
    dup = dy * (gate * s);
}

inline void silu_product_grad(const float* gate, Index gate_stride, const float* up, Index up_stride, const float* dy,
                              float* dgate, float* dup, Index rows, Index n) {
    share_evenly(rows, rows * n > kSerial, [&](Index r) {
        for (Index i = 0; i < n; i += kWidth) {
            const float *g = gate + r * gate_stride + i, *u = up + r * up_stride + i;
            Index at = r * n + i, rest = n - i;
            F16 first, second;
            if (rest >= kWidth) {
                silu_product_grad(F16::load(g), F16::load(u), F16::load(dy + at), first, second);
                first.store(dgate + at);
                second.store(dup + at);
            } else {
                silu_product_grad(load_first(g, rest), load_first(u, rest), load_first(dy + at, rest), first, second);
                store_first(first, dgate + at, rest);
                store_first(second, dup + at, rest);
            }
        }
    });
}

// dx[r][i] = e^(x[r][i] - result[r]) dy[r], where result is log_sum_exp(x).
inline void log_sum_exp_grad(const float* x, Index x_stride, const float* result, const float* dy, float* dx,
                             Index rows, Index n) {
    share_evenly(rows, rows * n > kSerial, [&](Index r) {
        F16 sum = F16::set(result[r]), factor = F16::set(dy[r]);
        for (Index i = 0; i < n; i += kWidth) {
            const float* from = x + r * x_stride + i;
            if (n - i >= kWidth)
                (exp(F16::load(from) - sum) * factor).store(dx + r * n + i);
            else
                store_first(exp(load_first(from, n - i) - sum) * factor, dx + r * n + i, n - i);
        }
    });
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
