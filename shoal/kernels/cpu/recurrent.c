// Recurrent layers, token by token. A unit of work is a part of one head's state: it is read once, stays in the
// core's first cache as float32 while all tokens of the step pass, and is written once. So a decode costs one pass
// over the states, and a prompt needs no chunks: its arithmetic is a small part of the matmuls' around it.

#include "cpu.h"

#define INLINE static inline __attribute__((always_inline))
#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
// REGISTERS of sums hide the latency of multiply-adds.
enum { REGISTERS = 4, COLUMNS = REGISTERS * LANES, STATE_ROWS = 32, CHANNELS = 64, TOKENS = 64, MAX_WIDTH = 16, AHEAD = 4, NORM_ELEMENTS = 1 << 13 };
typedef float Vector __attribute__((vector_size(4 * LANES), may_alias));

// A step's sequences and the memory of their states. Row -1 is the spare one. Strides are in numbers. With drafts (draft_spans.py), which
// the first num_drafting sequences may have, inputs are kept in `kept`: [row, slots, kept_size].
typedef struct {
    const int32_t *rows, *starts, *positions, *draft_starts, *verified, *pending;
    void *states;
    float *kept;
    int64_t row_stride, kept_stride;
    int32_t num_seqs, spare_row, is_bf16, num_drafting, slots, kept_size;
} States;

// A sequence's own tokens are [first, last), and `pending` ones are applied before them. The state after token `stored` is stored.
typedef struct {
    int first, last, pending, stored, position, drafts;
} Span;

// k, q [tokens, keys, key_dim] and v, out [tokens, heads, value_dim] for the delta rule; B, C and x, out in these places for
// Mamba-2. a is dt without its bias, [tokens, heads, gates]; with one gate for each number of a key, each forgets by itself; b, d and limits belong to one of the two.
typedef struct {
    const float *q, *k, *v, *a, *b, *a_log, *dt_bias, *d;
    float *out;
    int64_t q_stride, k_stride, v_stride, a_stride, b_stride;
    int32_t keys, heads, key_dim, value_dim, gates;
    float least_dt, most_dt;
} Heads;

typedef struct {
    const States *states;
    const Heads *heads;
    int parts;
} Scan;

INLINE float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// Rounds to nearest even; what is not a number stays so.
INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE void load_numbers(float *to, const States *s, int64_t at, int count) {
    if (s->is_bf16) {
        const uint16_t *from = (const uint16_t *)s->states + at;
        for (int i = 0; i < count; i++) to[i] = from_bf16(from[i]);
    } else memcpy(to, (const float *)s->states + at, (size_t)count * 4);
}

INLINE void store_numbers(const States *s, int64_t at, const float *from, int count) {
    if (s->is_bf16) {
        uint16_t *to = (uint16_t *)s->states + at;
        for (int i = 0; i < count; i++) to[i] = to_bf16(from[i]);
    } else memcpy((float *)s->states + at, from, (size_t)count * 4);
}

// Rounds a state as storing and loading it does. Decodes with drafts round after each token, so that drafts change nothing.
INLINE void round_to_bf16(Vector *x) {
    for (int i = 0; i < LANES; i++) (*x)[i] = from_bf16(to_bf16((*x)[i]));
}

INLINE int64_t row_of(const States *s, int seq) { return (s->rows[seq] < 0 ? s->spare_row : s->rows[seq]) * s->row_stride; }
INLINE Span span_of(const States *s, int seq) {
    const int start = s->starts[seq], last = s->starts[seq + 1];
    if (seq >= s->num_drafting) return (Span){.first = start, .last = last, .stored = last - 1};
    const int own = last - 1 - s->verified[seq], first = own > start ? own : start;
    return (Span){first, last, s->pending[seq], first < last ? first : last - 1, s->draft_starts[seq], 1};
}

INLINE int begins(const States *s, const Span *span) { return span->first < span->last && s->positions[span->first] <= 0; }

// The kept inputs of a token `before` as many tokens before the sequence's own; drafts have negative numbers.
INLINE float *kept_at(const States *s, int seq, const Span *span, int before) {
    const int64_t row = s->rows[seq] < 0 ? s->spare_row : s->rows[seq];
    return s->kept + row * s->kept_stride + (int64_t)((span->position - before) % s->slots) * s->kept_size;
}

