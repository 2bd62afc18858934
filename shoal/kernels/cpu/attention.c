// Causal attention over the paged cache, of float32 or fp8 numbers, by online softmax, for decodes and for chunks of prompts.
//
// A work item is a tile of query tokens of one sequence, with all query heads of one kv head, so that keys
// and values are read once for all of them. A tile of few rows (a decode) reads the cache's rows where they
// lie. A tile of many rows copies values, and keys transposed, for a matmul that keeps its sums in
// registers. If there are fewer items than threads need (long decodes), the keys are split as well, and the
// parts are combined afterwards. Numbers of an fp8 cache become floats when they are copied, or a few keys at a
// time where they would not be.

#include <stdlib.h>

#include "cpu.h"

// A row is one head of one query token.
enum { TILE_ROWS = 64, FEW_ROWS = 8, CHUNK = 64, MAX_BLOCK = 256, SPLIT_KEYS = 256, COMBINED_ROWS = 256, UNPACKED = 16 };

static const float LOWEST = -1e30f;    // It is below every score, and finite, so that differences stay numbers.

typedef struct {
    const Cache *cache;
    const KvSequences *seqs;
    const float *q;
    int64_t q_stride;    // floats from one token to the next; heads lie head_dim apart
    int window, heads, ratio, n;    // window 0: none; below 0: chunks of that many positions
    float scale, softcap;    // softcap 0: none
    const float *sinks;      // null: none
} Attention;

typedef struct {
    int seq, first, last;    // query tokens [first, last) of the step
} Tile;

// The first position that a query at `position` sees.
static int64_t first_key(const Attention *a, int64_t position) {
    if (a->window < 0) return position / -a->window * -a->window;
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

// The element of the cache where a key begins. Its value is kv_stride after it.
static int64_t key_at(const Attention *a, const int32_t *table, int g, int64_t position) {
    const Cache *c = a->cache;
    return table[position / c->block_size] * c->block_stride + g * c->head_stride + position % c->block_size * c->head_dim;
}

// `count` numbers of the cache from element `at` on: where they lie, or, of an fp8 cache, in `room`. `scale` is
// the index of their scale.
static const float *numbers(const Cache *c, int64_t at, int64_t count, int scale, float *restrict room) {
    if (!c->scales) return (const float *)c->data + at;
    const uint8_t *bytes = (const uint8_t *)c->data + at;
    const float factor = c->scales[scale];
    for (int64_t i = 0; i < count; i++) room[i] = from_e4m3(bytes[i]) * factor;
    return room;
}

// score = softcap * tanh(score / softcap). tanh(x) is 1 - 2 / (e^2x + 1).
static void cap_scores(float *restrict p, int keys, float softcap) {
    const float twice = 2 / softcap;
    for (int j = 0; j < keys; j++) {
        const float x = p[j] * twice;
        p[j] = softcap * (1 - 2 / (fast_exp(x < 80 ? x : 80) + 1));
    }
}

// Attends from one query row to consecutive keys. Updates acc [n], the largest score so far, and the sum of
// exponentials.
static void attend_keys(const float *restrict q, const float *restrict k, const float *restrict v, int keys, int n, float scale,
                        float softcap, float *restrict acc, float *most, float *total) {
    float p[MAX_BLOCK];
    float top = *most;
    int j = 0;
    for (; j + 4 <= keys; j += 4, k += 4 * n) {
        float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
        for (int i = 0; i < n; i++) a += q[i] * k[i], b += q[i] * k[n + i], c += q[i] * k[2 * n + i], d += q[i] * k[3 * n + i];
        p[j] = a * scale, p[j + 1] = b * scale, p[j + 2] = c * scale, p[j + 3] = d * scale;
    }
    for (; j < keys; j++, k += n) {
        float a = 0;
#pragma omp simd reduction(+ : a)
        for (int i = 0; i < n; i++) a += q[i] * k[i];
        p[j] = a * scale;
    }
    if (softcap) cap_scores(p, keys, softcap);
#pragma omp simd reduction(max : top)
    for (j = 0; j < keys; j++) top = p[j] > top ? p[j] : top;
    if (top > *most) {
        float shrink = fast_exp(*most - top);
        for (int i = 0; i < n; i++) acc[i] *= shrink;
        *total *= shrink;
        *most = top;
    }
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (j = 0; j < keys; j++) sum += p[j] = fast_exp(p[j] - top);
    *total += sum;
    for (j = 0; j + 4 <= keys; j += 4, v += 4 * n)
        for (int i = 0; i < n; i++) acc[i] += p[j] * v[i] + p[j + 1] * v[n + i] + p[j + 2] * v[2 * n + i] + p[j + 3] * v[3 * n + i];
    for (; j < keys; j++, v += n)
        for (int i = 0; i < n; i++) acc[i] += p[j] * v[i];
}

typedef float Vector __attribute__((vector_size(32), may_alias));

// c[4, 16] = a[4, depth] b[depth, 16]. With `add` the matmul is added to c.
static void product_4x16(const float *a, int a_stride, const float *b, int b_stride, int depth, float *c, int c_stride, int add) {
    Vector sum[4][2];
    for (int r = 0; r < 4; r++)
        for (int k = 0; k < 2; k++) sum[r][k] = add ? *(Vector *)(c + r * c_stride + 8 * k) : (Vector){0};
    for (int i = 0; i < depth; i++, b += b_stride) {
        Vector b0 = *(const Vector *)b, b1 = *(const Vector *)(b + 8);
        KEEP(b0);
        KEEP(b1);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            float x = a[r * a_stride + i];
            sum[r][0] += x * b0;
            sum[r][1] += x * b1;
        }
    }
    for (int r = 0; r < 4; r++)
        for (int k = 0; k < 2; k++) *(Vector *)(c + r * c_stride + 8 * k) = sum[r][k];
}

