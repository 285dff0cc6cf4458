// Softmax and log-softmax, forward and backward: the CPU twin of the Triton kernels, same rules, not the same bits (exp).
//
// Written on the vectors of lanes.h, because a reduction in plain C++ may not be reordered and so does not vectorise
// without flags that also give up NaN and Inf. Intrinsics are used where they save much.
//
// A row is walked two or three times, from the caches: maximum; exponentials and their sum, kept as fp32 in the output
// row or a scratch row; product with the reciprocal of the sum.
#include "../lanes.h"
#include <cfloat>
#include <limits>
#include <memory>
#include <type_traits>

using namespace halfstep;

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int64_t BLOCK = 64 * W;  // fp32 sums run over so many elements, then go on in fp64: the error stays a few ulps

#if defined(HALFSTEP_AVX512)
// `value` where x is not below `limit` (a NaN is not), else 0.
inline V unless_below(V x, V limit, V value) {
    return (V)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)limit, _CMP_NLT_UQ), (__m512)value);
}
// `value` where p is not -inf, else 0.
inline V unless_constant(V p, V value) {
    return (V)_mm512_maskz_mov_ps(
        _mm512_cmp_ps_mask((__m512)p, (__m512)splat(-INF), _CMP_NEQ_UQ), (__m512)value);
}
#else
inline V unless_below(V x, V limit, V value) { return (V)((I)value & ~(x < limit)); }
inline V unless_constant(V p, V value) { return (V)((I)value & (p != splat(-INF))); }
#endif

