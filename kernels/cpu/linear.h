/* What the linear kernels of all weight types share: how an op is cut into tiles, and how sums become outputs. */
#pragma once
#include "amx.h"
#include "isa.h"
#include "ops.h"

#include <immintrin.h>

#define MAX_TILE_PANELS 4
/* Up to so many rows memory is the limit: tiles are short, and have four panels (with AVX2 in a pass: one to four), for
 * enough independent sums. */
#define FEW_ROWS (HAS_AVX512 ? 4 : 6)

/* One tile: `num_panels` neighbouring panels times rows [first_row, first_row + num_rows) of x and y. `next` are the
 * panels of the tile that this thread will probably take next (in this op; its own again at the end). */
typedef struct linear_tile {
    const char *panels;
    const char *next;
    int64_t first_panel, num_panels;
    int64_t first_row, num_rows;
} linear_tile;

/* Sums of some rows by some panels: 16 outputs lie together, `row` and `panel` floats on begin those of the next. */
typedef struct sums {
    const float *first;
    int64_t row, panel;
} sums;

/* Adds the bias to sums of rows from first_row and panels from first_panel on, then stores, adds or gates. */
void linear_finish(const linear_args *args, int64_t first_row, int64_t num_rows, int64_t first_panel,
                   int64_t num_panels, sums sums);

/* Bring the outputs that linear_finish will write into the cache: it would wait for most of them, as weights have
 * passed through it since. */
static inline void linear_prefetch_outputs(const linear_args *args, int64_t first_row, int64_t num_rows,
                                           int64_t first_panel, int64_t num_panels) {
    const int64_t size = args->out_dtype == BF16 ? 2 : 4, per_output = is_gate(args->epilogue) ? 2 : 1;
    const int64_t begin = first_panel * LANES / per_output * size;
    const int64_t end = begin + num_panels * LANES / per_output * size;
    for (int64_t row = first_row; row < first_row + num_rows; row++) {
        const char *y = (const char *)args->y + row * args->y_stride * size;
        for (int64_t offset = begin; offset < end; offset += 64) prefetch_to_write(y + offset);
    }
}

/* `num_panels` panels from `first` on, as far as there are so many, by rows 0 .. num_rows of x and y. */
void linear_run_panels(const linear_args *args, int64_t first, int64_t num_panels, int64_t num_rows);

/* Bytes of a panel of 16 outputs. */
int64_t panel_bytes(const weight *weight);

/* Whether a linear over so many rows is computed on AMX tiles. Float sums depend on it: so the number of rows decides for
 * int8 only. Of that 12 rows are one pass of AVX-512, which is memory's limit. */
static inline int uses_amx(const weight *weight, int64_t num_rows) {
    if (!HAS_AMX) return 0;
    return weight->dtype == BF16 ? weight->in % 32 == 0 : weight->dtype == INT8 && weight->in % 64 == 0 && num_rows > 12;
}

/* Each compiled from one of two files, for AVX-512 or for AVX2; those of AMX stand beside the former. */
void float_tile(const linear_args *args, const linear_tile *tile);
void amx_tile(const linear_args *args, const linear_tile *tile);
void amx_few_tile(const linear_args *args, const linear_tile *tile);
void int8_tile(const linear_args *args, const linear_tile *tile);
void int4_tile(const linear_args *args, const linear_tile *tile);
