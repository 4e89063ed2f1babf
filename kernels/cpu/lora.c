/* Adapters of a linear: y += B · (A · x), each row with the factors of its own adapter (ops.h).
 *
 * OP_LORA_SHRINK makes A · x of all rows that have an adapter, OP_LORA_EXPAND adds B · that to y. Rows of one adapter
 * come in groups, and a tile is one group times some panels, so that factors are read once a group. A sum is one chain of
 * multiply-adds along its depth, whatever the number of rows, tiles and threads.
 *
 * MAX_ROWS × MAX_PANELS accumulators stay in registers, and each loaded panel is multiplied with as many rows.
 */
#include "rows.h"

#if HAS_AVX512
#define MAX_ROWS 8
#define MAX_PANELS 2
#else
#define MAX_ROWS 4
#define MAX_PANELS 1
#endif
/* Panels of a tile of OP_LORA_EXPAND: some microseconds of work at rank 16. */
#define EXPAND_PANELS 32

#define INLINE static inline __attribute__((always_inline))

INLINE floats load_panel(const int is_bf16, const char *at) {
    return is_bf16 ? from_bf16(_mm256_loadu_si256((const __m256i *)at)) : load((const float *)at);
}

/* out[r][p] = x[r] · panel p, over `depth` numbers; `x_stride` and `out_stride` floats between rows. */
INLINE void multiply_rows(const int rows, const int panels, const int is_bf16, const float *x, const int64_t *x_at,
                          const char *w, int64_t depth, floats sum[MAX_ROWS][MAX_PANELS]) {
    const int64_t step = is_bf16 ? 2 * LANES : 4 * LANES;
    const float *from[MAX_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        from[r] = x + x_at[r];
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) sum[r][p] = floats_of(0);
    }
    for (int64_t k = 0; k < depth; k++) {
        floats panel[MAX_PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) panel[p] = load_panel(is_bf16, w + (p * depth + k) * step);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const floats number = floats_of(from[r][k]);
#pragma GCC unroll 2
            for (int p = 0; p < panels; p++) sum[r][p] = multiply_add(number, panel[p], sum[r][p]);
        }
    }
}

/* Rows of x by neighbouring panels into `to`, whose row i begins at to + to_at[i]: stored, or added to what is there.
 * `left` outputs are true, beginning at the first panel. */
typedef struct block {
    const float *x;
    const int64_t *x_at;
    const char *w;
    int64_t depth;
    float *to;
    const int64_t *to_at;
    int64_t left;
    int is_bf16, is_added;
} block;

INLINE void finish_rows(const int rows, const int panels, const block *b, floats sum[MAX_ROWS][MAX_PANELS]) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) {
            float *to = b->to + b->to_at[r] + p * LANES;
            const int64_t left = b->left - p * LANES;
            store_first(to, left, b->is_added ? add(load_first(to, left), sum[r][p]) : sum[r][p]);
        }
}

#define DEFINE(rows, panels)                                                                                 \
    static void rows_##rows##_##panels(const block *b) {                                                     \
        floats sum[MAX_ROWS][MAX_PANELS];                                                                    \
        if (b->is_bf16)                                                                                      \
            multiply_rows(rows, panels, 1, b->x, b->x_at, b->w, b->depth, sum);                              \
        else                                                                                                 \
            multiply_rows(rows, panels, 0, b->x, b->x_at, b->w, b->depth, sum);                              \
        finish_rows(rows, panels, b, sum);                                                                   \
    }
DEFINE(1, 1)
DEFINE(2, 1)
DEFINE(4, 1)
#if HAS_AVX512
DEFINE(8, 1)
DEFINE(1, 2)
DEFINE(2, 2)
DEFINE(4, 2)
DEFINE(8, 2)
#endif

typedef void block_fn(const block *b);

static block_fn *const BLOCKS[MAX_PANELS][MAX_ROWS + 1] = {
    {[1] = rows_1_1, [2] = rows_2_1, [4] = rows_4_1,
#if HAS_AVX512
     [8] = rows_8_1},
    {[1] = rows_1_2, [2] = rows_2_2, [4] = rows_4_2, [8] = rows_8_2},
#else
    },
#endif
};

/* All rows of a group by `num_panels` (at most MAX_PANELS) panels. */
static void multiply_group(block b, int64_t num_rows, int64_t num_panels) {
    while (num_rows > 0) {
        int64_t rows = MAX_ROWS;
        while (rows > num_rows) rows /= 2;
        BLOCKS[num_panels - 1][rows](&b);
        b.x_at += rows, b.to_at += rows, num_rows -= rows;
    }
}

static int64_t panel_stride(const lora_args *a, int64_t depth) { return depth * LANES * (a->dtype == BF16 ? 2 : 4); }

/* Panels of A there can be. */
static int64_t most_shrink_panels(const lora_args *a) { return a->shrunk_stride / LANES; }

