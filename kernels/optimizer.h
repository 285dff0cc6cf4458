// What the C++ of all optimizers shares, everything but the rule: the CPU twin of kernels/optimizer, same bits.
//
// A rule is a struct R, made for one tensor and step, with
//     MOMENTS, MAXIMUM        how many moments there are, and whether the last one is the running maximum of the one before
//     Usual                   the rule with usual hyper numbers, whose loop asks nothing; Usual::fits(hyper) says whether they are
//     Group, Hyper            rows of the tables; the first number of the latter is whether the step is skipped
//     numbers(group, count, gscale)  the hyper numbers
//     R(hyper, largest)       `largest`: the largest second moment
//     average(w, grad, m)     update the moments m[] but the maximum
//     weight(w, grad, m)      the new weight; the maximum stands for the moment that it is of
#pragma once
#include "block_codes.h"
#include "lanes.h"
#include <type_traits>

namespace halfstep {

constexpr int64_t CHUNK = 2048;       // elements per table chunk ...
constexpr int64_t LONG_CHUNK = 16384;  // ... and with moments in 8 bits or stochastic rounding
constexpr int64_t BLOCK = 256;   // elements converted and updated at a time: all local arrays fit the first-level cache
constexpr float MAX = 3.4028234663852886e38f;

enum Master : int32_t { NO_MASTER, FULL_MASTER, SPLIT_MASTER, SPLIT24_MASTER, RESULT };
enum Operand { GRAD, PARAM, EXTRA, MOMENT, STEP = MOMENT + 3, STREAM, BASE, INNER, INNER_WHOLE, SEED, SCALES,
               COLUMNS = SCALES + 3 };
struct Layout {
    int64_t param, grad, state, master, stochastic, options;  // a bit for each option of the rule
    bool coded() const { return state == CODED || state == LINEAR; }
};

struct Table {
    const int64_t* rows;  // see multi_tensor.py
    const int32_t* chunk_tensor;
    int64_t tensors, chunks;
};
// A step, as launch.py passes it.
struct Arguments {
    Table table;
    const int64_t* tensor_group;
    const void* groups;
    void* hyper;
    const float *grad_scale, *found_inf;
    const double* sum_of_squares;
    Layout layout;
    int64_t threads;
};
// What the table says of one tensor.
struct Column {
    const int64_t* first;
    int64_t tensors;
    int64_t operator[](int row) const { return first[row * tensors]; }
};

// A step count as a number that powers and random bits can use.
inline int64_t whole(float step) { return int64_t(step < 1.0f ? 1.0f : (step > 0x1p30f ? 0x1p30f : step)); }

// What every optimizer has in the first columns of its group table.
struct Group { double lr, decay, maximize, max_norm; };

// Advance the step counts and fill the hyper table.
template <typename R> void prepare(const Arguments& call) {
    const Table& table = call.table;
    const auto hyper = (typename R::Hyper*)call.hyper;
    const float skip = call.found_inf && *call.found_inf != 0.0f ? 1.0f : 0.0f;
    const double unscale = call.grad_scale ? 1.0 / double(*call.grad_scale) : 1.0;
    const double norm = call.sum_of_squares ? std::sqrt(*call.sum_of_squares) + 1e-6 : 0.0;
    int64_t last_group = -1, last_count = -1;
    for (int64_t tensor = 0; tensor < table.tensors; ++tensor) {
        float* step = (float*)table.rows[(2 + STEP) * table.tensors + tensor];
        *step = *step + (1.0f - skip);
        const int64_t count = whole(*step), group = call.tensor_group[tensor];
        if (group == last_group && count == last_count) {  // most tensors share both: the powers are not computed again
            hyper[tensor] = hyper[tensor - 1];
            continue;
        }
        const auto& g = ((const typename R::Group*)call.groups)[group];
        double scale = unscale;
        if (call.sum_of_squares) {
            const double clip = g.max_norm / norm;
            scale = scale * (clip > 1.0 ? 1.0 : clip);
        }
        hyper[tensor] = R::numbers(g, count, g.maximize != 0.0 ? -scale : scale);
        hyper[tensor].skip = skip;
        last_group = group;
        last_count = count;
    }
}

// fp32 rounded stochastically to the upper 24 bits.
inline void round_to_24_bits_stochastically(float* __restrict x, const uint32_t* __restrict words, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits = x[i] != x[i] ? bits : (bits + (words[i] >> 24)) & 0xffffff00u;
        std::memcpy(x + i, &bits, sizeof bits);
    }
}

