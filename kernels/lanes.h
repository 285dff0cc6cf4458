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

// For functions of vectors that a compiler would rather call: their arguments and results would then go through memory.
#define HALFSTEP_INLINE inline __attribute__((always_inline))

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));
typedef uint8_t B __attribute__((vector_size(W)));

inline V splat(float x) { return x - V{}; }
inline U splat_bits(uint32_t x) { return x - U{}; }
// `a` in the lanes where `take` is all ones, `b` where it is 0.
inline V select(I take, V a, V b) { return take ? a : b; }
inline U select(I take, U a, U b) { return (U)select(take, (V)a, (V)b); }
// A NaN in `a` is dropped, one in `b` is kept.
#if defined(HALFSTEP_AVX512)
inline V smaller(V a, V b) { return (V)_mm512_min_ps((__m512)a, (__m512)b); }
inline V larger(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
inline V smaller(V a, V b) { return (V)_mm256_min_ps((__m256)a, (__m256)b); }
inline V larger(V a, V b) { return (V)_mm256_max_ps((__m256)a, (__m256)b); }
#else
inline V smaller(V a, V b) { return a < b ? a : b; }
inline V larger(V a, V b) { return a > b ? a : b; }
#endif
inline I smaller(I a, I b) { return a < b ? a : b; }
inline I larger(I a, I b) { return a > b ? a : b; }
inline U larger(U a, U b) { return a > b ? a : b; }

HALFSTEP_INLINE int32_t largest_lane(I x) {
#if defined(HALFSTEP_AVX512)
    return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#else
    int32_t largest = x[0];
    for (int i = 1; i < W; ++i) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

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

inline I to_integers(V x) { return __builtin_convertvector(x, I); }  // truncated; they must fit
inline V to_numbers(I x) { return __builtin_convertvector(x, V); }

inline U magnitude(V x) { return (U)x & 0x7fffffffu; }
inline I is_nan(V x) { return x != x; }
// Whether either vector has a NaN.
inline bool any_nan(V a, V b) {
#if defined(HALFSTEP_AVX512)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q);
#elif defined(__AVX__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return vmaxvq_u32((uint32x4_t)(is_nan(a) | is_nan(b)));
#else
    const I either = is_nan(a) | is_nan(b);
    int64_t halves[W / 2], found = 0;
    std::memcpy(halves, &either, sizeof either);
    for (int64_t half : halves) found |= half;
    return found;
#endif
}

// ------------------------------------------------------------------------- W elements, or the first k, to and from fp32

// GCC 12 makes several instructions of what is one.
#if defined(HALFSTEP_AVX512)
inline U zero_extend(H x) { return (U)_mm512_cvtepu16_epi32((__m256i)x); }
inline H lower_half(U x) { return (H)_mm512_cvtepi32_epi16((__m512i)x); }
#elif defined(__AVX2__)
inline U zero_extend(H x) { return (U)_mm256_cvtepu16_epi32((__m128i)x); }
inline H lower_half(U x) {
    const __m256i low = (__m256i)(x & 0xffffu), packed = _mm256_packus_epi32(low, low);  // within each half of the vector
    return (H)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
#else
inline U zero_extend(H x) { return __builtin_convertvector(x, U); }
inline H lower_half(U x) { return __builtin_convertvector(x, H); }
#endif

// The lowest bytes of the lanes of two vectors, in order, to memory; and W bytes from there, to a lane each.
HALFSTEP_INLINE void put_bytes(uint8_t* to, U a, U b) {
#if defined(HALFSTEP_AVX512)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)a));
    _mm_storeu_si128((__m128i*)(to + W), _mm512_cvtepi32_epi8((__m512i)b));
#elif defined(__AVX2__)
    const __m256i halves = _mm256_packus_epi32((__m256i)(a & 0xffu), (__m256i)(b & 0xffu));
    const __m256i quarters = _mm256_packus_epi16(halves, halves);
    const __m256i ordered = _mm256_permutevar8x32_epi32(quarters, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(ordered));
#else
    const B bytes[2] = {__builtin_convertvector(a, B), __builtin_convertvector(b, B)};
    std::memcpy(to, bytes, sizeof bytes);
#endif
}
HALFSTEP_INLINE U get_words(const uint32_t* from) {
    U words;
    std::memcpy(&words, from, sizeof words);
    return words;
}
HALFSTEP_INLINE U get_bytes(const uint8_t* from) {
#if defined(HALFSTEP_AVX512)
    return (U)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (U)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    B bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, U);
#endif
}

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
    const U bits = zero_extend(raw), rest = bits & 0x7fffu;
    // Normal: shift the mantissa up and move the bias from 15 to 127. Inf and NaN: exponent to all ones.
    const U normal = (rest << 13) + (112u << 23) + ((U)((I)rest >= 0x7c00) & (112u << 23));
    // Subnormal: rest * 2^-24, which fp32 holds exactly.
    const U tiny = (U)(to_numbers((I)rest) * splat(0x1p-24f));
    return (V)((bits & 0x8000u) << 16 | select((I)rest < 0x0400, tiny, normal));
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
    const U b = (U)x, size = b & 0x7fffffffu;
    const I small = (I)size < 0x38800000;
    // Normal result: round at bit 13 (a carry into the exponent is right, up to and including infinity).
    const U normal = (size - (112u << 23) + 0x0fffu + ((size >> 13) & 1u)) >> 13;
    // Subnormal result: adding 0.5 puts the ulp of the sum at 2^-24, so the hardware rounds to nearest even for us.
    U code = select(small, (U)((V)(size & (U)small) + splat(0.5f)) - 0x3f000000u, normal);
    code = select((I)size >= 0x477ff000, splat_bits(0x7c00u), code);  // 65520 and above
    code = select(is_nan(x), splat_bits(0x7e00u), code);
    return lower_half((b >> 16 & 0x8000u) | code);
#endif
}

template <typename T> inline V get(const T* from) {
    typename Lanes<T>::type raw;
    std::memcpy(&raw, from, sizeof raw);
    return unpack<T>(raw);
}
template <typename T> inline void put_raw(T* to, typename Lanes<T>::type raw) { std::memcpy(to, &raw, sizeof raw); }
template <typename T> inline void put(T* to, V x) { put_raw(to, pack<T>(x)); }
// The first k lanes, k <= W; the others are 0.
template <typename T> inline V get_some(const T* from, int64_t k) {
#if defined(HALFSTEP_AVX512)
    __mmask16 some = __mmask16((1u << k) - 1u);
    if constexpr (sizeof(T) == 4) return (V)_mm512_maskz_loadu_ps(some, from);
    else return unpack<T>((typename Lanes<T>::type)_mm256_maskz_loadu_epi16(some, from));
#else
    if (k == W) return get(from);
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
    if (k == W) return put_raw(to, raw);
    std::memcpy(to, &raw, size_t(k) * sizeof(T));
#endif
}
template <typename T> inline void put_some(T* to, V x, int64_t k) { put_raw_some(to, pack<T>(x), k); }
inline I first_lanes(int64_t k) {
    I index;
    for (int i = 0; i < W; ++i) index[i] = i;
    return index < (int32_t(k) - I{});
}

// --------------------------------------------------------------------------------------- 2 W elements to and from fp32
// ORDERED: elements 0 to W - 1, then W to 2 W - 1. ALTERNATE: the even elements, then the odd ones. For bf16 that takes a
// shift and a mask, and ORDERED takes instructions that move elements between lanes, for which x86 without AVX-512 has
// few units.

struct Pair { V a, b; };
enum Order { ORDERED, ALTERNATE };
#if defined(HALFSTEP_AVX512)
template <typename... T> constexpr Order best_order = ORDERED;
#else
template <typename... T> constexpr Order best_order = (std::is_same_v<T, bf16> && ...) ? ALTERNATE : ORDERED;
#endif
constexpr uint32_t UPPER = 0xffff0000u;

template <typename T> HALFSTEP_INLINE Pair get_ordered(const T* from) { return {get(from), get(from + W)}; }
template <typename T> HALFSTEP_INLINE Pair put_ordered(T* to, Pair x) {
    const auto a = pack<T>(x.a), b = pack<T>(x.b);
    put_raw(to, a);
    put_raw(to + W, b);
    return {unpack<T>(a), unpack<T>(b)};
}
#if defined(__AVX2__) && !defined(HALFSTEP_AVX512)
// Pack and unpack work within halves of a vector, which the quarters in the order 0 2 1 3 make up for.
template <> HALFSTEP_INLINE Pair get_ordered<bf16>(const bf16* from) {
    const __m256i raw = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)from), 0xd8);
    return {(V)_mm256_unpacklo_epi16(__m256i{}, raw), (V)_mm256_unpackhi_epi16(__m256i{}, raw)};
}
HALFSTEP_INLINE void put_ordered_upper_halves(bf16* to, U a, U b) {
    const __m256i packed = _mm256_packus_epi32((__m256i)(a >> 16), (__m256i)(b >> 16));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(packed, 0xd8));
}
#else
HALFSTEP_INLINE void put_ordered_upper_halves(bf16* to, U a, U b) {
    put_raw(to, lower_half(a >> 16));
    put_raw(to + W, lower_half(b >> 16));
}
#endif

