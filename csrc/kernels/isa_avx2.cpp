// The CPU kernels for AVX2 with F16C. Everything that is included before the target switch stays
// plain x86-64.
#include "isa.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma")
#endif

#define PYCOMM_ISA avx2
#define PYCOMM_ISA_LEVEL 1
#include "isa_all.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
