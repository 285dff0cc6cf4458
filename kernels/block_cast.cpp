// Cast a list of tensors to a format of blocks on the CPU. The results have the bits of kernels/block_cast/rule.py.
#include "lanes.h"
#include <algorithm>

using namespace halfstep;

namespace {

enum Row { NUMEL, FIRST_CHUNK, SCALES, SOURCE, CODES, ELEMENTS, FIRST, MIDDLE, SECOND, INNER, STREAM, OFFSET };
enum Blocks : int32_t { COLUMNS, ROWS, SQUARE };  // as in kernels.py
// The form of kernels.py, whose element is a number here: that of ENCODE below.
struct Form { int32_t source, element, size, blocks, pairs, scales, fraction, given, carry, emax, rounding, saturate; };

struct E2M3 { static constexpr uint32_t bits = 6, mantissa = 3, bias = 1, largest = 0x1f, overflow = 0x1f, nan = 0; };
struct E3M2 { static constexpr uint32_t bits = 6, mantissa = 2, bias = 3, largest = 0x1f, overflow = 0x1f, nan = 0; };
struct E2M1 { static constexpr uint32_t bits = 4, mantissa = 1, bias = 1, largest = 0x07, overflow = 0x07, nan = 0; };

constexpr int64_t MOST = 64 * 32;  // elements of a tile
struct Tile {
    int64_t height, width, origin, row, column;  // in elements, of the tensor
    int64_t code_origin, code_row, code_column;
};

using Encode = void (*)(const float*, const uint32_t*, void*, int64_t);
template <typename F>
constexpr Encode ROUNDINGS[] = {round_block<F, uint8_t, NEAREST, true>, round_block<F, uint8_t, TOWARD_ZERO, true>,
                                round_block<F, uint8_t, STOCHASTIC, true>};
constexpr const Encode* ENCODE[] = {ROUNDINGS<E4M3>, ROUNDINGS<E5M2>, ROUNDINGS<E2M3>, ROUNDINGS<E3M2>, ROUNDINGS<E2M1>};

// `_over_power` of the rule: products of normal numbers only, since a CPU may flush others to zero.
inline float over_power(float x, int32_t code) {
    const uint32_t b = bits_of(x), sign = b & 0x80000000u;
    const bool tiny = (b & 0x7fffffffu) < 1u << 23;
    const float units = tiny ? from_bits(bits_of(float(int32_t(b & 0x7fffffu))) | sign) : x;
    const float scaled = units * from_bits(uint32_t(std::max((tiny ? 254 - 149 : 254) - code, 1)) << 23);
    return !tiny && code == 254 ? scaled * 0.5f : scaled;
}

// The code of a scale, and by what elements are multiplied if it is a fraction.
inline int32_t scale_of(uint32_t largest, float g, const Form& form, float* factor) {
    if (!form.fraction) {
        if (largest >= 0x7f800000u) return largest == 0x7f800000u && form.saturate ? 254 : 255;
        return std::max(int32_t((largest + uint32_t(form.carry)) >> 23) - form.emax, 0);
    }
    const float quotient = from_bits(largest) / 6.0f / g;
    const uint32_t code = form.saturate ? round_to<E4M3, NEAREST, true>(quotient, 0) : round_to<E4M3, NEAREST, false>(quotient, 0);
    const float scale = code < 8 ? float(code) * 0x1p-9f : from_bits((code << 20) + (120u << 23));
    *factor = code ? 1.0f / g / scale : 0.0f;
    return int32_t(code);
}

// The tile of the scale with the index `scale`, of at most `left` scales; returns how many it has.
int64_t tile_of(int64_t scale, int64_t left, const int64_t* tensor, int64_t tensors, const Form& form, Tile* tile) {
    auto row = [&](Row which) { return tensor[which * tensors]; };
    auto rest = [&](int64_t whole, int64_t block) { return std::min<int64_t>(whole - block * form.size, form.size); };
    const int64_t first = row(FIRST), middle = row(MIDDLE), second = row(SECOND), inner = row(INNER), size = form.size;
    const int64_t across = (second + size - 1) / size, inside = scale % inner, line = scale / inner, block = line % across;
    if (form.blocks == SQUARE) {
        const int64_t down = (first + size - 1) / size, outer = line / across / middle, stride = middle * second * inner;
        const int64_t at = (outer / down * first + outer % down * size) * stride;
        const int64_t column = (line / across % middle * second + block * size) * inner;
        const int64_t of_row = form.pairs == 1 ? 2 : 1, of_both = form.pairs < 0 ? 1 : 2;
        *tile = {rest(first, outer % down), rest(second, block), at + column + inside, stride, inner,
                 at / of_both + column / of_row + inside, stride / of_row, inner};
        return 1;
    }
    const int64_t at = (line / across * second + block * size) * inner, code = form.pairs < 0 ? at : at / 2;
    const int64_t run = form.blocks == ROWS ? 1 : std::min({inner - inside, left, int64_t(64)});
    if (form.blocks == ROWS) *tile = {1, rest(second, block), at, 0, 1, code, 0, 1};
    else *tile = {rest(second, block), run, at + inside, inner, 1, code + inside, inner, 1};
    return run;
}

}  // namespace

