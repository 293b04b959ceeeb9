// The all-reduce of csrc/cuda with threads of a CPU for ranks: what of CUDA it needs, and calls of many sizes.
// Blocks run one after the other; the threads of one side by side. test_all_reduce.py puts the kernel's source here:
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __trap std::abort
using std::min;

struct float4 {
    float x, y, z, w;
};
struct dim3 {
    unsigned x = 1;
};
thread_local dim3 threadIdx, blockIdx, blockDim;
thread_local std::barrier<>* block_barrier;
thread_local std::mt19937 delays(std::random_device{}());
void __syncthreads() {
    block_barrier->arrive_and_wait();
    if (delays() % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(500));
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr { cudaDevAttrNone };
struct cudaIpcMemHandle_t {
    char reserved[64];
};
constexpr int cudaIpcMemLazyEnablePeerAccess = 0;
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    cudaStream_t stream;
};
const char* cudaGetErrorString(cudaError_t) { return ""; }
cudaError_t cudaGetDevice(int*) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMalloc(void** memory, std::size_t bytes) { return *memory = std::malloc(bytes), cudaSuccess; }
cudaError_t cudaMemset(void* memory, int, std::size_t bytes) {
    return std::fill_n(static_cast<char*>(memory), bytes, 0), cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaSuccess; }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, int) { return cudaSuccess; }

template <typename Kernel, typename Call>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, Kernel kernel, const Call& call) {
    constexpr unsigned THREADS_RUN = 4;
    std::barrier<> barrier(THREADS_RUN);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < THREADS_RUN; t++)
        threads.emplace_back([&, t] {
            threadIdx.x = t, blockDim.x = THREADS_RUN, block_barrier = &barrier;
            for (unsigned b = 0; b < config->gridDim.x; b++) blockIdx.x = b, kernel(call);
        });
    for (std::thread& thread : threads) thread.join();
    return cudaSuccess;
}

#include "kernel.cpp"

using namespace palimpsest::cuda;

float number(int call, int rank, int i) {
    std::mt19937 draw(call * 1000003 + rank * 7919 + i);
    return std::ldexp(float(draw()) - 2e9f, int(draw() % 20) - 40);
}

int main(int, char** arguments) {
    const int ranks = std::atoi(arguments[1]), calls = 60, capacity = 1200;
    std::vector<void*> regions(ranks);
    for (void*& region : regions) region = peer_allocate(all_reduce_bytes(capacity));
    std::vector<int> wrong(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; rank++)
        threads.emplace_back([&, rank] {
            for (int c = 0; c < calls; c++) {
                const int count = 4 * (1 + c * 7919 % (capacity / 4));
                std::vector<float> x(count), y(count);
                for (int i = 0; i < count; i++) x[i] = number(c, rank, i);
                AllReduce call = {x.data(), y.data(), count, capacity, {}, rank, ranks, c % 3 == 1};
                std::copy(regions.begin(), regions.end(), call.regions);
                all_reduce(call, nullptr);
                for (int i = 0; i < count; i++) {
                    float sum = number(c, 0, i);
                    for (int r = 1; r < ranks; r++) sum += number(c, r, i);
                    wrong[rank] += sum != y[i];
                }
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (int rank = 0; rank < ranks; rank++) std::printf("%d ", wrong[rank]);
}
