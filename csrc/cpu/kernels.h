// The table of CPU kernels, compiled once per instruction set. Plain pointers: torch is not known here.
//
// Exactness: every output element is reduced in one order, written in the comment of its kernel, that depends on
// neither the number of rows, nor threads, nor the instruction set. Vectors are 16 floats wide everywhere (vec.h).
#pragma once

#include <cstdint>

namespace palimpsest::cpu {

using Index = std::int64_t;

// Attention: tokens of a tile, largest head size, most rows (tokens x heads of a group) of a task.
constexpr Index kAttentionTile = 128, kAttentionMaxDim = 256, kAttentionMaxRows = 96;

// Floats that a tile's share of one row takes.
inline Index attention_share(Index head_dim) { return 16 + (head_dim + 31) / 32 * 32; }

// The arguments of ops.paged_attention. query: tokens lie query_stride floats apart. pages: a row of page numbers per
// span.
struct AttentionCall {
    const float* query;
    Index query_stride;
    const void* key_pages;
    const void* value_pages;
    bool kv_bf16;
    const std::int32_t* query_start;
    const std::int32_t* kv_length;
    const std::int32_t* pages;
    Index pages_stride, spans, heads, kv_heads, head_dim, page_size, page_count;
    float scale;
    float* out;
};

// `tokens` tokens of a span, from its first_token on, and the query heads of one key head.
struct AttentionTask {
    Index span, kv_head, first_token, tokens;
};

struct Kernels {
    const char* isa;

    // out[r][i] = x[r][i] / sqrt(mean(x[r]^2) + eps) * weight[i]; x rows lie x_stride floats apart, out is dense.
    void (*rms_norm)(const float* x, const void* weight, bool weight_bf16, float* out, Index rows, Index n,
                     Index x_stride, float eps);

    // y[r][o] = sum_k x[r][k] weight[o][k] + bias[o]; x rows lie x_stride floats apart, the rest is dense; bias may be
    // null.
    void (*linear)(const float* x, Index x_stride, const void* weight, bool weight_bf16, const void* bias,
                   bool bias_bf16, float* y, Index rows, Index in, Index out);

    void (*attention_piece)(const AttentionCall& call, const AttentionTask& task, Index first_tile, Index last_tile,
                            float* partials);
    void (*attention_fold)(const AttentionCall& call, const AttentionTask& task, const float* partials);
};

// ops.paged_attention. Throws std::invalid_argument when spans or pages point outside of what they describe.
void paged_attention(const Kernels& kernels, const AttentionCall& call);

// How many threads a parallel loop may use: what torch.set_num_threads says, as torch and this module share one OpenMP.
Index max_threads();

// The table for "scalar", "avx2" or "avx512"; nullptr when this machine or this build lacks it.
const Kernels* find_kernels(const char* isa);

// The fastest table that this machine runs.
const Kernels& best_kernels();

}  // namespace palimpsest::cpu
