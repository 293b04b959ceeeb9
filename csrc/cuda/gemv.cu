// y = x W^T for 1 to 8 rows, where reading W is all the time that it takes.
//
// A warp makes WARP_OUTPUTS outputs of all rows: each lane reads 16 bytes of W at a time, every 32nd such piece of a
// row, and several of them before it needs the first. x lies in shared memory, a tile of columns at a time.
// Exactness: a lane adds its products in the order of rising columns, and a fixed tree adds the 32 lanes. Neither
// depends on the number of rows, of blocks or of columns per tile.
// Twins: engine/reference.py linear and scaled_linear.
#include <cuda_bf16.h>

#include "kernels.h"
#include "launch.h"

namespace palimpsest::cuda {
namespace {

constexpr int WARPS = 8, WARP_OUTPUTS = 2, BLOCK_OUTPUTS = WARPS * WARP_OUTPUTS;
constexpr int PIECES = 4;   // of each output's row that a lane asks for at once
constexpr int TILE = 4096;  // columns of x in shared memory; a multiple of 32 pieces of any type

struct Int8 {
    std::int8_t code;
};
struct Float8 {
    std::uint8_t code;
};

// Streamed: W is used once, and x should stay in the cache.
__device__ uint4 load_once(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

__device__ float low_bf16(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ float high_bf16(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// The numbers of a 32-bit word, in order.
__device__ void widen(std::uint32_t word, float (&out)[2], __nv_bfloat16) {
    out[0] = low_bf16(word);
    out[1] = high_bf16(word);
}
__device__ void widen(std::uint32_t word, float (&out)[4], Int8) {
    const std::uint32_t shifted = word ^ 0x80808080u;  // code + 128, put into the last bits of 2^23
#pragma unroll
    for (int i = 0; i < 4; i++)
        out[i] = __uint_as_float(__byte_perm(shifted, 0x4b000000u, 0x7540 + i)) - (8388608.0f + 128.0f);
}
// Exponent and fraction moved to where a float has them; the product mends the bias, of subnormal codes too.
__device__ void widen(std::uint32_t word, float (&out)[4], Float8) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const std::uint32_t code = word >> (8 * i);
        out[i] = __uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20) * 0x1p120f;
    }
}

template <int ROWS>
__device__ void stage(const Gemv& call, int first, int columns, __nv_bfloat16* staged) {
    for (int row = 0; row < ROWS; row++)
        for (int k = threadIdx.x; k < columns; k += WARPS * 32)
            staged[row * TILE + k] = __float2bfloat16_rn(call.x[row * call.x_stride + first + k]);
}

// sums += one piece of W times the same columns of every row.
template <typename W, int ROWS>
__device__ void multiply(const uint4& piece, const __nv_bfloat16* x, float (&sums)[ROWS]) {
    constexpr int PER_WORD = 4 / sizeof(W), PAIRS = 2 * PER_WORD;
    const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
    float weights[4][PER_WORD];
#pragma unroll
    for (int i = 0; i < 4; i++) widen(words[i], weights[i], W{});
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        uint4 vectors[PAIRS / 4];
#pragma unroll
        for (int i = 0; i < PAIRS / 4; i++) vectors[i] = reinterpret_cast<const uint4*>(x + row * TILE)[i];
        const auto pairs = reinterpret_cast<const std::uint32_t*>(vectors);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const float* pair = weights[2 * i / PER_WORD] + 2 * i % PER_WORD;
            sums[row] = fmaf(pair[0], low_bf16(pairs[i]), sums[row]);
            sums[row] = fmaf(pair[1], high_bf16(pairs[i]), sums[row]);
        }
    }
}

