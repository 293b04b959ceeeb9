// The table of CPU kernels, compiled once per instruction set. Plain pointers: torch is not known here.
//
// Exactness: every output element is reduced in one order, written in the comment of its kernel, that depends on
// neither the number of rows, nor threads, nor the instruction set. Vectors are 16 floats wide everywhere (vec.h).
#pragma once

#include <cstdint>
#include <vector>

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

// A tile of the vocabulary: its largest logit, and the sum of e^(logit - largest).
constexpr Index kVocabularyTile = 4096;
struct TileSum {
    float top, sum;
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

    // The rest as in ops.Ops. Strides are in floats, from one row or token to the next; results are dense.
    void (*silu_product)(const float* gate, Index gate_stride, const float* up, Index up_stride, float* out, Index rows,
                         Index n);
    void (*rotate)(const float* x, Index x_stride, const Index* positions, const float* cos, const float* sin,
                   float* out, Index tokens, Index heads, Index head_dim);
    void (*write_kv)(const float* key, Index key_stride, const float* value, Index value_stride, void* key_pages,
                     void* value_pages, bool kv_bf16, const Index* slots, Index tokens, Index kv_heads, Index page_size,
                     Index head_dim);
    void (*embedding)(const Index* ids, const void* weight, bool weight_bf16, float* out, Index tokens, Index hidden);

    // tiles: scratch, one for each kVocabularyTile logits (or less) of each row.
    void (*log_sum_exp)(const float* x, Index x_stride, float* out, TileSum* tiles, Index rows, Index n);

    // For the benchmarks, what no kernel can beat. On all threads, `repeats` rounds of multiply-adds in registers; ->
    // the floating-point operations done.
    double (*multiply_add)(Index repeats);

    // On all threads, read n floats once, in order; -> their sum.
    double (*read_memory)(const float* data, Index n);
};

// How the work of ops.paged_attention is dealt out over threads, which does not show in the results. One plan serves
// every call with the same spans, such as those of a step's layers.
class AttentionPlan {
  public:
    // `call` may lack its tensors. Throws std::invalid_argument when spans or pages point outside of what they
    // describe.
    explicit AttentionPlan(const AttentionCall& call);

    // Floats of scratch that `run` needs.
    Index floats() const { return floats_; }

    // Called by one thread or by all of a team, as the kernels are.
    void run(const Kernels& kernels, const void* key_pages, const void* value_pages, const float* query, float* out,
             float* scratch) const;

  private:
    // Tiles first .. last of a task. shares: where in the scratch its partial results start, or -1 for a whole task.
    struct Piece {
        Index task, first, last, shares;
    };

    AttentionCall call_;
    std::vector<AttentionTask> tasks_;
    std::vector<Piece> pieces_;
    std::vector<Index> cut_, cut_shares_;  // tasks that are folded when their pieces are there
    Index floats_ = 0;
    bool parallel_ = false;
};

// How many threads a parallel loop may use: what torch.set_num_threads says, as torch and this module share one OpenMP.
Index max_threads();

// The table for "scalar", "avx2" or "avx512"; nullptr when this machine or this build lacks it.
const Kernels* find_kernels(const char* isa);

// The fastest table that this machine runs.
const Kernels& best_kernels();

}  // namespace palimpsest::cpu
