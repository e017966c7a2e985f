// The kernels' C interface on fixed inputs against plain loops in double, and against the same rows and nodes alone.
// Prints the largest error of each function, relative to its largest output, and how many rows or nodes differ in a bit.

#include <cstdio>

#include "kernels.cpp"

template <class T> struct Interface;
#define INTERFACE(T, bits)                                  \
    template <> struct Interface<T> {                       \
        static constexpr auto multiply = multiply_##bits;   \
        static constexpr auto normalize = normalize_##bits; \
        static constexpr auto rotate = rotate_##bits;       \
        static constexpr auto attend = attend_##bits;       \
    };
INTERFACE(bf16, 16)
INTERFACE(float, 32)

static uint32_t state = 1;
static double next() {  // uniform in -1 .. 1
    state = state * 1664525u + 1013904223u;
    return int32_t(state) / 2147483648.0;
}
template <class T> static std::vector<T> numbers(long count) {
    std::vector<T> made(count);
    for (T &one : made) store(&one, float(next()));
    return made;
}
template <class T> static double error(const std::vector<T> &found, const std::vector<double> &expected) {
    double worst = 0, largest = 0;
    for (size_t i = 0; i < found.size(); i++) {
        worst = std::max(worst, std::fabs(widen(found[i]) - expected[i]));
        largest = std::max(largest, std::fabs(expected[i]));
    }
    return worst == worst && found.size() == expected.size() ? worst / largest : INFINITY;
}
template <class T> static bool differ(const T *a, const T *b, long count) { return memcmp(a, b, count * sizeof(T)); }

// act(x W0^T + b0) * (x W1^T + b1), or x W0^T + b0 and x W1^T + b1 side by side, plus a residual.
template <class T> static void products(long rows, long k, long n, bool gated, long threads, double &worst, long &different) {
    const long width = gated ? n : 2 * n, sizes[2] = {n, n};
    const auto x = numbers<T>(rows * k), w = numbers<T>(2 * n * k), bias = numbers<T>(2 * n), residual = numbers<T>(rows * width);
    const void *weights[2] = {w.data(), w.data() + n * k};
    const T *biases[2] = {bias.data(), bias.data() + n};
    std::vector<T> y(rows * width), alone(width);
    std::vector<double> expected;
    for (long row = 0; row < rows; row++) {
        std::vector<double> sums(2 * n);
        for (long i = 0; i < 2 * n; i++) {
            sums[i] = widen(bias[i]);
            for (long j = 0; j < k; j++) sums[i] += double(widen(w[i * k + j])) * widen(x[row * k + j]);
        }
        for (long i = 0; i < width; i++)
            expected.push_back(gated ? sums[i] / (1 + exp(-sums[i])) * sums[n + i] : sums[i] + widen(residual[row * width + i]));
    }
    Interface<T>::multiply(SAME, x.data(), rows, k, weights, nullptr, biases, sizes, 2, gated, gated ? nullptr : residual.data(), y.data(), threads);
    worst = std::max(worst, error(y, expected));
    for (long row = 0; row < rows; row++) {
        const T *added = gated ? nullptr : residual.data() + row * width;
        Interface<T>::multiply(SAME, x.data() + row * k, 1, k, weights, nullptr, biases, sizes, 2, gated, added, alone.data(), 1);
        different += differ(alone.data(), y.data() + row * width, width);
    }
}

