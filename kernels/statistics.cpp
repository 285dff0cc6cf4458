// Count where the elements of many tensors fall in a format, on the CPU. The counts are those of kernels/statistics.py.
#include <algorithm>
#include <vector>

#include "native.h"

using namespace halfstep;

namespace {

constexpr int64_t CHUNK = 16384;
constexpr int64_t BLOCK = 1024;
constexpr int64_t DIRECT = 512;  // elements of a tensor that is counted without a histogram of the thread's own

constexpr int32_t LOWEST = -151, HIGHEST = 128, CLASSES = 3;
constexpr int32_t ZERO = HIGHEST - LOWEST + 1, INFINITE = ZERO + 1, NOT_A_NUMBER = ZERO + 2;
constexpr int32_t CELLS = (NOT_A_NUMBER + 1) * CLASSES;
constexpr int32_t ERRORS = 194, UNCOUNTED = ERRORS;

// An increment must wait for the previous one of the same cell. Elements that follow one another often have the same cell, so
// they are counted in several histograms in turn, which are added at the end.
constexpr int32_t TURNS = 4;

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

// What a thread has counted of one tensor. It is added to the results when the thread comes to another tensor.
struct Local {
    alignas(64) uint32_t cells[TURNS][CELLS];
    alignas(64) uint32_t errors[TURNS][ERRORS + 1];
    int64_t biggest, elements;

    void clear() { std::memset(this, 0, sizeof *this); }

