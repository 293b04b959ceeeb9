// y = x W^T + b with W in the checkpoint's [out, in] rows, read in place; up to three such layers over one x at once.
//
// Order: that of chains.h over the `in` axis, then the bias, then what `finish` asks for. Three forms keep it:
//   few rows   sixteen rows of W at a time are transposed in registers and used at once: W is read once, nothing is
//   stored; some rows  x is transposed, and W read in place (row_lanes.h); many rows  a block of W is transposed into a
//   thread's buffer and used for all rows of x.
#pragma once

#include "elementwise.h"
#include "row_lanes.h"
#include "team.h"
#include "tile.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

// Few are rows that one pass takes, or two where the weights are widened from bfloat16.
constexpr Index kFewRows = kPassRows, kFewWideRows = 2 * kPassRows, kSomeRows = 64;
// Of few rows: blocks of W that the cache is asked for in advance.
constexpr Index kFarBlocks = 16, kNearBlocks = 8;
// Of some rows: into how many parts for each thread the outputs are cut, each of so many groups of sixteen at least.
constexpr Index kMostParts = 8, kLeastPartGroups = 16;
// Of the form for many rows: what one task computes at most, and the least rows worth a transposed copy of the weights.
constexpr Index kTaskOutputs = 96, kTaskRows = 512, kLeastTaskRows = 96;

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

// The layers whose sums one task or group makes: one, or a gate and what it opens.
inline Index layers_at_once(const LinearCall& c) { return c.finish == Finish::kSiluProduct ? 2 : 1; }

// `sums` of layer l, without bias: sixteen outputs of row m from n on. `others`: those of the layer after it.
inline void finish_outputs(const LinearCall& c, Index l, Index m, Index n, F16 sums, F16 others) {
    auto with_bias = [n](const LinearLayer& layer, F16 v) {
        return layer.bias ? v + load_bias(layer.bias, layer.bias_bf16, n, layer.out) : v;
    };
    const LinearLayer& layer = c.layers[l];
    Index valid = smaller(kWidth, layer.out - n), at = m * layer.out + n;
    sums = with_bias(layer, sums);
    if (c.finish == Finish::kAdd) {
        F16 before = valid == kWidth ? F16::load(c.residual + at) : load_first(c.residual + at, valid);
        store_outputs(before + sums, c.residual + at, valid);
    } else {
        bool pair = c.finish == Finish::kSiluProduct;
        store_outputs(pair ? silu_product(sums, with_bias(c.layers[l + 1], others)) : sums, layer.y + at, valid);
    }
}

// Sixteen neighbouring outputs, of one layer or of those finished together.
inline Index groups_of(const LinearLayer& layer) { return divide_up(layer.out, kWidth); }

inline Index count_groups(const LinearCall& c) {
    Index groups = 0;
    for (Index l = 0; l < c.count; l += layers_at_once(c)) groups += groups_of(c.layers[l]);
    return groups;
}

// Calls body(layer, first output) of a group.
template <class Body>
inline void with_group(const LinearCall& c, Index group, Body body) {
    Index l = 0;
    for (; group >= groups_of(c.layers[l]); l += layers_at_once(c)) group -= groups_of(c.layers[l]);
    body(l, group * kWidth);
}

// So many columns further on than k, and beyond the end of sixteen rows in the next sixteen.
template <class T>
inline Index beyond(Index k, Index in, Index blocks) {
    Index distance = blocks * Block<T>::kDepth;
    return k + distance < in ? distance : distance + (kWidth - 1) * in;
}

// ---- few rows ----

// total[r]: sixteen outputs of row m + r from output n on.
template <int R, class T>
void sixteen_outputs(const LinearCall& c, const LinearLayer& layer, Index m, Index n, F16 (&total)[R]) {
    const T* weight_rows[kWidth];
    row_pointers(static_cast<const T*>(layer.weight), c.in, layer.out, n, weight_rows);
    sixteen_chains<R, T>(c.x + m * c.x_stride, c.x_stride, weight_rows, c.in, total, [&](Index k) {
        return Ahead{beyond<T>(k, c.in, kFarBlocks), beyond<T>(k, c.in, kNearBlocks)};
    });
}

