// The layer stack in one call: the ops of engine/model.py in the same order, by the same kernels, in one parallel
// region.
#pragma once

#include <vector>

#include "../huge_pages.h"
#include "kernels.h"

namespace palimpsest::cpu {

// A tensor read in place, float32 or bfloat16; null where the model has none.
struct Parameter {
    const void* data = nullptr;
    bool bf16 = false;
};

// y = x W^T + b, W [out, in]: either `weight` or `packed`.
struct LinearWeights {
    Parameter weight, bias;
    Index in = 0, out = 0;
    PackedWeight packed{};
};

struct LayerWeights {
    Parameter input_norm, post_norm, query_norm, key_norm;  // the last two only in Qwen3
    LinearWeights query, key, value, output, gate, up, down;
    void* key_pages = nullptr;
    void* value_pages = nullptr;
};

struct DecoderShape {
    Index hidden, heads, kv_heads, head_dim, vocabulary, window, page_size, page_count;
    KvType kv_type;
    float eps, scale;
    const float* cos;
    const float* sin;
};

// The ragged batch of a step, as in engine/model.py. wanted_start: like query_start, of the rows at each span's end
// whose hidden rows are wanted.
struct DecoderBatch {
    const Index *ids, *positions, *slots;
    const std::int32_t *query_start, *kv_length, *pages, *wanted_start;
    Index tokens, spans, pages_stride;
};

class Decoder {
  public:
    Decoder(const Kernels& kernels, const DecoderShape& shape, Parameter embedding, Parameter norm)
        : kernels_(kernels), shape_(shape), embedding_(embedding), norm_(norm) {}

    void add_layer(const LayerWeights& layer) { layers_.push_back(layer); }

    // Writes the normed hidden rows [wanted, hidden]; of the others the last layer computes only keys and values.
    // Throws std::invalid_argument for ids, positions, slots or spans that point outside of what they describe.
    void run(const DecoderBatch& batch, float* hidden);

  private:
    struct Scratch;
    struct Queries;

    void check(const DecoderBatch& batch) const;
    void run_layer(const LayerWeights& layer, const DecoderBatch& batch, const Queries& queries,
                   const Scratch& scratch) const;
    AttentionCall attention(const DecoderBatch& batch, const std::int32_t* query_start) const;
    void linear(const LinearCall& call, float* rounded) const;
    void norm(const Parameter& weight, const float* x, float* y, Index rows, Index size) const;

    const Kernels& kernels_;
    DecoderShape shape_;
    Parameter embedding_, norm_;
    std::vector<LayerWeights> layers_;
    HugeBuffer buffer_;  // grows to the largest step seen, and stays: no allocation on the hot path
};

}  // namespace palimpsest::cpu
