/* RMS norm of rows, and rows to int8. */
#include "ops.h"
#include "rms.h"
#include "rows.h"

static void add_row(float *out, const float *x, int64_t width) {
    for (int64_t k = 0; k < width; k += LANES) {
        const int64_t left = width - k;
        store_first(out + k, left, add(load_first(out + k, left), load_first(x + k, left)));
    }
}

static void norm_row(const norm_args *a, const float *x, int64_t row) {
    const int64_t size = a->out_dtype == F32 ? 4 : a->out_dtype == BF16 ? 2 : 1;
    char *out = (char *)a->out + row * a->out_stride * size;
    float *wide = a->out_dtype == F32 && !a->is_added ? (float *)out : scratch(a->hidden * 4);
    normalize(x, a->scale, a->hidden, a->eps, wide);
    if (a->is_added) {
        add_row((float *)out, wide, a->hidden);
        return;
    }
    if (a->out_dtype == BF16) narrow_row(wide, (uint16_t *)out, a->hidden);
    if (a->out_dtype == INT8)
        a->out_scales[row] = quantize_row(wide, (int8_t *)out, a->hidden);
    else
        clear_padding(out, a->hidden * size, a->out_stride * size);
}

static int64_t norm_num_tiles(const void *args, const step *step, int num_threads) {
    return row_tiles(step->num_rows, num_threads);
}

static void norm_run_tile(const void *args, const step *step, int64_t tile, int thread, int num_threads) {
    const norm_args *a = args;
    const row_range rows = rows_of_tile(step->num_rows, tile, num_threads);
    for (int64_t i = rows.begin; i < rows.end; i++)
        norm_row(a, a->in + i * a->hidden, i);
}

static int64_t quantize_num_tiles(const void *untyped, const step *step, int num_threads) {
    const quantize_args *a = untyped;
    return row_tiles(step->num_rows * a->per_row, num_threads);
}

static void quantize_run_tile(const void *args, const step *step, int64_t tile, int thread, int num_threads) {
    const quantize_args *a = args;
    const row_range rows = rows_of_tile(step->num_rows * a->per_row, tile, num_threads);
    for (int64_t i = rows.begin; i < rows.end; i++) {
        const float *wide = (const float *)a->in + i * a->in_stride;
        float *copy = scratch(2 * a->width * 4);
        if (a->in_dtype == BF16) {
            widen_row((const uint16_t *)a->in + i * a->in_stride, copy, a->width);
            wide = copy;
        }
        if (a->order) {
            float *ordered = copy + a->width;
            for (int64_t k = 0; k < a->width; k++) ordered[k] = wide[a->order[k]];
            wide = ordered;
        }
        a->out_scales[i] = quantize_row(wide, a->out + i * a->out_stride, a->width);
    }
}

const op_class norm_class = {norm_num_tiles, norm_run_tile, NULL};
const op_class quantize_class = {quantize_num_tiles, quantize_run_tile, NULL};
