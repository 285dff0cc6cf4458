// exp and log of kernels/exponential.py, which describes the arithmetic: fused only where it says fma.
#pragma once
#include "lanes.h"

namespace halfstep {

inline V fused(V a, V b, V c) {
#if defined(HALFSTEP_AVX512)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < W; ++i) a[i] = std::fma(a[i], b[i], c[i]);
    return a;
#endif
}

// Coefficients in the order of Horner's rule: the last one first.
constexpr float SHORT[] = {0x1.5bda58p-10f, 0x1.3ce8aep-7f, 0x1.c6b6d8p-5f, 0x1.ebf9c2p-3f, 0x1.62e42ap-1f, 1.0f};
constexpr float LONG[] = {0x1.416b52p-13f, 0x1.5f082ep-10f, 0x1.3b2de0p-7f, 0x1.c6af7cp-5f,
                          0x1.ebfbdcp-3f,  0x1.62e430p-1f,  1.0f};
constexpr float SERIES[] = {-0x1.38c9dep-4f, 0x1.055ec6p-3f, -0x1.0d8242p-3f, 0x1.22d92ep-3f,
                            -0x1.54728ap-3f, 0x1.99a01cp-3f, -0x1.000226p-2f, 0x1.555554p-2f};

template <bool PRECISE> HALFSTEP_INLINE V exponential(V d) {
    const V log2_e = splat(0x1.715476p+0f), shift = splat(3 * 0x1p22f + 127);
    d = larger(splat(-0x1.601e68p+6f), d);
    const V u = fused(d, log2_e, shift);
    V f = fused(d, log2_e, shift - u), p = splat(PRECISE ? LONG[0] : SHORT[0]);
    if (PRECISE) f = fused(d, splat(0x1.4ae0cp-26f), f);
    for (int i = 1; i < (PRECISE ? 7 : 6); ++i) p = fused(p, f, splat(PRECISE ? LONG[i] : SHORT[i]));
    return p * (V)((U)u << 23);
}

inline float logarithm(float s) {
    if (s != s) return s;
    const int32_t e = int32_t(bits_of(s) - 0x3f3504f3u) >> 23;
    const float r = from_bits(bits_of(s) - (uint32_t(e) << 23)) - 1.0f, square = r * r;
    float p = SERIES[0];
    for (int i = 1; i < 8; ++i) p = std::fma(p, r, SERIES[i]);
    const float y = std::fma(square, -0.5f, std::fma(r * square, p, float(e) * -0x1.05c61p-29f));
    return std::fma(float(e), 0x1.62e43p-1f, r + y);
}

}  // namespace halfstep
