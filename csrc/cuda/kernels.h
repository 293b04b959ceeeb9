// The CUDA kernels as the rest of the extension sees them: addresses on the device, sizes, and a stream. They start
// work on the stream and return; a launch that fails throws std::runtime_error with CUDA's own words.
#pragma once
#include <cstdint>
#include <string>

namespace palimpsest::cuda {

using Index = std::int64_t;

// 0 on a machine without a GPU, a driver, or a driver that is new enough.
int device_count();

enum class WeightType : std::int32_t { bfloat16 = 0, int8 = 1, float8_e4m3 = 2 };

// y = x W^T (* scales) (+ b) for 1 to 8 rows; x is rounded to bfloat16, sums are float32.
struct Gemv {
    const float* x;
    Index x_stride;
    const void* weight;  // [out, in] of `type`; `in` a multiple of 16 bytes
    WeightType type;
    const float* scales;  // [out], or null with bfloat16
    const void* bias;     // [out], or null
    bool bias_bf16;
    float* y;  // [rows, out]
    std::int32_t rows, in, out;
};
void gemv(const Gemv& call, void* stream);

// Attention of one new token per sequence over bfloat16 pages, as partial results of `decode_tile()` tokens each.
struct PagedDecode {
    const float* query;     // [spans, heads, head_dim]
    const void* key_pages;  // [pages, kv_heads, page_size, head_dim]
    const void* value_pages;
    const std::int32_t* kv_length;  // [spans]
    const std::int32_t* tables;     // [spans, table_stride]
    const std::int32_t* skipped;    // [spans]: tiles, from the first on, that somebody else makes; or null
    std::int32_t table_stride, spans, heads, kv_heads, head_dim, page_size, tiles;
    float scale;      // of the scores, times log2(e)
    float* peaks;     // [spans, heads, tiles]: largest score
    float* totals;    // [spans, heads, tiles]: sum of 2^(score - peak)
    float* partials;  // [spans, heads, tiles, head_dim]: sum of 2^(score - peak) * value
};
inline constexpr int DECODE_GROUP = 16;  // most query heads per key head
int decode_tile();                       // tokens per partial result on the current device
void paged_decode(const PagedDecode& call, void* stream);

// Memory of this rank's GPU that other processes map by its handle, until they end; zeros at first.
void* peer_allocate(Index bytes);
std::string peer_handle(void* memory);
void* peer_open(const std::string& handle);

inline constexpr int ALL_REDUCE_RANKS = 8;  // at most

// y = the sum of all ranks' x, in the order of the ranks. All ranks make the same calls.
struct AllReduce {
    const float* x;  // [count], 16-byte aligned, as y is
    float* y;
    Index count, capacity;            // numbers; a multiple of 4, and the most that a region takes
    void* regions[ALL_REDUCE_RANKS];  // of `all_reduce_bytes(capacity)` each, as this rank has them mapped
    std::int32_t rank, ranks;
    bool two_shot;
};
Index all_reduce_bytes(Index capacity);
void all_reduce(const AllReduce& call, void* stream);

}  // namespace palimpsest::cuda
