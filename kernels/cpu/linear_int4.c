/* y = x · Wᵀ with int4 weights in groups of 32 along `in` and int8 activations (ops.h), any number of rows.
 *
 * A group's products are added up exactly in 32 bits, from what undoes the weights' zero points (8, or of their own for
 * each output); then float(sum) · the
 * group's scale is added to a float, group after group, each operation rounded; at the end that times the row's scale.
 *
 * Nibbles go as they are into the instruction that multiplies unsigned by signed bytes. One panel at a time is
 * multiplied by up to 12 rows (a pass): 24 registers hold their exact sums and their floats. Further passes take the
 * nibbles apart again, which costs a tenth of the multiplications; bytes kept instead cost as much to write and to
 * read (64 rows took as long, 8 rows longer).
 */
#include "linear.h"

#if HAS_AVX512
#include <immintrin.h>

#define MAX_ROWS 12
/* Panels to finish together: gate and up. */
#define PAIR 2
#define FOURS 4 /* vectors of nibbles in a group */
/* Bytes read ahead: a tile's panels lie one after another, then come the next tile's. With one thread on Zen 4,
 * 1 / 2 / 4 rows and in = 896, this took 0.8 / 0.7 / 0.85 times as long as 4096 and 16384. */
#define DISTANCE 8192
#define LINES 5 /* a group touches */

typedef struct pass {
    const char *panel;
    const char *ahead; /* what to prefetch, up to group `turn` and after; NULL: it was read before */
    const char *ahead_after;
    int64_t turn;
    int64_t num_groups;
    const int8_t *x;
    int64_t x_stride;
    const int32_t *starts; /* of the first row's groups; the other rows' lie x_stride bytes apart */
    const float *x_scales;
} pass;

/* y[rows] = x · one panel. Inlined for each number of rows, so that all sums are registers. */
static inline __attribute__((always_inline)) void multiply(const int rows, const int has_zeros, const pass *t,
                                                           float y[][MAX_TILE_PANELS][LANES]) {
    const int64_t group_bytes = has_zeros ? INT4_ZEROS_GROUP_BYTES : INT4_GROUP_BYTES;
    const __m512i low_bits = _mm512_set1_epi8(15);
    __m512 sum[MAX_ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) sum[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < t->num_groups; g++) {
        const char *group = t->panel + g * group_bytes;
        const char *x = (const char *)t->x + g * INT4_GROUP, *starts = (const char *)(t->starts + g);
        const char *ahead = g < t->turn ? t->ahead : t->ahead_after;
        if (ahead)
#pragma GCC unroll 5
            for (int line = 0; line < LINES; line++)
                _mm_prefetch(ahead + g * group_bytes + line * 64, _MM_HINT_T1);
        __m512i exact[MAX_ROWS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) exact[r] = _mm512_set1_epi32(*(const int32_t *)(starts + r * t->x_stride));
        if (has_zeros) { /* −8 · sum to −zero · sum */
            const __m512i zeros = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(group + INT4_GROUP_BYTES)));
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) exact[r] = _mm512_mullo_epi32(_mm512_srai_epi32(exact[r], 3), zeros);
        }
#pragma GCC unroll 4
        for (int v = 0; v < FOURS; v++) {
            const __m512i both = _mm512_loadu_si512(group + v * 64);
            const __m512i even = _mm512_and_si512(both, low_bits);
            const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const int32_t *fours = (const int32_t *)(x + r * t->x_stride + v * 8);
                exact[r] = _mm512_dpbusd_epi32(exact[r], even, _mm512_set1_epi32(fours[0]));
                exact[r] = _mm512_dpbusd_epi32(exact[r], odd, _mm512_set1_epi32(fours[1]));
            }
        }
        const __m512 scales = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(group + FOURS * 64)));
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
            sum[r] = _mm512_add_ps(sum[r], _mm512_mul_ps(_mm512_cvtepi32_ps(exact[r]), scales));
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) _mm512_store_ps(y[r][0], _mm512_mul_ps(sum[r], _mm512_set1_ps(t->x_scales[r])));
}

