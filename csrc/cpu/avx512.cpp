#define PALIMPSEST_ISA avx512
#define PALIMPSEST_TABLE avx512_kernels
#include "table.h"
