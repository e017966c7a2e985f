// The CPU kernels' C interface, RMSNorm and rotary embedding. Compiled by library.py, once per instruction set.

#include "attention.h"
#include "search.h"

// x / sqrt(mean(x^2) + eps) * weight; `early` rounds to T before the multiplication, as Llama does.
template <class T, class W>
static void normalize(const T *x, long rows, long k, const W *weight, float eps, bool early, T *y, long threads) {
#pragma omp parallel for num_threads(threads) if (rows * k > 65536)
    for (long row = 0; row < rows; row++) {
        const T *from = x + row * k;
        Floats squares = {};
        float sum = 0;
        long i = 0;
        for (; i + LANES <= k; i += LANES) squares += floats(from + i) * floats(from + i);
        for (int lane = 0; lane < LANES; lane++) sum += squares[lane];
        for (; i < k; i++) sum += widen(from[i]) * widen(from[i]);
        const float factor = 1.0f / std::sqrt(sum / k + eps);
        T *to = y + row * k;
        for (i = 0; i + LANES <= k; i += LANES) {
            store(to + i, floats(from + i) * factor * (early ? Floats{} + 1.0f : floats(weight + i)));
            if (early) store(to + i, floats(to + i) * floats(weight + i));
        }
        for (; i < k; i++) {
            store(to + i, widen(from[i]) * factor * (early ? 1.0f : widen(weight[i])));
            if (early) store(to + i, widen(to[i]) * widen(weight[i]));
        }
    }
}

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

// ------------------------------------------------------------------------------------------------ interface

#define BOTH(T, bits)                                                                                                  \
    void multiply_##bits(const T *x, long rows, long k, const T *const *weights, const T *const *biases,               \
                         const long *sizes, long count, long activation, T *y, long threads) {                         \
        multiply(x, rows, k, weights, biases, sizes, count, activation, y, threads);                                   \
    }                                                                                                                  \
    void normalize_##bits(const T *x, long rows, long k, const void *weight, long wide, float eps, long early, T *y,   \
                          long threads) {                                                                              \
        wide ? normalize(x, rows, k, (const float *)weight, eps, early, y, threads)                                    \
             : normalize(x, rows, k, (const T *)weight, eps, early, y, threads);                                       \
    }                                                                                                                  \
    void rotate_##bits(const T *x, const long *shape, const long *strides, const T *cos, const T *sin, long stride,    \
                       T *y) {                                                                                         \
        rotate(x, shape, strides, cos, sin, stride, y);                                                                \
    }                                                                                                                  \
    void attend_##bits(const Attention *a, const T *query, const T *key, const T *value, T *keys, T *values,           \
                       const uint8_t *mask, T *y, long threads) {                                                      \
        attend(*a, query, key, value, keys, values, mask, y, threads);                                                 \
    }                                                                                                                  \
    void best_##bits(const T *logits, long rows, long size, long stride, long count, float *log_probs, int64_t *ids,   \
                     long threads) {                                                                                   \
        find_best(logits, rows, size, stride, count, log_probs, ids, threads);                                         \
    }
extern "C" {
BOTH(bf16, 16)
BOTH(float, 32)

// Read `bytes` of memory with all threads, to measure the bandwidth; returns a sum, so that nothing is left out.
float read_memory(const float *data, long bytes, long threads) {
    float total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total)
    for (long block = 0; block < bytes / 4096; block++) {
        Floats sum = {};
        for (long i = 0; i < 1024; i += LANES) {
            sum += floats(data + block * 1024 + i);
            __builtin_prefetch(data + block * 1024 + i + 1024, 0, 2);
        }
        total += sum[0];
    }
    return total;
}
}
