// Convolutions and recurrences of nodes of a tree; verification/recurrence.py has the mathematics.
//
// The accepted path of the last tree is entered into a row's window or state when the new nodes read it, so each state
// is read and written once. Sums run along the path from the root to a node: its results have the bits that they have in
// any other tree, alone, in any batch, and with any number of threads.

#pragma once

#include "products.h"

static inline long padded(long count) { return (count + LANES - 1) / LANES * LANES; }

// Floats as a number of dtype T holds them.
template <class T> static inline Floats fitted(Floats x) {
    return std::is_same_v<T, float> ? x : (Floats)(nearest(x) & 0xffff0000u);
}
template <class T> static inline float fitted(float x) { return std::is_same_v<T, float> ? x : widen(rounded(x)); }

// Numbers of bfloat16, or of float32 if `wide`.
struct Numbers {
    const void *data;
    long wide;
    float operator[](long i) const { return wide ? ((const float *)data)[i] : widen(((const bf16 *)data)[i]); }
    Floats at(long i, long count) const {
        return wide ? floats((const float *)data + i, count) : floats((const bf16 *)data + i, count);
    }
    float fit(float x) const { return wide ? x : fitted<bf16>(x); }
    explicit operator bool() const { return data; }
};

// ------------------------------------------------------------------------------------------------ convolutions

struct Convolution {
    long rows, channels, nodes, size;       // of each row; tokens that the convolution sees
    long kept, silu;                        // columns of the window: `size` or one less; whether SiLU follows
    long trees, path;                       // number of trees (one for all rows, or one for each), length of the path
    long stride[3], known_stride[3];        // of the inputs of new nodes and of the last tree: rows, channels, nodes
};

// `count` numbers that are `stride` apart.
template <class T> static inline Floats apart(const T *from, long stride, long count) {
    if (stride == 1) return floats(from, count);
    T some[LANES] = {};
    for (long i = 0; i < std::min<long>(LANES, count); i++) some[i] = from[i * stride];
    return floats(some);
}
// Columns of `count` rows of `size` numbers each. `Size` is 0 or the size, which lets the compiler shuffle vectors.
template <int Size, class T> static inline void columns_of(const T *from, long size, long count, Floats *columns) {
    if (Size) size = Size;
    float some[Size ? Size : 1][LANES];
    if (Size && count >= LANES) {
        for (int i = 0; i < LANES; i++)
            for (int k = 0; k < Size; k++) some[k][i] = widen(from[i * Size + k]);
        for (int k = 0; k < Size; k++) columns[k] = floats(some[k]);
    } else
        for (long k = 0; k < size; k++) columns[k] = apart(from + k, size, count);
}

