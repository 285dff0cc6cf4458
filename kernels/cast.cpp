// Cast a list of tensors on the CPU. The results have the bits of kernels/cast.py, which describes the arithmetic.
#include "lanes.h"
#include <type_traits>

using namespace halfstep;

namespace {

constexpr int64_t CHUNK = 4096;
constexpr int64_t BLOCK = 512;

enum Row { NUMEL, FIRST_CHUNK, SOURCE, TARGET, STREAM, OFFSET };
constexpr int64_t SIZE[] = {4, 2, 2, 1, 1};  // of a number, by the codes of native.h

// The value of an FP8 code, which fp32 holds exactly. Shifting the code by `spread` bits puts its exponent and mantissa where fp32
// has them; adding `bias` then corrects the exponent. Subnormal codes are multiplied by the value of the last place instead.
template <typename F> inline float widen8(uint8_t code) {
    constexpr uint32_t spread = 23 - F::mantissa, bias = 127 - F::bias;
    const uint32_t sign = uint32_t(code & 0x80u) << 24, magnitude = code & 0x7fu;
    const uint32_t normal = (magnitude << spread) + (bias << 23);
    const uint32_t tiny = bits_of(float(int32_t(magnitude)) * power_of_two(1 - int(F::bias) - int(F::mantissa)));
    uint32_t result = magnitude < (1u << F::mantissa) ? tiny : normal;
    result = magnitude >= F::overflow ? 0x7f800000u : result;
    result = magnitude >= F::overflow + (F::overflow != F::nan) ? 0x7fc00000u : result;
    return from_bits(sign | result);
}

// How a block is converted to fp32 and from fp32. Both are chosen once per call of halfstep_cast and called through pointers:
// a block is large enough that an indirect call costs nothing, and each conversion is compiled once, not once per pair.
using Load = void (*)(const void*, float*, int64_t);
using Store = void (*)(const float*, const uint32_t*, void*, int64_t);

template <typename T> void load_block(const void* from, float* to, int64_t n) { convert((const T*)from, to, n); }
template <typename F> void load_block8(const void* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = widen8<F>(((const uint8_t*)from)[i]);
}
constexpr Load LOAD[] = {load_block<float>, load_block<f16>, load_block<bf16>, load_block8<E4M3>, load_block8<E5M2>};

template <typename T> void nearest_block(const float* from, const uint32_t*, void* to, int64_t n) {
    convert(from, (T*)to, n);
}
void saturate_block(const float* from, const uint32_t*, void* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t b = bits_of(from[i]);
        ((float*)to)[i] = from_bits(b - ((b & 0x7fffffffu) == 0x7f800000u ? 1u : 0u));
    }
}

template <typename F, typename Code, bool SATURATE>
constexpr Store ROUNDINGS[] = {round_block<F, Code, NEAREST, SATURATE>, round_block<F, Code, TOWARD_ZERO, SATURATE>,
                               round_block<F, Code, STOCHASTIC, SATURATE>};
template <typename F, typename Code> Store choose(int32_t rounding, bool saturate) {
    return saturate ? ROUNDINGS<F, Code, true>[rounding] : ROUNDINGS<F, Code, false>[rounding];
}
Store choose(int32_t target, int32_t rounding, bool saturate) {
    const bool plain = rounding == NEAREST && !saturate;
    switch (target) {
        case F32: return saturate ? saturate_block : nearest_block<float>;
        case F16: return plain ? nearest_block<f16> : choose<Float16, uint16_t>(rounding, saturate);
        case BF16: return plain ? nearest_block<bf16> : choose<BFloat16, uint16_t>(rounding, saturate);
        case FP8_E4M3: return choose<E4M3, uint8_t>(rounding, saturate);
        default: return choose<E5M2, uint8_t>(rounding, saturate);
    }
}


}  // namespace

// Cast all tensors of a list. `rows` and `chunk_tensor` are the table of multi_tensor.py, whose operands are the rows SOURCE to
// OFFSET above; `chunk_tensor` may be null if there is one tensor. STREAM and OFFSET are read for stochastic rounding only.
extern "C" void halfstep_cast(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
                              int32_t source, int32_t target, int32_t rounding, int32_t saturate, uint64_t seed,
                              int32_t threads) {
    const Load load = LOAD[source];
    const Store store = choose(target, rounding, saturate != 0);
    const bool copy = source == target && !saturate;
    const bool direct = rounding == NEAREST && !saturate && source <= BF16 && target <= BF16;
    spread_evenly(chunks, FEW_CHUNKS + 1, threads, [&](int64_t chunk) {
        const int64_t* tensor = rows + (chunk_tensor ? chunk_tensor[chunk] : 0);
        auto row = [&](Row which) { return tensor[which * tensors]; };
        const int64_t start = (chunk - row(FIRST_CHUNK)) * CHUNK, left = row(NUMEL) - start;
        const int64_t size = left < CHUNK ? left : CHUNK;
        const char* from = (const char*)row(SOURCE) + start * SIZE[source];
        char* to = (char*)row(TARGET) + start * SIZE[target];
        if (copy) {
            std::memcpy(to, from, size * SIZE[source]);
            return;
        }
        if (direct) {
            return with_dtype(source, [&](auto* a) {
                with_dtype(target, [&](auto* b) { convert((decltype(a))from, (decltype(b))to, size); });
            });
        }
        alignas(64) float block[BLOCK];
        alignas(64) uint32_t words[BLOCK];
        for (int64_t done = 0; done < size; done += BLOCK) {
            const int64_t n = size - done < BLOCK ? size - done : BLOCK;
            const float* values = block;
            if (source == F32) values = (const float*)from + done;  // where they are
            else load(from + done * SIZE[source], block, n);
            if (rounding == STOCHASTIC)
                random_words<BLOCK>(seed, 0, uint32_t(row(STREAM)), row(OFFSET) + start + done, n, words);
            store(values, words, to + done * SIZE[target], n);
        }
    });
}
