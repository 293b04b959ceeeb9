// The gradients of attention (FlashAttention, arXiv 2205.14135, algorithm 4). With w = e^(score - largest) / sum of a
// row and key, from the largest and sum that the forward pass left, and delta = output . output's gradient:
//   the value's gradient sums up w * output's gradient; a score's is w * (output's gradient . value - delta) * scale;
//   those of query and key sum up that times key or query.
//
// Order: scores are those of the forward pass, bit for bit. A query's gradient is one FMA chain over rising tokens for
// each tile of kTile positions, and the tiles are added in order: nothing depends on the other rows. A key's and a
// value's is one chain over rising rows (token, head of the group) for each block of kMaxRows / group tokens, aligned
// to absolute position; the blocks are added in order, those of the first span that sees the key first. So it depends
// on the order of these spans, and on where a sequence is cut into spans unless that is between two blocks; it depends
// on neither threads, nor slots, nor the rest of the batch.
#pragma once

#include "attention.h"
#include "tile.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

// The same call with other operands: rows from `rows`, and `vectors` (dense [T, .., dim]) in the place of keys and of
// values.
inline AttentionCall with_operands(const AttentionCall& c, const float* rows, const void* vectors, float scale) {
    AttentionCall other = c;
    other.query = rows, other.key_pages = other.value_pages = vectors, other.scale = scale;
    return other;
}

// A row's largest score, sum of weights and delta, for one row or one per lane.
struct RowState {
    F16 largest, sum, delta;
};

// Turns a score and output's gradient . value into the weight and the score's gradient.
inline void score_grad(const RowState& row, float scale, F16& score, F16& product) {
    score = exp_below(score - row.largest) / row.sum;
    product = score * (product - row.delta) * F16::set(scale);
}

inline void add_row(const float* from, float* to, Index n) {
    for (Index i = 0; i < n; i += kWidth) add_outputs(F16::load(from + i), to + i, n - i, false);
}

// ---- the gradient of queries ----

struct QueryTile {
    Tile tokens;
    alignas(64) float keys[kMaxDim * kTile], values[kMaxDim * kTile];  // transposed: columns of kTile tokens
    Index seen[kTileRows];
};

// Adds what one tile gives the gradients of R rows, from row `first` on of a task. totals: `stride` floats a row.
template <int R>
void query_grad_tile(const AttentionCall& c, const AttentionCall& products_call, const Rows& queries, const Rows& grads,
                     Index first, const RowState* states, const QueryTile& tile, float* totals, Index stride) {
    alignas(64) float scores[kTileRows * kBlock], products[kTileRows * kBlock], share[kTileRows * kMaxDim];
    std::memset(share, 0, R * stride * sizeof(float));
    const Index* seen = tile.seen;
    scores_many<R>(c, queries, first, tile.keys, seen[R - 1], scores);
    scores_many<R>(products_call, grads, first, tile.values, seen[R - 1], products);
    for (int r = 0; r < R; r++)
        for (Index t = 0; t < seen[r]; t += kWidth) {
            F16 score = F16::load(scores + r * kBlock + t), product = F16::load(products + r * kBlock + t);
            score_grad(states[first + r], c.scale, score, product);
            product.store(products + r * kBlock + t);
        }
    Index common = larger(seen[0], 0);
    weigh_values<R, float>(c, products, tile.tokens, nullptr, 0, common, share, stride);
    for (int r = 0; r < R; r++) {
        if (seen[r] > common)
            weigh_values<1, float>(c, products + r * kBlock, tile.tokens, nullptr, common, seen[r], share + r * stride,
                                   stride);
        if (seen[r] > 0) add_row(share + r * stride, totals + (first + r) * stride, stride);
    }
}

inline void attention_query_grad(const AttentionGradCall& g, const AttentionTask& task) {
    const AttentionCall& f = g.forward;
    AttentionCall c = with_operands(f, f.query, f.key_pages, f.scale);
    AttentionCall products_call = with_operands(f, g.out_grad, f.value_pages, 1.0f);
    Rows queries, grads;
    read_rows(c, task, queries);
    read_rows(products_call, task, grads);
    RowState states[kMaxRows];
    for (Index i = 0; i < queries.count; i++) {
        Index row = queries.number[i];
        states[i] = {F16::set(f.stats[2 * row]), F16::set(f.stats[2 * row + 1]), F16::set(g.delta[row])};
    }
    alignas(64) float totals[kMaxRows * kMaxDim];
    QueryTile tile;
    Index stride = attention_share(c.head_dim) - kHeader, end = queries.position[queries.count - 1] + 1;
    std::memset(totals, 0, queries.count * stride * sizeof(float));
    for (Index start = 0; start < end; start += kTile) {
        locate(c, task, start, end, c.head_dim, tile.tokens);
        transpose_keys<float>(c, tile.tokens, tile.keys);
        transpose_keys<float>(products_call, tile.tokens, tile.values);
        for (Index first = 0; first < queries.count; first += kTileRows) {
            Index some = smaller(kTileRows, queries.count - first);
            for (Index r = 0; r < some; r++) tile.seen[r] = smaller(kTile, queries.position[first + r] + 1 - start);
            if (tile.seen[some - 1] <= 0) continue;
            with_rows<kTileRows>(some, [&](auto n) {
                query_grad_tile<decltype(n)::value>(c, products_call, queries, grads, first, states, tile, totals,
                                                    stride);
            });
        }
    }
    for (Index i = 0; i < queries.count; i++)
        std::memcpy(f.out + queries.number[i] * f.head_dim, totals + i * stride, f.head_dim * sizeof(float));
}

// ---- the gradients of keys and values ----