// One thread's memory for a tile of many rows. Rows are padded to multiples of 4 and columns to multiples of
// 16, with zeros.
typedef struct {
    int n_padded, rows;
    float *v;         // [CHUNK, n_padded]
    float *acc;       // [rows, n_padded]
    float *k;         // [N, CHUNK]
    float *p;         // [rows, CHUNK]
    float *q;         // [rows, N], scaled
} Room;

static int64_t room_floats(int rows, int n) { return (int64_t)(rows + CHUNK) * ((n + 15) / 16 * 16 + n) + rows * CHUNK + 16; }

static Room make_room(float *base, int rows, int n) {
    Room room = {.n_padded = (n + 15) / 16 * 16, .rows = rows};
    room.v = (float *)(((uintptr_t)base + 63) & ~(uintptr_t)63);    // A load across two cache lines is slow.
    room.acc = room.v + CHUNK * room.n_padded, room.k = room.acc + rows * room.n_padded;
    room.p = room.k + n * CHUNK, room.q = room.p + rows * CHUNK;
    return room;
}

// Does softmax of a row's scores for the keys [from, to) of the chunk, in place, and writes zeros elsewhere.
// Earlier sums under a smaller maximum are scaled down.
static void softmax_row(float *restrict p, int from, int to, float *restrict acc, int n, float *most, float *total) {
    float top = *most, sum = 0;
#pragma omp simd reduction(max : top)
    for (int j = from; j < to; j++) top = p[j] > top ? p[j] : top;
    if (top > *most) {
        float shrink = fast_exp(*most - top);
        for (int i = 0; i < n; i++) acc[i] *= shrink;
        *total *= shrink;
        *most = top;
    }
    for (int j = 0; j < from; j++) p[j] = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = from; j < to; j++) sum += p[j] = fast_exp(p[j] - top);
    for (int j = to; j < CHUNK; j++) p[j] = 0;
    *total += sum;
}

// Attends from a tile of many rows to the keys [low, high) of its sequence. Row r is token first + r / ratio,
// head g * ratio + r % ratio.
static void attend_many(const Attention *a, Tile tile, int g, const int32_t *table, int offset, int64_t low, int64_t high, const Room *room,
                        float *acc, float *most, float *total) {
    const int n = a->n, ratio = a->ratio, rows = (tile.last - tile.first) * ratio, wide = room->n_padded;
    for (int r = 0; r < rows; r++) {
        const float *q = a->q + (tile.first + r / ratio) * a->q_stride + (g * ratio + r % ratio) * n;
        for (int i = 0; i < n; i++) room->q[r * n + i] = q[i] * a->scale;
    }
    memset(room->acc, 0, sizeof(float) * (size_t)(room->rows * wide));
    const Cache *c = a->cache;
    float unpacked[n];
    for (int64_t start = low; start < high; start += CHUNK) {
        const int keys = high - start < CHUNK ? (int)(high - start) : CHUNK;
        for (int j = 0; j < keys; j++) {
            const int64_t at = key_at(a, table, g, start + j);
            const float *k = numbers(c, at, n, g, unpacked);
            for (int i = 0; i < n; i++) room->k[i * CHUNK + j] = k[i];
            memcpy(room->v + j * wide, numbers(c, at + c->kv_stride, n, c->num_kv_heads + g, unpacked), sizeof(float) * (size_t)n);
        }
        for (int r = 0; r < rows; r += 4)
            for (int j = 0; j < keys; j += 16) product_4x16(room->q + r * n, n, room->k + j, CHUNK, n, room->p + r * CHUNK + j, CHUNK, 0);
        for (int r = 0; r < rows; r++) {
            int64_t position = tile.first + r / ratio + offset, first = first_key(a, position);
            int from = first > start ? (int)(first - start) : 0, to = position < start + keys ? (int)(position - start + 1) : keys;
            int64_t row = (int64_t)(tile.first + r / ratio) * a->heads + g * ratio + r % ratio;
            if (a->softcap && from < to) cap_scores(room->p + r * CHUNK + from, to - from, a->softcap);
            if (from < to) softmax_row(room->p + r * CHUNK, from, to, room->acc + r * wide, n, most + row, total + row);
            else memset(room->p + r * CHUNK, 0, sizeof(float) * CHUNK);
        }
        for (int r = 0; r < rows; r += 4)
            for (int i = 0; i < n; i += 16)
                product_4x16(room->p + r * CHUNK, CHUNK, room->v + i, wide, keys, room->acc + r * wide + i, wide, 1);
    }
    for (int r = 0; r < rows; r++)
        memcpy(acc + ((int64_t)(tile.first + r / ratio) * a->heads + g * ratio + r % ratio) * n, room->acc + r * wide, sizeof(float) * n);
}

