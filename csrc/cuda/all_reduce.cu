// Sums over the ranks of a tensor-parallel model through each other's memory: what a step adds up is small, and one
// kernel that reads it from everybody is done before a ring has gone round.
//
// Each rank has one region that all others have mapped: counters, two areas for what it gives, one for what it has
// summed. One-shot: every rank reads all that the others give. Two-shot, for more numbers: every rank sums one slice and
// the others read it there.
// Exactness: an element is the sum in the order of the ranks, whoever makes it, so all ranks have the same bits in both
// ways, those of engine/parallel.py's fold.
// Safety: a barrier per block lets block b of all ranks go on together, and block b reads only what blocks b have
// written. What a rank gives goes to its two areas in turn: when it writes to one again, all others have begun the call
// in between, so they have ended the one that read it. All counters are in memory, so that a CUDA graph can replay this.
// Twin: the fold of engine/parallel.py. Never run on a GPU yet.
#include "kernels.h"
#include "launch.h"

namespace palimpsest::cuda {
namespace {

constexpr int BLOCKS = 32, THREADS = 512;  // the same for every call: the blocks of all ranks keep step
constexpr int VECTOR = 4;                  // numbers in 16 bytes
constexpr unsigned long long PATIENCE = 100'000'000'000ull;  // nanoseconds that a rank is waited for

struct Counters {
    std::uint32_t arrived[BLOCKS][ALL_REDUCE_RANKS];  // written by the others: how many barriers they have reached
    std::uint32_t passed[BLOCKS], calls[BLOCKS];      // this rank's own
};

__device__ Counters& counters_of(const AllReduce& call, int rank) {
    return *static_cast<Counters*>(call.regions[rank]);
}

// Areas 0 and 1 are what a rank gives in turn, area 2 is what it has summed.
__device__ float4* area_of(const AllReduce& call, int rank, int area) {
    return reinterpret_cast<float4*>(&counters_of(call, rank) + 1) + area * (call.capacity / VECTOR);
}

__device__ void publish(std::uint32_t* address, std::uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ std::uint32_t observe(const std::uint32_t* address) {
    std::uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Until block blockIdx.x of every rank is here. A rank that never comes ends the process's work with an error.
template <int RANKS>
__device__ void barrier(const AllReduce& call) {
    __syncthreads();
    Counters& own = counters_of(call, call.rank);
    const int block = blockIdx.x, other = threadIdx.x;
    if (other < RANKS) {
        const std::uint32_t count = own.passed[block] + 1;
        publish(&counters_of(call, other).arrived[block][call.rank], count);
        const unsigned long long since = nanoseconds();
        while (static_cast<std::int32_t>(observe(&own.arrived[block][other]) - count) < 0)
            if (nanoseconds() - since > PATIENCE) __trap();
    }
    __syncthreads();
    if (threadIdx.x == 0) own.passed[block]++;
    __syncthreads();
}

__device__ void add(float4& sum, const float4& next) {
    sum.x += next.x;
    sum.y += next.y;
    sum.z += next.z;
    sum.w += next.w;
}

// The numbers at `at`, summed over the ranks in their order.
template <int RANKS>
__device__ float4 fold(const AllReduce& call, int area, Index at) {
    float4 parts[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; r++) parts[r] = area_of(call, r, area)[at];
#pragma unroll
    for (int r = 1; r < RANKS; r++) add(parts[0], parts[r]);
    return parts[0];
}

template <int RANKS, bool TWO_SHOT>
__global__ void __launch_bounds__(THREADS) all_reduce_kernel(const __grid_constant__ AllReduce call) {
    const auto x = reinterpret_cast<const float4*>(call.x);
    const auto y = reinterpret_cast<float4*>(call.y);
    const Index count = call.count / VECTOR, slice = TWO_SHOT ? (count + RANKS - 1) / RANKS : count;
    const Index first = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
    const Index step = static_cast<Index>(BLOCKS) * blockDim.x;
    std::uint32_t& calls = counters_of(call, call.rank).calls[blockIdx.x];
    const int area = calls % 2;
    float4* given = area_of(call, call.rank, area);

    for (Index start = 0; start < count; start += slice)
        for (Index i = first; i < min(slice, count - start); i += step) given[start + i] = x[start + i];
    barrier<RANKS>(call);
    if constexpr (TWO_SHOT) {
        const Index start = call.rank * slice;
        float4* summed = area_of(call, call.rank, 2);
        for (Index i = first; i < min(slice, count - start); i += step) summed[i] = fold<RANKS>(call, area, start + i);
        barrier<RANKS>(call);
#pragma unroll
        for (int r = 0; r < RANKS; r++)
            for (Index i = first; i < min(slice, count - r * slice); i += step)
                y[r * slice + i] = area_of(call, r, 2)[i];
    } else {
        for (Index i = first; i < count; i += step) y[i] = fold<RANKS>(call, area, i);
    }
    if (threadIdx.x == 0) calls++;
}

template <int RANKS>
void launch(const AllReduce& call, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(BLOCKS);
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    const auto kernel = call.two_shot ? all_reduce_kernel<RANKS, true> : all_reduce_kernel<RANKS, false>;
    check(cudaLaunchKernelEx(&config, kernel, call), "all_reduce");
}

}  // namespace

Index all_reduce_bytes(Index capacity) { return sizeof(Counters) + 3 * capacity * sizeof(float); }

void all_reduce(const AllReduce& call, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    if (call.count <= 0 || call.count > call.capacity || call.count % VECTOR != 0)
        throw std::invalid_argument("all_reduce takes a multiple of 4 numbers, at least 4 and at most the capacity");
    switch (call.ranks) {
        case 2: return launch<2>(call, on);
        case 3: return launch<3>(call, on);
        case 4: return launch<4>(call, on);
        case 5: return launch<5>(call, on);
        case 6: return launch<6>(call, on);
        case 7: return launch<7>(call, on);
        case 8: return launch<8>(call, on);
        default: throw std::invalid_argument("all_reduce takes 2 to 8 ranks, not " + std::to_string(call.ranks));
    }
}

void* peer_allocate(Index bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "memory for other ranks");
    check(cudaMemset(memory, 0, bytes), "memory for other ranks");
    check(cudaDeviceSynchronize(), "memory for other ranks");
    return memory;
}

std::string peer_handle(void* memory) {
    cudaIpcMemHandle_t handle;
    check(cudaIpcGetMemHandle(&handle, memory), "handle of memory");
    return std::string(handle.reserved, sizeof(handle.reserved));
}

void* peer_open(const std::string& handle) {
    cudaIpcMemHandle_t opened;
    if (handle.size() != sizeof(opened.reserved)) throw std::invalid_argument("this is no handle of memory");
    handle.copy(opened.reserved, sizeof(opened.reserved));
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, opened, cudaIpcMemLazyEnablePeerAccess), "memory of another rank");
    return memory;
}

}  // namespace palimpsest::cuda