template <Order O, typename T> HALFSTEP_INLINE Pair get_two(const T* from) {
    if constexpr (O == ORDERED) {
        return get_ordered(from);
    } else {
        U words;
        std::memcpy(&words, from, sizeof words);
        return {(V)(words << 16), (V)(words & UPPER)};
    }
}

// Store the upper halves of the lanes.
template <Order O> HALFSTEP_INLINE void put_upper_halves(bf16* to, U a, U b) {
    if constexpr (O == ORDERED) {
        put_ordered_upper_halves(to, a, b);
    } else {
        const U words = (a >> 16) | (b & UPPER);
        std::memcpy(to, &words, sizeof words);
    }
}

// Round and store. Returns what is stored.
template <Order O, typename T> HALFSTEP_INLINE Pair put_two(T* to, Pair x) {
#if !defined(HALFSTEP_AVX512)
    if constexpr (std::is_same_v<T, bf16>) {
        const auto nearest = [](V x) { return (U)x + 0x7fffu + (((U)x >> 16) & 1u); };
        const auto quiet = [](V x, U y) { return select(is_nan(x), ((U)x & 0x80000000u) | 0x7fc00000u, y); };
        U a = nearest(x.a), b = nearest(x.b);
        if (__builtin_expect(any_nan(x.a, x.b), 0)) a = quiet(x.a, a), b = quiet(x.b, b);
        put_upper_halves<O>(to, a, b);
        return {(V)(a & UPPER), (V)(b & UPPER)};
    }
#endif
    return put_ordered(to, x);
}

