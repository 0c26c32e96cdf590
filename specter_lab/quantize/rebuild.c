/* The compiled twin of rebuild.py and codes.py: the same bits, by the format that residual_format.py writes down.
 * Plain C99 for any compiler; the loops over a unit's lanes are what it turns into vector instructions. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define STEPS 16
#define TILE 65536
#define MOST_UNIT 128
#define STRETCH 128
#define ROWS 64  /* as many as a block of tinygemm at most */

typedef struct {  /* one coded tensor; PackedTensor in compiled.py has the same fields */
    const uint8_t *data;     /* its codes */
    const uint16_t *scale;   /* bfloat16; of tinygemm: (groups of a row, rows, 2), scale and middle */
    const void *shift;       /* plain qint4 only: bfloat16 or float */
    int64_t kind;            /* 0: qint8, 1: plain qint4, 2: tinygemm */
    int64_t rows, columns, group, first;  /* first: its place in the stream */
    int64_t stride;          /* qint8: of scale; plain qint4: 1 if shift is float; tinygemm: rows of a block */
} tensor;

INLINE float widen(uint16_t bits) { uint32_t u = (uint32_t)bits << 16; float f; memcpy(&f, &u, 4); return f; }

INLINE uint16_t bfloat16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

INLINE uint16_t float16(float f) {
    uint32_t u, small_bits;
    float small;
    memcpy(&u, &f, 4);
    uint32_t sign = u & 0x80000000u;
    u ^= sign;
    memcpy(&small, &u, 4);
    small += 0.5f;  /* the addition rounds what becomes a subnormal */
    memcpy(&small_bits, &small, 4);
    uint32_t normal = (u + 0xc8000fffu + ((u >> 13) & 1)) >> 13;
    uint32_t half = u < (113u << 23) ? small_bits - 0x3f000000u : normal;
    half = u >= (143u << 23) ? 0x7c00u : half;
    return (uint16_t)(half | sign >> 16);
}

/* Turn `columns` columns of `half` bytes (multiples of 8) into rows: row i of the low bits to low + i * apart, of the high
 * ones to high + i * apart. Squares of 8 x 8 bytes, four of them side by side, are transposed in 64-bit words. */
static void turn(const uint8_t *data, int64_t half, int64_t columns, int8_t *low, int8_t *high, int64_t apart) {
    uint64_t lows[32][STRETCH / 8], highs[32][STRETCH / 8];  /* whole stretches: rows lie too far apart for single words */
    for (int64_t start = 0; start < columns; start += STRETCH) {
        int64_t width = columns - start < STRETCH ? columns - start : STRETCH;
        for (int64_t j = 0; j < width; j += 8) {
            uint64_t words[8][4] = {{0}};
            for (int c = 0; c < 8; c++) memcpy(words[c], data + (start + j + c) * half, half);
            for (int by = 4; by; by /= 2) {
                uint64_t mask = by == 4 ? 0xffffffffu : by == 2 ? 0xffff0000ffffu : 0xff00ff00ff00ffu;
                for (int c = 0; c < 8; c++)
                    for (int w = 0; w < 4 && !(c & by); w++) {
                        uint64_t swapped = (words[c][w] >> 8 * by ^ words[c + by][w]) & mask;
                        words[c + by][w] ^= swapped;
                        words[c][w] ^= swapped << 8 * by;
                    }
            }
            for (int r = 0; r < 32; r++) {
                lows[r][j / 8] = words[r % 8][r / 8] & 0x0f0f0f0f0f0f0f0fu;
                highs[r][j / 8] = words[r % 8][r / 8] >> 4 & 0x0f0f0f0f0f0f0f0fu;
            }
        }
        for (int64_t r = 0; r < half; r++) {
            memcpy(low + r * apart + start, lows[r], width);
            memcpy(high + r * apart + start, highs[r], width);
        }
    }
}

