/* The tiles of attention and their merge. See attention.h for the order of operations. */
#include "attention.h"
#include "attention_keys.h"
#include "attention_products.h"
#include "exp2.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

/* Thread-own memory of a tile of M rows. */
typedef struct workspace {
    char *query;  /* [M, head_size] of the cache's dtype */
    char *scores; /* [M, KEY_TILE] float, then weights in the cache's dtype at the same stride */
    float *best, *total, *sums;             /* [M], [M], [M, head_size]: of this split */
    float *all_best, *all_total, *all_sums; /* of the splits before */
    float *new_best, *shrink;               /* [M padded to LANES] */
    char *copies;
} workspace;

/* `bytes` from `*next` on, 64-byte aligned. */
static void *take(char **next, int64_t bytes) {
    void *taken = *next;
    *next += ceil_div(bytes, 64) * 64;
    return taken;
}

static workspace open_workspace(const attention_args *a, int64_t M) {
    const int64_t padded = ceil_div(M, LANES) * LANES, copies = STRIPS * strip_bytes(a->cache_dtype, a->head_size);
    const int64_t bytes = M * (2 * a->head_size * 4 + SCORE_STRIDE + QUERY_STRIDE(0)) + 6 * padded * 4 + copies + 10 * 64;
    char *next = scratch(bytes);
    workspace w;
    w.query = take(&next, M * QUERY_STRIDE(a->cache_dtype == BF16));
    w.scores = take(&next, M * SCORE_STRIDE);
    w.sums = take(&next, M * a->head_size * 4);
    w.all_sums = take(&next, M * a->head_size * 4);
    w.best = take(&next, padded * 4), w.total = take(&next, padded * 4);
    w.all_best = take(&next, padded * 4), w.all_total = take(&next, padded * 4);
    w.new_best = take(&next, padded * 4), w.shrink = take(&next, padded * 4);
    w.copies = take(&next, copies);
    return w;
}

/* Row r · group + g of the workspace is head g of the item's row r. */
static void take_queries(const attention_args *a, const attention_tile *item, int64_t kv_head, char *out) {
    const int64_t bytes = a->head_size * element_bytes(a->cache_dtype), group = a->heads / a->kv_heads;
    const char *from = (const char *)a->query + (item->first_row * a->heads + kv_head * group) * bytes;
    for (int64_t row = 0; row < item->num_rows; row++)
        for (int64_t head = 0; head < group; head++, out += QUERY_STRIDE(a->cache_dtype == BF16))
            memcpy(out, from + (row * a->heads + head) * bytes, (size_t)bytes);
}

/* Scores of keys from `visible` on become −inf; returns the row's best. */
static float best_score(float *scores, int64_t num_strips, int64_t visible) {
    __m512 best = _mm512_set1_ps(-INFINITY);
    for (int64_t strip = 0; strip < num_strips; strip++, visible -= STRIP) {
        __m512 score = _mm512_load_ps(scores + strip * STRIP);
        if (visible < STRIP) {
            const __mmask16 seen = visible > 0 ? (__mmask16)((1u << visible) - 1) : 0;
            score = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, score);
            _mm512_store_ps(scores + strip * STRIP, score);
        }
        best = _mm512_max_ps(best, score);
    }
    return _mm512_reduce_max_ps(best);
}

/* Weights 2^(score − best) in place of the scores, in the products' dtype; returns their total. */
static inline __attribute__((always_inline)) float weigh(int is_bf16, float *scores, int64_t num_strips, float best) {
    const __m512 subtrahend = _mm512_set1_ps(best);
    __m512 total = _mm512_setzero_ps();
    for (int64_t strip = 0; strip < num_strips; strip++) {
        const __m512 weight = exp2_ps(_mm512_sub_ps(_mm512_load_ps(scores + strip * STRIP), subtrahend));
        total = _mm512_add_ps(total, weight);
        if (is_bf16)
            _mm256_store_si256((__m256i *)scores + strip, (__m256i)_mm512_cvtneps_pbh(weight));
        else
            _mm512_store_ps(scores + strip * STRIP, weight);
    }
    return _mm512_reduce_add_ps(total);
}

