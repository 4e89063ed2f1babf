/* Attention over one key tile by AMX tiles. See attention_amx.c. */
#pragma once
#include "amx.h"
#include "attention_products.h"

#if HAS_AMX
/* Whether an op's products are of tiles. */
static inline int uses_tiles(const attention_args *a) { return a->cache_dtype == BF16 && a->head_size % 32 == 0; }

/* Set the shapes that attend_on_tiles takes; once for each tile of the op. */
void shape_tiles(void);

/* Bring the keys of a tile near. */
void bring_keys(const key_tile *tile, int64_t head_size);

/* Take one key tile into best, total and sums of rows [first, M) of the workspace. Row m sees
 * the first `visible` + m / group of its keys, of these the last `window` if there is one. Keys of `next` are going to be read after that. */
void attend_on_tiles(const attention_args *a, const workspace *w, const key_tile *tile, const key_tile *next,
                     int64_t first, int64_t M, int64_t visible);
#else
static inline int uses_tiles(const attention_args *a) { return 0; }
static inline void shape_tiles(void) {}
static inline void bring_keys(const key_tile *tile, int64_t head_size) {}
static inline void attend_on_tiles(const attention_args *a, const workspace *w, const key_tile *tile,
                                   const key_tile *next, int64_t first, int64_t M, int64_t visible) {}
#endif
