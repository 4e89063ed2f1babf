/* The largest logit of each wanted row, the lowest id on a tie. NaN is never the largest; a row of NaN or −∞ gives 0.
 *
 * OP_ARGMAX finds the best of each ARGMAX_TILE logits, OP_ARGMAX_MERGE the best of these. An id is kept per lane and
 * replaced by larger logits only; the first of the lanes that share the largest wins, so the result does not depend on
 * how the row was cut.
 */
#include "ops.h"
#include "rows.h"

#define MAX_ROWS_PER_MERGE 64

static int64_t tiles_of_row(const argmax_args *a) { return ceil_div(a->width, ARGMAX_TILE); }

static int64_t argmax_num_tiles(const void *args, const step *step, int num_threads) {
    return step->num_wanted * tiles_of_row(args);
}

static void argmax_run_tile(const void *args, const step *step, int64_t tile, int thread, int num_threads) {
    const argmax_args *a = args;
    const int64_t tiles = tiles_of_row(a), row = tile / tiles, begin = tile % tiles * ARGMAX_TILE;
    const int64_t rest = a->width - begin, count = rest < ARGMAX_TILE ? rest : ARGMAX_TILE;
    const float *logits = a->logits + row * a->stride + begin;
    int32_t numbers[LANES];
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    const floats lowest = floats_of(-__builtin_inff());
    floats best = lowest;
    ints ids = load_ints(numbers), best_ids = ids;
    for (int64_t k = 0; k < count; k += LANES) {
        const floats v = load_first_or(logits + k, count - k, lowest);
        const lanes is_larger = is_greater(v, best);
        best = select_floats(is_larger, v, best);
        best_ids = select_ints(is_larger, ids, best_ids);
        ids = ints_add(ids, ints_of(LANES));
    }
    const float largest = largest_of(best);
    store_ints(numbers, best_ids);
    int32_t id = INT32_MAX;
    for (uint32_t left = bits_of(is_equal(best, floats_of(largest))); left; left &= left - 1)
        if (numbers[__builtin_ctz(left)] < id) id = numbers[__builtin_ctz(left)];
    a->best[tile] = largest;
    a->best_ids[tile] = begin + id;
}

static int64_t merge_num_tiles(const void *args, const step *step, int num_threads) {
    return ceil_div(step->num_wanted, MAX_ROWS_PER_MERGE);
}

static void merge_run_tile(const void *args, const step *step, int64_t tile, int thread, int num_threads) {
    const argmax_args *a = args;
    const int64_t tiles = tiles_of_row(a), end = (tile + 1) * MAX_ROWS_PER_MERGE;
    for (int64_t row = tile * MAX_ROWS_PER_MERGE; row < end && row < step->num_wanted; row++) {
        int64_t best = row * tiles;
        for (int64_t i = best + 1; i < (row + 1) * tiles; i++)
            if (a->best[i] > a->best[best]) best = i;
        a->out[row] = a->best_ids[best];
    }
}

const op_class argmax_class = {argmax_num_tiles, argmax_run_tile, NULL};
const op_class argmax_merge_class = {merge_num_tiles, merge_run_tile, NULL};
