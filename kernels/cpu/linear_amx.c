/* y = x · Wᵀ on AMX tiles (amx.h): bfloat16 with `in` a multiple of 32 (up to FEW_ROWS rows in linear_amx_few.c, with the
 * same bits); int8 with `in` a multiple of 64, many rows.
 *
 * A product takes 16 rows × 64 bytes of x as they lie, as many numbers × 16 outputs of a panel as they lie, and adds to
 * a register of sums. Each sum is one chain of products from the first number to the last, whatever the number of rows,
 * so a row's result does not depend on its neighbours. (An instruction adds its even and its odd products of bfloat16
 * up apart, so the cut of `in` into 32s is part of the result; AVX-512's differ in the last bits. Sums of int8 are
 * exact, and few rows are computed in linear_int8.c.)
 *
 * A block is up to 32 rows × 2 panels: four registers of sums, which each load of two of x and two of weights serves
 * twice. Registers are shaped to the rows that are there: nothing is read beyond x, and few rows take less time.
 *
 * - The first block reads the panels from memory, which is its limit: they are prefetched LOOK_AHEAD, beyond the tile's
 *   end from the tile that this thread will probably take next.
 * - The others find them in L2. Its loads are their limit then, so `in` is cut into parts, of which both panels
 *   stay in L1 while the blocks pass by; their sums wait in a buffer (exactly: they are floats there, too). The tile's
 *   rows of x stay in L2 from panel to panel. Prefetching the next panels or the outputs meanwhile gained
 *   nothing.
 */
#include "linear.h"

#if HAS_AMX

#define PAIR 2
#define BLOCK_ROWS (2 * TILE_ROWS)
/* What one product takes of a panel. */
#define STEP_BYTES (TILE_ROWS * TILE_ROW_BYTES)
/* Steps of a part. 512 rows × 896 numbers, both in L2, made 1.6 TFLOP/s in parts of 8 or 14 steps and 1.3 in one of 28;
 * up to PART_ROWS rows sums are better kept in registers. */
#define PART_STEPS 8
#define PART_ROWS 128
/* Bytes ahead, of both panels together, into L2. One row by 896 · 9728 took 1.06 ms; with 2048 and 8192 1.13, 1.25. */
#define LOOK_AHEAD 4096

/* A block's sums: a register's rows lie together. */
typedef float block_sums[PAIR][BLOCK_ROWS][LANES]; /* int8: int32 at first */

/* What is multiplied: rows of a tile by a pair of panels (or the last one alone). */
typedef struct product {
    const linear_args *args;
    const char *panels;
    const char *next; /* the panels to prefetch when these end */
    const char *x;
    int64_t panel_bytes, x_bytes; /* x: a row */
    int64_t first_row, num_rows, first_panel, num_panels;
    int is_first; /* of this tile to read the panels */
} product;

/* What the loops are compiled for: registers of rows and panels that are there. */
typedef struct kernel {
    int is_int8, halves, panels;
} kernel;

static void shape_registers(int64_t rows) {
    const uint8_t first = (uint8_t)(rows < TILE_ROWS ? rows : TILE_ROWS), second = (uint8_t)(rows - first);
    const uint16_t bytes = second ? TILE_ROW_BYTES : 0; /* no rows of some bytes would be refused */
    const tile_shapes shapes = {
        .palette = 1,
        .row_bytes = {64, 64, bytes, bytes, 64, bytes, 64, 64},
        .rows = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS},
    };
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); /* _tile_loadconfig of GCC 12 lets the stores to it be dropped */
}

/* Registers 0 .. 3: sums [half of the rows][panel]; 4, 5: x; 6, 7: weights. */
static inline __attribute__((always_inline)) void clear_sums(const kernel k) {
    _tile_zero(0);
    if (k.panels == 2) _tile_zero(1);
    if (k.halves == 2) _tile_zero(2);
    if (k.halves == 2 && k.panels == 2) _tile_zero(3);
}

static inline __attribute__((always_inline)) void load_sums(const kernel k, block_sums from) {
    _tile_loadd(0, from[0][0], TILE_ROW_BYTES);
    if (k.panels == 2) _tile_loadd(1, from[1][0], TILE_ROW_BYTES);
    if (k.halves == 2) _tile_loadd(2, from[0][TILE_ROWS], TILE_ROW_BYTES);
    if (k.halves == 2 && k.panels == 2) _tile_loadd(3, from[1][TILE_ROWS], TILE_ROW_BYTES);
}

