// Adam and AdamW over lists of tensors: the CPU twin of kernels/adam.py, same bits. The arithmetic is described there.
#include "block_codes.h"
#include "lanes.h"
#include <type_traits>

using namespace halfstep;

namespace {

constexpr int64_t CHUNK = 2048;       // elements per table chunk ...
constexpr int64_t LONG_CHUNK = 16384;  // ... and with moments in 8 bits or stochastic rounding
constexpr int64_t BLOCK = 256;   // elements converted and updated at a time: all local arrays fit the first-level cache
constexpr float MAX = 3.4028234663852886e38f;

enum Master : int32_t { NO_MASTER = 0, FULL_MASTER = 1, SPLIT_MASTER = 2, SPLIT24_MASTER = 3 };
enum Operand { GRAD, PARAM, EXTRA, FIRST, SECOND, TOP, STEP, STREAM, BASE, INNER, INNER_WHOLE, SEED,
               FIRST_SCALES, SECOND_SCALES, TOP_SCALES, COLUMNS };
enum { GROUP_COLUMNS = 8, HYPER_COLUMNS = 10 };

struct Hyper { float gscale, decay, w1, w2, root, eps, step_size, skip, beta1, beta2; };
static_assert(sizeof(Hyper) == HYPER_COLUMNS * sizeof(float), "columns of the hyper table");

double power(double base, int64_t exponent) {
    double result = 1.0;
    for (int bit = 0; bit < 31; ++bit) {
        if ((exponent >> bit) & 1) result = result * base;
        base = base * base;
    }
    return result;
}

struct Group { double lr, beta1, beta2, eps, decay, maximize, decoupled, max_norm; };
static_assert(sizeof(Group) == GROUP_COLUMNS * sizeof(double), "columns of the group table");

// A step count as a number that powers and random bits can use.
int64_t whole(float step) { return int64_t(step < 1.0f ? 1.0f : (step > 0x1p30f ? 0x1p30f : step)); }

// Advance the step counts and fill the hyper table.
void prepare(const int64_t* rows, int64_t tensors, const int64_t* tensor_group, const Group* groups, Hyper* hyper,
             const float* grad_scale, const float* found_inf, const double* sum_of_squares) {
    const float skip = found_inf && *found_inf != 0.0f ? 1.0f : 0.0f;
    const double unscale = grad_scale ? 1.0 / double(*grad_scale) : 1.0;
    const double norm = sum_of_squares ? std::sqrt(*sum_of_squares) + 1e-6 : 0.0;
    int64_t last_group = -1, last_count = -1;
    for (int64_t tensor = 0; tensor < tensors; ++tensor) {
        float* step = (float*)rows[(2 + STEP) * tensors + tensor];
        *step = *step + (1.0f - skip);
        const int64_t count = whole(*step), group = tensor_group[tensor];
        Hyper& h = hyper[tensor];
        if (group == last_group && count == last_count) {  // most tensors share both: the powers are not computed again
            h = hyper[tensor - 1];
            continue;
        }
        const Group& g = groups[group];
        double scale = unscale;
        if (sum_of_squares) {
            const double clip = g.max_norm / norm;
            scale = scale * (clip > 1.0 ? 1.0 : clip);
        }
        h.gscale = float(g.maximize != 0.0 ? -scale : scale);
        h.decay = float(g.decoupled != 0.0 ? g.lr * g.decay : g.decay);
        h.w1 = float(1.0 - g.beta1);
        h.w2 = float(1.0 - g.beta2);
        h.root = float(1.0 / std::sqrt(1.0 - power(g.beta2, count)));
        h.eps = float(g.eps);
        h.step_size = float(g.lr / (1.0 - power(g.beta1, count)));
        h.skip = skip;
        h.beta1 = float(g.beta1);
        h.beta2 = float(g.beta2);
        last_group = group;
        last_count = count;
    }
}

// fp32 rounded stochastically to a number of format F, still in fp32.
template <typename F> inline float rounded_stochastically(float x, uint32_t word);
template <> inline float rounded_stochastically<BFloat16>(float x, uint32_t word) {
    return widen(bf16{uint16_t(round_to<BFloat16, STOCHASTIC, false>(x, word))});
}
template <> inline float rounded_stochastically<Float16>(float x, uint32_t word) {
    return widen(f16{uint16_t(round_to<Float16, STOCHASTIC, false>(x, word))});
}
// The same to the upper 24 bits.
inline void round_to_24_bits_stochastically(float* __restrict x, const uint32_t* __restrict words, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits = x[i] != x[i] ? bits : (bits + (words[i] >> 24)) & 0xffffff00u;
        std::memcpy(x + i, &bits, sizeof bits);
    }
}
template <typename F> void round_stochastically(float* __restrict x, const uint32_t* __restrict words, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = rounded_stochastically<F>(x[i], words[i]);
}

