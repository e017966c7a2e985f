// Weights in 4 to 8 bits with a scale for each group of numbers, as GGUF files hold them, multiplied as they are.
//
// A file stores each output's numbers after one another. Here LANES outputs lie side by side, once, when a model is loaded
// (`pack`): a vector holds four numbers of each, so a lane sums up one output, and no sums over lanes are left:
//
//   tile of LANES outputs, one block of K after the other:
//     [ scale x LANES ] [ scale of minima x LANES ]          16-bit floats
//     32 numbers: [ scale x LANES ] [ minimum x LANES ]      bytes; only where blocks are longer than 32
//                 [ lower bits: four, or eight, vectors ] [ upper bits ]
//
// Rows of x are either floats, with float sums over a group, whose scale multiplies that sum; or rounded to int8, 32
// numbers with a factor, with integer sums. A lane's sums run over K in one order, whatever the tile and the number of
// rows: bits depend on neither.

#pragma once

#include "vectors.h"

constexpr long GROUP = 32;          // numbers
constexpr long PACKED_AHEAD = 4096;  // bytes that are prefetched
constexpr long PACKED_ROWS = 8;      // rows of x in a tile

typedef int8_t SignedBytes __attribute__((vector_size(LANES), aligned(1), may_alias));

// 16-bit floats. Small ones are not normal numbers, with which ordinary instructions are slow.
static inline Floats halves(const uint8_t *from) {
#if LANES == 16
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#endif
}
// Bytes, signed or not; compilers convert them one by one.
template <bool SIGNED> static inline Floats small(const uint8_t *from) {
#if LANES == 16
    const __m128i some = _mm_loadu_si128((const __m128i *)from);
    return (Floats)_mm512_cvtepi32_ps(SIGNED ? _mm512_cvtepi8_epi32(some) : _mm512_cvtepu8_epi32(some));
#elif LANES == 8
    const __m128i some = _mm_loadl_epi64((const __m128i *)from);
    return (Floats)_mm256_cvtepi32_ps(SIGNED ? _mm256_cvtepi8_epi32(some) : _mm256_cvtepu8_epi32(some));
#else
    Floats some;
    for (int lane = 0; lane < LANES; lane++) some[lane] = SIGNED ? int8_t(from[lane]) : from[lane];
    return some;
#endif
}

// The largest of all lanes, and their sum.
static inline float largest_lane(Floats some) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)some);
#elif LANES == 8
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)some), _mm256_extractf128_ps((__m256)some, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    return vmaxvq_f32((float32x4_t)some);
#endif
}
static inline float lane_sum(Floats some) { return sums(some, some, some, some)[0]; }
static inline int32_t lane_sum(SignedWords some) {
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)some);
#elif LANES == 8
    const __m256i whole = (__m256i)some;
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    const __m128i two = _mm_hadd_epi32(four, four);
    return _mm_cvtsi128_si32(_mm_hadd_epi32(two, two));
#else
    return vaddvq_s32((int32x4_t)some);
#endif
}

// How a kind of GGUF block stores numbers q: a weight is scale * (q - ZERO), less a minimum if it has one.
template <int LOW_, int HIGH_, int SCALED_, int BLOCK_, bool MINIMA_, int ZERO_> struct Format {
    static constexpr int LOW = LOW_, HIGH = HIGH_;    // bits in both planes
    static constexpr int SCALED = SCALED_;            // numbers that share a scale, 16 or 32
    static constexpr int BLOCK = BLOCK_;              // numbers that share a 16-bit scale
    static constexpr bool MINIMA = MINIMA_, SUBSCALED = BLOCK_ > GROUP;
    static constexpr int ZERO = ZERO_;
    static constexpr long HEAD = (MINIMA ? 4 : 2) * LANES;
    static constexpr long SCALES = SUBSCALED ? GROUP / SCALED + MINIMA : 0;  // bytes of a group and output
    static constexpr long GROUP_BYTES = LANES * (SCALES + GROUP * (LOW + HIGH) / 8);
    static constexpr long BLOCK_BYTES = HEAD + BLOCK / GROUP * GROUP_BYTES;
    static constexpr long row_bytes(long k) { return k / BLOCK * (BLOCK_BYTES / LANES); }
};
typedef Format<4, 0, 32, 32, false, 8> Q4_0;
typedef Format<4, 1, 32, 32, false, 16> Q5_0;
typedef Format<8, 0, 32, 32, false, 0> Q8_0;  // signed
typedef Format<4, 0, 32, 256, true, 0> Q4_K;
typedef Format<4, 2, 16, 256, false, 32> Q6_K;

