// Attention of one new token per sequence over bfloat16 pages: decode, where reading K and V is all the time it takes.
//
// A block takes all query heads of one key head for a slice of SLICE tokens. It asks for the whole slice of K and V at
// once, row by row, each row behind a gap of 16 bytes so that matrix loads meet no bank twice. Each warp makes a partial
// result (largest score, sum, output) of its own tokens on the tensor cores; these are folded in the order of the tokens.
// On sm_90 the copies are bulk copies, and a cluster of blocks folds its slices to one partial per tile through its
// shared memory. `merge_kernel` of triton_kernels/attention.py folds the tiles, of which some may be made there too.
// Twin: engine/reference.py paged_attention.
#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include "kernels.h"
#include "launch.h"

namespace palimpsest::cuda {
namespace {

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int WARP_TOKENS = 32, SLICE = WARPS * WARP_TOKENS;
constexpr int CLUSTER = 8;      // blocks that fold their slices on sm_90
constexpr int HEADS = 16;       // rows of a tensor core's product; heads of the group, then nothing
constexpr int GAP = 8;          // numbers behind each row in shared memory
constexpr float NOTHING = -INFINITY;

template <int DIM>
struct Shared {
    static constexpr int STRIDE = DIM + GAP;
    union {
        alignas(16) __nv_bfloat16 keys[SLICE][STRIDE];
        float partial[WARPS][HEADS][DIM];  // once no warp needs keys any more
    };
    alignas(16) __nv_bfloat16 values[SLICE][STRIDE];
    alignas(16) __nv_bfloat16 query[HEADS][STRIDE];
    float peaks[WARPS][HEADS], totals[WARPS][HEADS];
    alignas(16) float out[HEADS][DIM];  // what other blocks of the cluster read
    float out_peak[HEADS], out_total[HEADS];
    alignas(8) std::uint64_t arrived;
};

__device__ std::uint32_t shared_address(const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies of rows from global to shared memory: one thread per row asks, all wait for all.
#if __CUDA_ARCH__ >= 900
__device__ void expect(std::uint64_t* arrived, std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived)), "r"(bytes));
}
__device__ void begin_copies(std::uint64_t* arrived, std::uint32_t bytes) {
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrived)));
        asm volatile("fence.mbarrier_init.release.cluster;");
        expect(arrived, bytes);
    }
    __syncthreads();
}
template <int BYTES>
__device__ void copy_row(void* target, const void* source, std::uint64_t* arrived) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(target)),
        "l"(source), "n"(BYTES), "r"(shared_address(arrived))
        : "memory");
}
__device__ void wait_for_copies(std::uint64_t* arrived) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(arrived))
        : "memory");
}
#else
__device__ void begin_copies(std::uint64_t*, std::uint32_t) {}
template <int BYTES>
__device__ void copy_row(void* target, const void* source, std::uint64_t*) {
#pragma unroll
    for (int at = 0; at < BYTES; at += 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target) + at),
                     "l"(static_cast<const char*>(source) + at)
                     : "memory");
}
__device__ void wait_for_copies(std::uint64_t*) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}
#endif

// Four 8 x 8 matrices, each from 8 rows whose addresses 8 lanes give.
__device__ void load_matrices(std::uint32_t (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)));
}
__device__ void load_transposed(std::uint32_t (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)));
}
// sums [16, 8] += a [16, 16] b [16, 8]
__device__ void multiply(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ std::uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
}

__device__ float scaled(float value, float peak, float higher) { return value * exp2f(peak - higher); }

