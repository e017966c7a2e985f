// Products of rows with a large matrix, for any number of rows, always with the same bits.
//
// A product y = x W^T multiplies rows x by a large matrix W [N, K], which is read where the model keeps it (row by row).
// A tile multiplies R rows of W with M rows of x; its R x M vectors of sums stay in registers:
//
//                 K, in steps of one vector
//          +---------------------------------+
//   thread |  panel: rows of W that fit L2,  |    all rows of x pass a panel, in groups of M that fit L1, while the next
//     1    |  read in tiles of R rows        |    panel is prefetched
//          +---------------------------------+
//   thread |  ...                            |
//
// Few rows take as long as reading W: then a tile's rows are an R-th of the thread's share apart, so that R streams are
// read, each of which is sequential.
//
// Every product is one chain of sums per lane over all of K, whose lanes are summed at the end. So its bits depend neither
// on the tile nor on the number of rows, nor on the number of threads. Sums are in float32. Weights in bfloat16 are either
// widened, with exact products, or multiplied in pairs, whichever is faster.

#pragma once

#include "packed.h"

// What a row is multiplied with that was rounded to integers, and the sum of these.
struct Factor {
    float value;
    int32_t sum;
};
// Round a row to integers between -128 and 127, as torchao does (`Int8Tensor.from_hp`, symmetric).
template <class T, class X> static Factor rounded_row(const T *from, long k, X *to) {
    float most = 0;
    for (long i = 0; i < k; i++) most = std::max(most, std::abs(widen(from[i])));
    T scale;
    store(&scale, most / 127.5f);
    Factor factor = {std::max(widen(scale), 1.1920929e-7f), 0};
    const float inverse = 1.0f / factor.value;
    for (long i = 0; i < k; i++) {
        const float whole = std::nearbyint(widen(from[i]) * inverse);
        to[i] = X(std::min(127.0f, std::max(-128.0f, whole)));
        factor.sum += to[i];
    }
    return factor;
}
// Round a row to integers between -128 and 127 around its own zero point, and back, computing in T as torchao does
// (`_apply_int8_act_asym_per_token_quant_dequant`). NaN stays NaN.
template <class T> static void round_about(const T *from, long k, float *to) {
    const auto in = [](float value) {
        T one;
        store(&one, value);
        return widen(one);
    };
    const auto limited = [](float whole) { return std::min(std::max(whole, -128.0f), 127.0f); };
    float least = 0, most = 0;
    for (long i = 0; i < k; i++) least = std::min(least, widen(from[i])), most = std::max(most, widen(from[i]));
    const float scale = std::max(in(in(most - least) / 255), 1.17549435e-38f), inverse = in(1 / scale);
    const float zero = limited(-128 - std::nearbyint(in(least / scale)));
    for (long i = 0; i < k; i++)
        to[i] = in((limited(in(std::nearbyint(in(widen(from[i]) * inverse)) + zero)) - zero) * scale);
}

// Rows of x as products read them, padded with zeros to whole steps; they are not copied if they fit as they are. At most
// one per thread exists at a time. Row i is at `x + i / run * apart + i % run * k`.
template <class D> struct Rows {
    typedef typename D::T T;
    typedef typename D::X X;
    const X *data;
    const Factor *factors = nullptr;
    long rows, stride;

    Rows(const T *x, long rows, long k, bool rounds) : Rows(x, rows, k, rows, 0, rounds) {}
    Rows(const T *x, long rows, long k, long run, long apart, [[maybe_unused]] bool rounds = false) : rows(rows) {
        static thread_local std::vector<X> copy;
        static thread_local std::vector<Factor> made;
        stride = (k + D::step - 1) / D::step * D::step;
        data = (const X *)x;
        if (std::is_same_v<X, T> && stride == k && run == rows && !rounds) return;
        if (copy.size() < size_t(rows * stride)) copy.resize(rows * stride);
        data = copy.data();
        if constexpr (D::has_factors) made.resize(rows), factors = made.data();
        for (long row = 0; row < rows; row++) {
            const T *const from = x + row / run * apart + row % run * k;
            X *const to = &copy[row * stride];
            if constexpr (D::has_factors) {
                made[row] = rounded_row(from, k, to);
                std::fill(to + k, to + stride, X(0));
            } else {
                if constexpr (D::has_groups)
                    if (rounds) {
                        round_about(from, k, to);
                        continue;
                    }
                long i = 0;
                for (; i + D::step <= k; i += D::step) D::pack(from + i, to + i);
                if (i == k) continue;
                T rest[D::step] = {};
                memcpy(rest, from + i, (k - i) * sizeof(T));
                D::pack(rest, to + i);
            }
        }
    }
};

