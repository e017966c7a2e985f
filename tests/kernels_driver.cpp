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
        static constexpr auto convolve = convolve_##bits;   \
        static constexpr auto recur = recur_##bits;         \
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

// x W^T with weights in int8 and a scale for each row of them; or in groups of 16 with scales and offsets.
template <class T> static void small_weights(Weights form, long rows, long k, long n, double &worst, long &different) {
    const auto x = numbers<T>(rows * k);
    const bool grouped = form >= GROUPED, halves = grouped && form & 2;
    std::vector<int8_t> w(halves ? n * k / 2 : n * k);
    std::vector<float> scale(grouped ? n * k / 8 : n);
    for (int8_t &one : w) one = int8_t(127 * next());
    for (float &one : scale) one = float(1 + next()) / 128;
    const auto widened = [&](long i, long j) {
        const long number = i * k + j, half = n * k / 2;
        const int8_t whole = !halves ? w[number] : number < half ? w[number] & 15 : w[number - half] >> 4 & 15;
        return grouped ? double(whole) * scale[number / 16 * 2] + scale[number / 16 * 2 + 1] : double(whole) * scale[i];
    };
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
        if (grouped && form & 1) {
            std::vector<float> about(k);
            round_about(&x[row * k], k, about.data());
            seen.assign(about.begin(), about.end());
        }
        for (long i = 0; i < n; i++) {
            double sum = 0;
            for (long j = 0; j < k; j++) sum += widened(i, j) * seen[j];
            expected.push_back(sum);
        }
    }
    Interface<T>::multiply(form, x.data(), rows, k, &weight, &scales, &bias, &n, 1, 0, nullptr, y.data(), 2);
    worst = std::max(worst, error(y, expected));
    for (long row = 0; row < rows; row++) {
        Interface<T>::multiply(form, x.data() + row * k, 1, k, &weight, &scales, &bias, &n, 1, 0, nullptr, alone.data(), 1);
        different += differ(alone.data(), y.data() + row * n, n);
    }
}

