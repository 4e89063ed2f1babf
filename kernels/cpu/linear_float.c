/* y = x · Wᵀ with bfloat16 and float32 weights in panels of 16 outputs (ops.h), any number of rows.
 *
 * An accumulator register holds 16 outputs of one row and is summed along `in` from first to last by one instruction
 * a pair (bfloat16) or number (float32): that order is the same for any number of rows, tiles and threads.
 *
 * Rows of a tile (linear.c) are taken MAX_ROWS at a time (a pass), so that MAX_ROWS × 2 accumulators stay in registers;
 * later passes read the panels from the cache.
 *
 * - Few rows (one pass): memory is the limit. Panels are prefetched LOOK_AHEAD, beyond the tile's end from the tile that
 *   this thread will probably take next.
 * - Many rows: the dot products are. The first two passes prefetch the next tile's panels, so memory is read while the
 *   units that multiply are busy.
 */
#include "linear.h"

#if HAS_AVX512
#include <immintrin.h>

#define MAX_ROWS 12
/* Bytes ahead, of all panels at a time together, and into L2: prefetches into L1 would keep its few fill buffers busy
 * until memory answers. On Zen 4 with two threads (8 layers of a 0.5B model, bfloat16) 2 / 4 / 8 / 12 rows took 0.5 /
 * 0.8 / 0.8 / 0.97 times as long as with prefetches of 2048 bytes a panel into L1. */
#define LOOK_AHEAD 8192

typedef struct pass {
    const char *panels;
    const char *next; /* panels to prefetch */
    const char *x;
    int64_t x_bytes;     /* a row */
    int64_t panel_bytes; /* a multiple of 64 */
    int is_streaming;    /* one pass only: prefetch the panels themselves, then `next` */
} pass;

static inline __attribute__((always_inline)) __m512 dot(int is_bf16, __m512 sum, __m512i w, const char *x) {
    if (is_bf16) return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(*(const int32_t *)x));
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_set1_ps(*(const float *)x), sum);
}

/* One range of k-steps: sum[r][p] += x[r] · panel p. `ahead` + the offset of a step is what it prefetches. */
static inline __attribute__((always_inline)) void accumulate(const int rows, const int panels, const int is_bf16,
                                                             const int is_streaming, const pass *t, int64_t begin,
                                                             int64_t end, const char *ahead,
                                                             __m512 sum[MAX_ROWS][MAX_TILE_PANELS]) {
    for (int64_t offset = begin; offset < end; offset += 64) {
        __m512i weight[MAX_TILE_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            if (is_streaming) _mm_prefetch(ahead + p * t->panel_bytes + offset, _MM_HINT_T1);
            weight[p] = _mm512_load_si512(t->panels + p * t->panel_bytes + offset);
        }
        if (!is_streaming) _mm_prefetch(ahead + offset, _MM_HINT_T1);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                sum[r][p] = dot(is_bf16, sum[r][p], weight[p], t->x + r * t->x_bytes + offset / LANES);
    }
}

/* sums[rows][panels] = x · panels. Inlined for each (rows, panels), so that all sums are registers. */
static inline __attribute__((always_inline)) void multiply(const int rows, const int panels, const int is_bf16,
                                                           const pass *t, float sums[][MAX_TILE_PANELS][LANES]) {
    __m512 sum[MAX_ROWS][MAX_TILE_PANELS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) sum[r][p] = _mm512_setzero_ps();
    if (t->is_streaming) {
        const int64_t distance = LOOK_AHEAD / panels;
        const int64_t turn = t->panel_bytes > distance ? t->panel_bytes - distance : 0;
        accumulate(rows, panels, is_bf16, 1, t, 0, turn, t->panels + distance, sum);
        accumulate(rows, panels, is_bf16, 1, t, turn, t->panel_bytes, t->next - turn, sum);
    } else {
        accumulate(rows, panels, is_bf16, 0, t, 0, t->panel_bytes, t->next, sum);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) _mm512_store_ps(sums[r][p], sum[r][p]);
}

