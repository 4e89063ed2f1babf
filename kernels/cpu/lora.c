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

/* Sums + x's number k by a panel's, with bfloat16 its pair of numbers k by the panel's pairs. */
INLINE floats add_products(const int is_bf16, floats sums, const char *x, int64_t k, const char *panel) {
    int32_t pair;
    if (!is_bf16) return multiply_add(floats_of(((const float *)x)[k]), load((const float *)panel), sums);
    memcpy(&pair, x + 4 * k, sizeof(pair));
    return add_bf16_products(sums, ints_of(pair), load_ints(panel));
}

/* Rows of x by neighbouring panels into `to`, `at` bytes to a row: floats are added to what is there, or sums are stored
 * as what the factors are. `depth` counts numbers, or pairs; `left` outputs are true, beginning at the first panel. */
typedef struct block {
    const char *x;
    const int64_t *x_at; /* bytes, of each row */
    const char *w;
    int64_t depth;
    char *to;
    const int64_t *to_at;
    int64_t left;
    int is_bf16, is_added;
} block;

INLINE void multiply_rows(const int rows, const int panels, const int is_bf16, const block *b,
                          floats sum[MAX_ROWS][MAX_PANELS]) {
    const char *from[MAX_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        from[r] = b->x + b->x_at[r];
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) sum[r][p] = floats_of(0);
    }
    for (int64_t k = 0; k < b->depth; k++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int p = 0; p < panels; p++)
                sum[r][p] = add_products(is_bf16, sum[r][p], from[r], k, b->w + (p * b->depth + k) * 64);
}

INLINE void finish_rows(const int rows, const int panels, const block *b, floats sum[MAX_ROWS][MAX_PANELS]) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) {
            char *to = b->to + b->to_at[r];
            const int64_t left = b->left - p * LANES;
            if (b->is_added) {
                float *y = (float *)to + p * LANES;
                store_first(y, left, add(load_first(y, left), sum[r][p]));
            } else if (b->is_bf16) {
                store_first_uint16((uint16_t *)to + p * LANES, left, to_bf16(sum[r][p]));
            } else {
                store_first((float *)to + p * LANES, left, sum[r][p]);
            }
        }
}

#define DEFINE(rows, panels)                                                                                 \
    static void rows_##rows##_##panels(const block *b) {                                                     \
        floats sum[MAX_ROWS][MAX_PANELS];                                                                    \
        if (b->is_bf16)                                                                                      \
            multiply_rows(rows, panels, 1, b, sum);                                                          \
        else                                                                                                 \
            multiply_rows(rows, panels, 0, b, sum);                                                          \
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

/* Of factors, in bytes. */
static int64_t number_size(const lora_args *a) { return a->dtype == BF16 ? 2 : 4; }

/* Steps along `numbers`: themselves, or pairs. */
static int64_t depth_of(const lora_args *a, int64_t numbers) {
    return a->dtype == BF16 ? ceil_div(numbers, 2) : numbers;
}

/* Panels of A there can be. */
static int64_t most_shrink_panels(const lora_args *a) { return a->shrunk_stride / LANES; }

static int64_t shrink_num_tiles(const void *args, const step *step, int num_threads) {
    return step->num_groups * ceil_div(most_shrink_panels(args), MAX_PANELS);
}

/* Whether a row can be multiplied where it lies: it is what the factors are, in whole pairs. */
static int is_in_place(const lora_args *a) { return a->x_dtype == a->dtype && (a->dtype == F32 || a->in % 2 == 0); }

/* A row's numbers as floats: where they lie, or in `copy`. */
static const float *read_floats(const lora_args *a, int64_t row, float *copy) {
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

/* A row as what the factors are, from `copy` on, with a zero behind; `floats` has room for it, too. */
static void copy_row(const lora_args *a, int64_t row, char *copy, float *floats) {
    const float *numbers = read_floats(a, row, a->dtype == F32 ? (float *)copy : floats);
    if (a->dtype == BF16) {
        narrow_row(numbers, (uint16_t *)copy, a->in);
        ((uint16_t *)copy)[a->in] = 0;
    }
}

static void shrink_run_tile(const void *untyped, const step *step, int64_t tile, int thread, int num_threads) {
    const lora_args *a = untyped;
    const int64_t per_group = ceil_div(most_shrink_panels(a), MAX_PANELS), group = tile / per_group;
    const int64_t panel = tile % per_group * MAX_PANELS;
    const lora_weight *weight = &a->slots[step->group_slots[group]];
    const int64_t num_panels = a->num_parts * weight->rank / LANES;
    if (panel >= num_panels) return;
    const int64_t first = step->group_starts[group], num_rows = step->group_starts[group + 1] - first;
    const int64_t size = number_size(a), copy_bytes = (a->in + LANES) * 4, x_bytes = a->x_stride * size;
    char *copies = is_in_place(a) ? NULL : scratch((num_rows + 1) * copy_bytes);
    int64_t x_at[LORA_GROUP_ROWS], to_at[LORA_GROUP_ROWS];
    for (int64_t i = 0; i < num_rows; i++) {
        const int64_t row = step->group_rows[first + i];
        if (copies) copy_row(a, row, copies + i * copy_bytes, (float *)(copies + num_rows * copy_bytes));
        x_at[i] = copies ? i * copy_bytes : row * x_bytes;
        to_at[i] = row * a->shrunk_stride * 4;
    }
    const int64_t depth = depth_of(a, a->in);
    const block block = {.x = copies ? copies : a->x, .x_at = x_at, .w = (const char *)weight->a + panel * depth * 64,
                         .depth = depth, .to = (char *)a->shrunk + panel * LANES * size, .to_at = to_at,
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
        x_at[i] = step->group_rows[first + i] * a->shrunk_stride * 4;
        to_at[i] = step->group_rows[first + i] * a->y_stride * 4;
    }
    const int64_t depth = depth_of(a, weight->rank);
    for (int64_t panel = begin; panel < end;) {
        const int64_t part = part_of(a, panel);
        const int64_t panels = MAX_PANELS == 2 && panel + 1 < end && part_of(a, panel + 1) == part ? 2 : 1;
        const block block = {.x = (const char *)a->shrunk + part * weight->rank * number_size(a), .x_at = x_at,
                             .w = (const char *)weight->b + panel * depth * 64, .depth = depth,
                             .to = (char *)(a->y + panel * LANES), .to_at = to_at,
                             .left = a->out - panel * LANES, .is_bf16 = a->dtype == BF16, .is_added = 1};
        multiply_group(block, num_rows, panels);
        panel += panels;
    }
}

const op_class lora_shrink_class = {shrink_num_tiles, shrink_run_tile, NULL};
const op_class lora_expand_class = {expand_num_tiles, expand_run_tile, NULL};
