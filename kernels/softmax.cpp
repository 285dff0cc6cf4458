// Exact softmax and log-probabilities of rows on the CPU. The results have the bits of kernels/softmax/rule.py and
// kernels/log_probabilities/rule.py, which describe the arithmetic and the order of sums.
#include "exponential.h"
#include <cstdlib>
#include <limits>
#include <memory>

using namespace halfstep;

namespace {

constexpr int64_t GROUP = 2048, CHUNK = 1024;
constexpr int64_t FEW_ELEMENTS = 32768;  // are worth one thread only
constexpr float INF = std::numeric_limits<float>::infinity(), LOWEST = std::numeric_limits<float>::lowest();
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t NO_MASK = -1, BOOLEAN = -2;  // beside the codes of native.h

// ---------------------------------------------------------------------------------------------------- parts of a row

inline int64_t less(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t size_of(int32_t dtype) { return dtype == BOOLEAN ? 1 : dtype == F32 ? 4 : 2; }

// Memory for so many numbers, at least, and the rest of their last vector.
struct Numbers {
    std::unique_ptr<float, decltype(&std::free)> memory;
    explicit Numbers(int64_t n) : memory((float*)std::aligned_alloc(64, size_t(n / 16 + 1) * 64), &std::free) {}
    float* get() { return memory.get(); }
};

// The lanes of a vector joined, the upper half with the lower half until one is left.
template <int LANES, typename Join> HALFSTEP_INLINE float joined(const float* lanes, Join&& join) {
    if constexpr (LANES == 1) {
        return lanes[0];
    } else {
        float half[LANES / 2];
        for (int i = 0; i < LANES / 2; ++i) half[i] = join(lanes[i], lanes[i + LANES / 2]);
        return joined<LANES / 2>(half, join);
    }
}
HALFSTEP_INLINE float largest(V x) {
    float lanes[W];
    put(lanes, x);
    return joined<W>(lanes, [](float a, float b) { return a > b ? a : b; });
}

// The sum of so many numbers, a power of two and W or more, in halves.
HALFSTEP_INLINE float sum_of_halves(float* numbers, int64_t count) {
    for (int64_t half = count / 2; half >= W; half /= 2)
        for (int64_t i = 0; i < half; i += W) put(numbers + i, get(numbers + i) + get(numbers + i + half));
    return joined<W>(numbers, [](float a, float b) { return a + b; });
}
// The sums of four columns, `near` and three quarters less `near` apart, of terms(i, k): the vector of columns from i on, of
// which k are inside. Terms beyond n are 0.
template <typename Terms>
HALFSTEP_INLINE void sum_quarters(int64_t n, int64_t quarter, int64_t near, float* sums, Terms&& terms) {
    const int64_t far = 3 * quarter - near;
    const auto each = [&](auto&& at) {
        for (int64_t i = 0; i < quarter; i += W) put(sums + i, (at(i) + at(i + near)) + (at(i + far) + at(i + far + near)));
    };
    if (n == 4 * quarter) each([&](int64_t i) { return terms(i, W); });
    else each([&](int64_t i) { return i < n ? terms(i, less(n - i, W)) : V{}; });
}
// The sum of terms as `folded` of softmax/rule.py has it.
template <typename Terms> inline float folded(int64_t n, Terms&& terms) {
    alignas(64) float sums[2 * GROUP / 4];  // a row has up to 4,096 groups
    int64_t quarter = W;
    while (4 * quarter < n) quarter *= 2;
    sum_quarters(n, quarter, 2 * quarter, sums, terms);
    return sum_of_halves(sums, quarter) + 0.0f;
}
// The same in the order of `chunk_sum` of log_probabilities/rule.py.
template <typename Terms> inline float chunk_sum(int64_t n, Terms&& terms) {
    constexpr int64_t quarter = CHUNK / 4;
    alignas(64) float sums[quarter];
    sum_quarters(n, quarter, quarter, sums, terms);
    for (int64_t left = quarter / 2; left >= quarter / 8; left /= 2)
        for (int64_t i = 0; i < left; i += W) put(sums + i, neighbours(get(sums + 2 * i), get(sums + 2 * i + W)));
    return sum_of_halves(sums, quarter / 8);
}

// k elements of a mask, `stride` elements apart, which have a vector each.
template <typename M> HALFSTEP_INLINE V masked(V z, const M* mask, int64_t stride, int64_t k) {
    M row[W] = {};
    if (stride != 1 || k < W) {
        for (int64_t i = 0; i < k; ++i) row[i] = mask[i * stride];
        mask = row;
    }
    if constexpr (std::is_same_v<M, uint8_t>) return select((I)(get_bytes(mask) != 0), z, splat(-INF));
    else return z + get(mask);
}
// z of n columns, filled up with -inf to a whole vector. Returns the maximum, NaN left out: their sums are NaN.
template <typename T, typename M>
float logits(const void* x, const void* mask, int64_t stride, float scale, float* z, int64_t n) {
    const T* from = (const T*)x;
    const M* keep = (const M*)mask;
    V top = splat(LOWEST);
    const auto step = [&](int64_t i, V v, int64_t k) {
        v *= splat(scale);
        if constexpr (!std::is_same_v<M, void>) v = masked(v, keep + i * stride, stride, k);
        if (k < W) v = select(first_lanes(k), v, splat(-INF));
        put(z + i, v);
        top = larger(v, top);
    };
    walk(n, [&](int64_t i) { step(i, get(from + i), W); },
         [&](int64_t i, int64_t k) { step(i, get_some(from + i, k), k); });
    return largest(top);
}
using Logits = float (*)(const void*, const void*, int64_t, float, float*, int64_t);
Logits choose_logits(int32_t dtype, int32_t mask) {
    Logits chosen = nullptr;
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        if (mask == NO_MASK) chosen = logits<T, void>;
        else if (mask == BOOLEAN) chosen = logits<T, uint8_t>;
        else with_dtype(mask, [&](auto* add) { chosen = logits<T, std::remove_pointer_t<decltype(add)>>; });
    });
    return chosen;
}

