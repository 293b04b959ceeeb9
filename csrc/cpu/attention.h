// Attention of ragged spans over pages of keys and values (the fold is that of FlashAttention, arXiv 2205.14135,
// algorithm 1).
//
// Order: the tokens of a sequence are cut into tiles of kTile by absolute position. Within a tile a score is one FMA
// chain over rising d, times `scale`; the weights e^(score - largest score) are summed by lane (token mod 16) over
// rising tokens, then the lanes by halving; an output is one FMA chain over rising tokens. The tiles' (largest, sum,
// output) are folded left to right. Tokens that a row does not see take no part. Nothing of this depends on the other
// rows, pages, threads, or how tiles are dealt out.
//
// A piece is some rows (token, head of the group) with one key head, of one span or of several whose pages are the same
// under its tiles, so that keys and values that sequences share are read once for all of them. Few rows transpose keys
// in registers (each key is read once, from memory, in decoding); many rows share a transposed copy of the tile's keys.
#pragma once

#include "chains.h"
#include "math.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

constexpr Index kTile = kAttentionTile, kMaxDim = kAttentionMaxDim, kMaxRows = kAttentionMaxRows;
static_assert(kTile <= kBlock && kMaxDim <= kBlock, "a chain fits into one block of chains.h");

// What stays the same over the tiles of a piece.
struct Rows {
    alignas(64) float query[kMaxRows * kBlock];
    Index position[kMaxRows], number[kMaxRows];  // number: token * heads + head
    Index count = 0;
};

// One tile's share of a row: output = sum e^(score - largest) value, sum = sum e^(score - largest).
// In memory: largest, sum, 14 unused, then the outputs.
constexpr Index kHeader = kWidth;

// Continues the running (largest, sum, output) with the tile to its right; the first tile is copied.
inline void fold(float* running, const float* tile, Index vectors, bool first) {
    if (first) {
        std::memcpy(running, tile, (kHeader + vectors * kWidth) * sizeof(float));
        return;
    }
    float top = running[0] > tile[0] ? running[0] : tile[0];
    float scales[kWidth];  // two exponentials in one go
    exp_below(keep_first(F16::set(running[0] - top), 1, F16::set(tile[0] - top))).store(scales);
    float keep = scales[0], add = scales[1];
    running[0] = top;
    running[1] = std::fma(running[1], keep, tile[1] * add);
    for (Index i = 0; i < vectors; i++) {
        Index at = kHeader + i * kWidth;
        fma(F16::load(running + at), F16::set(keep), F16::load(tile + at) * F16::set(add)).store(running + at);
    }
}

inline void write_output(const float* running, float* out, Index dim) {
    F16 sum = F16::set(running[1]);
    for (Index d = 0; d < dim; d += kWidth) {
        F16 value = F16::load(running + kHeader + d) / sum;
        if (d + kWidth <= dim)
            value.store(out + d);
        else
            store_first(value, out + d, dim - d);
    }
}

// Asks the second cache for `count` elements.
template <class T>
inline void prefetch(const T* row, Index count) {
    for (Index i = 0; i < count; i += Index(64 / sizeof(T))) __builtin_prefetch(row + i, 0, 2);
}

// The tokens of a tile that some row of the piece sees, as offsets into the pages.
struct Tile {
    Index count = 0;
    Index offsets[kTile];
};

inline void locate(const AttentionCall& c, const AttentionTask& task, Index start, Index end, Tile& tile) {
    const std::int32_t* pages = c.pages + task.span * c.pages_stride;
    Index page = start / c.page_size, within = start % c.page_size;
    tile.count = larger(0, smaller(kTile, end - start));
    for (Index i = 0; i < tile.count; i++) {
        tile.offsets[i] = ((pages[page] * c.kv_heads + task.kv_head) * c.page_size + within) * c.head_dim;
        if (++within == c.page_size) within = 0, page++;
    }
}

// From a key to the value of the same token, in elements: values are wanted after keys, so the cache is asked for them
// then.
template <class T>
inline Index key_to_value(const AttentionCall& c) {
    auto keys = reinterpret_cast<std::intptr_t>(c.key_pages), values = reinterpret_cast<std::intptr_t>(c.value_pages);
    return (values - keys) / Index(sizeof(T));
}

