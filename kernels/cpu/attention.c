/* The tiles of attention and their merge. See attention.h for the order of operations. */
#include "attention.h"
#include "attention_amx.h"
#include "attention_keys.h"
#include "attention_products.h"
#include "kv_quantize.h"
#include "vector.h"

#include <math.h>
#include <string.h>

/* A tile of the op is some units, each of which brings the next one's first keys near. Of short contexts that is most of
 * what there is to read. */
#define MAX_UNITS 4
#define TILES_PER_THREAD 8

/* The next `bytes`, a multiple of 64. */
static void *take(char **next, int64_t bytes) {
    void *taken = *next;
    *next += bytes;
    return taken;
}

static workspace open_workspace(const attention_args *a, int64_t M) {
    const int64_t rows = ceil_div(M, LANES) * LANES, copies = STRIPS * strip_bytes(a->cache_dtype, a->head_size);
    const int64_t query_bytes = rows * QUERY_STRIDE(a->cache_dtype == BF16), sum_bytes = rows * a->head_size * 4;
    char *next = scratch(query_bytes + rows * SCORE_STRIDE + 2 * sum_bytes + 6 * rows * 4 + 2 * KEY_TILE * 4 + copies);
    workspace w;
    w.query = take(&next, query_bytes);
    w.scores = take(&next, rows * SCORE_STRIDE);
    w.sums = take(&next, sum_bytes), w.all_sums = take(&next, sum_bytes);
    w.best = take(&next, rows * 4), w.total = take(&next, rows * 4);
    w.all_best = take(&next, rows * 4), w.all_total = take(&next, rows * 4);
    w.new_best = take(&next, rows * 4), w.shrink = take(&next, rows * 4);
    w.key_scales = take(&next, KEY_TILE * 4), w.value_scales = take(&next, KEY_TILE * 4);
    w.copies = take(&next, copies);
    return w;
}

/* Row r · group + g of the workspace is head g of the item's row r. */
static void take_queries(const attention_args *a, const attention_tile *item, int64_t kv_head, char *out) {
    const int64_t bytes = a->head_size * element_bytes(query_dtype(a->cache_dtype)), group = a->heads / a->kv_heads;
    const char *from = (const char *)a->query + (item->first_row * a->heads + kv_head * group) * bytes;
    for (int64_t row = 0; row < item->num_rows; row++)
        for (int64_t head = 0; head < group; head++, out += QUERY_STRIDE(a->cache_dtype == BF16))
            for (int64_t i = 0; i < bytes; i += 32)
                _mm256_store_si256((__m256i *)(out + i),
                                   _mm256_loadu_si256((const __m256i *)(from + (row * a->heads + head) * bytes + i)));
}

/* Scores are multiplied by `key_scales`, if there are any, and those of keys before `hidden` and from `visible` on become
 * −inf; returns the row's best. */
static inline __attribute__((always_inline)) float best_score(float *scores, const float *key_scales,
                                                              int64_t num_strips, int64_t hidden, int64_t visible) {
    floats best = floats_of(-INFINITY);
    for (int64_t strip = 0; strip < num_strips; strip++, visible -= STRIP, hidden -= STRIP) {
        floats score = load(scores + strip * STRIP);
        if (key_scales) score = multiply(score, load(key_scales + strip * STRIP));
        if (visible < STRIP)
            score = select_floats(first_lanes(visible > 0 ? visible : 0), score, floats_of(-INFINITY));
        if (hidden > 0) score = select_floats(first_lanes(hidden < STRIP ? hidden : STRIP), floats_of(-INFINITY), score);
        if (key_scales || visible < STRIP || hidden > 0) store(scores + strip * STRIP, score);
        best = larger(best, score);
    }
    return largest_of(best);
}

/* Weights 2^(score − best) in place of the scores, in the products' dtype; returns their total. With `value_scales` each
 * weight is multiplied by its value's scale after that. */
static inline __attribute__((always_inline)) float weigh(int is_bf16, float *scores, const float *value_scales,
                                                         int64_t num_strips, float best) {
    const floats subtrahend = floats_of(best);
    floats total = floats_of(0);
    for (int64_t strip = 0; strip < num_strips; strip++) {
        floats weight = exp2_of(subtract(load(scores + strip * STRIP), subtrahend));
        total = add(total, weight);
        if (value_scales) weight = multiply(weight, load(value_scales + strip * STRIP));
        if (is_bf16)
            _mm256_store_si256((__m256i *)scores + strip, to_bf16(weight));
        else
            store(scores + strip * STRIP, weight);
    }
    return sum_of(total);
}

