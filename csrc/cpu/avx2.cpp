#define PALIMPSEST_ISA avx2
#define PALIMPSEST_TABLE avx2_kernels
#include "table.h"
