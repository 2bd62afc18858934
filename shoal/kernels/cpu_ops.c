// The small float32 ops between two products, each one pass. Written as plain loops: the compiler vectorises them for the machine it
// runs on. Threads join only where the work outweighs waking them.

#include "cpu.h"

enum { PARALLEL_ELEMENTS = 1 << 15 };    // about 10 us of one core

static float rms_scale(const float *x, int n, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < n; i++) squares += x[i] * x[i];
    return 1 / sqrtf(squares / (float)n + eps);
}

// residual += x (unless x is null), out = residual / rms(residual) * weight; [rows, n] each, contiguous.
void shoal_rms_norm(const float *x, float *residual, const float *weight, float eps, int rows, int n, float *out) {
#pragma omp parallel for if ((int64_t)rows * n > PARALLEL_ELEMENTS)
    for (int r = 0; r < rows; r++) {
        float *sum = residual + (int64_t)r * n, *y = out + (int64_t)r * n;
        if (x)
            for (int i = 0; i < n; i++) sum[i] += x[(int64_t)r * n + i];
        float scale = rms_scale(sum, n, eps);
        for (int i = 0; i < n; i++) y[i] = sum[i] * scale * weight[i];
    }
}

// out[r, i] = silu(x[r, i]) * x[r, n + i].
void shoal_silu_mul(const float *x, int rows, int n, float *out) {
#pragma omp parallel for if ((int64_t)rows * n > PARALLEL_ELEMENTS)
    for (int r = 0; r < rows; r++) {
        const float *restrict gate = x + (int64_t)r * 2 * n, *restrict up = gate + n;
        float *restrict y = out + (int64_t)r * n;
        for (int i = 0; i < n; i++) y[i] = gate[i] / (1 + fast_exp(gate[i] > -80 ? -gate[i] : 80)) * up[i];
    }
}

static void norm_rope(float *restrict x, int n, const float *weight, float eps, const float *restrict cos_sin) {
    float *restrict second = x + n / 2;
    const float *restrict sine = cos_sin + n / 2;
    if (weight) {
        float scale = rms_scale(x, n, eps);
        for (int i = 0; i < n; i++) x[i] = x[i] * scale * weight[i];
    }
    for (int i = 0; i < n / 2; i++) {
        float a = x[i], b = second[i];
        x[i] = a * cos_sin[i] - b * sine[i];
        second[i] = b * cos_sin[i] + a * sine[i];
    }
}

// qkv [tokens, (H + 2G) * N], in place; k and v also into the cache. Padding (a row or position below 0) is left alone.
void shoal_qk_norm_rope_store(const Cache *c, float *qkv, int tokens, const int32_t *positions, const int32_t *rows, const float *cos_sin,
                              const float *q_weight, const float *k_weight, float eps) {
    const int n = c->head_dim, heads = c->num_heads, kv_heads = c->num_kv_heads, width = (heads + 2 * kv_heads) * n;
#pragma omp parallel for if ((int64_t)tokens * width > PARALLEL_ELEMENTS)
    for (int t = 0; t < tokens; t++) {
        const int64_t position = positions[t], row = rows[t];
        if (position < 0) continue;
        float *x = qkv + (int64_t)t * width;
        for (int h = 0; h < heads + kv_heads; h++) norm_rope(x + h * n, n, h < heads ? q_weight : k_weight, eps, cos_sin + position * n);
        if (row < 0) continue;
        const int64_t block = c->tables[row * c->table_stride + position / c->block_size];
        float *slot = c->data + block * c->block_stride + position % c->block_size * n;
        for (int g = 0; g < kv_heads; g++) {
            memcpy(slot + g * c->head_stride, x + (heads + g) * n, (size_t)n * 4);
            memcpy(slot + c->kv_stride + g * c->head_stride, x + (heads + kv_heads + g) * n, (size_t)n * 4);
        }
    }
}