static inline __attribute__((always_inline)) void store_sums(const kernel k, block_sums to) {
    _tile_stored(0, to[0][0], TILE_ROW_BYTES);
    if (k.panels == 2) _tile_stored(1, to[1][0], TILE_ROW_BYTES);
    if (k.halves == 2) _tile_stored(2, to[0][TILE_ROWS], TILE_ROW_BYTES);
    if (k.halves == 2 && k.panels == 2) _tile_stored(3, to[1][TILE_ROWS], TILE_ROW_BYTES);
}

#define MULTIPLY(is_int8, sum, x, weights)                                                                    \
    do {                                                                                                      \
        if (is_int8)                                                                                          \
            _tile_dpbsud(sum, x, weights);                                                                    \
        else                                                                                                  \
            _tile_dpbf16ps(sum, x, weights);                                                                  \
    } while (0)

static inline __attribute__((always_inline)) void multiply_step(const kernel k, const product *p, const char *x,
                                                                int64_t step) {
    const char *weights = p->panels + step * STEP_BYTES, *here = x + step * TILE_ROW_BYTES;
    _tile_loadd(6, weights, TILE_ROW_BYTES);
    _tile_loadd(4, here, p->x_bytes);
    if (k.panels == 2) _tile_loadd(7, weights + p->panel_bytes, TILE_ROW_BYTES);
    MULTIPLY(k.is_int8, 0, 4, 6);
    if (k.halves == 2) _tile_loadd(5, here + TILE_ROWS * p->x_bytes, p->x_bytes);
    if (k.panels == 2) MULTIPLY(k.is_int8, 1, 4, 7);
    if (k.halves == 2) MULTIPLY(k.is_int8, 2, 5, 6);
    if (k.halves == 2 && k.panels == 2) MULTIPLY(k.is_int8, 3, 5, 7);
}

/* Steps [begin, end) of a block whose panels are in a cache. */
static inline __attribute__((always_inline)) void multiply_again(const kernel k, const product *p,
                                                                 const char *x, int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; step++) multiply_step(k, p, x, step);
}

/* The same from memory. */
static inline __attribute__((always_inline)) void multiply_first(const kernel k, const product *p,
                                                                 const char *x, int64_t begin, int64_t end) {
    const int64_t num_steps = p->panel_bytes / STEP_BYTES, distance = LOOK_AHEAD / STEP_BYTES / k.panels;
    for (int64_t step = begin; step < end; step++) {
        const int64_t later = step + distance;
        const char *from = later < num_steps ? p->panels : p->next;
        const char *ahead = from + (later < num_steps ? later : later - num_steps) * STEP_BYTES;
        for (int i = 0; i < k.panels; i++)
#pragma GCC unroll 16
            for (int line = 0; line < STEP_BYTES; line += 64)
                _mm_prefetch(ahead + i * p->panel_bytes + line, _MM_HINT_T1);
        multiply_step(k, p, x, step);
    }
}

/* Exact sums of int8 to what linear_int8.c makes of them. */
static void scale(const product *p, int64_t row, int64_t rows, block_sums sums) {
    const linear_args *args = p->args;
    for (int64_t panel = 0; panel < p->num_panels; panel++) {
        const __m512 scales = _mm512_loadu_ps(args->weight.scales + (p->first_panel + panel) * LANES);
        for (int64_t r = 0; r < rows; r++) {
            const int8_t *x = (const int8_t *)p->x + (row + r) * p->x_bytes;
            const __m512i start = _mm512_set1_epi32(*quantized_starts(x, args->weight.in));
            const __m512 exact = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(sums[panel][r]), start));
            const __m512 x_scale = _mm512_set1_ps(args->x_scales[p->first_row + row + r]);
            _mm512_store_ps(sums[panel][r], _mm512_mul_ps(_mm512_mul_ps(exact, scales), x_scale));
        }
    }
}