template <int R>
void sixteen_outputs(const LinearCall& c, Index l, Index m, Index n, F16 (&total)[R]) {
    if (c.layers[l].weight_bf16)
        sixteen_outputs<R, BFloat16>(c, c.layers[l], m, n, total);
    else
        sixteen_outputs<R, float>(c, c.layers[l], m, n, total);
}

inline void linear_few_rows(const LinearCall& c) {
    Index groups = count_groups(c);
    share_evenly(groups, groups * kWidth * c.in > 65536, [&](Index group) {
        with_group(c, group, [&](Index l, Index n) {
            for (Index m = 0; m < c.rows; m += kPassRows)
                with_rows<kPassRows>(smaller(kPassRows, c.rows - m), [&](auto count) {
                    constexpr int R = decltype(count)::value;
                    F16 total[R] = {}, others[R] = {};
                    sixteen_outputs<R>(c, l, m, n, total);
                    if (layers_at_once(c) == 2) sixteen_outputs<R>(c, l + 1, m, n, others);
                    for (int r = 0; r < R; r++) finish_outputs(c, l, m + r, n, total[r], others[r]);
                });
        });
    });
}

// ---- some rows ----

// Sixteen rows of W from row n on, as floats: in place, or widened into `wide`.
struct FloatRows {
    const float* rows[kWidth];

    FloatRows(const LinearCall& c, const LinearLayer& layer, Index n, float* wide) {
        if (!layer.weight_bf16) {
            row_pointers(static_cast<const float*>(layer.weight), c.in, layer.out, n, rows);
            return;
        }
        const BFloat16* narrow[kWidth];
        row_pointers(static_cast<const BFloat16*>(layer.weight), c.in, layer.out, n, narrow);
        for (Index j = 0; j < kWidth; j++) {
            float* to = wide + j * c.in;
            Index k = 0;
            for (; k + kWidth <= c.in; k += kWidth) {
                if (k % Block<BFloat16>::kDepth == 0) __builtin_prefetch(narrow[j] + k + kWidth * c.in, 0, 2);
                F16::load(narrow[j] + k).store(to + k);
            }
            for (; k < c.in; k++) to[k] = to_float(narrow[j][k]);
            rows[j] = to;
        }
    }
};

// The groups first .. last.
inline void lane_task(const LinearCall& c, Index first, Index last) {
    bool pair = layers_at_once(c) == 2;
    LaneRows x(c.x, c.x_stride, c.rows, c.in);
    LaneBuffer wide(kWidth * c.in), others_wide(kWidth * c.in);
    auto ahead = [&](Index k) { return beyond<float>(k, c.in, kFarBlocks); };
    for (Index group = first; group < last; group++)
        with_group(c, group, [&](Index l, Index n) {
            FloatRows w(c, c.layers[l], n, wide.data), v(c, c.layers[pair ? l + 1 : l], n, others_wide.data);
            for (Index m = 0; m < c.rows; m += kWidth) {
                F16 total[kWidth], others[kWidth];
                x.sixteen_outputs(m, w.rows, total, ahead);
                if (pair) x.sixteen_outputs(m, v.rows, others, ahead);
                for (Index r = 0; r < smaller(kWidth, c.rows - m); r++)
                    finish_outputs(c, l, m + r, n, total[r], pair ? others[r] : F16::zero());
            }
        });
}