// The keys of the sixteen tokens from t on; beyond the last one they repeat it.
template <class T>
inline void sixteen_keys(const AttentionCall& c, const Tile& tile, Index t, const T* (&keys)[kWidth]) {
    for (Index j = 0; j < kWidth; j++)
        keys[j] = static_cast<const T*>(c.key_pages) + tile.offsets[smaller(t + j, tile.count - 1)];
}

// scores[r][token], rows kBlock apart, of R rows from query row `first` on. Rows of keys are transposed in registers.
template <int R, class T>
void scores_few(const AttentionCall& c, const Rows& rows, Index first, const Tile& tile, float* scores) {
    for (Index t = 0; t < tile.count; t += kWidth) {
        const T* sixteen[kWidth];
        sixteen_keys(c, tile, t, sixteen);
        F16 total[R] = {};
        sixteen_chains<R, T>(rows.query + first * kBlock, kBlock, sixteen, c.head_dim, total, key_to_value<T>(c));
        for (int r = 0; r < R; r++) (total[r] * F16::set(c.scale)).store(scores + r * kBlock + t);
    }
}

// keys[d][token]: the keys of a tile, transposed; columns from `count` to the next multiple of kPanel repeat the last
// token.
template <class T>
void transpose_keys(const AttentionCall& c, const Tile& tile, float* keys) {
    constexpr Index step = Block<T>::kDepth;
    for (Index t = 0; t < (tile.count + kPanel - 1) / kPanel * kPanel; t += kWidth) {
        const T* sixteen[kWidth];
        sixteen_keys(c, tile, t, sixteen);
        F16 block[kWidth];
        Index d = 0;
        for (; d + step <= c.head_dim; d += step) {
            load_transposed(sixteen, d, block, key_to_value<T>(c));
#pragma GCC unroll 32
            for (int i = 0; i < step; i++) Block<T>::column(block, i).store(keys + (d + i) * kTile + t);
        }
        if (d < c.head_dim) {
            load_transposed_rest(sixteen, d, c.head_dim - d, block);
            for (int i = 0; i < c.head_dim - d; i++) Block<T>::column(block, i).store(keys + (d + i) * kTile + t);
        }
    }
}

template <int R>
void scores_many(const AttentionCall& c, const Rows& rows, Index first, const float* keys, Index count, float* scores) {
    for (Index t = 0; t < count; t += kPanel) {
        F16 acc[R][kTileVectors];
        set_zero(acc);
        auto load = [&](Index d, F16(&w)[kTileVectors]) {
#pragma GCC unroll 2
            for (int v = 0; v < kTileVectors; v++) w[v] = F16::load(keys + d * kTile + t + v * kWidth);
        };
        panel_chains(rows.query + first * kBlock, 0, c.head_dim, load, acc);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int v = 0; v < kTileVectors; v++)
                (acc[r][v] * F16::set(c.scale)).store(scores + r * kBlock + t + v * kWidth);
    }
}

// Turns the first `count` scores of a row into weights, and sets the tile's largest and sum.
inline void softmax_row(float* scores, Index count, float* tile) {
    F16 lowest = F16::set(-INFINITY), top = lowest, sums = F16::zero();
    for (Index t = 0; t < count; t += kWidth) top = maximum(top, keep_first(F16::load(scores + t), count - t, lowest));
    tile[0] = largest(top);
    top = F16::set(tile[0]);
    for (Index t = 0; t < count; t += kWidth) {
        F16 weight = keep_first(exp_below(F16::load(scores + t) - top), count - t, F16::zero());
        weight.store(scores + t);
        sums = sums + weight;
    }
    tile[1] = sum(sums);
}

// Continues the outputs of R rows (at `out`, `stride` apart) over the tokens from .. to, for kTileVectors vectors from
// d on.
template <int R, bool kWhole, class T>
void weigh_values(const AttentionCall& c, const float* weights, const Tile& tile, const Tile& next, Index from,
                  Index to, Index d, float* out, Index stride) {
    const T* values = static_cast<const T*>(c.value_pages) + d;
    const T* keys = static_cast<const T*>(c.key_pages) + d;
    F16 acc[R][kTileVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++) acc[r][v] = F16::load(out + r * stride + d + v * kWidth);
    auto load = [&](Index t, F16(&w)[kTileVectors]) {
        const T* value = values + tile.offsets[t];
        prefetch(keys + next.offsets[t], kPanel);
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++) {
            Index left = c.head_dim - d - v * kWidth;
            w[v] = kWhole      ? F16::load(value + v * kWidth)
                   : left <= 0 ? F16::zero()
                               : load_first(value + v * kWidth, smaller(left, kWidth));
        }
    };
    panel_chains(weights, from, to, load, acc);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; v++) acc[r][v].store(out + r * stride + d + v * kWidth);
}

