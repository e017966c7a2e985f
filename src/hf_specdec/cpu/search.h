// The likeliest tokens of rows of logits.

#pragma once

#include "vectors.h"

// Ids of the `count` largest logits, best first, and their log-probabilities if asked for. Of equal logits the first one
// wins. Blocks whose maximum is below the count-th largest maximum cannot contain any of them.
template <class T> static void find_best_of_row(const T *z, long size, long count, float *log_probs, int64_t *found) {
    constexpr long BLOCK = 4 * LANES;
    const long blocks = (size + BLOCK - 1) / BLOCK;
    std::vector<float> maxima(blocks);
    for (long block = 0; block < blocks; block++) {
        const long begin = block * BLOCK;
        float most = -INFINITY;
        if (begin + BLOCK <= size) {
            Floats top = floats(z + begin);
            for (long i = LANES; i < BLOCK; i += LANES) {
                const Floats next = floats(z + begin + i);
                top = next > top ? next : top;
            }
            for (int lane = 0; lane < LANES; lane++) most = std::max(most, top[lane]);
        } else
            for (long i = begin; i < size; i++) most = std::max(most, widen(z[i]));
        maxima[block] = most;
    }
    std::vector<float> sorted(maxima), best(count, -INFINITY);
    const long rank = std::min(count, blocks) - 1;
    std::nth_element(sorted.begin(), sorted.begin() + rank, sorted.end(), std::greater<float>());
    const float least = blocks >= count ? sorted[rank] : -INFINITY;
    long known = 0;
    for (long block = 0; block < blocks; block++) {
        if (maxima[block] < least) continue;
        for (long i = block * BLOCK; i < std::min((block + 1) * BLOCK, size); i++) {
            const float value = widen(z[i]);
            if (known == count && !(value > best[count - 1])) continue;
            long place = known < count ? known++ : count - 1;
            for (; place > 0 && value > best[place - 1]; place--) {
                best[place] = best[place - 1];
                found[place] = found[place - 1];
            }
            best[place] = value;
            found[place] = i;
        }
    }
    if (!log_probs) return;
    Floats sums = {};
    long i = 0;
    for (; i + LANES <= size; i += LANES) sums += exponential<Floats, SignedWords>(floats(z + i) - best[0]);
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    for (; i < size; i++) sum += std::exp(widen(z[i]) - best[0]);
    for (long j = 0; j < count; j++)
        log_probs[j] = std::min(best[j] - best[0] - float(std::log(sum)), 0.0f);
}

// The same for each row.
template <class T>
static void find_best(const T *logits, long rows, long size, long stride, long count, float *log_probs, int64_t *ids,
                      long threads) {
    Guard guard;
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (long row = 0; row < rows; row++)
        guard([&] {
            find_best_of_row(logits + row * stride, size, count, log_probs ? log_probs + row * count : nullptr,
                             ids + row * count);
        });
    guard.check();
}

// Write the logits of `ROWS` rows: to the logits `from` of a row, add its `rank` numbers times the weights.
template <long ROWS, class T>
static void correct(const T *const *from, const T *weights, const float *numbers, long size, long rank, float *to) {
    constexpr long WIDTH = 2 * LANES;
    long i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
        Floats low[ROWS], high[ROWS];
        for (long row = 0; row < ROWS; row++) low[row] = floats(from[row] + i), high[row] = floats(from[row] + i + LANES);
        for (long k = 0; k < rank; k++) {
            const Floats one = floats(weights + k * size + i), two = floats(weights + k * size + i + LANES);
            for (long row = 0; row < ROWS; row++) {
                low[row] += one * numbers[row * rank + k];
                high[row] += two * numbers[row * rank + k];
            }
        }
        for (long row = 0; row < ROWS; row++)
            store(to + row * size + i, low[row]), store(to + row * size + i + LANES, high[row]);
    }
    for (; i < size; i++)
        for (long row = 0; row < ROWS; row++) {
            float sum = widen(from[row][i]);
            for (long k = 0; k < rank; k++) sum += widen(weights[k * size + i]) * numbers[row * rank + k];
            to[row * size + i] = sum;
        }
}

// The same as `find_best` for rows of which each `group` share their logits `[size]`, and add to them the products of
// their own `numbers` `[rank]` with the weights `[rank, size]`.
template <class T>
static void find_best_corrected(const T *logits, const T *weights, const float *numbers, long rows, long group,
                                long size, long stride, long rank, long count, float *log_probs, int64_t *ids,
                                long threads) {
    const long share = std::min<long>(4, (rows + threads - 1) / threads), parts = (rows + share - 1) / share;
    Guard guard;
#pragma omp parallel for num_threads(threads) if (parts > 1)
    for (long part = 0; part < parts; part++) guard([&] {
        const long first = part * share, here = std::min(share, rows - first);
        std::vector<float> sums(here * size);
        const T *from[4] = {};
        for (long row = 0; row < here; row++) from[row] = logits + (first + row) / group * stride;
        const float *own = numbers + first * rank;
        if (here == 4) correct<4>(from, weights, own, size, rank, sums.data());
        if (here == 3) correct<3>(from, weights, own, size, rank, sums.data());
        if (here == 2) correct<2>(from, weights, own, size, rank, sums.data());
        if (here == 1) correct<1>(from, weights, own, size, rank, sums.data());
        for (long row = 0; row < here; row++)
            find_best_of_row(sums.data() + row * size, size, count, log_probs + (first + row) * count,
                             ids + (first + row) * count);
    });
    guard.check();
}