#if LANES == 8  // of 16 registers, 12 hold sums
constexpr int HEIGHTS[] = {8, 6, 4, 3};
#else  // of 32 registers, up to 24
constexpr int HEIGHTS[] = {8, 8, 8, 6, 4, 4, 3, 3};
#endif
constexpr int MOST = sizeof(HEIGHTS) / sizeof(int);  // rows of x in a tile; HEIGHTS[M - 1] rows of W are in one of M
constexpr long PANEL = 48, PANEL_BYTES = 256 << 10;  // most rows of W in a panel, divisible by all heights, and most bytes
constexpr long SMALL_PANEL = LANES == 8 ? 12 : 24;   // rows of W in a panel that one group of rows of x passes
constexpr long BLOCK = 1024;                         // numbers of a row that a group multiplies before the next ones
constexpr long FEW_ROWS = LANES == 8 ? 3 : 4;        // most rows for which W is read in streams,
constexpr long STREAM_X = 24 << 10;                  // and most bytes of them
constexpr long MANY_ROWS = 256;                      // rows of x that are packed at a time
constexpr long AHEAD = 1024;                         // bytes of a stream that are prefetched

// What is prefetched meanwhile, a line after the other.
struct Ahead {
    const char *from;
    long lines;
};

// Add the products of one step of R rows of w, `apart` numbers apart, with M rows of x.
template <class D, int R, int M>
static inline __attribute__((always_inline)) void
add_step(D d, Floats (&sum)[R][M], const typename D::W *w, long apart, const typename D::X *x, long stride) {
#pragma GCC unroll 2
    for (int half = 0; half < D::parts; half++) {
        if (M >= R) {
            typename D::Part part[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) part[r] = d.load(w + r * apart, half);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                typename D::Part row = D::load_x(x + m * stride + half * LANES);
                KEEP(row);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) D::add(sum[r][m], part[r], row);
            }
        } else {
            typename D::Part row[M];
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                row[m] = D::load_x(x + m * stride + half * LANES);
                KEEP(row[m]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                typename D::Part part = d.load(w + r * apart, half);
                KEEP(part);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) D::add(sum[r][m], part, row[m]);
            }
        }
    }
}
// One tile, for the numbers `from` to `to` of K. Sums of the numbers before are in `sums_before` unless `from` is 0, and are
// left there unless `is_last`; then out[m * space + r * step] is set.
template <class D, int R, int M, bool STREAMS>
static __attribute__((noinline)) void tile(D d, const typename D::W *w, long apart, long from, long to, bool is_last,
                                           const typename D::X *x, long stride, float *sums_before, float *out, long space,
                                           long step, Ahead ahead) {
    typedef typename D::W W;
    Floats sum[R][M];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) sum[r][m] = from ? floats(sums_before + (r * M + m) * LANES) : Floats{};
    constexpr long lines = (R * D::step * long(sizeof(W)) + 63) / 64;  // of a step, and as many are prefetched
    const long end = to - (to - from) % D::step;
    long i = from;
    if (STREAMS && use_prefetch)
        for (; i + 64 / long(sizeof(W)) <= end;) {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) __builtin_prefetch((const char *)d.place(w + r * apart + i) + AHEAD, 0, 3);