template <int R, class T>
void weigh_values(const AttentionCall& c, const float* weights, const Tile& tile, const Tile& next, Index from,
                  Index to, float* out, Index stride) {
    for (Index d = 0; d < c.head_dim; d += kPanel)
        if (d + kPanel <= c.head_dim)
            weigh_values<R, true, T>(c, weights, tile, next, from, to, d, out, stride);
        else
            weigh_values<R, false, T>(c, weights, tile, next, from, to, d, out, stride);
}

// The tiles' shares of R rows from `first` on, which see seen[r] (rising) tokens of this tile. tiles: `stride` floats a
// row.
template <int R, class T>
void tile_rows(const AttentionCall& c, const Index* seen, float* scores, const Tile& tile, const Tile& next,
               float* tiles, Index stride) {
    for (int r = 0; r < R; r++) {
        if (seen[r] > 0) softmax_row(scores + r * kBlock, seen[r], tiles + r * stride);
        std::memset(tiles + r * stride + kHeader, 0, (stride - kHeader) * sizeof(float));
    }
    Index common = larger(seen[0], 0);
    weigh_values<R, T>(c, scores, tile, next, 0, common, tiles + kHeader, stride);
    for (int r = 0; r < R; r++)
        if (seen[r] > common)
            weigh_values<1, T>(c, scores + r * kBlock, tile, tile, common, seen[r], tiles + r * stride + kHeader,
                               stride);
}

// Where a row's fold stands. Between two pieces of a row its outputs so far, not yet divided, lie in c.out, and its
// largest score and sum in c.stats.
inline void load_state(const AttentionCall& c, Index row, float* running) {
    std::memset(running, 0, attention_share(c.head_dim) * sizeof(float));
    std::memcpy(running, c.stats + 2 * row, 2 * sizeof(float));
    std::memcpy(running + kHeader, c.out + row * c.head_dim, c.head_dim * sizeof(float));
}

// Row i of a task is head i % group of token i / group.
inline Index row_number(const AttentionCall& c, const AttentionTask& task, Index i) {
    Index group = c.heads / c.kv_heads;
    Index token = c.query_start[task.span] + task.first_token + i / group;
    return token * c.heads + task.kv_head * group + i % group;
}

inline Index position_of(const AttentionCall& c, const AttentionTask& task, Index i) {
    Index tokens = c.query_start[task.span + 1] - c.query_start[task.span], group = c.heads / c.kv_heads;
    return c.kv_length[task.span] - tokens + task.first_token + i / group;
}

// Leaves the state of a row that sees tiles from last_tile on; else writes its output.
inline void store_state(const AttentionCall& c, Index row, Index position, Index last_tile, const float* running) {
    float* out = c.out + row * c.head_dim;
    if (position < last_tile * kTile)
        write_output(running, out, c.head_dim);
    else
        std::memcpy(out, running + kHeader, c.head_dim * sizeof(float));
    if (c.stats) std::memcpy(c.stats + 2 * row, running, 2 * sizeof(float));
}

// Appends the rows of a task.
inline void read_rows(const AttentionCall& c, const AttentionTask& task, Rows& rows) {
    Index group = c.heads / c.kv_heads;
    for (Index i = 0; i < task.tokens * group; i++, rows.count++) {
        Index row = row_number(c, task, i);
        rows.number[rows.count] = row;
        rows.position[rows.count] = position_of(c, task, i);
        std::memcpy(rows.query + rows.count * kBlock,
                    c.query + row / c.heads * c.query_stride + row % c.heads * c.head_dim, c.head_dim * sizeof(float));
    }
}

