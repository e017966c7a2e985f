// Rotary embedding, and attention of tree nodes over a KV cache.
//
// Queries of all heads that share keys are rows of one product with a chunk of keys, so each key and value is read once
// for all of them. Threads take pairs of chunk and key head; their outputs, weighted by the sums of exponentials, are
// added at the end, as in FlashDecoding. Scores and outputs are in float32. Their memory is bounded: nodes of long prompts,
// and key heads of long caches, take turns.
//
// Sums run in the order of logical positions: committed slots, then a node's ancestors and the node itself, as if these
// were committed. Chunks end at multiples of CHUNK positions, and a position's lane in a sum is its remainder. So a node's
// output has the bits of the same token decoded alone, wherever it stands in a tree, a batch or a prompt.

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
    long begin;                                          // slot of the first new node
    long cache_stride[2], value_stride[2];               // of the cache's keys and values: rows, heads (slots: dim)
    long new_stride[3], new_value_stride[3];             // of the new keys and values: rows, heads, nodes
    long mask_stride[2];                                 // of the mask: rows, nodes (slots: 1)
    long form;                                           // of the nodes, see `Form`
    float scale;
};

// How new nodes see each other: as the mask says (or all), as a chain, or as a tree, of which the mask has the ancestors.
enum Form { MASKED, CHAIN, TREE };

constexpr long CHUNK = 128;                // positions of a task
constexpr int WIDE = LANES == 16 ? 4 : 2;  // vectors in a row of a block of sums, which stays in registers
constexpr long MANY_NODES = 64;            // nodes of a turn

