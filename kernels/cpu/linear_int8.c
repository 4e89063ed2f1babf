/* y = x · Wᵀ with int8 weights and activations (W8A8), any number of rows.
 *
 * One instruction multiplies four unsigned by four signed bytes and adds the products to 32 bits, for 16 outputs. The
 * weights are the unsigned operand; sums start from what undoes their zero point (ops.h). They are exact, so their
 * order is free. What follows is not: float(sum) · weight scale · x scale, then bias and epilogue (linear_finish).
 *
 * - One pass (few rows): memory is the limit, so panels are prefetched LOOK_AHEAD, as in linear.c.
 * - Many: the multiplications are. 12 rows × 2 panels of sums stay in registers while a pass reads both panels; the
 *   next pass finds them in the cache. Meanwhile the next tile's panels are prefetched, a line a step.
 */
#include "linear.h"

#if HAS_AVX512
#include <immintrin.h>

#define MAX_ROWS 12
/* Bytes ahead, of all panels at a time together, into L2 as in linear.c. */
#define LOOK_AHEAD 8192

typedef struct pass {
    const char *panels;
    const char *next; /* panels to prefetch */
    int64_t panel_bytes;
    const int8_t *x;
    int64_t x_stride;
    const float *x_scales;
    const float *scales;    /* of the panels' outputs */
    const int32_t *starts;  /* of the first row; the others' lie x_stride bytes apart */
} pass;

/* One range of k-steps: sum[r][p] += x[r] · panel p. `ahead` + the offset of a step is what it prefetches. */
static inline __attribute__((always_inline)) void accumulate(const int rows, const int panels, const int is_streaming,
                                                             const pass *t, int64_t begin, int64_t end,
                                                             const char *ahead,
                                                             __m512i sum[MAX_ROWS][MAX_TILE_PANELS]) {
    for (int64_t offset = begin; offset < end; offset += 64) {
        __m512i weight[MAX_TILE_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            if (is_streaming) _mm_prefetch(ahead + p * t->panel_bytes + offset, _MM_HINT_T1);
            weight[p] = _mm512_load_si512(t->panels + p * t->panel_bytes + offset);
        }
        if (!is_streaming) _mm_prefetch(ahead + offset, _MM_HINT_T1);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const __m512i four = _mm512_set1_epi32(*(const int32_t *)(t->x + r * t->x_stride + offset / LANES));
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], weight[p], four);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) __asm__("" : "+v"(sum[r][p]));
}

/* y[rows][panels] = x · panels, scaled. Inlined for each (rows, panels), so that all sums are registers. */
static inline __attribute__((always_inline)) void multiply(const int rows, const int panels, const int is_streaming,
                                                           const pass *t, float y[][MAX_TILE_PANELS][LANES]) {
    __m512i sum[MAX_ROWS][MAX_TILE_PANELS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            sum[r][p] = _mm512_set1_epi32(*(const int32_t *)((const char *)t->starts + r * t->x_stride));
    if (is_streaming) {
        const int64_t distance = LOOK_AHEAD / panels;
        const int64_t turn = t->panel_bytes > distance ? t->panel_bytes - distance : 0;
        accumulate(rows, panels, 1, t, 0, turn, t->panels + distance, sum);
        accumulate(rows, panels, 1, t, turn, t->panel_bytes, t->next - turn, sum);
    } else {
        accumulate(rows, panels, 0, t, 0, t->panel_bytes, t->next, sum);
    }
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) {
        const __m512 scale = _mm512_loadu_ps(t->scales + p * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const __m512 exact = _mm512_cvtepi32_ps(sum[r][p]);
            _mm512_store_ps(y[r][p], _mm512_mul_ps(_mm512_mul_ps(exact, scale), _mm512_set1_ps(t->x_scales[r])));
        }
    }
}

typedef void multiply_fn(const pass *t, float y[][MAX_TILE_PANELS][LANES]);

#define DEFINE(name, is_streaming, rows, panels)                                                              \
    static void name##_##rows##_##panels(const pass *t, float y[][MAX_TILE_PANELS][LANES]) {                 \
        multiply(rows, panels, is_streaming, t, y);                                                           \
    }
