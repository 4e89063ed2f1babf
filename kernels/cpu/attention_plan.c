/* Cuts a step's attention into tiles, once for all layers. See attention.h. */
#include "amx.h"
#include "attention.h"

#include <string.h>

/* Items are split while one of them costs more than 1 / (threads · TILES_PER_THREAD) of the step. */
#define TILES_PER_THREAD 4
/* What a key costs beside its products, in rows' worth of products. Reading it from memory takes 5 to 20 ns; a row's
 * products with it (head size 64) and its weight take about 1 ns, on AMX tiles 0.3 ns. */
#define KEY_COST (HAS_AMX ? 64 : 8)
#define NUM_BUCKETS 64

static int64_t cost(const attention_args *args, const attention_tile *tile) {
    int64_t begin = first_key_of(args, tile), end = tile->num_keys;
    if (tile->split >= 0) {
        if (begin < tile->split * SPLIT) begin = tile->split * SPLIT;
        if (end > (tile->split + 1) * SPLIT) end = (tile->split + 1) * SPLIT;
    }
    return (end - begin) * (KEY_COST + tile->num_rows * (args->heads / args->kv_heads));
}

/* Every sequence's chunk in items, into `out`; how many. */
static int64_t cut_into_items(const attention_args *args, const step *step, attention_tile *out) {
    const int64_t group = args->heads / args->kv_heads;
    const int32_t most = group < ROWS_OF_TILE ? (int32_t)(ROWS_OF_TILE / group) : 1;
    int64_t num_items = 0;
    for (int64_t sequence = 0; sequence < step->num_sequences; sequence++) {
        const int32_t end = step->query_starts[sequence + 1];
        for (int32_t row = step->query_starts[sequence]; row < end; row += most) {
            const int32_t rows = end - row < most ? end - row : most;
            const int32_t keys = step->context_lens[sequence] - (end - row - rows);
            out[num_items++] = (attention_tile){(int32_t)sequence, row, rows, keys, -1, -1};
        }
    }
    return num_items;
}

/* Counting sort by cost, the dearest first: nobody should begin a long tile last. */
static void sort_tiles(const attention_args *args, const attention_tile *from, int64_t count, attention_tile *to) {
    int64_t starts[NUM_BUCKETS + 1] = {0}, dearest = 1;
    for (int64_t i = 0; i < count; i++)
        if (cost(args, &from[i]) > dearest) dearest = cost(args, &from[i]);
    for (int64_t i = 0; i < count; i++)
        starts[NUM_BUCKETS - cost(args, &from[i]) * (NUM_BUCKETS - 1) / dearest]++;
    for (int64_t i = 1; i <= NUM_BUCKETS; i++) starts[i] += starts[i - 1];
    for (int64_t i = count - 1; i >= 0; i--)
        to[--starts[NUM_BUCKETS - cost(args, &from[i]) * (NUM_BUCKETS - 1) / dearest]] = from[i];
}

static void make_plan(const attention_args *args, const step *step, int num_threads) {
    attention_plan *plan = args->plan;
    attention_tile *items = plan->tiles, *tiles = unsorted_tiles(args);
    const int64_t num_items = cut_into_items(args, step, items);
    int64_t total = 0, num_tiles = 0, num_merges = 0, num_partials = 0;
    for (int64_t i = 0; i < num_items; i++) total += cost(args, &items[i]);
    const int64_t limit = num_threads > 1 ? total * args->kv_heads / (num_threads * TILES_PER_THREAD) : INT64_MAX;
    for (int64_t i = 0; i < num_items; i++) {
        attention_tile tile = items[i];
        const int32_t first = first_split(args, &tile), end = num_splits(&tile), splits = end - first;
        if (splits == 1 || cost(args, &tile) <= limit || num_partials + splits * tile.num_rows > args->max_partials) {
            tiles[num_tiles++] = tile;
            continue;
        }
        tile.first_partial = (int32_t)num_partials;
        num_partials += splits * tile.num_rows;
        merges(args)[num_merges++] = tile;
        for (tile.split = first; tile.split < end; tile.split++) tiles[num_tiles++] = tile;
    }
    sort_tiles(args, tiles, num_tiles, plan->tiles);
    plan->num_tiles = num_tiles;
    plan->num_merges = num_merges;
}

static int64_t one_tile(const void *args, const step *step, int num_threads) { return 1; }

static void run_plan(const void *args, const step *step, int64_t tile, int thread, int num_threads) {
    make_plan(args, step, num_threads);
}

const op_class attention_plan_class = {.num_tiles = one_tile, .run_tile = run_plan};

int64_t attention_plan_bytes(int64_t max_rows, int64_t max_partials) {
    return (int64_t)sizeof(attention_plan) + (2 * max_rows + 3 * max_partials) * (int64_t)sizeof(attention_tile);
}
