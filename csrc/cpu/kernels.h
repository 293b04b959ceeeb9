// The table of CPU kernels, compiled once per instruction set. Plain pointers: torch is not known here.
//
// Exactness: every output element is reduced in one order, written in the comment of its kernel, that depends on
// neither the number of rows, nor threads, nor the instruction set. Vectors are 16 floats wide everywhere (vec.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace palimpsest::cpu {

using Index = std::int64_t;

// Attention: tokens of a tile, largest head size, most rows (tokens x heads of a group) of a piece of the forward pass
// and of a task of the backward pass.
constexpr Index kAttentionTile = 128, kAttentionMaxDim = 256, kAttentionPieceRows = 192, kAttentionMaxRows = 96;

// Floats that a tile's share of one row takes.
inline Index attention_share(Index head_dim) { return 16 + (head_dim + 31) / 32 * 32; }

// Element type of the KV pages, by the number that engine/cpu.py hands over.
enum class KvType : int { float32 = 0, bfloat16 = 1, int8 = 2 };

// The arguments of ops.paged_attention. query: tokens lie query_stride floats apart. pages: a row of page numbers per
// span.
struct AttentionCall {
    const float* query;
    Index query_stride;
    const void* key_pages;
    const void* value_pages;
    KvType kv_type;
    const std::int32_t* query_start;
    const std::int32_t* kv_length;
    const std::int32_t* pages;
    Index pages_stride, spans, heads, kv_heads, head_dim, page_size, page_count;
    float scale;
    float* out;
    // [T, heads, 2]: each row's largest score and sum of weights, for the backward pass and between a row's pieces.
    float* stats = nullptr;
};

// The arguments of the gradient of ops.attend. The batch's own keys and values take the place of the pages: dense
// float32 [T, kv_heads, head_dim], so a page is one row, and `pages` says which row holds each position of a span.
struct AttentionGradCall {
    AttentionCall forward;  // dense queries; stats as the forward pass left them; `out` takes the queries' gradient
    const float* out_grad;  // [T, heads, head_dim]
    const float* delta;     // [T, heads]: the dot products of the outputs and their gradients
    float *key_grad, *value_grad;
};

// `tokens` tokens of a span, from its first_token on, and the query heads of one key head.
struct AttentionTask {
    Index span, kv_head, first_token, tokens;
};

// The rows of some tasks with one key head, at most kAttentionPieceRows of them, over the tiles first_tile ..
// last_tile, under which all of the tasks' spans have the same pages.
struct AttentionPiece {
    const AttentionTask* tasks;
    Index task_count, first_tile, last_tile;
};

// The keys of one head at kAttentionMaxRows positions from first_key on, as some spans (rising numbers) see them.
struct KeyTask {
    const Index* spans;
    Index span_count, kv_head, first_key;
};

// A tile of the vocabulary: its largest logit, and the sum of e^(logit - largest).
constexpr Index kVocabularyTile = 4096;
struct TileSum {
    float top, sum;
};

// Rows of logits [rows, n], dense, and one token of each: its log-probability at the temperature, the entropy, and the
// log-sum-exp. token_scores divides the logits by the temperature in place and fills in the results; token_scores_grad
// takes all that and puts the gradient of the undivided logits in their place.
struct TokenScoresCall {
    float* logits;
    float temperature;
    const Index* targets;
    float *logprobs, *entropies, *log_sums;
    Index rows, n;
};

// How a token is drawn from one row of logits, as engine/draw.py says. key: of its noise. temperature: 1 when greedy.
struct DrawRow {
    std::uint64_t key;
    bool greedy;
    float temperature;
    Index top_k;
    double top_p, depth;

    bool filters() const { return top_k > 0 || top_p < 1.0 || depth > -INFINITY; }
    bool is_plain() const { return !greedy && !filters(); }
};

// total: the log-sum-exp of z = logits / temperature.
struct Drawn {
    Index id;
    float logprob, total;
};

// The arguments of ops.draw: rows lie `stride` floats apart.
struct DrawCall {
    const float* logits;
    Index stride, rows, vocabulary;
    const DrawRow* row;
    Drawn* out;
};