// Call step(i) for each full vector of [0, n) and rest(i, k) for the k < W elements left.
template <typename Step, typename Rest> inline void walk(int64_t n, Step&& step, Rest&& rest) {
    int64_t i = 0;
    for (; i + W <= n; i += W) step(i);
    if (i < n) rest(i, n - i);
}
// Call step(i, k) for each vector of [0, n), the first element of which is i and of which k exist.
template <typename Step> HALFSTEP_INLINE void each_vector(int64_t n, Step&& step) {
    walk(n, [&](int64_t i) { step(i, W); }, step);
}
// Call pair(i) for each two full vectors of [0, n) and rest(i, k) for the vectors that are left, of k <= W elements.
template <typename Both, typename Rest> inline void walk_by_two(int64_t n, Both&& pair, Rest&& rest) {
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) pair(i);
    for (; i < n; i += W) rest(i, n - i < W ? n - i : W);
}
// Numbers of one type to another, to nearest, without a block of fp32 in memory.
template <typename From, typename To> inline void convert(const From* from, To* to, int64_t n) {
    walk_by_two(n, [=](int64_t i) { put_two<ORDERED>(to + i, get_two<ORDERED>(from + i)); },
                [=](int64_t i, int64_t k) { put_some(to + i, get_some(from + i, k), k); });
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
