// Moments in 8 bits, one block of at most 32 elements at a time: the CPU twin of kernels/block_codes.py, same bits.
//
// Numbers and random words lie in arrays of SPAN, whatever the size of the block.
#pragma once
#include "lanes.h"

namespace halfstep {

constexpr int64_t SPAN = 32;                        // elements of a block
constexpr uint32_t DROPPED = 20;                    // bits that rounding to 3 bits drops from an fp32 pattern
constexpr uint32_t NOISE_BITS = 24;
constexpr float LARGEST_POSITIVE = 0x1.ep127f;      // the largest positive number with 3 bits of mantissa
// They stand for a random word where rounding goes to nearest, and up.
constexpr uint32_t NEAREST_WORD = 1u << 31, UP_WORD = ~0u;

// 2^(exponent - 127); 0 for 0 and NaN for 255.
inline float power_of_exponent(uint32_t exponent) { return from_bits(exponent == 255 ? 0x7fc00000u : exponent << 23); }

// Repeat a number of a block beyond its size, which changes no extreme.
inline void fill_up(float* x, int64_t size) {
    for (int64_t i = size; i < SPAN; ++i) x[i] = x[0];
}

// Store the codes that code(i) returns in the lowest bytes of the lanes for the elements from i on.
template <typename F> HALFSTEP_INLINE void put_codes(uint8_t* codes, int64_t size, F&& code) {
    alignas(64) uint8_t all[SPAN];
    uint8_t* to = size == SPAN ? codes : all;
    for (int64_t i = 0; i < SPAN; i += 2 * W) put_bytes(to + i, code(i), code(i + W));
    if (size != SPAN) std::memcpy(codes, all, size_t(size));
}
// Call f(i, codes) for each vector of elements, those from i on, with the codes in its lanes.
template <typename F> HALFSTEP_INLINE void with_codes(const uint8_t* codes, int64_t size, F&& f) {
    alignas(64) uint8_t all[SPAN];
    if (size != SPAN) {
        std::memset(all, 0, SPAN);
        codes = (const uint8_t*)std::memcpy(all, codes, size_t(size));
    }
    for (int64_t i = 0; i < SPAN; i += W) f(i, get_bytes(codes + i));
}

// Encode numbers that are filled up; the random words are those of philox.py. Returns the exponent byte.
HALFSTEP_INLINE uint8_t encode_signed(const float* x, const uint32_t* words, uint8_t* codes, int64_t size) {
    I highest{};
    for (int64_t i = 0; i < SPAN; i += W) highest = larger(highest, (I)magnitude(get(x + i)));
    const uint32_t exponent = (uint32_t(largest_lane(highest)) + ((1u << DROPPED) - 1)) >> 23;
    if (exponent < 18 || exponent >= 255) {
        std::memset(codes, 0, size_t(size));
        return uint8_t(exponent < 18 ? 0 : 255);
    }
    const V scale = splat(power_of_exponent(262 - exponent));
    put_codes(codes, size, [&](int64_t i) {
        const V y = get(x + i) * scale;
        // In steps of 2^-20 of a code: the pattern counts them for normal numbers of E4M3, and the distance from 0 for the
        // ones below. The larger count is the right one, and the exponent was chosen such that no code exceeds 0x7f.
        const I normal = (I)magnitude(y) - (120 << 23), small = (I)((V)magnitude(y) + splat(0x1p-6f)) - (121 << 23);
        const U code = ((U)larger(normal, small) + (get_words(words + i) >> (32 - DROPPED))) >> DROPPED;
        return code | ((U)y >> 24 & 0x80u);
    });
    return uint8_t(exponent);
}
// The same for positive numbers; returns the scale.
HALFSTEP_INLINE uint16_t encode_positive(const float* x, const uint32_t* words, uint8_t* codes, int64_t size) {
    I highest = (I)magnitude(get(x)), lowest = highest;
    for (int64_t i = W; i < SPAN; i += W) {
        highest = larger(highest, (I)magnitude(get(x + i)));
        lowest = smaller(lowest, (I)magnitude(get(x + i)));
    }
    const int32_t largest = largest_lane(highest), smallest = 0x7fffffff - largest_lane(0x7fffffff - lowest);
    const int32_t most = int32_t((uint32_t(largest) + 0xffffu) >> 16);  // in units of 2^16, rounded up
    if (most < 0x80 || most > 0x7f70) {
        std::memset(codes, 0, size_t(size));
        return uint16_t(most < 0x80 ? 0 : 0x7fc0);
    }
    int32_t base = (smallest >> 16) & 0xff80;
    const int32_t least = ((most + 15) & 0x1ff80) - 31 * 0x80;
    base = base > least ? base : least;
    base = base > 0x80 ? base : 0x80;
    // An integer rounded up to 8 bits has 8 + shift bits.
    const int32_t reach = int32_t((bits_of(float(most > base ? most - base : 0)) + 0xffffu) >> 23) - 134;
    const int32_t shift = reach > 0 ? reach : 0, begin = base << 16;
    put_codes(codes, size, [&](int64_t i) {
        const U steps = (U)larger((I)magnitude(get(x + i)) - begin, I{}) << (8 - shift);
        return (steps + (get_words(words + i) >> (32 - NOISE_BITS))) >> NOISE_BITS;
    });
    return uint16_t(base | (shift + 16));
}

// The same as linear codes, two's complement; returns the exponent byte.
HALFSTEP_INLINE uint8_t encode_linear(const float* x, const uint32_t* words, uint8_t* codes, int64_t size) {
    I highest{};
    for (int64_t i = 0; i < SPAN; i += W) highest = larger(highest, (I)magnitude(get(x + i)));
    const int32_t least = int32_t((uint32_t(largest_lane(highest)) + 0x1ffffu) >> 23) - 6;
    if (least > 248) {
        std::memset(codes, 0, size_t(size));
        return 255;
    }
    const uint32_t exponent = uint32_t(least < 24 ? 24 : least);
    const V factor = splat(power_of_exponent(278 - exponent));  // 2^24 units
    put_codes(codes, size, [&](int64_t i) {
        const V scaled = get(x + i) * factor;
        const I truncated = to_integers(scaled);
        const I steps = truncated + (to_numbers(truncated) > scaled);  // rounded down: a comparison gives -1
        return (U)((steps + (I)(get_words(words + i) >> (32 - NOISE_BITS))) >> NOISE_BITS) & 0xffu;
    });
    return uint8_t(exponent);
}

HALFSTEP_INLINE void decode_linear(const uint8_t* codes, uint8_t exponent, float* x, int64_t size) {
    const V unit = splat(power_of_exponent(exponent));
    with_codes(codes, size, [&](int64_t i, U code) { put(x + i, to_numbers((I)(code << 24) >> 24) * unit); });
}
HALFSTEP_INLINE void decode_signed(const uint8_t* codes, uint8_t exponent, float* x, int64_t size) {
    const V power = splat(power_of_exponent(exponent));
    with_codes(codes, size, [&](int64_t i, U code) {
        put(x + i, unpack<f16>(lower_half((code & 0x7fu) << 7 | (code & 0x80u) << 8)) * power);
    });
}
HALFSTEP_INLINE void decode_positive(const uint8_t* codes, uint16_t scale, float* x, int64_t size) {
    const uint32_t base = uint32_t(scale & 0xffe0) << 16, shift = scale & 31;
    with_codes(codes, size, [&](int64_t i, U code) { put(x + i, (V)(base + (code << shift))); });
}

}  // namespace halfstep
