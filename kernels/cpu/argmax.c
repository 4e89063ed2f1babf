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
    const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
    __m512 best = lowest;
    __m512i ids = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), best_ids = ids;
    for (int64_t k = 0; k < count; k += LANES) {
        const __m512 v = _mm512_mask_loadu_ps(lowest, first_lanes(count - k), logits + k);
        const __mmask16 is_larger = _mm512_cmp_ps_mask(v, best, _CMP_GT_OQ);
        best = _mm512_mask_mov_ps(best, is_larger, v);
        best_ids = _mm512_mask_mov_epi32(best_ids, is_larger, ids);
        ids = _mm512_add_epi32(ids, _mm512_set1_epi32(LANES));
    }
    const float largest = _mm512_reduce_max_ps(best);
    const __mmask16 is_largest = _mm512_cmp_ps_mask(best, _mm512_set1_ps(largest), _CMP_EQ_OQ);
    a->best[tile] = largest;
    a->best_ids[tile] = begin + _mm512_mask_reduce_min_epi32(is_largest, best_ids);
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
