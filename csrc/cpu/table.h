// Included last by the .cpp of each instruction set: the table of its kernels.
#pragma once

#include "linear.h"
#include "norm.h"

namespace palimpsest::cpu {

#define PALIMPSEST_STRING_(x) #x
#define PALIMPSEST_STRING(x) PALIMPSEST_STRING_(x)

extern const Kernels PALIMPSEST_TABLE;
const Kernels PALIMPSEST_TABLE = {
    PALIMPSEST_STRING(PALIMPSEST_ISA),
    PALIMPSEST_ISA::rms_norm,
    PALIMPSEST_ISA::linear,
};

}  // namespace palimpsest::cpu
