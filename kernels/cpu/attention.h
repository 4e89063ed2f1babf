/* Causal attention over the paged cache: what the plan and the tiles share.
 *
 * For a query row at position p: out = Σ 2^(q·k − best) v / Σ 2^(q·k − best) over the keys at 0 .. p, or with a window
 * at p − window + 1 .. p, with best = max q·k. The query comes multiplied by the factor of the scores and by log2(e), so 2^x serves for e^x.
 *
 * Work is cut in two ways. *Items* are query rows of one sequence: one row in decode, ROWS_OF_TILE / group consecutive
 * rows of a chunk; with the query heads of one KV head they make up the M rows of small matrix products. *Splits* are
 * SPLIT keys each, from position 0 on; those before the window of an item's first row are left out, and so are the key
 * tiles before it in the first split. A tile is (item, KV head), which takes its splits one after another, or (item,
 * KV head, split), which leaves best, total and sum of its split in `partial` for the merge; the plan chooses the
 * latter where an item would keep one thread busy while others have nothing left.
 *
 * Products are of vectors (attention_products.c), or of AMX tiles (attention_amx.c: bfloat16, head sizes that are
 * multiples of 32, for any number of rows); these have their own order of operations within a key tile.
 *
 * Numbers: within a split keys are taken in tiles of KEY_TILE. Each has its scores (summed over the head in order), its
 * best, its total (of floats, not of the rounded weights) and adds its products to the sums, which were scaled to the
 * new best before. After a split its (best, total, sums) are added to those of the splits before. All these are the
 * same operations in the same order for a row, whoever computes it with whichever rows beside it. A key that a row
 * can't see has weight 0 and adds exact zeros; of a row that has seen none yet best, total and sums are as at the start. In BF16 query, keys, values and weights are bfloat16 (rounded to nearest
 * even), all sums are float. Of INT8 and FP8 caches all but keys and values is float: a score is multiplied by its key's
 * scale, a weight by its value's once the total has it. They take no AMX tiles.
 *
 * Stale memory may hold NaN, and blocks before the window may be another sequence's: scores of keys that a row does not
 * see are replaced before use, values past the context are read from a copy that has zeros there, and strips before the
 * window are not read (attention_keys.h). */
#pragma once
#include "kv_cache.h"
#include "ops.h"

/* Keys of a tile; part of the numbers. Against 128 (Zen 4, one thread, bfloat16), 64 lost 2 to 5 % in prompt chunks and
 * 256 lost 3 to 10 % in decode at 300 and 1,024 keys. */
#define KEY_TILE 128
/* Keys of a split, a multiple of KEY_TILE; part of the numbers. 128 KiB of keys and values for a head of 64: long beside
 * the hand-out of a tile, short beside a step. */
#define SPLIT 512
/* Rows of M in a tile. 32 and 128 were within 2 % of 64. */
#define ROWS_OF_TILE 64
#define MAX_HEAD_SIZE 256
/* The best score of a row that has seen no key: not −inf, since −inf less −inf is NaN, and 2^(NO_BEST − x) is 0. */
#define NO_BEST (-0x1p126f)

typedef struct attention_tile {
    int32_t sequence;
    int32_t first_row; /* of the step */
    int32_t num_rows;
    int32_t num_keys;      /* that the last row sees */
    int32_t split;         /* −1: all of them, and the result goes to `out` */
    int32_t first_partial; /* of the item: its split s (of those from first_split on) of row r: + s · num_rows + r */
} attention_tile;

/* [header][tiles: max_rows + max_partials][the same again, unsorted][merges: max_partials] */
typedef struct attention_plan {
    int64_t num_tiles;
    int64_t num_merges;
    attention_tile tiles[]; /* the dearest first */
} attention_plan;

static inline attention_tile *unsorted_tiles(const attention_args *args) {
    return ((attention_plan *)args->plan)->tiles + args->max_rows + args->max_partials;
}

static inline attention_tile *merges(const attention_args *args) {
    return unsorted_tiles(args) + args->max_rows + args->max_partials;
}

/* All splits from position 0 on. */
static inline int32_t num_splits(const attention_tile *item) { return (int32_t)ceil_div(item->num_keys, SPLIT); }

/* The first key that a row at `position` sees. */
static inline int32_t first_key(const attention_args *args, int32_t position) {
    return args->window && position >= args->window ? (int32_t)(position - args->window + 1) : 0;
}

/* The first key that any row of the item sees, and its split. */
static inline int32_t first_key_of(const attention_args *args, const attention_tile *item) {
    return first_key(args, item->num_keys - item->num_rows);
}
static inline int32_t first_split(const attention_args *args, const attention_tile *item) {
    return first_key_of(args, item) / SPLIT;
}