// x W^T with weights in GGUF blocks: those of a file, read one by one, with scales of up to 2^-8, small ones included.
static double half(uint16_t bits) {
    const double fraction = bits & 1023, exponent = bits >> 10 & 31;
    return exponent ? (1 + fraction / 1024) * pow(2, exponent - 15) : fraction / 1024 * pow(2, -14);
}
template <class T, class K> static void blocks(K, long form, long rows, long n, double &worst, long &different) {
    const long k = 512, bytes = K::SUBSCALED ? (K::MINIMA ? 144 : 210) : 2 + K::HIGH * 4 + K::LOW * 4;
    std::vector<uint8_t> file(n * k / K::BLOCK * bytes), packed(n * K::row_bytes(k));
    for (uint8_t &one : file) one = uint8_t(128 + 128 * next());
    for (size_t i = 0; i < file.size(); i += bytes)
        for (long place : {K::SUBSCALED && !K::MINIMA ? 208 : 0, K::MINIMA ? 2 : K::SUBSCALED ? 208 : 0})
            file[i + place + 1] = uint8_t(file[i + place + 1] % 28);  // positive, exponents of up to -9
    std::vector<double> w;
    const uint8_t *from = file.data();
    while (from < file.data() + file.size()) {
        Unpacked block;
        read_block<K>(from, block);
        for (long i = 0; i < K::BLOCK; i++) {
            const uint8_t part = block.scales[i / K::SCALED], number = block.numbers[i];
            const double scale = half(block.scale) * (!K::SUBSCALED ? 1 : K::MINIMA ? part : int8_t(part));
            const double least = K::MINIMA ? half(block.of_minima) * block.minima[i / 32] : 0;
            w.push_back(scale * (K::LOW == 8 ? int8_t(number) : number - K::ZERO) - least);
        }
    }
    pack_blocks(form, file.data(), n, k, packed.data(), 2);
    std::vector<int64_t> ids(n);
    std::iota(ids.begin(), ids.end(), 0);
    std::vector<float> unpacked(n * k);
    unpack_32(form, packed.data(), k, ids.data(), n, unpacked.data(), 2);
    worst = std::max(worst, error(unpacked, w));

    const auto x = numbers<T>(rows * k);
    std::vector<double> expected;
    for (long row = 0; row < rows; row++) {
        std::vector<double> seen;
        for (long g = 0; g < k / GROUP; g++) {
            RoundedGroup group;
            group.template fill<K>(&x[row * k + g * GROUP]);
            for (long i = 0; i < GROUP; i++)
                seen.push_back(form % 2 == PACKED % 2 ? widen(x[row * k + g * GROUP + i]) : double(group.numbers[i]) * group.factor);
        }
        for (long i = 0; i < n; i++) {
            double sum = 0;
            for (long j = 0; j < k; j++) sum += w[i * k + j] * seen[j];
            expected.push_back(sum);
        }
    }
    const void *const weight = packed.data();
    const float *const scales = nullptr;
    const T *const bias = nullptr;
    std::vector<T> y(rows * n), alone(n);
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

// Rows `chosen` of `width` numbers each.
template <class V> static V rows_of(const V &from, const std::vector<long> &chosen, long width) {
    V found;
    for (long row : chosen) found.insert(found.end(), from.begin() + row * width, from.begin() + (row + 1) * width);
    return found;
}
static const int64_t TREE_PARENTS[] = {-1, 0, 1, 0, 3, 2, 2, -1, 7}, ACCEPTED[] = {0, 1, -1};
static std::vector<long> path_to(long node) {
    std::vector<long> path;
    for (; node >= 0; node = TREE_PARENTS[node]) path.insert(path.begin(), node);
    return path;
}
static const std::vector<int64_t> CHAIN_PARENTS{-1, 0, 1, 2, 3, 4, 5, 6, 7};

// A tree whose nodes continue a path of two nodes of the same tree; every node is also computed alone.
template <class T> static void recurrence(Kind kind, double &worst, long &different) {
    const bool is_delta = kind <= DELTA_OF_CHANNELS, by_channel = kind == CHANNELS;
    const long nodes = 9, heads = 4, shared = by_channel ? 1 : 2, dk = 20, dv = by_channel ? 1 : 13;
    const long decays = kind == DELTA_OF_CHANNELS ? heads * dk : heads;
    const auto query = numbers<T>(nodes * shared * dk), key = numbers<T>(query.size()), value = numbers<T>(nodes * heads * dv);
    auto decay = numbers<float>(nodes * decays), beta = numbers<float>(nodes * heads), rate = numbers<float>(heads * dk);
    const auto start = numbers<float>(heads * dk * dv), skip = numbers<float>(heads);
    for (float &one : decay) one = is_delta ? -std::fabs(one) : std::fabs(one);
    for (float &one : rate) one = -std::fabs(one);
    const auto run = [&](const std::vector<long> &chosen, const int64_t *parents, std::vector<float> &state,
                         const std::vector<float> *known, std::vector<float> *updates) {
        const long count = chosen.size();
        const auto q = rows_of(query, chosen, shared * dk), k = rows_of(key, chosen, shared * dk), v = rows_of(value, chosen, heads * dv);
        const auto d = rows_of(decay, chosen, decays), b = rows_of(beta, chosen, heads);
        const void *inputs[] = {q.data(), k.data(), v.data(), d.data(), is_delta ? b.data() : nullptr, rate.data(),
                                is_delta ? nullptr : skip.data(), nullptr, state.data()};
        const long narrow = sizeof(T) == 4;
        const Recurrence r = {1, heads, shared, count, dk, dv, kind, 0, 1, known ? 3 : 0, nodes, heads * dk * dv, {0, shared * dk, by_channel ? 1 : dk},
                              {0, shared * dk, by_channel ? 1 : dk}, {0, heads * dv, dv}, {0, decays, decays / heads}, {0, heads, 1},
                              {narrow, narrow, narrow, 1, 1, 1, 1, 1, 1}};
        const long sizes[] = {count * decays, count * shared * dk, count * heads * dv};
        for (int i = 0; i < 3; i++) updates[i].resize(sizes[i]);
        const float *before[3];
        float *after[3];
        for (int i = 0; i < 3; i++) before[i] = known ? known[i].data() : nullptr, after[i] = updates[i].data();
        std::vector<T> y(count * heads * dv);
        Interface<T>::recur(&r, parents, inputs, known ? ACCEPTED : nullptr, known ? before : nullptr, after, y.data(), 1 + count % 3);
        if (!by_channel) return y;
        std::vector<T> by_node(y.size());
        for (long i = 0; i < count * heads; i++) by_node[i] = y[i % heads * count + i / heads];
        return by_node;
    };
    std::vector<std::vector<double>> states(nodes + 1, std::vector<double>(start.size()));  // [H, Dk, Dv] after each node
    std::vector<double> expected(nodes * heads * dv);
    const auto define = [&](long n, const std::vector<double> &before, std::vector<double> &after, double *to) {
        for (long h = 0; h < heads; h++) {
            const T *const k = &key[(n * shared + h / (heads / shared)) * dk], *const q = &query[k - key.data()];
            const double step = decay[n * decays + h * (decays / heads)];
            for (long j = 0; j < dv; j++) {
                const double x = widen(value[(n * heads + h) * dv + j]);
                double update = is_delta ? x : x * step, output = is_delta ? 0 : x * skip[h];
                for (long i = 0; i < dk; i++) {
                    const double log = kind == DELTA_OF_CHANNELS ? decay[n * decays + h * dk + i] : is_delta ? step
                                     : step * rate[by_channel ? h * dk + i : h];
                    double &one = after[(h * dk + i) * dv + j] = before[(h * dk + i) * dv + j] * exp(log);
                    if (is_delta) update -= widen(k[i]) * one;
                }
                if (is_delta) update *= beta[n * heads + h];
                for (long i = 0; i < dk; i++) {
                    double &one = after[(h * dk + i) * dv + j] += widen(k[i]) * update;
                    output += widen(q[i]) * one * (is_delta ? 1 / sqrt(double(dk)) : 1);
                }
                to[(n * heads + h) * dv + j] = output;
            }
        }
    };
    for (long i = 0; i < long(start.size()); i++)  // Mamba 2 has [H, Dv, Dk]
        states[nodes][i] = start[kind == LINEAR ? i / (dk * dv) * dk * dv + i % dv * dk + i / dv % dk : i];
    for (long n : {0, 1}) define(n, std::vector<double>(states[nodes]), states[nodes], expected.data());
    for (long n = 0; n < nodes; n++) define(n, states[TREE_PARENTS[n] < 0 ? nodes : TREE_PARENTS[n]], states[n], expected.data());
    std::vector<long> all(nodes);
    std::iota(all.begin(), all.end(), 0);
    std::vector<float> known[3], updates[3], state = start;
    run(all, TREE_PARENTS, state, nullptr, known);
    const auto y = run(all, TREE_PARENTS, state, known, updates);
    worst = std::max(worst, error(y, expected));
    for (long n = 0; n < nodes; n++) {
        const std::vector<long> path = path_to(n);
        std::vector<float> own = start;
        const auto alone = run(path, CHAIN_PARENTS.data(), own, known, updates);
        different += differ(&alone[(path.size() - 1) * heads * dv], &y[n * heads * dv], heads * dv) || own != state;
    }
}

template <class T> static void convolution(long size, long kept, double &worst, long &different) {
    const long nodes = 9, channels = 21;
    const auto x = numbers<T>(nodes * channels), weight = numbers<T>(channels * size), bias = numbers<T>(channels);
    const auto start = numbers<T>(channels * kept);
    const auto run = [&](const std::vector<long> &chosen, const int64_t *parents, std::vector<T> &window) {
        const auto own = rows_of(x, chosen, channels);
        const Convolution c = {1, channels, long(chosen.size()), size, kept, 1, 1, 3, {0, 1, channels}, {0, 1, channels}};
        std::vector<T> y(own.size());
        Interface<T>::convolve(&c, parents, own.data(), weight.data(), bias.data(), window.data(), ACCEPTED, x.data(), y.data(), 2);
        return y;
    };
    std::vector<long> all(nodes);
    std::iota(all.begin(), all.end(), 0);
    std::vector<T> window = start;
    const auto y = run(all, TREE_PARENTS, window);
    std::vector<double> expected;
    for (long n = 0; n < nodes; n++) {
        std::vector<long> path = path_to(n);
        std::vector<T> own = start;
        const auto alone = run(path, CHAIN_PARENTS.data(), own);
        different += differ(&alone[(path.size() - 1) * channels], &y[n * channels], channels) || own != window;
        path.insert(path.begin(), {0, 1});
        for (long c = 0; c < channels; c++) {
            double sum = widen(bias[c]);
            for (long k = 0; k < size; k++) {
                const long place = long(path.size()) - size + k;
                sum += double(widen(weight[c * size + k])) * widen(place < 0 ? start[c * kept + kept + place] : x[path[place] * channels + c]);
            }
            expected.push_back(sum / (1 + exp(-sum)));
        }
    }
    worst = std::max(worst, error(y, expected));
}

template <class T> static void all(const char *name) {
    double product = 0, norm = 0, rotation = 0, attended = 0, convolved = 0, recurred = 0;
    long different = 0;
    for (long rows : {1, 2, 3, 5, 8, 13, 40})
        for (long k : {64, 77, 200})
            for (bool gated : {false, true}) {
                products<T>(rows, k, 50, gated, 1 + rows % 3, product, different);
                small_weights<T>(gated ? INT8 : INT8_ROUNDED, rows, k, 50, product, different);
            }
    for (long rows : {1, 2, 3, 5, 8, 13, 40})
        for (long bits : {0, 1, 2}) small_weights<T>(Weights(GROUPED + bits), rows, 192, 50, product, different);
    for (long rows : {1, 2, 3, 5, 8, 13})
        for (long form = PACKED; form < PACKED + 10; form++)
            with_kind((form - PACKED) / 2, [&](auto kind) { blocks<T>(kind, form, rows, 48, product, different); });
    for (bool early : {false, true}) norm = std::max({norm, norms<T>(3, 77, early), norms<T>(1, 576, early)});
    for (long dim : {8, 20, 64}) rotation = std::max(rotation, rotary<T>(dim));
    for (long begin : {40, 120, 300})
        for (long dim : {20, 64}) attention<T>(9, begin, dim, attended, different);
    for (long size : {3, 4, 7})
        for (long kept : {size - 1, size}) convolution<T>(size, kept, convolved, different);
    for (Kind kind : {DELTA, DELTA_OF_CHANNELS, LINEAR, CHANNELS}) recurrence<T>(kind, recurred, different);
    printf("\"%s\": [%g, %g, %g, %g, ", name, product, norm, rotation, attended);
    printf("%g, %g, %ld]", convolved, recurred, different);
}

int main() {
    for (long paired = 0; paired <= choose_pairs(1); paired++) {
        printf("%s", paired ? ", " : "{");
        choose_pairs(paired);
        all<bf16>(paired ? "pairs" : "bf16");
    }
    printf(", "), all<float>("float"), puts("}");
}