// Rows (token, head of the group) of one span, `group` for each token from position `first` on. The arrays are filled
// up to a whole panel.
struct QueryBlock {
    alignas(64) float queries[kMaxDim * kTile], grads[kMaxDim * kTile];  // transposed: columns of kTile rows
    alignas(64) float largest[kTile] = {}, sum[kTile] = {}, delta[kTile] = {};
    Tile rows;
    Index first;
};

inline void read_block(const AttentionGradCall& g, const AttentionTask& task, QueryBlock& block) {
    const AttentionCall& c = g.forward;
    block.first = position_of(c, task, 0);
    block.rows.count = task.tokens * (c.heads / c.kv_heads);
    for (Index i = 0; i < block.rows.count; i++) {
        Index row = row_number(c, task, i);
        block.rows.offsets[i] = row * c.head_dim;
        block.largest[i] = c.stats[2 * row], block.sum[i] = c.stats[2 * row + 1], block.delta[i] = g.delta[row];
    }
    transpose_keys<float>(with_operands(c, nullptr, c.query, 1.0f), block.rows, block.queries);
    transpose_keys<float>(with_operands(c, nullptr, g.out_grad, 1.0f), block.rows, block.grads);
}

// Adds to R rows at `to` (their offsets) the sums over the block's rows of weights[r][row] * vectors[row]. Row r takes
// part from hidden[r] (rising) on.
template <int R>
void add_weighed(const AttentionCall& c, const float* weights, const QueryBlock& block, const Index* hidden, float* to,
                 const Index* offsets) {
    alignas(64) float share[kTileRows * kMaxDim];
    Index stride = attention_share(c.head_dim) - kHeader, common = smaller(hidden[R - 1], block.rows.count);
    std::memset(share, 0, R * stride * sizeof(float));
    for (int r = 0; r < R; r++)
        if (hidden[r] < common)
            weigh_values<1, float>(c, weights + r * kBlock, block.rows, nullptr, hidden[r], common, share + r * stride,
                                   stride);
    weigh_values<R, float>(c, weights, block.rows, nullptr, common, block.rows.count, share, stride);
    for (int r = 0; r < R; r++)
        if (hidden[r] < block.rows.count) add_row(share + r * stride, to + offsets[r], c.head_dim);
}

// What one block of rows gives to R keys, from key `first` on of those in `keys`.
template <int R>
void key_grad_tile(const AttentionGradCall& g, const Rows& keys, const Rows& values, Index first, const Index* offsets,
                   const QueryBlock& block) {
    alignas(64) float scores[kTileRows * kBlock], products[kTileRows * kBlock];
    const AttentionCall& f = g.forward;
    AttentionCall c = with_operands(f, nullptr, f.query, f.scale);
    AttentionCall products_call = with_operands(f, nullptr, g.out_grad, 1.0f);
    Index hidden[R], group = f.heads / f.kv_heads;
    for (int r = 0; r < R; r++) hidden[r] = larger(0, keys.position[first + r] - block.first) * group;
    scores_many<R>(c, keys, first, block.queries, block.rows.count, scores);
    scores_many<R>(products_call, values, first, block.grads, block.rows.count, products);
    for (Index i = hidden[0] / kWidth * kWidth; i < block.rows.count; i += kWidth) {
        RowState state{F16::load(block.largest + i), F16::load(block.sum + i), F16::load(block.delta + i)};
        for (int r = 0; r < R; r++) {
            F16 score = F16::load(scores + r * kBlock + i), product = F16::load(products + r * kBlock + i);
            score_grad(state, f.scale, score, product);
            score.store(scores + r * kBlock + i);
            product.store(products + r * kBlock + i);
        }
    }
    add_weighed<R>(products_call, scores, block, hidden, g.value_grad, offsets + first);
    add_weighed<R>(c, products, block, hidden, g.key_grad, offsets + first);
}

// What one span gives to the keys of a task.
inline void key_grad_span(const AttentionGradCall& g, const KeyTask& task, Index span) {
    const AttentionCall& c = g.forward;
    Index tokens = c.query_start[span + 1] - c.query_start[span], length = c.kv_length[span], start = length - tokens;
    Tile tile;
    locate(c, {span, task.kv_head, 0, 0}, task.first_key, smaller(length, task.first_key + kMaxRows), c.head_dim, tile);
    Rows keys, values;
    keys.count = values.count = tile.count;
    for (Index i = 0; i < tile.count; i++) {
        keys.position[i] = task.first_key + i;
        std::memcpy(keys.query + i * kBlock, static_cast<const float*>(c.key_pages) + tile.offsets[i],
                    c.head_dim * sizeof(float));
        std::memcpy(values.query + i * kBlock, static_cast<const float*>(c.value_pages) + tile.offsets[i],
                    c.head_dim * sizeof(float));
    }
    Index most = larger(1, kMaxRows / (c.heads / c.kv_heads));
    QueryBlock block;
    for (Index at = larger(start, task.first_key), next; at < length; at = next) {
        next = smaller((at / most + 1) * most, length);
        read_block(g, {span, task.kv_head, at - start, next - at}, block);
        for (Index first = 0; first < tile.count && keys.position[first] < next; first += kTileRows)
            with_rows<kTileRows>(smaller(kTileRows, tile.count - first), [&](auto n) {
                key_grad_tile<decltype(n)::value>(g, keys, values, first, tile.offsets, block);
            });
    }
}

inline void attention_key_grad(const AttentionGradCall& g, const KeyTask& task) {
    for (Index i = 0; i < task.span_count; i++)
        if (g.forward.kv_length[task.spans[i]] > task.first_key) key_grad_span(g, task, task.spans[i]);
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
