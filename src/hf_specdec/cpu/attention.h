// Rotary embedding, and attention of tree nodes over a KV cache.
//
// Queries of all heads that share keys are rows of one product with a chunk of keys, so each key and value is read once
// for all of them. Threads take pairs of chunk and key head; their outputs, weighted by the sums of exponentials, are
// added at the end, as in FlashDecoding. Scores and outputs are in float32. Their memory is bounded: long caches are read
// for some key heads, or some of their queries, at a time.

#pragma once

#include "products.h"

// x * cos + rotate_half(x) * sin for x [B, H, N, D] with strides (b, h, n, 1); cos and sin [B or 1, N, D].
template <class T>
static void rotate(const T *x, const long *shape, const long *strides, const T *cos, const T *sin, long cos_stride,
                   T *y) {
    const long heads = shape[1], nodes = shape[2], dim = shape[3], half = dim / 2;
    for (long b = 0; b < shape[0]; b++)
        for (long h = 0; h < heads; h++)
            for (long n = 0; n < nodes; n++, y += dim) {
                const T *from = x + b * strides[0] + h * strides[1] + n * strides[2];
                const T *c = cos + b * cos_stride + n * dim, *s = sin + b * cos_stride + n * dim;
                long i = 0;
                for (; i + LANES <= half; i += LANES) {
                    const Floats low = floats(from + i), high = floats(from + i + half);
                    store(y + i, low * floats(c + i) - high * floats(s + i));
                    store(y + i + half, high * floats(c + i + half) + low * floats(s + i + half));
                }
                for (; i < half; i++) {
                    const float low = widen(from[i]), high = widen(from[i + half]);
                    store(y + i, low * widen(c[i]) - high * widen(s[i]));
                    store(y + i + half, high * widen(c[i + half]) + low * widen(s[i + half]));
                }
            }
}

struct Attention {
    long batch, heads, shared, nodes, dim, value_dim;    // query heads, key heads, sizes of keys and values
    long begin, first, end;                              // slots: first new node, first visible, end
    long cache_stride[2], value_stride[2];               // of the cache's keys and values: rows, heads (slots: dim)
    long new_stride[3], new_value_stride[3];             // of the new keys and values: rows, heads, nodes
    long mask_stride[2];                                 // of the mask: rows, nodes (slots: 1)
    float scale;
};

constexpr long CHUNK = 128;                // slots of a task
constexpr int WIDE = LANES == 16 ? 4 : 2;  // vectors in a row of a block of sums, which stays in registers

#if defined(__AVX512F__)
// Transpose a block of 16 x 16 words: row i at `from + i * stride` becomes column i of rows at `to + i * CHUNK`.
static inline void transpose(const uint32_t *from, long stride, uint32_t *to) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * stride);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        _mm512_storeu_si512(to + i * CHUNK, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 8) * CHUNK, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    }
}

// Scores [rows, CHUNK] of `size` keys, for many rows. Keys are transposed first (word w of all slots, then word w + 1;
// a word is one float or two bfloat16), so that lanes are slots, which need not be summed.
constexpr long MANY_ROWS = 8;
template <class T>
static void score(const T *keys, long dim, long size, const Rows<Dot<T>> &q, float scale, uint32_t *words,
                  float *scores) {
    typedef Dot<T> D;
    const long count = dim / D::parts;
    for (long n = 0; n < size; n += 16)
        for (long w = 0; w < count; w += 16) {
            const uint32_t *from = (const uint32_t *)(keys + n * dim) + w;
            uint32_t *const to = words + w * CHUNK + n;
            if (n + 16 <= size && w + 16 <= count) transpose(from, count, to);
            else
                for (long i = 0; i < std::min(16L, size - n); i++)
                    for (long j = 0; j < std::min(16L, count - w); j++) memcpy(to + j * CHUNK + i, from + i * count + j, 4);
        }
    for (long m = 0; m < q.rows; m += 4) {
        const long some = std::min(4L, q.rows - m);
        const float *x[4];
        for (long i = 0; i < 4; i++) x[i] = q.data + (m + std::min(i, some - 1)) * q.stride;
        for (long n = 0; n < size; n += WIDE * LANES) {
            Floats sum[4][WIDE] = {};
            for (long w = 0; w < count; w++)
                for (int half = 0; half < D::parts; half++) {
                    const long place = w / LANES * D::step + half * LANES + w % LANES;  // in packed rows
                    for (int j = 0; j < WIDE; j++) {
                        const Floats key = D::load((const T *)(words + w * CHUNK + n + j * LANES), half);
                        for (int i = 0; i < 4; i++) sum[i][j] += x[i][place] * key;
                    }
                }
            for (long i = 0; i < some; i++)
                for (int j = 0; j < WIDE; j++) store(scores + (m + i) * CHUNK + n + j * LANES, sum[i][j] * scale);
        }
    }
}
#endif