// value: z + noise.
struct Candidate {
    double value;
    Index id;
};
struct DrawnTile {
    TileSum sum;
    Candidate best;
};
struct Ranked {
    float z;
    Index id;
};

// Values on the k axis that share a scale when x is rounded; weights share theirs over as many, or a multiple.
constexpr Index kQuantisedGroup = 32;

// W [out, in] as engine/packed_weight.py packs it. bits: 8 or 4. scales, minima: float16, scale_groups for each row;
// group g of kQuantisedGroup values uses number g >> scale_shift. minima may be null.
struct PackedWeight {
    const std::uint8_t* values;
    const std::uint16_t* scales;
    const std::uint16_t* minima;
    Index bits, in, out, scale_groups, scale_shift;
};

// A linear layer: W [out, in], either in place or `packed`, and where its outputs go, dense [rows, out].
struct LinearLayer {
    const void* weight;
    bool weight_bf16;
    PackedWeight packed;
    const void* bias;  // may be null
    bool bias_bf16;
    Index out;
    float* y;
};

// What becomes of the sums: each layer's y; or they are added to `residual`; or y of the first layer takes
// silu(the first layer's) * the second's. In the last two cases y of all layers is scratch, too.
enum class Finish { kStore, kAdd, kSiluProduct };

// Up to three linear layers over the same x [rows, in], whose rows lie x_stride floats apart: all in place or all
// packed.
struct LinearCall {
    const float* x;
    Index x_stride, rows, in;
    LinearLayer layers[3];
    Index count = 1;
    Finish finish = Finish::kStore;
    float* residual = nullptr;
};

// Rows of x rounded to int8, `groups` groups each: values, and each group's scale and sum of values.
struct QuantisedRows {
    const std::int8_t* values;
    const float* scales;
    const std::int32_t* sums;
    Index groups;
};

struct Kernels {
    const char* isa;

    // out[r][i] = x[r][i] / sqrt(mean(x[r]^2) + eps) * weight[i]; x rows lie x_stride floats apart, out is dense.
    void (*rms_norm)(const float* x, const void* weight, bool weight_bf16, float* out, Index rows, Index n,
                     Index x_stride, float eps);

    // y[r][o] = sum_k x[r][k] weight[o][k] + bias[o], of layers in place.
    void (*linear)(const LinearCall& call);

    // Folds a piece's tiles into its rows, or leaves the tiles' shares in `shares` for attention_fold to fold.
    void (*attention_piece)(const AttentionCall& call, const AttentionPiece& piece, float* shares);
    void (*attention_fold)(const AttentionCall& call, const AttentionPiece& piece, const float* shares);

    // The rest as in ops.Ops. Strides are in floats, from one row or token to the next; results are dense.
    void (*silu_product)(const float* gate, Index gate_stride, const float* up, Index up_stride, float* out, Index rows,
                         Index n);
    void (*rotate)(const float* x, Index x_stride, const Index* positions, const float* cos, const float* sin,
                   float* out, Index tokens, Index heads, Index head_dim);
    void (*write_kv)(const float* key, Index key_stride, const float* value, Index value_stride, void* key_pages,
                     void* value_pages, KvType kv_type, const Index* slots, Index tokens, Index kv_heads,
                     Index page_size, Index head_dim);
    void (*embedding)(const Index* ids, const void* weight, bool weight_bf16, float* out, Index tokens, Index hidden);

    // tiles: scratch, one for each kVocabularyTile logits (or less) of each row.
    void (*log_sum_exp)(const float* x, Index x_stride, float* out, TileSum* tiles, Index rows, Index n);

    float (*fold_sums)(const TileSum* tiles, Index count);

    // Of drawing from one row. draw_tile: the ids first .. first + n; the best one only where nothing is filtered.
    // whole_mass: of all n ids, where `top` is the largest z. gather: ids (rising) whose z reaches `floor`; -> how
    // many.
    DrawnTile (*draw_tile)(const DrawRow& row, const float* logits, Index first, Index n);
    std::int64_t (*whole_mass)(const DrawRow& row, const float* logits, Index n, float top);
    Index (*gather)(const DrawRow& row, const float* logits, Index n, float floor, Ranked* found);

