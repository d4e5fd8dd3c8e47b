/* Copies a tensor, computes its statistics and its checksum, and on request counts its elements by their binary exponents, in
 * one pass over memory.
 *
 * In plain torch the eleven statistics take about ten passes and ten calls; a training that is recorded at
 * every step pays for each. Here a block of 4 KiB is copied, and while it is in the first cache, counted, then summed in
 * double precision about a shift, so that a small spread about a large mean is not lost.
 *
 * Three versions of the same loop are compiled on x86-64, for AVX2, for AVX-512 and for any processor; which one runs is asked once.
 * Sums run in a fixed number of lanes in a fixed order: the same input gives the same output.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx512f,sse4.2")))
#define SSE42 __attribute__((target("sse4.2")))
#endif

struct statistics {
    int64_t numel, n_nan, n_posinf, n_neginf, n_zero;
    double min, max, absmax, mean, std, l2;
};

enum {
    FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, INT16, INT32, INT64, UINT8, BOOL, UINT16, UINT32, UINT64,
    FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT8_E4M3FNUZ, FLOAT8_E5M2FNUZ
};

#define BLOCK 1024
#define LANES 32
/* A tensor is cut into segments of so many elements, whatever the number of threads, so that its statistics do not
 * depend on it. */
#define SEGMENT 32768
/* How far ahead of the sums the next block is fetched. */
#define AHEAD 4096
/* Past this size the destination goes round the cache, which the model needs for itself. */
#define STREAMING_BYTES (256 * 1024)

/* What is summed: deviations from `shift`, the first finite value. */
struct sums {
    int64_t n_nan, n_posinf, n_neginf, n_zero;
    double shift, min, max, sum[LANES], square[LANES];
    int has_shift;
};

static const int SIZES[] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1, 2, 4, 8, 1, 1, 1, 1};

/* --- values that are not finite, or a block that is not full: one at a time ------------------------ */

static void add_one_by_one(const double *values, int count, struct sums *s) {
    for (int i = 0; i < count; i++) {
        double x = values[i];
        if (isnan(x)) { s->n_nan++; continue; }
        if (isinf(x)) { if (x > 0) s->n_posinf++; else s->n_neginf++; continue; }
        if (!s->has_shift) { s->has_shift = 1; s->shift = x; }
        s->n_zero += x == 0;
        if (x < s->min) s->min = x;
        if (x > s->max) s->max = x;
        double d = x - s->shift;
        s->sum[i % LANES] += d;
        s->square[i % LANES] += d * d;
    }
}

static float float8(uint8_t byte, int exponent_bits, int bias, int fnuz) {
    int mantissa_bits = 7 - exponent_bits;
    int exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1), mantissa = byte & ((1 << mantissa_bits) - 1);
    int top = (1 << exponent_bits) - 1, last = (1 << mantissa_bits) - 1;
    float sign = byte & 0x80 ? -1.0f : 1.0f;
    if (fnuz) {
        if (byte == 0x80) return NAN;
    } else if (exponent_bits == 5) {
        if (exponent == top) return mantissa ? NAN : sign * INFINITY;
    } else if (exponent == top && mantissa == last) return NAN;
    float fraction = ldexpf((float)mantissa, -mantissa_bits);
    return sign * (exponent ? ldexpf(1.0f + fraction, exponent - bias) : ldexpf(fraction, 1 - bias));
}

