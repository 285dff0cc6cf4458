// What the C++ kernels share: formats as bit patterns, rounding, random words, threads.
//
// All arithmetic is IEEE fp32 (or fp64), one operation at a time, compiled without contraction, so that the results have the
// bits of the torch reference.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace halfstep {

// The codes of kernels/formats.py.
enum Dtype : int32_t { F32, F16, BF16, FP8_E4M3, FP8_E5M2, CODED, LINEAR };

struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
inline float from_bits(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

// Rounding to a format: `reference_round` of kernels/rounding.py.
enum Rounding : int32_t { NEAREST = 0, TOWARD_ZERO = 1, STOCHASTIC = 2 };

struct Float16 { static constexpr uint32_t bits = 16, mantissa = 10, bias = 15, largest = 0x7bff, overflow = 0x7c00, nan = 0x7e00; };
struct BFloat16 { static constexpr uint32_t bits = 16, mantissa = 7, bias = 127, largest = 0x7f7f, overflow = 0x7f80, nan = 0x7fc0; };
struct E4M3 { static constexpr uint32_t bits = 8, mantissa = 3, bias = 7, largest = 0x7e, overflow = 0x7f, nan = 0x7f; };
struct E5M2 { static constexpr uint32_t bits = 8, mantissa = 2, bias = 15, largest = 0x7b, overflow = 0x7c, nan = 0x7f; };

// 2^exponent, within the normal range.
constexpr float power_of_two(int exponent) {
    float result = 1.0f;
    for (; exponent > 0; --exponent) result *= 2.0f;
    for (; exponent < 0; ++exponent) result *= 0.5f;
    return result;
}

// The code of `x` in format F, sign included. `word` is random, and looked at if R is STOCHASTIC.
template <typename F, Rounding R, bool SATURATE> inline uint32_t round_to(float x, uint32_t word) {
    constexpr uint32_t dropped = 23 - F::mantissa;
    const uint32_t b = bits_of(x), magnitude = b & 0x7fffffffu;
    uint32_t noise = 0;
    if (R == STOCHASTIC) noise = word >> (32 - dropped);
    if (R == NEAREST) noise = (1u << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1u);
    uint32_t code = (magnitude - ((127 - F::bias) << 23) + noise) >> dropped;
    if (F::bias != 127) {
        const bool small = magnitude < ((128 - F::bias) << 23);
        const float value = from_bits(small ? magnitude : 0u);
        // The unit in the last place of the sum is the least subnormal of F, or its 2^-dropped for STOCHASTIC.
        constexpr float magic = power_of_two((R == NEAREST ? 24 - int(F::mantissa) : 1) - int(F::bias));
        uint32_t tiny = bits_of(value + magic) - bits_of(magic);
        if (R == STOCHASTIC) tiny = (tiny + noise) >> dropped;
        if (R == TOWARD_ZERO) tiny = uint32_t(int32_t(value * power_of_two(int(F::mantissa) + int(F::bias) - 1)));
        code = small ? tiny : code;
    }
    code = code > F::largest ? (SATURATE || R == TOWARD_ZERO ? F::largest : F::overflow) : code;
    if (R == TOWARD_ZERO && !SATURATE) code = magnitude == 0x7f800000u ? F::overflow : code;
    code = magnitude > 0x7f800000u ? F::nan : code;
    return code | ((b >> (32 - F::bits)) & (1u << (F::bits - 1)));
}

template <typename F, typename Code, Rounding R, bool SATURATE>
void round_block(const float* from, const uint32_t* words, void* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        ((Code*)to)[i] = Code(round_to<F, R, SATURATE>(from[i], R == STOCHASTIC ? words[i] : 0));
}

// The random numbers of kernels/philox.py: the words of calls, four for each group of eight elements.
constexpr int ROUNDS = 7;
#if defined(__AVX2__)
// A word of a call in the lower half of each lane. The upper half is of no use, and a product does not look at it.
#if defined(__AVX512F__)
typedef uint64_t Words __attribute__((vector_size(64)));
constexpr Words NUMBERS = {0, 4, 1, 5, 2, 6, 3, 7};  // of the calls: the even lanes first, then the odd ones
inline Words product(Words x, Words y) { return (Words)_mm512_mul_epu32((__m512i)x, (__m512i)y); }
inline Words even_lanes(Words x, Words y) { return (Words)_mm512_unpacklo_epi64((__m512i)x, (__m512i)y); }
inline Words odd_lanes(Words x, Words y) { return (Words)_mm512_unpackhi_epi64((__m512i)x, (__m512i)y); }
#else
typedef uint64_t Words __attribute__((vector_size(32)));
constexpr Words NUMBERS = {0, 2, 1, 3};
inline Words product(Words x, Words y) { return (Words)_mm256_mul_epu32((__m256i)x, (__m256i)y); }
inline Words even_lanes(Words x, Words y) { return (Words)_mm256_unpacklo_epi64((__m256i)x, (__m256i)y); }
inline Words odd_lanes(Words x, Words y) { return (Words)_mm256_unpackhi_epi64((__m256i)x, (__m256i)y); }
#endif
// What the compiler makes of the loops below takes 1.8 times as long.
inline void words_of_groups(uint64_t seed, uint32_t step, uint32_t stream, uint64_t group, int64_t groups, uint32_t* to) {
    constexpr int64_t LANES = sizeof(Words) / sizeof(uint64_t);
    constexpr uint64_t LOWER = 0xffffffffu;
    for (int64_t i = 0; i < groups; i += LANES) {
        Words c0 = NUMBERS + (group + uint64_t(i)), c1 = c0 >> 32, c2 = Words{} + step, c3 = Words{} + stream;
        uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
        for (int round = 0; round < ROUNDS; ++round) {
            const Words p0 = product(c0, Words{} + 0xd2511f53u), p1 = product(c2, Words{} + 0xcd9e8d57u);
            c0 = (p1 >> 32) ^ c1 ^ k0;
            c2 = (p0 >> 32) ^ c3 ^ k1;
            c1 = p1;
            c3 = p0;
            k0 += 0x9e3779b9u;
            k1 += 0xbb67ae85u;
        }
        const Words front = (c0 & LOWER) | c1 << 32, back = (c2 & LOWER) | c3 << 32;
        const Words in_order[2] = {even_lanes(front, back), odd_lanes(front, back)};
        std::memcpy(to + 4 * i, in_order, sizeof in_order);
    }
}
#else
inline void words_of_groups(uint64_t seed, uint32_t step, uint32_t stream, uint64_t group, int64_t groups, uint32_t* to) {
    for (int64_t begin = 0; begin < groups; begin += 16) {
        uint32_t c0[16], c1[16], c2[16], c3[16];
        for (int64_t i = 0; i < 16; ++i) {
            c0[i] = uint32_t(group + begin + i);
            c1[i] = uint32_t((group + begin + i) >> 32);
            c2[i] = step;
            c3[i] = stream;
        }
        uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
        for (int round = 0; round < ROUNDS; ++round) {
            for (int64_t i = 0; i < 16; ++i) {
                const uint64_t p0 = uint64_t(c0[i]) * 0xd2511f53u, p1 = uint64_t(c2[i]) * 0xcd9e8d57u;
                c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
                c1[i] = uint32_t(p1);
                c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
                c3[i] = uint32_t(p0);
            }
            k0 += 0x9e3779b9u;
            k1 += 0xbb67ae85u;
        }
        for (int64_t i = 0; i < 16; ++i) {
            to[4 * (begin + i)] = c0[i];
            to[4 * (begin + i) + 1] = c1[i];
            to[4 * (begin + i) + 2] = c2[i];
            to[4 * (begin + i) + 3] = c3[i];
        }
    }
}
#endif

// The words that rounding looks at, of elements first to first + n: `words` of draw 0, and `words` + STRIDE and + 2 STRIDE
// of draws 1 and 2 if there are as many. n is at most LIMIT.
template <int64_t LIMIT, int DRAWS = 1, int64_t STRIDE = LIMIT>
inline void random_words(uint64_t seed, uint32_t step, uint32_t stream, int64_t first, int64_t n, uint32_t* words) {
    constexpr int64_t MOST = ((LIMIT + 14) / 8 + 15) / 16 * 64;  // words of whole sixteen groups, which are written at most
    alignas(64) uint32_t all[DRAWS][MOST];
    const int64_t group = first / 8, groups = n > 0 ? (first + n - 1) / 8 - group + 1 : 0;
    words_of_groups(seed, step, stream, uint64_t(group), groups, all[0]);
    if (DRAWS == 3) {
        typedef uint32_t Call __attribute__((vector_size(16)));
        for (int64_t i = 0; i < 4 * groups; i += 4) {
            Call word;
            std::memcpy(&word, all[0] + i, sizeof word);
            const Call one = word ^ Call{word[1], word[2], word[3], word[0]};
            const Call two = one ^ Call{word[2], word[3], word[0], word[1]};
            std::memcpy(all[1 % DRAWS] + i, &one, sizeof one);
            std::memcpy(all[2 % DRAWS] + i, &two, sizeof two);
        }
    }
    typedef uint16_t __attribute__((may_alias)) Half;
    for (int draw = 0; draw < DRAWS; ++draw) {
        // In memory the lower half of a word comes first, as the even element does.
        const Half* from = (const Half*)all[draw] + (first - 8 * group);
        for (int64_t i = 0; i < n; ++i) words[draw * STRIDE + i] = uint32_t(from[i]) << 16 | 0x8000u;
    }
}

constexpr int64_t FEW_CHUNKS = 8;  // with 4096 elements each: so many chunks are worth one thread only

// Call work(i) for each i from 0 to n, on several threads if n is at least `least`. One thread enters no parallel region,
// which would take longer than the work on a small tensor. All threads get one range each, in order.
template <typename Work> inline void spread_evenly(int64_t n, int64_t least, int32_t threads, Work&& work) {
    if (n < least || threads <= 1) {
        for (int64_t i = 0; i < n; ++i) work(i);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < n; ++i) work(i);
}

// Call f with a null pointer of the C++ type that a dtype code stands for.
template <typename F> inline void with_dtype(int32_t dtype, F&& f) {
    if (dtype == F32) f((float*)nullptr);
    else if (dtype == F16) f((f16*)nullptr);
    else f((bf16*)nullptr);
}

}  // namespace halfstep
