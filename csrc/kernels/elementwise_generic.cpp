// The CPU kernels for any processor (on x86-64: SSE2).
#include "elementwise_host.h"

#define PYCOMM_ISA generic
#define PYCOMM_ISA_LEVEL 0
#include "elementwise_isa.h"
