// Unscale gradients, find non-finite elements and sum the squares over a list of tensors, on the CPU. The results have the bits of
// kernels/unscale.py, which describes the order of the sum.
#include "lanes.h"
#include <type_traits>

using namespace halfstep;

namespace {

constexpr int64_t CHUNK = 4096;
constexpr int64_t LANES = 1024;

// Sum values, a power of two of them, by adding neighbours until one is left.
template <typename T> T sum_neighbours(T* values, int64_t width) {
    if constexpr (std::is_same_v<T, float>)
        for (; width >= 2 * W; width /= 2)
            for (int64_t i = 0; i < width / 2; i += W) put(values + i, neighbours(get(values + 2 * i), get(values + 2 * i + W)));
    for (width /= 2; width > 0; width /= 2) {
#pragma GCC ivdep
        for (int64_t i = 0; i < width; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    }
    return values[0];
}

// Sum 2^(LEVEL + 1) vectors by adding neighbours until one vector is left. leaf(first) does so for two of them.
template <int LEVEL, typename Leaf> inline V sum_vectors(int64_t first, Leaf&& leaf) {
    if constexpr (LEVEL == 0) return leaf(first);
    else return neighbours(sum_vectors<LEVEL - 1>(first, leaf), sum_vectors<LEVEL - 1>(first + (1 << LEVEL), leaf));
}

// Sum the first n of LENGTH values, as if the others were zero: halves, halves of these, then neighbours. Zeros change no
// bit of a sum of squares.
template <int64_t LENGTH, typename T> T tree_sum(T* values, int64_t n) {
    constexpr int64_t quarter = LENGTH / 4;
    if (n > quarter) {
        for (int64_t i = n; i < LENGTH; ++i) values[i] = 0;
        for (int64_t i = 0; i < quarter; ++i)
            values[i] = (values[i] + values[i + 2 * quarter]) + (values[i + quarter] + values[i + 3 * quarter]);
        return sum_neighbours(values, quarter);
    }
    int64_t width = 1;
    while (width < n) width *= 2;
    for (int64_t i = n; i < width; ++i) values[i] = 0;
    return sum_neighbours(values, width);
}

// Compute the flags and the sum of squares of one chunk. SCALED: elements are multiplied by `factor` first. WRITE: the products
// are rounded to T and stored, and flags and sum are those of the stored values.
template <typename T, bool SCALED, bool WRITE>
void check_chunk(T* data, int64_t n, float factor, int32_t* flag, double* sum) {
    const V by = splat(factor);
    // The chunk is read twice, the second time from the first-level cache, since the power of two by which it is multiplied
    // before squares are summed depends on its largest magnitude.
    constexpr Order O = best_order<T>;
    U biggest[2] = {};
    walk_by_two(
        n,
        [&](int64_t i) {
            Pair x = get_two<O>(data + i);
            if (SCALED) x.a *= by, x.b *= by;
            if (WRITE) x = put_two<O>(data + i, x);
            biggest[0] = larger(biggest[0], magnitude(x.a));
            biggest[1] = larger(biggest[1], magnitude(x.b));
        },
        [&](int64_t i, int64_t k) {
            V x = get_some(data + i, k);
            if (SCALED) x *= by;
            if (WRITE) {
                const auto raw = pack<T>(x);
                put_raw_some(data + i, raw, k);
                x = unpack<T>(raw);
            }
            biggest[0] = larger(biggest[0], magnitude(x) & (U)first_lanes(k));  // beyond k: 0 * factor, which may be NaN
        });
    const uint32_t most = uint32_t(largest_lane((I)larger(biggest[0], biggest[1])));
    const auto value = [&](V x) { return SCALED && !WRITE ? x * by : x; };
    if (most >= 0x7f800000u) {
        I inf{};
        each_vector(n, [&](int64_t i, int64_t k) {
            inf |= (I)(magnitude(value(get_some(data + i, k))) == 0x7f800000u) & first_lanes(k);
        });
        int32_t found = most > 0x7f800000u ? 2 : 0;
        for (int lane = 0; lane < W; ++lane) found |= inf[lane] & 1;
        __atomic_fetch_or(flag, found, __ATOMIC_RELAXED);
    }
    int32_t exponent = 254 - int32_t(most >> 23);
    exponent = exponent < 1 ? 1 : exponent;
    const V scale = splat(from_bits(uint32_t(exponent) << 23));
    const auto square = [&](V x) {
        const V scaled = value(x) * scale;
        return scaled * scaled;
    };
    alignas(64) float own[CHUNK];
    float total;
    if (n == CHUNK) {  // as `tree_sum` has it, without a pass to store the squares
        constexpr int64_t quarter = CHUNK / 4;
        const auto quarters = [&](int64_t vector) {
            const T* from = data + vector * W;
            const auto squares = [&](int64_t i) {
                const Pair x = get_two<O>(from + i * quarter);
                return Pair{square(x.a), square(x.b)};
            };
            const Pair x0 = squares(0), x1 = squares(1), x2 = squares(2), x3 = squares(3);
            const Pair sums{(x0.a + x2.a) + (x1.a + x3.a), (x0.b + x2.b) + (x1.b + x3.b)};
            return O == ALTERNATE ? sums.a + sums.b : neighbours(sums.a, sums.b);
        };
        for (int64_t i = 0; i < quarter / W; i += 8) put(own + i / 8 * W, sum_vectors<2>(i, quarters));
        total = sum_neighbours(own, quarter / 8);
    } else {
        each_vector(n, [&](int64_t i, int64_t k) { put_some(own + i, square(get_some(data + i, k)), k); });
        total = tree_sum<CHUNK>(own, n);
    }
    uint64_t back_bits = uint64_t(1023 + 2 * (127 - exponent)) << 52;
    double back;
    std::memcpy(&back, &back_bits, 8);
    *sum = double(total) * back;
}

}  // namespace

extern "C" void halfstep_check(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
                               const float* inv_scale, int32_t inverted, int32_t write, int32_t dtype, int32_t* flags,
                               double* sums, int32_t threads) {
    const float factor = !inv_scale ? 1.0f : inverted ? 1.0f / *inv_scale : *inv_scale;
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const auto one = !inv_scale ? check_chunk<T, false, false>
                                    : write ? check_chunk<T, true, true> : check_chunk<T, true, false>;
        spread_evenly(chunks, FEW_CHUNKS + 1, threads, [&](int64_t chunk) {
            const int64_t tensor = chunk_tensor[chunk];
            const int64_t start = (chunk - rows[tensors + tensor]) * CHUNK;
            const int64_t left = rows[tensor] - start;
            one((T*)rows[2 * tensors + tensor] + start, left < CHUNK ? left : CHUNK, factor,
                flags + rows[3 * tensors + tensor], sums + chunk);
        });
    });
}