static float half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff, bits;
    if (exponent == 31) bits = sign | 0x7f800000 | mantissa << 13;
    else if (exponent) bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else {
        float f = (float)mantissa * 0x1p-24f;
        return sign ? -f : f;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* --- CRC-32C, by the processor's instruction ---------------------------------------------------------- */

#if defined(__x86_64__)
/* The instruction takes three cycles and can be begun in each, so four parts run side by side. They are put together by what
 * PART zero bytes do to a checksum, which is linear: a table for each of its four bytes. */
#define PART 512
static uint32_t after_part[4][256], after_elements[4][256]; /* the latter: of SEGMENT bytes */

SSE42 static void make_table(uint32_t table[4][256], int bytes) {
    for (int bit = 0; bit < 32; bit++) {
        uint64_t crc = (uint64_t)1 << bit;
        for (int i = 0; i < bytes; i += 8) crc = _mm_crc32_u64(crc, 0);
        for (int value = 0; value < 256; value++)
            if (value >> bit % 8 & 1) table[bit / 8][value] ^= (uint32_t)crc;
    }
}

__attribute__((constructor)) static void make_tables(void) {
    if (!__builtin_cpu_supports("sse4.2")) return;
    make_table(after_part, PART);
    make_table(after_elements, SEGMENT);
}

static uint32_t look_up(uint32_t table[4][256], uint64_t crc) {
    return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^ table[3][crc >> 24 & 255];
}

static uint32_t after_segment(uint32_t crc, int size) {
    for (int i = 0; i < size; i++) crc = look_up(after_elements, crc);
    return crc;
}

/* Eight bytes of each of four parts. */
SSE42 static inline __attribute__((always_inline)) void checksum_words(uint64_t crc[4], const char *data) {
    for (int k = 0; k < 4; k++) {
        uint64_t word;
        memcpy(&word, data + k * PART, 8);
        crc[k] = _mm_crc32_u64(crc[k], word);
    }
}

static inline __attribute__((always_inline)) void join_parts(uint64_t crc[4]) {
    for (int k = 1; k < 4; k++) crc[0] = look_up(after_part, crc[0]) ^ crc[k], crc[k] = 0;
}

SSE42 static uint32_t checksum(uint32_t begin, const char *data, size_t bytes) {
    uint64_t crc[4] = {begin, 0, 0, 0}, word;
    for (; bytes >= 4 * PART; data += 4 * PART, bytes -= 4 * PART) {
        for (int i = 0; i < PART; i += 8) checksum_words(crc, data + i);
        join_parts(crc);
    }
    for (; bytes >= 8; data += 8, bytes -= 8) {
        memcpy(&word, data, 8);
        crc[0] = _mm_crc32_u64(crc[0], word);
    }
    for (; bytes > 0; data++, bytes--) crc[0] = _mm_crc32_u8((uint32_t)crc[0], (uint8_t)*data);
    return (uint32_t)crc[0];
}
#endif

/* --- blocks: the part that is compiled for each processor -------------------------------------------------------- */

/* Takes a whole block of BLOCK floats; returns 0, and has added nothing, if one of them is not finite: finiteness and the largest
 * magnitude are the largest bits without the sign, so they cost one integer maximum. No branch in the loop and LANES
 * accumulators, so that a compiler makes vector code without being allowed to reorder sums. */
static int add_floats_any(const float *x, struct sums *s, uint32_t *checksum) {
    (void)checksum;
    uint32_t top[LANES] = {0}, zero[LANES] = {0}, most = 0;
    float low[LANES], high[LANES];
    double sum[LANES], square[LANES], shift = s->shift;
    memcpy(low, x, sizeof low);
    memcpy(high, x, sizeof high);
    memcpy(sum, s->sum, sizeof sum);
    memcpy(square, s->square, sizeof square);
    for (int i = 0; i < BLOCK; i += LANES)
        for (int k = 0; k < LANES; k++) {
            float value = x[i + k];
            double d = (double)value - shift;
            uint32_t bits;
            memcpy(&bits, x + i + k, 4);
            bits &= 0x7fffffff;
            top[k] = bits > top[k] ? bits : top[k];
            zero[k] += bits == 0;
            low[k] = value < low[k] ? value : low[k];
            high[k] = value > high[k] ? value : high[k];
            sum[k] += d;
            square[k] += d * d;
        }
    for (int k = 0; k < LANES; k++) most = top[k] > most ? top[k] : most;
    if (most >= 0x7f800000) return 0;
    memcpy(s->sum, sum, sizeof sum);
    memcpy(s->square, square, sizeof square);
    for (int k = 0; k < LANES; k++) {
        s->n_zero += zero[k];
        s->min = low[k] < s->min ? low[k] : s->min;
        s->max = high[k] > s->max ? high[k] : s->max;
    }
    return 1;
}

static void bfloat16_block_any(const uint16_t *from, float *to) {
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, 4);
    }
}

