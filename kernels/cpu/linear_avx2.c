/* The passes of a tile, see linear_avx2.h. */
#include "linear_avx2.h"

#if !HAS_AVX512

#define PAIR 2 /* panels to finish together: gate and up */

typedef struct product {
    const linear_args *args;
    const linear_tile *tile;
    prepared_rows x;
    int64_t panel_bytes;
    multiply_fn *multiply;
} product;

/* Rows [row, row + rows) of the tile by its panels [panel, panel + count), `together` at a time. */
static pass pass_of(const product *p, int64_t row, int64_t rows, int64_t panel, int64_t together) {
    return (pass){
        .args = p->args,
        .panels = p->tile->panels + panel * p->panel_bytes,
        .panel_bytes = p->panel_bytes,
        .first_panel = p->tile->first_panel + panel,
        .num_panels = together,
        .x = (const char *)p->x.first + row * p->x.stride,
        .x_stride = p->x.stride,
        .first_row = p->tile->first_row + row,
        .num_rows = rows,
    };
}

/* Panel `panel` of the tile, or after its end the first of the next one. */
static const char *panel_or_next(const product *p, int64_t panel) {
    return panel < p->tile->num_panels ? p->tile->panels + panel * p->panel_bytes : p->tile->next;
}

static void finish(const product *p, int64_t row, int64_t rows, int64_t panel, int64_t count, const float *out) {
    linear_finish(p->args, p->tile->first_row + row, rows, p->tile->first_panel + panel, count,
                  (sums){out, MAX_TILE_PANELS * LANES, LANES});
}

/* All rows in one pass. */
static void multiply_once(const product *p, int64_t most_panels) {
    _Alignas(64) float out[MAX_PASS_ROWS * MAX_TILE_PANELS * LANES];
    const linear_tile *tile = p->tile;
    for (int64_t panel = 0, count; panel < tile->num_panels; panel += count) {
        const int64_t left = tile->num_panels - panel;
        count = left >= 4 && most_panels == 4 ? 4 : left >= PAIR ? PAIR : 1;
        const int64_t together = count < most_panels ? count : most_panels;
        linear_prefetch_outputs(p->args, tile->first_row, tile->num_rows, tile->first_panel + panel, count);
        for (int64_t i = 0; i < count; i += together) {
            pass pass = pass_of(p, 0, tile->num_rows, panel + i, together);
            pass.is_only = 1;
            pass.next = panel_or_next(p, panel + i + together);
            pass.out = out + i * LANES;
            p->multiply(&pass);
        }
        finish(p, 0, tile->num_rows, panel, count, out);
    }
}

/* Pass `index` of several by the panels [panel, panel + count). */
static void multiply_again(const product *p, int64_t index, int64_t num_passes, int64_t panel, int64_t count) {
    _Alignas(64) float out[MAX_PASS_ROWS * MAX_TILE_PANELS * LANES];
    const linear_tile *tile = p->tile;
    const int64_t row = tile->num_rows * index / num_passes, rows = tile->num_rows * (index + 1) / num_passes - row;
    const int shift = num_passes >= 4 ? 2 : 1;
    linear_prefetch_outputs(p->args, tile->first_row + row, rows, tile->first_panel + panel, count);
    for (int64_t i = 0; i < count; i++) {
        pass pass = pass_of(p, row, rows, panel + i, 1);
        pass.shift = shift;
        if (index < 1 << shift)
            pass.next = panel_or_next(p, panel + count) + i * p->panel_bytes + (index * p->panel_bytes >> shift);
        else
            pass.next = pass.panels;
        pass.out = out + i * LANES;
        p->multiply(&pass);
    }
    finish(p, row, rows, panel, count, out);
}

void avx2_multiply(const linear_args *args, const linear_tile *tile, prepared_rows x, int64_t most_panels,
                   multiply_fn *multiply) {
    const product product = {args, tile, x, panel_bytes(&args->weight), multiply};
    const int64_t num_passes = ceil_div(tile->num_rows, MAX_PASS_ROWS);
    if (num_passes == 1) {
        multiply_once(&product, most_panels);
        return;
    }
    for (int64_t panel = 0; panel < tile->num_panels; panel += PAIR) {
        const int64_t left = tile->num_panels - panel, count = left < PAIR ? left : PAIR;
        for (int64_t i = 0; i < num_passes; i++) multiply_again(&product, i, num_passes, panel, count);
    }
}

#endif