inline V fma(V a, V b, V c) {
#if defined(HALFSTEP_AVX512)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline Pair product(Pair x, V factor) { return {x.a * factor, x.b * factor}; }

inline float sum_lanes(V v) {
#if defined(HALFSTEP_AVX512)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lane[W];
    std::memcpy(lane, &v, sizeof v);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
#endif
}
inline float max_lanes(V v) {
#if defined(HALFSTEP_AVX512)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lane[W];
    std::memcpy(lane, &v, sizeof v);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
#endif
}

// exp(x) for x <= 0 within 1 ulp; 0 below 2^-126, -inf included; NaN stays NaN. x = n ln 2 + r as in Cephes expf
// (S. Moshier); the polynomial in r is a minimax fit of relative error 4e-9 on |r| <= ln(2)/2.
inline V exp_negative(V x) {
    const V lowest = splat(-87.33654f);
    const V whole = x;
    x = larger(lowest, x);
    V shifted = fma(x, splat(1.44269504f), splat(0x1.8p23f));  // the low bits now hold n = round(x / ln 2)
    V n = shifted - splat(0x1.8p23f);
    V r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    V p = fma(splat(0x1.6a23d0p-10f), r, splat(0x1.123a20p-7f));
    p = fma(p, r, splat(0x1.5558f2p-5f));
    p = fma(p, r, splat(0x1.555492p-3f));
    p = fma(p, r, splat(0x1.fffffcp-2f));
    p = fma(p, r * r, r) + splat(1.0f);
    V power = (V)(((U)shifted << 23) + 0x3f800000u);  // 2^n
    return unless_below(whole, lowest, p * power);
}

// ------------------------------------------------------------------------------------------------------------ one row

enum MaskKind : int32_t { NO_MASK = -1, MASK_F32 = F32, MASK_F16 = F16, MASK_BF16 = BF16, MASK_BOOL = 3 };

struct Mask {
    MaskKind kind;
    int64_t stride;  // between columns, in elements
    const char* row;

    template <typename T> V additive(int64_t i, int64_t k) const {
        const T* from = (const T*)row;
        if (stride == 1) return k == W ? get(from + i) : get_some(from + i, k);
        V out{};
        for (int64_t j = 0; j < k; ++j) out[j] = widen(from[(i + j) * stride]);
        return out;
    }
    I keep(int64_t i, int64_t k) const {
        const uint8_t* from = (const uint8_t*)row;
        B raw{};
        if (stride == 1 && k == W) std::memcpy(&raw, from + i, W);
        else for (int64_t j = 0; j < k; ++j) raw[j] = from[(i + j) * stride];
        return __builtin_convertvector(raw, I) != 0;
    }
    // The masked value of k lanes that begin at column i.
    V apply(V z, int64_t i, int64_t k) const {
        switch (kind) {
            case MASK_BOOL: return select(keep(i, k), z, splat(-INF));
            case MASK_F32: return z + additive<float>(i, k);
            case MASK_F16: return z + additive<f16>(i, k);
            case MASK_BF16: return z + additive<bf16>(i, k);
            default: return z;
        }
    }
};

// Call each(begin, end) on the blocks of [0, n).
template <typename Each> inline void blocks(int64_t n, Each&& each) {
    for (int64_t begin = 0; begin < n; begin += BLOCK) each(begin, begin + BLOCK < n ? BLOCK : n - begin);
}

struct Four {
    V lane[4];
    explicit Four(float value) { lane[0] = lane[1] = lane[2] = lane[3] = splat(value); }
    V larger_of_all() const { return larger(larger(lane[0], lane[1]), larger(lane[2], lane[3])); }
    V sum_of_all() const { return (lane[0] + lane[1]) + (lane[2] + lane[3]); }
};

template <typename Out> inline void fill(Out* to, int64_t n, float value) {
    const Out packed = narrow<Out>(value);
    for (int64_t i = 0; i < n; ++i) to[i] = packed;
}

// Softmax of z(0..n) into y, `value` in the columns n..columns. scratch: n floats, unused when Out is float.
template <bool LOG, typename Out, typename Full, typename Some>
inline void finish_row(Out* y, int64_t n, int64_t columns, float* scratch, V highest, Full&& z_full, Some&& z_some) {
    float* e = scratch;
    if constexpr (sizeof(Out) == 4) e = (float*)y;
    const V m = splat(max_lanes(highest));
    double total = 0.0;
    blocks(n, [&](int64_t begin, int64_t count) {
        V sum{};
        walk(
            count,
            [&](int64_t i) {
                V value = exp_negative(z_full(begin + i) - m);
                sum += value;
                if constexpr (!LOG) put(e + begin + i, value);
            },
            [&](int64_t i, int64_t k) {
                V value = (V)((I)exp_negative(z_some(begin + i, k) - m) & first_lanes(k));
                sum += value;
                if constexpr (!LOG) put_some(e + begin + i, value, k);
            });
        total += sum_lanes(sum);
    });
    if (total == 0.0) total = 1.0;  // asking total > 0 instead would hide a NaN
    if constexpr (LOG) {
        const float log_sum = std::log(float(total));  // in fp32: half the time of fp64, and short rows feel it
        const V shift = splat(log_sum);
        walk(
            n, [&](int64_t i) { put(y + i, (z_full(i) - m) - shift); },
            [&](int64_t i, int64_t k) { put_some(y + i, (z_some(i, k) - m) - shift, k); });
        fill(y + n, columns - n, -INF - log_sum);  // NaN if the row is
    } else {
        const float inverse = float(1.0 / total);
        const V factor = splat(inverse);
        walk_by_two(
            n, [&](int64_t i) { put_two<ORDERED>(y + i, product(get_two<ORDERED>(e + i), factor)); },
            [&](int64_t i, int64_t k) { put_some(y + i, get_some(e + i, k) * factor, k); });
        fill(y + n, columns - n, 0.0f * inverse);  // NaN if the row is
    }
}

// z = scale * x + mask as fp32, n of them; returns the maximum per lane.
template <typename In> V prepare_row(const In* x, float* z, int64_t n, float scale, const Mask& mask) {
    const V factor = splat(scale);
    Four highest(-FLT_MAX);  // not -inf: -inf - -inf is NaN
    walk_by_four(
        n,
        [&](int64_t i, int lane) {
            Pair value = product(get_two<ORDERED>(x + i), factor);
            value = {mask.apply(value.a, i, W), mask.apply(value.b, i + W, W)};
            highest.lane[lane] = larger(value.a, highest.lane[lane]);
            highest.lane[lane + 1] = larger(value.b, highest.lane[lane + 1]);
            put_two<ORDERED>(z + i, value);
        },
        [&](int64_t i, int64_t k) {
            V value = mask.apply(get_some(x + i, k) * factor, i, k);
            highest.lane[0] = larger(select(first_lanes(k), value, splat(-INF)), highest.lane[0]);
            put_some(z + i, value, k);
        });
    return highest.larger_of_all();
}

// Through an fp32 row when there is a mask or a change of dtype, which keeps the number of template instances low.
template <bool LOG, typename In, typename Out>
void forward_row(const In* x, Out* y, int64_t n, int64_t columns, float scale, const Mask& mask, float* scratch) {
    float* z = scratch;
    if constexpr (sizeof(Out) == 4) z = (float*)y;
    V highest = prepare_row(x, z, n, scale, mask);
    finish_row<LOG>(
        y, n, columns, scratch, highest, [z](int64_t i) { return get(z + i); },
        [z](int64_t i, int64_t k) { return get_some(z + i, k); });
}

template <bool LOG, typename T>
void forward_plain_row(const T* x, T* y, int64_t n, int64_t columns, float scale, float* scratch) {
    const V factor = splat(scale);
    Four highest(-FLT_MAX);
    auto z = [&](int64_t i) { return get(x + i) * factor; };
    auto z_some = [&](int64_t i, int64_t k) { return get_some(x + i, k) * factor; };
    walk_by_four(
        n,
        [&](int64_t i, int lane) {
            const Pair value = product(get_two<best_order<T>>(x + i), factor);
            highest.lane[lane] = larger(value.a, highest.lane[lane]);
            highest.lane[lane + 1] = larger(value.b, highest.lane[lane + 1]);
        },
        [&](int64_t i, int64_t k) {
            highest.lane[0] = larger(select(first_lanes(k), z_some(i, k), splat(-INF)), highest.lane[0]);
        });
    finish_row<LOG>(y, n, columns, scratch, highest.larger_of_all(), z, z_some);
}

template <bool LOG> inline V gradient(V dy, V y, V total, V factor) {
    if constexpr (LOG) return unless_constant(y, (dy - exp_negative(y) * total) * factor);
    else return y * (dy - total) * factor;
}

constexpr int FOUR = 4;  // rows at a time, if they are short
static_assert(FOUR * BLOCK <= 4096, "four rows must fit Scratch::stack");

template <bool LOG> inline V add_product(V g, V p, V sum) {
    if constexpr (LOG) return sum + unless_constant(p, g);
    else return fma(g, p, sum);
}

// The gradient of n columns, of which `total` is the sum over the row. FETCH: rows follow, of which FOUR were summed
// together: eight streams are too many for the hardware to see where they go on.
template <bool LOG, bool FETCH, typename Y, typename X>
inline void backward_columns(const Y* dy, const Y* y, X* dx, int64_t n, float total, float scale) {
    constexpr Order O = best_order<Y, X>;
    const V whole = splat(total), factor = splat(scale);
    walk_by_two(
        n,
        [&](int64_t i) {
            const Pair g = get_two<O>(dy + i), p = get_two<O>(y + i);
            if (FETCH) {
                __builtin_prefetch(dy + 2 * FOUR * n + i);
                __builtin_prefetch(y + 2 * FOUR * n + i);
            }
            put_two<O>(dx + i, {gradient<LOG>(g.a, p.a, whole, factor), gradient<LOG>(g.b, p.b, whole, factor)});
        },
        [&](int64_t i, int64_t k) {
            put_some(dx + i, gradient<LOG>(get_some(dy + i, k), get_some(y + i, k), whole, factor), k);
        });
}

template <bool LOG, typename Y, typename X>
void backward_row(const Y* dy, const Y* y, X* dx, int64_t n, int64_t columns, float scale) {
    constexpr Order O = best_order<Y>;
    double total = 0.0;
    blocks(n, [&](int64_t begin, int64_t count) {
        Four sum(0.0f);
        const Y *from_dy = dy + begin, *from_y = y + begin;
        walk_by_four(
            count,
            [&](int64_t i, int lane) {
                const Pair g = get_two<O>(from_dy + i), p = get_two<O>(from_y + i);
                sum.lane[lane] = add_product<LOG>(g.a, p.a, sum.lane[lane]);
                sum.lane[lane + 1] = add_product<LOG>(g.b, p.b, sum.lane[lane + 1]);
            },
            [&](int64_t i, int64_t k) {
                sum.lane[0] = add_product<LOG>(get_some(from_dy + i, k), get_some(from_y + i, k), sum.lane[0]);
            });
        total += sum_lanes(sum.sum_of_all());
    });
    backward_columns<LOG, false>(dy, y, dx, n, float(total), scale);
    fill(dx + n, columns - n, 0.0f);
}

// FOUR rows side by side that follow one another, whole and no longer than a block: while one row's sum is on its way
// across the lanes, the others go on.
template <bool LOG, typename T>
void forward_four_rows(const T* x, T* y, int64_t n, float scale, float* scratch) {
    float* e = sizeof(T) == 4 ? (float*)y : scratch;
    const V factor = splat(scale);
    V m[FOUR], sum[FOUR], last[FOUR];
    for (int r = 0; r < FOUR; ++r) m[r] = splat(-FLT_MAX), sum[r] = V{};
    walk(
        n,
        [&](int64_t i) {
            for (int r = 0; r < FOUR; ++r) m[r] = larger(get(x + r * n + i) * factor, m[r]);
        },
        [&](int64_t i, int64_t k) {
            for (int r = 0; r < FOUR; ++r) {
                V z = get_some(x + r * n + i, k) * factor;
                m[r] = larger(select(first_lanes(k), z, splat(-INF)), m[r]);
            }
        });
    for (int r = 0; r < FOUR; ++r) m[r] = splat(max_lanes(m[r]));
    for (int r = 0; r < FOUR; ++r)
        walk(
            n,
            [&](int64_t i) {
                V value = exp_negative(get(x + r * n + i) * factor - m[r]);
                sum[r] += value;
                if constexpr (!LOG) put(e + r * n + i, value);
            },
            [&](int64_t i, int64_t k) {
                V value = exp_negative(get_some(x + r * n + i, k) * factor - m[r]);
                value = (V)((I)value & first_lanes(k));
                sum[r] += value;
                if constexpr (!LOG) put_some(e + r * n + i, value, k);
            });
    float total[FOUR];
    for (int r = 0; r < FOUR; ++r) {
        total[r] = sum_lanes(sum[r]);
        if (total[r] == 0.0f) total[r] = 1.0f;  // asking total > 0 instead would hide a NaN
    }
    for (int r = 0; r < FOUR; ++r) last[r] = splat(LOG ? std::log(total[r]) : 1.0f / total[r]);
    for (int r = 0; r < FOUR; ++r)
        walk(
            n,
            [&](int64_t i) {
                if constexpr (LOG) put(y + r * n + i, (get(x + r * n + i) * factor - m[r]) - last[r]);
                else put(y + r * n + i, get(e + r * n + i) * last[r]);
            },
            [&](int64_t i, int64_t k) {
                if constexpr (LOG) put_some(y + r * n + i, (get_some(x + r * n + i, k) * factor - m[r]) - last[r], k);
                else put_some(y + r * n + i, get_some(e + r * n + i, k) * last[r], k);
            });
}

template <bool LOG, typename Y, typename X>
void backward_four_rows(const Y* dy, const Y* y, X* dx, int64_t n, float scale) {
    constexpr Order O = best_order<Y>;
    Pair sum[FOUR]{};
    walk_by_two(
        n,
        [&](int64_t i) {
            for (int r = 0; r < FOUR; ++r) {
                const Pair g = get_two<O>(dy + r * n + i), p = get_two<O>(y + r * n + i);
                sum[r] = {add_product<LOG>(g.a, p.a, sum[r].a), add_product<LOG>(g.b, p.b, sum[r].b)};
            }
        },
        [&](int64_t i, int64_t k) {
            for (int r = 0; r < FOUR; ++r)
                sum[r].a = add_product<LOG>(get_some(dy + r * n + i, k), get_some(y + r * n + i, k), sum[r].a);
        });
    float total[FOUR];
    for (int r = 0; r < FOUR; ++r) total[r] = sum_lanes(sum[r].a + sum[r].b);
    for (int r = 0; r < FOUR; ++r) backward_columns<LOG, true>(dy + r * n, y + r * n, dx + r * n, n, total[r], scale);
}

// ---------------------------------------------------- one strip of columns, for a dimension that is not the last one
// COUNT vectors side by side, `stride` elements from one element of the sum to the next; k < W lanes if COUNT is 1.

template <int COUNT, typename T> struct Strip {
    const T* base;
    int64_t stride, k;
    V at(int64_t i, int c) const {
        const T* from = base + i * stride + c * W;
        return COUNT == 1 && k < W ? get_some(from, k) : get(from);
    }
};
template <int COUNT, typename T> inline void put_strip(T* base, int64_t stride, int64_t k, int64_t i, int c, V value) {
    T* to = base + i * stride + c * W;
    if (COUNT == 1 && k < W) put_some(to, value, k);
    else put(to, value);
}

template <int COUNT, bool LOG, typename T>
void forward_strip(const T* x, T* y, int64_t n, int64_t stride, int64_t k, float scale) {
    const Strip<COUNT, T> in{x, stride, k};
    const V factor = splat(scale), one = splat(1.0f);
    V m[COUNT], s[COUNT], block[COUNT];
    for (int c = 0; c < COUNT; ++c) m[c] = splat(-FLT_MAX), s[c] = V{}, block[c] = V{};
    for (int64_t i = 0; i < n; ++i)
        for (int c = 0; c < COUNT; ++c) m[c] = larger(in.at(i, c) * factor, m[c]);
    for (int64_t begin = 0; begin < n; begin += 256) {
        const int64_t end = begin + 256 < n ? begin + 256 : n;
        for (int64_t i = begin; i < end; ++i)
            for (int c = 0; c < COUNT; ++c) block[c] += exp_negative(in.at(i, c) * factor - m[c]);
        for (int c = 0; c < COUNT; ++c) s[c] += block[c], block[c] = V{};
    }
    for (int c = 0; c < COUNT; ++c) {
        s[c] = select(s[c] == V{}, one, s[c]);
        if constexpr (LOG) {
            for (int i = 0; i < W; ++i) s[c][i] = std::log(s[c][i]);
        } else {
            s[c] = one / s[c];
        }
    }
    for (int64_t i = 0; i < n; ++i)
        for (int c = 0; c < COUNT; ++c) {
            V z = in.at(i, c) * factor - m[c];
            put_strip<COUNT>(y, stride, k, i, c, LOG ? z - s[c] : exp_negative(z) * s[c]);
        }
}

template <int COUNT, bool LOG, typename T>
void backward_strip(const T* dy, const T* y, T* dx, int64_t n, int64_t stride, int64_t k, float scale) {
    const Strip<COUNT, T> gradient{dy, stride, k}, output{y, stride, k};
    const V factor = splat(scale);
    V s[COUNT], block[COUNT];
    for (int c = 0; c < COUNT; ++c) s[c] = V{}, block[c] = V{};
    for (int64_t begin = 0; begin < n; begin += 256) {
        const int64_t end = begin + 256 < n ? begin + 256 : n;
        for (int64_t i = begin; i < end; ++i)
            for (int c = 0; c < COUNT; ++c) {
                V g = gradient.at(i, c), p = output.at(i, c);
                if constexpr (LOG) block[c] += unless_constant(p, g);
                else block[c] = fma(g, p, block[c]);
            }
        for (int c = 0; c < COUNT; ++c) s[c] += block[c], block[c] = V{};
    }
    for (int64_t i = 0; i < n; ++i)
        for (int c = 0; c < COUNT; ++c) {
            V g = gradient.at(i, c), p = output.at(i, c), value;
            if constexpr (LOG) value = unless_constant(p, g - exp_negative(p) * s[c]);
            else value = p * (g - s[c]);
            put_strip<COUNT>(dx, stride, k, i, c, value * factor);
        }
}

// ---------------------------------------------------------------------------------------------------- all of a tensor

// What cpu.py fills in: rows numbered over three dimensions, strides in elements.
struct Geometry {
    int64_t sizes[3], columns;
    int64_t x_strides[3], mask_strides[3], mask_column;
    int64_t queries;  // rows of one causal matrix; 0: not causal

    int64_t rows() const { return sizes[0] * sizes[1] * sizes[2]; }
    int64_t offset(const int64_t* strides, int64_t row) const {
        if (row < sizes[2]) return row * strides[2];
        const int64_t c = row % sizes[2], ab = row / sizes[2];
        return c * strides[2] + (ab % sizes[1]) * strides[1] + (ab / sizes[1]) * strides[0];
    }
    int64_t kept(int64_t row) const {
        if (!queries) return columns;
        const int64_t last = row % queries + 1;
        return last < columns ? last : columns;
    }
};

// Call work(begin, end) on pieces of [0, n), each of about 32K elements, on several threads.
template <typename Work> inline void spread(int64_t n, int64_t elements_each, int32_t threads, Work&& work) {
    int64_t piece = 32768 / (elements_each > 0 ? elements_each : 1);
    piece = piece < 1 ? 1 : piece;
    const int64_t pieces = (n + piece - 1) / piece;
    if (pieces == 1 || threads <= 1) return work(int64_t(0), n);  // a parallel region of one thread takes its time
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t p = 0; p < pieces; ++p) work(p * piece, p * piece + piece < n ? p * piece + piece : n);
}

