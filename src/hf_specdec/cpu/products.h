// Products of few rows with a large matrix.
//
// A product y = x W^T multiplies few rows x by a large matrix W [N, K], so its time is that of reading W. W is read
// once, where the model keeps it (row by row), in tiles of R rows; each tile is multiplied with up to 6 rows of x:
//
//              K, in steps of one vector                      x rows: M <= 6 at once, the next 6 read the tile of W
//          +---------------------------------+                again, from the L1 cache
//   thread |  R = 4 or 8 rows: one tile      | x  M rows      R x M accumulators stay in registers over all of K;
//     1    +---------------------------------+    of K        their lanes are summed at the end
//          |  next tile: prefetched into L2  |
//          +---------------------------------+
//   thread |  ...                            |
//
// The prefetch matters most: without it, hardware prefetchers lose their place at every end of a row. Sums are in
// float32. Weights in bfloat16 are either widened, with exact products, or multiplied in pairs, whichever is faster.

#pragma once

#include "vectors.h"

// Rows of x as products read them, padded with zeros to whole steps; they are not copied if they fit as they are. At most
// one per thread exists at a time.
template <class D> struct Rows {
    typedef typename D::W W;
    typedef typename D::X X;
    const X *data;
    long rows, stride;

    Rows(const W *x, long rows, long k) : rows(rows) {
        static thread_local std::vector<X> copy;
        stride = (k + D::step - 1) / D::step * D::step;
        data = (const X *)x;
        if (sizeof(X) == sizeof(W) && stride == k) return;
        if (copy.size() < size_t(rows * stride)) copy.resize(rows * stride);
        data = copy.data();
        for (long row = 0; row < rows; row++, x += k) {
            X *const to = &copy[row * stride];
            long i = 0;
            for (; i + D::step <= k; i += D::step) D::pack(x + i, to + i);
            if (i == k) continue;
            W rest[D::step] = {};
            memcpy(rest, x + i, (k - i) * sizeof(W));
            D::pack(rest, to + i);
        }
    }
};

// Add the products of one step of R rows of w, `apart` numbers apart, with M rows of x.
template <class D, int R, int M>
static inline void add_step(Floats sum[M][(R + 3) / 4 * 4], const typename D::W *w, long apart, const typename D::X *x,
                            long stride) {
    for (int half = 0; half < D::parts; half++) {
        typename D::Part part[R];
        for (int r = 0; r < R; r++) part[r] = D::load(w + r * apart, half);
        for (int m = 0; m < M; m++) {
            auto row = D::load_x(x + m * stride + half * LANES);
            for (int r = 0; r < R; r++) D::add(sum[m][r], part[r], row);
        }
    }
}

// One tile: R rows of w times M rows of x; result[m][r / 4] holds four products.
template <class D, int R, int M>
static inline void tile(const typename D::W *w, long k, const typename D::X *x, long stride,
                        Four result[M][(R + 3) / 4]) {
    Floats sum[M][(R + 3) / 4 * 4] = {};
    long i = 0;
    for (; i + D::step <= k; i += D::step) {
        for (int r = 0; r < R; r++) __builtin_prefetch(w + (r + R) * k + i, 0, 2);  // into L2
        add_step<D, R, M>(sum, w + i, k, x + i, stride);
    }
    if (i < k) {
        typename D::W rest[R][D::step] = {};
        for (int r = 0; r < R; r++) memcpy(rest[r], w + r * k + i, (k - i) * sizeof(typename D::W));
        add_step<D, R, M>(sum, rest[0], D::step, x + i, stride);
    }
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r += 4) result[m][r / 4] = sums(sum[m][r], sum[m][r + 1], sum[m][r + 2], sum[m][r + 3]);
}

// Call use(m, n, four products, how many of them count) for rows n .. n + R of w and all rows of x.
template <class D, int R, int M, class Use>
static inline void tiles(const typename D::W *w, long k, long n, const Rows<D> &x, long m, const Use &use) {
    Four result[M][(R + 3) / 4];
    tile<D, R, M>(w + n * k, k, x.data + m * x.stride, x.stride, result);
    for (int i = 0; i < M; i++)
        for (int r = 0; r < R; r += 4) use(m + i, n + r, result[i][r / 4], std::min(R, 4));
}
template <class D, int R, class Use>
static inline void all_rows(const typename D::W *w, long k, long n, const Rows<D> &x, const Use &use) {
    long blocks = (x.rows + 5) / 6, size = (x.rows + blocks - 1) / blocks;
    for (long m = 0; m < x.rows; m += size) switch (std::min(size, x.rows - m)) {
            case 1: tiles<D, R, 1>(w, k, n, x, m, use); break;
            case 2: tiles<D, R, 2>(w, k, n, x, m, use); break;
            case 3: tiles<D, R, 3>(w, k, n, x, m, use); break;
            case 4: tiles<D, R, 4>(w, k, n, x, m, use); break;
            case 5: tiles<D, R, 5>(w, k, n, x, m, use); break;
            default: tiles<D, R, 6>(w, k, n, x, m, use);
        }
}
// The same for rows `from` to `to` of w.
template <class D, class Use>
static inline void span(const typename D::W *w, long k, long from, long to, const Rows<D> &x, const Use &use) {
    if (x.rows <= 2)
        for (; from + 8 <= to; from += 8)
            x.rows == 1 ? tiles<D, 8, 1>(w, k, from, x, 0, use) : tiles<D, 8, 2>(w, k, from, x, 0, use);
    for (; from + 4 <= to; from += 4) all_rows<D, 4>(w, k, from, x, use);
    for (; from < to; from++) all_rows<D, 1>(w, k, from, x, use);
}