// running: the states of the piece's rows, or null where the tiles' shares go to `shares`.
template <class T>
void attention_tiles(const AttentionCall& c, const AttentionPiece& piece, const Rows& rows, float* shares,
                     float* running) {
    alignas(64) float keys[kMaxDim * kTile];
    alignas(64) float scores[kTileRows * kBlock];
    alignas(64) float own_shares[kTileRows * (kHeader + kMaxDim)];
    Index stride = attention_share(c.head_dim), vectors = (stride - kHeader) / kWidth;
    Index end = smaller(rows.position[rows.count - 1] + 1, piece.last_tile * kTile);
    bool few = rows.count <= kPassRows;
    Tile places[2];
    locate(c, piece.tasks[0], piece.first_tile * kTile, end, places[piece.first_tile % 2]);
    for (Index tile = piece.first_tile; tile < piece.last_tile; tile++) {
        const Tile& here = places[tile % 2];
        Tile& next = places[(tile + 1) % 2];
        locate(c, piece.tasks[0], (tile + 1) * kTile, end, next);
        for (Index t = next.count; t < kTile; t++) next.offsets[t] = here.offsets[smaller(t, here.count - 1)];
        if (!few) transpose_keys<T>(c, here, keys);
        for (Index first = 0; first < rows.count; first += kTileRows) {
            Index seen[kTileRows], some = smaller(kTileRows, rows.count - first);
            for (Index r = 0; r < some; r++) seen[r] = smaller(kTile, rows.position[first + r] + 1 - tile * kTile);
            if (seen[some - 1] <= 0) continue;
            if (few)
                with_rows<kPassRows>(some,
                                     [&](auto n) { scores_few<decltype(n)::value, T>(c, rows, first, here, scores); });
            else
                with_rows<kTileRows>(some, [&](auto n) {
                    scores_many<decltype(n)::value>(c, rows, first, keys, seen[some - 1], scores);
                });
            float* to = running ? own_shares : shares + ((tile - piece.first_tile) * rows.count + first) * stride;
            with_rows<kTileRows>(some, [&](auto n) {
                tile_rows<decltype(n)::value, T>(c, seen, scores, here, first == 0 ? next : here, to, stride);
            });
            if (!running) continue;
            for (Index r = 0; r < some; r++)
                if (seen[r] > 0) fold(running + (first + r) * stride, to + r * stride, vectors, tile == 0);
        }
    }
}

inline void attention_piece(const AttentionCall& c, const AttentionPiece& piece, float* shares) {
    Rows rows;
    for (Index i = 0; i < piece.task_count; i++) read_rows(c, piece.tasks[i], rows);
    alignas(64) float states[kMaxRows * (kHeader + kMaxDim)];
    float* running = shares ? nullptr : states;
    Index stride = attention_share(c.head_dim);
    if (running && piece.first_tile > 0)
        for (Index i = 0; i < rows.count; i++) load_state(c, rows.number[i], running + i * stride);
    if (c.kv_bf16)
        attention_tiles<BFloat16>(c, piece, rows, shares, running);
    else
        attention_tiles<float>(c, piece, rows, shares, running);
    if (!running) return;
    for (Index i = 0; i < rows.count; i++)
        store_state(c, rows.number[i], rows.position[i], piece.last_tile, running + i * stride);
}

// Folds the shares of all tiles of a piece.
inline void attention_fold(const AttentionCall& c, const AttentionPiece& piece, const float* shares) {
    Index stride = attention_share(c.head_dim), rows = 0, at = 0;
    for (Index i = 0; i < piece.task_count; i++) rows += piece.tasks[i].tokens * (c.heads / c.kv_heads);
    for (Index i = 0; i < piece.task_count; i++) {
        const AttentionTask& task = piece.tasks[i];
        for (Index r = 0; r < task.tokens * (c.heads / c.kv_heads); r++, at++) {
            alignas(64) float running[kHeader + kMaxDim];
            Index row = row_number(c, task, r), position = position_of(c, task, r);
            if (piece.first_tile > 0) load_state(c, row, running);
            for (Index tile = piece.first_tile; tile < piece.last_tile && tile * kTile <= position; tile++)
                fold(running, shares + ((tile - piece.first_tile) * rows + at) * stride, (stride - kHeader) / kWidth,
                     tile == 0);
            store_state(c, row, position, piece.last_tile, running);
        }
    }
}

}  // namespace palimpsest::cpu::PALIMPSEST_ISA
