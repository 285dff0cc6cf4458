// Exact softmax, and log-probabilities, of rows on the CPU. The results have the bits of kernels/softmax/rule.py and
// kernels/log_probabilities/rule.py, which describe the arithmetic and the order of sums.
#include "exponential.h"
#include <limits>
#include <vector>

using namespace halfstep;

namespace {

constexpr int64_t GROUP = 2048, CHUNK = 1024;
constexpr int64_t FEW_ELEMENTS = 32768;  // are worth one thread only
constexpr float INF = std::numeric_limits<float>::infinity(), LOWEST = std::numeric_limits<float>::lowest();
constexpr int32_t NO_MASK = -1, BOOLEAN = -2;  // beside the codes of native.h

inline int64_t less(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }
inline int64_t bytes_of(int32_t dtype) { return dtype == BOOLEAN ? 1 : dtype == F32 ? 4 : 2; }

// Room for so many numbers and the rest of their last vector.
struct Numbers {
    struct alignas(64) Line { float numbers[16]; };
    std::vector<Line> lines;
    explicit Numbers(int64_t count) : lines(size_t(count / 16 + 1)) {}
    operator float*() { return lines[0].numbers; }
};

// Give each thread a range of rows: work(row) for each of them, of what make() returns.
template <typename Make> void each_row(int64_t rows, int64_t columns, int64_t threads, Make&& make) {
    const int64_t parts = rows * columns < FEW_ELEMENTS ? 1 : less(rows, threads);
    spread_evenly(parts, 2, int32_t(threads), [&](int64_t part) {
        auto work = make();
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) work(row);
    });
}

// ---------------------------------------------------------------------------------------------------- sums and maxima

// Numbers joined, the upper half with the lower half until one is left.
template <int COUNT = W, typename Join> HALFSTEP_INLINE float joined(const float* numbers, Join&& join) {
    if constexpr (COUNT == 1) {
        return numbers[0];
    } else {
        float half[COUNT / 2];
        for (int i = 0; i < COUNT / 2; ++i) half[i] = join(numbers[i], numbers[i + COUNT / 2]);
        return joined<COUNT / 2>(half, join);
    }
}
// The sum of so many numbers, a power of two and W or more, in halves.
HALFSTEP_INLINE float sum_of_halves(float* numbers, int64_t count) {
    for (int64_t half = count / 2; half >= W; half /= 2)
        for (int64_t i = 0; i < half; i += W) put(numbers + i, get(numbers + i) + get(numbers + i + half));
    return joined(numbers, [](float a, float b) { return a + b; });
}
// The sums of four columns, a quarter apart: those `near` to each other first. terms(i, k) is the vector of columns from i
// on, of which k exist; what is beyond n is 0.
template <typename Terms>
HALFSTEP_INLINE void sum_quarters(int64_t n, int64_t quarter, int64_t near, float* sums, Terms&& terms) {
    const int64_t far = 3 * quarter - near;
    const auto sum = [&](auto&& at) {
        for (int64_t i = 0; i < quarter; i += W) put(sums + i, (at(i) + at(i + near)) + (at(i + far) + at(i + far + near)));
    };
    if (n == 4 * quarter) sum([&](int64_t i) { return terms(i, W); });
    else sum([&](int64_t i) { return i < n ? terms(i, less(n - i, W)) : V{}; });
}
// `folded` of softmax/rule.py.
template <typename Terms> inline float folded(int64_t n, Terms&& terms) {
    alignas(64) float sums[2 * GROUP / 4];  // a row has up to 4,096 groups
    int64_t quarter = W;
    while (4 * quarter < n) quarter *= 2;
    sum_quarters(n, quarter, 2 * quarter, sums, terms);
    return sum_of_halves(sums, quarter) + 0.0f;
}
// `chunk_sum` of log_probabilities/rule.py.
template <typename Terms> inline float chunk_sum(int64_t n, Terms&& terms) {
    constexpr int64_t quarter = CHUNK / 4;
    alignas(64) float sums[quarter];
    sum_quarters(n, quarter, quarter, sums, terms);
    for (int64_t left = quarter / 2; left >= quarter / 8; left /= 2)
        for (int64_t i = 0; i < left; i += W) put(sums + i, neighbours(get(sums + 2 * i), get(sums + 2 * i + W)));
    return sum_of_halves(sums, quarter / 8);
}

