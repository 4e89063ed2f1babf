/* Feed-forward layers of experts, of which a few compute each row (gpu_worker/model/experts.py).
 *
 * A *pair* is a row and one of its experts. OP_ROUTE chooses each row's; OP_GROUP sorts the pairs by expert, then by row,
 * so that an expert's are neighbours; OP_GATHER_PAIRS copies the rows there; OP_EXPERTS multiplies each expert's by its
 * weights, which are thus read once a step; OP_COMBINE adds each row's results up, in the order of the experts' numbers.
 *
 * A tile of OP_EXPERTS is MAX_TILE_PANELS panels of one expert by all of its rows: so its place follows from its number
 * by one division, whatever the experts have to do. Experts without rows have no tiles.
 */
#include "linear.h"
#include "rows.h"

#include <math.h>

/* out = softmax of in; returns nothing that depends on neighbours. */
static void softmax(const float *in, int64_t width, float *out) {
    floats most = floats_of(-INFINITY), sum = floats_of(0);
    for (int64_t k = 0; k < width; k++) most = larger(most, floats_of(in[k]));
    const floats infinite = floats_of(-INFINITY);
    for (int64_t k = 0; k < width; k += LANES) {
        const int64_t left = width - k < LANES ? width - k : LANES;
        const floats shifted = subtract(load_first(in + k, left), most);
        const floats power = exp_of(select_floats(first_lanes(left), shifted, infinite));
        sum = add(sum, power);
        store_first(out + k, left, power);
    }
    const float inverse = 1.0f / sum_of(sum);
    for (int64_t k = 0; k < width; k++) out[k] *= inverse;
}

/* Leaves the `num_used` largest of `probabilities` in `chosen`, rising, the lower number first on a tie; a row of NaN
 * gets any. */
static void choose(float *probabilities, const route_args *a, int32_t *chosen, float *shares) {
    float total = 0;
    for (int64_t j = 0; j < a->num_used; j++) {
        int32_t best = -1;
        for (int32_t e = 0; e < a->num_experts; e++)
            if (!(probabilities[e] < 0) && (best < 0 || probabilities[e] > probabilities[best])) best = e;
        int64_t place = j;
        for (; place > 0 && chosen[place - 1] > best; place--) {
            chosen[place] = chosen[place - 1];
            shares[place] = shares[place - 1];
        }
        chosen[place] = best;
        shares[place] = probabilities[best];
        total += probabilities[best];
        probabilities[best] = -1;
    }
    for (int64_t j = 0; a->is_normalized && j < a->num_used; j++) shares[j] /= total;
}

static int64_t route_num_tiles(const void *args, const step *step, int num_threads) {
    return row_tiles(step->num_rows, num_threads);
}

static void route_run_tile(const void *untyped, const step *step, int64_t tile, int thread, int num_threads) {
    const route_args *a = untyped;
    const row_range rows = rows_of_tile(step->num_rows, tile, num_threads);
    float *probabilities = scratch(a->num_experts * 4);
    for (int64_t i = rows.begin; i < rows.end; i++) {
        softmax(a->logits + i * a->stride, a->num_experts, probabilities);
        choose(probabilities, a, a->chosen + i * a->num_used, a->shares + i * a->num_used);
    }
}

static int64_t group_num_tiles(const void *args, const step *step, int num_threads) { return step->num_rows ? 1 : 0; }

static void group_run_tile(const void *untyped, const step *step, int64_t tile, int thread, int num_threads) {
    const route_args *a = untyped;
    const int64_t num_pairs = step->num_rows * a->num_used;
    int32_t *next = scratch(a->num_experts * 4), num_active = 0;
    memset(next, 0, (size_t)a->num_experts * 4);
    for (int64_t pair = 0; pair < num_pairs; pair++) next[a->chosen[pair]]++;
    a->starts[0] = 0;
    for (int32_t e = 0; e < a->num_experts; e++) {
        if (next[e]) a->active[1 + num_active++] = e;
        a->starts[e + 1] = a->starts[e] + next[e];
        next[e] = a->starts[e];
    }
    a->active[0] = num_active;
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        const int32_t place = next[a->chosen[pair]]++;
        a->place_of[pair] = place;
        a->row_of[place] = (int32_t)(pair / a->num_used);
    }
}

