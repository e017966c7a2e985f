// Numbers and vectors of the CPU kernels: bfloat16, loads and stores, sums over lanes, exponentials, dot products.
//
// Vectors are GCC's and Clang's vector extension; LANES floats fit one register. Intrinsics are used for bfloat16 and
// for sums over lanes.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#elif defined(__aarch64__)
#define LANES 4
#else
#error "no kernels for this instruction set"
#endif
#if defined(_WIN32)  // whose `long` has 32 bits; all headers are included above
#define long int64_t
#endif

// OpenMP, declared here because Apple's clang has no omp.h; without it, one thread does everything.
extern "C" {
#if defined(_OPENMP)
int omp_get_thread_num(), omp_get_num_threads();
double omp_get_wtime();
long has_threads() { return 1; }
#else
static inline int omp_get_thread_num() { return 0; }
static inline int omp_get_num_threads() { return 1; }
static inline double omp_get_wtime() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
long has_threads() { return 0; }
#endif
}

// Runs the parts of a parallel region, which an exception must not leave; `check`, called after the region, throws if
// memory did not suffice in any of them.
struct Guard {
    std::atomic<bool> failed{false};
    template <class Part> void operator()(const Part &part) noexcept {
        try {
            part();
        } catch (const std::exception &) {
            failed = true;
        }
    }
    void check() const {
        if (failed) throw std::bad_alloc();
    }
};

// Have a vector in a register: compilers would load it again for each of its uses, which takes longer.
#if defined(__x86_64__)
#define KEEP(vector) asm volatile("" : "+x"(vector))
#else
#define KEEP(vector) asm volatile("" : "+w"(vector))
#endif

// Whether streams of numbers are prefetched. On an AMD Zen 3, hardware alone may read them faster; packed weights always are.
static bool use_prefetch = true;

typedef uint16_t bf16;
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint32_t Pair __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

static inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
static inline float widen(float value) { return value; }

static inline bf16 rounded(float value) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static inline void store(float *to, Four values) { *(Four *)to = values; }
static inline void store(bf16 *to, Four values) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    _mm_storel_epi64((__m128i *)to, (__m128i)_mm_cvtneps_pbh((__m128)values));
#else
    for (int i = 0; i < 4; i++) to[i] = rounded(values[i]);
#endif
}
// Floats whose upper halves are the nearest bfloat16, ties to even.
static inline Words nearest(Floats values) {
    Words bits = (Words)values, even = bits + 0x7fff + ((bits >> 16) & 1);
    return values == values ? even : Words{} + 0x7fc00000u;
}
#if LANES != 4  // otherwise Floats is Four
static inline void store(float *to, Floats values) { *(Floats *)to = values; }
static inline void store(bf16 *to, Floats values) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)values));
#else
    *(Shorts *)to = __builtin_convertvector(nearest(values) >> 16, Shorts);
#endif
}
#endif
static inline void store(float *to, float value) { *to = value; }
static inline void store(bf16 *to, float value) { *to = rounded(value); }

static inline Four four(const float *from) { return *(const Four *)from; }
static inline Four four(const bf16 *from) { return Four{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])}; }

static inline Floats floats(const float *from) { return *(const Floats *)from; }
static inline Floats floats(const bf16 *from) {
#if LANES == 16
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif LANES == 8
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    return (Floats)vshll_n_u16(vld1_u16(from), 16);
#endif
}

// The first `count` numbers; the others are 0, or not stored.
template <class T> static inline Floats floats(const T *from, long count) {
    if (count >= LANES) return floats(from);
    T some[LANES] = {};
    memcpy(some, from, count * sizeof(T));
    return floats(some);
}
template <class T> static inline void store(T *to, Floats values, long count) {
    if (count >= LANES) return store(to, values);
    T some[LANES];
    store(some, values);
    memcpy(to, some, count * sizeof(T));
}

// The sums over the lanes of four vectors.
static inline Four sums(Floats a, Floats b, Floats c, Floats d) {
#if LANES == 4
    return (Four)vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d));
#elif LANES == 8
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
    return (Four)_mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
#else
    auto ab = _mm512_castps_pd(_mm512_unpacklo_ps((__m512)a, (__m512)b) + _mm512_unpackhi_ps((__m512)a, (__m512)b));
    auto cd = _mm512_castps_pd(_mm512_unpacklo_ps((__m512)c, (__m512)d) + _mm512_unpackhi_ps((__m512)c, (__m512)d));
    auto all = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)) + _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
    auto half = _mm512_castps512_ps256(all) + _mm512_castps512_ps256(_mm512_shuffle_f32x4(all, all, 0x4e));
    return (Four)(_mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#endif
}