// Enter the path [B, path] of nodes of the last tree, with inputs `known`, into the window [B, C, kept], and compute the
// convolution of the new nodes with weight [C, size] and bias [C]. y is [B, N, C].
template <class T>
static void convolve(const Convolution &c, const int64_t *parents, const T *x, const T *weight, const T *bias, T *window,
                     const int64_t *path, const T *known, T *y, long threads) {
    const long size = c.size, kept = c.kept, missing = size - kept, blocks = (c.channels + LANES - 1) / LANES;
    std::vector<long> seen(c.trees * c.nodes * size), accepted(c.rows, 0);  // nodes, or negative: of the window, last is -1
    for (long n = 0; n < c.trees * c.nodes; n++) {
        long node = n % c.nodes;
        for (long k = size - 1; k >= 0; k--) {
            seen[n * size + k] = node;
            node = node < 0 ? node - 1 : parents[n / c.nodes * c.nodes + node];
        }
    }
    for (long b = 0; b < c.rows && known; b++)
        for (long i = 0; i < c.path; i++) accepted[b] += path[b * c.path + i] >= 0;
    Guard guard;
#pragma omp parallel num_threads(threads)
    guard([&] {
        std::vector<float> memory(2 * size * LANES);
        Floats *const w = (Floats *)memory.data(), *const old = w + size;  // old columns, oldest first
#pragma omp for schedule(static)
        for (long task = 0; task < c.rows * blocks; task++) {
            const long b = task / blocks, first = task % blocks * LANES, count = std::min<long>(LANES, c.channels - first);
            const long steps = accepted[b];
            T *const own = window + (b * c.channels + first) * kept;
            const auto read = [&](const T *from, long rows, Floats *columns) {
                if (rows == 4) columns_of<4>(from, rows, count, columns);
                else if (rows == 3) columns_of<3>(from, rows, count, columns);
                else columns_of<0>(from, rows, count, columns);
            };
            read(weight + first * size, size, w);
            read(own, kept, old + missing);
            if (steps) {
                for (long k = 0; k < kept; k++) {
                    const long place = steps - kept + k;  // on the path
                    const T *const from = known + b * c.known_stride[0] + first * c.known_stride[1];
                    old[missing + k] = place < 0 ? old[missing + k + steps]
                                                 : apart(from + path[b * c.path + place] * c.known_stride[2],
                                                         c.known_stride[1], count);
                }
                for (long i = 0; i < count; i++)
                    for (long k = 0; k < kept; k++) store(own + i * kept + k, old[missing + k][i]);
            }
            const Floats shift = bias ? floats(bias + first, count) : Floats{};
            const long *columns = seen.data() + (c.trees > 1 ? b : 0) * c.nodes * size;
            for (long n = 0; n < c.nodes; n++, columns += size) {
                Floats sum = {};
                for (long k = 0; k < size; k++) {
                    const T *const from = x + b * c.stride[0] + first * c.stride[1] + columns[k] * c.stride[2];
                    sum = fused(w[k], columns[k] < 0 ? old[size + columns[k]] : apart(from, c.stride[1], count), sum);
                }
                sum = fitted<T>(sum + shift);
                store(y + (b * c.nodes + n) * c.channels + first, c.silu ? activated(sum, 1) : sum, count);
            }
        }
    });
    guard.check();
}

// ------------------------------------------------------------------------------------------------ recurrences

// A delta rule whose decays are those of heads or of key channels, Mamba 2, or Mamba 1, whose heads are channels.
enum Kind { DELTA, DELTA_OF_CHANNELS, LINEAR, CHANNELS };

struct Recurrence {
    long rows, heads, shared, nodes, key_dim, value_dim;   // value heads, key heads, sizes of keys and values
    long kind, flag;                                       // see `Kind`; normalize queries and keys, or softplus of dt
    long trees, path, known;                               // as in `Convolution`; nodes of the last tree
    long state_stride;                                     // of rows
    long query_stride[3], key_stride[3], value_stride[3];  // rows, nodes, heads (or dims, of keys of Mamba 1)
    long decay_stride[3], beta_stride[3], wide[9];         // see `Numbers`
};

// Queries and keys [B, N, G, Dk], values [B, N, H, Dv], log decays [B, N, H] or [B, N, H, Dk], beta [B, N, H]; Mamba: C, B
// and x, dt [B, N, H], z (if Mamba 1), and A, D and a bias of dt [H]. In Mamba 1 A is [H, Dk], C and B are [B, N, Dk], x is
// [B, N, H].
enum Input { QUERY, KEY, VALUE, DECAY, BETA, RATE, SKIP, BIAS, STATE };

// The ancestors of the nodes of one tree, from the root on.
struct Paths {
    long nodes;
    std::vector<long> counts, ids;  // [N], [N, N]
    Paths(const int64_t *parents, long nodes) : nodes(nodes), counts(nodes), ids(nodes * nodes) {
        for (long n = 0; n < nodes; n++)
            if (const long parent = parents[n]; parent >= 0) {
                std::copy(of(parent), of(parent) + counts[parent], ids.begin() + n * nodes);
                ids[n * nodes + counts[parent]] = parent;
                counts[n] = counts[parent] + 1;
            }
    }
    const long *of(long node) const { return ids.data() + node * nodes; }
};

static inline Floats exponentials(const float *x) { return exponential<Floats, SignedWords>(floats(x)); }

// dt of a token, rounded as transformers' single steps round it.
static inline float step_size(float dt, const Numbers &numbers, const Numbers &bias, long head, bool has_softplus) {
    if (bias) dt = numbers.fit(dt + numbers.fit(bias[head]));
    return has_softplus ? numbers.fit(dt > 20 ? dt : std::log1p(std::exp(dt))) : dt;
}