    // Gradients, float32 and dense but for x, gate and up; each sums up in one order, too.
    void (*linear_input_grad)(const float* dy, const void* weight, bool weight_bf16, float* dx, Index rows, Index in,
                              Index out);
    // add: to what dw holds.
    void (*linear_weight_grad)(const float* dy, const float* x, Index x_stride, float* dw, Index rows, Index in,
                               Index out, bool add);
    void (*column_sums)(const float* x, float* out, Index rows, Index n);
    void (*silu_product_grad)(const float* gate, Index gate_stride, const float* up, Index up_stride, const float* dy,
                              float* dgate, float* dup, Index rows, Index n);
    void (*log_sum_exp_grad)(const float* x, Index x_stride, const float* result, const float* dy, float* dx,
                             Index rows, Index n);
    // tiles, weighted: scratch as for log_sum_exp.
    void (*token_scores)(const TokenScoresCall& call, TileSum* tiles, float* weighted);
    void (*token_scores_grad)(const TokenScoresCall& call, const float* logprob_grads, const float* entropy_grads);
    void (*attention_query_grad)(const AttentionGradCall& call, const AttentionTask& task);
    void (*attention_key_grad)(const AttentionGradCall& call, const KeyTask& task);

    // For the benchmarks, what no kernel can beat. On all threads, `repeats` rounds of multiply-adds in registers; ->
    // the floating-point operations done.
    double (*multiply_add)(Index repeats);

    // On all threads, read n floats once, in order; -> their sum.
    double (*read_memory)(const float* data, Index n);

    void (*quantise_row)(const float* x, Index in, std::int8_t* values, float* scales, std::int32_t* sums);
    void (*quantised_panel)(const LinearCall& call, const QuantisedRows& x, Index layer, Index panel, Index first,
                            Index last);
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
    // Neighbours in tasks_ and tiles, as in AttentionPiece. shares: where in the scratch the tiles' shares lie, or -1
    // when they are folded at once.
    struct Work {
        Index first_task, task_count, first_tile, last_tile, shares;
    };

    // Works that need nothing of each other, only of the levels before. cuts: those whose tiles are dealt out as
    // several of `pieces`, to be folded when all are there.
    struct Level {
        std::vector<Work> whole, pieces, cuts;
        bool parallel = false;
    };

    void share(const std::vector<AttentionTask>& tasks, const std::vector<Index>& common, Index first, Index last,
               Index tile, std::size_t level);
    void add(std::size_t level, const AttentionTask* tasks, Index count, Index first_tile, Index last_tile);
    void deal_out(Level& level);
    Index rows_of(const Work& work) const;

    AttentionCall call_;
    std::vector<AttentionTask> tasks_;
    std::vector<Level> levels_;
    Index floats_ = 0, stats_ = 0;
};

// The noise of engine/noise.py: a row's key, and the noise that an id's bits give.
std::uint64_t noise_key(std::uint64_t seed, std::uint64_t sample, std::uint64_t turn, std::uint64_t index);
double gumbel(std::uint64_t bits);

// ops.draw. Called by one thread, which makes a team of its own.
void draw(const Kernels& kernels, const DrawCall& call);

// Bytes of scratch that quantised_linear needs for the rounded x.
Index quantised_scratch(Index rows, Index in);

// Packed layers: ops.quantised_linear. Called by one thread or by all of a team, as the kernels are.
void quantised_linear(const Kernels& kernels, const LinearCall& call, void* scratch);

// The gradient of ops.attend; it adds to key_grad and value_grad. Throws std::invalid_argument as paged_attention does,
// and when spans see one row at different positions.
void attention_backward(const Kernels& kernels, const AttentionGradCall& call);

// How many threads a parallel loop may use: what torch.set_num_threads says, as torch and this module share one OpenMP.
Index max_threads();

// The table for "scalar", "avx2", "avx512" or "avx512vnni"; nullptr when this machine or this build lacks it.
const Kernels* find_kernels(const char* isa);

// The fastest table that this machine runs.
const Kernels& best_kernels();

}  // namespace palimpsest::cpu