static void half_block_any(const uint16_t *from, float *to) {
    for (int i = 0; i < BLOCK; i++) to[i] = half(from[i]);
}
static void copy_any(char *to, const char *from, size_t bytes, int streaming) {
    (void)streaming;
    memcpy(to, from, bytes);
}

#if defined(__x86_64__)
/* The same loop by hand: compilers do not vectorise it well. */
AVX2 static int add_floats_avx2(const float *x, struct sums *s, uint32_t *checksum) {
    (void)checksum;
    const __m256d shift = _mm256_set1_pd(s->shift);
    const __m256i sign_off = _mm256_set1_epi32(0x7fffffff), none = _mm256_setzero_si256();
    __m256i top = none, zeros = none;
    __m256 low = _mm256_loadu_ps(x), high = low;
    __m256d sum[4], square[4];
    for (int k = 0; k < 4; k++) {
        sum[k] = _mm256_loadu_pd(s->sum + 4 * k);
        square[k] = _mm256_loadu_pd(s->square + 4 * k);
    }
    for (int i = 0; i < BLOCK; i += 16) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        __m256i abs_a = _mm256_and_si256(_mm256_castps_si256(a), sign_off);
        __m256i abs_b = _mm256_and_si256(_mm256_castps_si256(b), sign_off);
        _mm_prefetch((const char *)(x + i) + AHEAD, _MM_HINT_T0);
        top = _mm256_max_epu32(top, _mm256_max_epu32(abs_a, abs_b));
        zeros = _mm256_sub_epi32(zeros, _mm256_cmpeq_epi32(abs_a, none));
        zeros = _mm256_sub_epi32(zeros, _mm256_cmpeq_epi32(abs_b, none));
        low = _mm256_min_ps(low, _mm256_min_ps(a, b));
        high = _mm256_max_ps(high, _mm256_max_ps(a, b));
        for (int k = 0; k < 4; k++) {
            __m256d d = _mm256_sub_pd(_mm256_cvtps_pd(_mm_loadu_ps(x + i + 4 * k)), shift);
            sum[k] = _mm256_add_pd(sum[k], d);
            square[k] = _mm256_fmadd_pd(d, d, square[k]);
        }
    }
    uint32_t tops[8], counts[8], most = 0;
    float lows[8], highs[8];
    _mm256_storeu_si256((__m256i *)tops, top);
    for (int k = 0; k < 8; k++) most = tops[k] > most ? tops[k] : most;
    if (most >= 0x7f800000) return 0;
    _mm256_storeu_si256((__m256i *)counts, zeros);
    _mm256_storeu_ps(lows, low);
    _mm256_storeu_ps(highs, high);
    for (int k = 0; k < 4; k++) {
        _mm256_storeu_pd(s->sum + 4 * k, sum[k]);
        _mm256_storeu_pd(s->square + 4 * k, square[k]);
    }
    for (int k = 0; k < 8; k++) {
        s->n_zero += counts[k];
        s->min = lows[k] < s->min ? lows[k] : s->min;
        s->max = highs[k] > s->max ? highs[k] : s->max;
    }
    return 1;
}