template <typename W, int ROWS>
__global__ void __launch_bounds__(WARPS * 32, 2) gemv_kernel(Gemv call) {
    constexpr int VECTOR = 16 / sizeof(W);
    extern __shared__ __align__(16) __nv_bfloat16 staged[];  // [ROWS, TILE]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto weight = static_cast<const W*>(call.weight);
    bool first_group = true;
    for (int group = blockIdx.x * BLOCK_OUTPUTS; group < call.out; group += gridDim.x * BLOCK_OUTPUTS) {
        float sums[WARP_OUTPUTS][ROWS] = {};
        const W* rows[WARP_OUTPUTS];
#pragma unroll
        for (int i = 0; i < WARP_OUTPUTS; i++)  // behind the last output, its row again
            rows[i] = weight + static_cast<Index>(min(group + warp * WARP_OUTPUTS + i, call.out - 1)) * call.in;
        for (int first = 0; first < call.in; first += TILE) {
            const int columns = min(TILE, call.in - first), vectors = columns / VECTOR;
            if (first_group || call.in > TILE) {
                __syncthreads();
                stage<ROWS>(call, first, columns, staged);
                __syncthreads();
            }
            for (int vector = lane; vector < vectors; vector += 32 * PIECES) {
                uint4 pieces[PIECES][WARP_OUTPUTS];
#pragma unroll
                for (int p = 0; p < PIECES; p++)
#pragma unroll
                    for (int i = 0; i < WARP_OUTPUTS; i++)
                        if (vector + 32 * p < vectors)
                            pieces[p][i] = load_once(rows[i] + first + (vector + 32 * p) * VECTOR);
#pragma unroll
                for (int p = 0; p < PIECES; p++)
                    if (vector + 32 * p < vectors)
#pragma unroll
                        for (int i = 0; i < WARP_OUTPUTS; i++)
                            multiply<W, ROWS>(pieces[p][i], staged + (vector + 32 * p) * VECTOR, sums[i]);
            }
        }
        first_group = false;
#pragma unroll
        for (int i = 0; i < WARP_OUTPUTS; i++) {
            const int output = group + warp * WARP_OUTPUTS + i;
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                float sum = sums[i][row];
#pragma unroll
                for (int distance = 16; distance > 0; distance /= 2)
                    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
                if (lane == 0 && output < call.out) {
                    if (call.scales != nullptr) sum *= call.scales[output];
                    if (call.bias != nullptr)
                        sum += call.bias_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(call.bias)[output])
                                              : static_cast<const float*>(call.bias)[output];
                    call.y[static_cast<Index>(row) * call.out + output] = sum;
                }
            }
        }
    }
}

template <typename W, int ROWS>
void launch(const Gemv& call, cudaStream_t stream) {
    const int shared = ROWS * TILE * sizeof(__nv_bfloat16);
    check(cudaFuncSetAttribute(gemv_kernel<W, ROWS>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "gemv");
    const int groups = (call.out + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS;
    const int blocks = min(groups, 2 * attribute(cudaDevAttrMultiProcessorCount));
    gemv_kernel<W, ROWS><<<blocks, WARPS * 32, shared, stream>>>(call);
    check(cudaGetLastError(), "gemv");
}

template <typename W>
void launch_rows(const Gemv& call, cudaStream_t stream) {
    switch (call.rows) {
        case 1: return launch<W, 1>(call, stream);
        case 2: return launch<W, 2>(call, stream);
        case 3: return launch<W, 3>(call, stream);
        case 4: return launch<W, 4>(call, stream);
        case 5: return launch<W, 5>(call, stream);
        case 6: return launch<W, 6>(call, stream);
        case 7: return launch<W, 7>(call, stream);
        case 8: return launch<W, 8>(call, stream);
        default: throw std::invalid_argument("gemv takes 1 to 8 rows, not " + std::to_string(call.rows));
    }
}

}  // namespace

void gemv(const Gemv& call, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    switch (call.type) {
        case WeightType::bfloat16: return launch_rows<__nv_bfloat16>(call, on);
        case WeightType::int8: return launch_rows<Int8>(call, on);
        case WeightType::float8_e4m3: return launch_rows<Float8>(call, on);
    }
}

int device_count() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace palimpsest::cuda
