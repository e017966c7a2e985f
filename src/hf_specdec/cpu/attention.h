// Rotary embedding, and attention of tree nodes over a KV cache.
//
// Queries of all heads that share keys are rows of one product with a chunk of keys, so each key and value is read once
// for all of them. Threads take pairs of chunk and key head; their outputs, weighted by the sums of exponentials, are
// added at the end, as in FlashDecoding. Scores and outputs are in float32.

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

// The sums of values, weighted with each of four rows of p, for D vectors of a value; writes the first `some` rows.
template <int D, class T>
static inline void weigh(const float *const p[4], const T *v, long size, long dv, float *to, long some) {
    Floats sum[4][D] = {};
    for (long n = 0; n < size; n++)
        for (int d = 0; d < D; d++) {
            const Floats value = floats(v + n * dv + d * LANES);
            for (int i = 0; i < 4; i++) sum[i][d] += p[i][n] * value;
        }
    for (long i = 0; i < some; i++)
        for (int d = 0; d < D; d++) store(to + i * (dv + 2) + d * LANES, sum[i][d]);
}

template <class T>
static void attend(const Attention &a, const T *query, const T *key, const T *value, T *keys, T *values,
                   const uint8_t *mask, T *y, long threads) {
    constexpr long CHUNK = 128;
    const long group = a.heads / a.shared, rows = group * a.nodes, slots = a.end - a.first, dv = a.value_dim;
    const long chunks = (slots + CHUNK - 1) / CHUNK, tasks = a.batch * a.shared * chunks;
    static thread_local std::vector<float> kept;  // reused by the next call
    if (kept.size() < size_t(tasks * rows * (dv + 2))) kept.resize(tasks * rows * (dv + 2));
    float *const partial = kept.data();  // of each task and row: output, maximum, sum
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
    {
        static thread_local std::vector<float> scores, output;
        if (scores.size() < size_t(rows * CHUNK)) scores.resize(rows * CHUNK);
#pragma omp for schedule(dynamic)
        for (long task = 0; task < tasks; task++) {
            const long b = task / chunks / a.shared, h = task / chunks % a.shared;
            const long from = a.first + task % chunks * CHUNK, size = std::min(CHUNK, a.end - from);
            const T *k = keys + b * a.cache_stride[0] + h * a.cache_stride[1] + from * a.dim;
            const T *v = values + b * a.value_stride[0] + h * a.value_stride[1] + from * dv;
            const Rows<T> q(query + (b * a.heads + h * group) * a.nodes * a.dim, rows, a.dim);
            span(k, a.dim, 0, size, q, [&](long m, long n, Four z, int some) {
                store_some(&scores[m * CHUNK + n], z * a.scale, some);
            });
            float *result = &partial[task * rows * (dv + 2)];
            for (long m = 0; m < rows; m++) {
                float *p = &scores[m * CHUNK], most = -INFINITY, sum = 0;
                const uint8_t *seen = mask ? mask + b * a.mask_stride[0] + m % a.nodes * a.mask_stride[1] : nullptr;
                for (long n = 0; seen && n < size; n++) p[n] = seen[from - a.first + n] ? p[n] : -INFINITY;
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
                for (; d + 2 * LANES <= dv; d += 2 * LANES) weigh<2>(p, v + d, size, dv, &result[m * (dv + 2) + d], some);
                for (; d + LANES <= dv; d += LANES) weigh<1>(p, v + d, size, dv, &result[m * (dv + 2) + d], some);
                for (; d < dv; d++)
                    for (long i = 0; i < some; i++) {
                        float sum = 0;
                        for (long n = 0; n < size; n++) sum += p[i][n] * widen(v[n * dv + d]);
                        result[(m + i) * (dv + 2) + d] = sum;
                    }
            }
        }
#pragma omp for
        for (long index = 0; index < a.batch * a.shared * rows; index++) {
            const long m = index % rows, pair = index / rows;  // of row and key head
            const float *part = &partial[(pair * chunks * rows + m) * (dv + 2)];
            float most = -INFINITY, sum = 0;
            for (long c = 0; c < chunks; c++) most = std::max(most, part[c * rows * (dv + 2) + dv]);
            output.assign(dv, 0);
            for (long c = 0; c < chunks; c++, part += rows * (dv + 2)) {
                if (part[dv + 1] == 0) continue;  // it sees nothing; NaN is kept
                const float weight = std::exp(part[dv] - most);
                sum += weight * part[dv + 1];
                for (long d = 0; d < dv; d++) output[d] += weight * part[d];
            }
            const long b = pair / a.shared, head = pair % a.shared * group + m / a.nodes;
            T *to = y + ((b * a.nodes + m % a.nodes) * a.heads + head) * dv;
            for (long d = 0; d < dv; d++) store(to + d, sum == 0 ? 0.0f : output[d] / sum);
        }
    }
}

// The same for queries, keys and values side by side in rows `joined` [B, N, (heads + 2 shared) dim], before rotary
// embedding; values have the size of keys.
template <class T>
static void attend_joined(Attention a, const T *joined, const T *cos, const T *sin, long cos_stride, T *keys, T *values,
                          const uint8_t *mask, T *y, long threads) {
    static thread_local std::vector<T> rotated;
    const long width = (a.heads + 2 * a.shared) * a.dim, queries = a.batch * a.heads * a.nodes * a.dim;
    if (rotated.size() < size_t(2 * queries)) rotated.resize(2 * queries);
    const long strides[3] = {a.nodes * width, a.dim, width};
    const long heads[4] = {a.batch, a.heads, a.nodes, a.dim}, shared[4] = {a.batch, a.shared, a.nodes, a.dim};
    T *const query = rotated.data(), *const key = query + queries;
    rotate(joined, heads, strides, cos, sin, cos_stride, query);
    rotate(joined + a.heads * a.dim, shared, strides, cos, sin, cos_stride, key);
    for (int i = 0; i < 3; i++) a.new_value_stride[i] = strides[i];
    a.new_stride[0] = a.shared * a.nodes * a.dim;
    a.new_stride[1] = a.nodes * a.dim;
    a.new_stride[2] = a.dim;
    attend(a, query, key, joined + (a.heads + a.shared) * a.dim, keys, values, mask, y, threads);
}