// exp(z - top) into e, and its sum.
template <bool PRECISE> float exponentials(const float* z, float top, float* e, int64_t n) {
    return folded(n, [=](int64_t i, int64_t) {
        const V x = exponential<PRECISE>(get(z + i) - splat(top));
        put(e + i, x);
        return x;
    });
}
// The sum of groups, relative to their common maximum.
template <bool PRECISE> float sum_of_groups(const float* sums, const float* tops, float top, float* weights, int64_t n) {
    return folded(n, [=](int64_t i, int64_t k) {
        const V weight = exponential<PRECISE>(get_some(tops + i, k) - splat(top));
        put_some(weights + i, weight, k);
        return select(first_lanes(k), get_some(sums + i, k) * weight, V{});
    });
}

// (z - top) - norm, or e * norm, to y.
template <typename T, bool LOG> void write(const float* from, float top, float norm, void* y, int64_t n) {
    const auto value = [=](int64_t i) {
        return LOG ? (get(from + i) - splat(top)) - splat(norm) : get(from + i) * splat(norm);
    };
    walk(n, [=](int64_t i) { put((T*)y + i, value(i)); },
         [=](int64_t i, int64_t k) { put_some((T*)y + i, value(i), k); });
}
template <typename T> void fill(float value, T* y, int64_t n) {
    walk(n, [=](int64_t i) { put(y + i, splat(value)); }, [=](int64_t i, int64_t k) { put_some(y + i, splat(value), k); });
}

// ------------------------------------------------------------------------------------------------------------ softmax

