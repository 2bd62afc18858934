// Masks of logits, and, on the rows of the batch state, sampling and the start of a decode step.
//
// reference.py describes what is sampled. Here it takes a few passes over a row's logits. The first finds the
// largest. Without top_k and top_p the next finds the masses of tiles. With them it makes a histogram, and
// then the noise, whose logarithms are computed only for tokens that may win.

#include <stdlib.h>

#include "cpu.h"

enum { TOKEN, POSITION, SEED_LOW, SEED_HIGH, TEMPERATURE, TOP_K, TOP_P, MIN_P };    // the same as Field in state.py
enum { NUM_BINS = 4096, BINS_PER_LOGIT = 64, SPAN = 64, TILE = 1024 };
// MAX_GUMBEL is -log of the smallest exponential draw, 2**-32.
static const float MIN_TEMPERATURE = 1e-5f, MAX_GUMBEL = 22.2f;

static uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x21F0AAADu;
    x = (x ^ x >> 15) * 0xD35A2D97u;
    return x ^ x >> 15;
}

// A token's uniform random number, from which its noise is made.
static inline float uniform(uint32_t key_0, uint32_t key_1, uint32_t token) {
    uint32_t h = (token ^ key_0) * 0x21F0AAADu;
    h = (h ^ h >> 15 ^ key_1) * 0xD35A2D97u;
    h = (h ^ h >> 15) >> 1;
    float u = (float)(int32_t)h * 0x1p-31f + 0x1p-32f;
    return u < 1 - 0x1p-24f ? u : 1 - 0x1p-24f;
}

static float gumbel(float u) { return -logf(-log1pf(-u)); }

static float largest(const float *logits, int n) {
    float top = logits[0];
#pragma omp simd reduction(max : top)
    for (int i = 0; i < n; i++) top = logits[i] > top ? logits[i] : top;
    return top;
}

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

// How top_k and top_p cut: going down from the most probable token, the token at which the summed weights
// reach the target is the last one kept. Logits are counted in bins by their distance from the largest, and
// only the tokens of the bin with that token are sorted.
typedef struct {
    int count[NUM_BINS];
    double weight[NUM_BINS];
    float sorted[];
} Histogram;

static inline int bin_of(float below_top) {
    return below_top < NUM_BINS / BINS_PER_LOGIT - 1 ? (int)(below_top * BINS_PER_LOGIT) : NUM_BINS - 1;
}

// Returns the logit of the last token kept, among those >= floor. The target is a number of tokens, or, with
// temperature > 0, a share of all weights.
static float cut(const float *logits, int n, float top, float floor, float temperature, double target, Histogram *h) {
    memset(h->count, 0, sizeof h->count);
    memset(h->weight, 0, sizeof h->weight);
    float weights[SPAN];
    for (int start = 0; start < n; start += SPAN) {
        int span = n - start < SPAN ? n - start : SPAN;
        for (int i = 0; i < span; i++) weights[i] = temperature > 0 ? fast_exp((logits[start + i] - top) / temperature) : 1;
        for (int i = 0; i < span; i++)
            if (logits[start + i] >= floor) {
                int bin = bin_of(top - logits[start + i]);
                h->count[bin]++;
                h->weight[bin] += weights[i];
            }
    }
    double above = 0, total = 0;
    for (int b = 0; b < NUM_BINS; b++) total += h->weight[b];
    if (temperature > 0) target *= total;
    int bin = 0, found = 0;
    while (bin < NUM_BINS - 1 && above + h->weight[bin] < target) above += h->weight[bin++];
    for (int i = 0; i < n; i++)
        if (logits[i] >= floor && bin_of(top - logits[i]) == bin) h->sorted[found++] = logits[i];
    qsort(h->sorted, (size_t)found, sizeof(float), descending);
    int last = 0;
    for (; last + 1 < found; last++) {
        above += temperature > 0 ? fast_exp((h->sorted[last] - top) / temperature) : 1;
        if (above >= target) break;
    }
    return found ? h->sorted[last] : floor;
}

// Draws without filters: a tile by its mass, then the token of it with the largest logit / temperature +
// noise.
static int draw_unfiltered(const float *logits, int n, float top, float inverse, uint32_t key_0, uint32_t key_1) {
    int tile = 0, best = 0;
    float most = -INFINITY;
    for (int start = 0; start < n; start += TILE) {
        int end = n - start < TILE ? n : start + TILE;
        float mass = 0;
#pragma omp simd reduction(+ : mass)
        for (int i = start; i < end; i++) mass += logits[i] == -INFINITY ? 0 : fast_exp((logits[i] - top) * inverse);
        float score = logf(mass) + gumbel(uniform(key_0, key_1, (uint32_t)(-1 - start / TILE)));
        if (score > most) most = score, tile = start;
    }
    most = -INFINITY;
    for (int i = tile; i < n && i < tile + TILE; i++) {
        if (logits[i] * inverse + MAX_GUMBEL < most) continue;
        float score = gumbel(uniform(key_0, key_1, (uint32_t)i)) + logits[i] * inverse;
        if (score > most) most = score, best = i;
    }
    return best;
}