static int64_t shrink_num_tiles(const void *args, const step *step, int num_threads) {
    return step->num_groups * ceil_div(most_shrink_panels(args), MAX_PANELS);
}

/* The row as floats: where it lies, or in `copy`. */
static const float *read_row(const lora_args *a, int64_t row, float *copy) {
    if (a->x_dtype == F32) return (const float *)a->x + row * a->x_stride;
    if (a->x_dtype == BF16) {
        widen_row((const uint16_t *)a->x + row * a->x_stride, copy, a->in);
        return copy;
    }
    const int8_t *numbers = (const int8_t *)a->x + row * a->x_stride; /* padded to 64 */
    const floats scale = floats_of(a->x_scales[row]);
    for (int64_t k = 0; k < a->in; k += LANES)
        store_first(copy + k, a->in - k, multiply(load_int8(numbers + k), scale));
    return copy;
}

static void shrink_run_tile(const void *untyped, const step *step, int64_t tile, int thread, int num_threads) {
    const lora_args *a = untyped;
    const int64_t per_group = ceil_div(most_shrink_panels(a), MAX_PANELS), group = tile / per_group;
    const int64_t panel = tile % per_group * MAX_PANELS;
    const lora_weight *weight = &a->slots[step->group_slots[group]];
    const int64_t num_panels = a->num_parts * weight->rank / LANES;
    if (panel >= num_panels) return;
    const int64_t first = step->group_starts[group], num_rows = step->group_starts[group + 1] - first;
    const int64_t in = ceil_div(a->in, LANES) * LANES;
    float *copies = a->x_dtype == F32 ? NULL : scratch(num_rows * in * 4);
    const float *origin = copies ? copies : a->x;
    int64_t x_at[LORA_GROUP_ROWS], to_at[LORA_GROUP_ROWS];
    for (int64_t i = 0; i < num_rows; i++) {
        const int64_t row = step->group_rows[first + i];
        x_at[i] = read_row(a, row, copies ? copies + i * in : NULL) - origin;
        to_at[i] = row * a->shrunk_stride;
    }
    const block block = {.x = origin, .x_at = x_at, .w = (const char *)weight->a + panel * panel_stride(a, a->in),
                         .depth = a->in, .to = a->shrunk + panel * LANES, .to_at = to_at,
                         .left = (num_panels - panel) * LANES, .is_bf16 = a->dtype == BF16, .is_added = 0};
    multiply_group(block, num_rows, num_panels - panel < MAX_PANELS ? num_panels - panel : MAX_PANELS);
}

static int64_t expand_num_tiles(const void *untyped, const step *step, int num_threads) {
    const lora_args *a = untyped;
    return step->num_groups * ceil_div(ceil_div(a->out, LANES), EXPAND_PANELS);
}

/* The part that a panel of outputs belongs to. */
static int64_t part_of(const lora_args *a, int64_t panel) {
    if (a->is_interleaved) return panel % 2;
    return (panel >= a->second_part) + (panel >= a->third_part);
}

static void expand_run_tile(const void *untyped, const step *step, int64_t tile, int thread, int num_threads) {
    const lora_args *a = untyped;
    const int64_t all = ceil_div(a->out, LANES), per_group = ceil_div(all, EXPAND_PANELS), group = tile / per_group;
    const lora_weight *weight = &a->slots[step->group_slots[group]];
    if (!weight->rank) return;
    const int64_t first = step->group_starts[group], num_rows = step->group_starts[group + 1] - first;
    const int64_t begin = tile % per_group * EXPAND_PANELS, end = begin + EXPAND_PANELS < all ? begin + EXPAND_PANELS : all;
    int64_t x_at[LORA_GROUP_ROWS], to_at[LORA_GROUP_ROWS];
    for (int64_t i = 0; i < num_rows; i++) {
        x_at[i] = step->group_rows[first + i] * a->shrunk_stride;
        to_at[i] = step->group_rows[first + i] * a->y_stride;
    }
    for (int64_t panel = begin; panel < end;) {
        const int64_t part = part_of(a, panel);
        const int64_t panels = MAX_PANELS == 2 && panel + 1 < end && part_of(a, panel + 1) == part ? 2 : 1;
        const block block = {.x = a->shrunk + part * weight->rank, .x_at = x_at,
                             .w = (const char *)weight->b + panel * panel_stride(a, weight->rank),
                             .depth = weight->rank, .to = a->y + panel * LANES, .to_at = to_at,
                             .left = a->out - panel * LANES, .is_bf16 = a->dtype == BF16, .is_added = 1};
        multiply_group(block, num_rows, panels);
        panel += panels;
    }
}

const op_class lora_shrink_class = {shrink_num_tiles, shrink_run_tile, NULL};
const op_class lora_expand_class = {expand_num_tiles, expand_run_tile, NULL};
