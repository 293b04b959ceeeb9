// What the launches share.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace palimpsest::cuda {

inline void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline int attribute(cudaDeviceAttr name) {
    int device = 0, value = 0;
    check(cudaGetDevice(&device), "current device");
    check(cudaDeviceGetAttribute(&value, name, device), "attribute of the device");
    return value;
}

}  // namespace palimpsest::cuda
