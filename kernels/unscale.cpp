// Unscale, non-finite check and sum of squares over a list of tensors: the CPU twin of kernels/unscale.py, same bits.
#include "native.h"

using namespace halfstep;

namespace {

constexpr int64_t CHUNK = 4096;

// The smallest power of two that holds n. Padding with zeros beyond it would change no bit of the tree sum.
int64_t tree_width(int64_t n) {
    int64_t width = 1;
    while (width < n) width *= 2;
    return width;
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
    for (int64_t half = width / 2; half > 0; half /= 2) {
        float* upper = y + half;
#pragma GCC ivdep
        for (int64_t i = 0; i < half; ++i) y[i] += upper[i];
    }
    uint64_t back_bits = uint64_t(1023 + 2 * (127 - exponent)) << 52;
    double back;
    std::memcpy(&back, &back_bits, 8);
    *sum = double(y[0]) * back;
}

}  // namespace

extern "C" void halfstep_check(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
                               const float* inv_scale, int32_t write, int32_t dtype, int32_t* flags, double* sums,
                               int32_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
#pragma omp parallel for schedule(static) num_threads(threads) if (chunks > 1)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t tensor = chunk_tensor[chunk];
            const int64_t start = (chunk - rows[tensors + tensor]) * CHUNK;
            const int64_t left = rows[tensor] - start;
            check_chunk((T*)rows[2 * tensors + tensor] + start, left < CHUNK ? left : CHUNK, inv_scale, write,
                        flags + rows[3 * tensors + tensor], sums + chunk);
        }
    });
}
