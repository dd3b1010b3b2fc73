/* Products of few rows by weights in bfloat16, of which half the bytes are read.

    x [R, K] in fp32 . W [N, K] in bfloat16, each output's inputs side by side  ->  [R, N] in fp32

A weight stays as the library for whole matrices wants it, and as files have it. Of a row or a few,
each entry is widened as it comes and multiplied in fp32. Of more, a processor that has matrix tiles
(Intel AMX) multiplies 16 outputs by 16 rows of x, rounded to bfloat16, at once. */

#include <stdint.h>
#include <string.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#endif

typedef int64_t i64;
typedef uint16_t half;

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
enum { VECTOR = 16 };
#elif defined(__AVX__)
enum { VECTOR = 8 };
#else
enum { VECTOR = 4 };
#endif

typedef float vector __attribute__((vector_size(VECTOR * sizeof(float)), aligned(4), may_alias));
typedef uint32_t pairs __attribute__((vector_size(VECTOR * sizeof(float)), aligned(2), may_alias));

/* BLOCK inputs are taken at a time; GROUP rows times SIDE outputs have as many sums as there are
registers for; more rows than FEW are the tiles', of EDGE by EDGE sums. */
enum { BLOCK = 32, GROUP = 6, SIDE = 4, FEW = 2, EDGE = 16 };

