// The small float32 ops between two matmuls. Each is one pass, written as plain loops, which the compiler
// vectorises for this machine. Threads help if there is more than one unit of work.

#include "cpu.h"

enum { UNIT_ELEMENTS = 1 << 14 };    // elements of a unit: smaller ones are not worth a thread's help

static float rms_scale(const float *x, int n, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < n; i++) squares += x[i] * x[i];
    return 1 / sqrtf(squares / (float)n + eps);
}

// The rows of one op, and how they are cut into units.
typedef struct {
    const float *x, *weight, *next_weight, *cos_sin, *q_weight, *k_weight;
    const int32_t *positions, *state_rows;
    const Cache *cache;
    float *residual, *out;
    const Rope *rope;
    float eps, next_eps, cap;
    int rows, n, activation, gates;
    void (*row)(const void *rows, int64_t r);
} Rows;

static void rows_unit(void *shared, int unit, int thread) {
    const Rows *op = shared;
    const int each = UNIT_ELEMENTS / op->n + 1, last = (unit + 1) * each;
    (void)thread;
    for (int64_t r = unit * each; r < (last < op->rows ? last : op->rows); r++) op->row(op, r);
}

static void each_row(Rows op) { parallel(rows_unit, &op, (op.rows + UNIT_ELEMENTS / op.n) / (UNIT_ELEMENTS / op.n + 1)); }

static void rms_norm_row(const void *shared, int64_t r) {
    const Rows *op = shared;
    const int n = op->n;
    float *sum = op->residual + r * n, *y = op->out + r * n;
    if (op->x)
        for (int i = 0; i < n; i++) sum[i] += op->x[r * n + i];
    float scale = rms_scale(sum, n, op->eps);
    for (int i = 0; i < n; i++) y[i] = sum[i] * scale * op->weight[i];
}

// residual += x, unless x is null; then out = residual / rms(residual) * weight. All are [rows, n] and
// contiguous. out may be x.
void shoal_rms_norm(const float *x, float *residual, const float *weight, float eps, int rows, int n, float *out) {
    each_row((Rows){.x = x, .residual = residual, .weight = weight, .eps = eps, .rows = rows, .n = n, .out = out, .row = rms_norm_row});
}

static void add_normed_row(const void *shared, int64_t r) {
    const Rows *op = shared;
    const int n = op->n;
    const float *x = op->x + r * n;
    float *sum = op->residual + r * n, *y = op->out + r * n, scale = rms_scale(x, n, op->eps);
    for (int i = 0; i < n; i++) sum[i] += x[i] * scale * op->weight[i];
    if (!op->next_weight) return;
    scale = rms_scale(sum, n, op->next_eps);
    for (int i = 0; i < n; i++) y[i] = sum[i] * scale * op->next_weight[i];
}

// residual += x / rms(x) * weight; then, unless next_weight is null, out = residual / rms(residual) *
// next_weight. All are [rows, n] and contiguous. out may be x.
void shoal_add_normed(const float *x, const float *weight, float eps, float *residual, const float *next_weight, float next_eps, int rows, int n,
                      float *out) {
    each_row((Rows){.x = x, .weight = weight, .eps = eps, .residual = residual, .next_weight = next_weight, .next_eps = next_eps, .rows = rows,
                    .n = n, .out = out, .row = add_normed_row});
}

static void gate_mul_row(const void *shared, int64_t r) {
    const Rows *op = shared;
    const int n = op->n;
    const float *restrict gate = op->x + r * 2 * n, *restrict up = gate + n;
    float *restrict y = op->out + r * n;
    if (op->activation == SILU) {
        for (int i = 0; i < n; i++) y[i] = gate[i] / (1 + fast_exp(gate[i] > -80 ? -gate[i] : 80)) * up[i];
        return;
    }
    // (1 + tanh(u)) / 2 is the sigmoid of 2u.
    for (int i = 0; i < n; i++) {
        float twice = gate[i] * (1.5957691216f + 0.0713548163f * gate[i] * gate[i]);
        y[i] = gate[i] / (1 + fast_exp(twice > -80 ? -twice : 80)) * up[i];
    }
}

// out[r, i] = activation(x[r, i]) * x[r, n + i].
void shoal_gate_mul(const float *x, int rows, int n, int activation, float *out) {
    each_row((Rows){.x = x, .rows = rows, .n = n, .activation = activation, .out = out, .row = gate_mul_row});
}

static void soft_cap_unit(void *shared, int unit, int thread) {
    const Rows *op = shared;
    const int64_t first = (int64_t)unit * UNIT_ELEMENTS, last = first + UNIT_ELEMENTS, all = (int64_t)op->rows * op->n;
    const float cap = op->cap;
    (void)thread;
    // tanh(x) is 2 sigmoid(2x) - 1.
    for (int64_t i = first; i < (last < all ? last : all); i++) {
        float twice = 2 * op->out[i] / cap;
        op->out[i] = cap * (2 / (1 + fast_exp(twice > -80 ? -twice : 80)) - 1);
    }
}