/* With the checksum, which runs on a port of the processor that the sums leave idle. */
AVX512 static inline __attribute__((always_inline)) int add_and_checksum(const float *x, struct sums *s, uint32_t *checksum) {
    uint64_t crc[4] = {checksum ? *checksum : 0, 0, 0, 0};
    const __m512d shift = _mm512_set1_pd(s->shift);
    const __m512i sign_off = _mm512_set1_epi32(0x7fffffff), none = _mm512_setzero_si512(), one = _mm512_set1_epi32(1);
    __m512i top = none, zeros = none;
    __m512 low = _mm512_loadu_ps(x), high = low;
    __m512d sum[4], square[4];
    for (int k = 0; k < 4; k++) {
        sum[k] = _mm512_loadu_pd(s->sum + 8 * k);
        square[k] = _mm512_loadu_pd(s->square + 8 * k);
    }
    for (int i = 0; i < BLOCK; i += 32) {
        for (int j = 0; j < 2; j++) {
            __m512 a = _mm512_loadu_ps(x + i + 16 * j);
            __m512i abs_a = _mm512_and_si512(_mm512_castps_si512(a), sign_off);
            _mm_prefetch((const char *)(x + i + 16 * j) + AHEAD, _MM_HINT_T0);
            top = _mm512_max_epu32(top, abs_a);
            zeros = _mm512_mask_add_epi32(zeros, _mm512_cmpeq_epi32_mask(abs_a, none), zeros, one);
            low = _mm512_min_ps(low, a);
            high = _mm512_max_ps(high, a);
        }
        if (checksum) {
            /* 128 bytes of the 4096 in each round: 32 of each of four parts, and two such halves. */
            const char *data = (const char *)x + i / 512 * 2048 + i % 512;
            for (int j = 0; j < 4; j++) checksum_words(crc, data + 8 * j);
            if (i % 512 == 480) join_parts(crc);
        }
        for (int k = 0; k < 4; k++) {
            __m512d d = _mm512_sub_pd(_mm512_cvtps_pd(_mm256_loadu_ps(x + i + 8 * k)), shift);
            sum[k] = _mm512_add_pd(sum[k], d);
            square[k] = _mm512_fmadd_pd(d, d, square[k]);
        }
    }
    if (checksum) *checksum = (uint32_t)crc[0];
    if (_mm512_reduce_max_epu32(top) >= 0x7f800000) return 0;
    for (int k = 0; k < 4; k++) {
        _mm512_storeu_pd(s->sum + 8 * k, sum[k]);
        _mm512_storeu_pd(s->square + 8 * k, square[k]);
    }
    float least = _mm512_reduce_min_ps(low), greatest = _mm512_reduce_max_ps(high);
    s->n_zero += _mm512_reduce_add_epi32(zeros);
    s->min = least < s->min ? least : s->min;
    s->max = greatest > s->max ? greatest : s->max;
    return 1;
}

AVX512 static int add_floats_avx512(const float *x, struct sums *s, uint32_t *checksum) {
    return checksum ? add_and_checksum(x, s, checksum) : add_and_checksum(x, s, NULL);
}

AVX2 static void bfloat16_block_avx2(const uint16_t *from, float *to) {
    for (int i = 0; i < BLOCK; i += 8) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + i)));
        _mm256_storeu_si256((__m256i *)(to + i), _mm256_slli_epi32(wide, 16));
    }
}

AVX2 static void half_block_avx2(const uint16_t *from, float *to) {
    for (int i = 0; i < BLOCK; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
}

AVX2 static void copy_avx2(char *to, const char *from, size_t bytes, int streaming) {
    if (!streaming || ((uintptr_t)to & 31)) {
        memcpy(to, from, bytes);
        return;
    }
    size_t i = 0;
    for (; i + 128 <= bytes; i += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + i + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + i + 96));
        _mm256_stream_si256((__m256i *)(to + i), a);
        _mm256_stream_si256((__m256i *)(to + i + 32), b);
        _mm256_stream_si256((__m256i *)(to + i + 64), c);
        _mm256_stream_si256((__m256i *)(to + i + 96), d);
    }
    memcpy(to + i, from + i, bytes - i);
}
#endif

struct functions {
    int (*add_floats)(const float *, struct sums *, uint32_t *);
    void (*bfloat16_block)(const uint16_t *, float *);
    void (*half_block)(const uint16_t *, float *);
    void (*copy)(char *, const char *, size_t, int);
    int checksums; /* whether add_floats takes the checksum along */
};

static const struct functions ANY = {add_floats_any, bfloat16_block_any, half_block_any, copy_any, 0};
#if defined(__x86_64__)
static const struct functions FOR_AVX2 = {add_floats_avx2, bfloat16_block_avx2, half_block_avx2, copy_avx2, 0};
static const struct functions FOR_AVX512 = {add_floats_avx512, bfloat16_block_avx2, half_block_avx2, copy_avx2, 1};
#endif