// e^x with a relative error of 1e-7; 0 below -87. Vectors of any length.
template <class V, class I> static inline V exponential(V x) {
    x = x < -87.0f ? V{} - 87.0f : x > 88.0f ? V{} + 88.0f : x;
    V shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;  // n = round(x / log 2)
    V r = x - n * 0.693359375f - n * -2.12194440e-4f;
    V p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
           1.6666665459e-1f) * r + 0.5f;
    V result = p * r * r + r + 1.0f;
    return (V)((I)result + (((I)shifted) << 23));
}
typedef int32_t FourWords __attribute__((vector_size(16)));
typedef int32_t SignedWords __attribute__((vector_size(4 * LANES)));

// w * x + sum, rounded once (`-ffp-contract=fast`). Bits must be equal wherever a product is computed, and intrinsics take
// half as long again: GCC moves their operands about.
template <class X> static inline Floats fused(Floats w, X x, Floats sum) { return w * x + sum; }
// The same, for tiles that need all of 16 registers, some of which compilers waste: they overwrite x, and keep a sum in
// memory.
static inline void add_product(Floats &sum, Floats w, Floats x) {
#if LANES == 8
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
#else
    sum = fused(w, x, sum);
#endif
}

// How weights W are read, `step` at a time, as `parts` vectors, and multiplied with rows of T, packed as numbers X.
// `total` adds up the lanes of four sums.
struct Reading {
    static constexpr bool is_packed = false, has_scales = false, has_factors = false, has_groups = false, rounds = false;
    template <class W> static const W *place(const W *from) { return from; }
};
struct FloatSums : Reading {
    static Four total(Floats a, Floats b, Floats c, Floats d) { return sums(a, b, c, d); }
};
template <class W> struct Dot;
template <> struct Dot<float> : FloatSums {
    typedef float T, W, X;
    typedef Floats Part;
    static constexpr int step = LANES, parts = 1;
    static Part load(const float *from, int = 0) { return floats(from); }
    static Part load_x(const float *from) { return floats(from); }
    static void pack(const float *from, float *to) { store(to, floats(from)); }
    static void unpack(const float *from, float factor, float *to) { store(to, floats(from) * factor); }
    static void add(Floats &sum, Part w, Part x) { add_product(sum, w, x); }
};
// A bfloat16 is the upper half of a float. Of pairs of them, read as words, the odd ones are floats once the lower halves
// are cleared, and the even ones once they are shifted up: one operation for each. So in packed steps, as floats, all
// even ones come before all odd ones.
template <> struct Dot<bf16> : FloatSums {
    typedef bf16 T, W;
    typedef float X;
    typedef Floats Part;
    static constexpr int step = 2 * LANES, parts = 2;
    static Part load(const bf16 *from, int odd) {
        const Words pairs = *(const Pair *)from;
#if LANES == 8
        alignas(32) static const volatile Words upper = Words{} + 0xffff0000u;  // read each time: no register is left for it
#else
        const Words upper = Words{} + 0xffff0000u;
#endif
        return (Floats)(odd ? pairs & upper : pairs << 16);
    }
    static Part load_x(const float *from) { return floats(from); }
    static void pack(const bf16 *from, float *to) { store(to, load(from, 0)), store(to + LANES, load(from, 1)); }
    static void unpack(const float *from, float factor, bf16 *to) {
        const Words even = nearest(floats(from) * factor), odd = nearest(floats(from + LANES) * factor);
        *(Pair *)to = even >> 16 | (odd & 0xffff0000u);
    }
    static void add(Floats &sum, Part w, Part x) { add_product(sum, w, x); }
};
// Instructions that multiply pairs of bfloat16 and add both products to a float. They need no packing, but not every
// processor is fast at them: see `use_pairs` in products.h.
#if defined(__AVX512BF16__)
#define HAS_PAIRS
struct Pairs : FloatSums {
    typedef bf16 T, W, X;
    typedef __m512bh Part;
    static constexpr int step = 32, parts = 1;
    static Part load(const bf16 *from, int = 0) { return (__m512bh)_mm512_loadu_si512(from); }
    static Part load_x(const bf16 *from) { return load(from); }
    static void pack(const bf16 *from, bf16 *to) { memcpy(to, from, step * sizeof(bf16)); }
    static void add(Floats &sum, Part w, Part x) { sum = (Floats)_mm512_dpbf16_ps((__m512)sum, w, x); }
};
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_PAIRS
struct Pairs : FloatSums {
    typedef bf16 T, W, X;
    typedef bfloat16x8_t Part;
    static constexpr int step = 8, parts = 1;
    static Part load(const bf16 *from, int = 0) { return vld1q_bf16((const bfloat16_t *)from); }
    static Part load_x(const bf16 *from) { return load(from); }
    static void pack(const bf16 *from, bf16 *to) { memcpy(to, from, step * sizeof(bf16)); }
    static void add(Floats &sum, Part w, Part x) { sum = (Floats)vbfdotq_f32((float32x4_t)sum, w, x); }
};
#endif

// ------------------------------------------------------------------------------------------------ weights of 8 bits