/* Take one key tile into the split's best, total and sums, for rows of M from `first` on. Row m sees the first `visible` +
 * m / group of its keys, of these the last `window` if there is one. */
static inline __attribute__((always_inline)) void attend_tile(int dtype, const attention_args *a, const workspace *w,
                                                              const key_tile *tile, const key_tile *next,
                                                              int64_t first, int64_t M, int64_t visible) {
    const int64_t num_strips = tile->num_strips, size = a->head_size, group = a->heads / a->kv_heads;
    const float *key_scales = has_scales(dtype) ? w->key_scales : NULL;
    const float *value_scales = has_scales(dtype) ? w->value_scales : NULL;
    score_rows(dtype, w->query, tile, num_strips, first, M, size, w->scores);
    for (int64_t m = first; m < M; m++) {
        float *scores = (float *)(w->scores + m * SCORE_STRIDE);
        const int64_t seen = visible + m / group, hidden = a->window ? seen - a->window : 0;
        const float best = best_score(scores, key_scales, num_strips, hidden, seen);
        w->new_best[m] = best > w->best[m] ? best : w->best[m];
    }
    for (int64_t m = first / LANES * LANES; m < M; m += LANES) {
        const floats best = load(w->best + m), new_best = load(w->new_best + m);
        store(w->shrink + m, exp2_of(subtract(best, new_best)));
    }
    for (int64_t m = first; m < M; m++) {
        float *scores = (float *)(w->scores + m * SCORE_STRIDE);
        const float total = weigh(dtype == BF16, scores, value_scales, num_strips, w->new_best[m]);
        w->total[m] = w->total[m] * w->shrink[m] + total;
        w->best[m] = w->new_best[m];
    }
    mix_rows(dtype, w->scores, tile, next, num_strips, first, M, size, w->shrink, w->sums);
}

/* all_sums = all_sums · kept + sums · added */
static inline void add_sums(const float *sums, float added, int64_t head_size, float kept, float *all_sums) {
    const floats old = floats_of(kept), own = floats_of(added);
    for (int64_t i = 0; i < head_size; i += LANES) {
        const floats rest = multiply(load(all_sums + i), old);
        store(all_sums + i, multiply_add(load(sums + i), own, rest));
    }
}

/* Add a split's (best, total, sums) to those of the splits before it. */
static void add_split(float best, float total, const float *sums, int64_t head_size, float *all_best, float *all_total,
                      float *all_sums) {
    const float new_best = best > *all_best ? best : *all_best;
    _Alignas(64) float factors[LANES] = {*all_best - new_best, best - new_best};
    store(factors, exp2_of(load(factors)));
    add_sums(sums, factors[1], head_size, factors[0], all_sums);
    *all_total = fmaf(total, factors[1], *all_total * factors[0]);
    *all_best = new_best;
}

/* add_split for rows [first, M). */
static void add_splits(const workspace *w, int64_t first, int64_t M, int64_t head_size) {
    for (int64_t m = first; m < M; m += LANES) {
        const int64_t left = M - m;
        const floats best = load_first(w->best + m, left);
        const floats old = load_first(w->all_best + m, left);
        const floats new_best = larger(best, old);
        const floats kept = exp2_of(subtract(old, new_best)), added = exp2_of(subtract(best, new_best));
        const floats total = multiply(load_first(w->all_total + m, left), kept);
        store_first(w->all_best + m, left, new_best);
        store_first(w->all_total + m, left, multiply_add(load_first(w->total + m, left), added, total));
        _Alignas(64) float factors[2][LANES];
        store(factors[0], kept), store(factors[1], added);
        for (int64_t r = 0; r < LANES && m + r < M; r++)
            add_sums(w->sums + (m + r) * head_size, factors[1][r], head_size, factors[0][r],
                     w->all_sums + (m + r) * head_size);
    }
}

static void swap(float **a, float **b) {
    float *held = *a;
    *a = *b, *b = held;
}

/* The split's best, total and sums become those of all splits so far. */
static void keep_split(workspace *w) {
    swap(&w->best, &w->all_best), swap(&w->total, &w->all_total), swap(&w->sums, &w->all_sums);
}

/* A KV head of an item. */
typedef struct unit {
    const attention_tile *item;
    int64_t kv_head;
    int32_t from, to; /* splits */
    int32_t begin;    /* the first key tile */
    key_source source;
} unit;

