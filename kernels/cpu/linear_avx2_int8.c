/* y = x · Wᵀ with int8 weights and activations (W8A8), with AVX2; passes as in linear_avx2.h.
 *
 * The instruction that multiplies unsigned by signed bytes adds two products in 16 bits, where they saturate. So bytes
 * are taken apart into two registers of 16 bits, the even ones of each four and the odd ones, and multiplied by pairs
 * of 16 bits of x, made once a tile: an instruction makes 16 exact products and adds pairs of them. (|w| times ±x in
 * bytes does not saturate either, but takes as many instructions: it made 0.98 times as many products in registers.)
 *
 * Sums start from what undoes the weights' zero point (ops.h). They are exact, so their order is free. What follows is
 * not: float(sum) · weight scale · x scale, then bias and epilogue (linear_finish), as in linear_int8.c.
 */
#include "linear_avx2.h"

#if !HAS_AVX512

/* Bytes 0 and 2 of each four, or 1 and 3, in 16 bits each. */
INLINE void load_weights(const int panels, const int is_odd, const char *at, int64_t panel_bytes,
                         int_pair weights[MAX_TILE_PANELS]) {
    const __m256i low_byte = _mm256_set1_epi16(255);
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) {
        const __m256i *from = (const __m256i *)(at + p * panel_bytes);
        const __m256i low = _mm256_load_si256(from), high = _mm256_load_si256(from + 1);
        weights[p].low = is_odd ? _mm256_srli_epi16(low, 8) : _mm256_and_si256(low, low_byte);
        weights[p].high = is_odd ? _mm256_srli_epi16(high, 8) : _mm256_and_si256(high, low_byte);
    }
}

/* sum[r][p] += x[r] · weights[p], two products each. */
INLINE void add_products(const int rows, const int panels, const char *x, int64_t x_stride,
                         const int_pair weights[MAX_TILE_PANELS], int_pair sum[MAX_PASS_ROWS][MAX_TILE_PANELS]) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m256i two = _mm256_set1_epi32(*(const int32_t *)(x + r * x_stride));
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            sum[r][p].low = _mm256_add_epi32(sum[r][p].low, _mm256_madd_epi16(weights[p].low, two));
            sum[r][p].high = _mm256_add_epi32(sum[r][p].high, _mm256_madd_epi16(weights[p].high, two));
            IN_THIS_ORDER(sum[r][p]);
        }
    }
}

/* The products of 64 bytes of each panel. */
INLINE void multiply_line(const int rows, const int panels, const pass *t, int64_t offset,
                          int_pair sum[MAX_PASS_ROWS][MAX_TILE_PANELS]) {
    const char *at = t->panels + offset, *x = (const char *)t->x + offset / 8;
    int_pair weights[MAX_TILE_PANELS];
    load_weights(panels, 0, at, t->panel_bytes, weights);
    add_products(rows, panels, x, t->x_stride, weights, sum);
    LOAD_AGAIN(at);
    load_weights(panels, 1, at, t->panel_bytes, weights);
    add_products(rows, panels, x + 4, t->x_stride, weights, sum);
}

/* The products of bytes [begin, end) of each panel. `ahead` + the offset of a line is what it prefetches. */
INLINE void stream(const int rows, const int panels, const pass *t, int64_t begin, int64_t end, const char *ahead,
                   int_pair sum[MAX_PASS_ROWS][MAX_TILE_PANELS]) {
    for (int64_t offset = begin; offset < end; offset += 64) {
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) prefetch_panel(rows, ahead + p * t->panel_bytes + offset);
        multiply_line(rows, panels, t, offset, sum);
    }
}

static inline void scale(float *out, __m256i sum, const float *scales, float x_scale) {
    const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(scales));
    _mm256_store_ps(out, _mm256_mul_ps(scaled, _mm256_set1_ps(x_scale)));
}