// The sums of values, weighted with each of four rows of p, for D steps of a value; writes the first `some` rows, with
// the numbers of each step as `Dot` orders them.
template <int D, class T>
static inline void weigh(const float *const p[4], const T *v, long size, long dv, float *to, long some) {
    Floats sum[4][D * Dot<T>::parts] = {};
    for (long n = 0; n < size; n++)
        for (int d = 0; d < D; d++)
            for (int half = 0; half < Dot<T>::parts; half++) {
                const Floats value = Dot<T>::load(v + n * dv + d * Dot<T>::step, half);
                for (int i = 0; i < 4; i++) sum[i][d * Dot<T>::parts + half] += p[i][n] * value;
            }
    for (long i = 0; i < some; i++)
        for (int d = 0; d < D * Dot<T>::parts; d++) store(to + i * (dv + 2) + d * LANES, sum[i][d]);
}

// Replace the scores of slots that are not seen by -infinity.
static inline void hide(float *scores, const uint8_t *seen, long size) {
    for (long n = 0; n < size; n += LANES) {
        Bytes some = {};
        if (n + LANES <= size) memcpy(&some, seen + n, LANES);
        else memcpy(&some, seen + n, size - n);
        const Floats z = floats(scores + n);
        store(scores + n, __builtin_convertvector(some, SignedWords) != 0 ? z : Floats{} - INFINITY);
    }
}

// Floats of memory for one call; it takes more only if 8 queries of one head need more (16 MB: a million slots).
static long scratch_limit = 4L << 20;