// The random words of elements start to start + n of a tensor, of which the whole parameter may hold more. Draws 1 and 2,
// those of the moments, lie BLOCK and 2 * BLOCK behind draw 0.
template <int DRAWS> void random_words_of(const Column& column, int64_t start, int64_t n, uint32_t* words) {
    const uint32_t step = uint32_t(whole(*(const float*)column[STEP]));
    for (int64_t done = 0; done < n;) {
        const int64_t row = (start + done) / column[INNER], at = (start + done) % column[INNER];
        const int64_t run = column[INNER] - at < n - done ? column[INNER] - at : n - done;
        random_words<BLOCK, DRAWS>(uint64_t(column[SEED]), step, uint32_t(column[STREAM]),
                                   column[BASE] + row * column[INNER_WHOLE] + at, run, words + done);
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
// There is none: the parameter is written and not read.
template <typename T> struct Result : Alone<T> {
    static Result at(int64_t param, int64_t, int64_t start) { return {{(T*)param + start}}; }
    template <Order O> HALFSTEP_INLINE Pair get_two(int64_t) const { return {V{}, V{}}; }
    V get_some(int64_t, int64_t) const { return V{}; }
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

// A bf16 moment rounded stochastically, still in fp32.
inline V noisy(V x, U words) {
    U code = (magnitude(x) + (words >> 16)) & 0xffff0000u;
    code = select((I)(code > 0x7f7f0000u), splat_bits(0x7f800000u), code);
    code = select(is_nan(x), splat_bits(0x7fc00000u), code);
    return (V)(code | ((U)x & 0x80000000u));
}

template <typename S> struct Moments { S* at[3]; };

// The update of n elements, each read and written once. NOISY: the moments are rounded by draws 1 and 2 in `words`.
template <typename R, bool NOISY, typename Weight, typename G, typename S>
void update(const R& rule, int64_t n, Weight weight, const G* grad, Moments<S> moments, const uint32_t* words) {
    constexpr int N = R::MOMENTS, AVERAGED = N - R::MAXIMUM;
    // The new weight from the old one; m becomes what is stored.
    const auto step = [&](V w, V g, V* m, const U* noise) {
        V used[N + 1];
        rule.average(w, g, m);
        for (int k = 0; k < AVERAGED; ++k) used[k] = m[k];
        if (NOISY) for (int k = 0; k < AVERAGED; ++k) m[k] = noisy(m[k], noise[k]);
        if (R::MAXIMUM) {
            const V now = NOISY ? m[AVERAGED - 1] : used[AVERAGED - 1];
            used[AVERAGED - 1] = m[N - 1] = select((now > m[N - 1]) | is_nan(now), now, m[N - 1]);
        }
        return rule.weight(w, g, used);
    };
    constexpr Order O = best_order<typename Weight::Held, G, S>;
    static_assert(!NOISY || O == ORDERED, "the words are in order");
    walk_by_two(
        n,
        [&](int64_t i) {
            const Pair w = weight.template get_two<O>(i);
            V a[N + 1], b[N + 1];
            for (int k = 0; k < AVERAGED; ++k) {
                const Pair m = get_two<O>(moments.at[k] + i);
                a[k] = m.a, b[k] = m.b;
            }
            const Pair g = get_two<O>(grad + i);
            U noise_a[N + 1]{}, noise_b[N + 1]{};
            if (R::MAXIMUM) {
                const Pair m = get_two<O>(moments.at[N - 1] + i);
                a[N - 1] = m.a, b[N - 1] = m.b;
            }
            if (NOISY) {
                for (int k = 0; k < AVERAGED; ++k) {
                    noise_a[k] = get_words(words + (k + 1) * BLOCK + i);
                    noise_b[k] = get_words(words + (k + 1) * BLOCK + i + W);
                }
            }
            const Pair new_w = {step(w.a, g.a, a, noise_a), step(w.b, g.b, b, noise_b)};
            for (int k = 0; k < N; ++k) put_two<O>(moments.at[k] + i, Pair{a[k], b[k]});
            weight.template put_two<O>(i, new_w);
        },
        [&](int64_t i, int64_t count) {
            V m[N + 1];
            U noise[N + 1]{};
            for (int k = 0; k < N; ++k) m[k] = get_some(moments.at[k] + i, count);
            if (NOISY) {
                for (int k = 0; k < AVERAGED; ++k)
                    std::memcpy(&noise[k], words + (k + 1) * BLOCK + i, size_t(count) * sizeof *words);
            }
            const V w = step(weight.get_some(i, count), get_some(grad + i, count), m, noise);
            for (int k = 0; k < N; ++k) put_some(moments.at[k] + i, m[k], count);
            weight.put_some(i, w, count);
        });
}

// Up to BLOCK elements of every operand in fp32, and their random words by draw.
struct Block {
    alignas(64) float grad[BLOCK], weight[BLOCK], moments[3][BLOCK];
    alignas(64) uint32_t words[3 * BLOCK];
};

// The n elements from `start` on of a tensor of any layout.
struct Staged {
    const Layout& layout;
    const Column& column;
    int64_t start, n;

    template <typename F> void with_weight(F&& f) const {
        const int64_t param = column[PARAM], extra = column[EXTRA];
        if (layout.master == SPLIT_MASTER) return f(Split::at(param, extra, start));
        if (layout.master == SPLIT24_MASTER) return f(Split24::at(param, extra, start));
        with_dtype(layout.param, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            if (layout.master == FULL_MASTER) f(Full<T>::at(param, extra, start));
            else if (layout.master == RESULT) f(Result<T>::at(param, extra, start));
            else f(Alone<T>::at(param, extra, start));
        });
    }
    void read(Block& block, int moments) const {
        with_dtype(layout.grad, [&](auto* type) { convert((decltype(type))column[GRAD] + start, block.grad, n); });
        if (!layout.coded()) with_dtype(layout.state, [&](auto* type) {
            for (int k = 0; k < moments; ++k) convert((decltype(type))column[MOMENT + k] + start, block.moments[k], n);
        });
        with_weight([&](auto weight) {
            walk_by_two(
                n, [&](int64_t i) { put_two<ORDERED>(block.weight + i, weight.template get_two<ORDERED>(i)); },
                [&](int64_t i, int64_t k) { put_some(block.weight + i, weight.get_some(i, k), k); });
        });
        if (layout.stochastic && layout.state != F32) random_words_of<3>(column, start, n, block.words);
        else if (layout.stochastic) random_words_of<1>(column, start, n, block.words);
    }
    void write_moments(const Block& block, int moments) const {
        with_dtype(layout.state, [&](auto* type) {
            for (int k = 0; k < moments; ++k) convert(block.moments[k], (decltype(type))column[MOMENT + k] + start, n);
        });
    }
    void write_weight(Block& block) const {
        if (layout.stochastic && layout.master == NO_MASTER && layout.param != F32) {
            const auto round = layout.param == F16 ? round_block<Float16, uint16_t, STOCHASTIC, false>
                                                   : round_block<BFloat16, uint16_t, STOCHASTIC, false>;
            return round(block.weight, block.words, (uint16_t*)column[PARAM] + start, n);
        }
        if (layout.stochastic && layout.master == SPLIT24_MASTER)
            round_to_24_bits_stochastically(block.weight, block.words, n);
        with_weight([&](auto weight) {
            walk_by_two(
                n, [&](int64_t i) { weight.template put_two<ORDERED>(i, get_two<ORDERED>(block.weight + i)); },
                [&](int64_t i, int64_t k) { weight.put_some(i, get_some(block.weight + i, k), k); });
        });
    }
};

// One chunk of any layout: block by block to fp32, update, and back.
template <typename R, bool NOISY>
void staged_step(const R& rule, const Layout& layout, const Column& column, int64_t start, int64_t count) {
    Block block;
    for (int64_t done = 0; done < count; done += BLOCK) {
        const Staged part{layout, column, start + done, count - done < BLOCK ? count - done : BLOCK};
        part.read(block, R::MOMENTS);
        update<R, NOISY>(rule, part.n, Alone<float>{block.weight}, block.grad,
                         Moments<float>{{block.moments[0], block.moments[1], block.moments[2]}}, block.words);
        part.write_moments(block, R::MOMENTS);
        part.write_weight(block);
    }
}

// The codes of a moment, of which the first one is signed or linear.
struct Codes {
    uint8_t* codes;
    int64_t scales;
    bool is_signed, is_linear;
    Codes(const Staged& part, int moment)
        : codes((uint8_t*)part.column[MOMENT + moment] + part.start), scales(part.column[SCALES + moment]), is_signed(moment == 0),
          is_linear(part.layout.state == LINEAR) {}
    void decode(int64_t at, int64_t number, float* x, int64_t size) const {
        if (is_linear) decode_linear(codes + at, ((uint8_t*)scales)[number], x, size);
        else if (is_signed) decode_signed(codes + at, ((uint8_t*)scales)[number], x, size);
        else decode_positive(codes + at, ((uint16_t*)scales)[number], x, size);
    }
    void encode(int64_t at, int64_t number, float* x, int64_t size, const uint32_t* words) const {
        fill_up(x, size);
        if (is_linear) ((uint8_t*)scales)[number] = encode_linear(x, words, codes + at, size);
        else if (is_signed) ((uint8_t*)scales)[number] = encode_signed(x, words, codes + at, size);
        else ((uint16_t*)scales)[number] = encode_positive(x, words, codes + at, size);
    }
};

// The same for moments in 8 bits: `count` elements are those of whole blocks of codes, and `start` counts such too.
template <typename R>
void coded_step(const R& rule, const Layout& layout, const Column& column, int64_t start, int64_t count) {
    constexpr int N = R::MOMENTS, AVERAGED = N - R::MAXIMUM;
    const int64_t columns = column[COLUMNS], per_row = (columns + SPAN - 1) / SPAN;
    Block block{};  // vectors may reach beyond the elements
    alignas(64) uint32_t up[SPAN];
    for (int64_t i = 0; i < SPAN; ++i) up[i] = UP_WORD;
    for (int64_t i = 0; i < 3 * BLOCK; ++i) block.words[i] = NEAREST_WORD;
    const int64_t end = (start + count) / SPAN;
    for (int64_t number = start / SPAN, blocks; number < end; number += blocks) {
        // As many blocks of a row as fit the arrays.
        const int64_t row = number / per_row, first = (number - row * per_row) * SPAN;
        blocks = per_row - (number - row * per_row);
        blocks = blocks < end - number ? blocks : end - number;
        blocks = blocks < BLOCK / SPAN ? blocks : BLOCK / SPAN;
        const int64_t n = columns - first < blocks * SPAN ? columns - first : blocks * SPAN;
        const Staged part{layout, column, row * columns + first, n};
        part.read(block, N);
        for (int64_t at = 0; at < n; at += SPAN) {
            const int64_t size = n - at < SPAN ? n - at : SPAN, here = number + at / SPAN;
            float *weight = block.weight + at, *grad = block.grad + at;
            V m[N + 1];
            for (int k = 0; k < AVERAGED; ++k) Codes(part, k).decode(at, here, block.moments[k] + at, size);
            for (int64_t i = 0; i < SPAN; i += W) {
                for (int k = 0; k < AVERAGED; ++k) m[k] = get(block.moments[k] + at + i);
                rule.average(get(weight + i), get(grad + i), m);
                for (int k = 0; k < AVERAGED; ++k) put(block.moments[k] + at + i, m[k]);
            }
            for (int k = 0; k < AVERAGED; ++k)
                Codes(part, k).encode(at, here, block.moments[k] + at, size, block.words + (k + 1) * BLOCK + at);
            if (R::MAXIMUM) {
                const Codes top(part, N - 1);
                float *now = block.moments[AVERAGED - 1] + at, *highest = block.moments[N - 1] + at;
                Codes(part, AVERAGED - 1).decode(at, here, now, size);
                top.decode(at, here, highest, size);
                for (int64_t i = 0; i < SPAN; i += W) {
                    const V x = get(now + i), before = get(highest + i);
                    put(now + i, select((x > before) | is_nan(x), x, before));
                }
                top.encode(at, here, now, size, up);
            }
            for (int64_t i = 0; i < SPAN; i += W) {
                for (int k = 0; k < AVERAGED; ++k) m[k] = get(block.moments[k] + at + i);
                put(weight + i, rule.weight(get(weight + i), get(grad + i), m));
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

// Update all tensors: by R::Usual where the layout and the hyper numbers are the usual ones, else by R.
template <typename R> void run(const Arguments& call) {
    using Usual = typename R::Usual;
    const Layout& layout = call.layout;
    const Table& table = call.table;
    const auto hyper = (const typename R::Hyper*)call.hyper;
    const int64_t size = layout.coded() || layout.stochastic ? LONG_CHUNK : CHUNK;
    const auto spread = [&](auto&& work) {  // work(rule's numbers, column, first element, elements) for every chunk
        spread_evenly(table.chunks, 2, int32_t(call.threads), [&](int64_t chunk) {
            const int64_t tensor = table.chunk_tensor[chunk], left = table.rows[tensor];
            const int64_t start = (chunk - table.rows[table.tensors + tensor]) * size;
            const Column column{table.rows + 2 * table.tensors + tensor, table.tensors};
            work(hyper[tensor], column, start, left - start < size ? left - start : size);
        });
    };
    const bool usual = with_usual(layout, [&](auto* weight, auto* grad, auto* state) {
        using Weight = std::remove_pointer_t<decltype(weight)>;
        using G = std::remove_pointer_t<decltype(grad)>;
        using S = std::remove_pointer_t<decltype(state)>;
        spread([&](const auto& h, const Column& column, int64_t start, int64_t n) {
            if (!Usual::fits(h)) return staged_step<R, false>(R(h, MAX), layout, column, start, n);
            const auto moment = [&](int k) { return k < R::MOMENTS ? (S*)column[MOMENT + k] + start : nullptr; };
            update<Usual, false>(Usual(h, MAX), n, Weight::at(column[PARAM], column[EXTRA], start),
                                 (const G*)column[GRAD] + start, Moments<S>{{moment(0), moment(1), moment(2)}}, nullptr);
        });
    });
    if (usual) return;
    spread([&](const auto& h, const Column& column, int64_t start, int64_t n) {
        if (layout.coded()) coded_step(R(h, LARGEST_POSITIVE), layout, column, start, n);
        else if (layout.stochastic && layout.state == BF16) staged_step<R, true>(R(h, MAX), layout, column, start, n);
        else staged_step<R, false>(R(h, MAX), layout, column, start, n);
    });
}

// A step by Rule<options of the layout>. OPTIONS are all that occur. Without PREPARES, the numbers are there.
template <template <int> class Rule, bool PREPARES, int... OPTIONS>
void step(const Arguments& call) {
    const auto with = [&](auto* rule) {
        using R = std::remove_pointer_t<decltype(rule)>;
        if constexpr (PREPARES) prepare<R>(call);
        if (!call.found_inf || *call.found_inf == 0.0f) run<R>(call);
    };
    ((call.layout.options == OPTIONS ? with((Rule<OPTIONS>*)nullptr) : void()), ...);
}

}  // namespace halfstep
