// Included last by the .cpp of each instruction set: the table of its kernels.
#pragma once

#include "attention.h"
#include "linear.h"
#include "norm.h"

namespace palimpsest::cpu {

#define PALIMPSEST_STRING_(x) #x
#define PALIMPSEST_STRING(x) PALIMPSEST_STRING_(x)

extern const Kernels PALIMPSEST_TABLE;
const Kernels PALIMPSEST_TABLE = {
    PALIMPSEST_STRING(PALIMPSEST_ISA), PALIMPSEST_ISA::rms_norm,       PALIMPSEST_ISA::linear,
    PALIMPSEST_ISA::attention_piece,   PALIMPSEST_ISA::attention_fold,
};

}  // namespace palimpsest::cpu
