// Matmuls of float activations with fp8 (e4m3) weights, which lie row by row as in a checkpoint.
//
// An e4m3 number shifted to the place of a float16 is that number times 2^-8, its subnormals too, so that the
// processor's conversion of float16 serves. Groups of `size` columns share a scale, which is applied to the
// sum of a group.

#include "cpu.h"

enum { ROWS = 4, OUTS_EACH = 16 };
static const float FROM_HALF = 256;

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
enum { WIDTH = 16 };
typedef __m512 vf;
static inline vf none(void) { return _mm512_setzero_ps(); }
static inline vf load(const float *p) { return _mm512_loadu_ps(p); }
static inline vf splat(float x) { return _mm512_set1_ps(x); }
static inline vf multiply_add(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline float sum_of(vf x) { return _mm512_reduce_add_ps(x); }
static inline vf weights(const uint8_t *p) {
    __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
    __m256i rest = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7);
    return _mm512_cvtph_ps(_mm256_or_si256(sign, rest));
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
enum { WIDTH = 8 };
typedef __m256 vf;
static inline vf none(void) { return _mm256_setzero_ps(); }
static inline vf load(const float *p) { return _mm256_loadu_ps(p); }
static inline vf splat(float x) { return _mm256_set1_ps(x); }
static inline vf multiply_add(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline float sum_of(vf x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
static inline vf weights(const uint8_t *p) {
    __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
    __m128i rest = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), 7);
    return _mm256_cvtph_ps(_mm_or_si128(sign, rest));
}
#endif

// The number times 2^-8.
static float one_weight(uint8_t byte) {
    int exponent = byte >> 3 & 15, mantissa = byte & 7;
    float x = exponent ? ldexpf((float)(8 + mantissa), exponent - 18) : ldexpf((float)mantissa, -17);
    return byte & 0x80 ? -x : x;
}

typedef struct {
    const uint8_t *data;
    const float *scales, *x;
    float *y;
    int outs, cols, size, groups, rows;
} Fp8Linear;

// y[r, out] for `rows` activation rows from `row` on, at most ROWS.
static void output(const Fp8Linear *l, int out, int row, int rows) {
    const uint8_t *w = l->data + (int64_t)out * l->cols;
    const float *x = l->x + (int64_t)row * l->cols;
    float rest[ROWS] = {0};
#ifdef __AVX2__
    vf total[ROWS];
    for (int r = 0; r < ROWS; r++) total[r] = none();
#endif
    for (int g = 0; g < l->groups; g++) {
        const float scale = l->scales[(int64_t)out * l->groups + g] * FROM_HALF;
        int i = g * l->size;
        const int end = i + l->size < l->cols ? i + l->size : l->cols;
#ifdef __AVX2__
        vf sums[ROWS];
        for (int r = 0; r < ROWS; r++) sums[r] = none();
        if (rows == ROWS)
            for (; i + WIDTH <= end; i += WIDTH) {
                vf some = weights(w + i);
                for (int r = 0; r < ROWS; r++) sums[r] = multiply_add(some, load(x + (int64_t)r * l->cols + i), sums[r]);
            }
        else
            for (; i + WIDTH <= end; i += WIDTH) {
                vf some = weights(w + i);
                for (int r = 0; r < rows; r++) sums[r] = multiply_add(some, load(x + (int64_t)r * l->cols + i), sums[r]);
            }
        for (int r = 0; r < rows; r++) total[r] = multiply_add(sums[r], splat(scale), total[r]);
#endif
        for (; i < end; i++) {
            float one = scale * one_weight(w[i]);
            for (int r = 0; r < rows; r++) rest[r] += one * x[(int64_t)r * l->cols + i];
        }
    }
    for (int r = 0; r < rows; r++) {
#ifdef __AVX2__
        rest[r] += sum_of(total[r]);
#endif
        l->y[(int64_t)(row + r) * l->outs + out] = rest[r];
    }
}

static void outputs(void *shared, int unit, int thread) {
    const Fp8Linear *l = shared;
    const int first = unit * OUTS_EACH, last = first + OUTS_EACH < l->outs ? first + OUTS_EACH : l->outs;
    (void)thread;
    for (int row = 0; row < l->rows; row += ROWS)
        for (int out = first; out < last; out++) output(l, out, row, l->rows - row < ROWS ? l->rows - row : ROWS);
}

// y[rows, outs] = x[rows, cols] W^T, all contiguous; scales[outs, groups].
void shoal_fp8_linear(const uint8_t *data, const float *scales, int outs, int cols, int size, const float *x, int rows, float *y) {
    Fp8Linear l = {.data = data, .scales = scales, .x = x, .y = y, .outs = outs, .cols = cols, .size = size, .rows = rows};
    l.groups = (cols + size - 1) / size;
    parallel(outputs, &l, (outs + OUTS_EACH - 1) / OUTS_EACH);
}
