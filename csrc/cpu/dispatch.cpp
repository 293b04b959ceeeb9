// Which table of kernels this machine runs.
#include <omp.h>

#include <cstring>

#include "kernels.h"

namespace palimpsest::cpu {

extern const Kernels scalar_kernels;

#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
Kernels avx512vnni_kernels();

namespace {
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
const Kernels* find_avx512vnni() {
    static const Kernels kernels = avx512vnni_kernels();
    return has_avx512() && __builtin_cpu_supports("avx512vnni") ? &kernels : nullptr;
}
}  // namespace
#endif

Index max_threads() { return omp_get_max_threads(); }

const Kernels* find_kernels(const char* isa) {
#if defined(__x86_64__)
    if (std::strcmp(isa, "avx512vnni") == 0) return find_avx512vnni();
    if (std::strcmp(isa, "avx512") == 0) return has_avx512() ? &avx512_kernels : nullptr;
    if (std::strcmp(isa, "avx2") == 0) return has_avx2() ? &avx2_kernels : nullptr;
#endif
    return std::strcmp(isa, "scalar") == 0 ? &scalar_kernels : nullptr;
}

const Kernels& best_kernels() {
    if (const Kernels* found = find_kernels("avx512vnni")) return *found;
    if (const Kernels* found = find_kernels("avx512")) return *found;
    if (const Kernels* found = find_kernels("avx2")) return *found;
    return scalar_kernels;
}

}  // namespace palimpsest::cpu