// row * factor + sum of factors[j * stride] * vectors[j], for `count` numbers; also to `copy`, which is padded.
static inline void enter(float *row, long count, float factor, long steps, const float *factors, long stride,
                         const float *const *vectors, float *copy) {
    for (long c = 0; c < count; c += LANES) {
        Floats sum = floats(row + c, count - c);
        if (steps) {
            sum *= factor;
            for (long j = 0; j < steps; j++) sum = fused(floats(vectors[j] + c, count - c), factors[j * stride], sum);
            store(row + c, sum, count - c);
        }
        store(copy + c, sum);
    }
}

// Add products of four rows x with `count` rows of D vectors to the first `some` rows of `to`.
template <int D>
static inline void add_rows(const float *const x[4], const float *rows, long count, long width, float *to, long some) {
    Floats sum[4][D];
    for (int i = 0; i < 4; i++)
        for (int d = 0; d < D; d++) sum[i][d] = floats(to + std::min<long>(i, some - 1) * width + d * LANES);
    for (long r = 0; r < count; r++, rows += width) {
        Floats values[D];
        for (int d = 0; d < D; d++) values[d] = floats(rows + d * LANES);
        for (int i = 0; i < 4; i++)
            for (int d = 0; d < D; d++) sum[i][d] = fused(values[d], x[i][r], sum[i][d]);
    }
    for (long i = 0; i < some; i++)
        for (int d = 0; d < D; d++) store(to + i * width + d * LANES, sum[i][d]);
}

constexpr long STATE_ROWS = 16;  // rows of a state that are read together

// Enter the path [B, path] of nodes of the last tree, of which `known` holds decays [B, H, known] (or [B, H, known, Dk]),
// keys [B, G, known, Dk] and values [B, H, known, Dv], into the state [B, H, Dk, Dv] (Mamba 2: [B, H, Dv, Dk]), and compute
// the outputs y [B, N, H, Dv] of the new nodes; `updates` are what the next call takes as `known`.
template <class T>
static void recur(const Recurrence &r, const int64_t *parents, const void *const *inputs, const int64_t *path,
                  const float *const *known, float *const *updates, T *y, long threads) {
    const long nodes = r.nodes, dk = r.key_dim, dv = r.value_dim, kp = padded(dk), vp = padded(dv), np = padded(nodes);
    const long group = r.heads / r.shared;
    const bool is_linear = r.kind == LINEAR, of_channels = r.kind == DELTA_OF_CHANNELS;
    const auto numbers = [&](Input input) { return Numbers{inputs[input], r.wide[input]}; };
    const Numbers decays = numbers(DECAY), betas = numbers(BETA), rates = numbers(RATE), skips = numbers(SKIP);
    const Numbers biases = numbers(BIAS);
    const T *const query = (const T *)inputs[QUERY], *const key = (const T *)inputs[KEY];
    const T *const value = (const T *)inputs[VALUE];
    float *const state = (float *)inputs[STATE];
    std::vector<Paths> trees;
    for (long tree = 0; tree < r.trees; tree++) trees.emplace_back(parents + tree * nodes, nodes);
    // of each row and key head: queries and keys, and their products with the keys of ancestors and their own
    const long per_group = 2 * nodes * (kp + nodes), per_decay = of_channels ? kp : 1;
    const long per_thread = (r.path + 2) * kp + std::max(STATE_ROWS * vp, 2 * kp) + 2 * nodes * (vp + kp + per_decay) +
                            nodes * (2 * np + vp) + 4 * np;
    const std::unique_ptr<float[]> memory(new float[r.rows * r.shared * per_group + threads * per_thread]);
    Guard guard;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long task = 0; task < r.rows * r.shared; task++) {
            const long b = task / r.shared, g = task % r.shared;
            const Paths &tree = trees[r.trees > 1 ? b : 0];
            float *const keys = memory.get() + task * per_group, *const queries = keys + nodes * kp;
            float *const on_keys = queries + nodes * kp, *const on_queries = on_keys + nodes * nodes;
            for (long n = 0; n < nodes; n++) {
                const T *const k = key + b * r.key_stride[0] + n * r.key_stride[1] + g * r.key_stride[2];
                const T *const q = query + b * r.query_stride[0] + n * r.query_stride[1] + g * r.query_stride[2];
                Floats squares[2] = {};
                for (long c = 0; c < kp; c += LANES) {
                    const Floats one = floats(k + c, dk - c), two = floats(q + c, dk - c);
                    squares[0] += one * one, squares[1] += two * two;
                }
                const Four sum = sums(squares[0], squares[1], Floats{}, Floats{});
                const bool normalizes = !is_linear && r.flag;
                const float of_key = normalizes ? 1 / std::sqrt(sum[0] + 1e-6f) : 1;
                const float of_query = normalizes ? 1 / std::sqrt(sum[1] + 1e-6f) : 1;
                const float scale = is_linear ? 1 : 1 / std::sqrt(float(dk));
                for (long c = 0; c < kp; c += LANES) {
                    store(keys + n * kp + c, floats(k + c, dk - c) * of_key);
                    store(queries + n * kp + c, floats(q + c, dk - c) * of_query * scale);
                    store(updates[1] + (task * nodes + n) * dk + c, floats(keys + n * kp + c), dk - c);
                }
                for (long t = 0; t <= tree.counts[n]; t++) {
                    const bool is_own = t == tree.counts[n];
                    if (of_channels && !is_own) continue;
                    const float *const other = keys + (is_own ? n : tree.of(n)[t]) * kp;
                    Floats products[2] = {};
                    for (long c = 0; c < kp; c += LANES) {
                        products[0] = fused(floats(keys + n * kp + c), floats(other + c), products[0]);
                        products[1] = fused(floats(queries + n * kp + c), floats(other + c), products[1]);
                    }
                    const Four sum = sums(products[0], products[1], Floats{}, Floats{});
                    on_keys[n * nodes + t] = sum[0], on_queries[n * nodes + t] = sum[1];
                }
            }
        }
        std::vector<long> accepted;
        std::vector<const float *> entered;
