/* y = x · Wᵀ: how the op is cut into tiles, and which kernel computes them.
 *
 * A tile is some neighbouring panels, contiguous in memory, times a block of rows. What is multiplied in what order is
 * the kernels' (linear_float.c, linear_amx.c, linear_int8.c, linear_int4.c; linear_avx2_*.c) and does not depend on the
 * cut.
 */
#include "linear.h"

#include <immintrin.h>

/* Rows of a tile: more would make the last tile of an op last longer than the others wait for. */
#define ROW_BLOCK 192
/* The same with AVX2, where a tile's rows of x are prepared for it: so many that they stay in a cache. To prepare them
 * costs 1/8 of a panel, so a tile has 4 to 16 panels: so many that there are AVX2_TILES tiles a thread. */
#define AVX2_ROW_BLOCK 96
#define AVX2_MIN_PANELS 4
#define AVX2_MAX_PANELS 16
#define AVX2_TILES 8
/* Rows on AMX, in blocks of AMX_ROWS: as many as leave half of a 2 MiB L2 free for panels, and not more than that. */
#define AMX_X_BYTES (1280 * 1024)
#define AMX_MAX_ROWS 512
#define AMX_ROWS 32
/* Blocks of rows that the last tiles are cut into, each of at least so many rows. */
#define FINE_BLOCKS 4
#define FINE_ROWS 12
#define AMX_FINE_ROWS 64
/* Bytes that a waiting thread brings for its first tiles: most of a 1 MiB L2 is left for what is being computed. */
#define PREFETCH_BYTES (256 * 1024)
#define LINES_A_CALL 8
/* A tile of few rows is at most this long, so that the last one of an op is short. */
#define STREAM_BYTES (128 * 1024)

int64_t panel_bytes(const weight *weight) {
    switch (weight->dtype) {
        case F32: return weight->in * 64;
        case BF16: return ceil_div(weight->in, 2) * 64;
        case INT8: return ceil_div(weight->in, 4) * 64;
        case INT4_ZEROS: return ceil_div(weight->in, INT4_GROUP) * INT4_ZEROS_GROUP_BYTES;
        default: return ceil_div(weight->in, INT4_GROUP) * INT4_GROUP_BYTES;
    }
}

/* How an op is cut: panels into groups, each times some blocks of rows: first all groups times the first block (whose
 * rows of x stay in the cache), then the next. The last groups, about one a thread, are cut into more blocks of rows, so
 * that threads end together. */
typedef struct cut {
    int64_t num_panels, panels; /* in all, of a group */
    int64_t num_rows, num_row_blocks;
    int64_t row_unit; /* a block begins at a multiple of it */
    int64_t num_groups, first_fine, num_fine_blocks; /* groups from first_fine on have so many blocks */
} cut;

static int64_t amx_row_block(const weight *weight) {
    const int64_t bytes = weight->in * (weight->dtype == BF16 ? 2 : 1), rows = AMX_X_BYTES / bytes / AMX_ROWS * AMX_ROWS;
    return rows < AMX_ROWS ? AMX_ROWS : rows > AMX_MAX_ROWS ? AMX_MAX_ROWS : rows;
}

/* Panels of a tile of more than FEW_ROWS rows with AVX2. */
static int64_t avx2_panels(int64_t num_panels, int num_threads) {
    const int64_t panels = num_panels / (AVX2_TILES * num_threads) / AVX2_MIN_PANELS * AVX2_MIN_PANELS;
    return panels < AVX2_MIN_PANELS ? AVX2_MIN_PANELS : panels > AVX2_MAX_PANELS ? AVX2_MAX_PANELS : panels;
}