/* The codes of rows row..row + rows - 1 (in tinygemm's layout a whole block), and their groups' scales and middles. */
static void unpack(const tensor *t, int64_t row, int64_t rows, int64_t unit, int8_t *codes, float *scale, float *middle) {
    int64_t start = row * t->columns, size = rows * t->columns, row_groups = t->columns / t->group, repeat = t->group / unit;
    scale += t->first / unit, middle += t->first / unit;
    if (t->kind == 0) {
        memcpy(codes, t->data + start, size);
    } else if (t->kind == 1) {
        int64_t half = (t->rows * row_groups + 1) / 2 * t->group, lows = half < start ? 0 : half - start < size ? half - start : size;
        for (int64_t i = 0; i < lows; i++) codes[i] = t->data[start + i] & 15;
        for (int64_t i = lows; i < size; i++) codes[i] = t->data[start + i - half] >> 4;
    } else {
        int whole = rows == t->stride;
        turn(t->data + start / 2, rows / 2, t->columns, codes, codes + (whole ? rows / 2 : 1) * t->columns, (whole ? 1 : 2) * t->columns);
    }
    for (int64_t g = row * row_groups; g < (row + rows) * row_groups; g++) {
        float s, m = 0;
        if (t->kind == 0) {
            s = widen(t->scale[g * t->stride]);
        } else if (t->kind == 1) {
            s = widen(t->scale[g]);
            m = widen(bfloat16(8 * s - (t->stride ? ((const float *)t->shift)[g] : widen(((const uint16_t *)t->shift)[g]))));
        } else {
            const uint16_t *pair = t->scale + 2 * (g % row_groups * t->rows + g / row_groups);
            s = widen(pair[0]), m = widen(pair[1]);
        }
        for (int64_t i = g * repeat; i < (g + 1) * repeat; i++) scale[i] = s, middle[i] = m;
    }
}

INLINE float limited(float f) { return f < -100 ? -100 : f > 100 ? 100 : f; }

INLINE void tile(const int8_t *codes, const float *scale, const float *middle, const uint8_t *plane, const uint8_t *registers, uint16_t *out,
                 int64_t lanes, int64_t unit, int centre, const int bits, const int radius, const int near, const int zero, const int half) {
    for (int64_t lane = 0; lane < lanes; lane += unit) {
        int16_t held[MOST_UNIT];
        uint16_t low[MOST_UNIT], edge[MOST_UNIT];
        memcpy(held, registers + 2 * lane, 2 * unit);
        for (int step = 0; step < STEPS; step++) {
            int64_t at = step * lanes + lane;
            const int8_t *c = codes + at;
            uint16_t *o = out + at;
            float s = scale[at / unit], m = middle[at / unit], q = m / s, offset = centre - (isnan(q) ? 0 : q), turn_at = limited(ceilf(offset));
            float base = m + (turn_at - (centre - 0.5f)) * s;
            if (!(fabsf(base) + 256 * fabsf(s) < 0x1p127f)) base = s = 0;  /* else an edge could be NaN */
            int8_t turn = (int8_t)turn_at, same = (int8_t)limited(nearbyintf(offset));
            for (int64_t j = 0; j < unit; j++) {
                int8_t k = (int8_t)(c[j] - turn);
                k = (int8_t)(k + (k >> 7));
                float e = base + (float)k * s;
                edge[j] = half ? float16(e) : bfloat16(e);
            }
            if (bits == 4) {
                const uint8_t *p = plane + step % 8 * lanes + lane;
                for (int64_t j = 0; j < unit; j++) low[j] = step < 8 ? p[j] & 15 : p[j] >> 4;
            } else if (bits == 7 && step < 14) {
                for (int64_t j = 0; j < unit; j++) low[j] = plane[at + j] & 127;
            } else if (bits == 7) {
                const uint8_t *p = plane + (step - 14) * lanes + lane;
                for (int64_t j = 0; j < unit; j++) {
                    uint8_t v = 0;
                    for (int i = 0; i < 7; i++) v |= (p[j + 2 * i * lanes] & 128) >> (7 - i);
                    low[j] = v;
                }
            } else {
                const uint8_t *p = plane + (STEPS + step % 4) * lanes + lane;
                for (int64_t j = 0; j < unit; j++) low[j] = (uint16_t)(plane[at + j] | (p[j] >> 2 * (step / 4) & 3) << 8);
            }
            for (int64_t j = 0; j < unit; j++) {
                int8_t r = (int8_t)(c[j] - same);
                int16_t distance = r < 0 ? -r : r;
                uint16_t is_same = distance == 0 ? 0xffff : 0, is_near = distance <= radius ? 0xffff : 0;
                int16_t v = held[j];
                uint16_t x = (uint16_t)v & ((is_same & ((1 << zero) - 1)) | (is_near & ((1 << near) - 1)));
                int16_t rest = is_near ? (int16_t)(v >> near) : v;
                held[j] = is_same ? (int16_t)(v >> zero) : rest;
                uint16_t sign = (uint16_t)(x >> (zero - 1) << 15), more = (uint16_t)((x & ((1 << (zero - 1)) - 1)) << bits);
                o[j] = (uint16_t)(edge[j] - low[j] - more - sign);
            }
        }
    }
}

