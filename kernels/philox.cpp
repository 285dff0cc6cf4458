// The random words of the elements from `first` to before `first + count`, for step 0 and stream 0 of kernels/philox.py.
#include "native.h"

extern "C" void halfstep_words(uint64_t seed, int64_t first, int64_t count, uint32_t* words) {
    constexpr int64_t BLOCK = 512;
    for (int64_t done = 0; done < count; done += BLOCK) {
        const int64_t n = count - done < BLOCK ? count - done : BLOCK;
        halfstep::random_words<BLOCK>(seed, 0, 0, first + done, n, words + done);
    }
}
