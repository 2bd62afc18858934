// Matmuls of float activations with weights of 4 or 8 bits, in groups of 32 along a row. Each call rounds
// its activations to int16, group by group, so the inner loop is integer arithmetic, and scales are applied
// once for each group. int8, which llama.cpp uses, would halve the arithmetic of many rows, but is much less
// accurate (docs/decisions/cpu.md).
//
// Packed layout: LANES output rows lie interleaved, so that SIMD registers hold the sums of LANES outputs.
// Each block of LANES rows has for each group LANES fp16 scales, then, with 4 bits, LANES fp16 minima, then
// the words of 4 bytes: the first of every lane, then the second of every lane, and so on.
//   4 bits: 4 words; in word j the low nibbles are columns 4j..4j+3, the high ones 16+4j..16+4j+3    w = scale * q + minimum
//   8 bits: 8 words; word j holds columns 4j..4j+3                                                   w = scale * q
// The last block is padded with zero rows.

#include <stdlib.h>

#include "cpu.h"

#define INLINE static inline __attribute__((always_inline))
// A panel is as many activations as stay in a core's L2 cache beside the weights.
enum { SCALE_GROUP = 32, PANEL_BYTES = 192 << 10, UNITS_PER_THREAD = 4 };

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define TILE 9
enum { REGISTERS = 1 };
typedef __m512 vf;
typedef __m512i vi;
INLINE vf splat(float x) { return _mm512_set1_ps(x); }
INLINE vf multiply(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf multiply_add(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf to_float(vi x) { return _mm512_cvtepi32_ps(x); }
INLINE vf load_half(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vi zero(void) { return _mm512_setzero_si512(); }
INLINE vi splat_pair(const int16_t *q) { int32_t pair; memcpy(&pair, q, 4); return _mm512_set1_epi32(pair); }
INLINE vi load(const uint8_t *p) { return _mm512_loadu_si512(p); }
// half 0 and 1: the low nibbles of the even and of the odd bytes; 2 and 3: the high ones.
INLINE vi nibbles(vi x, int half) {
    vi shifted = half == 0 ? x : half == 1 ? _mm512_srli_epi16(x, 8) : half == 2 ? _mm512_srli_epi16(x, 4) : _mm512_srli_epi16(x, 12);
    return half == 3 ? shifted : _mm512_and_si512(shifted, _mm512_set1_epi16(15));
}
INLINE vi even_bytes(vi x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
INLINE vi odd_bytes(vi x) { return _mm512_srai_epi16(x, 8); }
INLINE vi add_product(vi sum, vi w, vi q) { return _mm512_dpwssd_epi32(sum, w, q); }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define TILE 4
enum { REGISTERS = 2 };
typedef __m256 vf;
typedef __m256i vi;
INLINE vf splat(float x) { return _mm256_set1_ps(x); }
INLINE vf multiply(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf multiply_add(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf to_float(vi x) { return _mm256_cvtepi32_ps(x); }
INLINE vf load_half(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vi zero(void) { return _mm256_setzero_si256(); }
INLINE vi splat_pair(const int16_t *q) { int32_t pair; memcpy(&pair, q, 4); return _mm256_set1_epi32(pair); }
INLINE vi load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE vi nibbles(vi x, int half) {
    vi shifted = half == 0 ? x : half == 1 ? _mm256_srli_epi16(x, 8) : half == 2 ? _mm256_srli_epi16(x, 4) : _mm256_srli_epi16(x, 12);
    return half == 3 ? shifted : _mm256_and_si256(shifted, _mm256_set1_epi16(15));
}
INLINE vi even_bytes(vi x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
INLINE vi odd_bytes(vi x) { return _mm256_srai_epi16(x, 8); }
#ifdef __AVXVNNI__
INLINE vi add_product(vi sum, vi w, vi q) { return _mm256_dpwssd_avx_epi32(sum, w, q); }
#else
INLINE vi add_product(vi sum, vi w, vi q) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, q)); }
#endif
#else
#define PLAIN_C
#define TILE 1
#endif

// HALVES and WORDS are the bytes of one fp16, and of one word, of every lane.
enum { LANES = 16, HALVES = 2 * LANES, WORDS = 4 * LANES };

INLINE int64_t group_bytes(int bits) { return bits == 4 ? 2 * HALVES + 4 * WORDS : HALVES + 8 * WORDS; }
INLINE int num_blocks(int outs) { return (outs + LANES - 1) / LANES; }

typedef struct {
    int cols, groups;
    int16_t *q;         // [rows, cols]; each four columns come as 0, 2, 1, 3, the pairs that a packed word gives
    float *scale;       // [rows, groups]
    float *sum;         // [rows, groups]: scale times the sum of the group's q
} Activations;

static float half_to_float(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    uint32_t magnitude = half & 0x7fff, bits = (uint32_t)(half & 0x8000) << 16;
    float x;
    if (magnitude < 0x400) {
        x = (float)magnitude * 0x1p-24f;
        return bits ? -x : x;
    }
    bits |= magnitude < 0x7c00 ? (magnitude << 13) + (112u << 23) : (magnitude << 13) | 0x7f800000;
    memcpy(&x, &bits, 4);
    return x;
}

// Returns -8 times a half, exactly unless it overflows: the exponent grows by 3, and a subnormal is
// normalised.
static uint16_t minus_eight_times(const uint8_t *p) {
    float x = -8 * half_to_float(p);
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) return (uint16_t)(sign | (uint32_t)(fabsf(x) * 0x1p24f));
    return (uint16_t)(sign | (magnitude - (112u << 23)) >> 13);
}

static void quantize_row(const float *restrict x, int16_t *restrict q, float *scale, float *sum, int groups) {
    for (int g = 0; g < groups; g++, x += SCALE_GROUP, q += SCALE_GROUP) {
        float most = 0;
#pragma omp simd reduction(max : most)
        for (int i = 0; i < SCALE_GROUP; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        float inverse = most > 0 ? 32767 / most : 0;
        int total = 0, rounded[SCALE_GROUP];
        for (int i = 0; i < SCALE_GROUP; i++) total += rounded[i] = (int)rintf(x[i] * inverse);
        for (int i = 0; i < SCALE_GROUP; i++) q[i] = (int16_t)rounded[(i & ~3) | (i & 1) << 1 | (i & 2) >> 1];
        scale[g] = most / 32767;
        sum[g] = scale[g] * (float)total;
    }
}

// Computes y[r, lane] for the LANES outputs of one block of weights and `rows` activation rows from `row` on,
// at most TILE.
#ifdef PLAIN_C
INLINE void tile(const int bits, const int rows, const uint8_t *w, const Activations *a, int row, float y[][LANES]) {
    memset(y, 0, sizeof(float) * LANES * (size_t)rows);    // TILE is 1 here.
    for (int g = 0; g < a->groups; g++, w += group_bytes(bits)) {
        const int16_t *q = a->q + (int64_t)row * a->cols + g * SCALE_GROUP;
        int64_t at = (int64_t)row * a->groups + g;
        const uint8_t *words = w + (bits == 4 ? 2 * HALVES : HALVES);
        for (int lane = 0; lane < LANES; lane++) {
            int total = 0;
            for (int j = 0; j < (bits == 4 ? 4 : 8); j++)
                for (int i = 0; i < 4; i++) {
                    int byte = words[j * WORDS + lane * 4 + i], at = 4 * j + ((i & 1) << 1 | i >> 1);
                    total += bits == 4 ? (byte & 15) * q[at] + (byte >> 4) * q[16 + at] : (int8_t)byte * q[at];
                }
            y[0][lane] += half_to_float(w + 2 * lane) * a->scale[at] * (float)total;
            if (bits == 4) y[0][lane] += half_to_float(w + HALVES + 2 * lane) * a->sum[at];
        }
    }
}
#else
INLINE void tile(const int bits, const int rows, const uint8_t *w, const Activations *a, int row, float y[][LANES]) {
    enum { WIDTH = LANES / REGISTERS };
    const int16_t *q = a->q + (int64_t)row * a->cols;
    const float *scale = a->scale + (int64_t)row * a->groups, *sum = a->sum + (int64_t)row * a->groups;
    vf total[TILE][REGISTERS];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < REGISTERS; k++) total[r][k] = splat(0);
    for (int g = 0; g < a->groups; g++, w += group_bytes(bits), q += SCALE_GROUP) {
        const uint8_t *words = w + (bits == 4 ? 2 * HALVES : HALVES);
        vi product[TILE][REGISTERS];
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < REGISTERS; k++) product[r][k] = zero();
        int num_words = bits == 4 ? 4 : 8;
        asm("" : "+r"(num_words));    // This hides the constant, because gcc spills the sums if it unrolls the loop.
        const int16_t *q_word = q;
        for (int j = 0; j < num_words; j++, q_word += 4) {
            vi word[REGISTERS];
            for (int k = 0; k < REGISTERS; k++) word[k] = load(words + j * WORDS + k * 4 * WIDTH);
            // Even and odd columns of the low nibbles come first, then even and odd columns of the high ones.
            for (int half = 0; half < (bits == 4 ? 4 : 2); half++) {
                vi pair[REGISTERS];
                for (int k = 0; k < REGISTERS; k++)
                    pair[k] = bits == 4 ? nibbles(word[k], half) : half ? odd_bytes(word[k]) : even_bytes(word[k]);
#pragma GCC unroll 9
                for (int r = 0; r < rows; r++) {
                    vi q_pair = splat_pair(q_word + r * a->cols + (half >> 1) * 16 + (half & 1) * 2);
                    for (int k = 0; k < REGISTERS; k++) {
                        product[r][k] = add_product(product[r][k], pair[k], q_pair);
                        KEEP(product[r][k]);
                    }
                }
            }
        }
        for (int k = 0; k < REGISTERS; k++) {
            vf w_scale = load_half(w + k * 2 * WIDTH);
            vf minimum = bits == 4 ? load_half(w + HALVES + k * 2 * WIDTH) : splat(0);
#pragma GCC unroll 9
            for (int r = 0; r < rows; r++) {
                total[r][k] = multiply_add(to_float(product[r][k]), multiply(w_scale, splat(scale[r * a->groups + g])), total[r][k]);
                if (bits == 4) total[r][k] = multiply_add(minimum, splat(sum[r * a->groups + g]), total[r][k]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < REGISTERS; k++) store(y[r] + k * WIDTH, total[r][k]);
}
#endif

INLINE void tile_rows(const int bits, int rows, const uint8_t *w, const Activations *a, int row, float y[][LANES]) {
    switch (rows) {    // The count is a constant in each case, so that the sums stay in registers.
    case 1: tile(bits, 1, w, a, row, y); break;
#if TILE > 1
    case 2: tile(bits, 2, w, a, row, y); break;
    case 3: tile(bits, 3, w, a, row, y); break;
    case 4: tile(bits, 4, w, a, row, y); break;
#if TILE > 4
    case 5: tile(bits, 5, w, a, row, y); break;
    case 6: tile(bits, 6, w, a, row, y); break;
    case 7: tile(bits, 7, w, a, row, y); break;
    case 8: tile(bits, 8, w, a, row, y); break;
    case 9: tile(bits, 9, w, a, row, y); break;
#endif
#endif
    }
}

// Computes the outputs of blocks [first, last) for the activation rows [row, end).
static void product(const Packed *w, int first, int last, const Activations *a, int row, int end, const float *bias, float *y) {
    const int64_t block_bytes = a->groups * group_bytes(w->bits);
    for (int b = first; b < last; b++) {
        const int at = b * LANES, lanes = w->outs - at < LANES ? w->outs - at : LANES;
        for (int r = row; r < end; r += TILE) {
            const int rows = end - r < TILE ? end - r : TILE;
            float sums[TILE][LANES];
            if (w->bits == 4) tile_rows(4, rows, w->data + b * block_bytes, a, r, sums);
            else tile_rows(8, rows, w->data + b * block_bytes, a, r, sums);
            for (int i = 0; i < rows; i++) {
                float *out = y + (int64_t)(r + i) * w->outs + at;
                for (int l = 0; l < lanes; l++) out[l] = sums[i][l] + (bias ? bias[at + l] : 0);
            }
        }
    }
}

int64_t shoal_packed_bytes(int outs, int cols, int bits) { return num_blocks(outs) * (int64_t)(cols / SCALE_GROUP) * group_bytes(bits); }

// Packs GGUF rows, which lie row_bytes apart, into `to` from row first_row on. They are Q8_0 for 8 bits, and
// Q4_1 or Q4_0 for 4 bits. Q4_0 becomes Q4_1 with a minimum of -8 * scale. The caller has filled the data
// with zeros.
void shoal_pack(const Packed *to, const uint8_t *source, int64_t row_bytes, int rows, int first_row, int has_minimum) {
    const int bits = to->bits, groups = to->cols / SCALE_GROUP, words = bits == 4 ? 4 : 8;
    for (int row = 0; row < rows; row++) {
        int block = (first_row + row) / LANES, lane = (first_row + row) % LANES;
        const uint8_t *from = source + row * row_bytes;
        uint8_t *group = to->data + (int64_t)block * groups * group_bytes(bits);
        for (int g = 0; g < groups; g++, group += group_bytes(bits)) {
            memcpy(group + 2 * lane, from, 2);
            if (bits == 4) {
                uint16_t minimum = minus_eight_times(from);
                if (has_minimum) memcpy(&minimum, from + 2, 2);
                memcpy(group + HALVES + 2 * lane, &minimum, 2);
            }
            const uint8_t *quants = from + (has_minimum ? 4 : 2);
            uint8_t *word = group + (bits == 4 ? 2 * HALVES : HALVES) + 4 * lane;
            for (int j = 0; j < words; j++) memcpy(word + j * WORDS, quants + 4 * j, 4);
            from = quants + 4 * words;
        }
    }
}

// One matmul. A unit of its work is `rows_each` activation rows to quantize, or `blocks_each` blocks of
// outputs for a panel of rows.
typedef struct {
    const Packed *w;
    const float *x, *bias;
    float *y;
    Activations a;
    int rows, rows_each, panel, blocks, blocks_each, units_per_panel;
} Linear;

static void quantize_unit(void *shared, int unit, int thread) {
    const Linear *l = shared;
    const int cols = l->a.cols, groups = l->a.groups, first = unit * l->rows_each, last = first + l->rows_each;
    (void)thread;
    for (int64_t r = first; r < (last < l->rows ? last : l->rows); r++)
        quantize_row(l->x + r * cols, l->a.q + r * cols, l->a.scale + r * groups, l->a.sum + r * groups, groups);
}

static void product_unit(void *shared, int unit, int thread) {
    const Linear *l = shared;
    const int row = unit / l->units_per_panel * l->panel, first = unit % l->units_per_panel * l->blocks_each, last = first + l->blocks_each;
    (void)thread;
    product(l->w, first, last < l->blocks ? last : l->blocks, &l->a, row, row + l->panel < l->rows ? row + l->panel : l->rows, l->bias, l->y);
}

// y[rows, outs] = x[rows, cols] W^T + bias, all contiguous. Returns -1 if there is no memory for the scratch.
int shoal_linear(const Packed *w, const float *x, int rows, const float *bias, float *y) {
    const int cols = w->cols, groups = cols / SCALE_GROUP;
    const int64_t scale_bytes = (int64_t)rows * groups * (int64_t)sizeof(float);
    char *scratch = malloc(2 * scale_bytes + (int64_t)rows * cols * (int64_t)sizeof(int16_t));
    if (!scratch) return -1;
    Linear l = {.w = w, .x = x, .bias = bias, .y = y, .rows = rows, .blocks = num_blocks(w->outs), .rows_each = 8192 / cols + 1};
    l.a = (Activations){cols, groups, (int16_t *)(scratch + 2 * scale_bytes), (float *)scratch, (float *)(scratch + scale_bytes)};
    l.panel = PANEL_BYTES / (2 * cols) / TILE * TILE + TILE;
    l.blocks_each = l.blocks / (UNITS_PER_THREAD * max_threads()) + 1;
    l.units_per_panel = (l.blocks + l.blocks_each - 1) / l.blocks_each;
    parallel(quantize_unit, &l, (rows + l.rows_each - 1) / l.rows_each);
    parallel(product_unit, &l, (rows + l.panel - 1) / l.panel * l.units_per_panel);
    free(scratch);
    return 0;
}

// Writes the rows `ids` of a packed matrix, dequantized, to y[count, cols].
void shoal_embed(const Packed *w, const int32_t *ids, int count, float *y) {
    const int bits = w->bits, groups = w->cols / SCALE_GROUP;
    for (int n = 0; n < count; n++) {
        int lane = ids[n] % LANES;
        const uint8_t *from = w->data + (int64_t)(ids[n] / LANES) * groups * group_bytes(bits);
        for (int g = 0; g < groups; g++, from += group_bytes(bits), y += SCALE_GROUP) {
            float scale = half_to_float(from + 2 * lane), minimum = bits == 4 ? half_to_float(from + HALVES + 2 * lane) : 0;
            const uint8_t *words = from + (bits == 4 ? 2 * HALVES : HALVES) + 4 * lane;
            for (int i = 0; i < SCALE_GROUP; i++) {
                uint8_t byte = words[(i / 4 % (bits == 4 ? 4 : 8)) * WORDS + i % 4];
                int q = bits == 8 ? (int8_t)byte : i < 16 ? byte & 15 : byte >> 4;
                y[i] = scale * (float)q + minimum;
            }
        }
    }
}
