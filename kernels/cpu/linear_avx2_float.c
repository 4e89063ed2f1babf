/* placeholder */
#include "linear.h"

#if !HAS_AVX512
#include "vector.h"

void avx2_float_tile(const linear_args *args, const linear_tile *tile) {
    _Alignas(64) float out[MAX_TILE_PANELS][LANES];
    const int is_bf16 = args->weight.dtype == BF16;
    const int64_t bytes = panel_bytes(&args->weight), x_bytes = args->x_stride * (is_bf16 ? 2 : 4);
    for (int64_t r = 0; r < tile->num_rows; r++) {
        const char *x = (const char *)args->x + (tile->first_row + r) * x_bytes;
        for (int64_t p = 0; p < tile->num_panels; p++) {
            floats sum = floats_of(0);
            for (int64_t at = 0; at < bytes; at += 64) {
                int32_t word;
                memcpy(&word, x + at / LANES, 4);
                const ints w = load_ints(tile->panels + p * bytes + at);
                sum = is_bf16 ? add_bf16_products(sum, w, ints_of(word)) : multiply_add(as_floats(w), as_floats(ints_of(word)), sum);
            }
            store(out[p], sum);
        }
        linear_finish(args, tile->first_row + r, 1, tile->first_panel, tile->num_panels, (struct sums){out[0], 0, LANES});
    }
}
#endif