inline int64_t element_size(int32_t kind) { return kind == MASK_BOOL ? 1 : kind == MASK_F32 ? 4 : 2; }

// Room for one row in fp32, on the stack where it fits.
struct Scratch {
    alignas(64) float stack[4096];
    std::unique_ptr<float[]> heap;
    float* row(int64_t columns) {
        if (columns <= 4096) return stack;
        if (!heap) heap.reset(new float[size_t(columns)]);
        return heap.get();
    }
};

template <bool LOG, typename In, typename Out>
void forward(const In* x, Out* y, const char* mask, int32_t kind, const Geometry& g, float scale, int32_t threads) {
    spread(g.rows(), g.columns, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch;
        float* z = sizeof(Out) == 4 ? nullptr : scratch.row(g.columns);
        int64_t row = begin;
        if constexpr (std::is_same_v<In, Out>) {
            const bool packed = g.sizes[0] * g.sizes[1] == 1 && g.x_strides[2] == g.columns;
            if (!mask && !g.queries && packed && g.columns <= BLOCK) {  // four of them fit the stack's scratch
                for (; row + FOUR <= end; row += FOUR)
                    forward_four_rows<LOG>(x + row * g.columns, y + row * g.columns, g.columns, scale, z);
            }
        }
        for (; row < end; ++row) {
            const In* from = x + g.offset(g.x_strides, row);
            Out* to = y + row * g.columns;
            if constexpr (std::is_same_v<In, Out>) {
                if (!mask) {
                    forward_plain_row<LOG>(from, to, g.kept(row), g.columns, scale, z);
                    continue;
                }
            }
            Mask row_mask{MaskKind(kind), g.mask_column, mask};
            if (mask) row_mask.row += g.offset(g.mask_strides, row) * element_size(kind);
            forward_row<LOG>(from, to, g.kept(row), g.columns, scale, row_mask, z);
        }
    });
}