#pragma omp for schedule(static)
        for (long task = 0; task < r.rows * r.heads; task++) guard([&] {
            const long b = task / r.heads, h = task % r.heads, shared = b * r.shared + h / group;
            const Paths &tree = trees[r.trees > 1 ? b : 0];
            const float *const keys = memory.get() + shared * per_group, *const queries = keys + nodes * kp;
            const float *const on_keys = queries + nodes * kp, *const on_queries = on_keys + nodes * nodes;
            float *next = memory.get() + r.rows * r.shared * per_group + omp_get_thread_num() * per_thread;
            const auto take = [&](long count) { return std::exchange(next, next + count); };
            // the path: what each of its nodes adds to the state, with the decays after it
            float *const weighted = take(r.path * kp), *const factors = take(kp), *const sum = take(kp);
            accepted.clear(), entered.clear();
            for (long i = 0; i < r.path; i++)
                if (const long node = path[b * r.path + i]; node >= 0) {
                    accepted.push_back(node);
                    entered.push_back(known[2] + (task * r.known + node) * dv);
                }
            const long steps = accepted.size();
            std::fill(sum, sum + kp, 0.0f);  // of the decays after a node
            for (long j = steps - 1; j >= 0; j--) {
                const float *const old_key = known[1] + (shared * r.known + accepted[j]) * dk;
                const float *const old_decay = known[0] + (task * r.known + accepted[j]) * (of_channels ? dk : 1);
                for (long c = 0; c < kp; c += LANES) {
                    store(weighted + j * kp + c, floats(old_key + c, dk - c) * exponentials(sum + c));
                    store(sum + c, floats(sum + c) + (of_channels ? floats(old_decay + c, dk - c) : Floats{} + *old_decay));
                }
            }
            for (long c = 0; c < kp; c += LANES) store(factors + c, exponentials(sum + c));
            // decays from the committed state, and between a node and its ancestors
            float *const decay = take(nodes * per_decay), *const down = take(nodes * per_decay), *const dt = take(np);
            float *const logs = take(nodes * np), *const between = take(nodes * np), *const grown = take(np);
            for (long n = 0; n < nodes; n++) {
                const long from = b * r.decay_stride[0] + n * r.decay_stride[1] + h * r.decay_stride[2];
                const long count = tree.counts[n], parent = count ? tree.of(n)[count - 1] : -1;
                if (of_channels) {
                    for (long c = 0; c < kp; c += LANES) {
                        const Floats own = decays.at(from + c, dk - c);
                        store(decay + n * kp + c, own);
                        store(updates[0] + (task * nodes + n) * dk + c, own, dk - c);
                        store(down + n * kp + c, parent < 0 ? own : floats(down + parent * kp + c) + own);
                    }
                    continue;
                }
                dt[n] = is_linear ? step_size(decays[from], decays, biases, h, r.flag) : decays[from];
                decay[n] = updates[0][task * nodes + n] = is_linear ? dt[n] * rates[h] : dt[n];
                down[n] = parent < 0 ? decay[n] : down[parent] + decay[n];
                grown[n] = std::exp(down[n]);
                float *const own = logs + n * np;
                for (long t = 0; t < count; t++) own[t] = t < count - 1 ? logs[parent * np + t] + decay[n] : decay[n];
                for (long t = count; t % LANES; t++) own[t] = 0;
                for (long t = 0; t < count; t += LANES) store(between + n * np + t, exponentials(own + t));
            }
            // the state, and its products with queries and, in delta rules, keys
            float *const block = take(std::max(STATE_ROWS * vp, 2 * kp)), *const read = take(2 * nodes * vp);
            float *const scaled = take(2 * nodes * kp), *const own = state + task * dk * dv;
            if (of_channels)
                for (long n = 0; n < nodes; n++)
                    for (long c = 0; c < kp; c += LANES) {
                        const Floats factor = exponentials(down + n * kp + c);
                        store(scaled + n * kp + c, floats(queries + n * kp + c) * factor);
                        store(scaled + (nodes + n) * kp + c, floats(keys + n * kp + c) * factor);
                    }
            const auto row_of = [&](long m) {  // queries, then keys
                return of_channels ? scaled + m * kp : m < nodes ? queries + m * kp : keys + (m - nodes) * kp;
            };
            const long reading = is_linear ? nodes : 2 * nodes;
            const float *x[4];
            std::fill(read, read + reading * vp, 0.0f);
            if (is_linear) {
                std::vector<const float *> &added = entered;
                std::vector<float> values(steps * dv);
                for (long j = 0; j < steps; j++) {
                    std::copy(entered[j], entered[j] + dv, &values[j * dv]);
                    added[j] = weighted + j * kp;
                }
                for (long p = 0; p < dv; p += 2) {
                    const long count = std::min<long>(2, dv - p);
                    for (long i = 0; i < count; i++)
                        enter(own + (p + i) * dk, dk, factors[0], steps, values.data() + p + i, dv, added.data(), block + i * kp);
                    const float *const second = block + (count - 1) * kp;
                    for (long m = 0; m < nodes; m += 4) {
                        for (long i = 0; i < 4; i++) x[i] = row_of(std::min(m + i, nodes - 1));
                        Floats products[2][4] = {};
                        for (long c = 0; c < kp; c += LANES)
                            for (int i = 0; i < 4; i++) {
                                products[0][i] = fused(floats(block + c), floats(x[i] + c), products[0][i]);
                                products[1][i] = fused(floats(second + c), floats(x[i] + c), products[1][i]);
                            }
                        for (long i = 0; i < count; i++) {
                            const Floats *const some = products[i];
                            const Four found = sums(some[0], some[1], some[2], some[3]);
                            for (long j = 0; j < std::min<long>(4, nodes - m); j++) read[(m + j) * vp + p + i] = found[j];
                        }
                    }
                }
            } else
                for (long k = 0; k < dk; k += STATE_ROWS) {
                    const long count = std::min(STATE_ROWS, dk - k);
                    for (long i = 0; i < count; i++)
                        enter(own + (k + i) * dv, dv, factors[k + i], steps, weighted + k + i, kp, entered.data(), block + i * vp);
                    constexpr int wide = LANES == 8 ? 2 : 4;
                    for (long m = 0; m < reading; m += 4) {
                        const long some = std::min<long>(4, reading - m);
                        for (long i = 0; i < 4; i++) x[i] = row_of(m + std::min(i, some - 1)) + k;
                        long d = 0;
                        for (; d + wide * LANES <= vp; d += wide * LANES)
                            add_rows<wide>(x, block + d, count, vp, read + m * vp + d, some);
                        for (; d < vp; d += LANES) add_rows<1>(x, block + d, count, vp, read + m * vp + d, some);
                    }
                }
            // updates and outputs: of the committed state, then of the ancestors
            float *const solved = take(nodes * vp), *const of_keys = take(np), *const of_queries = take(np);
            for (long n = 0; n < nodes; n++) {
                const long count = tree.counts[n], *const ancestors = tree.of(n);
                const T *const v = value + b * r.value_stride[0] + n * r.value_stride[1] + h * r.value_stride[2];
                const float beta = is_linear ? dt[n] : betas[b * r.beta_stride[0] + n * r.beta_stride[1] + h * r.beta_stride[2]];
                const float factor = of_channels ? 1 : grown[n];
                if (of_channels) std::copy(decay + n * kp, decay + (n + 1) * kp, sum);  // of the decays below an ancestor
                for (long t = count - 1; t >= 0; t--) {
                    if (!of_channels) {
                        of_keys[t] = on_keys[n * nodes + t] * between[n * np + t];
                        of_queries[t] = on_queries[n * nodes + t] * between[n * np + t];
                        continue;
                    }
                    const float *const other = keys + ancestors[t] * kp, *const above = decay + ancestors[t] * kp;
                    Floats products[2] = {};
                    for (long c = 0; c < kp; c += LANES) {
                        const Floats one = floats(other + c) * exponentials(sum + c);
                        products[0] = fused(floats(keys + n * kp + c), one, products[0]);
                        products[1] = fused(floats(queries + n * kp + c), one, products[1]);
                        store(sum + c, floats(sum + c) + floats(above + c));
                    }
                    const Four found = sums(products[0], products[1], Floats{}, Floats{});
                    of_keys[t] = found[0], of_queries[t] = found[1];
                }
                const float own_product = on_queries[n * nodes + count];
                T *const to = y + ((b * nodes + n) * r.heads + h) * dv;
                for (long d = 0; d < dv; d += LANES) {
                    const Floats own_value = floats(v + d, dv - d);
                    Floats output = floats(read + n * vp + d) * factor;
                    Floats update = is_linear ? own_value : own_value - floats(read + (nodes + n) * vp + d) * factor;
                    for (long t = 0; t < count; t++) {
                        const Floats one = floats(solved + ancestors[t] * vp + d);
                        if (!is_linear) update = fused(one, -of_keys[t], update);
                        output = fused(one, of_queries[t], output);
                    }
                    update *= beta;
                    output = fitted<T>(fused(update, own_product, output));
                    store(solved + n * vp + d, update);
                    store(updates[2] + (task * nodes + n) * dv + d, update, dv - d);
                    if (skips) {
                        const Floats skipped = own_value * skips[h];
                        output += skips.wide ? skipped : fitted<bf16>(skipped);
                    }
                    store(to + d, output, dv - d);
                }
            }
        });
    }
    guard.check();
}

