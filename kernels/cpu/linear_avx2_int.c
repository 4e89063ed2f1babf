/* placeholder */
#include "linear.h"

#if !HAS_AVX512
#include "vector.h"

void avx2_int8_tile(const linear_args *args, const linear_tile *tile) {
    _Alignas(64) float out[MAX_TILE_PANELS][LANES];
    const weight *w = &args->weight;
    const int64_t bytes = panel_bytes(w);
    for (int64_t r = 0; r < tile->num_rows; r++) {
        const int64_t row = tile->first_row + r;
        const int8_t *x = (const int8_t *)args->x + row * args->x_stride;
        for (int64_t p = 0; p < tile->num_panels; p++)
            for (int i = 0; i < LANES; i++) {
                int32_t sum = quantized_starts(x, w->in)[0];
                for (int64_t at = 0; at < bytes; at += 64)
                    for (int b = 0; b < 4; b++)
                        sum += x[at / 16 + b] * (int32_t)((const uint8_t *)tile->panels)[p * bytes + at + 4 * i + b];
                out[p][i] = (float)sum * w->scales[(tile->first_panel + p) * LANES + i] * args->x_scales[row];
            }
        linear_finish(args, row, 1, tile->first_panel, tile->num_panels, (struct sums){out[0], 0, LANES});
    }
}

void avx2_int4_tile(const linear_args *args, const linear_tile *tile) {
    _Alignas(64) float out[MAX_TILE_PANELS][LANES];
    const weight *w = &args->weight;
    const int64_t bytes = panel_bytes(w);
    for (int64_t r = 0; r < tile->num_rows; r++) {
        const int64_t row = tile->first_row + r;
        const int8_t *x = (const int8_t *)args->x + row * args->x_stride;
        for (int64_t p = 0; p < tile->num_panels; p++)
            for (int i = 0; i < LANES; i++) {
                float total = 0;
                for (int64_t g = 0; g < bytes / INT4_GROUP_BYTES; g++) {
                    const uint8_t *group = (const uint8_t *)tile->panels + p * bytes + g * INT4_GROUP_BYTES;
                    int32_t sum = quantized_starts(x, w->in)[1 + g];
                    for (int v = 0; v < 4; v++)
                        for (int b = 0; b < 4; b++) {
                            const uint8_t n = group[v * 64 + 4 * i + b];
                            sum += x[g * 32 + 8 * v + b] * (n & 15) + x[g * 32 + 8 * v + 4 + b] * (n >> 4);
                        }
                    uint16_t half;
                    memcpy(&half, group + 256 + 2 * i, 2);
                    total += (float)sum * _cvtsh_ss(half);
                }
                out[p][i] = total * args->x_scales[row];
            }
        linear_finish(args, row, 1, tile->first_panel, tile->num_panels, (struct sums){out[0], 0, LANES});
    }
}
#endif