    void hand_over(int64_t* row, bool with_errors) {
        if (elements == 0) return;
        for (int32_t i = 0; i < CELLS; ++i) {
            uint64_t sum = 0;
            for (int32_t turn = 0; turn < TURNS; ++turn) sum += cells[turn][i];
            if (sum) __atomic_fetch_add(row + i, int64_t(sum), __ATOMIC_RELAXED);
        }
        if (with_errors) {
            for (int32_t i = 0; i < ERRORS; ++i) {
                uint64_t sum = 0;
                for (int32_t turn = 0; turn < TURNS; ++turn) sum += errors[turn][i];
                if (sum) __atomic_fetch_add(row + CELLS + i, int64_t(sum), __ATOMIC_RELAXED);
            }
            int64_t* most = row + CELLS + ERRORS;
            int64_t known = __atomic_load_n(most, __ATOMIC_RELAXED);
            while (known < biggest &&
                   !__atomic_compare_exchange_n(most, &known, biggest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
        }
        clear();
    }
};

// Find the cell of each of n elements and, WITH_ERRORS, the bin of its rounding error. Returns the bits of the largest error.
template <typename T, bool WITH_ERRORS>
int32_t classify(const T* data, int64_t n, Grid grid, Scale scale, uint16_t* cell, uint8_t* bin) {
    alignas(64) float x[BLOCK];
    alignas(64) int32_t exponents[BLOCK], fractions[BLOCK], found[BLOCK];
    load(data, x, n);
    for (int64_t i = 0; i < n; ++i) {
        const int32_t given = int32_t(bits_of(x[i]) & 0x7fffffffu);
        const int32_t magnitude = int32_t(bits_of(x[i] * scale.factor) & 0x7fffffffu);
        // The integer behind a subnormal, as a normal number.
        const bool small = magnitude < 0x800000;
        const int32_t key = small ? int32_t(bits_of(float(magnitude))) : magnitude;
        const int32_t exponent = (key >> 23) - (small ? 127 + 149 : 127) + scale.shift;
        const int32_t fraction = key & 0x7fffff;
        int32_t row = exponent < LOWEST ? LOWEST : exponent;
        row = (row > HIGHEST ? HIGHEST : row) - LOWEST;
        int32_t place = row * CLASSES + (fraction != 0) + (fraction >= grid.overflow);
        place = given >= 0x7f800000 ? INFINITE * CLASSES : place;
        place = given > 0x7f800000 ? NOT_A_NUMBER * CLASSES : place;
        place = given == 0 ? ZERO * CLASSES : place;
        cell[i] = uint16_t(place);
        exponents[i] = exponent;
        fractions[i] = fraction;
        found[i] = place;
    }
    if (!WITH_ERRORS) return 0;
    int32_t biggest = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t exponent = exponents[i], fraction = fractions[i], significand = fraction | 0x800000;
        const int32_t below = grid.emin - exponent;
        int32_t cut = grid.dropped + (below > 0 ? below : 0);
        cut = cut > 25 ? 25 : cut;
        const int32_t unit = int32_t(1u << cut);
        const int32_t rest = significand & (unit - 1);
        const int32_t error = rest < unit - rest ? rest : unit - rest;
        const int32_t relative = int32_t(bits_of(float(error) / float(significand)));
        // One beyond the largest exponent, or at it with a fraction that overflows.
        const int32_t over = exponent + (fraction >= grid.overflow ? 1 : 0);
        const int32_t place = error == 0 ? 0 : (relative >> 20) - ((127 - 24) << 3) + 1;
        int32_t taken = over > grid.emax ? UNCOUNTED : place;
        taken = found[i] >= ZERO * CLASSES ? UNCOUNTED : taken;
        bin[i] = uint8_t(taken);
        const int32_t seen = taken == UNCOUNTED ? 0 : relative;
        biggest = seen > biggest ? seen : biggest;
    }
    return biggest;
}

template <typename T, bool WITH_ERRORS>
void count(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks, Grid grid, Scale scale,
           int64_t* counts, int64_t width, int32_t threads) {
#pragma omp parallel num_threads(threads) if (chunks > 1)
    {
        std::vector<Local> memory(1);
        Local& local = memory[0];
        local.clear();
        int64_t current = -1;
        alignas(64) uint16_t cell[BLOCK];
        alignas(64) uint8_t bin[BLOCK];
#pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t tensor = chunk_tensor[chunk];
            const int64_t start = (chunk - rows[tensors + tensor]) * CHUNK;
            const int64_t left = std::min(rows[tensor] - start, CHUNK);
            const T* data = (const T*)rows[2 * tensors + tensor] + start;
            int64_t* row = counts + rows[3 * tensors + tensor] * width;
            if (rows[tensor] <= DIRECT) {  // one chunk: nobody else writes to its row
                const int32_t biggest = classify<T, WITH_ERRORS>(data, left, grid, scale, cell, bin);
                for (int64_t i = 0; i < left; ++i) row[cell[i]] += 1;
                if (WITH_ERRORS) {
                    for (int64_t i = 0; i < left; ++i) row[CELLS + bin[i]] += bin[i] != UNCOUNTED;
                    row[CELLS + ERRORS] = std::max(row[CELLS + ERRORS], int64_t(biggest));
                }
                continue;
            }
            if (current != tensor || local.elements > (int64_t(1) << 31)) {
                if (current >= 0) local.hand_over(counts + rows[3 * tensors + current] * width, WITH_ERRORS);
                current = tensor;
            }
            for (int64_t first = 0; first < left; first += BLOCK) {
                const int64_t n = std::min(left - first, BLOCK);
                const int32_t biggest = classify<T, WITH_ERRORS>(data + first, n, grid, scale, cell, bin);
                int64_t i = 0;
                for (; i + TURNS <= n; i += TURNS)
                    for (int32_t turn = 0; turn < TURNS; ++turn) ++local.cells[turn][cell[i + turn]];
                for (; i < n; ++i) ++local.cells[0][cell[i]];
                if (WITH_ERRORS) {
                    for (i = 0; i + TURNS <= n; i += TURNS)
                        for (int32_t turn = 0; turn < TURNS; ++turn) ++local.errors[turn][bin[i + turn]];
                    for (; i < n; ++i) ++local.errors[0][bin[i]];
                    local.biggest = std::max(local.biggest, int64_t(biggest));
                }
            }
            local.elements += left;
        }
        if (current >= 0) local.hand_over(counts + rows[3 * tensors + current] * width, WITH_ERRORS);
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
