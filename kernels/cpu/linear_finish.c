/* From a linear's sums to its outputs; one file, so that every weight type ends in the same operations. */
#include "exp2.h"
#include "linear.h"
#include "vector_math.h"

/* The lanes of a panel that are outputs: the last panel may have fewer than 16. */
static __mmask16 lanes_of(int64_t width, int64_t panel) {
    const int64_t left = width - panel * LANES;
    return left >= LANES ? 0xFFFF : (__mmask16)((1u << left) - 1);
}

static __m512 bias_of(const linear_args *args, int64_t panel) {
    return args->bias ? _mm512_loadu_ps(args->bias + panel * LANES) : _mm512_setzero_ps();
}

/* z / (1 + e^−z), the quotient by a reciprocal of 14 bits and one step of Newton's: a division takes as long as all the
 * rest. e^−z stays below 2^120, so that the reciprocal is a normal number. */
static __m512 silu(__m512 z) {
    const __m512 exponent = _mm512_mul_ps(z, _mm512_set1_ps(-1.44269504088896341f));
    const __m512 exponential = exp2_ps(_mm512_min_ps(exponent, _mm512_set1_ps(120.0f)));
    const __m512 sum = _mm512_add_ps(_mm512_set1_ps(1.0f), exponential), guess = _mm512_rcp14_ps(sum);
    const __m512 error = _mm512_fnmadd_ps(sum, guess, _mm512_set1_ps(1.0f));
    return _mm512_mul_ps(z, _mm512_fmadd_ps(guess, error, guess));
}

static void gate(const linear_args *args, int64_t first_row, int64_t num_rows, int64_t panel, sums sums) {
    const __m512 gate_bias = bias_of(args, panel), up_bias = bias_of(args, panel + 1);
    const __mmask16 lanes = lanes_of(args->weight.out / 2, panel / 2);
    for (int64_t r = 0; r < num_rows; r++) {
        const float *from = sums.first + r * sums.row;
        const __m512 z = _mm512_add_ps(_mm512_load_ps(from), gate_bias);
        const __m512 up = _mm512_add_ps(_mm512_load_ps(from + sums.panel), up_bias);
        const __m512 y = _mm512_mul_ps(silu(z), up);
        const int64_t at = (first_row + r) * args->y_stride + panel / 2 * LANES;
        if (args->out_dtype == BF16)
            _mm256_mask_storeu_epi16((uint16_t *)args->y + at, lanes, to_bf16(y));
        else
            _mm512_mask_storeu_ps((float *)args->y + at, lanes, y);
    }
}

static void store(const linear_args *args, int64_t first_row, int64_t num_rows, int64_t panel, sums sums) {
    const __m512 bias = bias_of(args, panel);
    const __mmask16 lanes = lanes_of(args->weight.out, panel);
    float *y = (float *)args->y + first_row * args->y_stride + panel * LANES;
    for (int64_t r = 0; r < num_rows; r++, y += args->y_stride) {
        __m512 value = _mm512_add_ps(_mm512_load_ps(sums.first + r * sums.row), bias);
        if (args->epilogue == ADD) value = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, y), value);
        _mm512_mask_storeu_ps(y, lanes, value);
    }
}

void linear_finish(const linear_args *args, int64_t first_row, int64_t num_rows, int64_t first_panel,
                   int64_t num_panels, sums sums) {
    const int64_t step = args->epilogue == SILU_MUL ? 2 : 1;
    for (int64_t p = 0; p < num_panels; p += step, sums.first += step * sums.panel)
        (args->epilogue == SILU_MUL ? gate : store)(args, first_row, num_rows, first_panel + p, sums);
}