#if LANES == 16
// Transpose a block of 16 x 16 words: row i at `from + i * stride` becomes column i of rows at `to + i * CHUNK`.
static inline void transpose(const uint32_t *from, long stride, uint32_t *to) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * stride);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        _mm512_storeu_si512(to + i * CHUNK, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 8) * CHUNK, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    }
}
#elif LANES == 8
// The same for 8 x 8 words.
static inline void transpose(const uint32_t *from, long stride, uint32_t *to) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps((const float *)(from + i * stride));
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps((float *)(to + i * CHUNK), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps((float *)(to + (i + 4) * CHUNK), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}
#endif

// Scores [rows, `space`] of `size` keys for many rows, with the bits of `multiply_rows`. Keys are transposed first (word w
// of all slots, then word w + 1; a word is one float or two bfloat16), so that lanes are slots. The numbers that a lane of
// `multiply_rows` adds are a chain here, too, and the chains are added in the order of `sums`.
constexpr long SEVERAL_ROWS = 8;
#if LANES > 4
template <class T>
static void score(const T *keys, long dim, long size, const Rows<Dot<T>> &q, uint32_t *words, float *scores, long space) {
    typedef Dot<T> D;
    const long count = dim / D::parts;
    for (long n = 0; n < size; n += LANES)
        for (long w = 0; w < count; w += LANES) {
            const uint32_t *from = (const uint32_t *)(keys + n * dim) + w;
            uint32_t *const to = words + w * CHUNK + n;
            if (n + LANES <= size && w + LANES <= count) transpose(from, count, to);
            else
                for (long i = 0; i < std::min(long(LANES), size - n); i++)
                    for (long j = 0; j < std::min(long(LANES), count - w); j++)
                        memcpy(to + j * CHUNK + i, from + i * count + j, 4);
        }
    // of 16 lanes, a quarter is (0 + 2) + (1 + 3), and all are (0 + 2) + (1 + 3) quarters; of 8, pairs of neighbours are added
    constexpr int order[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
    for (long m = 0; m < q.rows; m += 4) {
        const long some = std::min<long>(4, q.rows - m);
        const float *x[4];
        for (long i = 0; i < 4; i++) x[i] = q.data + (m + std::min(i, some - 1)) * q.stride;
        for (long n = 0; n < size; n += 2 * LANES) {
            Floats level[5][4][2];  // sums of 1, 2, 4, ... lanes that wait for as many
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) {
                Floats sum[4][2] = {};
                for (long w = LANES == 16 ? order[lane] : lane; w < count; w += LANES) {
                    const long place = w / LANES * D::step + w % LANES;  // in packed rows
#pragma GCC unroll 2
                    for (int half = 0; half < D::parts; half++) {
                        const Floats one = D::load((const T *)(words + w * CHUNK + n), half);
                        const Floats two = D::load((const T *)(words + w * CHUNK + n + LANES), half);
#pragma GCC unroll 4
                        for (int i = 0; i < 4; i++) {
                            const float number = x[i][place + half * LANES];
                            sum[i][0] = fused(one, number, sum[i][0]), sum[i][1] = fused(two, number, sum[i][1]);
                        }
                    }
                }
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
                    for (int j = 0; j < 2; j++) {
                        int waiting = 0;
#pragma GCC unroll 4
                        for (; lane >> waiting & 1; waiting++) sum[i][j] = level[waiting][i][j] + sum[i][j];
                        level[waiting][i][j] = sum[i][j];
                    }
            }
            for (long i = 0; i < some; i++)
                for (int j = 0; j < 2; j++)
                    store(scores + (m + i) * space + n + j * LANES, level[LANES == 16 ? 4 : 3][i][j]);
        }
    }
}
#endif

// Positions of a task: committed slots `from` .. `from + size`, and nodes `node` .. `node + nodes`, whose scores begin at
// `place`.
struct Part {
    long from, size, node, nodes, place;
};

// The sums of values, weighted with each of four rows of p, for D steps of a value; writes the first `some` rows, with
// the numbers of each step as `Dot` orders them. Slots that are not seen have weight 0, and change no sum.
template <int D, class T>
static inline void weigh(const float *const p[4], const T *v, const T *drafted, const Part &part, long dv, float *to,
                         long some) {
    Floats sum[4][D * Dot<T>::parts] = {};
    const auto add = [&](const T *from, long first, long last) __attribute__((always_inline)) {
        for (long n = first; n < last; n++, from += dv)
            for (int d = 0; d < D; d++)
                for (int half = 0; half < Dot<T>::parts; half++) {
                    const Floats value = Dot<T>::load(from + d * Dot<T>::step, half);
                    for (int i = 0; i < 4; i++) {
                        Floats &one = sum[i][d * Dot<T>::parts + half];
                        one = fused(value, p[i][n], one);
                    }
                }
    };
    add(v, 0, part.size);
    add(drafted, part.place, part.place + part.nodes);
    for (long i = 0; i < some; i++)
        for (int d = 0; d < D * Dot<T>::parts; d++) store(to + i * (dv + 2) + d * LANES, sum[i][d]);
}

// Replace the scores of slots that are not seen by -infinity.
static inline void hide(float *scores, const uint8_t *seen, long size) {
    for (long n = 0; n < size; n += LANES) {
        Bytes some = {};
        if (n + LANES <= size) memcpy(&some, seen + n, LANES);
        else memcpy(&some, seen + n, size - n);
        const Floats z = floats(scores + n);
        store(scores + n, __builtin_convertvector(some, SignedWords) != 0 ? z : Floats{} - INFINITY);
    }
}

// Floats of memory for one call; it takes more only if the queries of one node need more.
static long scratch_limit = 4L << 20;

// Append new keys and values to the cache, and attend to it.
//
// `order` holds, for each row, its first slot (after padding) and, for a tree, the end of its committed slots and the depths
// of the nodes, [B, 2 + N]; for a chain, which follows slot `begin` - 1, [B, 1]; null: `MASKED`, without padding. The mask
// [B, N, begin + N] hides slots; null: none.
template <class T>
static void attend(const Attention &a, const T *query, const T *key, const T *value, T *keys, T *values,
                   const uint8_t *mask, const int64_t *order, T *y, long threads) {
    const long group = a.heads / a.shared, dv = a.value_dim, pairs = a.batch * a.shared;  // pairs of row and key head
    if (pairs * a.nodes == 0) return;
    const bool is_tree = a.form == TREE;
    const long order_stride = is_tree ? 2 + a.nodes : 1;
    const auto first_of = [&](long b) { return order ? order[b * order_stride] : 0; };
    const auto length_of = [&](long b) { return (is_tree ? order[b * order_stride + 1] : a.begin) - first_of(b); };
    const auto position_of = [&](long b, long node) {  // among a row's positions
        return length_of(b) + (is_tree ? order[b * order_stride + 2 + node] : node);
    };
    long most_positions = 1;
    for (long b = 0; b < a.batch; b++)
        for (long n = 0; n < a.nodes; n++) most_positions = std::max(most_positions, position_of(b, n) + 1);
    // as many nodes, and then pairs, at a time as fit
    const long most_chunks = (most_positions + CHUNK - 1) / CHUNK, space = CHUNK + (is_tree ? a.nodes + LANES : 0) + LANES;
    const long per_query = most_chunks * (dv + 2), per_thread = (a.dim + dv / CHUNK + 1) * CHUNK + 2 * LANES;
    const long fit = scratch_limit / (per_query + threads * space) / group;
    const long most = std::max<long>(1, std::min({fit, a.nodes, MANY_NODES})), widest = most * group;
    const long room = scratch_limit / (widest * per_query), some_pairs = std::max<long>(1, std::min(pairs, room));
    const long done = some_pairs * widest * per_query;
    const std::unique_ptr<float[]> memory(new float[done + threads * (widest * space + per_thread)]);
    float *const partial = memory.get();  // of each task and query: output, maximum, sum
    Guard guard;
    for (long b = 0; b < a.batch; b++)
        for (long h = 0; h < a.shared; h++)
            for (long n = 0; n < a.nodes; n++) {
                memcpy(keys + b * a.cache_stride[0] + h * a.cache_stride[1] + (a.begin + n) * a.dim,
                       key + b * a.new_stride[0] + h * a.new_stride[1] + n * a.new_stride[2], a.dim * sizeof(T));
                memcpy(values + b * a.value_stride[0] + h * a.value_stride[1] + (a.begin + n) * dv,
                       value + b * a.new_value_stride[0] + h * a.new_value_stride[1] + n * a.new_value_stride[2],
                       dv * sizeof(T));
            }
    const long parts = (a.nodes + most - 1) / most;
#pragma omp parallel num_threads(threads)
    for (long turn = 0; turn < (pairs + some_pairs - 1) / some_pairs * parts; turn++) {
        float *const scores = partial + done + omp_get_thread_num() * (widest * space + per_thread);
        float *const output = scores + widest * space;
        const long first_pair = turn / parts * some_pairs, here = std::min(some_pairs, pairs - first_pair);
        const long n0 = turn % parts * most, nodes = std::min(most, a.nodes - n0), rows = group * nodes;  // of this turn
        const long new_end = a.form == CHAIN ? n0 + nodes : a.nodes;  // of new nodes that those of this turn see
        const long chunks = is_tree ? most_chunks : std::min(most_chunks, (a.begin + new_end + CHUNK - 1) / CHUNK);
#pragma omp for schedule(dynamic)
        for (long task = 0; task < here * chunks; task++) guard([&] {
            const long b = (first_pair + task / chunks) / a.shared, h = (first_pair + task / chunks) % a.shared;
            const long c = task % chunks, first = first_of(b), length = length_of(b);
            const long slots = is_tree ? length : std::max<long>(0, length + new_end);  // without a tree, nodes are among them
            Part part{first + c * CHUNK, std::max<long>(0, std::min(CHUNK, slots - c * CHUNK)), 0, 0, 0};
            bool is_mixed = false;  // whether nodes of other chunks are between them
            if (is_tree) {
                long last = 0, count = 0;
                for (long n = a.nodes - 1; n >= 0; n--)
                    if (position_of(b, n) / CHUNK == c) part.node = n, last = std::max(last, n + 1), count++;
                part.nodes = last - (last ? part.node : 0);
                is_mixed = count < part.nodes;
                part.place = (part.size + LANES - 1) / LANES * LANES;
            }
            const long end = part.nodes ? part.place + part.nodes : part.size;  // of the scores
            float *const result = &partial[task * rows * (dv + 2)];
            if (end == 0) {
                for (long m = 0; m < rows; m++) result[m * (dv + 2) + dv] = -INFINITY, result[m * (dv + 2) + dv + 1] = 0;
                return;
            }
            const T *const row_keys = keys + b * a.cache_stride[0] + h * a.cache_stride[1];
            const T *const row_values = values + b * a.value_stride[0] + h * a.value_stride[1];
            const Rows<Dot<T>> q(query + ((b * a.heads + h * group) * a.nodes + n0) * a.dim, rows, a.dim, nodes,
                                 a.nodes * a.dim);
            const auto multiply = [&](long slot, long size, float *to) {
                for (long n = 0; n < size; n += CHUNK) {
                    const T *const k = row_keys + (slot + n) * a.dim;
                    const long some = std::min(CHUNK, size - n);
#if LANES > 4
                    if (rows >= SEVERAL_ROWS && some >= LANES && a.dim % Dot<T>::parts == 0) {
                        score(k, a.dim, some, q, (uint32_t *)output, to + n, space);
                        continue;
                    }
#endif
                    for (long m = 0, each = group_size(rows); m < rows; m += each)
                        multiply_rows<Dot<T>>({}, k, a.dim, some, q.data + m * q.stride, q.stride, std::min(each, rows - m),
                                              to + m * space + n, space, false, {});
                }
            };
            multiply(part.from, part.size, scores);
            if (part.nodes) multiply(a.begin + part.node, part.nodes, scores + part.place);
            for (long m = 0; m < rows; m++) {
                float *p = &scores[m * space], most_score = -INFINITY, sum = 0;
                const long node = n0 + m % nodes;
                for (long n = part.size; n < part.place; n++) p[n] = -INFINITY;
                for (long n = end; n % LANES; n++) p[n] = -INFINITY;
                if (mask) {
                    const uint8_t *seen = mask + b * a.mask_stride[0] + node * a.mask_stride[1];
                    hide(p, seen + part.from, part.size);
                    if (part.nodes) hide(p + part.place, seen + a.begin + part.node, part.nodes);
                }
                for (long n = 0; n < part.nodes && is_mixed; n++)
                    if (position_of(b, part.node + n) / CHUNK != c) p[part.place + n] = -INFINITY;
                if (a.form == CHAIN)
                    for (long n = std::max<long>(0, position_of(b, node) + 1 - c * CHUNK); n < part.size; n++) p[n] = -INFINITY;
                Floats top = Floats{} - INFINITY, total = {};
                for (long n = 0; n < end; n += LANES) {
                    const Floats z = floats(p + n) * a.scale;
                    store(p + n, z);
                    top = z > top ? z : top;
                }
                for (int lane = 0; lane < LANES; lane++) most_score = std::max(most_score, top[lane]);
                const float shift = most_score == -INFINITY ? 0 : most_score;
                for (long n = 0; n < end; n += LANES) {
                    const Floats z = floats(p + n), e = exponential<Floats, SignedWords>(z - shift);
                    store(p + n, z == -INFINITY ? Floats{} : e);
                    if (!part.nodes || n < part.place) total += floats(p + n);
                }
                float lanes[LANES];
                store(lanes, total);
                for (long n = 0; n < part.nodes; n++)
                    if (const float one = p[part.place + n]) lanes[position_of(b, part.node + n) % LANES] += one;
                for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
                result[m * (dv + 2) + dv] = most_score;
                result[m * (dv + 2) + dv + 1] = sum;
            }
            const T *const v = row_values + part.from * dv, *const drafted = row_values + (a.begin + part.node) * dv;
            for (long m = 0; m < rows; m += 4) {
                const long some = std::min<long>(4, rows - m);
                const float *p[4];
                for (long i = 0; i < 4; i++) p[i] = &scores[(m + std::min(i, some - 1)) * space];
                long d = 0;
                constexpr int step = Dot<T>::step, many = WIDE * LANES / step;
                for (; d + many * step <= dv; d += many * step)
                    weigh<many>(p, v + d, drafted + d, part, dv, &result[m * (dv + 2) + d], some);
                for (; d + step <= dv; d += step)
                    weigh<1>(p, v + d, drafted + d, part, dv, &result[m * (dv + 2) + d], some);
                for (; d < dv; d++)
                    for (long i = 0; i < some; i++) {
                        float sum = 0;
                        for (long n = 0; n < part.size; n++) sum = std::fma(p[i][n], widen(v[n * dv + d]), sum);
                        for (long n = 0; n < part.nodes; n++)
                            sum = std::fma(p[i][part.place + n], widen(drafted[n * dv + d]), sum);
                        result[(m + i) * (dv + 2) + d] = sum;
                    }
            }
        });
#pragma omp for
        for (long index = 0; index < here * rows; index++) {
            const long m = index % rows, pair = first_pair + index / rows;
            const float *part = &partial[(index / rows * chunks * rows + m) * (dv + 2)];
            float most_score = -INFINITY, sum = 0;
            for (long c = 0; c < chunks; c++) most_score = std::max(most_score, part[c * rows * (dv + 2) + dv]);
            std::fill(output, output + dv, 0.0f);
            for (long c = 0; c < chunks; c++, part += rows * (dv + 2)) {
                if (part[dv + 1] == 0) continue;  // it sees nothing; NaN is kept
                const float weight = std::exp(part[dv] - most_score);
                sum = std::fma(weight, part[dv + 1], sum);
                for (long d = 0; d < dv; d++) output[d] += weight * part[d];
            }
            const long b = pair / a.shared, head = pair % a.shared * group + m / nodes;
            T *to = y + ((b * a.nodes + n0 + m % nodes) * a.heads + head) * dv;
            const float factor = sum == 0 ? 0.0f : 1 / sum;
            long d = 0;
            for (; d + Dot<T>::step <= dv; d += Dot<T>::step) Dot<T>::unpack(&output[d], factor, to + d);
            for (; d < dv; d++) store(to + d, output[d] * factor);
        }
    }
    guard.check();
}

// The same for queries, keys and values side by side in rows `joined` [B, N, (heads + 2 shared) dim], before rotary
// embedding; values have the size of keys.
template <class T>
static void attend_joined(Attention a, const T *joined, const T *cos, const T *sin, long cos_stride, T *keys, T *values,
                          const uint8_t *mask, const int64_t *order, T *y, long threads) {
    const long width = (a.heads + 2 * a.shared) * a.dim, queries = a.batch * a.heads * a.nodes * a.dim;
    const std::unique_ptr<T[]> rotated(new T[2 * queries]);
    const long strides[3] = {a.nodes * width, a.dim, width};
    const long heads[4] = {a.batch, a.heads, a.nodes, a.dim}, shared[4] = {a.batch, a.shared, a.nodes, a.dim};
    T *const query = rotated.get(), *const key = query + queries;
    rotate(joined, heads, strides, cos, sin, cos_stride, query);
    rotate(joined + a.heads * a.dim, shared, strides, cos, sin, cos_stride, key);
    for (int i = 0; i < 3; i++) a.new_value_stride[i] = strides[i];
    a.new_stride[0] = a.shared * a.nodes * a.dim;
    a.new_stride[1] = a.nodes * a.dim;
    a.new_stride[2] = a.dim;
    attend(a, query, key, joined + (a.heads + a.shared) * a.dim, keys, values, mask, order, y, threads);
}