/* Inlined for each (rows, panels), so that all sums are registers. */
INLINE void multiply(const int rows, const int panels, const int is_only, const pass *t) {
    const linear_args *args = t->args;
    const int8_t *x = (const int8_t *)args->x + t->first_row * args->x_stride;
    int_pair sum[MAX_PASS_ROWS][MAX_TILE_PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            sum[r][p].low = sum[r][p].high =
                _mm256_set1_epi32(*quantized_starts(x + r * args->x_stride, args->weight.in));
    if (is_only) {
        const int64_t distance = LOOK_AHEAD(rows) / panels;
        const int64_t turn = t->panel_bytes > distance ? t->panel_bytes - distance : 0;
        stream(rows, panels, t, 0, turn, t->panels + distance, sum);
        stream(rows, panels, t, turn, t->panel_bytes, t->next - turn, sum);
    } else {
        for (int64_t offset = 0; offset < t->panel_bytes; offset += 64) {
            _mm_prefetch(t->next + (offset >> t->shift), _MM_HINT_T1);
            multiply_line(rows, panels, t, offset, sum);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const float *scales = args->weight.scales + (t->first_panel + p) * LANES;
            scale(sums_of(t, r, p), sum[r][p].low, scales, args->x_scales[t->first_row + r]);
            scale(sums_of(t, r, p) + 8, sum[r][p].high, scales + 8, args->x_scales[t->first_row + r]);
        }
}

#define DEFINE(name, is_only, rows, panels)                                                                  \
    static void name##_##rows##_##panels(const pass *t) {               \
        multiply(rows, panels, is_only, t);                                                             \
    }
DEFINE(once, 1, 1, 1)
DEFINE(once, 1, 2, 1)
DEFINE(once, 1, 3, 1)
DEFINE(once, 1, 4, 1)
DEFINE(once, 1, 5, 1)
DEFINE(once, 1, 6, 1)
DEFINE(once, 1, 1, 2)
DEFINE(once, 1, 2, 2)
DEFINE(once, 1, 3, 2)
DEFINE(once, 1, 1, 4)
DEFINE(again, 0, 3, 1)
DEFINE(again, 0, 4, 1)
DEFINE(again, 0, 5, 1)
DEFINE(again, 0, 6, 1)

/* [panels][rows] of the only pass, and [rows] of one of several, which have at least 3. */
static multiply_fn *const MULTIPLY_ONCE[MAX_TILE_PANELS + 1][MAX_PASS_ROWS + 1] = {
    [1] = {NULL, once_1_1, once_2_1, once_3_1, once_4_1, once_5_1, once_6_1},
    [2] = {NULL, once_1_2, once_2_2, once_3_2},
    [4] = {NULL, once_1_4},
};
static multiply_fn *const MULTIPLY_AGAIN[MAX_PASS_ROWS + 1] = {
    [3] = again_3_1, [4] = again_4_1, [5] = again_5_1, [6] = again_6_1};

static void multiply_pass(const pass *t) {
    (t->is_only ? MULTIPLY_ONCE[t->num_panels] : MULTIPLY_AGAIN)[t->num_rows](t);
}

/* Rows of bytes as pairs of 16 bits: numbers 0 and 2, then 1 and 3 of each four. */
static prepared_rows widen(const linear_args *args, const linear_tile *tile) {
    const int64_t width = quantized_width(args->weight.in);
    int16_t *out = scratch(tile->num_rows * width * 2);
    for (int64_t r = 0; r < tile->num_rows; r++) {
        const int8_t *x = (const int8_t *)args->x + (tile->first_row + r) * args->x_stride;
        __m256i *to = (__m256i *)(out + r * width);
        for (int64_t k = 0; k < width; k += 32, to += 2) {
            const __m256i all = _mm256_loadu_si256((const __m256i *)(x + k));
            const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), odd = _mm256_srai_epi16(all, 8);
            const __m256i first = _mm256_unpacklo_epi32(even, odd), second = _mm256_unpackhi_epi32(even, odd);
            _mm256_store_si256(to, _mm256_permute2x128_si256(first, second, 0x20));
            _mm256_store_si256(to + 1, _mm256_permute2x128_si256(first, second, 0x31));
        }
    }
    return (prepared_rows){out, width * 2};
}

void int8_tile(const linear_args *args, const linear_tile *tile) {
    avx2_multiply(args, tile, widen(args, tile), tile->num_rows == 1 ? 4 : tile->num_rows <= 3 ? 2 : 1, multiply_pass);
}

#endif
