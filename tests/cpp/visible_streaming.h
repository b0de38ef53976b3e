// Included before everything else under a sanitizer (run.sh): streaming stores are compiler
// builtins that no sanitizer instruments, so they become ordinary stores that it sees.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#define _mm_stream_si128(to, value) static_cast<void>(*(to) = (value))
#define _mm512_stream_si512(to, value) static_cast<void>(*(to) = (value))
#endif
