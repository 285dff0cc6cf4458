// Cast a list of tensors, rounding to nearest even: the CPU twin of kernels/cast.py.
#include "native.h"

using namespace halfstep;

namespace {
constexpr int64_t CHUNK = 4096;
constexpr int64_t BLOCK = 512;
}  // namespace

extern "C" void halfstep_cast(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
                              int32_t source, int32_t target, int32_t threads) {
    with_dtype(source, [&](auto* s) {
        with_dtype(target, [&](auto* t) {
            using S = std::remove_pointer_t<decltype(s)>;
            using T = std::remove_pointer_t<decltype(t)>;
#pragma omp parallel for schedule(static) num_threads(threads) if (chunks > 1)
            for (int64_t chunk = 0; chunk < chunks; ++chunk) {
                const int64_t tensor = chunk_tensor[chunk];
                const int64_t start = (chunk - rows[tensors + tensor]) * CHUNK;
                const int64_t end = rows[tensor] < start + CHUNK ? rows[tensor] : start + CHUNK;
                alignas(64) float block[BLOCK];
                for (int64_t done = start; done < end; done += BLOCK) {
                    const int64_t n = end - done < BLOCK ? end - done : BLOCK;
                    load((const S*)rows[2 * tensors + tensor] + done, block, n);
                    store(block, (T*)rows[3 * tensors + tensor] + done, n);
                }
            }
        });
    });
}
