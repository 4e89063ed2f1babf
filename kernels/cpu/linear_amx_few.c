/* y = x · Wᵀ for few rows of bfloat16 where more rows run on AMX tiles (linear_amx.c): the same bits, in vectors.
 *
 * A tile's product adds up 16 even and 16 odd products of an output apart, each by one rounding a product, denormals
 * taken as zero, then both to each other and that to the sum (Intel's Software Developer's Manual, TDPBF16PS). With the
 * pairs of bfloat16 taken apart these are multiply-adds of floats, in the same order. For a few rows there are units
 * enough for that, and loads of single lines wait for memory better than loads of tiles: a decode step of a 0.5B model
 * (one row, two threads, Xeon) took 35.4 ms in place of 38.5.
 */
#include "linear.h"

#if HAS_AMX

/* What one product of tiles takes of a panel. */
#define STEP_BYTES (TILE_ROWS * TILE_ROW_BYTES)
/* Bytes ahead, of all panels at a time together, and into L2, as in linear_float.c. */
#define LOOK_AHEAD 8192
/* In MXCSR: take denormals as zero, and flush results that are. */
#define NO_DENORMALS 0x8040

typedef struct pass {
    const char *panels;
    const char *next; /* panels to prefetch */
    const float *x;   /* rows of `width` floats */
    int64_t width, panel_bytes;
} pass;

/* One range of steps: sum[r][p] += x[r] · panel p. `ahead` + the offset of a step is what it prefetches. */
static inline __attribute__((always_inline)) void accumulate(const int rows, const int panels, const pass *t,
                                                             int64_t begin, int64_t end, const char *ahead,
                                                             __m512 sum[FEW_ROWS][MAX_TILE_PANELS]) {
    const __m512i high = _mm512_set1_epi32((int)0xFFFF0000);
    for (int64_t offset = begin; offset < end; offset += STEP_BYTES) {
        __m512 even[FEW_ROWS][MAX_TILE_PANELS], odd[FEW_ROWS][MAX_TILE_PANELS];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) even[r][p] = odd[r][p] = _mm512_setzero_ps();
        for (int64_t at = offset; at < offset + STEP_BYTES; at += 64) {
            const float *x = t->x + at / 32;
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                _mm_prefetch(ahead + p * t->panel_bytes + at, _MM_HINT_T1);
                const __m512i pair = _mm512_load_si512(t->panels + p * t->panel_bytes + at);
                const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
                const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(pair, high));
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    even[r][p] = _mm512_fmadd_ps(first, _mm512_set1_ps(x[r * t->width]), even[r][p]);
                    odd[r][p] = _mm512_fmadd_ps(second, _mm512_set1_ps(x[r * t->width + 1]), odd[r][p]);
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                sum[r][p] = _mm512_add_ps(sum[r][p], _mm512_add_ps(even[r][p], odd[r][p]));
    }
}

/* out[rows][panels] = x · panels. Inlined for each (rows, panels), so that all sums are registers. */
static inline __attribute__((always_inline)) void multiply(const int rows, const int panels, const pass *t,
                                                           float out[][MAX_TILE_PANELS][LANES]) {
    __m512 sum[FEW_ROWS][MAX_TILE_PANELS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) sum[r][p] = _mm512_setzero_ps();
    const int64_t distance = LOOK_AHEAD / panels, turn = t->panel_bytes > distance ? t->panel_bytes - distance : 0;
    accumulate(rows, panels, t, 0, turn, t->panels + distance, sum);
    accumulate(rows, panels, t, turn, t->panel_bytes, t->next - turn, sum);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) _mm512_store_ps(out[r][p], sum[r][p]);
}

#define DEFINE(rows, panels)                                                                                  \
    static void multiply_##rows##_##panels(const pass *t, float out[][MAX_TILE_PANELS][LANES]) {             \
        multiply(rows, panels, t, out);                                                                       \
    }
DEFINE(1, 1) DEFINE(2, 1) DEFINE(3, 1) DEFINE(4, 1)
DEFINE(1, 2) DEFINE(2, 2) DEFINE(3, 2) DEFINE(4, 2)
DEFINE(1, 4) DEFINE(2, 4)

/* [rows − 1][panels]; three rows and more of four panels don't fit into registers. */
static void (*const MULTIPLY[FEW_ROWS][MAX_TILE_PANELS + 1])(const pass *t, float out[][MAX_TILE_PANELS][LANES]) = {
    {NULL, multiply_1_1, multiply_1_2, NULL, multiply_1_4},
    {NULL, multiply_2_1, multiply_2_2, NULL, multiply_2_4},
    {NULL, multiply_3_1, multiply_3_2},
    {NULL, multiply_4_1, multiply_4_2},
};

/* The tile's rows of x as floats. */
static const float *widen(const linear_args *args, const linear_tile *tile) {
    const int64_t width = args->weight.in;
    float *out = scratch(tile->num_rows * width * 4);
    for (int64_t r = 0; r < tile->num_rows; r++) {
        const uint16_t *x = (const uint16_t *)args->x + (tile->first_row + r) * args->x_stride;
        for (int64_t k = 0; k < width; k += LANES) {
            const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + k)));
            _mm512_store_ps(out + r * width + k, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
        }
    }
    return out;
}

void amx_few_tile(const linear_args *args, const linear_tile *tile) {
    _Alignas(64) float out[FEW_ROWS][MAX_TILE_PANELS][LANES];
    const int64_t bytes = panel_bytes(&args->weight);
    const float *x = widen(args, tile);
    for (int64_t panel = 0, panels; panel < tile->num_panels; panel += panels) {
        const int64_t left = tile->num_panels - panel;
        panels = left >= 4 && tile->num_rows <= 2 ? 4 : left >= 2 ? 2 : 1;
        const pass pass = {
            .panels = tile->panels + panel * bytes,
            .next = left > panels ? tile->panels + (panel + panels) * bytes : tile->next,
            .x = x,
            .width = args->weight.in,
            .panel_bytes = bytes,
        };
        linear_prefetch_outputs(args, tile->first_row, tile->num_rows, tile->first_panel + panel, panels);
        const unsigned int control = _mm_getcsr();
        _mm_setcsr(control | NO_DENORMALS);
        MULTIPLY[tile->num_rows - 1][panels](&pass, out);
        _mm_setcsr(control);
        linear_finish(args, tile->first_row, tile->num_rows, tile->first_panel + panel, panels,
                      (sums){out[0][0], MAX_TILE_PANELS * LANES, LANES});
    }
}

#endif