// Returns the token >= floor with the largest logit / temperature + noise, and the first of equals.
static int draw(const float *logits, int n, int best, float floor, float inverse, uint32_t key_0, uint32_t key_1) {
    float most = gumbel(uniform(key_0, key_1, (uint32_t)best)) + logits[best] * inverse, u[SPAN];
    for (int start = 0; start < n; start += SPAN) {
        int span = n - start < SPAN ? n - start : SPAN, any = 0;
        // Noise above x needs u < e^-x. The bound is a little larger, because of fast_exp's error.
        for (int i = 0; i < span; i++) u[i] = uniform(key_0, key_1, (uint32_t)(start + i));
        for (int i = 0; i < span; i++) {
            float x = logits[start + i];
            any |= (u[i] <= fast_exp(x * inverse - most) * 1.0001f + 1e-9f) & (x >= floor);
        }
        for (int i = 0; i < span && any; i++) {
            if (logits[start + i] < floor) continue;
            float score = gumbel(u[i]) + logits[start + i] * inverse;
            if (score > most || (score == most && start + i < best)) most = score, best = start + i;
        }
    }
    return best;
}

static int sample_row(const float *logits, int n, const int32_t *fields, int32_t position, Histogram *h) {
    float temperature, top_p, min_p, top = largest(logits, n);
    memcpy(&temperature, fields + TEMPERATURE, 4);
    memcpy(&top_p, fields + TOP_P, 4);
    memcpy(&min_p, fields + MIN_P, 4);
    int best = 0;
    while (best < n - 1 && logits[best] != top) best++;
    if (temperature < MIN_TEMPERATURE) return best;
    uint32_t low = (uint32_t)fields[SEED_LOW], high = (uint32_t)fields[SEED_HIGH], at = (uint32_t)position;
    uint32_t key_0 = mix(at ^ mix(high ^ mix(low ^ 0x9E3779B9u))), key_1 = mix(low + mix(high + mix(at + 0x3C6EF372u)));
    float inverse = (float)(1.0 / temperature);
    if (min_p <= 0 && fields[TOP_K] <= 0 && top_p >= 1) return draw_unfiltered(logits, n, top, inverse, key_0, key_1);
    float floor = min_p > 0 ? top + (float)(temperature * log(min_p)) : -INFINITY;
    if (fields[TOP_K] > 0 && fields[TOP_K] < n) floor = fmaxf(floor, cut(logits, n, top, -INFINITY, 0, fields[TOP_K], h));
    if (top_p < 1) floor = cut(logits, n, top, floor, temperature, top_p, h);
    return draw(logits, n, best, floor, inverse, key_0, key_1);
}

typedef struct {
    const float *logits;
    const int32_t *rows, *positions;
    int32_t *table, *tokens;
    int64_t logits_stride, table_stride, room;
    int n;
    char *rooms;
} Sampling;

static void sample_unit(void *shared, int s, int thread) {
    const Sampling *job = shared;
    if (job->rows[s] < 0) return;
    int32_t *fields = job->table + job->rows[s] * job->table_stride;
    Histogram *histogram = (Histogram *)(job->rooms + job->room * thread);
    job->tokens[s] = fields[TOKEN] = sample_row(job->logits + s * job->logits_stride, job->n, fields, job->positions[s] + 1, histogram);
    fields[POSITION] = job->positions[s] + 1;
}

// For each row that is not padding (-1), writes a token into `tokens` and into the state row, and the
// position after positions[s] into the state row. Returns -1 if there is no memory.
int shoal_sample(const float *logits, int64_t logits_stride, int n, const int32_t *rows, const int32_t *positions, int count, int32_t *table,
                 int64_t table_stride, int32_t *tokens) {
    const int64_t room = (int64_t)sizeof(Histogram) + (int64_t)sizeof(float) * ((n + 15) / 16 * 16);
    char *rooms = malloc((size_t)(room * max_threads()));
    if (!rooms) return -1;
    parallel(sample_unit, &(Sampling){logits, rows, positions, table, tokens, logits_stride, table_stride, room, n, rooms}, count);
    free(rooms);
    return 0;
}

typedef struct {
    float *logits;
    const int64_t *rows;
    const uint32_t *masks;
    int64_t logits_stride, masks_stride;
    int n;
} Masking;

static void keep_unit(void *shared, int g, int thread) {
    const Masking *job = shared;
    float *restrict logits = job->logits + job->rows[g] * job->logits_stride;
    const uint32_t *restrict mask = job->masks + g * job->masks_stride;
    (void)thread;
    for (int start = 0; start < job->n; start += 32) {
        const uint32_t word = mask[start / 32];
        float *restrict x = logits + start;
        if (job->n - start >= 32)    // This is a case of its own, so that the compiler knows the count.
            for (int i = 0; i < 32; i++) x[i] = word >> i & 1 ? x[i] : -INFINITY;
        else
            for (int i = 0; i < job->n - start; i++) x[i] = word >> i & 1 ? x[i] : -INFINITY;
    }
}

// In row rows[g] of the logits only those tokens stay possible whose bits in mask g are set.
void shoal_keep_bits(float *logits, int64_t logits_stride, int n, const int64_t *rows, int count,
                     const uint32_t *masks, int64_t masks_stride) {
    parallel(keep_unit, &(Masking){logits, rows, masks, logits_stride, masks_stride, n}, count);
}

void shoal_begin_decode(const int32_t *rows, int count, const int32_t *table, int64_t table_stride, int32_t *tokens, int32_t *positions,
                        int32_t *kv_lens) {
    for (int s = 0; s < count; s++) {
        const int32_t *fields = table + rows[s] * table_stride;
        tokens[s] = rows[s] < 0 ? 0 : fields[TOKEN];
        positions[s] = rows[s] < 0 ? -1 : fields[POSITION];
        kv_lens[s] = positions[s] + 1;
    }
}