template <class T>
static void attend(const Attention &a, const T *query, const T *key, const T *value, T *keys, T *values,
                   const uint8_t *mask, T *y, long threads) {
    const long group = a.heads / a.shared, all_rows = group * a.nodes, slots = a.end - a.first, dv = a.value_dim;
    const long chunks = (slots + CHUNK - 1) / CHUNK, pairs = a.batch * a.shared;  // of row and key head
    const long per_row = chunks * (dv + 2), per_thread = (a.dim + dv / CHUNK + 1) * CHUNK;
    if (pairs * all_rows == 0) return;
    // as many queries, and then pairs, at a time as fit
    const long fit = std::max(8L, scratch_limit / (per_row + threads * CHUNK)), parts = (all_rows + fit - 1) / fit;
    const long widest = (all_rows + parts - 1) / parts, room = scratch_limit / (widest * per_row);
    const long some_pairs = std::min(pairs, parts > 1 ? 1 : std::max(1L, room)), done = some_pairs * widest * per_row;
    const std::unique_ptr<float[]> memory(new float[done + threads * (widest * CHUNK + per_thread)]);
    float *const partial = memory.get();  // of each task and row: output, maximum, sum
    Guard guard;
    for (long b = 0; b < a.batch; b++)
        for (long h = 0; h < a.shared; h++)
            for (long n = 0; n < a.nodes; n++) {
                memcpy(keys + b * a.cache_stride[0] + h * a.cache_stride[1] + (a.begin + n) * a.dim,
                       key + b * a.new_stride[0] + h * a.new_stride[1] + n * a.new_stride[2], a.dim * sizeof(T));
                memcpy(values + b * a.value_stride[0] + h * a.value_stride[1] + (a.begin + n) * dv,
                       value + b * a.new_value_stride[0] + h * a.new_value_stride[1] + n * a.new_value_stride[2],
                       dv * sizeof(T));
            }
#pragma omp parallel num_threads(threads)
    for (long turn = 0; turn < (pairs + some_pairs - 1) / some_pairs * parts; turn++) {
        float *const scores = partial + done + omp_get_thread_num() * (widest * CHUNK + per_thread);
        float *const output = scores + widest * CHUNK;
        const long first_pair = turn / parts * some_pairs, here = std::min(some_pairs, pairs - first_pair);
        const long first_row = all_rows * (turn % parts) / parts;
        const long rows = all_rows * (turn % parts + 1) / parts - first_row;
#pragma omp for schedule(dynamic)
        for (long task = 0; task < here * chunks; task++) guard([&] {
            const long b = (first_pair + task / chunks) / a.shared, h = (first_pair + task / chunks) % a.shared;
            const long from = a.first + task % chunks * CHUNK, size = std::min(CHUNK, a.end - from);
            const T *k = keys + b * a.cache_stride[0] + h * a.cache_stride[1] + from * a.dim;
            const T *v = values + b * a.value_stride[0] + h * a.value_stride[1] + from * dv;
            const Rows<Dot<T>> q(query + ((b * a.heads + h * group) * a.nodes + first_row) * a.dim, rows, a.dim);
#if defined(__AVX512F__)
            if (all_rows >= MANY_ROWS && a.dim % Dot<T>::parts == 0)
                score(k, a.dim, size, q, a.scale, (uint32_t *)output, scores);
            else
#endif
                span(k, a.dim, 0, size, q, [&](long m, long n, Four z, int some) {
                    store_some(&scores[m * CHUNK + n], z * a.scale, some);
                });
            float *result = &partial[task * rows * (dv + 2)];
            for (long m = 0; m < rows; m++) {
                float *p = &scores[m * CHUNK], most = -INFINITY, sum = 0;
                const long node = (first_row + m) % a.nodes;
                const uint8_t *seen = mask ? mask + b * a.mask_stride[0] + node * a.mask_stride[1] : nullptr;
                if (seen) hide(p, seen + from - a.first, size);
                for (long n = size; n % LANES; n++) p[n] = -INFINITY;
                Floats top = floats(p), total = {};
                for (long n = LANES; n < size; n += LANES) top = floats(p + n) > top ? floats(p + n) : top;
                for (int lane = 0; lane < LANES; lane++) most = std::max(most, top[lane]);
                const float shift = most == -INFINITY ? 0 : most;
                for (long n = 0; n < size; n += LANES) {
                    const Floats z = floats(p + n), e = exponential<Floats, SignedWords>(z - shift);
                    store(p + n, z == -INFINITY ? Floats{} : e);
                    total += floats(p + n);
                }
                for (int lane = 0; lane < LANES; lane++) sum += total[lane];
                result[m * (dv + 2) + dv] = most;
                result[m * (dv + 2) + dv + 1] = sum;
            }
            for (long m = 0; m < rows; m += 4) {
                const long some = std::min(4L, rows - m);
                const float *p[4];
                for (long i = 0; i < 4; i++) p[i] = &scores[(m + std::min(i, some - 1)) * CHUNK];
                long d = 0;
                constexpr int step = Dot<T>::step, many = WIDE * LANES / step;
                for (; d + many * step <= dv; d += many * step)
                    weigh<many>(p, v + d, size, dv, &result[m * (dv + 2) + d], some);
                for (; d + step <= dv; d += step) weigh<1>(p, v + d, size, dv, &result[m * (dv + 2) + d], some);
                for (; d < dv; d++)
                    for (long i = 0; i < some; i++) {
                        float sum = 0;
                        for (long n = 0; n < size; n++) sum += p[i][n] * widen(v[n * dv + d]);
                        result[(m + i) * (dv + 2) + d] = sum;
                    }
            }
        });
#pragma omp for
        for (long index = 0; index < here * rows; index++) {
            const long m = first_row + index % rows, pair = first_pair + index / rows;
            const float *part = &partial[(index / rows * chunks * rows + index % rows) * (dv + 2)];
            float most = -INFINITY, sum = 0;
            for (long c = 0; c < chunks; c++) most = std::max(most, part[c * rows * (dv + 2) + dv]);
            std::fill(output, output + dv, 0.0f);
            for (long c = 0; c < chunks; c++, part += rows * (dv + 2)) {
                if (part[dv + 1] == 0) continue;  // it sees nothing; NaN is kept
                const float weight = std::exp(part[dv] - most);
                sum += weight * part[dv + 1];
                for (long d = 0; d < dv; d++) output[d] += weight * part[d];
            }
            const long b = pair / a.shared, head = pair % a.shared * group + m / a.nodes;
            T *to = y + ((b * a.nodes + m % a.nodes) * a.heads + head) * dv;
            const float factor = sum == 0 ? 0.0f : 1 / sum;
            long d = 0;
            for (; d + Dot<T>::step <= dv; d += Dot<T>::step) Dot<T>::unpack(&output[d], factor, to + d);
            for (; d < dv; d++) store(to + d, output[d] * factor);
        }
    }
    guard.check();
}

// The same for queries, keys and values side by side in rows `joined` [B, N, (heads + 2 shared) dim], before rotary
// embedding; values have the size of keys.
template <class T>
static void attend_joined(Attention a, const T *joined, const T *cos, const T *sin, long cos_stride, T *keys, T *values,
                          const uint8_t *mask, T *y, long threads) {
    const long width = (a.heads + 2 * a.shared) * a.dim, queries = a.batch * a.heads * a.nodes * a.dim;
    const std::unique_ptr<T[]> rotated(new T[2 * queries]);
    const long strides[3] = {a.nodes * width, a.dim, width};
    const long heads[4] = {a.batch, a.heads, a.nodes, a.dim}, shared[4] = {a.batch, a.shared, a.nodes, a.dim};
    T *const query = rotated.get(), *const key = query + queries;
    rotate(joined, heads, strides, cos, sin, cos_stride, query);
    rotate(joined + a.heads * a.dim, shared, strides, cos, sin, cos_stride, key);
    for (int i = 0; i < 3; i++) a.new_value_stride[i] = strides[i];
    a.new_stride[0] = a.shared * a.nodes * a.dim;
    a.new_stride[1] = a.nodes * a.dim;
    a.new_stride[2] = a.dim;
    attend(a, query, key, joined + (a.heads + a.shared) * a.dim, keys, values, mask, y, threads);
}