// The random words of elements start to start + n of a tensor, of which the whole parameter may hold more. Draws 1 and 2,
// those of the moments, lie BLOCK and 2 * BLOCK behind draw 0.
template <int DRAWS>
void random_words_of(const int64_t* table, int64_t tensors, int64_t start, int64_t n, uint32_t* words) {
    auto at = [&](Operand row) { return table[row * tensors]; };
    const uint32_t step = uint32_t(whole(*(const float*)at(STEP)));
    for (int64_t done = 0; done < n;) {
        const int64_t row = (start + done) / at(INNER), column = (start + done) % at(INNER);
        const int64_t run = at(INNER) - column < n - done ? at(INNER) - column : n - done;
        random_words<BLOCK, DRAWS>(uint64_t(at(SEED)), step, uint32_t(at(STREAM)),
                                   at(BASE) + row * at(INNER_WHOLE) + column, run, words + done);
        done += run;
    }
}

// Where the fp32 weight is kept: in the parameter itself, in a master beside it, or half in it and half in a remainder.
template <typename T> struct Alone {
    using Held = T;
    T* param;
    static Alone at(int64_t param, int64_t, int64_t start) { return {(T*)param + start}; }
    template <Order O> HALFSTEP_INLINE Pair get_two(int64_t i) const { return halfstep::get_two<O>(param + i); }
    V get_some(int64_t i, int64_t k) const { return halfstep::get_some(param + i, k); }
    template <Order O> HALFSTEP_INLINE void put_two(int64_t i, Pair w) const { halfstep::put_two<O>(param + i, w); }
    void put_some(int64_t i, V w, int64_t k) const { halfstep::put_some(param + i, w, k); }
};
template <typename T> struct Full {
    using Held = float;
    T* param;
    float* master;
    static Full at(int64_t param, int64_t extra, int64_t start) { return {(T*)param + start, (float*)extra + start}; }
    template <Order O> HALFSTEP_INLINE Pair get_two(int64_t i) const { return halfstep::get_two<O>(master + i); }
    V get_some(int64_t i, int64_t k) const { return halfstep::get_some(master + i, k); }
    template <Order O> HALFSTEP_INLINE void put_two(int64_t i, Pair w) const {
        halfstep::put_two<O>(master + i, w);
        halfstep::put_two<O>(param + i, w);
    }
    void put_some(int64_t i, V w, int64_t k) const {
        halfstep::put_some(master + i, w, k);
        halfstep::put_some(param + i, w, k);
    }
};
struct Split {
    using Held = bf16;
    bf16* param;
    bf16* remainder;  // an int16, moved as 16 bits
    static Split at(int64_t param, int64_t extra, int64_t start) { return {(bf16*)param + start, (bf16*)extra + start}; }
    static V join(V high, V low) {
        const U above = (U)high, extended = (U)((I)low >> 16), whole = above + extended;
        return (V)select(is_nan((V)whole), above, whole);
    }
    template <Order O> HALFSTEP_INLINE Pair get_two(int64_t i) const {
        const Pair high = halfstep::get_two<O>(param + i), low = halfstep::get_two<O>(remainder + i);
        return {join(high.a, low.a), join(high.b, low.b)};
    }
    V get_some(int64_t i, int64_t k) const {
        return join(halfstep::get_some(param + i, k), halfstep::get_some(remainder + i, k));
    }
    // The weight, in the upper half of a lane, and the remainder, in the lower half. The other halves are of no use.
    struct Halves { U high, low; };
    static Halves halves_of_number(V w) {
        const U high = (U)w + 0x8000u;
        return {high, (U)w - (high & UPPER)};
    }
    static Halves halves_of(V w) {
        const Halves number = halves_of_number(w);
        return {select(is_nan(w), (U)w | 0x7fc00000u, number.high), select(is_nan(w), U{}, number.low)};
    }
    template <Order O> HALFSTEP_INLINE void put_two(int64_t i, Pair w) const {
        Halves a = halves_of_number(w.a), b = halves_of_number(w.b);
        if (__builtin_expect(any_nan(w.a, w.b), 0)) a = halves_of(w.a), b = halves_of(w.b);
        put_upper_halves<O>(param + i, a.high, b.high);
        put_upper_halves<O>(remainder + i, a.low << 16, b.low << 16);
    }
    void put_some(int64_t i, V w, int64_t k) const {
        const Halves halves = halves_of(w);
        put_raw_some(param + i, lower_half(halves.high >> 16), k);
        put_raw_some(remainder + i, lower_half(halves.low), k);
    }
};