// ---------------------------------------------------------------------------------------------------- parts of a row

template <typename M> HALFSTEP_INLINE V masked(V z, const M* mask, int64_t stride, int64_t k) {
    M row[W] = {};
    if (stride != 1 || k < W) {
        for (int64_t i = 0; i < k; ++i) row[i] = mask[i * stride];
        mask = row;
    }
    if constexpr (std::is_same_v<M, uint8_t>) return select((I)(get_bytes(mask) != 0), z, splat(-INF));
    else return z + get(mask);
}
// z of n columns, filled up with -inf to a whole vector. Returns their maximum but for NaN, which the sum will show.
template <typename T, typename M>
float logits(const void* x, const void* mask, int64_t stride, float scale, float* z, int64_t n) {
    V top = splat(LOWEST);
    each_vector(n, [&](int64_t i, int64_t k) {
        V v = get_some((const T*)x + i, k) * splat(scale);
        if constexpr (!std::is_same_v<M, void>) v = masked(v, (const M*)mask + i * stride, stride, k);
        if (k < W) v = select(first_lanes(k), v, splat(-INF));
        put(z + i, v);
        top = larger(v, top);
    });
    float lanes[W];
    put(lanes, top);
    return joined(lanes, [](float a, float b) { return a > b ? a : b; });
}
using Logits = float (*)(const void*, const void*, int64_t, float, float*, int64_t);
Logits choose_logits(int32_t dtype, int32_t mask) {
    Logits chosen = nullptr;
    with_dtype(dtype, [&](auto* x) {
        using T = std::remove_pointer_t<decltype(x)>;
        if (mask == NO_MASK) chosen = logits<T, void>;
        else if (mask == BOOLEAN) chosen = logits<T, uint8_t>;
        else with_dtype(mask, [&](auto* m) { chosen = logits<T, std::remove_pointer_t<decltype(m)>>; });
    });
    return chosen;
}
template <typename T> void fill(float value, T* to, int64_t n) {
    each_vector(n, [=](int64_t i, int64_t k) { put_some(to + i, splat(value), k); });
}

// ------------------------------------------------------------------------------------------------------------ softmax