// x W^T with weights in int8 and a scale for each row of them.
template <class T> static void small_weights(Weights form, long rows, long k, long n, double &worst, long &different) {
    const auto x = numbers<T>(rows * k);
    std::vector<int8_t> w(n * k);
    std::vector<float> scale(n);
    for (int8_t &one : w) one = int8_t(127 * next());
    for (float &one : scale) one = float(1 + next()) / 128;
    const void *const weight = w.data();
    const float *const scales = scale.data();
    const T *const bias = nullptr;
    std::vector<T> y(rows * n), alone(n);
    std::vector<double> expected;
    for (long row = 0; row < rows; row++) {
        std::vector<double> seen;
        for (long j = 0; j < k; j++) seen.push_back(widen(x[row * k + j]));
        if (form == INT8_ROUNDED) {
            std::vector<int16_t> whole(k);
            const Factor factor = rounded_row(&x[row * k], k, whole.data());
            for (long j = 0; j < k; j++) seen[j] = double(whole[j]) * factor.value;
        }
        for (long i = 0; i < n; i++) {
            double sum = 0;
            for (long j = 0; j < k; j++) sum += w[i * k + j] * seen[j];
            expected.push_back(sum * scale[i]);
        }
    }
    Interface<T>::multiply(form, x.data(), rows, k, &weight, &scales, &bias, &n, 1, 0, nullptr, y.data(), 2);
    worst = std::max(worst, error(y, expected));
    for (long row = 0; row < rows; row++) {
        Interface<T>::multiply(form, x.data() + row * k, 1, k, &weight, &scales, &bias, &n, 1, 0, nullptr, alone.data(), 1);
        different += differ(alone.data(), y.data() + row * n, n);
    }
}

template <class T> static double norms(long rows, long k, bool early) {
    const auto x = numbers<T>(rows * k), weight = numbers<T>(k);
    std::vector<T> y(rows * k);
    std::vector<double> expected;
    for (long row = 0; row < rows; row++) {
        double sum = 0;
        for (long i = 0; i < k; i++) sum += pow(widen(x[row * k + i]), 2);
        for (long i = 0; i < k; i++) expected.push_back(widen(x[row * k + i]) / sqrt(sum / k + 1e-5) * widen(weight[i]));
    }
    Interface<T>::normalize(x.data(), rows, k, weight.data(), sizeof(T) == 4, 1e-5f, early, y.data(), 2);
    return error(y, expected);
}

template <class T> static double rotary(long dim) {
    const long shape[4] = {2, 3, 5, dim}, strides[4] = {15 * dim, 5 * dim, dim, 1}, half = dim / 2;
    const auto x = numbers<T>(30 * dim), cos = numbers<T>(10 * dim), sin = numbers<T>(10 * dim);
    std::vector<T> y(30 * dim);
    std::vector<double> expected;
    for (long row = 0; row < 30; row++)
        for (long i = 0; i < dim; i++) {
            const long at = (row / 15 * 5 + row % 5) * dim + i;
            const double other = i < half ? -widen(x[row * dim + i + half]) : widen(x[row * dim + i - half]);
            expected.push_back(widen(x[row * dim + i]) * widen(cos[at]) + other * widen(sin[at]));
        }
    Interface<T>::rotate(x.data(), shape, strides, cos.data(), sin.data(), 5 * dim, y.data());
    return error(y, expected);
}