// Weights in int8 with a scale for each row of them, widened to floats.
template <class Number> struct Widened : FloatSums {
    typedef Number T;
    typedef int8_t W;
    typedef float X;
    typedef Floats Part;
    static constexpr bool has_scales = true;
    static constexpr int step = LANES, parts = 1;
    static SignedWords integers(const int8_t *from) {
#if LANES == 16
        return (SignedWords)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8
        return (SignedWords)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
        int32_t four;
        memcpy(&four, from, 4);
        return (SignedWords)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(uint32_t(four)))));
#endif
    }
    static Part load(const int8_t *from, int = 0) { return __builtin_convertvector(integers(from), Floats); }
    static Part load_x(const float *from) { return floats(from); }
    static void pack(const T *from, float *to) { store(to, floats(from)); }
    static void add(Floats &sum, Part w, Part x) { add_product(sum, w, x); }
};

// Weights of up to 8 bits with a scale and an offset for each group of 2^`shift` numbers, which LANES divides. If `rounds`,
// rows of x are rounded first, see `round_about`. If HALVES, a byte holds a number of 4 bits of a row in its lower bits, and
// one of the row that is `half` bytes further in its upper bits; the latter is asked for as if it were there.
template <class Number, bool HALVES> struct Grouped : Widened<Number> {
    static constexpr bool has_scales = false, has_groups = true;
    const long shift;
    const bool rounds;
    const int8_t *first = nullptr;
    const float *groups = nullptr;
    long half = 0;
    explicit Grouped(long form) : shift(form / 4), rounds(form & 1) {}
    bool is_upper(const int8_t *from) const { return HALVES && from - first >= half; }
    const int8_t *place(const int8_t *from) const { return is_upper(from) ? from - half : from; }
    Floats load(const int8_t *from, int = 0) const {
        const float *const group = groups + 2 * ((from - first) >> shift);
        SignedWords whole = Widened<Number>::integers(place(from));
        if (HALVES) whole = (is_upper(from) ? whole >> 4 : whole) & 15;
        return fused(__builtin_convertvector(whole, Floats), group[0], Floats{} + group[1]);
    }
};

// Weights in int8, times rows that are rounded to int8, each with its own factor. Sums are integers, whose bits
// are kept in vectors of floats; `OFFSET` times the sum of a row of x is subtracted from them in the end.
template <class Number> struct Integers : Reading {
    typedef Number T;
    typedef int8_t W;
    static constexpr bool has_scales = true, has_factors = true;
    static constexpr int parts = 1;
#if defined(__AVX512VNNI__)  // multiplies unsigned with signed bytes: weights are moved up by 128
    typedef int8_t X;
    typedef __m512i Part;
    static constexpr int step = 64, OFFSET = 128;
    static Part load(const int8_t *from, int = 0) {
        return _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(-128));
    }
    static Part load_x(const int8_t *from) { return _mm512_loadu_si512(from); }
    static void add(Floats &sum, Part w, Part x) { sum = (Floats)_mm512_dpbusd_epi32((__m512i)sum, w, x); }
#else
    typedef int16_t X;
    static constexpr int OFFSET = 0;
#if LANES == 16
    typedef __m512i Part;
    static constexpr int step = 32;
    static Part load(const int8_t *from, int = 0) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from));
    }
    static Part load_x(const int16_t *from) { return _mm512_loadu_si512(from); }
    static void add(Floats &sum, Part w, Part x) {
        sum = (Floats)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(w, x));
    }
#elif LANES == 8
    typedef __m256i Part;
    static constexpr int step = 16;
    static Part load(const int8_t *from, int = 0) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)); }
    static Part load_x(const int16_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
    static void add(Floats &sum, Part w, Part x) {
        sum = (Floats)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(w, x));
    }
#else
    typedef int16x8_t Part;
    static constexpr int step = 8;
    static Part load(const int8_t *from, int = 0) { return vmovl_s8(vld1_s8(from)); }
    static Part load_x(const int16_t *from) { return vld1q_s16(from); }
    static void add(Floats &sum, Part w, Part x) {
        const int32x4_t low = vmlal_s16((int32x4_t)sum, vget_low_s16(w), vget_low_s16(x));
        sum = (Floats)vmlal_high_s16(low, w, x);
    }
#endif
#endif
    static Four total(Floats a, Floats b, Floats c, Floats d) {
#if LANES == 4
        return (Four)vpaddq_s32(vpaddq_s32((int32x4_t)a, (int32x4_t)b), vpaddq_s32((int32x4_t)c, (int32x4_t)d));
#else
        const auto four = [](Floats lanes) {
#if LANES == 16
            const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)lanes),
                                                  _mm512_extracti64x4_epi64((__m512i)lanes, 1));
#else
            const __m256i half = (__m256i)lanes;
#endif
            return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        };
        return (Four)_mm_hadd_epi32(_mm_hadd_epi32(four(a), four(b)), _mm_hadd_epi32(four(c), four(d)));
#endif
    }
};
