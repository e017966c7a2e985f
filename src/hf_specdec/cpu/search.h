// The likeliest tokens of rows of logits.

#pragma once

#include "vectors.h"

// Ids of the `count` largest logits of each row, best first, and their log-probabilities if asked for. Of equal logits
// the first one wins. Blocks whose maximum is below the count-th largest maximum cannot contain any of them.
template <class T>
static void find_best(const T *logits, long rows, long size, long stride, long count, float *log_probs, int64_t *ids,
                      long threads) {
    constexpr long BLOCK = 4 * LANES;
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (long row = 0; row < rows; row++) {
        const T *z = logits + row * stride;
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
        int64_t *found = ids + row * count;
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
        if (!log_probs) continue;
        Floats sums = {};
        long i = 0;
        for (; i + LANES <= size; i += LANES) sums += exponential<Floats, SignedWords>(floats(z + i) - best[0]);
        double sum = 0;
        for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
        for (; i < size; i++) sum += std::exp(widen(z[i]) - best[0]);
        for (long j = 0; j < count; j++)
            log_probs[row * count + j] = std::min(best[j] - best[0] - float(std::log(sum)), 0.0f);
    }
}
