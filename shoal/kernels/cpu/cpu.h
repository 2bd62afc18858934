// Declarations that the C kernels share. build.py repeats the structs for ctypes.

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

// Keeps a SIMD value in a register at this point. Without it gcc reorders the inner loops until sums are
// spilled to memory and loads are repeated.
#ifdef __AVX2__
#define KEEP(x) asm("" : "+x"(x))
#else
#define KEEP(x)
#endif

// `parallel` does every unit once, on the caller's thread and on the threads that come to help. `thread`
// names the thread, and is below max_threads().
typedef void (*Work)(void *shared, int unit, int thread);
void parallel(Work work, void *shared, int units);
int max_threads(void);

// A matrix of weights, [outs, cols], in the layout of linear.c.
typedef struct {
    uint8_t *data;
    int32_t outs, cols, bits;
} Packed;

// One layer's paged cache. Strides are in elements, which are floats or, if there are scales, e4m3 numbers:
// numbers of kv head g are to be multiplied by scales[g] (keys) and scales[num_kv_heads + g] (values).
typedef struct {
    void *data;
    const float *scales;
    const int32_t *tables;
    int64_t table_stride, block_stride, kv_stride, head_stride;
    int32_t block_size, num_heads, num_kv_heads, head_dim;
} Cache;

// A step's sequences: for each its state row (-1: padding), its first query token (there is one entry more
// than sequences), and the number of its keys, this step's included.
typedef struct {
    const int32_t *rows, *query_starts, *kv_lens;
    int32_t num_seqs, max_kv_len;
} KvSequences;

// The activations of a gated MLP.
enum { SILU, GELU_TANH };

// What a layer does to its heads before attention. The first `rotary` numbers of a head are rotated; queries are
// multiplied by 1 + beta * ln(1 + (position + offset) / length), unless beta is 0.
typedef struct {
    float beta;
    int32_t rotary, length, offset, v_norm, q_alone;
} Rope;

int shoal_linear(const Packed *w, const float *x, int rows, const float *bias, float *y);
void shoal_rms_norm(const float *x, float *residual, const float *weight, float eps, int rows, int n, float *out);
void shoal_add_normed(const float *x, const float *weight, float eps, float *residual, const float *next_weight, float next_eps, int rows, int n, float *out);
void shoal_gate_mul(const float *x, int rows, int n, int activation, float *out);
void shoal_qk_norm_rope_store(const Cache *c, float *qkv, int tokens, const int32_t *positions, const int32_t *rows, const float *cos_sin,
                              const float *q_weight, const float *k_weight, float eps, const Rope *rope);
int shoal_attention(const Cache *c, const KvSequences *s, const float *q, int64_t q_stride, int window, float scale, float softcap,
                    const float *sinks, float *out);

// e^x for x <= 88, with a relative error of 2e-7. It is 2^n times a polynomial on [-ln2 / 2, ln2 / 2], whose
// coefficients are from Cephes. Below -87 it stays at e^-87.
static inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

static const float E4M3_MAX = 448, E4M3_NORMAL = 0x1p-6f;    // its largest number, and its smallest normal one

// Rounds to nearest even. What is beyond e4m3's range becomes its largest number.
static inline uint8_t to_e4m3(float x) {
    uint32_t bits, one = 0x46800000;    // `one` is 2^14, whose last bit is worth e4m3's smallest number, 2^-9.
    float size = fabsf(x), sum;
    if (x != x) return 0x7f;
    size = size < E4M3_MAX ? size : E4M3_MAX;
    sum = size + 0x1p14f;
    if (size < E4M3_NORMAL) memcpy(&bits, &sum, 4), bits -= one;
    else memcpy(&bits, &size, 4), bits = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    return (uint8_t)(bits | (signbit(x) ? 0x80 : 0));
}

// The exponent of e4m3 is biased by 7, float32's by 127. A subnormal number gets a leading one, which is
// subtracted again.
static inline float from_e4m3(uint8_t byte) {
    uint32_t size = byte & 0x7f, tiny = size < 8, bits = (size << 20) + ((120 + tiny) << 23);
    float x;
    if (size == 0x7f) bits = 0x7fc00000;
    memcpy(&x, &bits, 4);
    x -= tiny ? E4M3_NORMAL : 0;
    return byte & 0x80 ? -x : x;
}
