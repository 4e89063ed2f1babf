/* What the linear kernels share where a vector register holds 8 floats (AVX2): the passes that a tile is cut into.
 *
 * A pass is up to 6 rows times 1, 2 or 4 neighbouring panels. Its sums, two registers a row and panel, stay there from
 * the first number of `in` to the last.
 *
 * - Few rows are one pass: memory is the limit. Panels are prefetched LOOK_AHEAD, beyond the tile's end from the tile
 *   that this thread will probably take next.
 * - Many are several: the multiplications are. All passes go by one pair of panels, which the later ones find in a
 *   cache; the first two or four prefetch the next pair, each a part of it. To cut `in` into parts, so that panels stay
 *   in L1 and rows in L2, gained nothing, even with 4864 numbers and 192 rows.
 */
#pragma once
#include "linear.h"

#if !HAS_AVX512
#include <immintrin.h>

#define MAX_PASS_ROWS FEW_ROWS
/* Bytes ahead, of all panels at a time together: into L1, or into L2 for more than NEAR_ROWS rows (they take longer).
 * On Zen 3, one thread beside busy ones (medians of 5 to 7 rounds in turns), one row of bfloat16 took 0.9 times as long
 * with 2048 into L1 as with 4096 into either; four rows 0.94 times as long with 4096 into L2 as with 4096 into L1. */
#define NEAR_ROWS 3
#define LOOK_AHEAD(rows) ((rows) <= NEAR_ROWS ? 2048 : 4096)

#define INLINE static inline __attribute__((always_inline))

INLINE void prefetch_panel(const int rows, const char *at) {
    if (rows <= NEAR_ROWS)
        _mm_prefetch(at, _MM_HINT_T0);
    else
        _mm_prefetch(at, _MM_HINT_T1);
}

/* Keeps the compiler from reordering what is done to a sum: its own order needs more registers than there are. */
#define IN_THIS_ORDER(sum) __asm__ volatile("" : "+x"((sum).low), "+x"((sum).high))
/* Has what is at an address loaded again, as there is no register to keep it in. */
#define LOAD_AGAIN(address) __asm__("" : "+r"(address))

/* 16 floats or 32-bit integers of neighbouring outputs. */
typedef struct float_pair {
    __m256 low, high;
} float_pair;
typedef struct int_pair {
    __m256i low, high;
} int_pair;

typedef struct pass {
    const linear_args *args;
    const char *panels;
    int64_t panel_bytes;
    int64_t first_panel, num_panels; /* of the op; 1, 2 or 4 */
    const void *x;                   /* the rows, as prepared for the tile */
    int64_t x_stride;                /* bytes */
    int64_t first_row, num_rows;     /* of the step; 1 to 6 */
    const char *next;                /* to prefetch: the panels after these, or, if there are several passes, */
    int is_only;
    int shift;                       /* a byte for each 2^shift bytes that are read */
    float *out;                      /* [num_rows][MAX_TILE_PANELS][LANES], 32-byte aligned */
} pass;

/* out = x · panels, scaled. */
typedef void multiply_fn(const pass *pass);

/* Where the sums of a row and a panel go. */
static inline float *sums_of(const pass *pass, int row, int panel) {
    return pass->out + (row * MAX_TILE_PANELS + panel) * LANES;
}

/* The rows of a tile, prepared. */
typedef struct prepared_rows {
    const void *first;
    int64_t stride; /* bytes */
} prepared_rows;

/* A tile's product: passes, and what becomes of their sums. `most_panels` at a time while the rows are one pass. */
void avx2_multiply(const linear_args *args, const linear_tile *tile, prepared_rows x, int64_t most_panels,
                   multiply_fn *multiply);

#endif