// Cast all tensors of a list. `rows` and `chunk_tensor` are the table of multi_tensor.py with the rows above, whose elements are
// scales; `chunk_tensor` may be null if there is one tensor. `options` is a Form, `global_scales` has one of each tensor.
extern "C" void halfstep_block_cast(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
                                    const int32_t* options, const float* global_scales, uint64_t seed, int32_t threads) {
    Form form;
    std::memcpy(&form, options, sizeof form);
    const Encode encode = ENCODE[form.element][form.rounding];
    spread_evenly(chunks, FEW_CHUNKS + 1, threads, [&](int64_t chunk) {
        const int64_t* tensor = rows + (chunk_tensor ? chunk_tensor[chunk] : 0);
        auto row = [&](Row which) { return tensor[which * tensors]; };
        const float g = form.fraction ? global_scales[tensor - rows] : 1.0f;
        const int64_t start = (chunk - row(FIRST_CHUNK)) * form.scales, end = std::min(row(NUMEL), start + form.scales);
        uint8_t* codes = (uint8_t*)row(CODES);
        alignas(64) float x[MOST], factors[64];
        alignas(64) uint32_t words[MOST];
        uint8_t bytes[MOST];
        int32_t scales[64];
        Tile tile;
        for (int64_t scale = start; scale < end;) {
            const int64_t count = tile_of(scale, end - scale, tensor, tensors, form, &tile), n = tile.height * tile.width;
            uint32_t largest[64] = {};
            for (int64_t r = 0; r < tile.height; ++r) {
                const int64_t run = tile.column == 1 ? tile.width : 1;  // elements that lie side by side
                for (int64_t c = 0; c < tile.width; c += run) {
                    const int64_t at = tile.origin + r * tile.row + c * tile.column, to = r * tile.width + c;
                    with_dtype(form.source, [&](auto* type) { convert((decltype(type))row(SOURCE) + at, x + to, run); });
                    if (form.rounding == STOCHASTIC) random_words<64>(seed, 0, uint32_t(row(STREAM)), row(OFFSET) + at, run, words + to);
                }
                for (int64_t c = 0; c < tile.width; ++c) {
                    uint32_t& most = largest[form.blocks == COLUMNS ? c : 0];
                    most = std::max(most, bits_of(x[r * tile.width + c]) & 0x7fffffffu);
                }
            }
            for (int64_t i = 0; i < count; ++i) {
                scales[i] = scale_of(largest[i], g, form, factors + i);
                ((uint8_t*)row(SCALES))[scale + i] = uint8_t(scales[i]);
            }
            const int32_t nan = form.fraction ? 0x7f : 255;
            for (int64_t r = 0; r < tile.height; ++r) {
                for (int64_t c = 0; c < tile.width; ++c) {
                    const int64_t block = form.blocks == COLUMNS ? c : 0;
                    float& number = x[r * tile.width + c];
                    number = form.fraction ? number * factors[block] : over_power(number, scales[block]);
                    number = scales[block] == nan ? 0.0f : number;
                }
            }
            encode(x, words, bytes, n);
            const int64_t down = form.pairs == 0 ? 2 : 1, across = form.pairs == 1 ? 2 : 1;
            for (int64_t r = 0; r < tile.height; r += down) {
                for (int64_t c = 0; c < tile.width; c += across) {
                    const uint8_t* from = bytes + r * tile.width + c;
                    uint8_t* to = codes + tile.code_origin + r / down * tile.code_row + c / across * tile.code_column;
                    *to = form.pairs < 0 ? *from : uint8_t(*from | from[form.pairs == 0 ? tile.width : 1] << 4);
                }
            }
            scale += count;
        }
    });
}
