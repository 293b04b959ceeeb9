// Attention of ragged spans over pages of keys and values (the fold is that of FlashAttention, arXiv 2205.14135,
// algorithm 1).
//
// Order: the tokens of a sequence are cut into tiles of kTile by absolute position. Within a tile a score is one FMA
// chain over rising d, times `scale`; the weights e^(score - largest score) are summed by lane (token mod 16) over
// rising tokens, then the lanes by halving; an output is one FMA chain over rising tokens. With int8 the chains run
// over the codes: a score is then multiplied by the key's scale, and a weight, once summed up, by the value's. The
// tiles' (largest, sum, output) are folded left to right. Tokens that a row does not see take no part. Nothing of this
// depends on the other rows, pages, threads, or how tiles are dealt out.
//
// A piece is some rows (token, head of the group) with one key head, of one span or of several whose pages are the same
// under its tiles, so that keys and values that sequences share are read once for all of them. Few rows transpose keys
// in registers (each key is read once, from memory, in decoding); many rows share a transposed copy of the tile's keys.
#pragma once

#include <type_traits>

#include "chains.h"
#include "kv_rows.h"
#include "math.h"

namespace palimpsest::cpu::PALIMPSEST_ISA {

constexpr Index kTile = kAttentionTile, kMaxDim = kAttentionMaxDim, kMaxRows = kAttentionMaxRows;
constexpr Index kPieceRows = kAttentionPieceRows;
static_assert(kTile <= kBlock && kMaxDim <= kBlock, "a chain fits into one block of chains.h");

// What stays the same over the tiles of a piece.
struct Rows {
    alignas(64) float query[kPieceRows * kBlock];
    Index position[kPieceRows], number[kPieceRows];  // number: token * heads + head
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

// Asks the second cache for a row of keys or values. Lines are asked for in rising order: the hardware then goes on.
template <class T>
inline void prefetch_row(const AttentionCall& c, const T* row) {
    const char* bytes = reinterpret_cast<const char*>(row);
    for (Index i = 0; i < row_size<T>(c.head_dim) * Index(sizeof(T)); i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

// The tokens of a tile that some row of the piece sees, as offsets into the pages.
struct Tile {
    Index count = 0;
    Index offsets[kTile];
};

// row: elements that a token takes.
inline void locate(const AttentionCall& c, const AttentionTask& task, Index start, Index end, Index row, Tile& tile) {
    const std::int32_t* pages = c.pages + task.span * c.pages_stride;
    Index page = start / c.page_size, within = start % c.page_size;
    tile.count = larger(0, smaller(kTile, end - start));
    for (Index t = 0; t < tile.count; page++, within = 0) {
        Index some = smaller(c.page_size - within, tile.count - t);
        Index at = ((pages[page] * c.kv_heads + task.kv_head) * c.page_size + within) * row;
        for (Index i = 0; i < some; i++) tile.offsets[t + i] = at + i * row;
        t += some;
    }
}

// What the tokens' int8 codes count in; with other types nothing of it is read.
struct Scales {
    alignas(64) float key[kTile] = {}, value[kTile] = {};
};

inline void read_scales(const AttentionCall& c, const Tile& tile, Scales& scales) {
    for (Index t = 0; t < tile.count; t++) {
        scales.key[t] = row_scale(static_cast<const KvInt8*>(c.key_pages) + tile.offsets[t], c.head_dim);
        scales.value[t] = row_scale(static_cast<const KvInt8*>(c.value_pages) + tile.offsets[t], c.head_dim);
    }
}

// The keys of sixteen tokens of a tile; beyond the last one they repeat it. As their columns are read the cache is
// asked for the values of the same tokens, which are wanted after the keys.
template <class T>
struct SixteenKeys {
    const T* rows[kWidth];
    Index ahead, asked = 0, each;

    SixteenKeys(const AttentionCall& c, const Tile& tile, Index t)
        : ahead(static_cast<const char*>(c.value_pages) - static_cast<const char*>(c.key_pages)),
          each(divide_up(kWidth * Columns<T>::kDepth, c.head_dim)) {
        for (Index j = 0; j < kWidth; j++)
            rows[j] = static_cast<const T*>(c.key_pages) + tile.offsets[smaller(t + j, tile.count - 1)];
    }
    void ask(const AttentionCall& c) {
        for (Index end = smaller(kWidth, asked + each); asked < end; asked++)
            prefetch_row(c, reinterpret_cast<const T*>(reinterpret_cast<const char*>(rows[asked]) + ahead));
    }
};

template <int R, class T>
__attribute__((noinline)) void advance_rest(const AttentionCall& c, const float* x, const SixteenKeys<T>& keys, Index d,
                                            F16 (&acc)[R]) {
    F16 t[8];
    load_columns_rest(keys.rows, d, c.head_dim - d, t);
    for (int i = 0; i < c.head_dim - d; i++) {
        F16 column = Columns<T>::column(t, i);
        for (int r = 0; r < R; r++) acc[r] = fma(F16::set(x[r * kBlock + d + i]), column, acc[r]);
    }
}

// scores[r][token], rows kBlock apart, of R rows from query row `first` on. Rows of keys are transposed in registers.
template <int R, class T>
void scores_few(const AttentionCall& c, const Rows& rows, Index first, const Tile& tile, float* scores) {
    constexpr int depth = Columns<T>::kDepth;
    const float* x = rows.query + first * kBlock;
    for (Index t = 0; t < tile.count; t += kWidth) {
        SixteenKeys<T> keys(c, tile, t);
        F16 acc[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r] = F16::zero();
        Index d = 0;
        for (; d + depth <= c.head_dim; d += depth) {
            F16 columns[8];
            keys.ask(c);
            load_columns(keys.rows, d, columns);
#pragma GCC unroll 32
            for (int i = 0; i < depth; i++) {
                F16 column = Columns<T>::column(columns, i);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) acc[r] = fma(F16::set(x[r * kBlock + d + i]), column, acc[r]);
            }
        }
        if (d < c.head_dim) advance_rest<R, T>(c, x, keys, d, acc);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) (acc[r] * F16::set(c.scale)).store(scores + r * kBlock + t);
    }
}

// keys[d][token]: the keys of a tile, transposed; columns from `count` to the next multiple of kPanel repeat the last
// token.
template <class T>
void transpose_keys(const AttentionCall& c, const Tile& tile, float* keys) {
    constexpr Index depth = Columns<T>::kDepth;
    for (Index t = 0; t < (tile.count + kPanel - 1) / kPanel * kPanel; t += kWidth) {
        SixteenKeys<T> sixteen(c, tile, t);
        F16 columns[8];
        Index d = 0;
        for (; d + depth <= c.head_dim; d += depth) {
            sixteen.ask(c);
            load_columns(sixteen.rows, d, columns);
#pragma GCC unroll 32
            for (int i = 0; i < depth; i++) Columns<T>::column(columns, i).store(keys + (d + i) * kTile + t);
        }
        if (d < c.head_dim) {
            load_columns_rest(sixteen.rows, d, c.head_dim - d, columns);
            for (int i = 0; i < c.head_dim - d; i++) Columns<T>::column(columns, i).store(keys + (d + i) * kTile + t);
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
        panel_chains(rows.query + first * kBlock, kBlock, 0, c.head_dim, load, acc);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int v = 0; v < kTileVectors; v++)
                (acc[r][v] * F16::set(c.scale)).store(scores + r * kBlock + t + v * kWidth);
    }
}

// Turns the first `count` scores of a row into weights, and sets the tile's largest and sum. scales: of int8, or null.
inline void softmax_row(float* scores, Index count, const Scales* scales, float* tile) {
    F16 lowest = F16::set(-INFINITY), top = lowest, sums = F16::zero();
    Index whole = count / kWidth * kWidth, rest = count - whole;
    if (scales)
        for (Index t = 0; t < count; t += kWidth)
            (F16::load(scores + t) * F16::load(scales->key + t)).store(scores + t);
    for (Index t = 0; t < whole; t += kWidth) top = maximum(top, F16::load(scores + t));
    if (rest) top = maximum(top, keep_first(F16::load(scores + whole), rest, lowest));
    tile[0] = largest(top);
    top = F16::set(tile[0]);
    for (Index t = 0; t < whole; t += kWidth) {
        F16 weight = exp_below(F16::load(scores + t) - top);
        weight.store(scores + t);
        sums = sums + weight;
    }
    if (rest) {
        F16 weight = keep_first(exp_below(F16::load(scores + whole) - top), rest, F16::zero());
        weight.store(scores + whole);
        sums = sums + weight;
    }
    tile[1] = sum(sums);
    if (scales)
        for (Index t = 0; t < count; t += kWidth)
            (F16::load(scores + t) * F16::load(scales->value + t)).store(scores + t);
}

// Continues the outputs of R rows (at `out`, `stride` apart) over the tokens from .. to, for V vectors from d on. Asks
// the cache for the keys of `next`, if given.
template <int R, int V, bool kWhole, class T>
void weigh_values(const AttentionCall& c, const float* weights, const Tile& tile, const Tile* next, Index from,
                  Index to, Index d, float* out, Index stride) {
    const T* values = static_cast<const T*>(c.value_pages) + d;
    const T* keys = static_cast<const T*>(c.key_pages);
    F16 acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[r][v] = F16::load(out + r * stride + d + v * kWidth);
    for (Index t = from; t < to; t++) {
        const T* value = values + tile.offsets[t];
        if (next) prefetch_row(c, keys + next->offsets[t]);
        F16 w[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            Index left = c.head_dim - d - v * kWidth;
            w[v] = kWhole      ? F16::load(value + v * kWidth)
                   : left <= 0 ? F16::zero()
                               : load_first(value + v * kWidth, smaller(left, kWidth));
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            F16 weight = F16::set(weights[r * kBlock + t]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = fma(weight, w[v], acc[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[r][v].store(out + r * stride + d + v * kWidth);
}

template <int R, class T>
void weigh_values(const AttentionCall& c, const float* weights, const Tile& tile, const Tile* next, Index from,
                  Index to, float* out, Index stride) {
    constexpr int wide = 2 * R <= kTileRows ? 2 * kTileVectors : kTileVectors;
    Index d = 0;
    for (; d + wide * kWidth <= c.head_dim; d += wide * kWidth)
        weigh_values<R, wide, true, T>(c, weights, tile, d == 0 ? next : nullptr, from, to, d, out, stride);
    for (; d < c.head_dim; d += kPanel)
        if (d + kPanel <= c.head_dim)
            weigh_values<R, kTileVectors, true, T>(c, weights, tile, d == 0 ? next : nullptr, from, to, d, out, stride);
        else
            weigh_values<R, kTileVectors, false, T>(c, weights, tile, d == 0 ? next : nullptr, from, to, d, out,
                                                    stride);
}

// The tiles' shares of R rows from `first` on, which see seen[r] (rising) tokens of this tile. tiles: `stride` floats a
// row.
template <int R, class T>
void tile_rows(const AttentionCall& c, const Index* seen, float* scores, const Tile& tile, const Tile* next,
               const Scales* scales, float* tiles, Index stride) {
    for (int r = 0; r < R; r++) {
        if (seen[r] > 0) softmax_row(scores + r * kBlock, seen[r], scales, tiles + r * stride);
        std::memset(tiles + r * stride + kHeader, 0, (stride - kHeader) * sizeof(float));
    }
    Index common = larger(seen[0], 0);
    weigh_values<R, T>(c, scores, tile, next, 0, common, tiles + kHeader, stride);
    for (int r = 0; r < R; r++)
        if (seen[r] > common)
            weigh_values<1, T>(c, scores + r * kBlock, tile, nullptr, common, seen[r], tiles + r * stride + kHeader,
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
    Index stride = attention_share(c.head_dim), vectors = (stride - kHeader) / kWidth, row = row_size<T>(c.head_dim);
    Index end = smaller(rows.position[rows.count - 1] + 1, piece.last_tile * kTile);
    bool few = rows.count <= kPassRows;
    Scales own_scales, *scales = std::is_same_v<T, KvInt8> ? &own_scales : nullptr;
    Tile places[2];
    locate(c, piece.tasks[0], piece.first_tile * kTile, end, row, places[piece.first_tile % 2]);
    for (Index tile = piece.first_tile; tile < piece.last_tile; tile++) {
        const Tile& here = places[tile % 2];
        Tile& next = places[(tile + 1) % 2];
        locate(c, piece.tasks[0], (tile + 1) * kTile, end, row, next);
        for (Index t = next.count; t < kTile; t++) next.offsets[t] = here.offsets[smaller(t, here.count - 1)];
        if (scales) read_scales(c, here, *scales);
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
            const Tile* ask = first == 0 && next.count > 0 ? &next : nullptr;
            with_rows<kTileRows>(some, [&](auto n) {
                tile_rows<decltype(n)::value, T>(c, seen, scores, here, ask, scales, to, stride);
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
    alignas(64) float states[kPieceRows * (kHeader + kMaxDim)];
    float* running = shares ? nullptr : states;
    Index stride = attention_share(c.head_dim);
    if (running && piece.first_tile > 0)
        for (Index i = 0; i < rows.count; i++) load_state(c, rows.number[i], running + i * stride);
    with_kv_type(c.kv_type, [&](auto element) { attention_tiles<decltype(element)>(c, piece, rows, shares, running); });
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