static cut cut_op(const linear_args *args, const step *step, int num_threads) {
    const weight *weight = &args->weight;
    const int64_t rows = step->num_rows;
    const int is_amx = uses_amx(weight, rows);
    const int64_t num_panels = ceil_div(weight->out, LANES);
    const int64_t row_block = is_amx ? amx_row_block(weight) : HAS_AVX512 ? ROW_BLOCK : AVX2_ROW_BLOCK;
    const int64_t row_blocks = ceil_div(rows, row_block);
    const int64_t fine_rows = is_amx ? AMX_FINE_ROWS : FINE_ROWS, fine_blocks = rows < fine_rows ? 1 : rows / fine_rows;
    const int is_few = rows <= FEW_ROWS, is_short = is_few && 4 * panel_bytes(weight) <= STREAM_BYTES;
    const int is_half_line = is_amx && is_gate(args->epilogue) && args->out_dtype == BF16;
    cut cut = {
        .num_panels = num_panels,
        .panels = is_short || is_half_line ? 4 : HAS_AVX512 || is_few ? 2 : avx2_panels(num_panels, num_threads),
        .num_rows = rows,
        .num_row_blocks = row_blocks,
        .row_unit = is_amx ? AMX_ROWS : 1,
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
    if (tile < coarse) {
        *num_blocks = cut->num_row_blocks;
        *block = tile / cut->first_fine;
        return tile % cut->first_fine;
    }
    *num_blocks = cut->num_fine_blocks;
    *block = (tile - coarse) % cut->num_fine_blocks;
    return cut->first_fine + (tile - coarse) / cut->num_fine_blocks;
}

/* Where the rows of a block begin. */
static int64_t first_row(const cut *cut, int64_t block, int64_t num_blocks) {
    const int64_t row = ceil_div(cut->num_rows, cut->row_unit) * block / num_blocks * cut->row_unit;
    return row < cut->num_rows ? row : cut->num_rows;
}

/* A tile of an op over `num_rows` rows. */
static void run(const linear_args *args, const linear_tile *tile, int64_t num_rows) {
#if HAS_AMX
    if (uses_amx(&args->weight, num_rows)) {
        (args->weight.dtype == BF16 && tile->num_rows <= FEW_ROWS ? amx_few_tile : amx_tile)(args, tile);
        return;
    }
#endif
    switch (args->weight.dtype) {
        case INT8: int8_tile(args, tile); break;
        case INT4:
        case INT4_ZEROS: int4_tile(args, tile); break;
        default: float_tile(args, tile);
    }
}

void linear_run_panels(const linear_args *args, int64_t first, int64_t num_panels, int64_t num_rows) {
    const step rows = {.num_rows = num_rows};
    const cut cut = cut_op(args, &rows, 1);
    const int64_t bytes = panel_bytes(&args->weight);
    const int64_t end = first + num_panels < cut.num_panels ? first + num_panels : cut.num_panels;
    const int64_t panels = cut.panels < num_panels ? cut.panels : num_panels;
    for (int64_t block = 0; block < cut.num_row_blocks; block++)
        for (int64_t panel = first; panel < end; panel += panels) {
            const int64_t row = first_row(&cut, block, cut.num_row_blocks);
            const linear_tile tile = {
                .panels = (const char *)args->weight.panels + panel * bytes,
                .next = (const char *)args->weight.panels + (panel + 2 * panels <= end ? panel + panels : panel) * bytes,
                .first_panel = panel,
                .num_panels = end - panel < panels ? end - panel : panels,
                .first_row = row,
                .num_rows = first_row(&cut, block + 1, cut.num_row_blocks) - row,
            };
            run(args, &tile, num_rows);
        }
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
    const int64_t row = first_row(&cut, block, num_blocks);
    const char *panels = args->weight.panels;
    const linear_tile tile = {
        .panels = panels + panel * bytes,
        .next = panels + (next + cut.panels <= cut.num_panels ? next : panel) * bytes,
        .first_panel = panel,
        .num_panels = cut.num_panels - panel < cut.panels ? cut.num_panels - panel : cut.panels,
        .first_row = row,
        .num_rows = first_row(&cut, block + 1, num_blocks) - row,
    };
    run(args, &tile, cut.num_rows);
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
