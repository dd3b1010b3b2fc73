/* Kernels: what a step of decoding does between its matrix products, in fp32 on one core.

Each takes pointers, sizes, and strides in elements; where a stride is not named, entries lie one
after the other. Nothing is allocated and nothing but the result is written. A NaN stays a NaN: the
compiler may reorder sums, but must not assume that numbers are finite.

Legend: T tokens, R decoding rows, A query heads, K key/value heads, G = A / K, D head size of
queries and keys, E of values, B block size.
*/

#include <stdint.h>
#include <string.h>

typedef int64_t i64;

#define INLINE static inline __attribute__((always_inline))

/* exp(x), to about one unit in the last place, for x from -87 to 88 and clamped outside. */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = __builtin_rintf(x * 1.44269504089f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

enum { LANES = 32, WIDE = 16, TILE = 8 };

/* Entries of a register. Of a longer vector than that, the compiler keeps the parts in memory. */
#if defined(__AVX512F__)
enum { VECTOR = 16 };
#elif defined(__AVX__)
enum { VECTOR = 8 };
#else
enum { VECTOR = 4 };
#endif

typedef float vector __attribute__((vector_size(VECTOR * sizeof(float)), aligned(4), may_alias));

/* The largest of `size` entries. Lane by lane: a maximum in the presence of NaN has an order, which
the compiler would keep. A NaN is passed over unless it comes first. */
INLINE float maximum(const float *x, i64 size) {
    float lane[LANES];
    i64 j = 0;
    for (i64 l = 0; l < LANES; l++) lane[l] = x[0];
    for (; j + LANES <= size; j += LANES)
        for (i64 l = 0; l < LANES; l++) lane[l] = x[j + l] > lane[l] ? x[j + l] : lane[l];
    for (; j < size; j++) lane[0] = x[j] > lane[0] ? x[j] : lane[0];
#define HALVE(N) for (int l = 0; l < N; l++) lane[l] = lane[l + N] > lane[l] ? lane[l + N] : lane[l]
    HALVE(16); HALVE(8); HALVE(4); HALVE(2); HALVE(1);
    return lane[0];
}

/* out[o][i] = x[o][i] / sqrt(mean of squares + eps) * (weight + offset), over `width` entries.

Zhang and Sennrich 2019. `x` has `outer` rows of `inner` vectors, with strides; `out` has none. */
void hocket_rms_norm(const float *x, i64 outer, i64 outer_stride, i64 inner, i64 inner_stride,
                     i64 width, const float *weight, float offset, float eps, float *out) {
    for (i64 o = 0; o < outer; o++)
        for (i64 i = 0; i < inner; i++, out += width) {
            const float *v = x + o * outer_stride + i * inner_stride;
            float sum = 0.0f;
            for (i64 j = 0; j < width; j++) sum += v[j] * v[j];
            float scale = 1.0f / __builtin_sqrtf(sum / (float)width + eps);
            for (i64 j = 0; j < width; j++) out[j] = v[j] * scale * (weight[j] + offset);
        }
}

/* out[r][j] = silu(gate[r][j]) * up[r][j]. */
void hocket_silu_product(const float *gate, i64 gate_stride, const float *up, i64 up_stride,
                         i64 rows, i64 width, float *restrict out) {
    for (i64 r = 0; r < rows; r++, gate += gate_stride, up += up_stride, out += width)
        for (i64 j = 0; j < width; j++)
            out[j] = gate[j] / (1.0f + exponential(-gate[j])) * up[j];
}

/* Rotary positions of the halves of each head (Su et al. 2021): x [heads, T, D] with strides to
out [T, heads of out, D], whose tokens lie `out_stride` apart; cosine and sine [T, D]. */
void hocket_rotate(const float *x, i64 heads, i64 tokens, i64 head_stride, i64 token_stride,
                   i64 size, const float *cosine, const float *sine, float *restrict out,
                   i64 out_stride) {
    i64 half = size / 2;
    for (i64 t = 0; t < tokens; t++, cosine += size, sine += size, out += out_stride)
        for (i64 h = 0; h < heads; h++) {
            const float *a = x + h * head_stride + t * token_stride, *b = a + half;
            float *to = out + h * size;
            for (i64 j = 0; j < half; j++) {
                to[j] = a[j] * cosine[j] - b[j] * sine[j];
                to[half + j] = b[j] * cosine[half + j] + a[j] * sine[half + j];
            }
        }
}

/* Writes x [heads, T, width], with strides, into a pool [blocks, heads, B, width] at `places` [T],
each block * B + offset. */
void hocket_store(const float *x, i64 heads, i64 tokens, i64 head_stride, i64 token_stride,
                  i64 width, const i64 *places, i64 block_size, float *restrict pool) {
    for (i64 t = 0; t < tokens; t++) {
        i64 block = places[t] / block_size, offset = places[t] % block_size;
        float *to = pool + (block * heads * block_size + offset) * width;
        for (i64 h = 0; h < heads; h++)
            memcpy(to + h * block_size * width, x + h * head_stride + t * token_stride,
                   (size_t)width * sizeof(float));
    }
}

INLINE float product(const float *a, const float *b, i64 size) {
    float sum = 0.0f;
    for (i64 j = 0; j < size; j++) sum += a[j] * b[j];
    return sum;
}

/* Softmax of the scores [first, end) of a row, scaled and, if there is a `cap`, bent to
cap * tanh(s / cap), in place; 0 in the rest of [0, size), which is whole WIDE: no entry is computed
by itself. */
INLINE void softmax(float *s, i64 first, i64 end, i64 size, float scale, float cap,
                    const float *sink) {
    float sum = 0.0f;
    for (i64 t = 0; t < size; t++) s[t] *= scale;
    if (cap)
        for (i64 t = 0; t < size; t++)
            s[t] = cap - 2.0f * cap / (exponential(2.0f / cap * s[t]) + 1.0f);
    for (i64 t = 0; t < first; t++) s[t] = -__builtin_inff();
    for (i64 t = end; t < size; t++) s[t] = -__builtin_inff();
    float largest = maximum(s, size);
    if (sink) largest = *sink > largest ? *sink : largest;
    for (i64 t = 0; t < size; t++) {
        s[t] = exponential(s[t] - largest);
        sum += s[t];
    }
    if (sink) sum += exponential(*sink - largest);
    float share = 1.0f / sum;
    for (i64 t = 0; t < size; t++) s[t] *= share;
    for (i64 t = 0; t < first; t++) s[t] = 0.0f;
    for (i64 t = end; t < size; t++) s[t] = 0.0f;
}

/* Asks for `size` entries that are read next, and for as many of those after them. */
INLINE void fetch(const float *next, const float *after, i64 size) {
    for (i64 j = 0; j < size; j += 16) {
        __builtin_prefetch(next + j, 0, 3);
        __builtin_prefetch(after + j, 0, 2);
    }
}

/* One row: scores of `count` tokens from `first`, their softmax, the values weighted by it. A block
is read from its beginning to its end, all heads of it; with each token of it, that token's place in
the next two is fetched: a whole block asked for at once waits for the core's few open reads.
`scores` [K * G, most]. */
INLINE void attend(const float *q, i64 head_stride, const float *keys, const float *values,
                   const i64 *table, i64 heads, i64 group, i64 size, i64 width, i64 block_size,
                   i64 first, i64 count, float scale, float cap, const float *sinks,
                   float *restrict scores, i64 most, float *restrict out) {
    i64 end = first + count, last = (end - 1) / block_size;
    i64 key_block = heads * block_size * size, value_block = heads * block_size * width;
    for (i64 at = first, n; at < end; at += n) {
        i64 block = at / block_size, offset = at % block_size;
        n = block_size - offset < end - at ? block_size - offset : end - at;
        const float *next = keys + table[block < last ? block + 1 : last] * key_block;
        const float *after = keys + table[block + 1 < last ? block + 2 : last] * key_block;
        for (i64 h = 0; h < heads; h++) {
            i64 at_head = h * block_size * size;
            const float *k = keys + table[block] * key_block + at_head + offset * size;
            for (i64 t = 0; t < n; t++) {
                fetch(next + at_head + t * size, after + at_head + t * size, size);
                for (i64 g = h * group; g < (h + 1) * group; g++)
                    scores[g * most + at - first + t] =
                        product(q + g * head_stride, k + t * size, size);
            }
        }
    }
    for (i64 g = 0; g < heads * group; g++) {
        softmax(scores + g * most, 0, count, (count + WIDE - 1) / WIDE * WIDE, scale,
                cap, sinks ? sinks + g : 0);
        for (i64 j = 0; j < width; j++) out[g * width + j] = 0.0f;
    }
    for (i64 at = first, n; at < end; at += n) {
        i64 block = at / block_size, offset = at % block_size;
        n = block_size - offset < end - at ? block_size - offset : end - at;
        const float *next = values + table[block < last ? block + 1 : last] * value_block;
        const float *after = values + table[block + 1 < last ? block + 2 : last] * value_block;
        for (i64 h = 0; h < heads; h++) {
            i64 at_head = h * block_size * width;
            const float *v = values + table[block] * value_block + at_head + offset * width;
            for (i64 t = 0; t < n; t++) {
                fetch(next + at_head + t * width, after + at_head + t * width, width);
                for (i64 g = h * group; g < (h + 1) * group; g++) {
                    float *restrict to = out + g * width;
                    float share = scores[g * most + at - first + t];
                    for (i64 j = 0; j < width; j++) to[j] += share * v[t * width + j];
                }
            }
        }
    }
}

/* Attention of R rows of one token to their blocks (Kwon et al. 2023).

q [R, A, D] with strides; pools [blocks, K, B, D] and [blocks, K, B, E]; `tables` [R, columns] names
each row's blocks, `lengths` [R] its tokens, its own included; `window` tokens are seen (0: all);
scores are capped by `cap` (0: they are not); `sinks` [A] or null; `scratch` [A, most], `most` at least the longest row
in whole WIDE; out [R, A, E]. */
void hocket_attend(const float *q, i64 row_stride, i64 head_stride, const float *keys,
                   const float *values, const i64 *tables, i64 columns, const i64 *lengths,
                   i64 rows, i64 heads, i64 group, i64 size, i64 width, i64 block_size, i64 window,
                   float scale, float cap, const float *sinks, float *scratch, i64 most,
                   float *out) {
    for (i64 r = 0; r < rows; r++, q += row_stride, tables += columns) {
        i64 length = lengths[r], first = window && length > window ? length - window : 0;
        float *to = out + r * heads * group * width;
#define SIZED(D, E)                                                                                \
    attend(q, head_stride, keys, values, tables, heads, group, D, E, block_size, first,            \
           length - first, scale, cap, sinks, scratch, most, to)
        if (size == 32 && width == 32) SIZED(32, 32);
        else if (size == 64 && width == 64) SIZED(64, 64);
        else if (size == 128 && width == 128) SIZED(128, 128);
        else SIZED(size, width);
    }
}

/* All that lies between the first and the second product of an attention layer, for R rows of one
token: query and key are turned, key and value stored at `places` [R], the query attends.

`merged` [R, (A + 2 K) * D] holds query, key and value heads; cosine and sine [R, D]; the rest as
above; `scratch` also has room for the turned query, A * D in front. */
void hocket_decode(const float *merged, i64 rows, const float *cosine, const float *sine,
                   const i64 *places, float *keys, float *values, const i64 *tables, i64 columns,
                   const i64 *lengths, i64 heads, i64 group, i64 size, i64 block_size, i64 window,
                   float scale, const float *sinks, float *scratch, i64 most, float *out) {
    i64 asked = heads * group * size, held = heads * size;
    for (i64 r = 0; r < rows; r++, merged += asked + 2 * held, cosine += size, sine += size) {
        i64 block = places[r] / block_size, offset = places[r] % block_size;
        i64 at = (block * heads * block_size + offset) * size;
        hocket_rotate(merged, heads * group, 1, size, 0, size, cosine, sine, scratch, 0);
        for (i64 h = 0; h < heads; h++) {
            i64 to = at + h * block_size * size;
            hocket_rotate(merged + asked + h * size, 1, 1, 0, 0, size, cosine, sine, keys + to, 0);
            memcpy(values + to, merged + asked + held + h * size, (size_t)size * sizeof(float));
        }
        hocket_attend(scratch, 0, size, keys, values, tables + r * columns, columns, lengths + r, 1,
                      heads, group, size, size, block_size, window, scale, 0.0f, sinks,
                      scratch + asked, most, out + r * asked);
    }
}

/* One key/value head of a chunk; `turned` [most / WIDE, D, WIDE] gets its keys, `plain` [most, E]
its values, `scores` [TILE, most]. */
INLINE void attend_chunk(const float *q, i64 head_stride, i64 token_stride, const float *keys,
                         const float *values, const i64 *table, i64 heads, i64 head, i64 group,
                         i64 size, i64 width, i64 block_size, i64 start, i64 count, i64 window,
                         float scale, float cap, const float *sinks, float *restrict turned,
                         float *restrict plain, float *restrict scores, i64 most,
                         float *restrict out, i64 out_stride) {
    i64 total = start + count;
    i64 begin = window && start + 1 > window ? (start + 1 - window) / WIDE * WIDE : 0;
    for (i64 t = begin; t < most; t++) {
        i64 row = t < total ? (table[t / block_size] * heads + head) * block_size + t % block_size
                            : -1;
        float *to = turned + t / WIDE * size * WIDE + t % WIDE;
        for (i64 d = 0; d < size; d++) to[d * WIDE] = row < 0 ? 0.0f : keys[row * size + d];
        for (i64 e = 0; e < width; e++) plain[t * width + e] = row < 0 ? 0.0f : values[row * width + e];
    }
    for (i64 g = 0; g < group; g++)
        for (i64 at = 0; at < count; at += TILE) {
            const float *rows[TILE];
            i64 n = count - at < TILE ? count - at : TILE, seen = start + at + n;
            i64 last = (seen + WIDE - 1) / WIDE * WIDE;
            i64 first = window && start + at + 1 > window
                            ? (start + at + 1 - window) / WIDE * WIDE : 0;
            /* Rows that are not there are the last one again. */
            for (i64 i = 0; i < TILE; i++)
                rows[i] = q + g * head_stride + (at + (i < n ? i : n - 1)) * token_stride;
            for (i64 t = first; t < last; t += VECTOR) {
                const float *k = turned + t / WIDE * WIDE * size + t % WIDE;
                vector sum[TILE] = {};
                for (i64 d = 0; d < size; d++) {
                    vector one = *(const vector *)(k + d * WIDE);
                    for (int i = 0; i < TILE; i++) sum[i] += rows[i][d] * one;
                }
                for (int i = 0; i < TILE; i++) *(vector *)(scores + i * most + t) = sum[i];
            }
            for (i64 i = 0; i < n; i++) {
                i64 end = start + at + i + 1, oldest = window && end > window ? end - window : 0;
                softmax(scores + i * most + first, oldest - first, end - first, last - first, scale,
                        cap, sinks ? sinks + g : 0);
            }
            for (i64 i = n; i < TILE; i++) memset(scores + i * most + first, 0,
                                                  (size_t)(last - first) * sizeof(float));
            i64 e = 0;
            for (; e + VECTOR <= width; e += VECTOR) {
                vector sum[TILE] = {};
                for (i64 t = first; t < last; t++) {
                    vector one = *(const vector *)(plain + t * width + e);
                    for (int i = 0; i < TILE; i++) sum[i] += scores[i * most + t] * one;
                }
                for (i64 i = 0; i < n; i++)
                    *(vector *)(out + (at + i) * out_stride + g * width + e) = sum[i];
            }
            for (; e < width; e++)
                for (i64 i = 0; i < n; i++) {
                    float sum = 0.0f;
                    for (i64 t = first; t < last; t++)
                        sum += scores[i * most + t] * plain[t * width + e];
                    out[(at + i) * out_stride + g * width + e] = sum;
                }
        }
}

/* Attention of a chunk of one sequence, `count` tokens after the `start` that came before, whose own
keys and values are stored already: each token to those up to itself.

q [A, count, D] with strides; pools, `window`, `scale`, `cap` and `sinks` as above; `table` names the
sequence's blocks; `most`: its tokens, rounded up to whole WIDE; `scratch` holds
(D + E + TILE) * `most`; out [count, A, E]. */
void hocket_attend_chunk(const float *q, i64 head_stride, i64 token_stride, const float *keys,
                         const float *values, const i64 *table, i64 start, i64 count, i64 heads,
                         i64 group, i64 size, i64 width, i64 block_size, i64 window, float scale,
                         float cap, const float *sinks, float *scratch, i64 most, float *out) {
    float *turned = scratch, *plain = turned + most * size, *scores = plain + most * width;
    i64 out_stride = heads * group * width;
    for (i64 h = 0; h < heads; h++, q += group * head_stride, out += group * width) {
        const float *sink = sinks ? sinks + h * group : 0;
#define CHUNK(D, E)                                                                                \
    attend_chunk(q, head_stride, token_stride, keys, values, table, heads, h, group, D, E,         \
                 block_size, start, count, window, scale, cap, sink, turned, plain, scores, most,  \
                 out, out_stride)
        if (size == 32 && width == 32) CHUNK(32, 32);
        else if (size == 64 && width == 64) CHUNK(64, 64);
        else if (size == 128 && width == 128) CHUNK(128, 128);
        else CHUNK(size, width);
    }
}

/* How a product of few rows goes over its weight: tiles of DEEP rows and COLUMNS columns, which all
rows of x pass over while the next tile is fetched. SIDE vectors of the columns times GROUP rows are
as many sums as there are registers for. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { SIDE = 4 };  /* of 32 registers */
#else
enum { SIDE = 2 };  /* of 16 */
#endif
enum { GROUP = 6, DEEP = 48, COLUMNS = 64, KEPT = 1 << 16 };

/* `count` rows of x times one tile's `side` vectors of columns, added to `from` (null: to nothing),
stored at y but for the first `skip` columns. With each row of the tile, asks for `ask` vectors of
those it will be `near` to and those that come `after`. */
INLINE void tile(int count, int side, int ask, const float *x, i64 x_stride, const float *weight,
                 i64 weight_stride, i64 depth, const float *from, i64 from_stride, float *y,
                 i64 y_stride, i64 skip, const float *near, const float *after) {
    vector sum[GROUP][SIDE];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < side; v++) sum[r][v] = (vector){};
    i64 k = 0;
    do {
        for (int v = 0; v < ask; v++) {
            __builtin_prefetch(near + v * VECTOR, 0, 3);
            __builtin_prefetch(after + v * VECTOR, 0, 2);
        }
        vector w[SIDE];
        for (int v = 0; v < side; v++) w[v] = *(const vector *)(weight + v * VECTOR);
        for (int r = 0; r < count; r++)
            for (int v = 0; v < side; v++) sum[r][v] += w[v] * x[r * x_stride + k];
        weight += weight_stride, near += weight_stride, after += weight_stride;
    } while (++k < depth);
    if (from)
        for (int r = 0; r < count; r++)
            for (int v = 0; v < side; v++)
                sum[r][v] += *(const vector *)(from + r * from_stride + v * VECTOR);
    for (int r = 0; r < count; r++)
        for (int v = 0; v < side; v++) {
            if (side == 1 && skip)
                for (i64 j = skip; j < VECTOR; j++) y[r * y_stride + j] = sum[r][0][j];
            else
                *(vector *)(y + r * y_stride + v * VECTOR) = sum[r][v];
        }
}

/* out[r] = x[r] W + added[r], of `rows` rows x [rows, K] and W [K, N], N >= WIDE, both with a stride;
`added` [rows, N] with a stride (0: the same for all) or null; out [rows, N].

W is read from memory once, whatever the number of rows (up to some 100), and sums are those of DEEP
products each. As in Goto and van de Geijn 2008, but W is not copied: it would be as long as
the product. The next tile is fetched to the core's first cache and the one after it to the second,
by the groups of rows in turn: asked for at once, it would keep the core's few requests to memory
from what is wanted now. */
void hocket_product(const float *x, i64 x_stride, i64 rows, const float *weight,
                    i64 weight_stride, i64 depth, i64 width, const float *added,
                    i64 added_stride, float *out) {
    i64 groups = (rows + GROUP - 1) / GROUP, kept = KEPT / rows / COLUMNS * COLUMNS;
    if (kept < COLUMNS) kept = COLUMNS;
    /* So many columns at a time that their sums stay near the core. */
    for (i64 begin = 0; begin < width; begin += kept) {
        i64 end = begin + kept < width ? begin + kept : width;
        for (i64 k = 0; k < depth; k += DEEP) {
            i64 deep = depth - k < DEEP ? depth - k : DEEP;
            /* Past a row of tiles comes the next one. Nothing is read there, so it may be none. */
            const float *row_of_tiles = weight + k * weight_stride;
            const float *below = row_of_tiles + deep * weight_stride + begin;
            for (i64 n = begin, size; n < end; n += size) {
                size = end - n < COLUMNS ? end - n : COLUMNS;
                i64 one = n + COLUMNS, two = one + COLUMNS;
                const float *next = one < end ? row_of_tiles + one : below;
                const float *later = two < end ? row_of_tiles + two
                                   : one < end ? below : below + COLUMNS;
                i64 row = 0;
                for (i64 g = 0; g < groups; g++) {
                    i64 count = (rows - row) / (groups - g), first = g * SIDE / groups * VECTOR;
                    const float *a = x + row * x_stride + k;
                    for (i64 c = 0, step; c < size; c += step) {
                        int whole = size - c >= SIDE * VECTOR;
                        step = whole ? SIDE * VECTOR : VECTOR;
                        i64 at = n + c, skip = at + step > width ? at + step - width : 0;
                        at -= skip;
                        const float *w = row_of_tiles + at;
                        const float *from = k ? out : added;
                        i64 stride = k ? width : added_stride;
                        if (from) from += row * stride + at;
                        float *to = out + row * width + at;
                        const float *near = next + c + first, *after = later + c + first;
#define TILE_OF(COUNT, SIDES, ASK)                                                                 \
    tile(COUNT, SIDES, ASK, a, x_stride, w, weight_stride, deep, from, stride, to, width, skip,    \
         near, after)
#define COUNTED(COUNT)                                                                             \
    case COUNT:                                                                                    \
        if (SIDE == 1 || !whole) TILE_OF(COUNT, 1, 1);                                             \
        else if (groups == 1) TILE_OF(COUNT, SIDE, SIDE);                                          \
        else if (groups < SIDE) TILE_OF(COUNT, SIDE, SIDE / 2);                                    \
        else TILE_OF(COUNT, SIDE, 1);                                                              \
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
                    row += count;
                }
            }
        }
    }
}

/* The largest entry of each row of x [R, width] and which it is, of equals the first. The value is
NaN where the row holds one. */
void hocket_largest(const float *x, i64 rows, i64 stride, i64 width, float *value, i64 *which) {
    for (i64 r = 0; r < rows; r++, x += stride) {
        int32_t strange = 0;
        for (i64 j = 0; j < width; j++) strange |= x[j] != x[j];
        which[r] = 0;
        value[r] = strange ? __builtin_nanf("") : maximum(x, width);
        if (strange) continue;
        i64 at = 0;
        for (; at + LANES <= width; at += LANES) {
            int32_t found = 0;
            for (i64 l = 0; l < LANES; l++) found |= x[at + l] == value[r];
            if (found) break;
        }
        while (x[at] != value[r]) at++;
        which[r] = at;
    }
}