template <bool LOG, typename Y, typename X>
void backward(const Y* dy, const Y* y, X* dx, const Geometry& g, float scale, int32_t threads) {
    spread(g.rows(), g.columns, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch;
        int64_t row = begin;
        if constexpr (sizeof(X) == 4 || std::is_same_v<X, Y>) {
            // In fp32, four longer rows are too many streams: at 1,000 columns they took 1.45 times as long as one by one.
            if (!g.queries && g.columns <= (sizeof(Y) == 4 ? 127 : BLOCK)) {
                for (; row + FOUR <= end; row += FOUR) {
                    const int64_t at = row * g.columns;
                    backward_four_rows<LOG>(dy + at, y + at, dx + at, g.columns, scale);
                }
            }
        }
        for (; row < end; ++row) {
            const int64_t at = row * g.columns, n = g.kept(row);
            if constexpr (sizeof(X) == 4 || std::is_same_v<X, Y>) {
                backward_row<LOG>(dy + at, y + at, dx + at, n, g.columns, scale);
            } else {
                float* result = scratch.row(g.columns);
                backward_row<LOG>(dy + at, y + at, result, n, g.columns, scale);
                walk(
                    g.columns, [&](int64_t i) { put(dx + at + i, get(result + i)); },
                    [&](int64_t i, int64_t k) { put_some(dx + at + i, get_some(result + i, k), k); });
            }
        }
    });
}