static const struct functions *functions_of_processor(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("f16c")) return &FOR_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return &FOR_AVX2;
#endif
    return &ANY;
}

/* --- from a dtype to floats or doubles --------------------------------------------------------------- */

static void to_doubles(const char *from, int count, int dtype, double *to) {
#define CASE(DTYPE, TYPE)                                   \
    case DTYPE:                                             \
        for (int i = 0; i < count; i++) {                   \
            TYPE value;                                     \
            memcpy(&value, from + i * sizeof value, sizeof value); \
            to[i] = (double)value;                          \
        }                                                   \
        return;
    switch (dtype) {
        CASE(FLOAT32, float)
        CASE(FLOAT64, double)
        CASE(INT8, int8_t)
        CASE(INT16, int16_t)
        CASE(INT32, int32_t)
        CASE(INT64, int64_t)
        CASE(UINT8, uint8_t)
        CASE(UINT16, uint16_t)
        CASE(UINT32, uint32_t)
        CASE(UINT64, uint64_t)
    }
#undef CASE
    for (int i = 0; i < count; i++) {
        uint16_t two;
        uint32_t bits;
        float value;
        uint8_t byte = (uint8_t)from[i];
        switch (dtype) {
            case FLOAT16: memcpy(&two, from + 2 * i, 2); to[i] = half(two); break;
            case BFLOAT16:
                memcpy(&two, from + 2 * i, 2);
                bits = (uint32_t)two << 16;
                memcpy(&value, &bits, 4);
                to[i] = value;
                break;
            case BOOL: to[i] = byte != 0; break;
            case FLOAT8_E4M3FN: to[i] = float8(byte, 4, 7, 0); break;
            case FLOAT8_E5M2: to[i] = float8(byte, 5, 15, 0); break;
            case FLOAT8_E4M3FNUZ: to[i] = float8(byte, 4, 8, 1); break;
            default: to[i] = float8(byte, 5, 16, 1);
        }
    }
}

/* Adds a block to the sums; returns whether it took the checksum along. */
static int add_block(
    const char *from, int count, int dtype, const struct functions *f, struct sums *s, uint32_t *checksum) {
    float floats[BLOCK];
    double doubles[BLOCK];
    const float *x = floats;
    int checked = 0;
    if (count == BLOCK && (dtype == FLOAT32 || dtype == BFLOAT16 || dtype == FLOAT16)) {
        if (dtype == FLOAT32) {
            if ((uintptr_t)from % 4) memcpy(floats, from, sizeof floats);
            else x = (const float *)from;
        } else if (dtype == BFLOAT16) f->bfloat16_block((const uint16_t *)from, floats);
        else f->half_block((const uint16_t *)from, floats);
        if (!s->has_shift && isfinite(x[0])) { s->has_shift = 1; s->shift = x[0]; }
        if (s->has_shift) {
            checked = checksum != NULL && dtype == FLOAT32 && f->checksums;
            if (f->add_floats(x, s, checked ? checksum : NULL)) return checked;
        }
    }
    to_doubles(from, count, dtype, doubles);
    add_one_by_one(doubles, count, s);
    return checked;
}

/* --- exponents: how many elements lie between one power of two and the next ------------------------------------------- */

/* What is less than 2^-149, the smallest float32, is counted as 2^LEAST, and what is 2^MOST or more as that: both are float64. */
#define LEAST (-150)
#define MOST 128
#define EXPONENTS (MOST - LEAST + 1)
/* Neighbours often have the same exponent, and a count that was just stored is slow to load: so each has a table of its own. */
#define TABLES 4

/* Of a segment: by the eight bits of the exponent in a float32, by the byte of a float8, of float64 by exponents themselves. */
struct tally {
    uint32_t counts[TABLES][EXPONENTS + 1]; /* the last is for what has no exponent: 0, NaN and infinity */
    uint32_t subnormal[EXPONENTS];          /* of float32: those that share one code, by their exponents */
};

static int is_float(int dtype) {
    return dtype <= BFLOAT16 || dtype >= FLOAT8_E4M3FN;
}