// ------------------------------------------------------------------------------------------------ from and to rows

// A block of one output: 16-bit scales, the bytes of its groups, and its numbers.
struct Unpacked {
    uint16_t scale, of_minima;
    uint8_t scales[16], minima[8], numbers[256];  // a byte of Q6_K's scales and of Q8_0's numbers is signed
};
static inline uint16_t two_bytes(const uint8_t *from) { return uint16_t(from[0] | from[1] << 8); }

// As `ggml-common.h` of llama.cpp lays blocks out.
template <class K> static void read_block(const uint8_t *&from, Unpacked &to) {
    if constexpr (K::SUBSCALED && K::MINIMA) {
        to.scale = two_bytes(from), to.of_minima = two_bytes(from + 2);
        const uint8_t *const packed = from + 4, *const low = from + 16;
        for (int j = 0; j < 4; j++) {
            to.scales[j] = packed[j] & 63, to.minima[j] = packed[j + 4] & 63;
            to.scales[j + 4] = (packed[j + 8] & 15) | (packed[j] >> 6 << 4);
            to.minima[j + 4] = (packed[j + 8] >> 4) | (packed[j + 4] >> 6 << 4);
        }
        for (int i = 0; i < 128; i++) {
            const int at = i / 32 * 64 + i % 32;
            to.numbers[at] = low[i] & 15, to.numbers[at + 32] = low[i] >> 4;
        }
        from += 144;
    } else if constexpr (K::SUBSCALED) {
        const uint8_t *const low = from, *const high = from + 128;
        for (int i = 0; i < 256; i++) {
            const int half = i / 128, part = i % 128 / 32, j = i % 32;
            const int four = low[64 * half + 32 * (part & 1) + j] >> (part / 2 * 4) & 15;
            to.numbers[i] = uint8_t(four | (high[32 * half + j] >> 2 * part & 3) << 4);
        }
        memcpy(to.scales, from + 192, 16);
        to.scale = two_bytes(from + 208);
        from += 210;
    } else {
        to.scale = two_bytes(from);
        from += 2;
        uint32_t fifth = 0;
        if (K::HIGH) memcpy(&fifth, from, 4), from += 4;
        if (K::LOW == 8) memcpy(to.numbers, from, 32);
        else
            for (int i = 0; i < 16; i++) {
                to.numbers[i] = uint8_t((from[i] & 15) | (fifth >> i & 1) << 4);
                to.numbers[i + 16] = uint8_t(from[i] >> 4 | (fifth >> (i + 16) & 1) << 4);
            }
        from += K::LOW * 4;
    }
}
template <class K> static void write_block(const Unpacked &from, uint8_t *block, int lane) {
    const auto set = [lane](uint8_t *to, const uint16_t value) { memcpy(to + 2 * lane, &value, 2); };
    set(block, from.scale);
    if (K::MINIMA) set(block + 2 * LANES, from.of_minima);
    for (int g = 0; g < K::BLOCK / GROUP; g++) {
        uint8_t *to = block + K::HEAD + g * K::GROUP_BYTES;
        if (K::SUBSCALED)
            for (int i = 0; i < GROUP / K::SCALED; i++, to += LANES) to[lane] = from.scales[g * GROUP / K::SCALED + i];
        if (K::SUBSCALED && K::MINIMA) to[lane] = from.minima[g], to += LANES;
        uint8_t *const high = to + LANES * GROUP * K::LOW / 8 + 4 * lane;
        to += 4 * lane;
        for (int i = 0; i < GROUP; i++) {
            const int quad = i / 4, j = i % 4;
            const uint8_t number = from.numbers[g * GROUP + i];
            if (K::LOW == 8) to[quad * 4 * LANES + j] = number;
            else to[quad % 4 * 4 * LANES + j] |= uint8_t((number & 15) << quad / 4 * 4);
            if (K::HIGH == 1) high[j] |= uint8_t(number >> 4 << quad);
            if (K::HIGH == 2) high[quad / 4 * 4 * LANES + j] |= uint8_t(number >> 4 << quad % 4 * 2);
        }
    }
}
// Rows of a file's blocks to tiles, which are zero before.
template <class K> static void pack(const uint8_t *from, long rows, long k, uint8_t *to, long threads) {
    const long blocks = k / K::BLOCK, bytes = K::SUBSCALED ? (K::MINIMA ? 144 : 210) : 2 + K::HIGH * 4 + K::LOW * 4;
#pragma omp parallel for num_threads(threads)
    for (long tile = 0; tile < rows / LANES; tile++)
        for (int lane = 0; lane < LANES; lane++) {
            const uint8_t *read = from + (tile * LANES + lane) * blocks * bytes;
            for (long b = 0; b < blocks; b++) {
                Unpacked block;
                read_block<K>(read, block);
                write_block<K>(block, to + (tile * blocks + b) * K::BLOCK_BYTES, lane);
            }
        }
}