// Two rows of a batch, each with a tree of nodes behind its own committed slots; every node is also decoded alone.
template <class T> static void attention(long nodes, long begin, long dim, double &worst, long &different) {
    const long batch = 2, heads = 6, shared = 2, capacity = begin + nodes, row_size = shared * capacity * dim;
    const auto query = numbers<T>(batch * heads * nodes * dim), key = numbers<T>(batch * shared * nodes * dim), value = numbers<T>(key.size());
    auto keys = numbers<T>(batch * row_size), values = numbers<T>(batch * row_size);
    std::vector<T> y(query.size()), one(heads * dim);
    std::vector<int64_t> order;
    std::vector<uint8_t> mask(batch * nodes * capacity);
    std::vector<long> parents{-1}, depths{0};
    for (long n = 1; n < nodes; n++) {
        parents.push_back(state % n), next();
        depths.push_back(depths[parents[n]] + 1);
    }
    for (long b = 0; b < batch; b++) {
        order.push_back(7 * b), order.push_back(begin - 9 * b);
        order.insert(order.end(), depths.begin(), depths.end());
        for (long n = 0; n < nodes; n++) {
            uint8_t *const seen = mask.data() + (b * nodes + n) * capacity;
            std::fill(seen + 7 * b, seen + begin - 9 * b, 1);
            for (long m = n; m >= 0; m = parents[m]) seen[begin + m] = 1;
        }
    }
    const float scale = 1 / sqrtf(dim);
    const Attention a = {batch, heads, shared, nodes, dim, dim, begin, {row_size, capacity * dim}, {row_size, capacity * dim},
                         {shared * nodes * dim, nodes * dim, dim}, {shared * nodes * dim, nodes * dim, dim},
                         {nodes * capacity, capacity}, TREE, scale};
    Interface<T>::attend(&a, query.data(), key.data(), value.data(), keys.data(), values.data(), mask.data(), order.data(), y.data(), 3);
    std::vector<double> expected(y.size());
    for (long b = 0; b < batch; b++)
        for (long n = 0; n < nodes; n++) {
            for (long h = 0; h < heads; h++) {
                const T *const from = query.data() + ((b * heads + h) * nodes + n) * dim;
                const long place = b * row_size + h / (heads / shared) * capacity * dim;
                double *const to = expected.data() + ((b * nodes + n) * heads + h) * dim, total = 0;
                for (long slot = 0; slot < capacity; slot++) {
                    if (!mask[(b * nodes + n) * capacity + slot]) continue;
                    double product = 0;
                    for (long i = 0; i < dim; i++) product += double(widen(from[i])) * widen(keys[place + slot * dim + i]);
                    const double weight = exp(product * scale);
                    total += weight;
                    for (long i = 0; i < dim; i++) to[i] += weight * widen(values[place + slot * dim + i]);
                }
                for (long i = 0; i < dim; i++) to[i] /= total;
            }
            auto own_keys = keys, own_values = values;
            const long length = begin - 9 * b + depths[n];  // its ancestors are committed
            const auto copy = [&](std::vector<T> &to, const std::vector<T> &from) {
                for (long m = parents[n]; m >= 0; m = parents[m])
                    for (long g = 0; g < shared; g++) {
                        const long place = b * row_size + g * capacity * dim;
                        memcpy(&to[place + (begin - 9 * b + depths[m]) * dim], &from[place + (begin + m) * dim], dim * sizeof(T));
                    }
            };
            copy(own_keys, keys), copy(own_values, values);
            const Attention alone = {1, heads, shared, 1, dim, dim, length, {row_size, capacity * dim}, {row_size, capacity * dim},
                                     {0, nodes * dim, dim}, {0, nodes * dim, dim}, {0, 0}, CHAIN, scale};
            std::vector<T> own_query;
            for (long h = 0; h < heads; h++) {
                const auto from = query.begin() + ((b * heads + h) * nodes + n) * dim;
                own_query.insert(own_query.end(), from, from + dim);
            }
            const long at = (b * shared * nodes + n) * dim;
            const int64_t first = 7 * b;
            Interface<T>::attend(&alone, own_query.data(), &key[at], &value[at], &own_keys[b * row_size], &own_values[b * row_size],
                                 nullptr, &first, one.data(), 1);
            different += differ(one.data(), &y[(b * nodes + n) * heads * dim], heads * dim);
        }
    worst = std::max(worst, error(y, expected));
}

template <class T> static void all(const char *name) {
    double product = 0, norm = 0, rotation = 0, attended = 0;
    long different = 0;
    for (long rows : {1, 2, 3, 5, 8, 13, 40})
        for (long k : {64, 77, 200})
            for (bool gated : {false, true}) {
                products<T>(rows, k, 50, gated, 1 + rows % 3, product, different);
                small_weights<T>(gated ? INT8 : INT8_ROUNDED, rows, k, 50, product, different);
            }
    for (bool early : {false, true}) norm = std::max({norm, norms<T>(3, 77, early), norms<T>(1, 576, early)});
    for (long dim : {8, 20, 64}) rotation = std::max(rotation, rotary<T>(dim));
    for (long begin : {40, 120, 300})
        for (long dim : {20, 64}) attention<T>(9, begin, dim, attended, different);
    printf("\"%s\": [%g, %g, %g, %g, %ld]", name, product, norm, rotation, attended, different);
}

int main() {
    for (long paired = 0; paired <= choose_pairs(1); paired++) {
        printf("%s", paired ? ", " : "{");
        choose_pairs(paired);
        all<bf16>(paired ? "pairs" : "bf16");
    }
    printf(", "), all<float>("float"), puts("}");
}