// Call f(T{}) where T is std::true_type for a true flag.
template <typename F> inline void with_flag(int32_t flag, F&& f) {
    if (flag) f(std::true_type{});
    else f(std::false_type{});
}

// Walk the strips of a contiguous (outer, n, inner) tensor: call wide(offset) for 4 vectors, one(offset, k) for the rest.
template <typename Wide, typename One>
inline void spread_strips(int64_t outer, int64_t n, int64_t inner, int32_t threads, Wide&& wide, One&& one) {
    const int64_t strips = (inner + 4 * W - 1) / (4 * W);
    spread(outer * strips, n * (inner < 4 * W ? inner : 4 * W), threads, [&](int64_t begin, int64_t end) {
        for (int64_t strip = begin; strip < end; ++strip) {
            const int64_t column = (strip % strips) * 4 * W, base = (strip / strips) * n * inner;
            if (column + 4 * W <= inner) wide(base + column);
            else for (int64_t c = column; c < inner; c += W) one(base + c, inner - c < W ? inner - c : W);
        }
    });
}

}  // namespace

extern "C" {

// x_dtype, y_dtype: codes of native.h. mask_kind: -1 none, 0 to 2 a dtype code, 3 boolean.
void halfstep_softmax(const void* x, const void* mask, void* y, const Geometry* geometry, float scale, int32_t log,
                      int32_t x_dtype, int32_t y_dtype, int32_t mask_kind, int32_t threads) {
    with_flag(log, [&](auto is_log) {
        with_dtype(x_dtype, [&](auto* in) {
            with_dtype(y_dtype, [&](auto* out) {
                forward<decltype(is_log)::value>(
                    (decltype(in))x, (decltype(out))y, (const char*)mask, mask_kind, *geometry, scale, threads);
            });
        });
    });
}

// Contiguous x and y, without a mask.
void halfstep_softmax_rows(const void* x, void* y, int64_t rows, int64_t columns, int64_t queries, float scale,
                           int32_t log, int32_t x_dtype, int32_t y_dtype, int32_t threads) {
    const Geometry geometry{{1, 1, rows}, columns, {0, 0, columns}, {}, 0, queries};
    halfstep_softmax(x, nullptr, y, &geometry, scale, log, x_dtype, y_dtype, NO_MASK, threads);
}

// Contiguous dy, y and dx.
void halfstep_softmax_backward(const void* dy, const void* y, void* dx, int64_t rows, int64_t columns, int64_t queries,
                               float scale, int32_t log, int32_t y_dtype, int32_t x_dtype, int32_t threads) {
    const Geometry g{{1, 1, rows}, columns, {}, {}, 0, queries};
    with_flag(log, [&](auto is_log) {
        with_dtype(y_dtype, [&](auto* in) {
            with_dtype(x_dtype, [&](auto* out) {
                backward<decltype(is_log)::value>(
                    (decltype(in))dy, (decltype(in))y, (decltype(out))dx, g, scale, threads);
            });
        });
    });
}

// Over the middle dimension of contiguous (outer, n, inner) tensors of one dtype, without masks.
void halfstep_softmax_strided(const void* x, void* y, int64_t outer, int64_t n, int64_t inner, float scale, int32_t log,
                              int32_t dtype, int32_t threads) {
    with_flag(log, [&](auto is_log) {
        constexpr bool LOG = decltype(is_log)::value;
        with_dtype(dtype, [&](auto* type) {
            auto from = (decltype(type))x, to = (decltype(type))y;
            spread_strips(
                outer, n, inner, threads,
                [&](int64_t at) { forward_strip<4, LOG>(from + at, to + at, n, inner, W, scale); },
                [&](int64_t at, int64_t k) { forward_strip<1, LOG>(from + at, to + at, n, inner, k, scale); });
        });
    });
}

void halfstep_softmax_strided_backward(const void* dy, const void* y, void* dx, int64_t outer, int64_t n, int64_t inner,
                                       float scale, int32_t log, int32_t dtype, int32_t threads) {
    with_flag(log, [&](auto is_log) {
        constexpr bool LOG = decltype(is_log)::value;
        with_dtype(dtype, [&](auto* type) {
            auto g = (decltype(type))dy, p = (decltype(type))y, to = (decltype(type))dx;
            spread_strips(
                outer, n, inner, threads,
                [&](int64_t at) { backward_strip<4, LOG>(g + at, p + at, to + at, n, inner, W, scale); },
                [&](int64_t at, int64_t k) { backward_strip<1, LOG>(g + at, p + at, to + at, n, inner, k, scale); });
        });
    });
}

}  // extern "C"

HALFSTEP_PACKED(halfstep_softmax)
HALFSTEP_PACKED(halfstep_softmax_rows)
HALFSTEP_PACKED(halfstep_softmax_backward)
HALFSTEP_PACKED(halfstep_softmax_strided)
HALFSTEP_PACKED(halfstep_softmax_strided_backward)
