// Vectors of W fp32 lanes (GCC and Clang vector extensions) for the C++ kernels: arithmetic, formats, memory.
//
// Arithmetic on them is IEEE, lane by lane, as on single numbers. Intrinsics are used where a compiler makes several
// instructions of what is one, and never change a bit.
#pragma once
#include "native.h"
#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace halfstep {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int W = 16;
#define HALFSTEP_AVX512 1
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));
typedef uint8_t B __attribute__((vector_size(W)));

inline V splat(float x) { return x - V{}; }
inline U splat_bits(uint32_t x) { return x - U{}; }
// `a` in the lanes where `take` is all ones, `b` where it is 0.
inline V select(I take, V a, V b) { return (V)(((I)a & take) | ((I)b & ~take)); }
inline U select(I take, U a, U b) { return (a & (U)take) | (b & ~(U)take); }

#if defined(HALFSTEP_AVX512)
// a > b ? a : b, and a < b ? a : b: a NaN in `a` is dropped, one in `b` is kept.
inline V larger(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }
inline V smaller(V a, V b) { return (V)_mm512_min_ps((__m512)a, (__m512)b); }
inline U larger(U a, U b) { return (U)_mm512_max_epu32((__m512i)a, (__m512i)b); }
#else
inline V larger(V a, V b) { return select(a > b, a, b); }
inline V smaller(V a, V b) { return select(a < b, a, b); }
inline U larger(U a, U b) { return select((I)(a > b), a, b); }
#endif

// The correctly rounded square root.
inline V root(V x) {
#if defined(HALFSTEP_AVX512)
    return (V)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__)
    return (V)_mm256_sqrt_ps((__m256)x);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (V)vsqrtq_f32((float32x4_t)x);
#else
    for (int i = 0; i < W; ++i) x[i] = std::sqrt(x[i]);
    return x;
#endif
}

inline U magnitude(V x) { return (U)x & 0x7fffffffu; }
inline I is_nan(V x) { return x != x; }

// ------------------------------------------------------------------------- W elements, or the first k, to and from fp32

// GCC 12 makes several instructions of what is one.
#if defined(HALFSTEP_AVX512)
inline U zero_extend(H x) { return (U)_mm512_cvtepu16_epi32((__m256i)x); }
inline H lower_half(U x) { return (H)_mm512_cvtepi32_epi16((__m512i)x); }
#else
inline U zero_extend(H x) { return __builtin_convertvector(x, U); }
inline H lower_half(U x) { return __builtin_convertvector(x, H); }
#endif

template <typename T> struct Lanes;
template <> struct Lanes<float> { using type = V; };
template <> struct Lanes<f16> { using type = H; };
template <> struct Lanes<bf16> { using type = H; };

template <typename T> inline V unpack(typename Lanes<T>::type raw);
template <> inline V unpack<float>(V raw) { return raw; }
template <> inline V unpack<bf16>(H raw) { return (V)(zero_extend(raw) << 16); }
template <> inline V unpack<f16>(H raw) {
#if defined(HALFSTEP_AVX512)
    return (V)_mm512_cvtph_ps((__m256i)raw);
#elif defined(__F16C__)
    return (V)_mm256_cvtph_ps((__m128i)raw);
#else
    V out;
    for (int i = 0; i < W; ++i) out[i] = widen(f16{raw[i]});
    return out;
#endif
}

template <typename T> inline typename Lanes<T>::type pack(V x);
template <> inline V pack<float>(V x) { return x; }
template <> inline H pack<bf16>(V x) {
#if defined(HALFSTEP_AVX512) && defined(__AVX512BF16__) && defined(__AVX512DQ__)
    // One instruction, but it takes subnormal numbers for 0 and keeps the payload of a NaN.
    constexpr int nan_or_subnormal = 0x01 | 0x20 | 0x80;
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)x, nan_or_subnormal), 1))
        return (H)_mm512_cvtneps_pbh((__m512)x);
