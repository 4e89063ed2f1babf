/* The wanted rows of a buffer, one behind the other: what the ops behind it work on (quire.h). */
#include "ops.h"
#include "rows.h"

static int64_t num_tiles(const void *args, const step *step, int num_threads) {
    return row_tiles(step->num_wanted, num_threads);
}

static void run_tile(const void *untyped, const step *step, int64_t tile, int thread, int num_threads) {
    const gather_args *args = untyped;
    const row_range rows = rows_of_tile(step->num_wanted, tile, num_threads);
    for (int64_t i = rows.begin; i < rows.end; i++)
        memcpy((char *)args->out + i * args->row_bytes, (const char *)args->in + step->wanted_rows[i] * args->row_bytes,
               (size_t)args->row_bytes);
}

const op_class gather_class = {num_tiles, run_tile, NULL};
