/* What the C kernels share: a step, an op, the table of kinds, and the threads that run them.
 *
 * A *program* is an array of ops that one call runs from first to last for one *step*. An op is cut into tiles; the
 * threads take tiles from a counter, and the next op begins when all tiles of this one are done (pool.c). What an op
 * works on is fixed when the program is built (its arguments point into buffers of fixed capacity); what differs from
 * step to step (how many rows, which sequences) is in `step`.
 *
 * Numbers: an op's result for a row depends on that row only. Each output element is summed in an order that depends
 * on the op's fixed sizes, never on the number of rows, tiles or threads.
 */
#pragma once
#include <stdint.h>

#define LANES 16 /* floats in a vector register */

/* Element types of activations, caches and weights. */
enum dtype { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, FP8 = 4 /* e4m3; of caches only */, INT4_ZEROS = 5 };

/* One step: num_rows tokens, chunk after chunk of num_sequences sequences. All arrays belong to the caller. */
typedef struct step {
    int64_t num_rows;
    int64_t num_sequences;
    int64_t num_wanted;          /* rows whose logits are wanted */
    const int64_t *token_ids;    /* [rows] */
    const int64_t *positions;    /* [rows] */
    const int64_t *slots;        /* [rows] block · block_size + offset; −1: not written */
    const int64_t *wanted_rows;  /* [wanted] */
    const int32_t *query_starts; /* [sequences + 1] first row of each chunk, and the end */
    const int32_t *wanted_starts; /* [sequences + 1] the same among the wanted rows: of a chunk, its last ones */
    const int32_t *context_lens; /* [sequences] keys of each sequence, its chunk's included */
    const int32_t *block_tables; /* [sequences, table_stride] */
    int64_t table_stride;
    /* Rows that have an adapter, at most LORA_GROUP_ROWS of one slot a group; and the same of the wanted rows, numbered
     * as these. */
    int64_t num_groups, num_wanted_groups;
    const int32_t *group_rows, *wanted_group_rows;     /* row numbers, group after group */
    const int32_t *group_starts, *wanted_group_starts; /* [groups + 1] */
    const int32_t *group_slots, *wanted_group_slots;   /* [groups] */
} step;

#define LORA_GROUP_ROWS 16

typedef struct op {
    int32_t kind; /* enum op_kind */
    int32_t num_calls;
    int64_t is_of_wanted; /* works on the wanted rows, gathered, in place of all: as if the step had no others */
    int64_t nanoseconds; /* from the end of the op before to the end of this one, over all calls */
    const void *args;    /* the kind's own struct */
} op;

enum op_kind {
    OP_EMBED = 0,
    OP_NORM = 1,
    OP_LINEAR = 2,
    OP_ROTARY_KV = 3,
    OP_ATTENTION_PLAN = 4,
    OP_ATTENTION = 5,
    OP_ATTENTION_MERGE = 6,
    OP_QUANTIZE = 7,
    OP_ARGMAX = 8,
    OP_ARGMAX_MERGE = 9,
    OP_CHOOSE = 10,
    OP_GATHER = 11,
    OP_LORA_SHRINK = 12,
    OP_LORA_EXPAND = 13,
    OP_GATE = 14,
    OP_ROUTE = 15,
    OP_GROUP = 16,
    OP_GATHER_PAIRS = 17,
    OP_EXPERTS = 18,
    OP_COMBINE = 19,
    NUM_OP_KINDS = 20,
};

/* How a kind is run. `thread` is in [0, num_threads). */
typedef struct op_class {
    int64_t (*num_tiles)(const void *args, const step *step, int num_threads);
    void (*run_tile)(const void *args, const step *step, int64_t tile, int thread, int num_threads);
    /* Called while `thread` waits for its turn: brings the bytes from `cursor` on of what it will read into its cache,
     * a few lines at a time. The new cursor, −1: that is all. NULL: nothing worth it. */
    int64_t (*prefetch)(const void *args, const step *step, int thread, int num_threads, int64_t cursor);
} op_class;

extern const op_class embed_class, norm_class, linear_class, rotary_kv_class, attention_plan_class, attention_class,
    attention_merge_class, quantize_class, argmax_class, argmax_merge_class, choose_class, gather_class,
    lora_shrink_class, lora_expand_class, gate_class, route_class, group_class, gather_pairs_class, experts_class,
    combine_class;

/* At least `bytes` of memory that belongs to the calling thread: 64-byte aligned, contents kept until it grows; no two users at a time. */
void *scratch(int64_t bytes);

/* Threads. `pool_open` starts num_threads − 1 of them (the caller of `pool_wait` is thread 0); NULL: no memory or no
 * threads. `pool_start` has them run ops 0 .. num_ops − 1 and returns; `pool_wait` takes part until all is done. One
 * run at a time: each start is followed by a wait. What `step` points to stays as it is until then. */
typedef struct pool pool;
extern const char *const isa_name; /* what this library was compiled for: avx2, avx512 or amx, as in build.py */
pool *pool_open(int32_t num_threads, int32_t max_ops);
void pool_start(pool *pool, op *ops, int32_t num_ops, const step *step);
void pool_wait(pool *pool);
void pool_close(pool *pool);

/* Bring a line that is going to be written into the cache, as this core's own. An instruction, not the builtin: GCC takes
 * a function that does nothing but prefetch for one without effect, and drops its calls. */
static inline void prefetch_to_write(const void *p) { __asm__ volatile("prefetchw %0" ::"m"(*(const char *)p)); }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
