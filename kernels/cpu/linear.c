/* y = x · Wᵀ: bfloat16 and float32 weights in panels of 16 outputs (ops.h), any number of rows.
 *
 * An accumulator register holds 16 outputs of one row and is summed along `in` from first to last by one instruction
 * a pair (bfloat16) or number (float32): that order is the same for any number of rows, tiles and threads.
 *
 * A tile is some neighbouring panels, contiguous in memory, times a block of rows. Rows are taken MAX_ROWS at a time
 * (a pass), so that MAX_ROWS × 2 accumulators stay in registers; later passes read the panels from the cache.
 *
 * - Few rows (one pass): memory is the limit. Panels are prefetched LOOK_AHEAD, beyond the tile's end from the tile that
 *   this thread will probably take next.
 * - Many rows: the dot products are. The first two passes prefetch the next tile's panels, so memory is read while the
 *   units that multiply are busy.
 */
#include "linear.h"

#include <immintrin.h>

#define MAX_ROWS 12
/* Up to here four panels at a time, for enough independent sums. */
#define FEW_ROWS 4
/* Rows of a tile: more would make the last tile of an op last longer than the others wait for. */
#define ROW_BLOCK 192
/* Blocks of rows that the last tiles are cut into, each of at least MAX_ROWS rows. */
#define FINE_BLOCKS 4
/* Bytes ahead, of all panels at a time together, and into L2: prefetches into L1 would keep its few fill buffers busy
 * until memory answers. On Zen 4 with two threads (8 layers of a 0.5B model, bfloat16) 2 / 4 / 8 / 12 rows took 0.5 /
 * 0.8 / 0.8 / 0.97 times as long as with prefetches of 2048 bytes a panel into L1. */
#define LOOK_AHEAD 8192
/* Bytes that a waiting thread brings for its first tiles: most of a 1 MiB L2 is left for what is being computed. */
#define PREFETCH_BYTES (256 * 1024)
#define LINES_A_CALL 8
/* A tile of few rows is at most this long, so that the last one of an op is short. */
#define STREAM_BYTES (128 * 1024)

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

static void float_tile(const linear_args *args, const linear_tile *tile) {
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
            linear_finish(args, tile->first_row + row, rows, tile->first_panel + panel, panels, sums);
            row += rows;
        }
        panel += panels;
    }
}

int64_t panel_bytes(const weight *weight) {
    switch (weight->dtype) {
        case F32: return weight->in * 64;
        case BF16: return ceil_div(weight->in, 2) * 64;
        case INT8: return ceil_div(weight->in, 4) * 64;
        default: return ceil_div(weight->in, INT4_GROUP) * INT4_GROUP_BYTES;
    }
}

/* How an op is cut: panels into groups, each times all rows in some blocks: tiles of the first group, then of the next.
 * The last groups, about one a thread, are cut into more blocks of rows, so that threads end together. */
typedef struct cut {
    int64_t num_panels, panels; /* in all, of a group */
    int64_t num_rows, num_row_blocks;
    int64_t num_groups, first_fine, num_fine_blocks; /* groups from first_fine on have so many blocks */
} cut;

static cut cut_op(const linear_args *args, const step *step, int num_threads) {
    const int64_t rows = step->num_rows;
    const int64_t row_blocks = ceil_div(rows, ROW_BLOCK), fine_blocks = rows < MAX_ROWS ? 1 : rows / MAX_ROWS;
    const int is_short = rows <= FEW_ROWS && 4 * panel_bytes(&args->weight) <= STREAM_BYTES;
    cut cut = {
        .num_panels = ceil_div(args->weight.out, LANES),
        .panels = is_short ? 4 : 2,
        .num_rows = rows,
        .num_row_blocks = row_blocks,
        .num_fine_blocks = fine_blocks < FINE_BLOCKS * row_blocks ? fine_blocks : FINE_BLOCKS * row_blocks,
    };
    cut.num_groups = ceil_div(cut.num_panels, cut.panels);
    cut.first_fine = cut.num_groups;
    if (num_threads > 1 && cut.num_fine_blocks > row_blocks)
        cut.first_fine = cut.num_groups > num_threads ? cut.num_groups - num_threads : 0;
    return cut;
}

static int64_t num_tiles_of(const cut *cut) {
    return cut->first_fine * cut->num_row_blocks + (cut->num_groups - cut->first_fine) * cut->num_fine_blocks;
}

/* The group of a tile; its block of rows and how many there are. */
static int64_t group_of(const cut *cut, int64_t tile, int64_t *block, int64_t *num_blocks) {
    const int64_t coarse = cut->first_fine * cut->num_row_blocks;
    const int is_fine = tile >= coarse;
    *num_blocks = is_fine ? cut->num_fine_blocks : cut->num_row_blocks;
    if (is_fine) tile -= coarse;
    *block = tile % *num_blocks;
    return tile / *num_blocks + (is_fine ? cut->first_fine : 0);
}

static int64_t num_tiles(const void *untyped, const step *step, int num_threads) {
    const cut cut = cut_op(untyped, step, num_threads);
    return cut.num_rows ? num_tiles_of(&cut) : 0;
}

static void run_tile(const void *untyped, const step *step, int64_t index, int thread, int num_threads) {
    const linear_args *args = untyped;
    const cut cut = cut_op(args, step, num_threads);
    int64_t block, num_blocks, next_block, next_blocks;
    const int64_t bytes = panel_bytes(&args->weight);
    const int64_t panel = group_of(&cut, index, &block, &num_blocks) * cut.panels;
    const int64_t next = group_of(&cut, index + num_threads, &next_block, &next_blocks) * cut.panels;
    const int64_t row = cut.num_rows * block / num_blocks;
    const char *panels = args->weight.panels;
    const linear_tile tile = {
        .panels = panels + panel * bytes,
        .next = panels + (next + cut.panels <= cut.num_panels ? next : panel) * bytes,
        .first_panel = panel,
        .num_panels = cut.num_panels - panel < cut.panels ? cut.num_panels - panel : cut.panels,
        .first_row = row,
        .num_rows = cut.num_rows * (block + 1) / num_blocks - row,
    };
    switch (args->weight.dtype) {
        case INT8: int8_tile(args, &tile); break;
        case INT4: int4_tile(args, &tile); break;
        default: float_tile(args, &tile);
    }
}

static int64_t prefetch(const void *untyped, const step *step, int thread, int num_threads, int64_t cursor) {
    const linear_args *args = untyped;
    const cut cut = cut_op(args, step, num_threads);
    const int64_t tile_bytes = cut.panels * panel_bytes(&args->weight);
    const int64_t all = cut.num_panels / cut.panels * tile_bytes;
    if (cut.num_row_blocks != 1 || cursor >= PREFETCH_BYTES) return -1;
    for (int i = 0; i < LINES_A_CALL; i++, cursor += 64) {
        const int64_t offset = (cursor / tile_bytes * num_threads + thread) * tile_bytes + cursor % tile_bytes;
        if (offset >= all) return -1;
        _mm_prefetch((const char *)args->weight.panels + offset, _MM_HINT_T1);
    }
    return cursor;
}

const op_class linear_class = {num_tiles, run_tile, prefetch};