// The master has 24 bits: the remainder is a byte, and a weight is rounded to nearest even as it is put.
struct Split24 {
    bf16* param;
    uint8_t* remainder;  // an int8
    static Split24 at(int64_t param, int64_t extra, int64_t start) { return {(bf16*)param + start, (uint8_t*)extra + start}; }
    static V join(V high, U low) {
        const U above = (U)high, whole = above + (U)((I)(low << 24) >> 16);
        return (V)select(is_nan((V)whole), above, whole);
    }
    static Split::Halves halves_of(V w) {
        const U b = (U)w, rounded = select(is_nan(w), b, (b + 0x7fu + ((b >> 8) & 1u)) & 0xffffff00u);
        return Split::halves_of((V)rounded);
    }
    template <Order O> HALFSTEP_INLINE Pair get_two(int64_t i) const {
        const Pair high = halfstep::get_two<O>(param + i);
        return {join(high.a, get_bytes(remainder + i)), join(high.b, get_bytes(remainder + i + W))};
    }
    V get_some(int64_t i, int64_t k) const {
        uint8_t low[W]{};
        std::memcpy(low, remainder + i, size_t(k));
        return join(halfstep::get_some(param + i, k), get_bytes(low));
    }
    template <Order O> HALFSTEP_INLINE void put_two(int64_t i, Pair w) const {
        static_assert(O == ORDERED, "the bytes are in order");
        const Split::Halves a = halves_of(w.a), b = halves_of(w.b);
        put_upper_halves<O>(param + i, a.high, b.high);
        put_bytes(remainder + i, a.low >> 8, b.low >> 8);
    }
    void put_some(int64_t i, V w, int64_t k) const {
        const Split::Halves halves = halves_of(w);
        uint8_t low[2 * W];
        put_bytes(low, halves.low >> 8, U{});
        put_raw_some(param + i, lower_half(halves.high >> 16), k);
        std::memcpy(remainder + i, low, size_t(k));
    }
};

// A moving average, from whichever end is nearer.
inline V average(V old_value, V new_value, V weight, V beta, bool near_old) {
    return near_old ? old_value + weight * (new_value - old_value) : new_value - beta * (new_value - old_value);
}

// A bf16 moment rounded stochastically, still in fp32.
inline V noisy(V x, U words) {
    U code = (magnitude(x) + (words >> 16)) & 0xffff0000u;
    code = select((I)(code > 0x7f7f0000u), splat_bits(0x7f800000u), code);
    code = select(is_nan(x), splat_bits(0x7fc00000u), code);
    return (V)(code | ((U)x & 0x80000000u));
}

inline bool usual_betas(const Hyper& h) { return h.w1 < 0.5f && h.w2 < 0.5f; }