/* Of the bits without the sign, which are less than 2^23. Integers alone, since the trainer may have the processor take subnormal
 * numbers for 0. */
static int exponent_of_subnormal(uint32_t bits) { return 31 - __builtin_clz(bits) - 149; }

static void tally_floats(const char *floats, int count, struct tally *t) {
    uint32_t before = 0, small = 0, zeros = 0, bits;
    for (int k = 0; k < TABLES; k++) before += t->counts[k][0];
    for (int i = 0; i < count; i++) {
        memcpy(&bits, floats + 4 * i, 4);
        t->counts[i % TABLES][bits >> 23 & 255]++;
    }
    for (int k = 0; k < TABLES; k++) small += t->counts[k][0];
    if (small == before) return;
    for (int i = 0; i < count; i++) {
        memcpy(&bits, floats + 4 * i, 4);
        zeros += bits << 1 == 0;
    }
    if (small - before == zeros) return;
    for (int i = 0; i < count; i++) {
        memcpy(&bits, floats + 4 * i, 4);
        bits &= 0x7fffffff;
        if (bits && bits < 0x800000) t->subnormal[exponent_of_subnormal(bits) - LEAST]++;
    }
}

static void tally_doubles(const char *doubles, int count, struct tally *t) {
    for (int i = 0; i < count; i++) {
        uint64_t bits;
        memcpy(&bits, doubles + 8 * i, 8);
        bits &= 0x7fffffffffffffff;
        int exponent = (int)(bits >> 52) - 1023, at = exponent < LEAST ? LEAST : exponent > MOST ? MOST : exponent;
        t->counts[i % TABLES][bits == 0 || exponent == 1024 ? EXPONENTS : at - LEAST]++;
    }
}

static void tally_block(const char *from, int count, int dtype, const struct functions *f, struct tally *t) {
    float floats[BLOCK];
    if (SIZES[dtype] == 1) {
        for (int i = 0; i < count; i++) t->counts[i % TABLES][(uint8_t)from[i]]++;
    } else if (dtype == FLOAT64) tally_doubles(from, count, t);
    else if (dtype == FLOAT32) tally_floats(from, count, t);
    else {
        char padded[2 * BLOCK];
        if (count < BLOCK) { /* the conversions take whole blocks */
            memset(padded, 0, sizeof padded);
            memcpy(padded, from, 2 * (size_t)count);
            from = padded;
        }
        if (dtype == BFLOAT16) f->bfloat16_block((const uint16_t *)from, floats);
        else f->half_block((const uint16_t *)from, floats);
        tally_floats((const char *)floats, count, t);
    }
}

/* Segments are counted by several threads, in any order: sums of integers are the same. */
static void add_tally(const struct tally *t, int dtype, int64_t *counts) {
    for (int i = 0; i < EXPONENTS; i++) {
        int64_t number = 0;
        int at = i;
        for (int k = 0; k < TABLES; k++) number += t->counts[k][i];
        if (t->subnormal[i]) __atomic_fetch_add(counts + i, t->subnormal[i], __ATOMIC_RELAXED);
        if (number == 0) continue;
        if (dtype == FLOAT32 || dtype == FLOAT16 || dtype == BFLOAT16) {
            if (i == 0 || i == 255) continue; /* 0 and subnormal, NaN and infinity */
            at = i - 127 - LEAST;
        } else if (dtype != FLOAT64) {
            double x;
            char element[8] = {(char)i};
            int exponent;
            to_doubles(element, 1, dtype, &x);
            if (x == 0 || !isfinite(x)) continue;
            frexp(x, &exponent);
            at = exponent - 1 - LEAST;
        }
        __atomic_fetch_add(counts + at, number, __ATOMIC_RELAXED);
    }
}

