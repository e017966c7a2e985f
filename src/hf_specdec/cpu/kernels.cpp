// The CPU kernels' C interface, and RMSNorm. Compiled by library.py, once per instruction set.

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

// ------------------------------------------------------------------------------------------------ interface

#define BOTH(T, bits)                                                                                                  \
    void multiply_##bits(const T *x, long rows, long k, const T *const *weights, const T *const *biases,               \
                         const long *sizes, long count, long activation, const T *residual, T *y, long threads) {      \
        multiply(x, rows, k, weights, biases, sizes, count, activation, residual, y, threads);                         \
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
    void attend_joined_##bits(const Attention *a, const T *joined, const T *cos, const T *sin, long stride, T *keys,    \
                              T *values, const uint8_t *mask, T *y, long threads) {                                    \
        attend_joined(*a, joined, cos, sin, stride, keys, values, mask, y, threads);                                   \
    }                                                                                                                  \
    void best_##bits(const T *logits, long rows, long size, long stride, long count, float *log_probs, int64_t *ids,   \
                     long threads) {                                                                                   \
        find_best(logits, rows, size, stride, count, log_probs, ids, threads);                                         \
    }
extern "C" {
BOTH(bf16, 16)
BOTH(float, 32)

// Decide whether products of bfloat16 use the processor's instructions for pairs: 1 yes, 0 no, -1 if they are faster.
// Returns whether they do.
long choose_pairs(long choice) {
#if defined(HAS_PAIRS)
    use_pairs = choice < 0 ? product_seconds(true) < product_seconds(false) : choice;
#endif
    return use_pairs;
}

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