/* Take one key tile into the split's best, total and sums, for rows of M from `first` on. Row m sees `visible` +
 * m / group of its keys. */
static inline __attribute__((always_inline)) void attend_tile(int is_bf16, const attention_args *a, const workspace *w,
                                                              const key_tile *tile, const key_tile *next,
                                                              int64_t num_strips, int64_t first, int64_t M,
                                                              int64_t visible) {
    const int64_t size = a->head_size, group = a->heads / a->kv_heads;
    score_rows(is_bf16, w->query, tile, num_strips, first, M, size, w->scores);
    for (int64_t m = first; m < M; m++) {
        const float best = best_score((float *)(w->scores + m * SCORE_STRIDE), num_strips, visible + m / group);
        w->new_best[m] = best > w->best[m] ? best : w->best[m];
    }
    for (int64_t m = first / LANES * LANES; m < M; m += LANES) {
        const __m512 best = _mm512_load_ps(w->best + m), new_best = _mm512_load_ps(w->new_best + m);
        _mm512_store_ps(w->shrink + m, exp2_ps(_mm512_sub_ps(best, new_best)));
    }
    for (int64_t m = first; m < M; m++) {
        const float total = weigh(is_bf16, (float *)(w->scores + m * SCORE_STRIDE), num_strips, w->new_best[m]);
        w->total[m] = w->total[m] * w->shrink[m] + total;
        w->best[m] = w->new_best[m];
    }
    mix_rows(is_bf16, w->scores, tile, next, num_strips, first, M, size, w->shrink, w->sums);
}

/* Add a split's (best, total, sums) to those of the splits before it. */
static void add_split(float best, float total, const float *sums, int64_t head_size, float *all_best, float *all_total,
                      float *all_sums) {
    const float new_best = best > *all_best ? best : *all_best;
    _Alignas(64) float factors[LANES] = {*all_best - new_best, best - new_best};
    _mm512_store_ps(factors, exp2_ps(_mm512_load_ps(factors)));
    const __m512 old = _mm512_set1_ps(factors[0]), own = _mm512_set1_ps(factors[1]);
    for (int64_t i = 0; i < head_size; i += LANES) {
        const __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(all_sums + i), old);
        _mm512_storeu_ps(all_sums + i, _mm512_fmadd_ps(_mm512_loadu_ps(sums + i), own, kept));
    }
    *all_total = fmaf(total, factors[1], *all_total * factors[0]);
    *all_best = new_best;
}

/* Splits [from, to) of an item for one KV head, one after another. The result is in all_best, all_total, all_sums. */
static inline __attribute__((always_inline)) void attend_splits(int is_bf16, const attention_args *a,
                                                                const attention_tile *item, const key_source *source,
                                                                const workspace *w, int32_t from, int32_t to) {
    const int64_t group = a->heads / a->kv_heads, M = item->num_rows * group, size = a->head_size;
    const int32_t first_position = item->num_keys - item->num_rows;
    for (int32_t split = from; split < to; split++) {
        const int32_t end = (split + 1) * SPLIT < item->num_keys ? (split + 1) * SPLIT : item->num_keys;
        int64_t first = 0;
        for (int32_t start = split * SPLIT; start < end; start += KEY_TILE) {
            const int32_t num_keys = end - start < KEY_TILE ? end - start : KEY_TILE;
            const int64_t seeing = start > first_position ? (start - first_position) * group : 0;
            if (start == split * SPLIT) {
                first = seeing;
                for (int64_t m = first; m < M; m++) w->best[m] = -INFINITY, w->total[m] = 0;
                memset(w->sums + first * size, 0, (size_t)((M - first) * size * 4));
            }
            key_tile tile, next;
            find_strips(source, start, (int32_t)ceil_div(num_keys, STRIP), &tile);
            const int has_next = peek_keys(source, start + KEY_TILE, &next);
            attend_tile(is_bf16, a, w, &tile, has_next ? &next : &tile, ceil_div(num_keys, STRIP), seeing, M, first_position + 1 - start);
        }
        if (split == from) {
            memcpy(w->all_best, w->best, (size_t)M * 4);
            memcpy(w->all_total, w->total, (size_t)M * 4);
            memcpy(w->all_sums, w->sums, (size_t)(M * size) * 4);
            continue;
        }
        for (int64_t m = first; m < M; m++)
            add_split(w->best[m], w->total[m], w->sums + m * size, size, &w->all_best[m], &w->all_total[m],
                      w->all_sums + m * size);
    }
}