// The update of n elements, each read and written once. NOISY: the moments are rounded by draws 1 and 2 in `words`.
// USUAL: usual_betas(h) is known to hold, so that no branch in the loop asks.
template <bool AMSGRAD, bool L2, bool NOISY, bool USUAL, typename Weight, typename G, typename S>
void update(const Hyper& h, int64_t n, Weight weight, const G* grad, S* first, S* second, S* top,
            const uint32_t* words) {
    const bool near_m = USUAL || h.w1 < 0.5f, near_v = USUAL || h.w2 < 0.5f;
    const V gscale = splat(h.gscale), decay = splat(h.decay), w1 = splat(h.w1), w2 = splat(h.w2), most = splat(MAX);
    const V factor = splat(h.root), eps = splat(h.eps), step_size = splat(h.step_size), infinite = splat(INFINITY);
    const V beta1 = splat(h.beta1), beta2 = splat(h.beta2);
    // The new weight from the old one; m, v and highest become what is stored.
    const auto step = [&](V w, V g, V& m, V& v, V& highest, U word_m, U word_v) {
        g = g * gscale;
        if (L2) g = g + decay * w;
        const V mean = m = average(m, g, w1, beta1, near_m);
        V square = v = average(smaller(most, v), smaller(most, g * g), w2, beta2, near_v);
        if (NOISY) {
            m = noisy(m, word_m);
            v = noisy(v, word_v);
        }
        if (AMSGRAD) {
            if (NOISY) square = v;
            square = highest = select((square > highest) | is_nan(square), square, highest);
        }
        V d = step_size * (mean / (root(square) * factor + eps));
        if (!L2) d = d + (V)((I)(decay * w) & ((V)magnitude(w) != infinite));
        return w - d;
    };
    constexpr Order O = best_order<typename Weight::Held, G, S>;
    static_assert(!NOISY || O == ORDERED, "the words are in order");
    walk_by_two(
        n,
        [&](int64_t i) {
            Pair w = weight.template get_two<O>(i), m = get_two<O>(first + i), v = get_two<O>(second + i), highest{};
            const Pair g = get_two<O>(grad + i);
            if constexpr (USUAL && W == 8 && std::is_same_v<Weight, Alone<float>>) {
                // All fp32 and not staged: memory is the limit. With AVX-512 this takes longer, and other layouts do not gain.
                constexpr int64_t AHEAD = 256;
                __builtin_prefetch(weight.param + i + AHEAD);
                __builtin_prefetch(grad + i + AHEAD);
                __builtin_prefetch(first + i + AHEAD);
                __builtin_prefetch(second + i + AHEAD);
            }
            U word_m[2]{}, word_v[2]{};
            if (AMSGRAD) highest = get_two<O>(top + i);
            if (NOISY) {
                std::memcpy(word_m, words + BLOCK + i, sizeof word_m);
                std::memcpy(word_v, words + 2 * BLOCK + i, sizeof word_v);
            }
            w.a = step(w.a, g.a, m.a, v.a, highest.a, word_m[0], word_v[0]);
            w.b = step(w.b, g.b, m.b, v.b, highest.b, word_m[1], word_v[1]);
            put_two<O>(first + i, m);
            put_two<O>(second + i, v);
            if (AMSGRAD) put_two<O>(top + i, highest);
            weight.template put_two<O>(i, w);
        },
        [&](int64_t i, int64_t k) {
            V m = get_some(first + i, k), v = get_some(second + i, k), highest{};
            U word_m{}, word_v{};
            if (AMSGRAD) highest = get_some(top + i, k);
            if (NOISY) {
                std::memcpy(&word_m, words + BLOCK + i, size_t(k) * sizeof *words);
                std::memcpy(&word_v, words + 2 * BLOCK + i, size_t(k) * sizeof *words);
            }
            const V w = step(weight.get_some(i, k), get_some(grad + i, k), m, v, highest, word_m, word_v);
            put_some(first + i, m, k);
            put_some(second + i, v, k);
            if (AMSGRAD) put_some(top + i, highest, k);
            weight.put_some(i, w, k);
        });
}

struct Layout { int32_t param, grad, state, master, stochastic; };

