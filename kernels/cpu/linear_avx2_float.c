/* y = x · Wᵀ with bfloat16 and float32 weights in panels of 16 outputs (ops.h), with AVX2; passes as in linear_avx2.h.
 *
 * A sum is one chain of multiply-adds along `in` from the first number to the last, whatever the number of rows, tiles
 * and threads. A bfloat16 becomes a float by a shift (the first of a pair) or a mask (the second), so that products are
 * exact; x is widened once a tile, as an instruction loads one float into all lanes.
 */
#include "linear_avx2.h"

#if !HAS_AVX512
#include <string.h>

/* The weights of each panel at one number of `in`: float32, or the first or second of the pairs at `at`. */
INLINE void load_weights(const int panels, const int is_bf16, const int is_second, const char *at, int64_t panel_bytes,
                         float_pair weights[MAX_TILE_PANELS]) {
    const __m256i high_bits = _mm256_set1_epi32((int)0xFFFF0000);
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) {
        const __m256i *from = (const __m256i *)(at + p * panel_bytes);
        __m256i low = _mm256_load_si256(from), high = _mm256_load_si256(from + 1);
        if (is_bf16) {
            low = is_second ? _mm256_and_si256(low, high_bits) : _mm256_slli_epi32(low, 16);
            high = is_second ? _mm256_and_si256(high, high_bits) : _mm256_slli_epi32(high, 16);
        }
        weights[p] = (float_pair){_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)};
    }
}

/* sum[r][p] += x[r] · weights[p] */
INLINE void add_products(const int rows, const int panels, const char *x, int64_t x_stride,
                         const float_pair weights[MAX_TILE_PANELS], float_pair sum[MAX_PASS_ROWS][MAX_TILE_PANELS]) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m256 factor = _mm256_broadcast_ss((const float *)(x + r * x_stride));
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            sum[r][p].low = _mm256_fmadd_ps(weights[p].low, factor, sum[r][p].low);
            sum[r][p].high = _mm256_fmadd_ps(weights[p].high, factor, sum[r][p].high);
            IN_THIS_ORDER(sum[r][p]);
        }
    }
}

/* The products of 64 bytes of each panel. */
INLINE void multiply_line(const int rows, const int panels, const int is_bf16, const pass *t, int64_t offset,
                          float_pair sum[MAX_PASS_ROWS][MAX_TILE_PANELS]) {
    const char *at = t->panels + offset, *x = (const char *)t->x + offset / (is_bf16 ? 8 : 16);
    float_pair weights[MAX_TILE_PANELS];
    load_weights(panels, is_bf16, 0, at, t->panel_bytes, weights);
    add_products(rows, panels, x, t->x_stride, weights, sum);
    if (!is_bf16) return;
    LOAD_AGAIN(at);
    load_weights(panels, is_bf16, 1, at, t->panel_bytes, weights);
    add_products(rows, panels, x + 4, t->x_stride, weights, sum);
}

/* The products of bytes [begin, end) of each panel. `ahead` + the offset of a line is what it prefetches. */
INLINE void stream(const int rows, const int panels, const int is_bf16, const pass *t, int64_t begin, int64_t end,
                   const char *ahead, float_pair sum[MAX_PASS_ROWS][MAX_TILE_PANELS]) {
    for (int64_t offset = begin; offset < end; offset += 64) {
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) prefetch_panel(rows, ahead + p * t->panel_bytes + offset);
        multiply_line(rows, panels, is_bf16, t, offset, sum);
    }
}

/* Inlined for each (rows, panels), so that all sums are registers. */
INLINE void multiply(const int rows, const int panels, const int is_bf16, const int is_only, const pass *t) {
    float_pair sum[MAX_PASS_ROWS][MAX_TILE_PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) sum[r][p].low = sum[r][p].high = _mm256_setzero_ps();
    if (is_only) {
        const int64_t distance = LOOK_AHEAD(rows) / panels;
        const int64_t turn = t->panel_bytes > distance ? t->panel_bytes - distance : 0;
        stream(rows, panels, is_bf16, t, 0, turn, t->panels + distance, sum);
        stream(rows, panels, is_bf16, t, turn, t->panel_bytes, t->next - turn, sum);
    } else {
        for (int64_t offset = 0; offset < t->panel_bytes; offset += 64) {
            _mm_prefetch(t->next + (offset >> t->shift), _MM_HINT_T1);
            multiply_line(rows, panels, is_bf16, t, offset, sum);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            _mm256_store_ps(sums_of(t, r, p), sum[r][p].low);
            _mm256_store_ps(sums_of(t, r, p) + 8, sum[r][p].high);
        }
}

#define DEFINE(type, is_bf16, name, is_only, rows, panels)                                                   \
    static void type##_##name##_##rows##_##panels(const pass *t) {      \
        multiply(rows, panels, is_bf16, is_only, t);                                                    \
    }