template <typename In, typename Out, bool LOG>
void gradient_row(const In* dy, const In* y, Out* dx, float scale, float* sums, int64_t columns, int64_t keep) {
    constexpr bool PRECISE = std::is_same_v<Out, float>;
    for (int64_t begin = 0; begin < keep; begin += GROUP)
        sums[begin / GROUP] = folded(less(keep - begin, GROUP), [=](int64_t i, int64_t k) {
            const V grad = get_some(dy + begin + i, k), p = get_some(y + begin + i, k);
            return LOG ? select(p != splat(-INF), grad, V{}) : grad * p;
        });
    const auto of_groups = [=](int64_t i, int64_t k) { return get_some(sums + i, k); };
    const V total = splat(keep <= GROUP ? sums[0] : folded((keep + GROUP - 1) / GROUP, of_groups));
    const auto value = [=](V grad, V p) {
        const V result = (LOG ? grad - exponential<PRECISE>(p) * total : p * (grad - total)) * splat(scale) + V{};
        return LOG ? select(p != splat(-INF), result, V{}) : result;
    };
    walk(keep, [=](int64_t i) { put(dx + i, value(get(dy + i), get(y + i))); },
         [=](int64_t i, int64_t k) { put_some(dx + i, value(get_some(dy + i, k), get_some(y + i, k)), k); });
    fill(0.0f, dx + keep, columns - keep);
}

// Give each thread a range of rows: work(first, last).
template <typename Work> void share_rows(int64_t rows, int64_t columns, int32_t threads, Work&& work) {
    const int64_t parts = rows * columns < FEW_ELEMENTS ? 1 : less(rows, threads);
    spread_evenly(parts, 2, threads, [&](int64_t part) { work(rows * part / parts, rows * (part + 1) / parts); });
}
inline int64_t kept(int64_t row, int64_t columns, int64_t queries) {
    return queries ? less(columns, row % queries + 1) : columns;
}

}  // namespace

// Rows of x, of which `layout` has three sizes, then the strides of x and those of the mask, over these and the columns.
// y is contiguous. `queries`: rows of one causal matrix, 0 for none.
extern "C" void halfstep_softmax(const void* x, const void* mask, void* y, const int64_t* layout, int64_t columns,
                                 int64_t queries, float scale, int32_t x_dtype, int32_t mask_dtype, int32_t y_dtype,
                                 int32_t log, int32_t threads) {
    const Logits read = choose_logits(x_dtype, mask_dtype);
    const int64_t groups = (columns + GROUP - 1) / GROUP;
    const auto offset = [&](int64_t row, const int64_t* strides) {
        const int64_t inner = row / layout[2];
        return inner / layout[1] * strides[0] + inner % layout[1] * strides[1] + row % layout[2] * strides[2];
    };
    const bool precise = y_dtype == F32;
    const auto exponentials_of = precise ? exponentials<true> : exponentials<false>;
    const auto sum = precise ? sum_of_groups<true> : sum_of_groups<false>;
    with_dtype(y_dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const auto write_group = log ? write<T, true> : write<T, false>;
        share_rows(layout[0] * layout[1] * layout[2], columns, threads, [&](int64_t first, int64_t last) {
            Numbers of_row(columns + W), of_groups(3 * groups), scratch(GROUP);
            float *z = of_row.get(), *tops = of_groups.get(), *sums = tops + groups, *weights = sums + groups;
            for (int64_t row = first; row < last; ++row) {
                const int64_t keep = kept(row, columns, queries), used = (keep + GROUP - 1) / GROUP;
                const char* from = (const char*)x + offset(row, layout + 3) * size_of(x_dtype);
                const char* masks = (const char*)mask;
                if (mask_dtype != NO_MASK) masks += offset(row, layout + 7) * size_of(mask_dtype);
                float top = LOWEST;
                for (int64_t g = 0; g < used; ++g) {
                    const int64_t begin = g * GROUP, n = less(keep - begin, GROUP);
                    const char* of_group = masks;
                    if (mask_dtype != NO_MASK) of_group += begin * layout[10] * size_of(mask_dtype);
                    tops[g] = read(from + begin * size_of(x_dtype), of_group, layout[10], scale, z + begin, n);
                    sums[g] = exponentials_of(z + begin, tops[g], log ? scratch.get() : z + begin, n);
                    top = tops[g] > top ? tops[g] : top;
                }
                weights[0] = 1.0f;
                float total = used == 1 ? sums[0] : sum(sums, tops, top, weights, used);
                total = total == 0.0f ? 1.0f : total;  // asking total > 0 instead would hide a NaN
                const float log_sum = log ? logarithm(total) : 0.0f;
                T* to = (T*)y + row * columns;
                for (int64_t g = 0; g < used; ++g) {
                    const float norm = log ? log_sum : weights[g] / total;
                    write_group(z + g * GROUP, top, norm, to + g * GROUP, less(keep - g * GROUP, GROUP));
                }
                fill(total != total ? total : log ? -INF : 0.0f, to + keep, columns - keep);
            }
        });
    });
}

