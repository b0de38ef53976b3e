// The CPU kernels for one instruction set. An isa_<name>.cpp defines PYCOMM_ISA (a namespace) and
// PYCOMM_ISA_LEVEL (0 generic, 1 AVX2 + F16C, 2 AVX-512), switches the compiler's target on and
// includes this file once. The parts include nothing themselves.

// A product is rounded before it is added to: GCC would fuse the two for processors that can, and
// only for those.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

namespace pycomm {
namespace PYCOMM_ISA {

#include "functors.h"
#include "pack.h"
//
#include "elementwise_isa.h"
//
#include "codec_format.h"
#include "codec_isa.h"

}  // namespace PYCOMM_ISA
}  // namespace pycomm

#if !defined(__clang__)
#pragma GCC pop_options
#endif