// Add the sums of the chunks and combine the flags of the tensors, which are set to zero for the next call. If `tally` is not
// null, count the non-finite tensors in it (`Tally` of unscale.py).
extern "C" void halfstep_check_finish(const double* sums, int64_t chunks, int32_t* flags, int64_t tensors,
                                      float* found_inf, double* sum_of_squares, float* norm, int32_t* flags_out,
                                      int32_t* tally, const int64_t* step) {
    alignas(64) double lanes[LANES];
    const int64_t used = chunks < LANES ? chunks : LANES;  // the other lanes hold zeros
    for (int64_t i = 0; i < used; ++i) lanes[i] = 0.0;
    for (int64_t start = 0; start < chunks; start += LANES) {
        const int64_t n = chunks - start < LANES ? chunks - start : LANES;
        for (int64_t i = 0; i < n; ++i) lanes[i] += sums[start + i];
    }
    const double total = tree_sum<LANES>(lanes, used);
    *sum_of_squares = total;
    *norm = float(std::sqrt(total));
    int32_t any = 0;
    for (int64_t i = 0; i < tensors; ++i) {
        const int32_t flag = flags[i];
        any |= flag;
        flags_out[i] = flag;
        if (tally && flag) {
            int32_t* row = tally + 4 * i;
            row[0] += flag & 1;
            row[1] += flag >> 1;
            if (row[2] == 0) row[2] = int32_t(*step + 1);
            row[3] = int32_t(*step + 1);
        }
        flags[i] = 0;
    }
    *found_inf = any ? 1.0f : 0.0f;
}