#pragma GCC unroll 4
            for (long n = 0; n < 64 / long(sizeof(W)); n += D::step, i += D::step)
                add_step<D, R, M>(d, sum, w + i, apart, x + i, stride);
        }
    if (!STREAMS)
        for (; i < end && ahead.lines > 0; i += D::step, ahead.from += 64 * lines, ahead.lines -= lines) {
#pragma GCC unroll 8
            for (long n = 0; n < lines; n++) __builtin_prefetch(ahead.from + 64 * n, 0, 2);
            add_step<D, R, M>(d, sum, w + i, apart, x + i, stride);
        }
    for (; i < end; i += D::step) add_step<D, R, M>(d, sum, w + i, apart, x + i, stride);
    if (i < to) {
        W rest[R][D::step] = {};
        for (int r = 0; r < R; r++) memcpy(rest[r], w + r * apart + i, (to - i) * sizeof(W));
        add_step<D, R, M>(d, sum, rest[0], D::step, x + i, stride);
    }
    if (!is_last) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) store(sums_before + (r * M + m) * LANES, sum[r][m]);
        return;
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int r = 0; r < R; r += 4) {
            const Four z = D::total(sum[r][m], sum[std::min(r + 1, R - 1)][m], sum[std::min(r + 2, R - 1)][m],
                                    sum[std::min(r + 3, R - 1)][m]);
            if (!STREAMS) store(out + m * space + r, z);  // up to three numbers too many, which the next tile replaces
            else
#pragma GCC unroll 4
                for (int j = 0; j < std::min(4, R - r); j++) out[m * space + (r + j) * step] = z[j];
        }
}

// out[m * space + n], n < size: products of `size` rows of w with M rows of x; up to three numbers after them change.
template <class D, int M>
static void multiply_group(D d, const typename D::W *w, long k, long size, const typename D::X *x, long stride,
                           float *out, long space, bool in_streams, Ahead ahead) {
    constexpr int R = HEIGHTS[M - 1];
    const bool in_blocks = !in_streams && k > BLOCK + BLOCK / 2;
    const long blocks = in_blocks ? (k + BLOCK - 1) / BLOCK : 1, block = in_blocks ? (k / blocks + 63) / 64 * 64 : k;
    static thread_local std::vector<float> kept;
    if (in_blocks && kept.size() < size_t(size * M * LANES)) kept.resize(size * M * LANES);
    float *const before = kept.data();
    const long tiles = size / R, share = ahead.lines / std::max<long>(1, blocks * tiles) + 1;
    for (long from = 0; from < k; from += block) {
        const long to = std::min(from + block, k);
        const bool is_last = to == k;
        for (long t = 0; t < tiles; t++) {
            if (in_streams) {
                tile<D, R, M, true>(d, w + t * k, tiles * k, from, to, is_last, x, stride, before, out + t, space, tiles, {});
                continue;
            }
            const long n = t * R, lines = std::min(share, ahead.lines);
            tile<D, R, M, false>(d, w + n * k, k, from, to, is_last, x, stride, before + n * M * LANES, out + n, space, 1,
                                 {ahead.from, lines});
            ahead.from += 64 * lines, ahead.lines -= lines;
        }
        for (long n = tiles * R; n < size; n++)
            tile<D, 1, M, false>(d, w + n * k, k, from, to, is_last, x, stride, before + n * M * LANES, out + n, space, 1, {});
    }
}
template <class D>
static void multiply_rows(D d, const typename D::W *w, long k, long size, const typename D::X *x, long stride, long rows,
                          float *out, long space, bool in_streams, Ahead ahead) {
    const auto of = [&](auto function) { function(d, w, k, size, x, stride, out, space, in_streams, ahead); };
    switch (rows) {
        case 1: return of(multiply_group<D, 1>);
        case 2: return of(multiply_group<D, 2>);
        case 3: return of(multiply_group<D, 3>);
        case 4: return of(multiply_group<D, 4>);
#if LANES != 8
        case 5: return of(multiply_group<D, 5>);
        case 6: return of(multiply_group<D, 6>);
        case 7: return of(multiply_group<D, 7>);
        case 8: return of(multiply_group<D, 8>);
#endif
    }
}
// Rows of x in a group, if there are `rows` in all: as even as possible.
static inline long group_size(long rows, long most = MOST) {
    const long groups = (rows + most - 1) / most;
    return (rows + groups - 1) / std::max<long>(1, groups);
}

// z * sigmoid(u): SiLU with u = z (activation 1), or GELU in its tanh form (activation 2).
static inline Floats activated(Floats z, int activation) {
    Floats u = activation == 1 ? z : 1.5957691216f * (z + 0.044715f * z * z * z);
    return z / (1.0f + exponential<Floats, SignedWords>(u * -1.0f));
}