// ------------------------------------------------------------------------------------------------ products

typedef uint8_t Quad __attribute__((vector_size(4 * LANES), aligned(1), may_alias));  // four numbers of each output

// The lower and upper bits of a group in registers as they lie in memory, and four numbers of each output.
template <class K> struct Planes {
    const uint8_t *from;
    Quad at(long vector) const { return *(const Quad *)(from + vector * 4 * LANES); }
    inline __attribute__((always_inline)) Quad quad(int q) const {
        if (K::LOW == 8) return at(q);
        const Words low = (Words)at(q % 4);
        Words number = (q < 4 ? low : low >> 4) & 0x0f0f0f0fu;
        if (K::HIGH == 1) {
            const Words high = (Words)at(4);
            number |= (q < 4 ? high << (4 - q) : high >> (q - 4)) & 0x10101010u;
        }
        if (K::HIGH == 2) {
            const Words high = (Words)at(4 + q / 4);
            const int shift = 4 - q % 4 * 2;
            number |= (shift >= 0 ? high << shift : high >> -shift) & 0x30303030u;
        }
        return (Quad)number;
    }
    // The number `4 * q + j` of each output, as floats.
    inline __attribute__((always_inline)) Floats number(Quad four, int q, int j) const {
        if (K::LOW == 8)
            return __builtin_convertvector((SignedWords)((Words)four << (24 - 8 * j)) >> 24, Floats);
#if LANES == 16
        if (K::HIGH == 0) {  // looks the lower four bits of a word up
            const __m512 whole = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const int shift = 8 * j + q / 4 * 4;
            return (Floats)_mm512_permutexvar_ps((__m512i)(shift ? (Words)at(q % 4) >> shift : (Words)at(q % 4)), whole);
        }
#endif
        return __builtin_convertvector((SignedWords)((Words)four >> 8 * j & 0xffu), Floats);
    }
};

// Sums of products of four numbers of each output with four of a row, as integers. Numbers are stored with `moved` added, so
// sums start with minus that times the sum of x. Without instructions that add four products as 32 bits, each two of them
// are added to one of two sums in 16 bits, which fit at every step for 4 to 6 bits: 16 numbers up to 16, or 8 up to 32, times
// 127 are at most 32,512, added or still in the start. Those of 8 bits are added as 32 bits at once.
struct Products {
    SignedWords sum;
#if defined(__AVX512VNNI__)
    static constexpr bool IN_PAIRS = false;
    static constexpr int UNSIGNED = 128;  // is added to signed weights
    template <int> void add(Quad w, int32_t x) {
        sum = (SignedWords)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
    }
    template <int> SignedWords total() const { return sum; }
#elif LANES == 4
    static constexpr bool IN_PAIRS = false;
    static constexpr int UNSIGNED = 0;
    template <int> void add(Quad w, int32_t x) {
        const int8x16_t four = (int8x16_t)w, row = vreinterpretq_s8_s32(vdupq_n_s32(x));
        const int16x8_t low = vmull_s8(vget_low_s8(four), vget_low_s8(row)), high = vmull_high_s8(four, row);
        sum = (SignedWords)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
    }
    template <int> SignedWords total() const { return sum; }
#else
    static constexpr bool IN_PAIRS = true;
    static constexpr int UNSIGNED = 0;
#if LANES == 16
    static SignedWords whole(__m512i pairs) { return (SignedWords)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
    template <int BITS> void add(Quad w, int32_t x) {
        const __m512i row = _mm512_set1_epi32(x), four = (__m512i)w;
        if (BITS < 8) sum = (SignedWords)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16(four, row));
        else {  // the left operand is unsigned: its sign goes to the right one
            const __m512i turned = _mm512_mask_sub_epi8(row, _mm512_movepi8_mask(four), _mm512_setzero_si512(), row);
            sum += whole(_mm512_maddubs_epi16(_mm512_abs_epi8(four), turned));
        }
    }
    template <int BITS> SignedWords total() const { return BITS < 8 ? whole((__m512i)sum) : sum; }
#else
    static SignedWords whole(__m256i pairs) { return (SignedWords)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
    template <int BITS> void add(Quad w, int32_t x) {
        const __m256i row = _mm256_set1_epi32(x), four = (__m256i)w;
        if (BITS < 8) sum = (SignedWords)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(four, row));
        else sum += whole(_mm256_maddubs_epi16(_mm256_abs_epi8(four), _mm256_sign_epi8(row, four)));
    }
    template <int BITS> SignedWords total() const { return BITS < 8 ? whole((__m256i)sum) : sum; }
#endif
#endif
    template <class K> static constexpr int moved() { return K::LOW == 8 ? UNSIGNED : K::ZERO; }
    template <class K> static int32_t start(int32_t of_first, int32_t of_last) {  // sums of x: two of each four, and the others
        of_first *= -moved<K>(), of_last *= -moved<K>();
        return IN_PAIRS ? int32_t(uint32_t(of_last) << 16 | uint16_t(of_first)) : of_first + of_last;
    }
};