/* Squares of float64 values may overflow where the values do not: once more, in units of the largest. */
static void scaled(const char *source, int64_t numel, int dtype, double absmax, struct statistics *out) {
    double block[BLOCK], mean = 0, square = 0, spread = 0;
    int size = SIZES[dtype];
    int64_t finite = out->numel - out->n_nan - out->n_posinf - out->n_neginf;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < numel; i += BLOCK) {
            int count = (int)(numel - i < BLOCK ? numel - i : BLOCK);
            to_doubles(source + i * size, count, dtype, block);
            for (int k = 0; k < count; k++) {
                if (!isfinite(block[k])) continue;
                double x = block[k] / absmax;
                if (pass == 0) { mean += x / (double)finite; square += x * x; }
                else spread += (x - mean) * (x - mean);
            }
        }
    }
    out->mean = mean * absmax;
    out->std = sqrt(spread / (double)finite) * absmax;
    out->l2 = sqrt(square) * absmax;
}

/* What a segment of a tensor is, so that segments can be described side by side. */
struct part {
    int64_t n_nan, n_posinf, n_neginf, n_zero, n_finite;
    double min, max, mean, deviation; /* the sum of (x - mean)^2 */
    uint32_t crc;
};

static void conclude_part(const struct sums *s, int64_t numel, struct part *p) {
    p->n_nan = s->n_nan;
    p->n_posinf = s->n_posinf;
    p->n_neginf = s->n_neginf;
    p->n_zero = s->n_zero;
    p->n_finite = numel - s->n_nan - s->n_posinf - s->n_neginf;
    p->min = s->min;
    p->max = s->max;
    p->mean = p->deviation = 0;
    if (p->n_finite == 0) return;
    double n = (double)p->n_finite, sum = 0, square = 0;
    for (int k = 0; k < LANES; k++) {
        sum += s->sum[k];
        square += s->square[k];
    }
    p->mean = s->shift + sum / n;
    p->deviation = square - sum * (sum / n);
    if (p->deviation < 0) p->deviation = 0;
}

/* Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983), equation 2.1. */
static void join(struct part *all, const struct part *p) {
    all->n_nan += p->n_nan;
    all->n_posinf += p->n_posinf;
    all->n_neginf += p->n_neginf;
    all->n_zero += p->n_zero;
    if (p->n_finite == 0) return;
    double before = (double)all->n_finite, n = (double)p->n_finite, apart = p->mean - all->mean;
    all->n_finite += p->n_finite;
    all->min = p->min < all->min ? p->min : all->min;
    all->max = p->max > all->max ? p->max : all->max;
    all->mean += apart * (n / (before + n));
    all->deviation += p->deviation + apart * apart * (before * (n / (before + n)));
}

static void conclude(const struct part *all, const char *source, int64_t numel, int dtype, struct statistics *out) {
    out->numel = numel;
    out->n_nan = all->n_nan;
    out->n_posinf = all->n_posinf;
    out->n_neginf = all->n_neginf;
    out->n_zero = all->n_zero;
    if (all->n_finite == 0) {
        out->min = out->max = out->absmax = out->mean = out->std = out->l2 = NAN;
        return;
    }
    double n = (double)all->n_finite;
    out->min = all->min;
    out->max = all->max;
    out->absmax = fmax(fabs(all->min), fabs(all->max));
    out->mean = all->mean;
    out->std = sqrt(all->deviation / n);
    out->l2 = sqrt(all->deviation + n * all->mean * all->mean);
    if (dtype == FLOAT64 && (!isfinite(out->l2) || !isfinite(out->std) || !isfinite(out->mean) || out->absmax < 1e-140))
        if (out->absmax > 0) scaled(source, numel, dtype, out->absmax, out);
}

static int can_checksum(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2");
#else
    return 0;
#endif
}

/* --- segments, side by side --------------------------------------------------------------------------- */

/* Segments that are described before their parts are joined. */
#define WAVE 64

struct job {
    const char *source;
    char *destination;
    int64_t first; /* elements of the first segment, the only one that may be shorter: the others shift a checksum by a known length */
    int dtype, with_statistics, with_checksum, streaming, segments, next;
    uint32_t crc; /* with which the first begins */
    int64_t *counts; /* by exponent; null if they are not asked for */
    const struct functions *f;
    struct part parts[WAVE];
};

