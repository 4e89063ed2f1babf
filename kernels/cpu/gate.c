/* The gate by itself, for sums that something was added to: a linear's epilogue does the same to its own. */
#include "gate.h"
#include "rows.h"

static int64_t num_tiles(const void *args, const step *step, int num_threads) {
    return row_tiles(step->num_rows, num_threads);
}

static void run_tile(const void *untyped, const step *step, int64_t tile, int thread, int num_threads) {
    const gate_args *a = untyped;
    const row_range rows = rows_of_tile(step->num_rows, tile, num_threads);
    for (int64_t row = rows.begin; row < rows.end; row++)
        for (int64_t k = 0; k < a->width; k += LANES) {
            const float *from = a->in + row * a->in_stride + 2 * k;
            const floats y = multiply(gated(a->epilogue, load(from)), load(from + LANES));
            const int64_t at = row * a->out_stride + k;
            if (a->out_dtype == BF16)
                store_first_uint16((uint16_t *)a->out + at, a->width - k, to_bf16(y));
            else
                store_first((float *)a->out + at, a->width - k, y);
        }
}

const op_class gate_class = {num_tiles, run_tile, NULL};