// The partial result of a warp's WARP_TOKENS tokens. A lane holds rows lane / 4 and lane / 4 + 8, columns
// lane % 4 * 2 and the one behind it of each 8.
template <int DIM>
__device__ void attend_warp(Shared<DIM>& shared, int warp, int lane, int seen, float scale) {
    constexpr int TILES = WARP_TOKENS / 8;
    const int first = warp * WARP_TOKENS, group = lane / 8, within = lane % 8;
    float scores[TILES][4] = {};
#pragma unroll
    for (int d = 0; d < DIM; d += 16) {
        std::uint32_t query[4];
        load_matrices(query, &shared.query[within + group % 2 * 8][d + group / 2 * 8]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile += 2) {
            std::uint32_t keys[4];  // tokens of two tiles, halves of d
            load_matrices(keys, &shared.keys[first + tile * 8 + group / 2 * 8 + within][d + group % 2 * 8]);
            multiply(scores[tile], query, keys[0], keys[1]);
            multiply(scores[tile + 1], query, keys[2], keys[3]);
        }
    }
    float peaks[2] = {NOTHING, NOTHING}, totals[2] = {0.0f, 0.0f};
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = first + tile * 8 + lane % 4 * 2 + i % 2;
            scores[tile][i] = token < seen ? scores[tile][i] * scale : NOTHING;
            peaks[i / 2] = fmaxf(peaks[i / 2], scores[tile][i]);
        }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2)
            peaks[half] = fmaxf(peaks[half], __shfl_xor_sync(0xffffffffu, peaks[half], distance));
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float peak = peaks[i / 2];
            scores[tile][i] = peak == NOTHING ? 0.0f : exp2f(scores[tile][i] - peak);
            totals[i / 2] += scores[tile][i];
        }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2)
            totals[half] += __shfl_xor_sync(0xffffffffu, totals[half], distance);

    float sums[DIM / 8][4] = {};