// The derivative of contiguous rows.
extern "C" void halfstep_softmax_backward(const void* grad, const void* y, void* dx, int64_t rows, int64_t columns,
                                          int64_t queries, float scale, int32_t dtype, int32_t dx_dtype, int32_t log,
                                          int32_t threads) {
    with_dtype(dtype, [&](auto* in) {
        with_dtype(dx_dtype, [&](auto* out) {
            using In = std::remove_pointer_t<decltype(in)>;
            using Out = std::remove_pointer_t<decltype(out)>;
            const auto one = log ? gradient_row<In, Out, true> : gradient_row<In, Out, false>;
            share_rows(rows, columns, threads, [&](int64_t first, int64_t last) {
                Numbers sums((columns + GROUP - 1) / GROUP);
                for (int64_t row = first; row < last; ++row) {
                    const int64_t at = row * columns;
                    one((const In*)grad + at, (const In*)y + at, (Out*)dx + at, scale, sums.get(), columns,
                        kept(row, columns, queries));
                }
            });
        });
    });
}

// -------------------------------------------------------------------------------------------------- log-probabilities

// What the launches of log_probabilities/cpu.py have in common.
struct Statistics {
    int64_t rows, columns, ignore_index, inner, x_a, x_b, dx_a, dx_b, dtype, entropy, mean, threads;
};
inline int64_t row_offset(int64_t row, int64_t inner, int64_t a, int64_t b) { return row / inner * a + row % inner * b; }

// The six numbers of each row.
extern "C" void halfstep_log_probabilities(const void* logits, const int64_t* targets, float* results,
                                           const void* statistics, float scale) {
    const Statistics of = *(const Statistics*)statistics;
    const Logits read = choose_logits(int32_t(of.dtype), NO_MASK);
    const int64_t chunks = (of.columns + CHUNK - 1) / CHUNK, size = size_of(int32_t(of.dtype));
    share_rows(of.rows, of.columns, int32_t(of.threads), [&](int64_t first, int64_t last) {
        Numbers z_of_chunk(CHUNK), e_of_chunk(CHUNK), of_chunks(5 * chunks);
        float *z = z_of_chunk.get(), *e = e_of_chunk.get(), *tops = of_chunks.get(), *sums = tops + chunks;
        float *moments = sums + chunks, *means = moments + chunks, *sizes = means + chunks;
        for (int64_t row = first; row < last; ++row) {
            const int64_t target = targets[row];
            const char* x = (const char*)logits + row_offset(row, of.inner, of.x_a, of.x_b) * size;
            float result[6] = {}, highest = LOWEST;
            for (int64_t c = 0; c < (target == of.ignore_index ? 0 : chunks); ++c) {
                const int64_t n = less(of.columns - c * CHUNK, CHUNK);
                tops[c] = read(x + c * CHUNK * size, nullptr, 0, scale, z, n);
                sizes[c] = float(n);
                highest = tops[c] > highest ? tops[c] : highest;
                const V top = splat(tops[c]);
                sums[c] = chunk_sum(n, [=](int64_t i, int64_t) {
                    const V x = exponential<false>(get(z + i) - top);
                    put(e + i, x);
                    return x;
                });
                if (of.entropy)
                    moments[c] = chunk_sum(
                        n, [=](int64_t i, int64_t) { return get(e + i) * larger(splat(LOWEST), get(z + i) - top); });
                if (of.mean)
                    means[c] = chunk_sum(
                        n, [=](int64_t i, int64_t k) { return select(first_lanes(k), get(z + i) - top, V{}); });
            }
            const auto over_chunks = [&](auto&& terms) {
                const auto at = [&](int64_t i, int64_t k) {
                    const auto some = [=](const float* numbers) { return get_some(numbers + i, k); };
                    const V offset = some(tops) - splat(highest);
                    return select(first_lanes(k), terms(some, offset, exponential<false>(offset)), V{});
                };
                if (chunks == 1) return at(0, 1)[0];
                float total = 0.0f;
                for (int64_t begin = 0; begin < chunks; begin += CHUNK)
                    total += chunk_sum(less(chunks - begin, CHUNK), [&](int64_t i, int64_t k) { return at(begin + i, k); });
                return total;
            };
            if (target != of.ignore_index) {
                float total = over_chunks([&](auto some, V, V w) { return w * some(sums); });
                const bool nothing = total == 0.0f;
                const float top = total != total ? total : highest;
                total = nothing ? 1.0f : total;
                const float log_sum = logarithm(total);
                const bool valid = target >= 0 && target < of.columns;
                if (valid) read(x + target * size, nullptr, 0, scale, z, 1);
                result[0] = valid ? (z[0] - top) - log_sum : NOT_A_NUMBER;
                result[1] = nothing ? -INF : top + log_sum;
                result[2] = top;
                result[3] = log_sum;
                if (of.entropy)
                    result[4] = log_sum - over_chunks([&](auto some, V offset, V w) {
                        return select(w == V{}, V{}, w * (some(moments) + offset * some(sums)));
                    }) / total;
                if (of.mean)
                    result[5] = over_chunks([&](auto some, V offset, V) {
                        return some(means) + some(sizes) * offset;
                    }) / float(of.columns) - log_sum;
            }
            for (int i = 0; i < 6; ++i) results[i * of.rows + row] = result[i];
        }
    });
}