static unit unit_at(const attention_args *a, const step *step, int64_t index) {
    const attention_tile *item = &((const attention_plan *)a->plan)->tiles[index / a->kv_heads];
    const kv_layout layout = kv_layout_of(a->cache_dtype, a->head_size, a->block_size, a->block_stride);
    const int64_t kv_head = index % a->kv_heads;
    const int32_t first_key = first_key_of(a, item), first_tile = first_key / KEY_TILE * KEY_TILE;
    const int32_t from = item->split < 0 ? first_split(a, item) : item->split;
    return (unit){
        .item = item,
        .kv_head = kv_head,
        .from = from,
        .to = item->split < 0 ? num_splits(item) : item->split + 1,
        .begin = from * SPLIT > first_tile ? from * SPLIT : first_tile,
        .source =
            {
                .cache = (const char *)a->cache + kv_head * layout.head_bytes,
                .blocks = step->block_tables + item->sequence * step->table_stride,
                .layout = layout,
                .dtype = a->cache_dtype,
                .block_size = (int32_t)a->block_size,
                .head_size = (int32_t)a->head_size,
                .first_key = first_key,
                .num_keys = step->context_lens[item->sequence],
            },
    };
}

/* A unit's splits, one after another. The result is in all_best, all_total, all_sums. */
static inline __attribute__((always_inline)) void attend_splits(int dtype, int on_tiles, const attention_args *a,
                                                                const unit *unit, workspace *w, const key_tile *after) {
    const attention_tile *item = unit->item;
    const int64_t group = a->heads / a->kv_heads, M = item->num_rows * group, size = a->head_size;
    const int32_t first_position = item->num_keys - item->num_rows;
    for (int32_t split = unit->from; split < unit->to; split++) {
        const int32_t begin = split == unit->from ? unit->begin : split * SPLIT, full = (split + 1) * SPLIT;
        const int32_t end = full < item->num_keys ? full : item->num_keys;
        const int64_t first = begin > first_position ? (begin - first_position) * group : 0;
        for (int64_t m = first; m < M; m++) w->best[m] = NO_BEST, w->total[m] = 0;
        memset(w->sums + first * size, 0, (size_t)((M - first) * size * 4));
        for (int32_t start = begin; start < end; start += KEY_TILE) {
            const int32_t num_keys = end - start < KEY_TILE ? end - start : KEY_TILE;
            const int64_t seeing = start > first_position ? (start - first_position) * group : 0;
            const int is_last = split + 1 == unit->to && start + KEY_TILE >= end;
            key_tile tile, following;
            if (!is_last) peek_keys(&unit->source, start + KEY_TILE, &following);
            find_strips(&unit->source, start, (int32_t)ceil_div(num_keys, STRIP), &tile);
            const key_tile *next = !is_last ? &following : after->num_strips ? after : &tile;
            if (has_scales(dtype)) read_scales(&unit->source, start, num_keys, w->key_scales, w->value_scales);
            if (on_tiles)
                attend_on_tiles(a, w, &tile, next, seeing, M, first_position + 1 - start);
            else
                attend_tile(dtype, a, w, &tile, next, seeing, M, first_position + 1 - start);
        }
        if (split == unit->from)
            keep_split(w);
        else
            add_splits(w, first, M, size);
    }
}

/* out = sums / total, to about an ulp */
static void write_out(const attention_args *a, const float *sums, float total, int64_t row, int64_t head) {
    const int64_t at = row * a->out_stride + head * a->head_size;
    const floats factor = floats_of(1.0f / total);
    for (int64_t i = 0; i < a->head_size; i += LANES) {
        const floats value = multiply(load(sums + i), factor);
        if (a->out_dtype == BF16)
            _mm256_storeu_si256((__m256i *)((uint16_t *)a->out + at + i), to_bf16(value));
        else
            store((float *)a->out + at + i, value);
    }
}

/* Sums of a (row, split) pair's head; its best and total. */
static float *partial_sums(const attention_args *a, int64_t partial, int64_t head) {
    return a->partial + (partial * a->heads + head) * a->head_size;
}

static float *partial_best(const attention_args *a, int64_t partial, int64_t head) {
    return a->partial + a->max_partials * a->heads * a->head_size + (partial * a->heads + head) * 2;
}

static void write_partial(const attention_args *a, const workspace *w, int64_t m, int64_t partial, int64_t head) {
    memcpy(partial_sums(a, partial, head), w->all_sums + m * a->head_size, (size_t)a->head_size * 4);
    float *best = partial_best(a, partial, head);
    best[0] = w->all_best[m], best[1] = w->all_total[m];
}

