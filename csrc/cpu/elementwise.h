// Passes over activations: each output element is computed on its own, except in log_sum_exp.
#pragma once

#include "kv_rows.h"
#include "math.h"
#include "team.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

// Below this many floats a pass is not worth waking the threads up.
constexpr Index kSerial = 32768;

// out = gate / (1 + e^-gate) * up (SwiGLU, arXiv 2002.05202, eq. 6).
inline F16 silu_product(F16 gate, F16 up) { return gate / (F16::set(1.0f) + exp(F16::zero() - gate)) * up; }

inline void silu_product(const float* gate, Index gate_stride, const float* up, Index up_stride, float* out, Index rows,
                         Index n) {
    share_evenly(rows, rows * n > kSerial, [&](Index r) {
        const float *g = gate + r * gate_stride, *u = up + r * up_stride;
        Index i = 0;
        for (; i + kWidth <= n; i += kWidth) silu_product(F16::load(g + i), F16::load(u + i)).store(out + r * n + i);
        if (i < n)
            store_first(silu_product(load_first(g + i, n - i), load_first(u + i, n - i)), out + r * n + i, n - i);
    });
}

// Turns the pairs (i, i + half) of one head by the angles of its position (RoFormer, arXiv 2104.09864, eq. 34).
inline void rotate_head(const float* x, const float* cos, const float* sin, float* out, Index half) {
    auto turn = [](F16 a, F16 b, F16 c, F16 s, F16& first, F16& second) {
        first = fma(a, c, F16::zero() - b * s);
        second = fma(b, c, a * s);
    };
    F16 first, second;
    Index i = 0;
    for (; i + kWidth <= half; i += kWidth) {
        turn(F16::load(x + i), F16::load(x + half + i), F16::load(cos + i), F16::load(sin + i), first, second);
        first.store(out + i);
        second.store(out + half + i);
    }
    if (i < half) {
        Index rest = half - i;
        turn(load_first(x + i, rest), load_first(x + half + i, rest), load_first(cos + i, rest),
             load_first(sin + i, rest), first, second);
        store_first(first, out + i, rest);
        store_first(second, out + half + i, rest);
    }
}

inline void rotate(const float* x, Index x_stride, const Index* positions, const float* cos, const float* sin,
                   float* out, Index tokens, Index heads, Index head_dim) {
    Index half = head_dim / 2;
    share_evenly(tokens, tokens * heads * head_dim > kSerial, [&](Index t) {
        for (Index h = 0; h < heads; h++)
            rotate_head(x + t * x_stride + h * head_dim, cos + positions[t] * half, sin + positions[t] * half,
                        out + (t * heads + h) * head_dim, half);
    });
}

inline void copy_converted(const float* from, float* to, Index n) { std::memcpy(to, from, n * sizeof(float)); }
inline void copy_converted(const BFloat16* from, float* to, Index n) {
    for (Index i = 0; i < n; i++) to[i] = to_float(from[i]);
}

// One token's keys (or values) of all heads into its slot; pages are [pages, kv_heads, page_size, row].
template <class T>
inline void write_slot(const float* x, T* pages, Index slot, Index kv_heads, Index page_size, Index head_dim) {
    Index page = slot / page_size, offset = slot % page_size;
    for (Index h = 0; h < kv_heads; h++)
        write_row(x + h * head_dim, pages + ((page * kv_heads + h) * page_size + offset) * row_size<T>(head_dim),
                  head_dim);
}

inline void write_kv(const float* key, Index key_stride, const float* value, Index value_stride, void* key_pages,
                     void* value_pages, KvType kv_type, const Index* slots, Index tokens, Index kv_heads,
                     Index page_size, Index head_dim) {
    share_evenly(tokens, tokens * kv_heads * head_dim > kSerial, [&](Index t) {
        const float *k = key + t * key_stride, *v = value + t * value_stride;
        with_kv_type(kv_type, [&](auto element) {
            using T = decltype(element);
            write_slot(k, static_cast<T*>(key_pages), slots[t], kv_heads, page_size, head_dim);
            write_slot(v, static_cast<T*>(value_pages), slots[t], kv_heads, page_size, head_dim);
        });
    });
}

inline void embedding(const Index* ids, const void* weight, bool weight_bf16, float* out, Index tokens, Index hidden) {
    share_evenly(tokens, tokens * hidden > kSerial, [&](Index t) {
        if (weight_bf16)
            copy_converted(static_cast<const BFloat16*>(weight) + ids[t] * hidden, out + t * hidden, hidden);
        else
            copy_converted(static_cast<const float*>(weight) + ids[t] * hidden, out + t * hidden, hidden);
    });
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
