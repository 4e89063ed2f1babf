/* y = x · Wᵀ with int4 weights in groups of 32 along `in` and int8 activations (ops.h), with AVX2; passes of one panel
 * as in linear_avx2.h.
 *
 * Nibbles go as they are into the instruction that multiplies unsigned by signed bytes and adds pairs of products in 16
 * bits. There two sums of 16 products each take all of an output's group: 16 · 15 · 127 = 30480 fit. One more
 * instruction adds both in 32 bits, and what undoes the weights' zero point makes them the group's exact sum. What
 * follows is as in linear_int4.c: float(sum) · the group's scale is added to a float, group after group, each operation
 * rounded; at the end that times the row's scale. These floats lie in memory: groups' sums take the registers.
 */
#include "linear_avx2.h"

#if !HAS_AVX512

#define FOURS 4 /* lines of nibbles in a group */
#define GROUP_LINES 5 /* it touches */
#define HALF_GROUP_LINES 3
#define GROUP_BYTES(has_zeros) ((has_zeros) ? INT4_ZEROS_GROUP_BYTES : INT4_GROUP_BYTES)

/* sum[r] += x[r] · nibbles, two products each. */
INLINE void add_products(const int rows, const int is_first, const int8_t *x, int64_t x_stride, int_pair nibbles,
                         int_pair sum[MAX_PASS_ROWS]) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m256i four = _mm256_set1_epi32(*(const int32_t *)(x + r * x_stride));
        const __m256i low = _mm256_maddubs_epi16(nibbles.low, four), high = _mm256_maddubs_epi16(nibbles.high, four);
        sum[r].low = is_first ? low : _mm256_add_epi16(sum[r].low, low);
        sum[r].high = is_first ? high : _mm256_add_epi16(sum[r].high, high);
        IN_THIS_ORDER(sum[r]);
    }
}

INLINE int_pair load_nibbles(const char *at, const int is_odd) {
    const __m256i low_bits = _mm256_set1_epi8(15);
    const __m256i low = _mm256_loadu_si256((const __m256i *)at), high = _mm256_loadu_si256((const __m256i *)at + 1);
    return (int_pair){
        _mm256_and_si256(is_odd ? _mm256_srli_epi16(low, 4) : low, low_bits),
        _mm256_and_si256(is_odd ? _mm256_srli_epi16(high, 4) : high, low_bits),
    };
}

/* to[8] += float(exact sums) · scales */
INLINE void add_scaled(float *to, __m256i sums, __m256i start, __m256 scales) {
    const __m256i exact = _mm256_add_epi32(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)), start);
    _mm256_store_ps(to, _mm256_add_ps(_mm256_load_ps(to), _mm256_mul_ps(_mm256_cvtepi32_ps(exact), scales)));
}

/* What undoes a group's own zero points: −zero · sum, from −8 · sum. */
INLINE int_pair start_from(const char *group, __m256i start) {
    const __m128i *zeros = (const __m128i *)(group + INT4_GROUP_BYTES);
    const __m256i sum = _mm256_srai_epi32(start, 3);
    return (int_pair){
        _mm256_mullo_epi32(sum, _mm256_cvtepu8_epi32(_mm_loadl_epi64(zeros))),
        _mm256_mullo_epi32(sum, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)((const char *)zeros + 8)))),
    };
}

/* The products of group g of the panel. */
INLINE void multiply_group(const int rows, const int has_zeros, const pass *t, const int32_t *starts, int64_t g) {
    const char *group = t->panels + g * GROUP_BYTES(has_zeros);
    const int8_t *x = (const int8_t *)t->x + g * INT4_GROUP;
    int_pair sum[MAX_PASS_ROWS];
#pragma GCC unroll 4
    for (int v = 0; v < FOURS; v++) {
        const char *at = group + v * 64;
        add_products(rows, v == 0, x + v * 8, t->x_stride, load_nibbles(at, 0), sum);
        LOAD_AGAIN(at);
        add_products(rows, 0, x + v * 8 + 4, t->x_stride, load_nibbles(at, 1), sum);
    }
    const __m128i *halves = (const __m128i *)(group + FOURS * 64);
    const float_pair scales = {_mm256_cvtph_ps(halves[0]), _mm256_cvtph_ps(halves[1])};
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const __m256i start = _mm256_set1_epi32(*(const int32_t *)((const char *)(starts + g) + r * t->x_stride));
        const int_pair begin = has_zeros ? start_from(group, start) : (int_pair){start, start};
        add_scaled(sums_of(t, r, 0), sum[r].low, begin.low, scales.low);
        add_scaled(sums_of(t, r, 0) + 8, sum[r].high, begin.high, scales.high);
    }
}