/* The number of an item's row and split. */
static inline int64_t partial_of(const attention_args *a, const attention_tile *item, int64_t split, int64_t row) {
    return item->first_partial + (split - first_split(a, item)) * item->num_rows + row;
}

/* `after`: keys that are going to be read next. */
static void attend_unit(const attention_args *a, unit *unit, const key_tile *after) {
    const attention_tile *item = unit->item;
    const int64_t group = a->heads / a->kv_heads, M = item->num_rows * group;
    workspace w = open_workspace(a, M);
    unit->source.copies = w.copies;
    take_queries(a, item, unit->kv_head, w.query);
    if (uses_tiles(a))
        attend_splits(BF16, 1, a, unit, &w, after);
    else if (a->cache_dtype == BF16)
        attend_splits(BF16, 0, a, unit, &w, after);
    else if (a->cache_dtype == F32)
        attend_splits(F32, 0, a, unit, &w, after);
    else if (a->cache_dtype == INT8)
        attend_splits(INT8, 0, a, unit, &w, after);
    else
        attend_splits(FP8, 0, a, unit, &w, after);
    for (int64_t m = 0; m < M; m++) {
        const int64_t row = m / group, head = unit->kv_head * group + m % group;
        if (item->split < 0)
            write_out(a, w.all_sums + m * a->head_size, w.all_total[m], item->first_row + row, head);
        else if (unit->from * SPLIT <= item->num_keys - item->num_rows + row)
            write_partial(a, &w, m, partial_of(a, item, unit->from, row), head);
    }
}

static int64_t num_units(const attention_args *a) { return ((const attention_plan *)a->plan)->num_tiles * a->kv_heads; }

static int64_t units_per_tile(const attention_args *a, int num_threads) {
    const int64_t wanted = num_units(a) / (TILES_PER_THREAD * num_threads);
    return wanted < 1 ? 1 : wanted > MAX_UNITS ? MAX_UNITS : wanted;
}

static void run_attention(const void *args, const step *step, int64_t tile, int thread, int num_threads) {
    const attention_args *a = args;
    const int64_t size = units_per_tile(a, num_threads), all = num_units(a);
    const int64_t end = (tile + 1) * size < all ? (tile + 1) * size : all;
    unit current = unit_at(a, step, tile * size);
    if (uses_tiles(a)) {
        key_tile begin;
        peek_keys(&current.source, current.begin, &begin);
        bring_keys(&begin, a->head_size);
        shape_tiles();
    }
    for (int64_t index = tile * size; index < end; index++) {
        key_tile after = {.num_strips = 0};
        unit next = current;
        if (index + 1 < end) {
            next = unit_at(a, step, index + 1);
            peek_keys(&next.source, next.begin, &after);
        }
        attend_unit(a, &current, &after);
        current = next;
    }
}

static int64_t num_attention_tiles(const void *args, const step *step, int num_threads) {
    return ceil_div(num_units(args), units_per_tile(args, num_threads));
}

const op_class attention_class = {.num_tiles = num_attention_tiles, .run_tile = run_attention};

/* All splits of an item for one KV head, of each row those that it sees. */
static void run_merge(const void *args, const step *step, int64_t tile, int thread, int num_threads) {
    const attention_args *a = args;
    const attention_tile *item = &merges(a)[tile / a->kv_heads];
    const int64_t kv_head = tile % a->kv_heads, group = a->heads / a->kv_heads, size = a->head_size;
    for (int64_t m = 0; m < item->num_rows * group; m++) {
        const int64_t row = m / group, head = kv_head * group + m % group;
        const int32_t position = item->num_keys - item->num_rows + (int32_t)row;
        const int64_t first = first_key(a, position) / SPLIT;
        float *sums = partial_sums(a, partial_of(a, item, first, row), head);
        float *best = partial_best(a, partial_of(a, item, first, row), head);
        for (int64_t split = first + 1; split <= position / SPLIT; split++) {
            const int64_t partial = partial_of(a, item, split, row);
            const float *other = partial_best(a, partial, head);
            add_split(other[0], other[1], partial_sums(a, partial, head), size, &best[0], &best[1], sums);
        }
        write_out(a, sums, best[1], item->first_row + row, head);
    }
}

static int64_t num_merge_tiles(const void *args, const step *step, int num_threads) {
    const attention_args *a = args;
    return ((const attention_plan *)a->plan)->num_merges * a->kv_heads;
}

const op_class attention_merge_class = {.num_tiles = num_merge_tiles, .run_tile = run_merge};