#endif
    U b = (U)x, rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16, quiet = ((b >> 16) & 0x8000u) | 0x7fc0u;
    return lower_half(select(is_nan(x), quiet, rounded));
}
template <> inline H pack<f16>(V x) {
#if defined(HALFSTEP_AVX512)
    return (H)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    return (H)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    H out;
    for (int i = 0; i < W; ++i) out[i] = narrow<f16>(x[i]).bits;
    return out;
#endif
}

template <typename T> inline V get(const T* from) {
    typename Lanes<T>::type raw;
    std::memcpy(&raw, from, sizeof raw);
    return unpack<T>(raw);
}
template <typename T> inline void put_raw(T* to, typename Lanes<T>::type raw) { std::memcpy(to, &raw, sizeof raw); }
template <typename T> inline void put(T* to, V x) { put_raw(to, pack<T>(x)); }
// The first k lanes, k < W; the others are 0.
template <typename T> inline V get_some(const T* from, int64_t k) {
#if defined(HALFSTEP_AVX512)
    __mmask16 some = __mmask16((1u << k) - 1u);
    if constexpr (sizeof(T) == 4) return (V)_mm512_maskz_loadu_ps(some, from);
    else return unpack<T>((typename Lanes<T>::type)_mm256_maskz_loadu_epi16(some, from));
#else
    typename Lanes<T>::type raw{};
    std::memcpy(&raw, from, size_t(k) * sizeof(T));
    return unpack<T>(raw);
#endif
}
template <typename T> inline void put_raw_some(T* to, typename Lanes<T>::type raw, int64_t k) {
#if defined(HALFSTEP_AVX512)
    __mmask16 some = __mmask16((1u << k) - 1u);
    if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(to, some, (__m512)raw);
    else _mm256_mask_storeu_epi16(to, some, (__m256i)raw);
#else
    std::memcpy(to, &raw, size_t(k) * sizeof(T));
#endif
}
template <typename T> inline void put_some(T* to, V x, int64_t k) { put_raw_some(to, pack<T>(x), k); }
inline I first_lanes(int64_t k) {
    I index;
    for (int i = 0; i < W; ++i) index[i] = i;
    return index < (int32_t(k) - I{});
}

// Call step(i) for each full vector of [0, n) and rest(i, k) for the k < W elements left.
template <typename Step, typename Rest> inline void walk(int64_t n, Step&& step, Rest&& rest) {
    int64_t i = 0;
    for (; i + W <= n; i += W) step(i);
    if (i < n) rest(i, n - i);
}
// The same with step(i, lane), where `lane` goes round 0 to 3: four accumulators, so that an addition or maximum need not
// wait for the last. Worth its code where there is little else to do.
template <typename Step, typename Rest> inline void walk_by_four(int64_t n, Step&& step, Rest&& rest) {
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int lane = 0; lane < 4; ++lane) step(i + lane * W, lane);
    for (; i + W <= n; i += W) step(i, 0);
    if (i < n) rest(i, n - i);
}

// The sums of neighbours, those of a first: a[0] + a[1], a[2] + a[3], ..., b[0] + b[1], ...
inline V neighbours(V a, V b) {
#if defined(HALFSTEP_AVX512)
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return (V)_mm512_permutex2var_ps((__m512)a, even, (__m512)b) + (V)_mm512_permutex2var_ps((__m512)a, odd, (__m512)b);
#elif defined(__AVX2__)
    const __m256 sums = _mm256_hadd_ps((__m256)a, (__m256)b);  // halves of a and b in turn
    return (V)_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xd8);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (V)vpaddq_f32((float32x4_t)a, (float32x4_t)b);
#else
    V sums;
    for (int i = 0; i < W / 2; ++i) sums[i] = a[2 * i] + a[2 * i + 1], sums[i + W / 2] = b[2 * i] + b[2 * i + 1];
    return sums;
#endif
}

}  // namespace halfstep
