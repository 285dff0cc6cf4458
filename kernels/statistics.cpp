// Count where the elements of many tensors fall in a format, on the CPU. The counts are those of kernels/statistics.py.
#include <algorithm>
#include <memory>

#include "lanes.h"

using namespace halfstep;

namespace {

constexpr int64_t CHUNK = 16384;
constexpr int64_t BLOCK = 1024;

// The table of kernels/cells.py.
constexpr int32_t LOWEST = -151, HIGHEST = 128, CLASSES = 3;
constexpr int32_t ZERO = HIGHEST - LOWEST + 1, INFINITE = ZERO + 1, NOT_A_NUMBER = ZERO + 2;
constexpr int32_t CELLS = (NOT_A_NUMBER + 1) * CLASSES;
constexpr int32_t ERROR_BINS = 194, LARGEST = CELLS + ERROR_BINS, UNCOUNTED = LARGEST;

struct Grid { int32_t dropped, emin, emax, overflow; };
struct Scale { float factor; int32_t shift; };

Scale scale_of(const float* scale, bool inverted) {
    if (!scale) return {1.0f, 0};
    const uint32_t bits = bits_of(*scale);
    if ((bits & 0x7fffffu) == 0) {
        const int32_t exponent = int32_t(bits >> 23) - 127;
        return {1.0f, inverted ? -exponent : exponent};
    }
    return {inverted ? 1.0f / *scale : *scale, 0};
}

// What a thread has counted of one tensor. It is added to the row of the tensor when the thread comes to another one.
struct Local {
    // An increment must wait for the previous one of the same cell. Elements that follow one another often have the same
    // cell, so they are counted in several histograms in turn.
    static constexpr int32_t TURNS = 4;
    uint32_t counts[TURNS][UNCOUNTED + 1];
    int64_t largest, elements;

    void count(const uint16_t* places, int64_t n) {
        int64_t i = 0;
        for (; i + TURNS <= n; i += TURNS)
            for (int32_t turn = 0; turn < TURNS; ++turn) ++counts[turn][places[i + turn]];
        for (; i < n; ++i) ++counts[0][places[i]];
    }
    void hand_over(int64_t* row, bool with_errors) {
        if (elements == 0) return;
        for (int32_t i = 0; i < (with_errors ? LARGEST : CELLS); ++i) {
            uint64_t sum = 0;
            for (int32_t turn = 0; turn < TURNS; ++turn) sum += counts[turn][i];
            if (sum) __atomic_fetch_add(row + i, int64_t(sum), __ATOMIC_RELAXED);
        }
        if (with_errors) {
            int64_t before = __atomic_load_n(row + LARGEST, __ATOMIC_RELAXED);
            while (before < largest && !__atomic_compare_exchange_n(row + LARGEST, &before, largest, true, __ATOMIC_RELAXED,
                                                                    __ATOMIC_RELAXED)) {}
        }
        std::memset(this, 0, sizeof *this);
    }
};

// Find the cell of each of n elements and, WITH_ERRORS, the bin of its rounding error, which follows the cells. Returns the bits of the largest error.
template <typename T, bool WITH_ERRORS>
int32_t classify(const T* data, int64_t n, Grid grid, Scale scale, uint16_t* cells, uint16_t* bins) {
    alignas(64) float x[BLOCK];
    alignas(64) int32_t exponents[BLOCK], fractions[BLOCK];
    load(data, x, n);
    for (int64_t i = 0; i < n; ++i) {
        const int32_t unscaled = int32_t(bits_of(x[i]) & 0x7fffffffu);
        const int32_t magnitude = int32_t(bits_of(x[i] * scale.factor) & 0x7fffffffu);
        // The integer behind a subnormal, as a normal number.
        const bool small = magnitude < 0x800000;
        const int32_t key = small ? int32_t(bits_of(float(magnitude))) : magnitude;
        const int32_t exponent = (key >> 23) - (small ? 127 + 149 : 127) + scale.shift;
        const int32_t fraction = key & 0x7fffff;
        int32_t row = exponent < LOWEST ? LOWEST : exponent;
        row = (row > HIGHEST ? HIGHEST : row) - LOWEST;
        int32_t place = row * CLASSES + (fraction != 0) + (fraction >= grid.overflow);
        place = unscaled >= 0x7f800000 ? INFINITE * CLASSES : place;
        place = unscaled > 0x7f800000 ? NOT_A_NUMBER * CLASSES : place;
        place = unscaled == 0 ? ZERO * CLASSES : place;
        cells[i] = uint16_t(place);
        exponents[i] = exponent;
        fractions[i] = fraction;
    }
    if (!WITH_ERRORS) return 0;
    int32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t exponent = exponents[i], fraction = fractions[i], significand = fraction | 0x800000;
        const int32_t below = grid.emin - exponent;
        int32_t cut = grid.dropped + (below > 0 ? below : 0);
        cut = cut > 25 ? 25 : cut;
        const int32_t unit = int32_t(1u << cut);
        const int32_t remainder = significand & (unit - 1), error = std::min(remainder, unit - remainder);
        const int32_t relative = int32_t(bits_of(float(error) / float(significand)));
        // One beyond the largest exponent, or at it with a fraction that overflows.
        const int32_t over = exponent + (fraction >= grid.overflow ? 1 : 0);
        const int32_t bin = error == 0 ? 0 : (relative >> 20) - ((127 - 24) << 3) + 1;
        const bool counted = over <= grid.emax && cells[i] < ZERO * CLASSES;
        bins[i] = uint16_t(counted ? CELLS + bin : UNCOUNTED);
        largest = std::max(largest, counted ? relative : 0);
    }
    return largest;
}