typedef void multiply_fn(const pass *t, float y[][MAX_TILE_PANELS][LANES]);

#define DEFINE(rows)                                                                                          \
    static void multiply_##rows(const pass *t, float y[][MAX_TILE_PANELS][LANES]) { multiply(rows, 0, t, y); } \
    static void zeros_##rows(const pass *t, float y[][MAX_TILE_PANELS][LANES]) { multiply(rows, 1, t, y); }
DEFINE(1) DEFINE(2) DEFINE(3) DEFINE(4) DEFINE(5) DEFINE(6)
DEFINE(7) DEFINE(8) DEFINE(9) DEFINE(10) DEFINE(11) DEFINE(12)

/* [has zero points][rows] */
static multiply_fn *const MULTIPLY[2][MAX_ROWS + 1] = {
    {NULL, multiply_1, multiply_2, multiply_3, multiply_4, multiply_5, multiply_6, multiply_7, multiply_8, multiply_9,
     multiply_10, multiply_11, multiply_12},
    {NULL, zeros_1, zeros_2, zeros_3, zeros_4, zeros_5, zeros_6, zeros_7, zeros_8, zeros_9, zeros_10, zeros_11,
     zeros_12},
};

/* What the first pass over a panel at `offset` in its tile prefetches. */
static void look_ahead(pass *t, const linear_tile *tile, int64_t offset, int64_t bytes) {
    const int64_t group_bytes = bytes / t->num_groups;
    const int64_t left = tile->num_panels * bytes - offset - DISTANCE; /* until the next tile's turn */
    t->ahead = tile->panels + offset + DISTANCE;
    t->ahead_after = tile->next - left;
    t->turn = left < 0 ? 0 : left / group_bytes;
}

/* A pass of rows [row, row + rows) over panels [panel, panel + count) of the tile. */
static void multiply_panels(const linear_args *args, const linear_tile *tile, int64_t panel, int64_t count, int64_t row,
                            int64_t rows) {
    _Alignas(64) float y[MAX_ROWS][MAX_TILE_PANELS][LANES];
    const int64_t bytes = panel_bytes(&args->weight);
    const int8_t *x = (const int8_t *)args->x + row * args->x_stride;
    linear_prefetch_outputs(args, row, rows, tile->first_panel + panel, count);
    for (int64_t p = 0; p < count; p++) {
        pass pass = {
            .panel = tile->panels + (panel + p) * bytes,
            .num_groups = ceil_div(args->weight.in, INT4_GROUP),
            .x = x,
            .x_stride = args->x_stride,
            .starts = quantized_starts(x, args->weight.in) + 1,
            .x_scales = args->x_scales + row,
        };
        if (row == tile->first_row) look_ahead(&pass, tile, (panel + p) * bytes, bytes);
        MULTIPLY[args->weight.dtype == INT4_ZEROS][rows](&pass, (float(*)[MAX_TILE_PANELS][LANES])y[0][p]);
    }
    linear_finish(args, row, rows, tile->first_panel + panel, count, (sums){y[0][0], MAX_TILE_PANELS * LANES, LANES});
}

void int4_tile(const linear_args *args, const linear_tile *tile) {
    const int64_t num_passes = ceil_div(tile->num_rows, MAX_ROWS);
    for (int64_t panel = 0; panel < tile->num_panels; panel += PAIR) {
        const int64_t left = tile->num_panels - panel, count = left < PAIR ? left : PAIR;
        for (int64_t i = 0, done = 0; i < num_passes; i++) {
            const int64_t rows = tile->num_rows * (i + 1) / num_passes - done;
            multiply_panels(args, tile, panel, count, tile->first_row + done, rows);
            done += rows;
        }
    }
}

#endif