// One thread's share of y [rows, N] for several weights [sizes[i], k] side by side, plus a residual [rows, N] if given; or,
// with an activation, of the product of the first weight, activated, times that of the second. N is `total`. Weights of 8
// bits have a scale for each of their rows, those in groups a scale and an offset for each group. Of packed ones, the rows of
// x lie in memory that all threads share.
template <class D, class T = typename D::T>
static void multiply_share(const D &kind, const T *x, long rows, long k, const void *const *given, const float *const *scales,
                           const T *const *biases, const long *sizes, long count, long activation, long total,
                           const T *residual, T *y, [[maybe_unused]] void *memory) {
    typedef typename D::W W;
    const W *const *const weights = (const W *const *)given;
    const long most = D::is_packed ? PACKED_ROWS : MOST, each = group_size(rows, most);
    const long pitch = [k] {  // bytes of a row of weights
        if constexpr (D::is_packed) return D::row_bytes(k);
        else return k * long(sizeof(W));
    }();
    const auto input = [&] {
        if constexpr (D::is_packed) return PackedRows<D>(x, rows, k, each, (typename D::X *)memory);
        else return Rows<D>(x, rows, k, kind.rounds);
    }();
    const long unit = D::is_packed ? LANES : 8, blocks = (total + unit - 1) / unit;
    const long thread = omp_get_thread_num(), all = omp_get_num_threads();
    const long first = blocks * thread / all * unit, last = std::min(blocks * (thread + 1) / all * unit, total);
    const bool in_streams = D::is_packed ? rows <= most
                            : rows == 1 || (rows <= FEW_ROWS && rows * input.stride * long(sizeof(*input.data)) <= STREAM_X);
    const long fitting = std::max<long>(12, std::min(PANEL, PANEL_BYTES / pitch / 12 * 12));
    // a panel that one group of rows passes is read once: no other panel is prefetched meanwhile
    const long several = D::is_packed ? PANEL : rows <= MOST ? SMALL_PANEL : fitting;
    const long height = in_streams ? std::max<long>(1, last - first) : several;
    const long space = (height + LANES - 1) / LANES * LANES + LANES;
    static thread_local std::vector<float> made;
    if (made.size() < size_t(2 * each * space)) made.resize(2 * each * space);
    float *const out = made.data(), *const other = out + each * space;
    long base = 0;
    for (long i = 0; i < (activation ? 1 : count); base += sizes[i++]) {
        const long end = std::min(last - base, sizes[i]);
        for (long n = std::max<long>(first - base, 0); n < end; n += height) {
            const long size = std::min(height, end - n), lines = std::min(height, end - n - size) * pitch / 64;
            for (long m = 0; m < rows; m += each) {
                const long some = std::min(each, rows - m), offset = lines * m / rows, here = lines * (m + some) / rows - offset;
                const auto multiply = [&](long which, float *to) {
                    const W *const w = weights[which];
                    const auto *const x_here = input.data + m * input.stride;
                    if constexpr (D::is_packed) D::multiply(w + n * pitch, k, size, x_here, each, some, to, space);
                    else {
                        D d = kind;
                        if constexpr (D::has_groups) d.first = w, d.groups = scales[which], d.half = sizes[which] / 2 * k;
                        multiply_rows(d, w + n * k, k, size, x_here, input.stride, some, to, space, in_streams,
                                      {(const char *)d.place(w + (n + size) * k) + 64 * offset, here});
                    }
                };
                multiply(i, out);
                if (activation) multiply(1, other);
                for (long row = 0; row < some; row++)
                    for (long j = 0; j < size; j += LANES) {
                        const long place = (m + row) * total + base + n + j, number = std::min(long(LANES), size - j);
                        const auto finished = [&](const float *sum, long which) {
                            Floats one = floats(sum + row * space + j);
                            if constexpr (D::has_factors) {
                                const Factor &factor = input.factors[m + row];
                                const SignedWords whole = (SignedWords)one - D::OFFSET * factor.sum;
                                one = __builtin_convertvector(whole, Floats) * factor.value;
                            }
                            if constexpr (D::has_scales) one *= floats(scales[which] + n + j, number);
                            return one;
                        };
                        Floats z = finished(out, i);
                        if (biases[i]) z += floats(biases[i] + n + j, number);
                        if (activation) {
                            Floats factor = finished(other, 1);
                            if (biases[1]) factor += floats(biases[1] + n + j, number);
                            z = activated(z, activation) * factor;
                        }
                        if (residual) z += floats(residual + place, number);
                        store(y + place, z, number);
                    }
            }
        }
    }
}