#pragma unroll
    for (int k = 0; k < WARP_TOKENS / 16; k++) {
        const std::uint32_t weights[4] = {
            pack(scores[2 * k][0], scores[2 * k][1]), pack(scores[2 * k][2], scores[2 * k][3]),
            pack(scores[2 * k + 1][0], scores[2 * k + 1][1]), pack(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
        for (int d = 0; d < DIM; d += 16) {
            std::uint32_t values[4];  // halves of the tokens, of two tiles of d
            load_transposed(values, &shared.values[first + k * 16 + group % 2 * 8 + within][d + group / 2 * 8]);
            multiply(sums[d / 8], weights, values[0], values[1]);
            multiply(sums[d / 8 + 1], weights, values[2], values[3]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int head = lane / 4 + half * 8;
        if (lane % 4 == 0) {
            shared.peaks[warp][head] = peaks[half];
            shared.totals[warp][head] = totals[half];
        }
#pragma unroll
        for (int d = 0; d < DIM / 8; d++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                shared.partial[warp][head][d * 8 + lane % 4 * 2 + i] = sums[d][half * 2 + i];
    }
}

// Running fold of partial results, in order; one that saw nothing leaves it as it is.
struct Fold {
    float peak = NOTHING, total = 0.0f, value = 0.0f;

    __device__ void add(float next_peak, float next_total, float next_value) {
        if (next_peak == NOTHING) return;
        const float higher = fmaxf(peak, next_peak);
        total = scaled(total, peak, higher) + scaled(next_total, next_peak, higher);
        value = scaled(value, peak, higher) + scaled(next_value, next_peak, higher);
        peak = higher;
    }
};

template <int DIM, int BLOCKS>
__global__ void __launch_bounds__(THREADS) decode_kernel(PagedDecode call) {
    extern __shared__ __align__(16) unsigned char memory[];
    auto& shared = *reinterpret_cast<Shared<DIM>*>(memory);
    const int slice = blockIdx.x, kv_head = blockIdx.y, span = blockIdx.z;
    const int tile = slice / BLOCKS, group = call.heads / call.kv_heads;
    const int length = call.kv_length[span];
    const int begin = call.skipped == nullptr ? 0 : call.skipped[span];
    if (tile < begin || tile * BLOCKS * SLICE >= length) return;  // the whole cluster
    const int seen = min(max(length - slice * SLICE, 0), SLICE);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const std::int32_t* table = call.tables + static_cast<Index>(span) * call.table_stride;

    begin_copies(&shared.arrived, 2 * seen * DIM * sizeof(__nv_bfloat16));
    for (int i = threadIdx.x; i < SLICE; i += THREADS) {
        const int token = slice * SLICE + i;
        if (i < seen) {
            const Index page = table[token / call.page_size];
            const Index row = ((page * call.kv_heads + kv_head) * call.page_size + token % call.page_size) * DIM;
            constexpr int BYTES = DIM * sizeof(__nv_bfloat16);
            copy_row<BYTES>(shared.keys[i], static_cast<const __nv_bfloat16*>(call.key_pages) + row, &shared.arrived);
            copy_row<BYTES>(shared.values[i], static_cast<const __nv_bfloat16*>(call.value_pages) + row,
                            &shared.arrived);
        } else {
            for (int d = 0; d < DIM; d++) shared.values[i][d] = shared.keys[i][d] = __float2bfloat16_rn(0.0f);
        }
    }
    const float* query = call.query + (static_cast<Index>(span) * call.heads + kv_head * group) * DIM;
    for (int i = threadIdx.x; i < HEADS * DIM; i += THREADS)
        shared.query[i / DIM][i % DIM] = __float2bfloat16_rn(i / DIM < group ? query[i] : 0.0f);
    __syncthreads();
    wait_for_copies(&shared.arrived);
    attend_warp<DIM>(shared, warp, lane, seen, call.scale);
    __syncthreads();

    for (int i = threadIdx.x; i < group * DIM; i += THREADS) {
        Fold fold;
        for (int w = 0; w < WARPS; w++)
            fold.add(shared.peaks[w][i / DIM], shared.totals[w][i / DIM], shared.partial[w][i / DIM][i % DIM]);
        shared.out[i / DIM][i % DIM] = fold.value;
        if (i % DIM == 0) {
            shared.out_peak[i / DIM] = fold.peak;
            shared.out_total[i / DIM] = fold.total;
        }
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    auto cluster = cooperative_groups::this_cluster();
    if constexpr (BLOCKS > 1) cluster.sync();
    auto of = [&](auto& own, int block) { return BLOCKS > 1 ? cluster.map_shared_rank(&own, block) : &own; };
#else
    auto of = [](auto& own, int) { return &own; };
#endif
    if (slice % BLOCKS == 0)
        for (int i = threadIdx.x; i < group * DIM; i += THREADS) {
            Fold fold;
            for (int block = 0; block < BLOCKS; block++)
                fold.add(*of(shared.out_peak[i / DIM], block), *of(shared.out_total[i / DIM], block),
                         *of(shared.out[i / DIM][i % DIM], block));
            const Index head = static_cast<Index>(span) * call.heads + kv_head * group + i / DIM;
            const Index place = head * call.tiles + tile;
            call.partials[place * DIM + i % DIM] = fold.value;
            if (i % DIM == 0) {
                call.peaks[place] = fold.peak;
                call.totals[place] = fold.total;
            }
        }
#if __CUDA_ARCH__ >= 900
    if constexpr (BLOCKS > 1) cluster.sync();  // no block ends while another reads its memory
#endif
}

bool has_clusters() { return attribute(cudaDevAttrComputeCapabilityMajor) >= 9; }

template <int DIM, int BLOCKS>
void launch(const PagedDecode& call, cudaStream_t stream) {
    const auto kernel = decode_kernel<DIM, BLOCKS>;
    const int shared = sizeof(Shared<DIM>);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "paged_decode");
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(call.tiles * BLOCKS, call.kv_heads, call.spans);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {BLOCKS, 1, 1};
    config.attrs = &cluster;
    config.numAttrs = BLOCKS > 1 ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, call), "paged_decode");
}

template <int DIM>
void launch_dim(const PagedDecode& call, cudaStream_t stream) {
    return has_clusters() ? launch<DIM, CLUSTER>(call, stream) : launch<DIM, 1>(call, stream);
}

}  // namespace

int decode_tile() { return has_clusters() ? CLUSTER * SLICE : SLICE; }

void paged_decode(const PagedDecode& call, void* stream) {
    if (call.heads > DECODE_GROUP * call.kv_heads)
        throw std::invalid_argument("paged_decode takes at most " + std::to_string(DECODE_GROUP) +
                                    " query heads per key head");
    const auto on = static_cast<cudaStream_t>(stream);
    switch (call.head_dim) {
        case 64: return launch_dim<64>(call, on);
        case 128: return launch_dim<128>(call, on);
        default:
            throw std::invalid_argument("paged_decode takes heads of 64 or 128, not " + std::to_string(call.head_dim));
    }
}

}  // namespace palimpsest::cuda
