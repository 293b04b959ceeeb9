#define PALIMPSEST_ISA scalar
#define PALIMPSEST_TABLE scalar_kernels
#include "table.h"
