// The CPU kernels' C interface. Compiled by library.py, once per instruction set.

#include "attention.h"
#include "blocks.h"
#include "recurrence.h"
#include "steps.h"

// ------------------------------------------------------------------------------------------------ interface

// What a function returns (0 if nothing), or -1 if memory does not suffice: exceptions must not leave the C interface.
template <class Function> static long status(const Function &function) {
    try {
        if constexpr (std::is_void_v<decltype(function())>) {
            function();
            return 0;
        } else
            return function();
    } catch (const std::exception &) {
        return -1;
    }
}

#define BOTH(T, bits)                                                                                                  \
    long multiply_##bits(long form, const T *x, long rows, long k, const void *const *weights,                         \
                         const float *const *scales, const T *const *biases, const long *sizes, long count,            \
                         long activation, const T *residual, T *y, long threads) {                                     \
        return status([&] {                                                                                            \
            multiply(Weights(form), x, rows, k, weights, scales, biases, sizes, count, activation, residual, y,        \
                     threads);                                                                                         \
        });                                                                                                            \
    }                                                                                                                  \
    long unpack_##bits(long form, const uint8_t *w, long k, const int64_t *ids, long count, T *y, long threads) {         \
        return status([&] {                                                                                            \
            with_kind((form - PACKED) / 2, [&](auto kind) { unpack<decltype(kind)>(w, k, ids, count, y, threads); });  \
        });                                                                                                            \
    }                                                                                                                  \
    long normalize_##bits(const T *x, long rows, long k, const void *weight, long wide, float eps, long early, T *y,   \
                          long threads) {                                                                              \
        return status([&] { normalize(x, rows, k, weight, wide, eps, early, y, threads); });                           \
    }                                                                                                                  \
    long run_##bits(const Step *steps, long count, const void *const *table, long rows, long threads) {                \
        return status([&] { run<T>(steps, count, table, rows, threads); });                                            \
    }                                                                                                                  \
    long rotate_##bits(const T *x, const long *shape, const long *strides, const T *cos, const T *sin, long stride,    \
                       T *y) {                                                                                         \
        return status([&] { rotate(x, shape, strides, cos, sin, stride, y); });                                        \
    }                                                                                                                  \
    long attend_##bits(const Attention *a, const T *query, const T *key, const T *value, T *keys, T *values,           \
                       const uint8_t *mask, const int64_t *order, T *y, long threads) {                                \
        return status([&] { attend(*a, query, key, value, keys, values, mask, order, y, threads); });                  \
    }                                                                                                                  \
    long attend_joined_##bits(const Attention *a, const T *joined, const T *cos, const T *sin, long stride, T *keys,   \
                              T *values, const uint8_t *mask, const int64_t *order, T *y, long threads) {              \
        return status([&] { attend_joined(*a, joined, cos, sin, stride, keys, values, mask, order, y, threads); });    \
    }                                                                                                                  \
    long convolve_##bits(const Convolution *c, const int64_t *parents, const T *x, const T *weight, const T *bias,        \
                         T *window, const int64_t *path, const T *known, T *y, long threads) {                         \
        return status([&] { convolve(*c, parents, x, weight, bias, window, path, known, y, threads); });               \
    }                                                                                                                  \
    long recur_##bits(const Recurrence *r, const int64_t *parents, const void *const *inputs, const int64_t *path,      \
                      const float *const *known, float *const *updates, T *y, long threads) {                          \
        return status([&] {                                                                                            \
            (r->kind == CHANNELS ? scan<T> : recur<T>)(*r, parents, inputs, path, known, updates, y, threads);         \
        });                                                                                                            \
    }                                                                                                                  \
    long best_##bits(const T *logits, long rows, long size, long stride, long count, float *log_probs, int64_t *ids,   \
                     long threads) {                                                                                   \
        return status([&] { find_best(logits, rows, size, stride, count, log_probs, ids, threads); });                 \
    }                                                                                                                  \
    long grow_##bits(const BlockTree *b, const T *logits, const T *embeddings, const float *slots,                     \
                     const float *weights, const T *outputs, const int64_t *hot, const int64_t *roots,                 \
                     const float *states, int64_t *tokens, int64_t *parents, float *edges, long threads) {             \
        return status([&] {                                                                                            \
            return grow_trees(*b, logits, embeddings, slots, weights, outputs, hot, roots, states, tokens, parents,    \
                              edges, threads);                                                                         \
        });                                                                                                            \
    }
extern "C" {
BOTH(bf16, 16)
BOTH(float, 32)

// GGUF blocks of rows [N, K], N divisible by 16, as `packed.h` lays them out, of as many bytes or a few more.
long pack_blocks(long form, const uint8_t *from, long rows, long k, uint8_t *to, long threads) {
    return status([&] {
        with_kind((form - PACKED) / 2, [&](auto kind) { pack<decltype(kind)>(from, rows, k, to, threads); });
    });
}

// Decide whether products of bfloat16 use the processor's instructions for pairs: 1 yes, 0 no, -1 unless they are slower
// by a tenth or more (if both are about as fast, noise does not decide). Returns whether they do.
long choose_pairs(long choice) {
#if defined(HAS_PAIRS)
    const auto seconds = [](bool pairs) {
        use_pairs = pairs;
        return product_seconds(4, 512, 256, 30);  // from the processor's cache
    };
    use_pairs = status([&] { return choice < 0 ? seconds(true) < 1.1 * seconds(false) : choice != 0; }) > 0;
#endif
    return use_pairs;
}

// The same for prefetching the streams of products of one row, from memory.
long choose_prefetch(long choice) {
    const auto seconds = [](bool prefetch) {
        use_prefetch = prefetch;
        return product_seconds(1, 576, 56 << 10, 5);
    };
    use_prefetch = status([&] { return choice < 0 ? seconds(true) < 1.1 * seconds(false) : choice != 0; }) > 0;
    return use_prefetch;
}

// Set how many floats one call of attention keeps at a time, for tests; returns the number before.
long limit_scratch(long floats) { return std::exchange(scratch_limit, floats); }

// Read `bytes` of memory with all threads, each in eight streams as products of one row do, to measure the bandwidth;
// returns a sum, so that nothing is left out.
float read_memory(const float *data, long bytes, long threads) {
    float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        const long share = bytes / 4 / omp_get_num_threads() / 128 * 128, stream = share / 8;
        const float *const from = data + omp_get_thread_num() * share;
        Floats sum[8] = {};
        for (long i = 0; i < stream; i += 16)
            for (int one = 0; one < 8; one++) {
                if (use_prefetch) __builtin_prefetch((const char *)(from + one * stream + i) + AHEAD, 0, 3);
                for (int n = 0; n < 16; n += LANES) sum[one] += floats(from + one * stream + i + n);
            }
        for (const Floats &one : sum) total += one[0];
    }
    return total;
}
}