// x = cap * tanh(x / cap), in place. x is [rows, n] and contiguous.
void shoal_soft_cap(float *x, int rows, int n, float cap) {
    Rows op = {.out = x, .rows = rows, .n = n, .cap = cap};
    parallel(soft_cap_unit, &op, (int)(((int64_t)rows * n + UNIT_ELEMENTS - 1) / UNIT_ELEMENTS));
}

// Rotates the first d of a head's n numbers, which are pairs (i, i + d / 2).
static void norm_rope(float *restrict x, int n, int d, const float *weight, float eps, const float *restrict cos_sin) {
    float *restrict second = x + d / 2;
    const float *restrict sine = cos_sin + d / 2;
    if (weight) {
        float scale = rms_scale(x, n, eps);
        for (int i = 0; i < n; i++) x[i] = x[i] * scale * weight[i];
    }
    for (int i = 0; i < d / 2; i++) {
        float a = x[i], b = second[i];
        x[i] = a * cos_sin[i] - b * sine[i];
        second[i] = b * cos_sin[i] + a * sine[i];
    }
}

// Writes a head's numbers from element `at` of the cache on. `scale` is the index of their scale.
static void store(const Cache *c, int64_t at, const float *x, int scale) {
    if (!c->scales) {
        memcpy((float *)c->data + at, x, (size_t)c->head_dim * 4);
        return;
    }
    uint8_t *slot = (uint8_t *)c->data + at;
    for (int i = 0; i < c->head_dim; i++) slot[i] = to_e4m3(x[i] / c->scales[scale]);
}

static void rope_row(const void *shared, int64_t t) {
    const Rows *op = shared;
    const Cache *c = op->cache;
    const int n = c->head_dim, heads = c->num_heads, kv_heads = c->num_kv_heads;
    const int64_t position = op->positions[t], row = op->state_rows[t];
    if (position < 0) return;
    const Rope *rope = op->rope;
    float *x = op->out + t * op->n;
    for (int h = 0; h < heads + (rope->q_alone ? 0 : kv_heads); h++)
        norm_rope(x + h * n, n, rope->rotary, h < heads ? op->q_weight : op->k_weight, op->eps, op->cos_sin + position * rope->rotary);
    if (rope->beta) {
        const float factor = 1 + rope->beta * log1pf((float)((position + rope->offset) / rope->length));
        for (int i = 0; i < heads * n; i++) x[i] *= factor;
    }
    if (rope->q_alone) return;
    for (int g = heads + kv_heads; rope->v_norm && g < heads + 2 * kv_heads; g++) {
        const float scale = rms_scale(x + g * n, n, op->eps);
        for (int i = 0; i < n; i++) x[g * n + i] *= scale;
    }
    if (row < 0) return;
    const int64_t block = c->tables[row * c->table_stride + position / c->block_size];
    const int64_t slot = block * c->block_stride + position % c->block_size * n;
    for (int g = 0; g < kv_heads; g++) {
        store(c, slot + g * c->head_stride, x + (heads + g) * n, g);
        store(c, slot + c->kv_stride + g * c->head_stride, x + (heads + kv_heads + g) * n, kv_heads + g);
    }
}

// Works on qkv [tokens, (H + 2G) * N] in place, and writes k and v into the cache as well. Padding (a row or
// position below 0) is left alone. With rope->q_alone there is q alone, and nothing is written to the cache.
void shoal_qk_norm_rope_store(const Cache *c, float *qkv, int tokens, const int32_t *positions, const int32_t *rows, const float *cos_sin,
                              const float *q_weight, const float *k_weight, float eps, const Rope *rope) {
    const int all_heads = c->num_heads + (rope->q_alone ? 0 : 2 * c->num_kv_heads);
    each_row((Rows){.cache = c, .out = qkv, .rows = tokens, .n = all_heads * c->head_dim, .positions = positions, .state_rows = rows,
                    .cos_sin = cos_sin, .q_weight = q_weight, .k_weight = k_weight, .eps = eps, .rope = rope, .row = rope_row});
}

static float positive(float gate) { return gate > 0 ? gate : 0; }

static void gate_output_row(const void *shared, int64_t r) {
    const Rows *op = shared;
    const int n = op->n, each = n / op->gates;
    const float *restrict x = op->residual + r * n, *restrict gate = op->x + r * op->gates;
    float *restrict y = op->out + r * n;
    for (int g = 0; g < op->gates; g++) {
        const float small = fast_exp(-fabsf(gate[g]));    // for both functions, as it can't overflow
        const float factor = op->activation ? (gate[g] < 0 ? small : 1) / (1 + small) : positive(gate[g]) + log1pf(small);
        for (int i = 0; i < each; i++) y[g * each + i] = x[g * each + i] * factor;
    }
}

// out[r, i] = x[r, i] * sigmoid or softplus of gate[r, i * gates / n].
void shoal_gate_output(float *x, const float *gate, int rows, int n, int gates, int sigmoid, float *out) {
    each_row((Rows){.residual = x, .x = gate, .rows = rows, .n = n, .gates = gates, .activation = sigmoid, .out = out, .row = gate_output_row});
}
