/* From a linear's sums to its outputs; one file, so that every weight type ends in the same operations. */
#include "linear.h"
#include "vector_math.h"

/* The lanes of a panel that are outputs: the last panel may have fewer than 16. */
static __mmask16 lanes_of(int64_t width, int64_t panel) {
    const int64_t left = width - panel * LANES;
    return left >= LANES ? 0xFFFF : (__mmask16)((1u << left) - 1);
}

static __m512 with_bias(const linear_args *args, int64_t panel, const float *sums) {
    const __m512 sum = _mm512_load_ps(sums);
    return args->bias ? _mm512_add_ps(sum, _mm512_loadu_ps(args->bias + panel * LANES)) : sum;
}

static void gate(const linear_args *args, int64_t row, int64_t panel, float sums[][LANES]) {
    const __m512 z = with_bias(args, panel, sums[0]), up = with_bias(args, panel + 1, sums[1]);
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 exponential = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), z));
    const __m512 y = _mm512_mul_ps(_mm512_div_ps(z, _mm512_add_ps(one, exponential)), up);
    const int64_t at = row * args->y_stride + panel / 2 * LANES;
    const __mmask16 lanes = lanes_of(args->weight.out / 2, panel / 2);
    if (args->out_dtype == BF16)
        _mm256_mask_storeu_epi16((uint16_t *)args->y + at, lanes, to_bf16(y));
    else
        _mm512_mask_storeu_ps((float *)args->y + at, lanes, y);
}

void linear_finish(const linear_args *args, int64_t first_row, int64_t num_rows, int64_t first_panel,
                   int64_t num_panels, float sums[][MAX_TILE_PANELS][LANES]) {
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t row = first_row + r;
        for (int64_t p = 0; p < num_panels; p++) {
            const int64_t panel = first_panel + p;
            if (args->epilogue == SILU_MUL) {
                gate(args, row, panel, sums[r] + p);
                p++;
                continue;
            }
            const __mmask16 lanes = lanes_of(args->weight.out, panel);
            float *y = (float *)args->y + row * args->y_stride + panel * LANES;
            __m512 value = with_bias(args, panel, sums[r][p]);
            if (args->epilogue == ADD) value = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, y), value);
            _mm512_mask_storeu_ps(y, lanes, value);
        }
    }
}
