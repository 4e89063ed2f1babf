/* AMX tiles: eight registers of up to 16 rows of 64 bytes, and the products of two of them.
 *
 * C[m][n] += Σ A[m][k] B[k][n], n < 16: a row of A is `row_bytes` long, a row of B has the four bytes of A's same place
 * (a pair of bfloat16, four int8) for each n. That is the order of panels (ops.h) and of cached keys and values
 * (kv_cache.h), so these are loaded as they lie. A thread sets the shapes of its registers, which clears them; walk()
 * (pool.c) gives them up at the end of a run, so that no context switch has to save them. */
#pragma once
#include "isa.h"

#include <stdint.h>

#if HAS_AMX
#include <immintrin.h>

#define TILE_ROWS 16
#define TILE_ROW_BYTES 64

/* What LDTILECFG reads. */
typedef struct tile_shapes {
    uint8_t palette; /* 1 */
    uint8_t first_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;
#endif
