#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>

#include "team.h"

namespace palimpsest::cpu {

// What a layer needs besides the residual stream x. gate, up: of kMlpRows rows at a time. rounded: of a quantised
// layer.
struct Decoder::Scratch {
    float *x, *normed, *projected, *query, *key, *value, *rotated_query, *rotated_key, *attended, *gate, *up, *shares,
        *rounded;
};

// The rows that go on behind a layer's keys and values: all, with rows == nullptr, or the wanted ones.
struct Decoder::Queries {
    const Index *rows, *positions;
    Index count;
    AttentionPlan plan;
};

namespace {

// Rows of the MLP computed at once: gate and up of a long prefill would not fit into the cache, nor cheaply into
// memory.
constexpr Index kMlpRows = 512;

void require(bool good, const char* what, Index at) {
    if (!good) throw std::invalid_argument(std::string("decoder: ") + what + " of row " + std::to_string(at));
}

struct To {
    const LinearWeights& weights;
    float* y;
};

// Layers over the same x, dense [rows, in].
LinearCall layers_over(const float* x, Index rows, std::initializer_list<To> layers) {
    Index in = layers.begin()->weights.in;
    LinearCall call{x, in, rows, in, {}, 0};
    for (const To& to : layers) {
        const LinearWeights& w = to.weights;
        call.layers[call.count++] = {w.weight.data, w.weight.bf16, w.packed, w.bias.data, w.bias.bf16, w.out, to.y};
    }
    return call;
}

// The numbers of the wanted rows, rising.
std::vector<Index> wanted_rows(const DecoderBatch& batch) {
    std::vector<Index> rows;
    for (Index span = 0; span < batch.spans; span++) {
        Index count = batch.wanted_start[span + 1] - batch.wanted_start[span], end = batch.query_start[span + 1];
        if (batch.wanted_start[0] != 0 || count < 0 || count > end - batch.query_start[span] || end > batch.tokens)
            throw std::invalid_argument("decoder: span " + std::to_string(span) + " lacks rows that are wanted");
        for (Index row = end - count; row < end; row++) rows.push_back(row);
    }
    return rows;
}

// Moves some rows (rising) of x to its start.
void keep_rows(float* x, const Index* rows, Index count, Index size) {
#pragma omp single
    for (Index i = 0; i < count; i++) std::memmove(x + i * size, x + rows[i] * size, size * sizeof(float));
}

}  // namespace

void Decoder::check(const DecoderBatch& batch) const {
    for (Index t = 0; t < batch.tokens; t++) {
        require(batch.ids[t] >= 0 && batch.ids[t] < shape_.vocabulary, "token id", t);
        require(batch.positions[t] >= 0 && batch.positions[t] < shape_.window, "position", t);
        require(batch.slots[t] >= 0 && batch.slots[t] < shape_.page_count * shape_.page_size, "slot", t);
    }
}

void Decoder::linear(const LinearCall& call, float* rounded) const {
    if (call.layers[0].packed.values)
        quantised_linear(kernels_, call, rounded);
    else
        kernels_.linear(call);
}

void Decoder::norm(const Parameter& weight, const float* x, float* y, Index rows, Index size) const {
    kernels_.rms_norm(x, weight.data, weight.bf16, y, rows, size, size, shape_.eps);
}

void Decoder::run_layer(const LayerWeights& layer, const DecoderBatch& batch, const Queries& queries,
                        const Scratch& s) const {
    Index tokens = batch.tokens, rows = queries.count;
    Index heads = shape_.heads, kv_heads = shape_.kv_heads, dim = shape_.head_dim;
    norm(layer.input_norm, s.x, s.normed, tokens, shape_.hidden);
    To query_to{layer.query, s.query}, key_to{layer.key, s.key}, value_to{layer.value, s.value};
    if (queries.rows) {
        linear(layers_over(s.normed, tokens, {key_to, value_to}), s.rounded);
        for (float* x : {s.x, s.normed}) keep_rows(x, queries.rows, rows, shape_.hidden);
        linear(layers_over(s.normed, rows, {query_to}), s.rounded);
    } else {
        linear(layers_over(s.normed, tokens, {query_to, key_to, value_to}), s.rounded);
    }
    if (layer.query_norm.data) {
        norm(layer.query_norm, s.query, s.attended, rows * heads, dim);
        norm(layer.key_norm, s.key, s.projected, tokens * kv_heads, dim);
    }
    const float* query = layer.query_norm.data ? s.attended : s.query;
    const float* key = layer.key_norm.data ? s.projected : s.key;
    kernels_.rotate(query, heads * dim, queries.positions, shape_.cos, shape_.sin, s.rotated_query, rows, heads, dim);
    kernels_.rotate(key, kv_heads * dim, batch.positions, shape_.cos, shape_.sin, s.rotated_key, tokens, kv_heads, dim);
    kernels_.write_kv(s.rotated_key, kv_heads * dim, s.value, kv_heads * dim, layer.key_pages, layer.value_pages,
                      shape_.kv_type, batch.slots, tokens, kv_heads, shape_.page_size, dim);
    queries.plan.run(kernels_, layer.key_pages, layer.value_pages, s.rotated_query, s.attended, s.shares);
    LinearCall output = layers_over(s.attended, rows, {{layer.output, s.projected}});
    output.finish = Finish::kAdd, output.residual = s.x;
    linear(output, s.rounded);
    norm(layer.post_norm, s.x, s.normed, rows, shape_.hidden);
    Index parts = (rows + kMlpRows - 1) / kMlpRows;
    for (Index part = 0; part < parts; part++) {
        Index first = rows * part / parts, some = rows * (part + 1) / parts - first;
        LinearCall gate = layers_over(s.normed + first * shape_.hidden, some, {{layer.gate, s.gate}, {layer.up, s.up}});
        gate.finish = Finish::kSiluProduct;
        linear(gate, s.rounded);
        LinearCall down = layers_over(s.gate, some, {{layer.down, s.projected}});
        down.finish = Finish::kAdd, down.residual = s.x + first * shape_.hidden;
        linear(down, s.rounded);
    }
}

AttentionCall Decoder::attention(const DecoderBatch& batch, const std::int32_t* query_start) const {
    return {nullptr,
            shape_.heads * shape_.head_dim,
            nullptr,
            nullptr,
            shape_.kv_type,
            query_start,
            batch.kv_length,
            batch.pages,
            batch.pages_stride,
            batch.spans,
            shape_.heads,
            shape_.kv_heads,
            shape_.head_dim,
            shape_.page_size,
            shape_.page_count,
            shape_.scale,
            nullptr};
}

void Decoder::run(const DecoderBatch& batch, float* hidden) {
    check(batch);
    Index rows = batch.tokens, queries = rows * shape_.heads * shape_.head_dim;
    Index keys = rows * shape_.kv_heads * shape_.head_dim, stream = rows * shape_.hidden, wide = 0, rounded = 0;
    for (const LayerWeights& layer : layers_) {
        Index some = std::min(rows, kMlpRows);
        wide = std::max(wide, some * layer.gate.out);
        for (const LinearWeights* w : {&layer.query, &layer.output, &layer.gate, &layer.down})
            if (w->packed.values)
                rounded = std::max(rounded, quantised_scratch(w == &layer.down ? some : rows, w->in) / 4);
    }
    Queries all{nullptr, batch.positions, rows, AttentionPlan(attention(batch, batch.query_start))};
    std::vector<Index> wanted = wanted_rows(batch), positions;
    for (Index row : wanted) positions.push_back(batch.positions[row]);
    std::optional<Queries> some;  // of the last layer
    if (Index(wanted.size()) < rows)
        some = Queries{wanted.data(), positions.data(), Index(wanted.size()),
                       AttentionPlan(attention(batch, batch.wanted_start))};
    const Queries& last = some ? *some : all;
    Index shares = std::max(all.plan.floats(), last.plan.floats());
    Index sizes[] = {stream, stream, std::max(stream, keys), queries, keys, keys, queries, keys, queries, wide, wide,
                     shares, rounded};
    Index total = 0;
    for (Index& size : sizes) total += size = (size + 15) / 16 * 16;
    float* parts[std::size(sizes)];
    float* next = buffer_.floats(total);
    for (std::size_t i = 0; i < std::size(sizes); next += sizes[i++]) parts[i] = next;
    Scratch s{parts[0], parts[1], parts[2], parts[3],  parts[4],  parts[5], parts[6],
              parts[7], parts[8], parts[9], parts[10], parts[11], parts[12]};
#pragma omp parallel
    {
        kernels_.embedding(batch.ids, embedding_.data, embedding_.bf16, s.x, rows, shape_.hidden);
        for (const LayerWeights& layer : layers_) run_layer(layer, batch, &layer == &layers_.back() ? last : all, s);
        norm(norm_, s.x, hidden, last.count, shape_.hidden);
    }
}

}  // namespace palimpsest::cpu