// Does the same for few rows, block by block, where the keys lie; of an fp8 cache some keys at a time.
static void attend_few(const Attention *a, Tile tile, int g, const int32_t *table, int offset, int64_t low, int64_t high,
                       float *acc, float *most, float *total) {
    const Cache *c = a->cache;
    const int n = a->n, ratio = a->ratio, size = c->block_size, most_keys = c->scales ? UNPACKED : size;
    const int room = c->scales ? UNPACKED * n : 1;
    float key_room[room], value_room[room];
    for (int64_t start = low, end; start < high; start = end) {
        end = (start / size + 1) * size < high ? (start / size + 1) * size : high;
        if (end - start > most_keys) end = start + most_keys;
        const int64_t at = key_at(a, table, g, start), count = (end - start) * n;
        const float *keys = numbers(c, at, count, g, key_room);
        const float *values = numbers(c, at + c->kv_stride, count, c->num_kv_heads + g, value_room);
        for (int t = tile.first; t < tile.last; t++) {
            int64_t position = t + offset, first = first_key(a, position);
            int from = first > start ? (int)(first - start) : 0, to = position < end ? (int)(position - start + 1) : (int)(end - start);
            for (int h = g * ratio; h < (g + 1) * ratio && from < to; h++) {
                int64_t row = (int64_t)t * a->heads + h;
                const int64_t skipped = (int64_t)from * n;
                attend_keys(a->q + t * a->q_stride + h * n, keys + skipped, values + skipped, to - from, n, a->scale, a->softcap, acc + row * n, most + row,
                            total + row);
            }
        }
    }
}

// Attends from all rows of a tile, for kv head g, to the keys of split `split`. acc [tokens, H, N], most and
// total [tokens, H] are this split's.
static void attend_tile(const Attention *a, Tile tile, int g, int split, int num_splits, const Room *room,
                        float *acc, float *most, float *total) {
    const int n = a->n, ratio = a->ratio;
    // A token's position is its index plus this offset.
    const int offset = a->seqs->kv_lens[tile.seq] - a->seqs->query_starts[tile.seq + 1];
    for (int t = tile.first; t < tile.last; t++)
        for (int h = g * ratio; h < (g + 1) * ratio; h++) {
            int64_t row = (int64_t)t * a->heads + h;
            // A sink is a key without a value, which the first split has.
            if (a->sinks && split == 0) most[row] = a->sinks[h], total[row] = 1;
            else most[row] = LOWEST, total[row] = 0;
            memset(acc + row * n, 0, sizeof(float) * n);
        }
    if (a->seqs->rows[tile.seq] < 0) return;
    const int32_t *table = a->cache->tables + a->seqs->rows[tile.seq] * a->cache->table_stride;
    const int64_t first = first_key(a, tile.first + offset);
    const int64_t keys = tile.last + offset - first;
    const int64_t low = first + keys * split / num_splits, high = first + keys * (split + 1) / num_splits;
    if ((tile.last - tile.first) * ratio <= FEW_ROWS) attend_few(a, tile, g, table, offset, low, high, acc, most, total);
    else attend_many(a, tile, g, table, offset, low, high, room, acc, most, total);
}