// Up to BLOCK elements of every operand in fp32, beside their random words.
struct Block {
    alignas(64) float grad[BLOCK], weight[BLOCK], first[BLOCK], second[BLOCK], top[BLOCK];
    alignas(64) uint32_t words[3 * BLOCK];  // by draw
};

// The n elements from `start` on of a tensor of any layout.
struct Staged {
    const Layout& layout;
    const int64_t* table;
    int64_t tensors, start, n;

    template <typename T> T* operand(Operand which) const { return (T*)table[which * tensors] + start; }
    template <typename F> void with_weight(F&& f) const {
        const int64_t param = table[PARAM * tensors], extra = table[EXTRA * tensors];
        if (layout.master == SPLIT_MASTER) return f(Split::at(param, extra, start));
        if (layout.master == SPLIT24_MASTER) return f(Split24::at(param, extra, start));
        with_dtype(layout.param, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            if (layout.master == FULL_MASTER) f(Full<T>::at(param, extra, start));
            else f(Alone<T>::at(param, extra, start));
        });
    }
    void read(Block& block, bool amsgrad) const {
        with_dtype(layout.grad, [&](auto* type) {
            load(operand<std::remove_pointer_t<decltype(type)>>(GRAD), block.grad, n);
        });
        if (layout.state != CODED) with_dtype(layout.state, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            load(operand<T>(FIRST), block.first, n);
            load(operand<T>(SECOND), block.second, n);
            if (amsgrad) load(operand<T>(TOP), block.top, n);
        });
        with_weight([&](auto weight) {
            walk_by_two(
                n, [&](int64_t i) { put_two<ORDERED>(block.weight + i, weight.template get_two<ORDERED>(i)); },
                [&](int64_t i, int64_t k) { put_some(block.weight + i, weight.get_some(i, k), k); });
        });
        if (layout.stochastic && layout.state != F32) random_words_of<3>(table, tensors, start, n, block.words);
        else if (layout.stochastic) random_words_of<1>(table, tensors, start, n, block.words);
    }
    void write_moments(const Block& block, bool amsgrad) const {
        with_dtype(layout.state, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            store(block.first, operand<T>(FIRST), n);
            store(block.second, operand<T>(SECOND), n);
            if (amsgrad) store(block.top, operand<T>(TOP), n);
        });
    }
    void write_weight(Block& block) const {
        if (layout.stochastic && layout.master == NO_MASTER) {
            if (layout.param == F16) round_stochastically<Float16>(block.weight, block.words, n);
            else if (layout.param == BF16) round_stochastically<BFloat16>(block.weight, block.words, n);
        } else if (layout.stochastic && layout.master == SPLIT24_MASTER) {
            round_to_24_bits_stochastically(block.weight, block.words, n);
        }
        with_weight([&](auto weight) {
            walk_by_two(
                n, [&](int64_t i) { weight.template put_two<ORDERED>(i, get_two<ORDERED>(block.weight + i)); },
                [&](int64_t i, int64_t k) { weight.put_some(i, get_some(block.weight + i, k), k); });
        });
    }
};

// One chunk of any layout: block by block to fp32, update, and back.
template <bool AMSGRAD, bool L2, bool NOISY>
void staged_step(const Layout& layout, const int64_t* table, int64_t tensors, int64_t start, int64_t count,
                 const Hyper& hyper) {
    Block block;
    for (int64_t done = 0; done < count; done += BLOCK) {
        const Staged part{layout, table, tensors, start + done, count - done < BLOCK ? count - done : BLOCK};
        part.read(block, AMSGRAD);
        update<AMSGRAD, L2, NOISY, false>(hyper, part.n, Alone<float>{block.weight}, block.grad, block.first,
                                          block.second, block.top, block.words);
        part.write_moments(block, AMSGRAD);
        part.write_weight(block);
    }
}