// 32 numbers of a row of x: as they are, or rounded to integers, with a factor.
struct PlainGroup {
    float numbers[GROUP], halves[2], whole;  // and the sums of both halves and of all
    template <class K, class T> void fill(const T *from) {
        for (int half = 0; half < 2; half++) {
            Floats sum = {};
            for (long i = half * 16; i < half * 16 + 16; i += LANES) {
                const Floats some = floats(from + i);
                store(numbers + i, some);
                sum += some;
            }
            halves[half] = lane_sum(sum);
        }
        whole = halves[0] + halves[1];
    }
};
struct RoundedGroup {
    float factor, whole;  // the sum of the integers, times the factor
    int32_t start[2];     // of the sums of each part's products, because weights are moved
    int8_t numbers[GROUP];
    template <class K, class T> void fill(const T *from) {
        Floats most = {};
        for (long i = 0; i < GROUP; i += LANES) {
            const Floats some = floats(from + i), size = some < 0 ? -some : some;
            most = size <= most ? most : size == size ? size : Floats{} + INFINITY;
        }
        const float largest = largest_lane(most);
        if (!(largest > 1e-30f && largest < INFINITY)) {  // all are about 0, or some are not finite
            *this = {};
            if (!(largest <= 1e-30f)) factor = NAN;
            return;
        }
        const float inverse = 127 / largest;
        factor = largest / 127;
        SignedWords two = {};  // of each four numbers the first two
        for (int lane = 0; lane < LANES; lane++) two[lane] = lane % 4 < 2 ? -1 : 0;
        int32_t all = 0;
        for (int part = 0; part < GROUP / K::SCALED; part++) {
            SignedWords added = {};
            for (long i = part * K::SCALED; i < (part + 1) * K::SCALED; i += LANES) {
                const Floats shifted = floats(from + i) * inverse + 12582912.0f;  // rounds to whole numbers, ties to even
                const SignedWords integers = (SignedWords)shifted - 0x4b400000;
                *(SignedBytes *)(numbers + i) = __builtin_convertvector(integers, SignedBytes);
                added += integers;
            }
            if (Products::moved<K>()) start[part] = Products::start<K>(lane_sum(added & two), lane_sum(added & ~two));
            if (K::MINIMA) all += lane_sum(added);
        }
        whole = factor * all;
    }
    int32_t four(int quad) const {
        int32_t result;
        memcpy(&result, numbers + 4 * quad, 4);
        return result;
    }
};

