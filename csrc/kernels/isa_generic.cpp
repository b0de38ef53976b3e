// The CPU kernels for any processor (on x86-64: SSE2).
#include "isa.h"

#define PYCOMM_ISA generic
#define PYCOMM_ISA_LEVEL 0
#include "isa_all.h"