// out[row] = (sum over splits of acc * e^(most - m)) / (sum over splits of total * e^(most - m)), where m is
// the largest `most`. It is zero where there were no keys.
static void combine(const float *acc, const float *most, const float *total, int num_splits, int64_t rows, int64_t row, int n, float *out) {
    float top = LOWEST, sum = 0;
    for (int s = 0; s < num_splits; s++) top = most[s * rows + row] > top ? most[s * rows + row] : top;
    for (int s = 0; s < num_splits; s++) sum += total[s * rows + row] * fast_exp(most[s * rows + row] - top);
    float y[n];
    memset(y, 0, sizeof y);
    for (int s = 0; s < num_splits && sum > 0; s++) {
        float weight = fast_exp(most[s * rows + row] - top) / sum;
        for (int i = 0; i < n; i++) y[i] += weight * acc[(s * rows + row) * n + i];
    }
    memcpy(out + row * n, y, sizeof y);
}

typedef struct {
    Attention a;
    const Tile *tiles;
    int num_splits, tile_rows;
    int64_t rows, room_each;
    float *acc, *most, *total, *rooms, *out;
} Job;

static void attention_unit(void *shared, int unit, int thread) {
    const Job *job = shared;
    const int kv_heads = job->a.heads / job->a.ratio, split = unit % job->num_splits, item = unit / job->num_splits;
    Room room = {0};
    if (job->room_each) room = make_room(job->rooms + job->room_each * thread, job->tile_rows, job->a.n);
    attend_tile(&job->a, job->tiles[item / kv_heads], item % kv_heads, split, job->num_splits, &room,
                job->acc + (job->num_splits > 1) * split * job->rows * job->a.n, job->most + split * job->rows,
                job->total + split * job->rows);
}

static void combine_unit(void *shared, int unit, int thread) {
    const Job *job = shared;
    const int64_t last = (int64_t)(unit + 1) * COMBINED_ROWS;
    (void)thread;
    for (int64_t row = (int64_t)unit * COMBINED_ROWS; row < (last < job->rows ? last : job->rows); row++)
        combine(job->acc, job->most, job->total, job->num_splits, job->rows, row, job->a.n, job->out);
}

// Attends from every token of the step. out is [tokens, H, N]. In q heads lie N floats apart, tokens
// q_stride. A window or softcap of 0 means none; a window below 0 means chunks of that size. sinks [H] may be null. Returns -1 if there is no memory.
int shoal_attention(const Cache *c, const KvSequences *seqs, const float *q, int64_t q_stride, int window, float scale, float softcap,
                    const float *sinks, float *out) {
    const int *starts = seqs->query_starts, tokens = starts[seqs->num_seqs], ratio = c->num_heads / c->num_kv_heads;
    const int tile_len = ratio < TILE_ROWS ? TILE_ROWS / ratio : 1, max_tiles = seqs->num_seqs + tokens / tile_len;
    Job job = {{c, seqs, q, q_stride, window, c->num_heads, ratio, c->head_dim, scale, softcap, sinks}, .tile_rows = (tile_len * ratio + 3) / 4 * 4,
               .rows = (int64_t)tokens * c->num_heads, .out = out};
    Tile *tiles = malloc(sizeof(Tile) * (size_t)max_tiles);
    if (!tiles) return -1;
    int num_tiles = 0;
    for (int s = seqs->num_seqs - 1; s >= 0; s--)
        for (int t = starts[s + 1]; t > starts[s]; t -= tile_len)    // The tiles with most keys come first.
            tiles[num_tiles++] = (Tile){s, t - tile_len > starts[s] ? t - tile_len : starts[s], t};
    const int items = num_tiles * c->num_kv_heads;
    const int wanted = 2 * max_threads() / (items ? items : 1) + 1, possible = seqs->max_kv_len / SPLIT_KEYS + 1;
    job.num_splits = wanted < possible ? wanted : possible;
    job.room_each = tokens > seqs->num_seqs || ratio > FEW_ROWS ? room_floats(job.tile_rows, c->head_dim) : 0;
    // A single split accumulates in `out`.
    const int64_t acc_floats = job.num_splits > 1 ? job.rows * job.num_splits * c->head_dim : 0;
    float *scratch = malloc(sizeof(float) * (size_t)(acc_floats + 2 * job.rows * job.num_splits + job.room_each * max_threads()));
    if (!scratch) return free(tiles), -1;
    job.tiles = tiles, job.acc = job.num_splits > 1 ? scratch : out, job.most = scratch + acc_floats;
    job.total = job.most + job.rows * job.num_splits, job.rooms = job.total + job.rows * job.num_splits;
    memset(job.rooms, 0, sizeof(float) * (size_t)(job.room_each * max_threads()));
    parallel(attention_unit, &job, items * job.num_splits);
    parallel(combine_unit, &job, (int)((job.rows + COMBINED_ROWS - 1) / COMBINED_ROWS));
    free(scratch);
    free(tiles);
    return 0;
}