// Whether products of bfloat16 use `Pairs`. On an Intel Xeon (Emerald Rapids, measured), an instruction for pairs takes
// as long as four multiplications of floats, and does the work of two.
static bool use_pairs = false;

// How weights are stored, and what they are multiplied with; from `GROUPED` on, see `Grouped`: groups of 2^(form / 4) numbers,
// plus 1 if rows are rounded, plus 2 for 4 bits; from `PACKED` on, see `with_kind`.
enum Weights : long { SAME, INT8, INT8_ROUNDED, GROUPED = 16, PACKED = 128 };

template <class T, class... Given>
static inline void share_rows(Weights form, const T *x, long rows, long k, Given... given) {
    if (form == INT8) return multiply_share(Widened<T>{}, x, rows, k, given...);
    if (form == INT8_ROUNDED) return multiply_share(Integers<T>{}, x, rows, k, given...);
    if (form >= GROUPED && form < PACKED)
        return form & 2 ? multiply_share(Grouped<T, true>(form), x, rows, k, given...)
                        : multiply_share(Grouped<T, false>(form), x, rows, k, given...);
    if (form >= PACKED)
        return with_kind((form - PACKED) / 2, [&](auto kind) {
            typedef decltype(kind) K;
            if ((form - PACKED) % 2) multiply_share(Packed<T, K, RoundedGroup>{}, x, rows, k, given...);
            else multiply_share(Packed<T, K, PlainGroup>{}, x, rows, k, given...);
        });
#if defined(HAS_PAIRS)
    if constexpr (std::is_same_v<T, bf16>)
        if (use_pairs) return multiply_share(Pairs{}, x, rows, k, given...);
#endif
    multiply_share(Dot<T>{}, x, rows, k, given...);
}

// One thread's share, `MANY_ROWS` at a time. All threads must call it, with the calling thread's `memory_for` the form.
template <class T>
static void share(Guard &guard, void *memory, Weights form, const T *x, long rows, long k, const void *const *weights,
                  const float *const *scales, const T *const *biases, const long *sizes, long count, long activation,
                  const T *residual, T *y) {
    const long total = std::accumulate(sizes, sizes + (activation ? 1 : count), long(0));
    for (long m = 0; m < rows; m += MANY_ROWS) {
        if (m && form >= PACKED) {
#pragma omp barrier
        }
        guard([&] {
            share_rows(form, x + m * k, std::min(MANY_ROWS, rows - m), k, weights, scales, biases, sizes, count, activation,
                       total, residual ? residual + m * total : nullptr, y + m * total, memory);
        });
    }
}
static void *memory_for(Weights form, long rows, long k) {
    static thread_local std::vector<uint8_t> made;
    const size_t size = form >= PACKED ? packed_bytes(std::min(rows, MANY_ROWS), k) : 0;
    if (made.size() < size) made.resize(size);
    return made.data();
}

template <class T>
static void multiply(Weights form, const T *x, long rows, long k, const void *const *weights, const float *const *scales,
                     const T *const *biases, const long *sizes, long count, long activation, const T *residual, T *y,
                     long threads) {
    Guard guard;
    void *const memory = memory_for(form, rows, k);
#pragma omp parallel num_threads(threads)
    share(guard, memory, form, x, rows, k, weights, scales, biases, sizes, count, activation, residual, y);
    guard.check();
}

// The shortest time of products of bfloat16, of `rows` rows with weights [n, k], with one thread.
static double product_seconds(long rows, long k, long n, int turns) {
    const std::vector<bf16> x(rows * k, 0x3f80), w(n * k, 0x3f80);
    std::vector<bf16> y(rows * n);
    const void *const weight = w.data();
    const bf16 *const bias = nullptr;
    double best = INFINITY;
    for (int turn = 0; turn < turns; turn++) {
        const double begin = omp_get_wtime();
        multiply<bf16>(SAME, x.data(), rows, k, &weight, nullptr, &bias, &n, 1, 0, nullptr, y.data(), 1);
        best = std::min(best, omp_get_wtime() - begin);
    }
    return best;
}