static int64_t gather_num_tiles(const void *untyped, const step *step, int num_threads) {
    const gather_pairs_args *a = untyped;
    return row_tiles(step->num_rows * a->num_used, num_threads);
}

static void gather_run_tile(const void *untyped, const step *step, int64_t tile, int thread, int num_threads) {
    const gather_pairs_args *a = untyped;
    const row_range pairs = rows_of_tile(step->num_rows * a->num_used, tile, num_threads);
    for (int64_t i = pairs.begin; i < pairs.end; i++) {
        const int64_t row = a->row_of[i];
        memcpy((char *)a->out + i * a->row_bytes, (const char *)a->in + row * a->row_bytes, (size_t)a->row_bytes);
        if (a->in_scales) a->out_scales[i] = a->in_scales[row];
    }
}

static int64_t tiles_per_expert(const experts_args *a) {
    return ceil_div(ceil_div(a->linear.weight.out, LANES), MAX_TILE_PANELS);
}

static int64_t experts_num_tiles(const void *untyped, const step *step, int num_threads) {
    const experts_args *a = untyped;
    return step->num_rows ? a->active[0] * tiles_per_expert(a) : 0;
}

static int64_t element_bytes_of(int32_t dtype) { return dtype == F32 ? 4 : dtype == BF16 ? 2 : 1; }

static void experts_run_tile(const void *untyped, const step *step, int64_t tile, int thread, int num_threads) {
    const experts_args *a = untyped;
    const int64_t tiles = tiles_per_expert(a), expert = a->active[1 + tile / tiles];
    const int64_t first = a->starts[expert], num_rows = a->starts[expert + 1] - first;
    linear_args own = a->linear;
    own.weight = a->weights[expert];
    own.x = (const char *)own.x + first * own.x_stride * element_bytes_of(own.weight.dtype);
    own.y = (char *)own.y + first * own.y_stride * element_bytes_of(own.out_dtype);
    if (own.x_scales) own.x_scales += first;
    linear_run_panels(&own, tile % tiles * MAX_TILE_PANELS, MAX_TILE_PANELS, num_rows);
}

static int64_t combine_num_tiles(const void *args, const step *step, int num_threads) {
    return row_tiles(step->num_rows, num_threads);
}

static void combine_row(const combine_args *a, int64_t row) {
    const int32_t *places = a->place_of + row * a->num_used;
    const float *shares = a->shares + row * a->num_used;
    float *out = a->out + row * a->width;
    for (int64_t k = 0; k < a->width; k += LANES) {
        const int64_t left = a->width - k;
        floats sum = floats_of(0);
        for (int64_t j = 0; j < a->num_used; j++)
            sum = multiply_add(load_first(a->in + places[j] * a->width + k, left), floats_of(shares[j]), sum);
        store_first(out + k, left, add(load_first(out + k, left), sum));
    }
}

static void combine_run_tile(const void *untyped, const step *step, int64_t tile, int thread, int num_threads) {
    const row_range rows = rows_of_tile(step->num_rows, tile, num_threads);
    for (int64_t i = rows.begin; i < rows.end; i++) combine_row(untyped, i);
}

const op_class route_class = {route_num_tiles, route_run_tile, NULL};
const op_class group_class = {group_num_tiles, group_run_tile, NULL};
const op_class gather_pairs_class = {gather_num_tiles, gather_run_tile, NULL};
const op_class experts_class = {experts_num_tiles, experts_run_tile, NULL};
const op_class combine_class = {combine_num_tiles, combine_run_tile, NULL};
