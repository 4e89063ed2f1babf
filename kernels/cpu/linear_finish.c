/* From a linear's sums to its outputs; one file, so that every weight type ends in the same operations. */
#include "gate.h"
#include "linear.h"

static floats bias_of(const linear_args *args, int64_t panel) {
    return args->bias ? load(args->bias + panel * LANES) : floats_of(0);
}

static void gate(const linear_args *args, int64_t first_row, int64_t num_rows, int64_t panel, sums sums) {
    const floats gate_bias = bias_of(args, panel), up_bias = bias_of(args, panel + 1);
    const int64_t left = args->weight.out / 2 - panel / 2 * LANES; /* the last panel may have fewer than 16 outputs */
    for (int64_t r = 0; r < num_rows; r++) {
        const float *from = sums.first + r * sums.row;
        const floats z = add(load(from), gate_bias);
        const floats up = add(load(from + sums.panel), up_bias);
        const floats y = multiply(gated(args->epilogue, z), up);
        const int64_t at = (first_row + r) * args->y_stride + panel / 2 * LANES;
        if (args->out_dtype == BF16)
            store_first_uint16((uint16_t *)args->y + at, left, to_bf16(y));
        else
            store_first((float *)args->y + at, left, y);
    }
}

static void put(const linear_args *args, int64_t first_row, int64_t num_rows, int64_t panel, sums sums) {
    const floats bias = bias_of(args, panel);
    const int64_t left = args->weight.out - panel * LANES;
    float *y = (float *)args->y + first_row * args->y_stride + panel * LANES;
    for (int64_t r = 0; r < num_rows; r++, y += args->y_stride) {
        floats value = add(load(sums.first + r * sums.row), bias);
        if (args->epilogue == ADD) value = add(load_first(y, left), value);
        store_first(y, left, value);
    }
}

void linear_finish(const linear_args *args, int64_t first_row, int64_t num_rows, int64_t first_panel,
                   int64_t num_panels, sums sums) {
    const int64_t step = is_gate(args->epilogue) ? 2 : 1;
    for (int64_t p = 0; p < num_panels; p += step, sums.first += step * sums.panel)
        (is_gate(args->epilogue) ? gate : put)(args, first_row, num_rows, first_panel + p, sums);
}