template <class T> static inline void store_some(T *to, Four values, int count) {
    if (count == 4) store(to, values);
    else store(to, float(values[0]));
}

// z * sigmoid(u): SiLU with u = z (activation 1), or GELU in its tanh form (activation 2).
static inline Four activated(Four z, int activation) {
    Four u = activation == 1 ? z : 1.5957691216f * (z + 0.044715f * z * z * z);
    return z / (1.0f + exponential<Four, FourWords>(u * -1.0f));
}

// One thread's share of y [rows, N] for several weights [sizes[i], k] side by side, plus a residual [rows, N] if given; or,
// with an activation, of the product of the first weight, activated, times that of the second.
template <class D, class T>
static void multiply_share(const T *x, long rows, long k, const T *const *weights, const T *const *biases,
                           const long *sizes, long count, long activation, const T *residual, T *y) {
    const Rows<D> input(x, rows, k);
    long total = 0;
    for (long i = 0; i < (activation ? 1 : count); i++) total += sizes[i];
    const long blocks = (total + 7) / 8, thread = omp_get_thread_num(), all = omp_get_num_threads();
    const long first = blocks * thread / all * 8, last = std::min(blocks * (thread + 1) / all * 8, total);
    if (activation) {
        static thread_local std::vector<float> gates;
        if (gates.size() < size_t(rows * 4)) gates.resize(rows * 4);
        float *const gate = gates.data();
        for (long n = first; n < last; n += 4) {
            const long end = std::min(n + 4, last);
            span(weights[0], k, n, end, input, [&](long m, long j, Four z, int some) {
                if (biases[0]) z += some == 4 ? four(biases[0] + j) : Four{widen(biases[0][j])};
                store_some(gate + m * 4 + j - n, activated(z, activation), some);
            });
            span(weights[1], k, n, end, input, [&](long m, long j, Four z, int some) {
                if (biases[1]) z += some == 4 ? four(biases[1] + j) : Four{widen(biases[1][j])};
                z *= some == 4 ? four(gate + m * 4 + j - n) : Four{gate[m * 4 + j - n]};
                store_some(y + m * total + j, z, some);
            });
        }
        return;
    }
    long base = 0;
    for (long i = 0; i < count; base += sizes[i++]) {
        const T *bias = biases[i];
        span(weights[i], k, std::max(first - base, 0L), std::min(last - base, sizes[i]), input,
             [&](long m, long j, Four z, int some) {
                 const long place = m * total + base + j;
                 if (bias) z += some == 4 ? four(bias + j) : Four{widen(bias[j])};
                 if (residual) z += some == 4 ? four(residual + place) : Four{widen(residual[place])};
                 store_some(y + place, z, some);
             });
    }
}

// Whether products of bfloat16 use `Pairs`. On an Intel Xeon (Emerald Rapids, measured), an instruction for pairs takes
// as long as four multiplications of floats, and does the work of two.
static bool use_pairs = false;

static inline void share(const float *x, long rows, long k, const float *const *weights, const float *const *biases,
                         const long *sizes, long count, long activation, const float *residual, float *y) {
    multiply_share<Dot<float>>(x, rows, k, weights, biases, sizes, count, activation, residual, y);
}
static inline void share(const bf16 *x, long rows, long k, const bf16 *const *weights, const bf16 *const *biases,
                         const long *sizes, long count, long activation, const bf16 *residual, bf16 *y) {
#if defined(HAS_PAIRS)
    if (use_pairs) return multiply_share<Pairs>(x, rows, k, weights, biases, sizes, count, activation, residual, y);
#endif
    multiply_share<Dot<bf16>>(x, rows, k, weights, biases, sizes, count, activation, residual, y);
}

template <class T>
static void multiply(const T *x, long rows, long k, const T *const *weights, const T *const *biases, const long *sizes,
                     long count, long activation, const T *residual, T *y, long threads) {
    Guard guard;
#pragma omp parallel num_threads(threads)
    guard([&] { share(x, rows, k, weights, biases, sizes, count, activation, residual, y); });
    guard.check();
}

// The shortest time of a product of bfloat16 from the processor's cache, with or without `Pairs`.
static double product_seconds(bool pairs) {
    const long rows = 4, k = 512, n = 256;
    const std::vector<bf16> x(rows * k, 0x3f80), w(n * k, 0x3f80);
    std::vector<bf16> y(rows * n);
    const bf16 *const weight = w.data(), *const bias = nullptr;
    double best = INFINITY;
    const bool before = use_pairs;
    use_pairs = pairs;
    for (int turn = 0; turn < 30; turn++) {
        const double begin = omp_get_wtime();
        multiply<bf16>(x.data(), rows, k, &weight, &bias, &n, 1, 0, nullptr, y.data(), 1);
        best = std::min(best, omp_get_wtime() - begin);
    }
    use_pairs = before;
    return best;
}