// Cuts the groups into a few parts for each thread, each with a copy of x of its own.
inline void linear_some_rows(const LinearCall& c) {
    Index threads = max_threads(), groups = count_groups(c);
    Index parts = threads * larger(1, smaller(kMostParts, groups / (kLeastPartGroups * threads)));
    share_by_demand(parts, true, [&](Index part) { lane_task(c, groups * part / parts, groups * (part + 1) / parts); });
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

// The transposed copy of columns start .. start + depth of the rows n0 .. n1 of W.
inline void fill_panels(const LinearCall& c, const LinearLayer& layer, Index n0, Index n1, Index start, Index depth,
                        float* panels) {
    for (Index n = n0; n < n1; n += kPanel, panels += kPanel * kBlock)
        if (layer.weight_bf16)
            fill_panel(static_cast<const BFloat16*>(layer.weight), c.in, layer.out, n, start, depth, panels);
        else
            fill_panel(static_cast<const float*>(layer.weight), c.in, layer.out, n, start, depth, panels);
}

// Rows that lie a multiple of 4 KiB apart meet in the same few lines of the first-level cache: a tile of them is
// copied.
inline bool rows_collide(Index x_stride) { return x_stride % 1024 == 0; }

// The outputs n0 .. n1 of rows m0 .. m1 of layer l (and the next, where two are finished together).
inline void linear_task(const LinearCall& c, Index l, Index m0, Index m1, Index n0, Index n1) {
    alignas(64) float panels[2 * kTaskOutputs * kBlock];
    alignas(64) float copy[kTileRows * kBlock];
    Index together = layers_at_once(c), panel_floats = (n1 - n0) * kBlock;
    bool finishes = c.finish != Finish::kStore || c.layers[l].bias, copies = rows_collide(c.x_stride);
    for (Index start = 0; start < c.in; start += kBlock) {
        Index depth = smaller(kBlock, c.in - start);
        for (Index i = 0; i < together; i++)
            fill_panels(c, c.layers[l + i], n0, n1, start, depth, panels + i * panel_floats);
        for (Index m = m0; m < m1; m += kTileRows) {
            Index rows = smaller(kTileRows, m1 - m), stride = copies ? kBlock : c.x_stride;
            const float* x = c.x + m * c.x_stride + start;
            if (copies) {
                for (Index r = 0; r < rows; r++)
                    std::memcpy(copy + r * kBlock, x + r * c.x_stride, depth * sizeof(float));
                x = copy;
            }
            for (Index r = rows; r < smaller(2 * rows, m1 - m); r++)
                for (Index k = 0; k < depth; k += kWidth)
                    __builtin_prefetch(c.x + (m + r) * c.x_stride + start + k, 0, 2);
            with_rows<kTileRows>(rows, [&](auto count) {
                for (Index i = 0; i < together; i++) {
                    const LinearLayer& layer = c.layers[l + i];
                    for (Index n = n0; n < n1; n += kPanel)
                        tile<decltype(count)::value>(x, stride, panels + i * panel_floats + (n - n0) * kBlock, depth,
                                                     layer.y + m * layer.out + n, layer.out, layer.out - n, start == 0);
                }
            });
            if (!finishes || start + depth < c.in) continue;
            for (Index r = m; r < m + rows; r++)
                for (Index n = n0; n < smaller(n1, c.layers[l].out); n += kWidth) {
                    Index valid = smaller(kWidth, c.layers[l].out - n), at = r * c.layers[l].out + n;
                    auto sums = [&](Index i) {
                        const float* y = c.layers[i].y + at;
                        return valid == kWidth ? F16::load(y) : load_first(y, valid);
                    };
                    finish_outputs(c, l, r, n, sums(l), together == 2 ? sums(l + 1) : F16::zero());
                }
        }
    }
}

// Cuts the work into enough tasks for all threads. (How it is cut does not show in the results.)
inline void linear_many_rows(const LinearCall& c) {
    Index wanted = 2 * max_threads(), together = layers_at_once(c), across = 0;
    for (Index l = 0; l < c.count; l += together) across += divide_up(c.layers[l].out, kTaskOutputs);
    Index down = divide_up(c.rows, kTaskRows);
    if (across * down < wanted) down = larger(down, smaller(divide_up(wanted, across), c.rows / kLeastTaskRows));
    Index task_rows = divide_up(divide_up(c.rows, down), kTileRows) * kTileRows;
    down = divide_up(c.rows, task_rows);
    share_by_demand(across * down, true, [&](Index task) {
        Index m = task / across * task_rows, l = 0, n = task % across * kTaskOutputs;
        for (; n >= c.layers[l].out; l += together) n -= divide_up(c.layers[l].out, kTaskOutputs) * kTaskOutputs;
        Index end = divide_up(smaller(n + kTaskOutputs, c.layers[l].out), kPanel) * kPanel;
        linear_task(c, l, m, smaller(m + task_rows, c.rows), n, end);
    });
}

inline void linear(const LinearCall& c) {
    if (c.rows <= (c.layers[0].weight_bf16 ? kFewWideRows : kFewRows))
        linear_few_rows(c);
    else if (c.rows <= kSomeRows)
        linear_some_rows(c);
    else
        linear_many_rows(c);
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