// exp(z - top) into e, and its sum.
template <bool PRECISE> float exponentials(const float* z, float top, float* e, int64_t n) {
    return folded(n, [=](int64_t i, int64_t) {
        const V x = exponential<PRECISE>(get(z + i) - splat(top));
        put(e + i, x);
        return x;
    });
}
template <bool PRECISE> float sum_of_groups(const float* sums, const float* tops, float top, float* weights, int64_t n) {
    return folded(n, [=](int64_t i, int64_t k) {
        put(weights + i, exponential<PRECISE>(get(tops + i) - splat(top)));
        return select(first_lanes(k), get(sums + i) * get(weights + i), V{});
    });
}
template <typename T, bool LOG> void write(const float* from, float top, float norm, T* y, int64_t n) {
    each_vector(n, [=](int64_t i, int64_t k) {
        const V x = get(from + i);
        put_some(y + i, LOG ? (x - splat(top)) - splat(norm) : x * splat(norm), k);
    });
}
template <typename In, typename Out, bool LOG>
void gradient_row(const In* dy, const In* y, Out* dx, float scale, float* sums, int64_t columns, int64_t keep) {
    for (int64_t begin = 0; begin < keep; begin += GROUP)
        sums[begin / GROUP] = folded(less(keep - begin, GROUP), [=](int64_t i, int64_t k) {
            const V grad = get_some(dy + begin + i, k), p = get_some(y + begin + i, k);
            return LOG ? select(p != splat(-INF), grad, V{}) : grad * p;
        });
    const auto of_groups = [=](int64_t i, int64_t k) { return get_some(sums + i, k); };
    const V total = splat(keep <= GROUP ? sums[0] : folded(parts_of(keep, GROUP), of_groups));
    each_vector(keep, [=](int64_t i, int64_t k) {
        const V grad = get_some(dy + i, k), p = get_some(y + i, k);
        V v = LOG ? grad - exponential<std::is_same_v<Out, float>>(p) * total : p * (grad - total);
        v = v * splat(scale) + V{};
        put_some(dx + i, LOG ? select(p != splat(-INF), v, V{}) : v, k);
    });
    fill(0.0f, dx + keep, columns - keep);
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
    const auto exponentials_of = y_dtype == F32 ? exponentials<true> : exponentials<false>;
    const auto sum = y_dtype == F32 ? sum_of_groups<true> : sum_of_groups<false>;
    const auto offset = [&](int64_t row, const int64_t* strides) {
        const int64_t inner = row / layout[2];
        return inner / layout[1] * strides[0] + inner % layout[1] * strides[1] + row % layout[2] * strides[2];
    };
    const int64_t groups = parts_of(columns, GROUP), mask_step = layout[10] * bytes_of(mask_dtype);
    with_dtype(y_dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const auto write_group = log ? write<T, true> : write<T, false>;
        each_row(layout[0] * layout[1] * layout[2], columns, threads, [&] {
            return [&, z = Numbers(columns), tops = Numbers(groups), sums = Numbers(groups), weights = Numbers(groups),
                    scratch = Numbers(GROUP)](int64_t row) mutable {
                const int64_t keep = kept(row, columns, queries), used = parts_of(keep, GROUP);
                const char* from = (const char*)x + offset(row, layout + 3) * bytes_of(x_dtype);
                const char* masks = (const char*)mask + offset(row, layout + 7) * bytes_of(mask_dtype);
                float top = LOWEST;
                for (int64_t g = 0, begin = 0; g < used; ++g, begin += GROUP) {
                    const int64_t n = less(keep - begin, GROUP);
                    float *here = z + begin, *e = log ? scratch : here;
                    tops[g] = read(from + begin * bytes_of(x_dtype), masks + begin * mask_step, layout[10], scale, here, n);
                    sums[g] = exponentials_of(here, tops[g], e, n);
                    top = tops[g] > top ? tops[g] : top;
                }
                weights[0] = 1.0f;
                float total = used == 1 ? sums[0] : sum(sums, tops, top, weights, used);
                total = total == 0.0f ? 1.0f : total;  // asking total > 0 instead would hide a NaN
                T* to = (T*)y + row * columns;
                for (int64_t g = 0; g < used; ++g) {
                    const float norm = log ? logarithm(total) : weights[g] / total;
                    write_group(z + g * GROUP, top, norm, to + g * GROUP, less(keep - g * GROUP, GROUP));
                }
                fill(total != total ? total : log ? -INF : 0.0f, to + keep, columns - keep);
            };
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
            each_row(rows, columns, threads, [&] {
                return [&, sums = Numbers(parts_of(columns, GROUP))](int64_t row) mutable {
                    const int64_t at = row * columns, keep = kept(row, columns, queries);
                    one((const In*)grad + at, (const In*)y + at, (Out*)dx + at, scale, sums, columns, keep);
                };
            });
        });
    });
}

// -------------------------------------------------------------------------------------------------- log-probabilities

// The arguments of both functions. Rows are numbered over two dimensions, of which the inner has so many.
struct Statistics {
    int64_t rows, columns, inner, x_a, x_b, dx_a, dx_b, ignore_index, entropy, mean, dtype, threads;
    int64_t begin(int64_t row, int64_t a, int64_t b) const { return row / inner * a + row % inner * b; }
};