/* widths: plane, radius, near, zero. sizes: weights, unit, tensors, entries, centre, float16, and where in the blob the
 * plane, the registers, the gaps and the values start. Scratch: codes (a tile and ROWS + 1 rows), scale and middle (units),
 * these 0 where units pad. */
void rebuild(const tensor *tensors, const int64_t *widths, const int64_t *sizes, const uint8_t *blob, int8_t *codes, float *scale,
             float *middle, uint16_t *out) {
    int64_t weights = sizes[0], unit = sizes[1], entries = sizes[3], bits = widths[0];
    int centre = (int)sizes[4], half = (int)sizes[5];
    const uint8_t *plane = blob + sizes[6], *registers = blob + sizes[7], *gaps = blob + sizes[8], *values = blob + sizes[9];
    const tensor *t = tensors, *last = tensors + sizes[2];
    for (int64_t at = 0, row = 0, done = 0, entry = 0, place = 0; at < weights; at += TILE) {
        int64_t lanes = (weights - at < TILE ? weights - at : TILE) / STEPS, end = at + STEPS * lanes;
        while (done < end) {  /* codes are unpacked just before they are used, and stay in the cache */
            int64_t first = t < last ? t->first + row * t->columns : end, rows = ROWS;
            if (done < first) {
                memset(codes + done - at, 0, first - done);
                done = first;
                continue;
            }
            if (t->kind == 2) rows = t->stride;
            if (rows > t->rows - row) rows = t->rows - row;
            unpack(t, row, rows, unit, codes + done - at, scale, middle);
            row += rows, done += rows * t->columns;
            if (row == t->rows) t++, row = 0;
        }
#define WITH(bits, radius, near, zero, half) \
        tile(codes, scale + at / unit, middle + at / unit, plane + at / 8 * bits, registers + at / 8, out + at, lanes, unit, centre, \
             bits, radius, near, zero, half)
        if (bits == 7 && widths[3] == 3) WITH(7, 1, 1, 3, 0);  /* known widths make the loops three times as fast */
        else if (bits == 4) WITH(4, 8, 3, 5, 0);
        else WITH(bits, widths[1], widths[2], widths[3], half);
        memmove(codes, codes + end - at, done - end);
        for (; entry < entries && place + gaps[entry] < end; entry++) {
            place += gaps[entry];
            out[place] -= (uint16_t)(values[entry] < 128 ? values[entry] << bits : (values[entry] - 128) << 9);
        }
    }
}

/* The compiled twin of decompress in compressed.py: n words (a multiple of 8) out of their planes and escapes. */
void decompress(const uint8_t *low, const uint8_t *two, const uint8_t *one, const uint8_t *escapes, int64_t count, int64_t n, int64_t top, uint16_t *out) {
    int64_t eighth = n / 8, used = 0;
    uint16_t lowest = (uint16_t)((top - 7) << 7);
    for (int part = 0; part < 8; part++) {
        const uint8_t *l = low + part * eighth, *t = two + part % 2 * eighth;
        uint16_t *o = out + part * eighth;
        for (int64_t j = 0; j < eighth; j++) {
            uint16_t index = (uint16_t)((t[j] >> (part / 2 * 2) & 3) | (one[j] >> part & 1) << 2), m = l[j];
            o[j] = (uint16_t)((m & 128) << 8 | (m & 127) | (uint16_t)(top - index) << 7);
        }
    }
    for (int64_t start = 0; start < n; start += 32) {
        uint16_t any = 0;
        int64_t end = start + 32 < n ? start + 32 : n;
        for (int64_t j = start; j < end; j++) any |= (out[j] & 0x7f80) == lowest;
        for (int64_t j = start; any && j < end; j++)
            if ((out[j] & 0x7f80) == lowest && used < count) out[j] = (uint16_t)((out[j] & 0x807f) | (uint16_t)escapes[used++] << 7);
    }
}
