/* What the library is compiled for (build.py): AVX2, AVX-512 with its dot products, or AMX beside that. */
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define HAS_AVX512 1
#else
#define HAS_AVX512 0
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif
