/* A decoder layer of rows that decode in one call, and the sums of tensor ranks on one machine.

    x -> norm -> q k v -> turned, stored, attended -> o -> + x = y      (+: over the ranks too)
    y -> norm -> gate up -> silu -> down -> + y

Letters as in `kernels.c`; H hidden, I entries between gate and down. */

#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

typedef int64_t i64;

#define INLINE static inline __attribute__((always_inline))

void hocket_rms_norm(const float *, i64, i64, i64, i64, i64, const float *, float, float, float *);
void hocket_silu_product(const float *, i64, const float *, i64, i64, i64, float *);
void hocket_decode(const float *, i64, const float *, const float *, const i64 *, float *, float *,
                   const i64 *, i64, const i64 *, i64, i64, i64, i64, i64, float, const float *,
                   float *, i64, float *);
void hocket_product(const float *, i64, i64, const float *, i64, i64, i64, const float *, i64,
                    float *);
void hocket_half_product(const float *, i64, i64, const uint16_t *, i64, i64, i64, const float *,
                         i64, float *, float *);
i64 hocket_half_scratch(i64, i64);

/* Sums over ranks. Each puts its part into a slot of its own and tells that it has come; when all
have, each adds all slots, in the order of ranks, so that all hold the same bits:

    rank 0   put 6 . tell 6 . wait . add 6   put 7 . tell 7 ...      even numbers: one row of slots
    rank 1   ...... put 6 . tell 6 . add 6   put 7 ...               odd numbers: the other

Who tells number n has finished adding n - 1, so when all have announced n, slots of n - 1 are free. */
typedef struct {
    float *slots;      /* shared: [2, ranks, room] */
    uint32_t *announced; /* shared, a line a rank: sums announced, who sleeps on that, sizes of the
                          last even and odd one */
    i64 ranks, rank, room;
    i64 looks;         /* at a word, before sleeping on it */
    i64 nap;           /* nanoseconds of the first sleep */
    i64 (*late)(i64);  /* called after every sleep with whom it waits for: nanoseconds of the next
                          one; negative: give up */
} Sums;

enum { LINE = 16, GIVEN_UP = 1, UNEQUAL = 2 };

/* Where a rank puts its part of the next sum. */
INLINE float *place(const Sums *sums, i64 rank) {
    i64 odd = sums->announced[sums->rank * LINE] & 1;
    return sums->slots + (odd * sums->ranks + rank) * sums->room;
}

/* Sleeps while a rank has announced no more than `seen`, for so many nanoseconds at most. */
static void sleep_on(uint32_t *word, uint32_t seen, i64 nanoseconds) {
#ifdef __linux__
    struct timespec most = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    __atomic_add_fetch(word + 1, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &most, 0, 0);
    __atomic_sub_fetch(word + 1, 1, __ATOMIC_SEQ_CST);
#endif
}

/* Tells that this rank's part is in its place, waits for all others, and puts the sum of all, plus
`added` (or null), into `out`. Not 0: there is no sum, and nothing may be summed after that. */
static int sum(Sums *sums, i64 size, const float *added, float *restrict out) {
    uint32_t *mine = sums->announced + sums->rank * LINE, number = *mine;
    const float *parts = sums->slots + (number & 1) * sums->ranks * sums->room;
    mine[2 + (number & 1)] = (uint32_t)size;
    __atomic_store_n(mine, number + 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
    if (__atomic_load_n(mine + 1, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, mine, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
#endif
    for (i64 rank = 0; rank < sums->ranks; rank++) {
        uint32_t *word = sums->announced + rank * LINE, seen;
        i64 looks = sums->looks, nap = sums->nap;
        while ((int32_t)((seen = __atomic_load_n(word, __ATOMIC_SEQ_CST)) - number) <= 0) {
            if (looks-- > 0) {
#ifdef __x86_64__
                __builtin_ia32_pause();
#endif
                continue;
            }
            if (looks < -1 && (nap = sums->late(rank)) < 0) return GIVEN_UP;
            sleep_on(word, seen, nap);
        }
        if (word[2 + (number & 1)] != (uint32_t)size) return UNEQUAL;
    }
    const float *second = parts + sums->room;
    for (i64 j = 0; j < size; j++) out[j] = parts[j] + second[j];
    for (i64 rank = 2; rank < sums->ranks; rank++) {
        const float *more = parts + rank * sums->room;
        for (i64 j = 0; j < size; j++) out[j] += more[j];
    }
    if (added)
        for (i64 j = 0; j < size; j++) out[j] = added[j] + out[j];
    return 0;
}

/* out = added + the sum of all ranks' x, of `size` entries each, at most a slot's; `added` may be
null, and `out` may be `x`. */
i64 hocket_sum(Sums *sums, const float *x, i64 size, const float *added, float *out) {
    memcpy(place(sums, sums->rank), x, (size_t)size * sizeof(float));
    return sum(sums, size, added, out);
}

typedef struct {
    const void *weight;   /* [depth, width] in fp32; if `half`, [width, depth] in bfloat16 */
    i64 stride, depth, width;
    const float *bias;    /* or null */
    i64 half;
} Matrix;

typedef struct {
    Matrix merged, out, gate_up, down;
    const float *norms[2];
    float offsets[2], eps[2];
    float *keys, *values;
    const float *sinks;   /* or null */
    i64 heads, group, size, block_size, window;
    float scale;
    Sums *sums;           /* null: of one rank */
} Layer;

typedef struct {
    i64 rows;
    const float *cosine, *sine;
    const i64 *places, *tables, *lengths;
    i64 columns, most;
    float *scratch;       /* as many entries as `hocket_layer_scratch` says */
} Step;

static void multiply(const float *x, i64 rows, const Matrix *by, const float *added, float *out,
                     float *room) {
    const float *more = added ? added : by->bias;
    i64 apart = added ? by->width : 0;
    if (by->half)
        hocket_half_product(x, by->depth, rows, by->weight, by->stride, by->depth, by->width, more,
                            apart, out, room);
    else
        hocket_product(x, by->depth, rows, by->weight, by->stride, by->depth, by->width, more,
                       apart, out);
}

/* out = added + x times a weight of which each rank has some inputs. */
static int reduce(Sums *sums, const float *x, i64 rows, const Matrix *by, const float *added,
                  float *out, float *room) {
    if (!sums) {
        multiply(x, rows, by, added, out, room);
        return 0;
    }
    multiply(x, rows, by, 0, place(sums, sums->rank), room);
    return sum(sums, rows * by->width, added, out);
}

/* Entries that a layer's scratch has. */
i64 hocket_layer_scratch(const Layer *layer, i64 rows, i64 most) {
    i64 asked = layer->heads * layer->group;
    i64 wide = layer->merged.width > layer->gate_up.width ? layer->merged.width
                                                          : layer->gate_up.width;
    i64 between = asked * layer->size > layer->down.depth ? asked * layer->size : layer->down.depth;
    i64 room = asked * (layer->size + most);
    const Matrix *each[] = {&layer->merged, &layer->out, &layer->gate_up, &layer->down};
    for (int i = 0; i < 4; i++) {
        i64 taken = each[i]->half ? hocket_half_scratch(rows, each[i]->depth) : 0;
        room = room > taken ? room : taken;
    }
    return rows * (2 * layer->merged.depth + wide + between) + room;
}

/* x [R, H] to out [R, H]. Not 0: a sum failed. */
i64 hocket_layer(const Layer *layer, const Step *step, const float *x, float *out) {
    i64 rows = step->rows, hidden = layer->merged.depth, between = layer->down.depth;
    i64 asked = layer->heads * layer->group * layer->size;
    i64 width = layer->merged.width > layer->gate_up.width ? layer->merged.width
                                                           : layer->gate_up.width;
    float *normed = step->scratch, *y = normed + rows * hidden, *wide = y + rows * hidden;
    float *narrow = wide + rows * width;
    float *room = narrow + rows * (asked > between ? asked : between);
    hocket_rms_norm(x, rows, hidden, 1, 0, hidden, layer->norms[0], layer->offsets[0],
                    layer->eps[0], normed);
    multiply(normed, rows, &layer->merged, 0, wide, room);
    hocket_decode(wide, rows, step->cosine, step->sine, step->places, layer->keys, layer->values,
                  step->tables, step->columns, step->lengths, layer->heads, layer->group,
                  layer->size, layer->block_size, layer->window, layer->scale, layer->sinks, room,
                  step->most, narrow);
    int failed = reduce(layer->sums, narrow, rows, &layer->out, x, y, room);
    if (failed) return failed;
    hocket_rms_norm(y, rows, hidden, 1, 0, hidden, layer->norms[1], layer->offsets[1],
                    layer->eps[1], normed);
    multiply(normed, rows, &layer->gate_up, 0, wide, room);
    hocket_silu_product(wide, 2 * between, wide + between, 2 * between, rows, between, narrow);
    return reduce(layer->sums, narrow, rows, &layer->down, y, out, room);
}