// The groups of rows of x: the same group of `each` rows side by side. All threads of a team make them together, in memory
// for which `packed_bytes` suffice.
template <class D> struct PackedRows {
    typedef typename D::X X;
    const X *data;
    long stride;

    PackedRows(const typename D::T *x, long rows, long k, long each, X *made) : data(made), stride(k / GROUP) {
        const long thread = omp_get_thread_num(), all = omp_get_num_threads();
        for (long g = stride * thread / all; g < stride * (thread + 1) / all; g++)
            for (long m = 0; m < rows; m++)
                made[(m / each * stride + g) * each + m % each].template fill<typename D::Kind>(x + m * k + g * GROUP);
#pragma omp barrier
    }
};
static inline size_t packed_bytes(long rows, long k) {  // tiles read some rows too many
    return ((rows + PACKED_ROWS) * (k / GROUP) + PACKED_ROWS) * std::max(sizeof(PlainGroup), sizeof(RoundedGroup));
}

// The sums of a group's numbers `part`, times those of M rows.
template <class K, int M>
static inline __attribute__((always_inline)) void
multiply_part(Floats (&sum)[M], const Planes<K> &planes, int part, const PlainGroup *x) {
    constexpr int count = K::SCALED / 4, turns = LANES == 8 && M > 4 ? 2 : 1;  // of 16 registers, 8 hold sums
    Floats even[M] = {}, odd[M] = {};
#pragma GCC unroll 2
    for (int turn = 0; turn < turns; turn++)
#pragma GCC unroll 8
        for (int q = part * count; q < part * count + count; q++) {
            const Quad four = planes.quad(q);
#pragma GCC unroll 4
            for (int j = turn; j < 4; j += turns) {
                Floats w = planes.number(four, q, j);
                KEEP(w);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    Floats &some = j % 2 ? odd[m] : even[m];
                    some = fused(w, x[m].numbers[4 * q + j], some);
                }
            }
        }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) sum[m] = even[m] + odd[m];
}
template <class K, int M>
static inline __attribute__((always_inline)) void
multiply_part(Floats (&sum)[M], const Planes<K> &planes, int part, const RoundedGroup *x) {
    constexpr int count = K::SCALED / 4, bits = K::LOW + K::HIGH;
    Products products[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) products[m].sum = SignedWords{} + (Products::moved<K>() ? x[m].start[part] : 0);
#pragma GCC unroll 4
    for (int first = part * count; first < part * count + count; first += 2) {
        Quad two[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            two[i] = planes.quad(first + i);
            if (K::LOW == 8 && Products::UNSIGNED) two[i] = (Quad)((Words)two[i] ^ 0x80808080u);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int q = first; q < first + 2; q++) {
                products[m].template add<bits>(two[q - first], x[m].four(q));
                if (LANES == 8 && M > 1) KEEP(products[m].sum);  // else all are multiplied first: too few registers
            }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) sum[m] = __builtin_convertvector(products[m].template total<bits>(), Floats);
}

// Add a group's products with M rows to their sums; the scales are those of the block. All numbers of a group are moved by
// ZERO, or have a minimum, with which the sum of x is multiplied.
template <class K, int M, class X>
static inline __attribute__((always_inline)) void
add_group(Floats (&sum)[M], const uint8_t *group, Floats scale, Floats of_minima, const X *x) {
    constexpr bool is_rounded = std::is_same_v<X, RoundedGroup>;
    Floats all[M];
#pragma GCC unroll 2
    for (int part = 0; part < GROUP / K::SCALED; part++) {
        Floats some[M];
        multiply_part<K, M>(some, Planes<K>{group + LANES * K::SCALES}, part, x);
        const Floats of_part = K::SUBSCALED ? scale * small<!K::MINIMA>(group + part * LANES) : scale;
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            if (is_rounded) all[m] = part ? fused(of_part, some[m], all[m]) : of_part * some[m];
            else sum[m] = fused(of_part, some[m], sum[m]);
            if constexpr (!is_rounded && K::ZERO)
                sum[m] = fused(of_part * -float(K::ZERO), K::SCALED == 16 ? x[m].halves[part] : x[m].whole, sum[m]);
        }
    }
    const Floats minimum = K::MINIMA ? of_minima * small<false>(group + LANES) * -1.0f : Floats{};
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        if constexpr (is_rounded) sum[m] = fused(all[m], x[m].factor, sum[m]);
        if (K::MINIMA) sum[m] = fused(minimum, x[m].whole, sum[m]);
    }
}

