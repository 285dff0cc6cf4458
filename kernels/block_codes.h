// Moments in 8 bits, one block of at most 128 elements at a time: the CPU twin of kernels/block_codes.py, same bits.
#pragma once
#include "native.h"

namespace halfstep {

constexpr int64_t SPAN = 128;                       // elements of a block
constexpr uint32_t DROPPED = 20;                    // bits that rounding drops from an fp32 pattern
constexpr float LARGEST_POSITIVE = 0x1.ep127f;      // the largest positive number with 3 bits of mantissa
constexpr uint32_t NEAREST_WORD = 1u << 31;         // stands for a random word where rounding goes to nearest

// Codes of E4M3 in which every code is finite.
struct SignedCode { static constexpr uint32_t bits = 8, mantissa = 3, bias = 7, largest = 0x7f, overflow = 0x7f, nan = 0x7f; };

// 2^(exponent - 127); 0 for 0 and NaN for 255.
inline float power_of_exponent(uint32_t exponent) { return from_bits(exponent == 255 ? 0x7fc00000u : exponent << 23); }

// The largest pattern of a magnitude plus its noise.
inline uint32_t largest_rounded(const float* __restrict x, const uint32_t* __restrict words, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t rounded = (bits_of(x[i]) & 0x7fffffffu) + (words[i] >> (32 - DROPPED));
        largest = rounded > largest ? rounded : largest;
    }
    return largest;
}

// Encode n numbers; the random words are those of philox.py. Returns the exponent byte.
inline uint8_t encode_signed(const float* __restrict x, const uint32_t* __restrict words, uint8_t* __restrict codes,
                             int64_t n) {
    const uint32_t exponent = largest_rounded(x, words, n) >> 23;
    if (exponent < 18 || exponent >= 255) {
        std::memset(codes, 0, size_t(n));
        return exponent < 18 ? 0 : 255;
    }
    const float scale = power_of_exponent(262 - exponent);
    for (int64_t i = 0; i < n; ++i) codes[i] = uint8_t(round_to<SignedCode, STOCHASTIC, true>(x[i] * scale, words[i]));
    return uint8_t(exponent);
}
inline uint8_t encode_positive(const float* __restrict x, const uint32_t* __restrict words, uint8_t* __restrict codes,
                               int64_t n) {
    const uint32_t largest = largest_rounded(x, words, n), upper = largest >> 23;
    const uint32_t exponent = largest < (2u << DROPPED) ? 0 : upper < 32 ? 32 : upper < 255 ? upper : 255;
    if (exponent == 0 || exponent == 255) {
        std::memset(codes, 0, size_t(n));
        return uint8_t(exponent);
    }
    const int32_t lowest = int32_t(exponent - 31) << 3;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t rounded = (bits_of(x[i]) & 0x7fffffffu) + (words[i] >> (32 - DROPPED));
        const int32_t code = int32_t(rounded >> DROPPED) - lowest;
        codes[i] = uint8_t(code < 0 ? 0 : code);
    }
    return uint8_t(exponent);
}

inline void decode_signed(const uint8_t* __restrict codes, uint8_t exponent, float* __restrict x, int64_t n) {
    alignas(64) f16 halves[SPAN];
    for (int64_t i = 0; i < n; ++i) halves[i].bits = uint16_t((codes[i] & 0x7f) << 7 | (codes[i] & 0x80) << 8);
    load(halves, x, n);
    const float power = power_of_exponent(exponent);
    for (int64_t i = 0; i < n; ++i) x[i] *= power;
}
inline void decode_positive(const uint8_t* __restrict codes, uint8_t exponent, float* __restrict x, int64_t n) {
    const float power = power_of_exponent(exponent);
    for (int64_t i = 0; i < n; ++i) x[i] = from_bits((uint32_t(codes[i]) << DROPPED) + (96u << 23)) * power;
}

}  // namespace halfstep