/* out = sums / total */
static void write_out(const attention_args *a, const float *sums, float total, int64_t row, int64_t head) {
    const int64_t at = row * a->out_stride + head * a->head_size;
    const __m512 divisor = _mm512_set1_ps(total);
    for (int64_t i = 0; i < a->head_size; i += LANES) {
        const __m512 value = _mm512_div_ps(_mm512_loadu_ps(sums + i), divisor);
        if (a->out_dtype == BF16)
            _mm256_storeu_si256((__m256i *)((uint16_t *)a->out + at + i), (__m256i)_mm512_cvtneps_pbh(value));
        else
            _mm512_storeu_ps((float *)a->out + at + i, value);
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

static void run_attention(const void *args, const step *step, int64_t tile, int thread, int num_threads) {
    const attention_args *a = args;
    const attention_tile *item = &((const attention_plan *)a->plan)->tiles[tile / a->kv_heads];
    const int64_t kv_head = tile % a->kv_heads, group = a->heads / a->kv_heads, M = item->num_rows * group;
    const workspace w = open_workspace(a, M);
    const kv_layout layout = kv_layout_of(a->cache_dtype, a->head_size, a->block_size, a->block_stride);
    const key_source source = {
        .cache = (const char *)a->cache + kv_head * layout.head_bytes,
        .blocks = step->block_tables + item->sequence * step->table_stride,
        .layout = layout,
        .dtype = a->cache_dtype,
        .block_size = (int32_t)a->block_size,
        .head_size = (int32_t)a->head_size,
        .num_keys = step->context_lens[item->sequence],
        .copies = w.copies,
    };
    take_queries(a, item, kv_head, w.query);
    const int32_t from = item->split < 0 ? 0 : item->split, to = item->split < 0 ? num_splits(item) : from + 1;
    if (a->cache_dtype == BF16)
        attend_splits(1, a, item, &source, &w, from, to);
    else
        attend_splits(0, a, item, &source, &w, from, to);
    for (int64_t m = 0; m < M; m++) {
        const int64_t row = m / group, head = kv_head * group + m % group;
        if (item->split < 0)
            write_out(a, w.all_sums + m * a->head_size, w.all_total[m], item->first_row + row, head);
        else if (from * SPLIT <= item->num_keys - item->num_rows + row)
            write_partial(a, &w, m, item->first_partial + from * item->num_rows + row, head);
    }
}

static int64_t num_attention_tiles(const void *args, const step *step, int num_threads) {
    const attention_args *a = args;
    return ((const attention_plan *)a->plan)->num_tiles * a->kv_heads;
}

const op_class attention_class = {.num_tiles = num_attention_tiles, .run_tile = run_attention};

/* All splits of an item for one KV head. */
static void run_merge(const void *args, const step *step, int64_t tile, int thread, int num_threads) {
    const attention_args *a = args;
    const attention_tile *item = &merges(a)[tile / a->kv_heads];
    const int64_t kv_head = tile % a->kv_heads, group = a->heads / a->kv_heads, size = a->head_size;
    for (int64_t m = 0; m < item->num_rows * group; m++) {
        const int64_t row = m / group, head = kv_head * group + m % group;
        const int64_t splits = ceil_div(item->num_keys - item->num_rows + row + 1, SPLIT);
        float *sums = partial_sums(a, item->first_partial + row, head);
        float *best = partial_best(a, item->first_partial + row, head);
        for (int64_t split = 1; split < splits; split++) {
            const int64_t partial = item->first_partial + split * item->num_rows + row;
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