// The same for moments in 8 bits: `count` elements are those of whole blocks of codes, and `start` counts such too.
template <bool AMSGRAD, bool L2>
void coded_step(const Layout& layout, const int64_t* table, int64_t tensors, int64_t start, int64_t count,
                const Hyper& h) {
    const bool near_m = h.w1 < 0.5f, near_v = h.w2 < 0.5f;
    const V gscale = splat(h.gscale), decay = splat(h.decay), w1 = splat(h.w1), w2 = splat(h.w2);
    const V factor = splat(h.root), eps = splat(h.eps), step_size = splat(h.step_size), infinite = splat(INFINITY);
    const V beta1 = splat(h.beta1), beta2 = splat(h.beta2), most = splat(LARGEST_POSITIVE);
    const int64_t columns = table[COLUMNS * tensors], per_row = (columns + SPAN - 1) / SPAN;
    Block block{};  // vectors may reach beyond the elements
    alignas(64) uint32_t up[SPAN];
    for (int64_t i = 0; i < SPAN; ++i) up[i] = UP_WORD;
    for (int64_t i = 0; i < 3 * BLOCK; ++i) block.words[i] = NEAREST_WORD;
    const int64_t end = (start + count) / SPAN;
    for (int64_t number = start / SPAN, blocks; number < end; number += blocks) {
        // As many blocks of a row as fit the arrays.
        const int64_t row = number / per_row, column = (number - row * per_row) * SPAN;
        blocks = per_row - (number - row * per_row);
        blocks = blocks < end - number ? blocks : end - number;
        blocks = blocks < BLOCK / SPAN ? blocks : BLOCK / SPAN;
        const int64_t n = columns - column < blocks * SPAN ? columns - column : blocks * SPAN;
        const Staged part{layout, table, tensors, row * columns + column, n};
        uint8_t *first = part.operand<uint8_t>(FIRST), *second = part.operand<uint8_t>(SECOND);
        uint8_t* first_scales = (uint8_t*)table[FIRST_SCALES * tensors];
        uint16_t* second_scales = (uint16_t*)table[SECOND_SCALES * tensors];
        part.read(block, AMSGRAD);
        for (int64_t at = 0, one = number; at < n; at += SPAN, ++one) {
            const int64_t size = n - at < SPAN ? n - at : SPAN;
            float *m = block.first + at, *v = block.second + at, *weight = block.weight + at;
            decode_signed(first + at, first_scales[one], m, size);
            decode_positive(second + at, second_scales[one], v, size);
            for (int64_t i = 0; i < SPAN; i += W) {
                V g = get(block.grad + at + i) * gscale;
                if (L2) g = g + decay * get(weight + i);
                put(m + i, average(get(m + i), g, w1, beta1, near_m));
                put(v + i, average(get(v + i), smaller(most, g * g), w2, beta2, near_v));
            }
            fill_up(m, size);
            fill_up(v, size);
            first_scales[one] = encode_signed(m, block.words + BLOCK + at, first + at, size);
            second_scales[one] = encode_positive(v, block.words + 2 * BLOCK + at, second + at, size);
            if (AMSGRAD) {
                uint8_t* top = part.operand<uint8_t>(TOP) + at;
                uint16_t* top_scales = (uint16_t*)table[TOP_SCALES * tensors];
                float* highest = block.top + at;
                decode_positive(second + at, second_scales[one], v, size);
                decode_positive(top, top_scales[one], highest, size);
                for (int64_t i = 0; i < SPAN; i += W) {
                    const V now = get(v + i), before = get(highest + i);
                    put(v + i, select((now > before) | is_nan(now), now, before));
                }
                fill_up(v, size);
                top_scales[one] = encode_positive(v, up, top, size);
            }
            for (int64_t i = 0; i < SPAN; i += W) {
                const V w = get(weight + i);
                V d = step_size * (get(m + i) / (root(get(v + i)) * factor + eps));
                if (!L2) d = d + (V)((I)(decay * w) & ((V)magnitude(w) != infinite));
                put(weight + i, w - d);
            }
        }
        part.write_weight(block);
    }
}