// The gradient of the logits, which may be written over them.
extern "C" void halfstep_log_probabilities_backward(const float* grads, const void* logits, const int64_t* targets,
                                                    const float* results, void* dx, const void* statistics, float scale) {
    const Statistics of = *(const Statistics*)statistics;
    with_dtype(int32_t(of.dtype), [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        share_rows(of.rows, of.columns, int32_t(of.threads), [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row) {
                const int64_t target = targets[row];
                const T* from = (const T*)logits + row_offset(row, of.inner, of.x_a, of.x_b);
                T* to = (T*)dx + row_offset(row, of.inner, of.dx_a, of.dx_b);
                if (target == of.ignore_index) {
                    fill(0.0f, to, of.columns);
                    continue;
                }
                const auto result = [&](int which) { return results[which * of.rows + row]; };
                const auto grad = [&](int which, bool constant) {
                    return constant ? 0.0f : grads[which * of.rows + row] * scale;
                };
                const bool nothing = result(1) == -INF;
                const float a = result(0) != result(0) ? result(0) : grad(0, result(0) == -INF);
                const float q = of.mean ? grad(5, result(5) == -INF) : 0.0f;
                const V c = splat(grad(4, nothing)), share = splat(q / float(of.columns)), entropy = splat(result(4));
                float difference = grad(1, nothing) - a;
                if (of.mean) difference -= q;
                const V factor = splat(difference), top = splat(result(2)), log_sum = splat(result(3));
                const auto value = [=](V x, int64_t i) {
                    const V y = (x * splat(scale) - top) - log_sum, p = exponential<false>(y);
                    V v = p * factor;
                    if (of.entropy) v = select(y == splat(-INF), V{}, p * (factor - c * (y + entropy)));
                    if (uint64_t(target - i) < uint64_t(W)) v[target - i] += a;
                    return of.mean ? v + share : v;
                };
                walk(of.columns, [=](int64_t i) { put(to + i, value(get(from + i), i)); },
                     [=](int64_t i, int64_t k) { put_some(to + i, value(get_some(from + i, k), i), k); });
            }
        });
    });
}