// The six results of each row.
extern "C" void halfstep_log_probabilities(const void* logits, const int64_t* targets, float* results,
                                           const void* statistics, float scale) {
    const Statistics of = *(const Statistics*)statistics;
    const Logits read = choose_logits(int32_t(of.dtype), NO_MASK);
    const int64_t chunks = parts_of(of.columns, CHUNK), bytes = bytes_of(int32_t(of.dtype));
    each_row(of.rows, of.columns, of.threads, [&] {
        return [&, z = Numbers(CHUNK), e = Numbers(CHUNK), tops = Numbers(chunks), sums = Numbers(chunks),
                moments = Numbers(chunks), means = Numbers(chunks), sizes = Numbers(chunks)](int64_t row) mutable {
            const int64_t target = targets[row];
            const auto result = [&](int which) -> float& { return results[which * of.rows + row]; };
            for (int i = 0; i < 6; ++i) result(i) = 0.0f;
            if (target == of.ignore_index) return;
            const char* x = (const char*)logits + of.begin(row, of.x_a, of.x_b) * bytes;
            float highest = LOWEST;
            for (int64_t c = 0; c < chunks; ++c) {
                const int64_t n = less(of.columns - c * CHUNK, CHUNK);
                tops[c] = read(x + c * CHUNK * bytes, nullptr, 0, scale, z, n);
                sizes[c] = float(n);
                highest = tops[c] > highest ? tops[c] : highest;
                const auto d = [&, top = splat(tops[c])](int64_t i) { return get(z + i) - top; };
                sums[c] = chunk_sum(n, [&](int64_t i, int64_t) {
                    put(e + i, exponential<false>(d(i)));
                    return get(e + i);
                });
                if (of.entropy)
                    moments[c] = chunk_sum(n, [&](int64_t i, int64_t) { return get(e + i) * larger(splat(LOWEST), d(i)); });
                if (of.mean) means[c] = chunk_sum(n, [&](int64_t i, int64_t k) { return select(first_lanes(k), d(i), V{}); });
            }
            const auto over_chunks = [&](auto&& terms) {
                const auto at = [&](int64_t i, int64_t k) {
                    const V offset = get(tops + i) - splat(highest);
                    return select(first_lanes(k), terms(i, offset, exponential<false>(offset)), V{});
                };
                if (chunks == 1) return at(0, 1)[0];
                float total = 0.0f;
                for (int64_t first = 0; first < chunks; first += CHUNK)
                    total += chunk_sum(less(chunks - first, CHUNK), [&](int64_t i, int64_t k) { return at(first + i, k); });
                return total;
            };
            float total = over_chunks([&](int64_t i, V, V w) { return w * get(sums + i); });
            const float top = total != total ? total : highest;
            const bool nothing = total == 0.0f;
            total = nothing ? 1.0f : total;
            z[0] = std::numeric_limits<float>::quiet_NaN();
            if (target >= 0 && target < of.columns) read(x + target * bytes, nullptr, 0, scale, z, 1);
            const float log_sum = result(3) = logarithm(total);
            result(0) = (z[0] - top) - log_sum;
            result(1) = nothing ? -INF : top + log_sum;
            result(2) = top;
            const auto moment = [&](int64_t i, V offset, V w) {
                return select(w == V{}, V{}, w * (get(moments + i) + offset * get(sums + i)));
            };
            const auto mean = [&](int64_t i, V offset, V) { return get(means + i) + get(sizes + i) * offset; };
            if (of.entropy) result(4) = log_sum - over_chunks(moment) / total;
            if (of.mean) result(5) = over_chunks(mean) / float(of.columns) - log_sum;
        };
    });
}

// The gradient of the logits, which may be written over them.
extern "C" void halfstep_log_probabilities_backward(const float* grads, const void* logits, const int64_t* targets,
                                                    const float* results, void* dx, const void* statistics, float scale) {
    const Statistics of = *(const Statistics*)statistics;
    with_dtype(int32_t(of.dtype), [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        each_row(of.rows, of.columns, of.threads, [=] {
            return [=](int64_t row) {
                const int64_t target = targets[row];
                const T* from = (const T*)logits + of.begin(row, of.x_a, of.x_b);
                T* to = (T*)dx + of.begin(row, of.dx_a, of.dx_b);
                if (target == of.ignore_index) return fill(0.0f, to, of.columns);
                const auto result = [=](int which) { return results[which * of.rows + row]; };
                const auto grad = [=](int which, int of_result) {
                    return result(of_result) == -INF ? 0.0f : grads[which * of.rows + row] * scale;
                };
                const float a = result(0) != result(0) ? result(0) : grad(0, 0), q = of.mean ? grad(5, 5) : 0.0f;
                const float b_less_a = grad(1, 1) - a;
                const V factor = splat(of.mean ? b_less_a - q : b_less_a), share = splat(q / float(of.columns));
                const V c = splat(grad(4, 1)), top = splat(result(2)), log_sum = splat(result(3)), entropy = splat(result(4));
                each_vector(of.columns, [=](int64_t i, int64_t k) {
                    const V y = (get_some(from + i, k) * splat(scale) - top) - log_sum, p = exponential<false>(y);
                    V v = p * factor;
                    if (of.entropy) v = select(y == splat(-INF), V{}, p * (factor - c * (y + entropy)));
                    if (uint64_t(target - i) < uint64_t(W)) v[target - i] += a;
                    put_some(to + i, of.mean ? v + share : v, k);
                });
            };
        });
    });
}
