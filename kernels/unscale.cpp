// Unscale, non-finite check and sum of squares over a list of tensors: the CPU twin of kernels/unscale.py, same bits.
#include "native.h"

using namespace halfstep;

namespace {

constexpr int64_t CHUNK = 4096;
constexpr int64_t LANES = 1024;

// The smallest power of two that holds n. Padding with zeros beyond it would change no bit of the tree sum.
int64_t tree_width(int64_t n) {
    int64_t width = 1;
    while (width < n) width *= 2;
    return width;
}

// Sum an array, as long as a power of two, by adding its second half to its first until one is left.
template <typename T> T tree_sum(T* values, int64_t width) {
    for (int64_t half = width / 2; half > 0; half /= 2) {
        T* upper = values + half;
#pragma GCC ivdep
        for (int64_t i = 0; i < half; ++i) values[i] += upper[i];
    }
    return values[0];
}

template <typename T>
void check_chunk(T* data, int64_t n, const float* inv_scale, bool write, int32_t* flag, double* sum) {
    alignas(64) float y[CHUNK];
    load(data, y, n);
    if (inv_scale) {
        const float factor = *inv_scale;
        for (int64_t i = 0; i < n; ++i) y[i] = y[i] * factor;
    }
    if (write) {
        store(y, data, n);
        load(data, y, n);
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
    const int64_t width = tree_width(n);
    for (int64_t i = 0; i < n; ++i) {
        float scaled = y[i] * scale;
        y[i] = scaled * scaled;
    }
    for (int64_t i = n; i < width; ++i) y[i] = 0.0f;
    uint64_t back_bits = uint64_t(1023 + 2 * (127 - exponent)) << 52;
    double back;
    std::memcpy(&back, &back_bits, 8);
    *sum = double(tree_sum(y, width)) * back;
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
    const int64_t width = tree_width(chunks < LANES ? chunks : LANES);  // the other lanes hold zeros
    for (int64_t i = 0; i < width; ++i) lanes[i] = 0.0;
    for (int64_t start = 0; start < chunks; start += LANES) {
        const int64_t n = chunks - start < LANES ? chunks - start : LANES;
        for (int64_t i = 0; i < n; ++i) lanes[i] += sums[start + i];
    }
    *sum_of_squares = tree_sum(lanes, width);
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
