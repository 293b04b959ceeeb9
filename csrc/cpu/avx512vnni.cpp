#define PALIMPSEST_ISA avx512vnni
#include "quantised_linear.h"

namespace palimpsest::cpu {

extern const Kernels avx512_kernels;

// The AVX-512 kernels, but for the one that multiplies bytes.
Kernels avx512vnni_kernels() {
    Kernels kernels = avx512_kernels;
    kernels.isa = "avx512vnni";
    kernels.quantised_panel = avx512vnni::quantised_panel;
    return kernels;
}

}  // namespace palimpsest::cpu