/* Groups [begin, end). `ahead` + the offset of a group, or its part, is where it prefetches. */
INLINE void multiply_groups(const int rows, const int is_only, const int has_zeros, const pass *t, int64_t begin,
                            int64_t end, const char *ahead) {
    const int32_t *starts = quantized_starts(t->x, t->args->weight.in) + 1;
    const int lines = is_only ? GROUP_LINES : HALF_GROUP_LINES;
    for (int64_t g = begin; g < end; g++) {
        const char *at = ahead + (g * GROUP_BYTES(has_zeros) >> (is_only ? 0 : t->shift));
#pragma GCC unroll 5
        for (int line = 0; line < lines; line++) {
            if (is_only)
                prefetch_panel(rows, at + line * 64);
            else
                _mm_prefetch(at + line * 64, _MM_HINT_T1);
        }
        multiply_group(rows, has_zeros, t, starts, g);
    }
}

/* Inlined for each number of rows, so that a group's sums are registers. */
INLINE void multiply(const int rows, const int is_only, const int has_zeros, const pass *t) {
    const int64_t bytes = GROUP_BYTES(has_zeros), num_groups = t->panel_bytes / bytes, distance = LOOK_AHEAD(rows) / bytes;
    const int64_t turn = num_groups > distance ? num_groups - distance : 0;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < LANES; i++) sums_of(t, r, 0)[i] = 0;
    if (is_only) {
        multiply_groups(rows, 1, has_zeros, t, 0, turn, t->panels + distance * bytes);
        multiply_groups(rows, 1, has_zeros, t, turn, num_groups, t->next - turn * bytes);
    } else {
        multiply_groups(rows, 0, has_zeros, t, 0, num_groups, t->next);
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < LANES; i++) sums_of(t, r, 0)[i] *= t->args->x_scales[t->first_row + r];
}

#define DEFINE(rows)                                                                                         \
    static void once_##rows(const pass *t) { multiply(rows, 1, 0, t); }                                      \
    static void again_##rows(const pass *t) { multiply(rows, 0, 0, t); }                                     \
    static void zeros_once_##rows(const pass *t) { multiply(rows, 1, 1, t); }                                \
    static void zeros_again_##rows(const pass *t) { multiply(rows, 0, 1, t); }
DEFINE(1)
DEFINE(2)
DEFINE(3)
DEFINE(4)
DEFINE(5)
DEFINE(6)

/* [has zero points][is the only pass][rows] */
static multiply_fn *const MULTIPLY[2][2][MAX_PASS_ROWS + 1] = {
    {
        {NULL, again_1, again_2, again_3, again_4, again_5, again_6},
        {NULL, once_1, once_2, once_3, once_4, once_5, once_6},
    },
    {
        {NULL, zeros_again_1, zeros_again_2, zeros_again_3, zeros_again_4, zeros_again_5, zeros_again_6},
        {NULL, zeros_once_1, zeros_once_2, zeros_once_3, zeros_once_4, zeros_once_5, zeros_once_6},
    },
};

static void multiply_pass(const pass *t) {
    MULTIPLY[t->args->weight.dtype == INT4_ZEROS][t->is_only][t->num_rows](t);
}

void int4_tile(const linear_args *args, const linear_tile *tile) {
    const int8_t *x = (const int8_t *)args->x + tile->first_row * args->x_stride;
    avx2_multiply(args, tile, (prepared_rows){x, args->x_stride}, 1, multiply_pass);
}

#endif