#define DEFINE_ALL(t, b)                                                                                     \
    DEFINE(t, b, once, 1, 1, 1) DEFINE(t, b, once, 1, 2, 1) DEFINE(t, b, once, 1, 3, 1)                      \
    DEFINE(t, b, once, 1, 4, 1) DEFINE(t, b, once, 1, 5, 1) DEFINE(t, b, once, 1, 6, 1)                      \
    DEFINE(t, b, once, 1, 1, 2) DEFINE(t, b, once, 1, 2, 2) DEFINE(t, b, once, 1, 3, 2)                      \
    DEFINE(t, b, once, 1, 1, 4)                                                                              \
    DEFINE(t, b, again, 0, 3, 1) DEFINE(t, b, again, 0, 4, 1) DEFINE(t, b, again, 0, 5, 1)                   \
    DEFINE(t, b, again, 0, 6, 1)
#define ONCE(t)                                                                                              \
    {                                                                                                        \
        [1] = {NULL, t##_once_1_1, t##_once_2_1, t##_once_3_1, t##_once_4_1, t##_once_5_1, t##_once_6_1},    \
        [2] = {NULL, t##_once_1_2, t##_once_2_2, t##_once_3_2},                                              \
        [4] = {NULL, t##_once_1_4},                                                                          \
    }
#define AGAIN(t) {[3] = t##_again_3_1, [4] = t##_again_4_1, [5] = t##_again_5_1, [6] = t##_again_6_1}

DEFINE_ALL(f32, 0)
DEFINE_ALL(bf16, 1)

/* [is bfloat16][panels][rows] of the only pass, and [is bfloat16][rows] of one of several, which have at least 3. */
static multiply_fn *const MULTIPLY_ONCE[2][MAX_TILE_PANELS + 1][MAX_PASS_ROWS + 1] = {ONCE(f32), ONCE(bf16)};
static multiply_fn *const MULTIPLY_AGAIN[2][MAX_PASS_ROWS + 1] = {AGAIN(f32), AGAIN(bf16)};

static void multiply_pass(const pass *t) {
    const int is_bf16 = t->args->weight.dtype == BF16;
    (t->is_only ? MULTIPLY_ONCE[is_bf16][t->num_panels] : MULTIPLY_AGAIN[is_bf16])[t->num_rows](t);
}

/* Rows of bfloat16 as floats. */
static prepared_rows widen(const linear_args *args, const linear_tile *tile) {
    const int64_t width = ceil_div(args->weight.in, 2) * 2;
    float *out = scratch(tile->num_rows * width * 4);
    for (int64_t r = 0; r < tile->num_rows; r++) {
        const uint16_t *x = (const uint16_t *)args->x + (tile->first_row + r) * args->x_stride;
        float *to = out + r * width;
        int64_t k = 0;
        for (; k + 16 <= width; k += 16) {
            /* A zero below each number; the halves of a register are unpacked apart. */
            const __m256i zero = _mm256_setzero_si256(), all = _mm256_loadu_si256((const __m256i *)(x + k));
            const __m256i crossed = _mm256_permute4x64_epi64(all, _MM_SHUFFLE(3, 1, 2, 0));
            _mm256_storeu_si256((__m256i *)(to + k), _mm256_unpacklo_epi16(zero, crossed));
            _mm256_storeu_si256((__m256i *)(to + k + 8), _mm256_unpackhi_epi16(zero, crossed));
        }
        for (; k < width; k++) {
            const uint32_t wide = (uint32_t)x[k] << 16;
            memcpy(to + k, &wide, sizeof(wide));
        }
    }
    return (prepared_rows){out, width * 4};
}

void float_tile(const linear_args *args, const linear_tile *tile) {
    const float *x = (const float *)args->x + tile->first_row * args->x_stride;
    const prepared_rows rows =
        args->weight.dtype == BF16 ? widen(args, tile) : (prepared_rows){x, args->x_stride * 4};
    avx2_multiply(args, tile, rows, tile->num_rows == 1 ? 4 : tile->num_rows <= 3 ? 2 : 1, multiply_pass);
}

#endif