#define DEFINE_1_TO_4(p)                                                                                      \
    DEFINE(stream, 1, 1, p) DEFINE(stream, 1, 2, p) DEFINE(stream, 1, 3, p) DEFINE(stream, 1, 4, p)
#define DEFINE_6_TO_12(name, s, p)                                                                            \
    DEFINE(name, s, 6, p) DEFINE(name, s, 7, p) DEFINE(name, s, 8, p) DEFINE(name, s, 9, p)                   \
    DEFINE(name, s, 10, p) DEFINE(name, s, 11, p) DEFINE(name, s, 12, p)
#define SELECT_1_TO_4(p) [1] = stream_1_##p, [2] = stream_2_##p, [3] = stream_3_##p, [4] = stream_4_##p
#define SELECT_6_TO_12(name, p)                                                                               \
    [6] = name##_6_##p, [7] = name##_7_##p, [8] = name##_8_##p, [9] = name##_9_##p, [10] = name##_10_##p,     \
    [11] = name##_11_##p, [12] = name##_12_##p

DEFINE_1_TO_4(1)
DEFINE_1_TO_4(2)
DEFINE_1_TO_4(4)
DEFINE(stream, 1, 5, 1)
DEFINE(stream, 1, 5, 2)
DEFINE_6_TO_12(stream, 1, 1)
DEFINE_6_TO_12(stream, 1, 2)
DEFINE_6_TO_12(again, 0, 1)
DEFINE_6_TO_12(again, 0, 2)

/* [panels][rows] of one pass, and of several: these have at least MAX_ROWS / 2 rows each. */
static multiply_fn *const MULTIPLY_ONCE[MAX_TILE_PANELS + 1][MAX_ROWS + 1] = {
    [1] = {SELECT_1_TO_4(1), [5] = stream_5_1, SELECT_6_TO_12(stream, 1)},
    [2] = {SELECT_1_TO_4(2), [5] = stream_5_2, SELECT_6_TO_12(stream, 2)},
    [4] = {SELECT_1_TO_4(4)},
};
static multiply_fn *const MULTIPLY_AGAIN[3][MAX_ROWS + 1] = {
    [1] = {SELECT_6_TO_12(again, 1)},
    [2] = {SELECT_6_TO_12(again, 2)},
};

void int8_tile(const linear_args *args, const linear_tile *tile) {
    _Alignas(64) float y[MAX_ROWS][MAX_TILE_PANELS][LANES];
    const weight *w = &args->weight;
    const int64_t bytes = panel_bytes(w), num_passes = ceil_div(tile->num_rows, MAX_ROWS);
    for (int64_t panel = 0; panel < tile->num_panels;) {
        const int64_t left = tile->num_panels - panel, first_panel = tile->first_panel + panel;
        const int64_t panels = left >= 4 && tile->num_rows <= FEW_ROWS ? 4 : left >= 2 ? 2 : 1;
        for (int64_t i = 0, done = 0; i < num_passes; i++) {
            const int64_t rows = tile->num_rows * (i + 1) / num_passes - done, row = tile->first_row + done;
            const int8_t *x = (const int8_t *)args->x + row * args->x_stride;
            const pass pass = {
                .panels = tile->panels + panel * bytes,
                .next = tile->next + (panel + (num_passes > 1 && i < panels ? i : 0)) * bytes,
                .panel_bytes = bytes,
                .x = x,
                .x_stride = args->x_stride,
                .starts = quantized_starts(x, w->in),
                .x_scales = args->x_scales + row,
                .scales = w->scales + first_panel * LANES,
            };
            linear_prefetch_outputs(args, row, rows, first_panel, panels);
            (num_passes == 1 ? MULTIPLY_ONCE : MULTIPLY_AGAIN)[panels][rows](&pass, y);
            linear_finish(args, row, rows, first_panel, panels, (sums){y[0][0], MAX_TILE_PANELS * LANES, LANES});
            done += rows;
        }
        panel += panels;
    }
}

#endif
