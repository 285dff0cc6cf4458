// Unscale, non-finite check and sum of squares over a list of tensors: the CPU twin of kernels/unscale.py, same bits.
#include "native.h"

using namespace halfstep;

namespace {

constexpr int64_t CHUNK = 4096;
constexpr int64_t LANES = 1024;

// Sum values, a power of two of them, by adding neighbours until one is left.
template <typename T> T sum_neighbours(T* values, int64_t width) {
    for (width /= 2; width > 0; width /= 2) {
#pragma GCC ivdep
        for (int64_t i = 0; i < width; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    }
    return values[0];
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

template <typename T>
void check_chunk(T* data, int64_t n, const float* inv_scale, bool write, int32_t* flag, double* sum) {
    alignas(64) float own[CHUNK];
    const float* y = own;
    if (std::is_same<T, float>::value && !inv_scale) {
        y = (const float*)data;
    } else {
        load(data, own, n);
        if (inv_scale) {
            const float factor = *inv_scale;
            for (int64_t i = 0; i < n; ++i) own[i] = own[i] * factor;
        }
        if (write) {
            store(own, data, n);
            load(data, own, n);
        }
    }
    int32_t biggest = 0;
    for (int64_t i = 0; i < n; ++i) {
        int32_t magnitude = int32_t(bits_of(y[i]) & 0x7fffffffu);
        biggest = magnitude > biggest ? magnitude : biggest;
    }
    if (biggest >= 0x7f800000) {
        bool inf = false;
        for (int64_t i = 0; i < n; ++i) inf |= (bits_of(y[i]) & 0x7fffffffu) == 0x7f800000u;
        int32_t found = (inf ? 1 : 0) + (biggest > 0x7f800000 ? 2 : 0);
        __atomic_fetch_or(flag, found, __ATOMIC_RELAXED);
    }
    int32_t exponent = 254 - (biggest >> 23);
    exponent = exponent < 1 ? 1 : exponent;
    const float scale = from_bits(uint32_t(exponent) << 23);
    const auto square = [scale](float x) {
        const float scaled = x * scale;
        return scaled * scaled;
    };
    float total;
    if (n == CHUNK) {  // as `tree_sum` has it, without a pass to store the squares
        constexpr int64_t quarter = CHUNK / 4;
#pragma GCC ivdep
        for (int64_t i = 0; i < quarter; ++i)
            own[i] = (square(y[i]) + square(y[i + 2 * quarter])) + (square(y[i + quarter]) + square(y[i + 3 * quarter]));
        total = sum_neighbours(own, quarter);
    } else {
        for (int64_t i = 0; i < n; ++i) own[i] = square(y[i]);
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
    float reciprocal;
    if (inv_scale && inverted) {
        reciprocal = 1.0f / *inv_scale;
        inv_scale = &reciprocal;
    }
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
#pragma omp parallel for schedule(static) num_threads(threads) if (chunks > 8)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t tensor = chunk_tensor[chunk];
            const int64_t start = (chunk - rows[tensors + tensor]) * CHUNK;
            const int64_t left = rows[tensor] - start;
            check_chunk((T*)rows[2 * tensors + tensor] + start, left < CHUNK ? left : CHUNK, inv_scale, write,
                        flags + rows[3 * tensors + tensor], sums + chunk);
        }
    });
}

// Add the chunks and gather the flags, which are zero afterwards; note the bad tensors in `tally` unless it is null.
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
    *sum_of_squares = tree_sum<LANES>(lanes, used);
    *norm = float(std::sqrt(*sum_of_squares));
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