template <typename T, bool WITH_ERRORS>
void count(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks, Grid grid, Scale scale,
           int64_t* counts, int64_t width, int32_t threads) {
#pragma omp parallel num_threads(threads) if (chunks > 1)
    {
        const auto local = std::make_unique<Local>();
        const auto row_of = [&](int64_t tensor) { return counts + rows[3 * tensors + tensor] * width; };
        int64_t current = -1;
        uint16_t cells[BLOCK], bins[BLOCK];
#pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t tensor = chunk_tensor[chunk];
            const int64_t start = (chunk - rows[tensors + tensor]) * CHUNK;
            const int64_t left = std::min(rows[tensor] - start, CHUNK);
            const T* data = (const T*)rows[2 * tensors + tensor] + start;
            if (current != tensor || local->elements > (int64_t(1) << 31)) {
                if (current >= 0) local->hand_over(row_of(current), WITH_ERRORS);
                current = tensor;
            }
            for (int64_t first = 0; first < left; first += BLOCK) {
                const int64_t n = std::min(left - first, BLOCK);
                const int64_t largest = classify<T, WITH_ERRORS>(data + first, n, grid, scale, cells, bins);
                local->count(cells, n);
                if (WITH_ERRORS) local->count(bins, n);
                local->largest = std::max(local->largest, largest);
            }
            local->elements += left;
        }
        if (current >= 0) local->hand_over(row_of(current), WITH_ERRORS);
    }
}

}  // namespace

extern "C" void halfstep_count(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
                               const float* scale, int32_t inverted, int32_t dropped, int32_t emin, int32_t emax,
                               int32_t overflow, int32_t with_errors, int32_t dtype, int64_t* counts, int64_t width,
                               int32_t threads) {
    const Grid grid{dropped, emin, emax, overflow};
    const Scale by = scale_of(scale, inverted);
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        if (with_errors) count<T, true>(rows, chunk_tensor, tensors, chunks, grid, by, counts, width, threads);
        else count<T, false>(rows, chunk_tensor, tensors, chunks, grid, by, counts, width, threads);
    });
}