// out[m * space + n], n < size: products of `size` outputs, whole tiles, with up to M rows of x, of which `apart` lie side by
// side.
template <class K, class X, int M>
static __attribute__((noinline)) void multiply_tiles(const uint8_t *w, long k, long size, const X *x, long apart, long rows,
                                                     float *out, long space) {
    for (long n = 0; n < size; n += LANES) {
        Floats sum[M] = {};
        const X *group = x;
        for (long b = 0; b < k / K::BLOCK; b++, w += K::BLOCK_BYTES) {
            const Floats scale = halves(w), of_minima = K::MINIMA ? halves(w + 2 * LANES) : Floats{};
            for (int g = 0; g < K::BLOCK / GROUP; g++, group += apart) {
                const uint8_t *const numbers = w + K::HEAD + g * K::GROUP_BYTES;
#pragma GCC unroll 10
                for (long line = 0; line < (K::GROUP_BYTES + 63) / 64; line++)
                    __builtin_prefetch(numbers + PACKED_AHEAD + 64 * line, 0, 3);
                add_group<K, M>(sum, numbers, scale, of_minima, group);
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
            if (m < rows) store(out + m * space + n, sum[m]);
    }
}

// Weights of a kind, for `multiply_share`.
template <class Number, class K, class Group> struct Packed : Reading {
    typedef Number T;
    typedef uint8_t W;
    typedef Group X;
    typedef K Kind;
    static constexpr bool is_packed = true;
    static constexpr long row_bytes(long k) { return K::row_bytes(k); }
    static void multiply(const uint8_t *w, long k, long size, const X *x, long apart, long rows, float *out, long space) {
        const auto of = [&](auto function) { function(w, k, size, x, apart, rows, out, space); };
        switch (rows) {
            case 1: return of(multiply_tiles<K, X, 1>);
            case 2: return of(multiply_tiles<K, X, 2>);
            case 3: return of(multiply_tiles<K, X, 3>);
            case 4: return of(multiply_tiles<K, X, 4>);
            case 5:
            case 6: return of(multiply_tiles<K, X, 6>);
            default: return of(multiply_tiles<K, X, 8>);
        }
    }
};

// ------------------------------------------------------------------------------------------------ all kinds

// Call a function with the kind of a form of weights: form is `PACKED + 2 * kind + (rows are rounded)`.
enum Kinds : long { OF_Q4_0, OF_Q5_0, OF_Q8_0, OF_Q4_K, OF_Q6_K };
template <class Function> static inline void with_kind(long kind, const Function &function) {
    switch (kind) {
        case OF_Q4_0: return function(Q4_0{});
        case OF_Q5_0: return function(Q5_0{});
        case OF_Q8_0: return function(Q8_0{});
        case OF_Q4_K: return function(Q4_K{});
        default: return function(Q6_K{});
    }
}

// Rows `ids` of a weight as numbers, as gguf's Python package makes them.
template <class K, class T>
static void unpack(const uint8_t *w, long k, const int64_t *ids, long count, T *to, long threads) {
    const long blocks = k / K::BLOCK;
#pragma omp parallel for num_threads(threads) if (count > 16)
    for (long i = 0; i < count; i++) {
        const int lane = ids[i] % LANES;
        const uint8_t *block = w + ids[i] / LANES * blocks * K::BLOCK_BYTES;
        for (long b = 0; b < blocks; b++, block += K::BLOCK_BYTES) {
            const float scale = halves(block)[lane], of_minima = K::MINIMA ? halves(block + 2 * LANES)[lane] : 0;
            for (int g = 0; g < K::BLOCK / GROUP; g++) {
                const uint8_t *const group = block + K::HEAD + g * K::GROUP_BYTES;
                const Planes<K> planes = {group + LANES * K::SCALES};
                const float least = K::MINIMA ? of_minima * group[LANES + lane] : 0;
                for (int q = 0; q < GROUP / 4; q++) {
                    const Quad four = planes.quad(q);
                    const int part = 4 * q / K::SCALED;
                    const float of_part = !K::SUBSCALED ? scale
                                          : scale * (K::MINIMA ? float(group[lane]) : float(int8_t(group[part * LANES + lane])));
                    for (int j = 0; j < 4; j++) {
                        const uint8_t byte = four[4 * lane + j];
                        const float number = K::LOW == 8 ? float(int8_t(byte)) : float(byte - K::ZERO);
                        const float product = of_part * number;
                        store(to + i * k + b * K::BLOCK + g * GROUP + 4 * q + j, K::MINIMA ? product - least : product);
                    }
                }
            }
        }
    }
}