static void do_segment(struct job *job, int number) {
    int size = SIZES[job->dtype];
    int64_t begin = number ? job->first + (number - 1) * (int64_t)SEGMENT : 0, numel = number ? SEGMENT : job->first;
    const char *from = job->source + begin * size;
    char *to = job->destination ? job->destination + begin * size : NULL;
    struct sums s;
    struct tally tally;
    uint32_t crc = number ? 0 : job->crc;
    memset(&s, 0, sizeof s);
    if (job->counts) memset(&tally, 0, sizeof tally);
    s.min = INFINITY;
    s.max = -INFINITY;
    for (int64_t i = 0; i < numel; i += BLOCK) {
        int count = (int)(numel - i < BLOCK ? numel - i : BLOCK);
        size_t bytes = (size_t)count * (size_t)size;
        if (to != NULL) {
            job->f->copy(to, from, bytes, job->streaming);
            to += bytes;
        }
        int checked = 0;
        if (job->counts) tally_block(from, count, job->dtype, job->f, &tally);
        if (job->with_statistics) checked = add_block(from, count, job->dtype, job->f, &s, job->with_checksum ? &crc : NULL);
#if defined(__x86_64__)
        if (job->with_checksum && !checked) crc = checksum(crc, from, bytes);
#endif
        from += bytes;
    }
#if defined(__x86_64__)
    if (job->streaming) _mm_sfence();
#endif
    if (job->counts) add_tally(&tally, job->dtype, job->counts);
    conclude_part(&s, numel, &job->parts[number]);
    job->parts[number].crc = crc;
}

static void work(void *data) {
    struct job *job = data;
    for (;;) {
        int number = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (number >= job->segments) return;
        do_segment(job, number);
    }
}

/* GOMP_parallel of the OpenMP library that torch runs on: its threads are there and awake, and obey
 * torch.set_num_threads. A library of our own would bring as many again, which would fight with them. */
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

void hookrec_run_on(void *gomp_parallel) { memcpy(&parallel, &gomp_parallel, sizeof parallel); }

/* Copy `numel` elements and describe them. `destination`, `out` and `counts` may be null; `counts` has room for EXPONENTS numbers.
 * Returns the CRC-32C of the bytes if `with_checksum`, or -1 if not, or if the processor has no instruction for it. */
int64_t hookrec_capture(
    const void *source, void *destination, int64_t numel, int32_t dtype, struct statistics *out, int32_t with_checksum,
    int64_t *counts) {
    int size = SIZES[dtype];
    struct part all;
    struct job job;
    memset(&all, 0, sizeof all);
    all.min = INFINITY;
    all.max = -INFINITY;
    job.source = source;
    job.destination = destination;
    job.dtype = dtype;
    job.with_statistics = out != NULL;
    job.with_checksum = with_checksum && can_checksum();
    job.streaming = destination != NULL && numel * size >= STREAMING_BYTES;
    job.crc = 0xffffffff;
    job.counts = is_float(dtype) ? counts : NULL;
    if (counts != NULL) memset(counts, 0, EXPONENTS * sizeof *counts);
    job.f = functions_of_processor();
    int64_t left = numel;
    do {
        job.first = left % SEGMENT ? left % SEGMENT : left < SEGMENT ? left : SEGMENT;
        int64_t segments = (left - job.first) / SEGMENT + 1;
        job.segments = (int)(segments < WAVE ? segments : WAVE);
        job.next = 0;
        if (job.segments > 1 && parallel) parallel(work, &job, 0, 0);
        else work(&job);
        int64_t done = job.first + (job.segments - 1) * (int64_t)SEGMENT;
        job.crc = job.parts[0].crc;
        for (int i = 0; i < job.segments; i++) {
#if defined(__x86_64__)
            if (i && job.with_checksum) job.crc = after_segment(job.crc, size) ^ job.parts[i].crc;
#endif
            join(&all, &job.parts[i]);
        }
        left -= done;
        job.source += done * size;
        if (job.destination) job.destination += done * size;
    } while (left > 0);
    if (out != NULL) conclude(&all, source, numel, dtype, out);
    return job.with_checksum ? (int64_t)(job.crc ^ 0xffffffff) : -1;
}
