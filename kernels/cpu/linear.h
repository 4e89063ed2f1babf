/* What the linear kernels of all weight types share: how an op is cut into tiles, and how sums become outputs. */
#pragma once
#include "ops.h"

#define MAX_TILE_PANELS 4

/* One tile: `num_panels` neighbouring panels times rows [first_row, first_row + num_rows) of x and y. `next` are the
 * panels of the tile that this thread will probably take next (in this op; its own again at the end). */
typedef struct linear_tile {
    const char *panels;
    const char *next;
    int64_t first_panel, num_panels;
    int64_t first_row, num_rows;
} linear_tile;

/* sums[r][p]: 16 outputs of row first_row + r in panel first_panel + p. Adds the bias, then stores, adds or gates. */
void linear_finish(const linear_args *args, int64_t first_row, int64_t num_rows, int64_t first_panel,
                   int64_t num_panels, float sums[][MAX_TILE_PANELS][LANES]);

/* Bring the outputs that linear_finish will write into the cache: it would wait for most of them, as weights have
 * passed through it since. */
void linear_prefetch_outputs(const linear_args *args, int64_t first_row, int64_t num_rows, int64_t first_panel,
                             int64_t num_panels);

/* Bytes of a panel of 16 outputs. */
int64_t panel_bytes(const weight *weight);

void int8_tile(const linear_args *args, const linear_tile *tile);
void int4_tile(const linear_args *args, const linear_tile *tile);