static void finish(const product *p, int64_t row, block_sums from) {
    const int64_t left = p->num_rows - row, rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
    if (p->args->weight.dtype == INT8) scale(p, row, rows, from);
    linear_finish(p->args, p->first_row + row, rows, p->first_panel, p->num_panels,
                  (sums){from[0][0], LANES, BLOCK_ROWS * LANES});
}

/* All blocks, which have the same number of rows, part by part of `in`. */
static inline __attribute__((always_inline)) void multiply(const kernel k, const product *p,
                                                           block_sums *sums) {
    const int64_t num_steps = p->panel_bytes / STEP_BYTES;
    const int64_t num_parts = p->num_rows > PART_ROWS ? ceil_div(num_steps, PART_STEPS) : 1;
    for (int64_t part = 0; part < num_parts; part++) {
        const int64_t begin = num_steps * part / num_parts, end = num_steps * (part + 1) / num_parts;
        for (int64_t row = 0; row < p->num_rows; row += BLOCK_ROWS) {
            block_sums *block = &sums[num_parts == 1 ? 0 : row / BLOCK_ROWS];
            if (begin == 0)
                clear_sums(k);
            else
                load_sums(k, *block);
            if (p->is_first && row == 0)
                multiply_first(k, p, p->x, begin, end);
            else
                multiply_again(k, p, p->x + row * p->x_bytes, begin, end);
            store_sums(k, *block);
            if (end == num_steps) finish(p, row, *block);
        }
    }
}

#define DEFINE(name, ...)                                                                                     \
    static void name(const product *p, block_sums *sums) { multiply((kernel){__VA_ARGS__}, p, sums); }
DEFINE(bf16_1_1, 0, 1, 1)
DEFINE(bf16_1_2, 0, 1, 2)
DEFINE(bf16_2_1, 0, 2, 1)
DEFINE(bf16_2_2, 0, 2, 2)
DEFINE(int8_1_1, 1, 1, 1)
DEFINE(int8_1_2, 1, 1, 2)
DEFINE(int8_2_1, 1, 2, 1)
DEFINE(int8_2_2, 1, 2, 2)

/* [is int8][halves − 1][panels − 1] */
static void (*const MULTIPLY_ROWS[2][2][2])(const product *p, block_sums *sums) = {
    {{bf16_1_1, bf16_1_2}, {bf16_2_1, bf16_2_2}},
    {{int8_1_1, int8_1_2}, {int8_2_1, int8_2_2}},
};

static void multiply_rows(const product *p) {
    block_sums *sums = scratch(ceil_div(p->num_rows, BLOCK_ROWS) * (int64_t)sizeof(*sums));
    shape_registers(p->num_rows < BLOCK_ROWS ? p->num_rows : BLOCK_ROWS);
    MULTIPLY_ROWS[p->args->weight.dtype == INT8][p->num_rows > TILE_ROWS][p->num_panels - 1](p, sums);
}

/* Rows [begin, end) of a tile by the pair of panels at `panel`. */
static product product_of(const linear_args *args, const linear_tile *tile, int64_t panel, int64_t begin, int64_t end) {
    const int64_t bytes = panel_bytes(&args->weight), left = tile->num_panels - panel;
    const int64_t x_bytes = args->x_stride * (args->weight.dtype == BF16 ? 2 : 1);
    return (product){
        .args = args,
        .panels = tile->panels + panel * bytes,
        .next = left > PAIR ? tile->panels + (panel + PAIR) * bytes : tile->next,
        .x = (const char *)args->x + (tile->first_row + begin) * x_bytes,
        .panel_bytes = bytes,
        .x_bytes = x_bytes,
        .first_row = tile->first_row + begin,
        .num_rows = end - begin,
        .first_panel = tile->first_panel + panel,
        .num_panels = left < PAIR ? left : PAIR,
        .is_first = begin == 0,
    };
}

void amx_tile(const linear_args *args, const linear_tile *tile) {
    const int64_t whole = tile->num_rows / BLOCK_ROWS * BLOCK_ROWS;
    for (int64_t panel = 0; panel < tile->num_panels; panel += PAIR) {
        const product blocks = product_of(args, tile, panel, 0, whole);
        const product rest = product_of(args, tile, panel, whole, tile->num_rows);
        if (blocks.num_rows) multiply_rows(&blocks);
        if (rest.num_rows) multiply_rows(&rest);
    }
}

#endif
