// All layers of a dense decoder in one call. Otherwise Python runs between every two ops, which at one stream
// of a small model takes half as long as the arithmetic.

#include "cpu.h"

// The weights of a layer, its rope table, and its cache's numbers, scales, block tables and window. A null pointer
// means that there is no such weight. Norms may follow attention and MLP: then a layer has both.
typedef struct {
    const Packed *qkv, *o, *gate_up, *down;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias, *input_norm, *mlp_norm, *q_norm, *k_norm, *after_attention,
        *after_mlp;
    const float *cos_sin;
    void *cache;
    const float *scales;
    const int32_t *tables;
    int64_t window;
} Layer;

// The step's tokens. positions and rows are [tokens]; All norms share eps.
typedef struct {
    const int32_t *positions, *rows;
    int32_t tokens, activation;
    float eps, scale;
} Tokens;

// residual [tokens, D] holds the embeddings, and all results but the last layer's are added to it. x [tokens,
// D] receives that last result, for the final norm to add; with norms after attention and MLP, that is added, too.
// The layers' caches differ from first_cache in numbers, scales and tables alone. scratch has tokens * (qkv + H * N +
// gate_up + gate) floats. Returns -1 without enough memory.
int shoal_layers(const Layer *layers, int num_layers, const Cache *first_cache, const KvSequences *seqs, const Tokens *t,
                 float *residual, float *x, float *scratch) {
    Cache cache = *first_cache;
    const int64_t tokens = t->tokens;
    const int hidden = layers[0].o->outs, width = layers[0].qkv->outs, inner = layers[0].down->cols;
    float *qkv = scratch, *heads = qkv + tokens * width, *gate_up = heads + tokens * layers[0].o->cols, *gated = gate_up + tokens * 2 * inner;
    const Rope rope = {.rotary = first_cache->head_dim};
    for (int i = 0; i < num_layers; i++) {
        const Layer *w = &layers[i];
        const int left = i && !w->after_mlp;    // the layer before has left its result in x
        cache.data = w->cache, cache.scales = w->scales, cache.tables = w->tables;
        shoal_rms_norm(left ? x : 0, residual, w->input_norm, t->eps, t->tokens, hidden, x);
        if (shoal_linear(w->qkv, x, t->tokens, w->qkv_bias, qkv)) return -1;
        shoal_qk_norm_rope_store(&cache, qkv, t->tokens, t->positions, t->rows, w->cos_sin, w->q_norm, w->k_norm, t->eps, &rope);
        if (shoal_attention(&cache, seqs, qkv, width, (int)w->window, t->scale, 0, 0, heads)) return -1;
        if (shoal_linear(w->o, heads, t->tokens, w->o_bias, x)) return -1;
        if (w->after_attention)
            shoal_add_normed(x, w->after_attention, t->eps, residual, w->mlp_norm, t->eps, t->tokens, hidden, x);
        else shoal_rms_norm(x, residual, w->mlp_norm, t->eps, t->tokens, hidden, x);
        if (shoal_linear(w->gate_up, x, t->tokens, w->gate_up_bias, gate_up)) return -1;
        shoal_gate_mul(gate_up, t->tokens, inner, t->activation, gated);
        if (shoal_linear(w->down, gated, t->tokens, w->down_bias, x)) return -1;
        if (w->after_mlp) shoal_add_normed(x, w->after_mlp, t->eps, residual, 0, 0, t->tokens, hidden, 0);
    }
    return 0;
}