typedef struct {
    const float *numbers;
    int64_t stride;
    int size;
} Piece;

// Keeps the inputs of a step's drafts: these pieces of each, one after the other.
static void keep_drafts(const States *s, const Piece *pieces, int count) {
    for (int seq = 0; seq < s->num_drafting; seq++) {
        const Span span = span_of(s, seq);
        for (int t = span.first + 1; t < span.last; t++) {
            float *to = kept_at(s, seq, &span, span.first - t);
            for (int i = 0; i < count; to += pieces[i++].size)
                memcpy(to, pieces[i].numbers + t * pieces[i].stride, (size_t)pieces[i].size * 4);
        }
    }
}

INLINE float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

INLINE float sum_of(Vector x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

INLINE float product(const float *a, const float *b, int n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// A token's numbers lie pages apart from the next token's, where the processor does not look by itself.
INLINE void prefetch(const float *x, int64_t stride, int n, int64_t tokens_left) {
    if (tokens_left <= AHEAD) return;
    for (int i = 0; i < n; i += 16) __builtin_prefetch(x + AHEAD * stride + i);
}

static void normalize(const float *x, int n, float factor, float *y) {
    float scale = factor / sqrtf(product(x, x, n) + 1e-6f);
    for (int i = 0; i < n; i++) y[i] = x[i] * scale;
}

// COLUMNS of a head's state. A token's change is applied when the next token reads the state, so each token is one pass: the
// result of the state after the change is that of the state before it, and q * k times the change.
static void delta_unit(void *shared, int unit, int thread) {
    const Scan *scan = shared;
    const States *s = scan->states;
    const Heads *h = scan->heads;
    const int part = unit % scan->parts, head = unit / scan->parts % h->heads, seq = unit / scan->parts / h->heads;
    const Span span = span_of(s, seq);
    const int first = span.first, last = span.last, keys = h->key_dim, column = part * COLUMNS, is_new = begins(s, &span);
    const int all_keys = h->keys * keys, all_values = h->heads * h->value_dim, rounds = span.drafts && s->is_bf16;
    const int count = h->value_dim - column < COLUMNS ? h->value_dim - column : COLUMNS;
    const int64_t at = row_of(s, seq) + (int64_t)head * keys * h->value_dim + column;
    (void)thread;
    if (first - span.pending == last) return;
    Vector state[keys * REGISTERS];
    float buffers[7][keys], *q = buffers[0], *k = buffers[1], *before = buffers[2], *decay = buffers[3], *next = buffers[4];
    float *decayed_q = buffers[5], *decayed_k = buffers[6];
    const int gates = h->gates;
    Vector change[REGISTERS] = {0};
    memset(before, 0, (size_t)keys * 4);
    for (int n = 0; n < keys; n++) decay[n] = 1;
    if (is_new || count < COLUMNS) memset(state, 0, sizeof(state));
    if (!is_new)
        for (int n = 0; n < keys; n++) load_numbers((float *)(state + n * REGISTERS), s, at + (int64_t)n * h->value_dim, count);
    const float rate = -expf(h->a_log[head]);
    const int64_t shared_head = head / (h->heads / h->keys) * keys;
    for (int64_t t = first - span.pending; t < last; t++) {
        const int is_own = t >= first;
        const float *kept = is_own ? NULL : kept_at(s, seq, &span, first - (int)t);
        const float *own_k = is_own ? h->k + t * h->k_stride + shared_head : kept + shared_head;
        const float *own_q = is_own ? h->q + t * h->q_stride + shared_head : own_k;    // a pending token has no result
        const float *own_v = (is_own ? h->v + t * h->v_stride : kept + all_keys) + (int64_t)head * h->value_dim + column;
        const float *own_a = (is_own ? h->a + t * h->a_stride : kept + all_keys + all_values) + (int64_t)head * gates;
        const float own_b = (is_own ? h->b + t * h->b_stride : kept + all_keys + all_values + h->heads * gates)[head];
        if (is_own) prefetch(own_q, h->q_stride, keys, last - t), prefetch(own_k, h->k_stride, keys, last - t), prefetch(own_v, h->v_stride, count, last - t);
        normalize(own_q, keys, 1 / sqrtf((float)keys), q);
        normalize(own_k, keys, 1, k);
        for (int n = 0; n < keys; n++) {
            next[n] = n < gates ? expf(rate * softplus(own_a[n] + h->dt_bias[(int64_t)head * gates + n])) : next[0];
            decayed_q[n] = next[n] * q[n], decayed_k[n] = next[n] * k[n];
        }
        if (rounds) {
            for (int n = 0; n < keys; n++) {
                for (int i = 0; i < REGISTERS; i++) {
                    state[n * REGISTERS + i] = decay[n] * state[n * REGISTERS + i] + before[n] * change[i];
                    round_to_bf16(&state[n * REGISTERS + i]);
                }
                decay[n] = 1;
            }
            memset(change, 0, sizeof(change));
        }
        Vector seen[REGISTERS] = {0}, result[REGISTERS] = {0};
        for (int n = 0; n < keys; n++)
            for (int i = 0; i < REGISTERS; i++) {
                Vector x = decay[n] * state[n * REGISTERS + i] + before[n] * change[i];
                state[n * REGISTERS + i] = x;
                seen[i] += decayed_k[n] * x;
                result[i] += decayed_q[n] * x;
            }
        if (t == span.stored + 1)
            for (int n = 0; n < keys; n++) store_numbers(s, at + (int64_t)n * h->value_dim, (float *)(state + n * REGISTERS), count);
        const float beta = 1 / (1 + expf(-own_b)), qk = product(q, k, keys);
        float *v = (float *)change, *out = (float *)result;
        memset(change, 0, sizeof(change));
        memcpy(v, own_v, (size_t)count * 4);
        for (int i = 0; i < REGISTERS; i++) {
            change[i] = (change[i] - seen[i]) * beta;
            result[i] += qk * change[i];
        }
        if (is_own) memcpy(h->out + (t * h->heads + head) * h->value_dim + column, out, (size_t)count * 4);
        float *swap = before;
        before = k, k = swap;
        swap = decay, decay = next, next = swap;
    }
    for (int n = 0; n < keys && span.stored == last - 1; n++) {
        for (int i = 0; i < REGISTERS; i++) state[n * REGISTERS + i] = decay[n] * state[n * REGISTERS + i] + before[n] * change[i];
        store_numbers(s, at + (int64_t)n * h->value_dim, (float *)(state + n * REGISTERS), count);
    }
}

// The delta rule of q, k, v with gates from a and b. States are [row, heads, key_dim, value_dim].
void shoal_gated_delta(const Heads *heads, const States *states) {
    Scan scan = {.states = states, .heads = heads, .parts = (heads->value_dim + COLUMNS - 1) / COLUMNS};
    parallel(delta_unit, &scan, states->num_seqs * heads->heads * scan.parts);
    const int keys = heads->keys * heads->key_dim, values = heads->heads * heads->value_dim;
    const Piece pieces[] = {{heads->k, heads->k_stride, keys}, {heads->v, heads->v_stride, values},
                            {heads->a, heads->a_stride, heads->heads * heads->gates}, {heads->b, heads->b_stride, heads->heads}};
    keep_drafts(states, pieces, 4);
}

// STATE_ROWS numbers of a head's values, each with its key_dim numbers of the state.
static void mamba_unit(void *shared, int unit, int thread) {
    const Scan *scan = shared;
    const States *s = scan->states;
    const Heads *h = scan->heads;
    const int part = unit % scan->parts, head = unit / scan->parts % h->heads, seq = unit / scan->parts / h->heads;
    const Span span = span_of(s, seq);
    const int first = span.first, last = span.last, row = part * STATE_ROWS, keys = h->key_dim;
    const int all_keys = h->keys * keys, all_values = h->heads * h->value_dim;
    const int rows = h->value_dim - row < STATE_ROWS ? h->value_dim - row : STATE_ROWS;
    const int vectors = (keys + LANES - 1) / LANES, padded_rows = (rows + REGISTERS - 1) / REGISTERS * REGISTERS;
    const int64_t at = row_of(s, seq) + ((int64_t)head * h->value_dim + row) * keys;
    (void)thread;
    if (first - span.pending == last) return;
    Vector state[padded_rows * vectors], b[vectors], c[vectors];
    memset(state, 0, sizeof(state)), memset(b, 0, sizeof(b)), memset(c, 0, sizeof(c));
    if (!begins(s, &span))
        for (int p = 0; p < rows; p++) load_numbers((float *)(state + p * vectors), s, at + (int64_t)p * keys, keys);
    const float rate = -expf(h->a_log[head]);
    float x[STATE_ROWS] = {0};
    const int64_t group = head / (h->heads / h->keys) * keys;
    for (int64_t t = first - span.pending; t < last; t++) {
        const int is_own = t >= first;
        const float *kept = is_own ? NULL : kept_at(s, seq, &span, first - (int)t);
        const float *own_b = is_own ? h->k + t * h->k_stride + group : kept + all_values + group;
        const float *own_c = is_own ? h->q + t * h->q_stride + group : own_b;    // a pending token has no result
        const float *own_x = (is_own ? h->v + t * h->v_stride : kept) + (int64_t)head * h->value_dim + row;
        const float own_dt = (is_own ? h->a + t * h->a_stride : kept + all_values + all_keys)[head];
        if (is_own) prefetch(own_b, h->k_stride, keys, last - t), prefetch(own_c, h->q_stride, keys, last - t), prefetch(own_x, h->v_stride, rows, last - t);
        memcpy(b, own_b, (size_t)keys * 4), memcpy(c, own_c, (size_t)keys * 4), memcpy(x, own_x, (size_t)rows * 4);
        float dt = softplus(own_dt + h->dt_bias[head]), *out = is_own ? h->out + (t * h->heads + head) * h->value_dim + row : NULL;
        dt = dt < h->least_dt ? h->least_dt : dt > h->most_dt ? h->most_dt : dt;
        const float decay = expf(rate * dt);
        for (int p = 0; p < padded_rows; p += REGISTERS) {
            Vector sums[REGISTERS] = {0}, *own = state + p * vectors;
            for (int n = 0; n < vectors; n++)
                for (int i = 0; i < REGISTERS; i++) {
                    Vector y = decay * own[i * vectors + n] + dt * x[p + i] * b[n];
                    own[i * vectors + n] = y;
                    sums[i] += y * c[n];
                }
            for (int i = 0; i < REGISTERS && p + i < rows && is_own; i++) out[p + i] = sum_of(sums[i]) + h->d[head] * x[p + i];
        }
        if (t == span.stored)
            for (int p = 0; p < rows; p++) store_numbers(s, at + (int64_t)p * keys, (float *)(state + p * vectors), keys);
        if (span.drafts && s->is_bf16)
            for (int i = 0; i < padded_rows * vectors; i++) round_to_bf16(&state[i]);
    }
}

// Mamba-2's state space. States are [row, heads, value_dim, key_dim].
void shoal_mamba2(const Heads *heads, const States *states) {
    Scan scan = {.states = states, .heads = heads, .parts = (heads->value_dim + STATE_ROWS - 1) / STATE_ROWS};
    parallel(mamba_unit, &scan, states->num_seqs * heads->heads * scan.parts);
    const int values = heads->heads * heads->value_dim, keys = heads->keys * heads->key_dim;
    const Piece pieces[] = {{heads->v, heads->v_stride, values}, {heads->k, heads->k_stride, keys}, {heads->a, heads->a_stride, heads->heads}};
    keep_drafts(states, pieces, 3);
}

typedef struct {
    const States *states;
    const float *x, *weight, *bias;
    float *out;
    int64_t stride;
    int width, channels, silu;
} Conv;

INLINE float silu_of(float x) { return x / (1 + fast_exp(x > -80 ? -x : 80)); }

INLINE void finish(const Conv *op, float *restrict out, const float *restrict sums, int count) {
    if (op->silu)
        for (int c = 0; c < count; c++) out[c] = silu_of(sums[c]);
    else memcpy(out, sums, (size_t)count * 4);
}

// A sequence of one token: all of its channels, and its next state. A constant width lets the compiler vectorise.
INLINE void one_token(const Conv *op, const float *restrict x, float *restrict kept, int channel, float *restrict out, int width) {
    const int old = width - 1, count = op->channels - channel < CHANNELS ? op->channels - channel : CHANNELS;
    const float *restrict weight = op->weight + (int64_t)channel * width;
    float sums[CHANNELS];
    for (int c = 0; c < count; c++) sums[c] = op->bias ? op->bias[channel + c] : 0;
    for (int c = 0; c < count; c++) {    // in the order of several tokens' sums
        for (int j = 0; j < old; j++) sums[c] += weight[c * width + j] * kept[c * old + j];
        sums[c] += weight[c * width + old] * x[c];
    }
    finish(op, out, sums, count);
    for (int c = 0; c < count; c++) {
        for (int j = 0; j < old - 1; j++) kept[c * old + j] = kept[c * old + j + 1];
        kept[c * old + old - 1] = x[c];
    }
}

INLINE float *inputs_of(const States *s, int seq, const Span *span, int values) {
    float *inputs = (float *)s->states + row_of(s, seq);
    if (span->last - span->first == 1 && begins(s, span)) memset(inputs, 0, (size_t)values * 4);
    return inputs;
}

INLINE int blocks_of(const Span *span) { return (span->last - span->first + TOKENS - 1) / TOKENS; }

// Input `at` of channel c, counted from the first own token, which is not an own token: pending ones come before it, and before these the
// row's inputs.
INLINE float old_input(const States *s, int seq, const Span *span, const float *inputs, int64_t c, int old, int at) {
    if (-at <= span->pending) return kept_at(s, seq, span, -at)[c];
    return begins(s, span) ? 0 : inputs[c * old + old + at + span->pending];
}

// TOKENS of a sequence: consecutive pages, so that each is looked up once.
static void conv_unit(void *shared, int unit, int thread) {
    const Conv *op = shared;
    const States *s = op->states;
    const int width = op->width, old = width - 1;
    int seq = 0, block = unit;
    (void)thread;
    Span span = span_of(s, 0);
    for (int own; block >= (own = blocks_of(&span)); span = span_of(s, ++seq)) block -= own;
    const int first = span.first, all = span.last - first;
    const int64_t from = (int64_t)block * TOKENS, to = from + TOKENS < all ? from + TOKENS : all;
    float *inputs = inputs_of(s, seq, &span, op->channels * old);
    for (int channel = 0; channel < op->channels; channel += CHANNELS) {
        const int count = op->channels - channel < CHANNELS ? op->channels - channel : CHANNELS;
        const float *x = op->x + first * op->stride + channel;
        float *out = op->out + (int64_t)first * op->channels + channel, *mine = inputs + (int64_t)channel * old;
        if (all == 1 && !span.pending) {
            if (width == 4) one_token(op, x, mine, channel, out, 4);
            else if (width == 3) one_token(op, x, mine, channel, out, 3);
            else one_token(op, x, mine, channel, out, width);
            continue;
        }
        float weight[MAX_WIDTH][CHANNELS], before[MAX_WIDTH][CHANNELS], sums[CHANNELS];
        for (int c = 0; c < count; c++) {
            for (int j = 0; j < width; j++) weight[j][c] = op->weight[(int64_t)(channel + c) * width + j];
            for (int j = 0; j < old && !block; j++) before[j][c] = old_input(s, seq, &span, inputs, channel + c, old, j - old);
        }
        for (int64_t t = from; t < to; t++) {
            for (int c = 0; c < count; c++) sums[c] = op->bias ? op->bias[channel + c] : 0;
            for (int j = 0; j < width; j++) {
                const int64_t at = t - old + j;
                const float *input = at < 0 ? before[old + at] : x + at * op->stride;
                for (int c = 0; c < count; c++) sums[c] += weight[j][c] * input[c];
            }
            finish(op, out + t * op->channels, sums, count);
        }
    }
}

// Writes a sequence's next state, after all of its units have read the last one. For a sequence of one token, conv_unit has done so.
static void conv_state_unit(void *shared, int seq, int thread) {
    const Conv *op = shared;
    const States *s = op->states;
    const Span span = span_of(s, seq);
    const int old = op->width - 1, end = span.stored + 1 - span.first;
    float *inputs = (float *)s->states + row_of(s, seq);
    (void)thread;
    if (span.last - span.first + span.pending == 0 || (span.last - span.first == 1 && !span.pending)) return;
    for (int j = 0; j < old; j++) {
        const int at = end - old + j;
        const float *input = op->x + (int64_t)(span.first + at) * op->stride;
        for (int64_t c = 0; c < op->channels; c++) inputs[c * old + j] = at >= 0 ? input[c] : old_input(s, seq, &span, inputs, c, old, at);
    }
}

// The causal convolution of x [tokens, channels], whose rows lie `stride` numbers apart, with weight [channels, width]. States
// hold float32 [row, channels, width - 1].
void shoal_causal_conv(const States *states, const float *x, int64_t stride, const float *weight, const float *bias, int channels, int width,
                       int silu, float *out) {
    Conv op = {.states = states, .x = x, .stride = stride, .weight = weight, .bias = bias, .channels = channels, .width = width,
               .silu = silu, .out = out};
    int units = 0;
    for (int seq = 0; seq < states->num_seqs; seq++) {
        const Span span = span_of(states, seq);
        units += blocks_of(&span);
    }
    parallel(conv_unit, &op, units);
    parallel(conv_state_unit, &op, states->num_seqs);
    keep_drafts(states, &(Piece){x, stride, channels}, 1);
}

typedef struct {
    const float *x, *gate, *weight;
    float *out, eps;
    int64_t x_stride, gate_stride;
    int rows, parts, size, weight_size, gate_first, is_sigmoid;
} GatedNorm;

INLINE float gate_of(const GatedNorm *op, float x) { return op->is_sigmoid ? 1 / (1 + fast_exp(x > -80 ? -x : 80)) : silu_of(x); }

static void gated_norm_unit(void *shared, int unit, int thread) {
    const GatedNorm *op = shared;
    const int n = op->size, each = NORM_ELEMENTS / n + 1, last = (unit + 1) * each;
    (void)thread;
    for (int64_t r = (int64_t)unit * each; r < (last < op->rows ? last : op->rows); r++) {
        const int64_t token = r / op->parts, column = r % op->parts * n;
        const float *restrict x = op->x + token * op->x_stride + column, *restrict gate = op->gate + token * op->gate_stride + column;
        const float *restrict weight = op->weight + column % op->weight_size;
        float *restrict y = op->out + r * n;
        if (op->gate_first) {
            for (int i = 0; i < n; i++) y[i] = x[i] * gate_of(op, gate[i]);
            const float scale = 1 / sqrtf(product(y, y, n) / (float)n + op->eps);
            for (int i = 0; i < n; i++) y[i] *= scale * weight[i];
        } else {
            const float scale = 1 / sqrtf(product(x, x, n) / (float)n + op->eps);
            for (int i = 0; i < n; i++) y[i] = x[i] * scale * weight[i] * gate_of(op, gate[i]);
        }
    }
}

// out [tokens, parts * size]: x normed in parts, multiplied by silu(gate) or sigmoid(gate) before the norm or after it. The weights of the parts
// repeat after weight_size numbers.
void shoal_gated_norm(const float *x, int64_t x_stride, const float *gate, int64_t gate_stride, const float *weight, int weight_size, float eps,
                      int tokens, int parts, int size, int gate_first, int is_sigmoid, float *out) {
    GatedNorm op = {.x = x, .x_stride = x_stride, .gate = gate, .gate_stride = gate_stride, .weight = weight, .weight_size = weight_size,
                    .eps = eps, .rows = tokens * parts, .parts = parts, .size = size, .gate_first = gate_first, .is_sigmoid = is_sigmoid, .out = out};
    const int each = NORM_ELEMENTS / size + 1;
    parallel(gated_norm_unit, &op, (op.rows + each - 1) / each);
}