typedef void multiply_fn(const pass *t, float sums[][MAX_TILE_PANELS][LANES]);

#define DEFINE(type, is_bf16, rows, panels)                                                                  \
    static void type##_##rows##_##panels(const pass *t, float sums[][MAX_TILE_PANELS][LANES]) {             \
        multiply(rows, panels, is_bf16, t, sums);                                                            \
    }
#define DEFINE_FEW(type, b, p) DEFINE(type, b, 1, p) DEFINE(type, b, 2, p) DEFINE(type, b, 3, p) DEFINE(type, b, 4, p)
#define DEFINE_ALL(type, b, p)                                                                               \
    DEFINE_FEW(type, b, p) DEFINE(type, b, 5, p) DEFINE(type, b, 6, p) DEFINE(type, b, 7, p)                 \
    DEFINE(type, b, 8, p) DEFINE(type, b, 9, p) DEFINE(type, b, 10, p) DEFINE(type, b, 11, p)                \
    DEFINE(type, b, 12, p)
#define FEW(type, p) [1] = type##_1_##p, [2] = type##_2_##p, [3] = type##_3_##p, [4] = type##_4_##p
#define ALL(type, p)                                                                                         \
    FEW(type, p), [5] = type##_5_##p, [6] = type##_6_##p, [7] = type##_7_##p, [8] = type##_8_##p,            \
        [9] = type##_9_##p, [10] = type##_10_##p, [11] = type##_11_##p, [12] = type##_12_##p

DEFINE_ALL(bf16, 1, 1)
DEFINE_ALL(bf16, 1, 2)
DEFINE_FEW(bf16, 1, 4)
DEFINE_ALL(f32, 0, 1)
DEFINE_ALL(f32, 0, 2)
DEFINE_FEW(f32, 0, 4)

/* [is bfloat16][panels][rows] */
static multiply_fn *const MULTIPLY[2][MAX_TILE_PANELS + 1][MAX_ROWS + 1] = {
    {[1] = {ALL(f32, 1)}, [2] = {ALL(f32, 2)}, [4] = {FEW(f32, 4)}},
    {[1] = {ALL(bf16, 1)}, [2] = {ALL(bf16, 2)}, [4] = {FEW(bf16, 4)}},
};

void float_tile(const linear_args *args, const linear_tile *tile) {
    _Alignas(64) float sums[MAX_ROWS][MAX_TILE_PANELS][LANES];
    const int is_bf16 = args->weight.dtype == BF16;
    const int64_t x_bytes = args->x_stride * (is_bf16 ? 2 : 4), bytes = panel_bytes(&args->weight);
    const int64_t num_passes = ceil_div(tile->num_rows, MAX_ROWS);
    const char *x = (const char *)args->x + tile->first_row * x_bytes;
    for (int64_t panel = 0; panel < tile->num_panels;) {
        const int64_t left = tile->num_panels - panel;
        const int64_t panels = left >= 4 && tile->num_rows <= FEW_ROWS ? 4 : left >= 2 ? 2 : 1;
        for (int64_t i = 0, row = 0; i < num_passes; i++) {
            const int64_t rows = (tile->num_rows * (i + 1)) / num_passes - row;
            const pass pass = {
                .panels = tile->panels + panel * bytes,
                .next = tile->next + (panel + (num_passes > 1 && i < panels ? i : 0)) * bytes,
                .x = x + row * x_bytes,
                .x_bytes = x_bytes,
                .panel_bytes = bytes,
                .is_streaming = num_passes == 1,
            };
            linear_prefetch_outputs(args, tile->first_row + row, rows, tile->first_panel + panel, panels);
            MULTIPLY[is_bf16][panels][rows](&pass, sums);
            linear_finish(args, tile->first_row + row, rows, tile->first_panel + panel, panels,
                          (struct sums){sums[0][0], MAX_TILE_PANELS * LANES, LANES});
            row += rows;
        }
        panel += panels;
    }
}

#endif