// Call f(weight, grad, state) with the types, as null pointers, of a layout that is compiled without staging: the usual
// ones, with the usual betas. Returns whether it is one.
template <typename F> bool with_usual(const Layout& layout, F&& f) {
    if (layout.stochastic) return false;
    const auto is = [&](Dtype param, int32_t master, Dtype state) {
        return layout.param == param && layout.grad == param && layout.master == master && layout.state == state;
    };
    if (is(F32, NO_MASTER, F32)) f((Alone<float>*)nullptr, (float*)nullptr, (float*)nullptr);
    else if (is(BF16, SPLIT_MASTER, F32)) f((Split*)nullptr, (bf16*)nullptr, (float*)nullptr);
    else if (is(BF16, SPLIT_MASTER, BF16)) f((Split*)nullptr, (bf16*)nullptr, (bf16*)nullptr);
    else if (is(BF16, FULL_MASTER, F32)) f((Full<bf16>*)nullptr, (bf16*)nullptr, (float*)nullptr);
    else if (is(F16, FULL_MASTER, F32)) f((Full<f16>*)nullptr, (f16*)nullptr, (float*)nullptr);
    else return false;
    return true;
}

// Call work(table column, first element, elements, hyper) for every chunk.
template <typename Work>
void spread(int64_t size, const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
            const Hyper* hyper, int32_t threads, Work&& work) {
    spread_evenly(chunks, 2, threads, [&](int64_t chunk) {
        const int64_t tensor = chunk_tensor[chunk];
        const int64_t start = (chunk - rows[tensors + tensor]) * size;
        const int64_t left = rows[tensor] - start;
        work(rows + 2 * tensors + tensor, start, left < size ? left : size, hyper[tensor]);
    });
}

template <bool AMSGRAD, bool L2>
void run(const Layout& layout, const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
         const Hyper* hyper, int32_t threads) {
    const int64_t size = layout.state == CODED || layout.stochastic ? LONG_CHUNK : CHUNK;
    const bool usual = with_usual(layout, [&](auto* weight, auto* grad, auto* state) {
        using Weight = std::remove_pointer_t<decltype(weight)>;
        using G = std::remove_pointer_t<decltype(grad)>;
        using S = std::remove_pointer_t<decltype(state)>;
        spread(size, rows, chunk_tensor, tensors, chunks, hyper, threads,
               [=](const int64_t* table, int64_t start, int64_t n, const Hyper& h) {
                   if (!usual_betas(h)) return staged_step<AMSGRAD, L2, false>(layout, table, tensors, start, n, h);
                   const auto at = [&](Operand operand) { return table[operand * tensors]; };
                   const auto moment = [&](Operand operand) { return (S*)at(operand) + start; };
                   update<AMSGRAD, L2, false, true>(h, n, Weight::at(at(PARAM), at(EXTRA), start),
                                                    (const G*)at(GRAD) + start, moment(FIRST), moment(SECOND),
                                                    AMSGRAD ? moment(TOP) : nullptr, nullptr);
               });
    });
    if (usual) return;
    spread(size, rows, chunk_tensor, tensors, chunks, hyper, threads,
           [=](const int64_t* table, int64_t start, int64_t n, const Hyper& h) {
               if (layout.state == CODED) coded_step<AMSGRAD, L2>(layout, table, tensors, start, n, h);
               else if (layout.stochastic && layout.state == BF16)
                   staged_step<AMSGRAD, L2, true>(layout, table, tensors, start, n, h);
               else
                   staged_step<AMSGRAD, L2, false>(layout, table, tensors, start, n, h);
           });
}

}  // namespace

extern "C" void halfstep_adam(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
                              const int64_t* tensor_group, const double* groups, float* hyper,
                              const float* grad_scale, const float* found_inf, const double* sum_of_squares,
                              int32_t param, int32_t grad, int32_t state, int32_t master, int32_t amsgrad, int32_t l2,
                              int32_t stochastic, int32_t threads) {
    Hyper* table = (Hyper*)hyper;
    prepare(rows, tensors, tensor_group, (const Group*)groups, table, grad_scale, found_inf, sum_of_squares);
    if (found_inf && *found_inf != 0.0f) return;
    constexpr decltype(&run<false, false>) RUN[] = {run<false, false>, run<false, true>, run<true, false>, run<true, true>};
    RUN[2 * bool(amsgrad) + bool(l2)](Layout{param, grad, state, master, stochastic}, rows, chunk_tensor, tensors, chunks,
                                      table, threads);
}
