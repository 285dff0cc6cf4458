// Moments in 8 bits, one block of at most 32 elements at a time: the CPU twin of kernels/block_codes.py, same bits.
#pragma once
#include "native.h"

namespace halfstep {

constexpr int64_t SPAN = 32;                        // elements of a block
constexpr uint32_t DROPPED = 20;                    // bits that rounding to 3 bits drops from an fp32 pattern
constexpr uint32_t NOISE_BITS = 24;
constexpr float LARGEST_POSITIVE = 0x1.ep127f;      // the largest positive number with 3 bits of mantissa
// They stand for a random word where rounding goes to nearest, and up.
constexpr uint32_t NEAREST_WORD = 1u << 31, UP_WORD = ~0u;

// Codes of E4M3 in which every code is finite.
struct SignedCode { static constexpr uint32_t bits = 8, mantissa = 3, bias = 7, largest = 0x7f, overflow = 0x7f, nan = 0x7f; };

// 2^(exponent - 127); 0 for 0 and NaN for 255.
inline float power_of_exponent(uint32_t exponent) { return from_bits(exponent == 255 ? 0x7fc00000u : exponent << 23); }

inline uint32_t pattern_of(float x) { return bits_of(x) & 0x7fffffffu; }

// Call f(n), with a number that the compiler knows for whole blocks.
template <typename F> inline auto with_size(int64_t n, F&& f) { return n == SPAN ? f(SPAN) : f(n); }

// Encode n numbers; the random words are those of philox.py. Returns the exponent byte.
inline uint8_t encode_signed(const float* __restrict x, const uint32_t* __restrict words, uint8_t* __restrict codes,
                             int64_t size) {
    return with_size(size, [&](int64_t n) __attribute__((always_inline)) {
        uint32_t largest = 0;
        for (int64_t i = 0; i < n; ++i) largest = pattern_of(x[i]) > largest ? pattern_of(x[i]) : largest;
        const uint32_t exponent = (largest + ((1u << DROPPED) - 1)) >> 23;
        if (exponent < 18 || exponent >= 255) {
            std::memset(codes, 0, size_t(n));
            return uint8_t(exponent < 18 ? 0 : 255);
        }
        const float scale = power_of_exponent(262 - exponent);
        for (int64_t i = 0; i < n; ++i) codes[i] = uint8_t(round_to<SignedCode, STOCHASTIC, true>(x[i] * scale, words[i]));
        return uint8_t(exponent);
    });
}
// The same for positive numbers; returns the scale.
inline uint16_t encode_positive(const float* __restrict x, const uint32_t* __restrict words, uint8_t* __restrict codes,
                                int64_t size) {
    return with_size(size, [&](int64_t n) __attribute__((always_inline)) {
        int32_t largest = 0, smallest = 0x7fffffff;
        for (int64_t i = 0; i < n; ++i) {
            const int32_t pattern = int32_t(pattern_of(x[i]));
            largest = pattern > largest ? pattern : largest;
            smallest = pattern < smallest ? pattern : smallest;
        }
        const int32_t most = int32_t((uint32_t(largest) + 0xffffu) >> 16);  // in units of 2^16, rounded up
        if (most < 0x80 || most > 0x7f70) {
            std::memset(codes, 0, size_t(n));
            return uint16_t(most < 0x80 ? 0 : 0x7fc0);
        }
        int32_t base = (smallest >> 16) & 0xff80;
        const int32_t least = ((most + 15) & 0x1ff80) - 31 * 0x80;
        base = base > least ? base : least;
        base = base > 0x80 ? base : 0x80;
        // An integer rounded up to 8 bits has 8 + shift bits.
        const int32_t reach = int32_t((bits_of(float(most > base ? most - base : 0)) + 0xffffu) >> 23) - 134;
        const int32_t shift = reach > 0 ? reach : 0, begin = base << 16;
        for (int64_t i = 0; i < n; ++i) {
            const int32_t above = int32_t(pattern_of(x[i])) - begin;
            const uint32_t steps = uint32_t(above > 0 ? above : 0) << (8 - shift);
            codes[i] = uint8_t((steps + (words[i] >> (32 - NOISE_BITS))) >> NOISE_BITS);
        }
        return uint16_t(base | (shift + 16));
    });
}

inline void decode_signed(const uint8_t* __restrict codes, uint8_t exponent, float* __restrict x, int64_t size) {
    with_size(size, [&](int64_t n) __attribute__((always_inline)) {
        alignas(64) f16 halves[SPAN];
        for (int64_t i = 0; i < n; ++i) halves[i].bits = uint16_t((codes[i] & 0x7f) << 7 | (codes[i] & 0x80) << 8);
        load(halves, x, n);
        const float power = power_of_exponent(exponent);
        for (int64_t i = 0; i < n; ++i) x[i] *= power;
    });
}
inline void decode_positive(const uint8_t* __restrict codes, uint16_t scale, float* __restrict x, int64_t size) {
    with_size(size, [&](int64_t n) __attribute__((always_inline)) {
        const uint32_t base = uint32_t(scale & 0xffe0) << 16, shift = scale & 31;
        for (int64_t i = 0; i < n; ++i) x[i] = from_bits(base + (uint32_t(codes[i]) << shift));
    });
}

}  // namespace halfstep