/* Rounds to the nearest, of two to the even one; a NaN stays one. */
INLINE half rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (half)(bits >> 16 | 0x40);
    return (half)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float widened(half x) {
    uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

/* What lies after the last whole BLOCK of inputs. */
INLINE float rest(const float *x, const half *weight, i64 depth) {
    float sum = 0.0f;
    for (i64 k = depth / BLOCK * BLOCK; k < depth; k++) sum += x[k] * widened(weight[k]);
    return sum;
}

/* x's whole blocks, with the even entries of each 2 * VECTOR first, then the odd ones: as they come
from a register of pairs. */
INLINE void part(const float *x, i64 x_stride, i64 rows, i64 depth, float *restrict to) {
    i64 whole = depth / BLOCK * BLOCK;
    for (i64 r = 0; r < rows; r++, x += x_stride, to += whole)
        for (i64 k = 0; k < whole; k += 2 * VECTOR)
            for (i64 l = 0; l < VECTOR; l++) {
                to[k + l] = x[k + 2 * l];
                to[k + VECTOR + l] = x[k + 2 * l + 1];
            }
}

/* `count` rows of x, parted, times `side` rows of the weight, while those that follow are fetched to
the core's first cache and those after them to the second. Nothing is read there: it may be none. */
INLINE void few(int count, int side, const float *x, i64 whole, const half *weight, i64 stride,
                float *y, i64 y_stride) {
    vector sum[GROUP][SIDE];
    for (int r = 0; r < count; r++)
        for (int n = 0; n < side; n++) sum[r][n] = (vector){};
    for (i64 k = 0; k < whole; k += 2 * VECTOR)
        for (int n = 0; n < side; n++) {
            pairs two = *(const pairs *)(weight + n * stride + k);
            vector even = (vector)(two << 16), odd = (vector)(two & 0xffff0000u);
            __builtin_prefetch(weight + (side + n) * stride + k, 0, 3);
            __builtin_prefetch(weight + (2 * side + n) * stride + k, 0, 2);
            for (int r = 0; r < count; r++) {
                sum[r][n] += even * *(const vector *)(x + r * whole + k);
                sum[r][n] += odd * *(const vector *)(x + r * whole + k + VECTOR);
            }
        }
    for (int r = 0; r < count; r++)
        for (int n = 0; n < side; n++) {
            float all = 0.0f;
            for (int l = 0; l < VECTOR; l++) all += sum[r][n][l];
            y[r * y_stride + n] = all;
        }
}

INLINE void by_few(const float *x, i64 x_stride, i64 rows, const half *weight, i64 stride,
                   i64 depth, i64 width, float *out, float *scratch) {
    i64 whole = depth / BLOCK * BLOCK, groups = (rows + GROUP - 1) / GROUP;
    part(x, x_stride, rows, depth, scratch);
    for (i64 n = 0, at; n < width; n += SIDE) {
        at = n + SIDE <= width ? n : width - SIDE;  /* the last ones once more */
        for (i64 g = 0, row = 0, count; g < groups; g++, row += count) {
            count = (rows - row) / (groups - g);
#define COUNTED(COUNT)                                                                             \
    case COUNT:                                                                                    \
        few(COUNT, SIDE, scratch + row * whole, whole, weight + at * stride, stride,               \
            out + row * width + at, width);                                                        \
        break
            switch (count) {
                COUNTED(1);
                COUNTED(2);
                COUNTED(3);
                COUNTED(4);
                COUNTED(5);
                COUNTED(6);
            }
        }
    }
}

#ifdef TILES
enum { PERMISSION = 0x1023, TILE_DATA = 18 };

typedef struct {
    uint8_t palette, start, none[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Tiles;

/* x's whole blocks, rounded, as the right side of a product of tiles: [rows / EDGE][blocks], each of
BLOCK / 2 pairs of inputs of EDGE rows. */
INLINE void packed(const float *x, i64 x_stride, i64 rows, i64 blocks, half *restrict to) {
    for (i64 m = 0; m < rows; m += EDGE)
        for (i64 b = 0; b < blocks; b++, to += BLOCK * EDGE)
            for (i64 r = 0; r < EDGE; r++) {
                const float *from = x + (m + r) * x_stride + b * BLOCK;
                for (i64 p = 0; p < BLOCK / 2; p++) {
                    to[p * 2 * EDGE + 2 * r] = m + r < rows ? rounded(from[2 * p]) : 0;
                    to[p * 2 * EDGE + 2 * r + 1] = m + r < rows ? rounded(from[2 * p + 1]) : 0;
                }
            }
}

/* 2 * EDGE outputs from `weight` times the rows of `one` block of x and of the one after it, where
`two`. A weight's lines are asked for eight tiles ahead, when they are read first. */
INLINE void tiles(const half *weight, i64 stride, i64 blocks, const half *one, int two, int first,
                  float *sums) {
    const half *below = weight + EDGE * stride, *other = one + blocks * BLOCK * EDGE;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (i64 b = 0; b < blocks; b++) {
        i64 k = b * BLOCK;
        if (first)
            for (i64 r = 0; r < EDGE; r++) {
                const half *near = weight + r * stride + k;
                for (i64 side = 0; side < 2; side++, near += EDGE * stride) {
                    __builtin_prefetch(near + 2 * BLOCK, 0, 3);
                    __builtin_prefetch(near + 2 * EDGE * stride, 0, 2);
                }
            }
        _tile_loadd(4, weight + k, stride * 2);
        _tile_loadd(5, below + k, stride * 2);
        _tile_loadd(6, one + k * EDGE, 4 * EDGE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (!two) continue;
        _tile_loadd(7, other + k * EDGE, 4 * EDGE);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 4 * EDGE);
    _tile_stored(1, sums + EDGE * EDGE, 4 * EDGE);
    if (!two) return;
    _tile_stored(2, sums + 2 * EDGE * EDGE, 4 * EDGE);
    _tile_stored(3, sums + 3 * EDGE * EDGE, 4 * EDGE);
}

static void by_tiles(const float *x, i64 x_stride, i64 rows, const half *weight, i64 stride,
                     i64 depth, i64 width, float *out, float *scratch) {
    i64 blocks = depth / BLOCK;
    half *right = (half *)scratch;
    float sums[4 * EDGE * EDGE];
    Tiles config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.rows[t] = EDGE, config.bytes[t] = 4 * EDGE;
    packed(x, x_stride, rows, blocks, right);
    _tile_loadconfig(&config);
    for (i64 n = 0, at; n < width; n += 2 * EDGE) {
        at = n + 2 * EDGE <= width ? n : width - 2 * EDGE;  /* the last ones once more */
        for (i64 m = 0; m < rows; m += 2 * EDGE) {
            int two = m + EDGE < rows;
            tiles(weight + at * stride, stride, blocks, right + m * blocks * BLOCK, two, m == 0,
                  sums);
            i64 end = rows - m < 2 * EDGE ? rows - m : 2 * EDGE;
            for (i64 r = 0; r < end; r++)
                for (i64 j = 0; j < 2 * EDGE; j++)
                    out[(m + r) * width + at + j] =
                        sums[(r / EDGE * 2 + j / EDGE) * EDGE * EDGE + j % EDGE * EDGE + r % EDGE];
        }
    }
    _tile_release();
}
#endif

/* Whether this process may use matrix tiles; asks for them. Without, all rows go the way of few. */
i64 hocket_tiles(void) {
#ifdef TILES
    static int granted = -1;
    if (granted < 0) granted = syscall(SYS_arch_prctl, PERMISSION, TILE_DATA) == 0;
    return granted;
#else
    return 0;
#endif
}

/* Entries of scratch that a product takes. */
i64 hocket_half_scratch(i64 rows, i64 depth) { return (rows + EDGE) / EDGE * EDGE * depth; }

/* out[r] = x[r] W^T + added[r], of `rows` rows x [rows, K] and W [N, K], N >= 2 * EDGE, both with a
stride; `added` [rows, N] with a stride (0: the same for all) or null; out [rows, N]. Sums are in
fp32; x is rounded to bfloat16 where tiles are used. */
void hocket_half_product(const float *x, i64 x_stride, i64 rows, const half *weight, i64 stride,
                         i64 depth, i64 width, const float *added, i64 added_stride, float *out,
                         float *scratch) {
#ifdef TILES
    if (rows > FEW && hocket_tiles())
        by_tiles(x, x_stride, rows, weight, stride, depth, width, out, scratch);
    else
#endif
        by_few(x, x_stride, rows, weight, stride, depth, width, out, scratch);
    if (depth % BLOCK)
        for (i64 r = 0; r < rows; r++)
            for (i64 n = 0; n < width; n++)
                out[r * width + n] += rest(x + r * x_stride, weight + n * stride, depth);
    if (added)
        for (i64 r = 0; r < rows; r++)
            for (i64 n = 0; n < width; n++) out[r * width + n] += added[r * added_stride + n];
}
