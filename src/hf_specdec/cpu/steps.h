// RMSNorm, and several products and norms in one call.
//
// A call costs the way from Python and the start of the threads. One call instead of six made the forward of a model of
// 135M parameters 6 % faster on two cores.
// Steps are described once; a call passes a table of addresses, to which they refer by place.

#pragma once

#include "products.h"

// x / sqrt(mean(x^2) + eps) * weight for one row; `early` rounds to T before the multiplication, as Llama does.
template <class T, class W>
static void normalize_row(const T *from, long k, const W *weight, float eps, bool early, T *to) {
    Floats squares = {};
    float sum = 0;
    long i = 0;
    for (; i + LANES <= k; i += LANES) squares += floats(from + i) * floats(from + i);
    for (int lane = 0; lane < LANES; lane++) sum += squares[lane];
    for (; i < k; i++) sum += widen(from[i]) * widen(from[i]);
    const float factor = 1.0f / std::sqrt(sum / k + eps);
    for (i = 0; i + LANES <= k; i += LANES) {
        store(to + i, floats(from + i) * factor * (early ? Floats{} + 1.0f : floats(weight + i)));
        if (early) store(to + i, floats(to + i) * floats(weight + i));
    }
    for (; i < k; i++) {
        store(to + i, widen(from[i]) * factor * (early ? 1.0f : widen(weight[i])));
        if (early) store(to + i, widen(to[i]) * widen(weight[i]));
    }
}
template <class T>
static inline void normalize_row(const T *x, long k, const void *weight, bool wide, float eps, bool early, T *y) {
    wide ? normalize_row(x, k, (const float *)weight, eps, early, y)
         : normalize_row(x, k, (const T *)weight, eps, early, y);
}

template <class T>
static void normalize(const T *x, long rows, long k, const void *weight, bool wide, float eps, bool early, T *y,
                      long threads) {
#pragma omp parallel for num_threads(threads) if (rows * k > 65536)
    for (long row = 0; row < rows; row++) normalize_row(x + row * k, k, weight, wide, eps, early, y + row * k);
}

constexpr long MAX_WEIGHTS = 4;
struct Step {
    long count;                                        // weights; 0 for a norm, which has one in weights[0]
    long k;                                            // numbers in a row of x
    long x, y, residual;                               // places in the table; -1: none
    long weights[MAX_WEIGHTS], biases[MAX_WEIGHTS], scales[MAX_WEIGHTS];  // the same
    long sizes[MAX_WEIGHTS];                           // rows of the weights
    long activation;                                   // see `multiply_share`
    Weights form;
    long wide, early;                                  // whether a norm's weight is float32; see `normalize_row`
    float eps;
};

// All steps for the same number of rows; threads wait for each other after each one.
template <class T>
static void run(const Step *steps, long count, const void *const *table, long rows, long threads) {
    const auto at = [&](long place) { return place < 0 ? nullptr : (const T *)table[place]; };
    Guard guard;
    void *memory = nullptr;
    for (long i = 0; i < count; i++) memory = memory_for(steps[i].form, rows, steps[i].k);
#pragma omp parallel num_threads(threads)
    for (const Step *step = steps; step < steps + count; step++) {
        T *const y = (T *)at(step->y);
        if (step->count == 0) {
            for (long row = omp_get_thread_num(); row < rows; row += omp_get_num_threads())
                normalize_row(at(step->x) + row * step->k, step->k, table[step->weights[0]], step->wide, step->eps,
                              step->early, y + row * step->k);
        } else {
            const void *weights[MAX_WEIGHTS];
            const float *scales[MAX_WEIGHTS];
            const T *biases[MAX_WEIGHTS];
            for (long i = 0; i < step->count; i++) {
                weights[i] = at(step->weights[i]), biases[i] = at(step->biases[i]);
                scales[i] = (const float *)at(step->scales[i]);
            }
            share(guard, memory, step->form, at(step->x), rows, step->k, weights, scales, biases, step->sizes, step->count,
                  step->activation, at(step->residual), y);
        }
#pragma omp barrier
    }
    guard.check();
}