// ------------------------------------------------------------------------------------------------ Mamba 1

// Like `recur`, for states [B, C, Dk] of channels, of which every node's is computed; y is [B, C, N]. `known` and `updates`
// are dt [B, C, N], keys [B, 1, N, Dk] and values [B, C, N, 1].
template <class T>
static void scan(const Recurrence &r, const int64_t *parents, const void *const *inputs, const int64_t *path,
                 const float *const *known, float *const *updates, T *y, long threads) {
    constexpr long together = 16;  // channels of a task
    const long nodes = r.nodes, dk = r.key_dim, kp = padded(dk), blocks = (r.heads + together - 1) / together;
    const auto numbers = [&](Input input) { return Numbers{inputs[input], r.wide[input]}; };
    const Numbers x = numbers(VALUE), dt = numbers(DECAY), rates = numbers(RATE), skips = numbers(SKIP);
    const Numbers gates = numbers(BETA), biases = numbers(BIAS), state = numbers(STATE), given[2] = {numbers(KEY), numbers(QUERY)};
    const long per_row = 2 * nodes * kp, per_thread = (nodes + 4) * kp;
    const std::unique_ptr<float[]> memory(new float[r.rows * per_row + threads * per_thread]);
    std::fill(memory.get(), memory.get() + r.rows * per_row, 0.0f);
    for (long b = 0; b < r.rows; b++)
        for (long i = 0; i < 2; i++)  // keys, then queries
            for (long n = 0; n < nodes; n++) {
                float *const to = memory.get() + b * per_row + (i * nodes + n) * kp;
                const long *const stride = i ? r.query_stride : r.key_stride;
                for (long c = 0; c < dk; c++) to[c] = given[i][b * stride[0] + n * stride[1] + c * stride[2]];
                if (i == 0) std::copy(to, to + dk, updates[1] + (b * nodes + n) * dk);
            }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long task = 0; task < r.rows * blocks; task++) {
        const long b = task / blocks, end = std::min((task % blocks + 1) * together, r.heads);
        const float *const keys = memory.get() + b * per_row, *const queries = keys + nodes * kp;
        float *const states = memory.get() + r.rows * per_row + omp_get_thread_num() * per_thread;  // committed, then nodes'
        const int64_t *const parent = parents + (r.trees > 1 ? b : 0) * nodes, *const accepted = path + b * r.path;
        long steps = 0;
        for (long i = 0; i < r.path; i++) steps += accepted[i] >= 0;
        for (long d = task % blocks * together; d < end; d++) {
            const long row = b * r.heads + d, from = b * r.state_stride + d * dk;
            const auto at = [&](const long *stride, long n) { return b * stride[0] + n * stride[1] + d * stride[2]; };
            for (long c = 0; c < dk; c += LANES) {
                const Floats rate = rates.at(d * dk + c, dk - c);
                Floats old = state.at(from + c, dk - c), added = {};
                float after = 0;  // dt of the nodes after one
                for (long j = steps - 1; j >= 0; j--) {
                    const long node = accepted[j];
                    const Floats key = floats(known[1] + (b * r.known + node) * dk + c, dk - c);
                    const Floats factor = exponential<Floats, SignedWords>(rate * after);
                    added += factor * key * known[2][row * r.known + node];
                    after += known[0][row * r.known + node];
                }
                if (steps) {
                    old = fused(old, exponential<Floats, SignedWords>(rate * after), added);
                    if (state.wide) store((float *)state.data + from + c, old, dk - c);
                    else store((bf16 *)state.data + from + c, old = fitted<bf16>(old), dk - c);
                }
                store(states + c, old);
            }
            for (long n = 0; n < nodes; n++) {
                const float size = step_size(dt[at(r.decay_stride, n)], dt, biases, d, r.flag);
                const float value = size * x[at(r.value_stride, n)];
                updates[0][row * nodes + n] = size, updates[2][row * nodes + n] = value;
                for (long c = 0; c < dk; c += LANES) {
                    const Floats factor = exponential<Floats, SignedWords>(rates.at(d * dk + c, dk - c) * size);
                    const Floats old = floats(states + (parent[n] + 1) * kp + c);
                    store(states + (n + 1) * kp + c, fused(old, factor, floats(keys + n * kp + c) * value));
                }
            }
            for (long n = 0; n < nodes; n += 4) {
                Floats products[4] = {};
                for (long i = 0; i < std::min<long>(4, nodes - n); i++)
                    for (long c = 0; c < dk; c += LANES) {
                        const Floats one = floats(states + (n + i + 1) * kp + c);
                        products[i] = fused(one, floats(queries + (n + i) * kp + c), products[i]);
                    }
                const Four found = sums(products[0], products[1], products[2], products[3]);
                for (long i = 0; i < std::min<long>(4, nodes - n); i++) {
                    float output = fitted<T>(found[i]);
                    if (skips) {
                        const float skipped = x[at(r.value_stride, n + i)] * skips[d];
                        output = skips.wide ? output + skipped : fitted<T>(output + fitted<T>(skipped));
                    }
                    if (gates) {
                        const float gate = gates[at(r.beta_stride, n + i)];
                        output *= gates.fit(gate / (1 + std::exp(-gate)));
                    }
                    store(y + row * nodes + n + i, output);
                }
            }
        }
    }
}
