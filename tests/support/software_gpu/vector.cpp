// What each instruction of CDNA 3 computes, as AMD's document of the instruction set says: "AMD Instinct MI300"
// Instruction Set Architecture. One line an instruction: its name without its encoding, and a function of one lane.
//
// Every kernel here asks for IEEE mode, nearest even and all subnormals (amd.py refuses others), so that +, *, fma and
// the conversions are the processor's own, compiled with -ffp-contract=off.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "waves.h"

namespace {

std::map<std::string, WaveOperation> table;

using f16 = _Float16;
struct Bit {  // of a mask of lanes
    bool on;
};

template <class T> constexpr bool FLOATING = std::is_same_v<T, f32> || std::is_same_v<T, f64> || std::is_same_v<T, f16>;
template <int BYTES>
using Bits = std::conditional_t<BYTES == 8, u64, std::conditional_t<BYTES == 4, u32, u16>>;

u32 part_of(u32 word, int part, bool sign) {
    if (part == 0) return word;
    int from = part < 5 ? 8 * (part - 1) : 16 * (part - 5), bits = part < 5 ? 8 : 16;
    u32 left = word << (32 - bits - from);
    return sign ? u32(i32(left) >> (32 - bits)) : left >> (32 - bits);
}

template <class T> T operand(const Words &held, const Place &place, int lane) {
    u32 low = held.low[lane * held.step];
    if constexpr (std::is_same_v<T, Bit>) {
        return {bool((u64(*held.high) << 32 | low) >> lane & 1)};
    } else {
        using B = Bits<sizeof(T)>;
        B bits;
        if constexpr (sizeof(T) == 8)
            bits = u64(held.high[lane * held.step]) << 32 | low;
        else
            bits = B(part_of(low, place.part, place.change & EXTENDED) >>
                     (sizeof(T) == 2 && place.change & HIGH_FOR_LOW ? 16 : 0));
        if constexpr (FLOATING<T> || std::is_same_v<T, u32>) {  // v_cndmask_b32 changes signs too
            constexpr B SIGN = B(1) << (8 * sizeof(T) - 1);
            if (place.change & ABSOLUTE) bits &= ~SIGN;
            if (place.change & NEGATED) bits ^= SIGN;
        }
        return std::bit_cast<T>(bits);
    }
}

template <class R> void result(Wave &w, const WaveInstruction &i, int lane, R value) {
    u32 *to = w.vector(i.operands[0]) + lane;
    auto bits = std::bit_cast<Bits<sizeof(R)>>(value);
    if constexpr (sizeof(R) == 8) to[WAVE] = u32(bits >> 32);
    int part = i.operands[0].part;
    if (part == 0) {
        *to = u32(bits);  // of 16 bits the upper half becomes 0
    } else {
        int from = part < 5 ? 8 * (part - 1) : 16 * (part - 5);
        u32 written = (part < 5 ? 0xFFu : 0xFFFFu) << from;
        *to = (u32(bits) << from & written) | (i.keep ? *to & ~written : 0);
    }
}

// The lane whose first operand a lane takes under a control word of DPP, -1 where there is none.
int dpp_source(int control, int l) {
    int in_row = l % 16, by = control & 15;
    if (control < 0x100) return (l & ~3) | (control >> 2 * (l & 3) & 3);
    switch (control & ~15) {
        case 0x100: return in_row + by < 16 ? l + by : -1;
        case 0x110: return in_row >= by ? l - by : -1;
        case 0x120: return (l & ~15) | ((l - by) & 15);
    }
    switch (control) {
        case 0x140: return l ^ 15;
        case 0x141: return l ^ 7;
        case 0x142: return l / 16 * 16 - 1;  // of the row before its last lane
        case 0x143: return l < 32 ? -1 : 31;
    }
    return -1;
}

// The lanes that run, and the sources of an instruction, the first of them from other lanes where DPP says so.
struct Sources {
    u64 lanes;
    Words held[6];
    u32 moved[WAVE];

    Sources(Wave &w, const WaveInstruction &i, int first, int count) : lanes(w.pair(EXEC)) {
        for (int k = 0; k < count; k++) held[k] = words(w, i.operands[first + k]);
        if (!i.dpp) return;
        u64 exec = lanes;
        for (int l = 0; l < WAVE; l++) {
            int from = dpp_source(i.dpp - 1, l);
            bool there = from >= 0 && exec >> from & 1;
            moved[l] = there ? held[0].low[from] : 0;
            bool runs = (i.rows >> l / 16 & 1) && (i.banks >> l % 16 / 4 & 1) && (there || i.zero);
            if (!runs) lanes &= ~(1ull << l);
        }
        held[0].low = moved;
    }
};

template <class F, class R, class... A, size_t... I>
void by_lane(Wave &w, const WaveInstruction &i, R (F::*)(A...) const, std::index_sequence<I...>) {
    Sources s(w, i, 1, sizeof...(A));
    for (int l = 0; l < WAVE; l++)
        if (s.lanes >> l & 1) result<R>(w, i, l, F{}(operand<A>(s.held[I], i.operands[1 + I], l)...));
}

template <class F, class R, class... A, size_t... I>
void mask_by_lane(Wave &w, const WaveInstruction &i, R (F::*)(A...) const, std::index_sequence<I...>) {
    Sources s(w, i, 1, sizeof...(A));
    u64 mask = 0;  // 0 for lanes that do not run
    for (int l = 0; l < WAVE; l++)
        if (s.lanes >> l & 1) mask |= u64(F{}(operand<A>(s.held[I], i.operands[1 + I], l)...)) << l;
    w.set_pair(i.operands[0].index, mask);
}

// With a mask as a second result: carries, and what a division is scaled by.
template <class F, class R, class... A, size_t... I>
void carry_by_lane(Wave &w, const WaveInstruction &i, R (F::*)(bool &, A...) const, std::index_sequence<I...>) {
    Sources s(w, i, 2, sizeof...(A));
    u64 mask = 0;
    for (int l = 0; l < WAVE; l++)
        if (s.lanes >> l & 1) {
            bool out = false;
            result<R>(w, i, l, F{}(out, operand<A>(s.held[I], i.operands[2 + I], l)...));
            mask |= u64(out) << l;
        }
    w.set_pair(i.operands[1].index, mask);
}

template <class R> void scalar_result(Wave &w, const Place &to, R value) {
    if constexpr (sizeof(R) == 8)
        w.set_pair(to.index, u64(value));
    else
        w.scalars[to.index] = u32(value);
}

template <class F, class R, class... A, size_t... I>
void of_scalars(Wave &w, const WaveInstruction &i, R (F::*)(bool &, A...) const, std::index_sequence<I...>) {
    bool scc = w.scc;
    R value = F{}(scc, operand<A>(words(w, i.operands[1 + I]), i.operands[1 + I], 0)...);
    scalar_result(w, i.operands[0], value);
    w.scc = scc;
}

template <class F, class... A, size_t... I>
void scalar_test(Wave &w, const WaveInstruction &i, bool (F::*)(A...) const, std::index_sequence<I...>) {
    w.scc = F{}(operand<A>(words(w, i.operands[I]), i.operands[I], 0)...);
}

// Two results, low and high, of halves that the operands choose.
template <class F, class T, class... A, size_t... I>
void packed_by_lane(Wave &w, const WaveInstruction &i, T (F::*)(A...) const, std::index_sequence<I...>) {
    Sources s(w, i, 1, sizeof...(A));
    auto half = [&](int k, int lane, int high) -> T {
        const Place &place = i.operands[1 + k];
        bool upper = place.change & (high ? HIGH_FOR_HIGH : HIGH_FOR_LOW);
        const u32 *from = sizeof(T) == 4 && upper ? s.held[k].high : s.held[k].low;
        u32 word = from[lane * s.held[k].step];
        auto bits = Bits<sizeof(T)>(sizeof(T) == 2 && upper ? word >> 16 : word);
        if (FLOATING<T> && place.change & (high ? NEGATED_HIGH : NEGATED)) bits ^= 1u << (8 * sizeof(T) - 1);
        return std::bit_cast<T>(bits);
    };
    for (int l = 0; l < WAVE; l++) {
        if (!(s.lanes >> l & 1)) continue;
        T low = F{}(half(I, l, 0)...), high = F{}(half(I, l, 1)...);
        u32 *to = w.vector(i.operands[0]) + l;
        if constexpr (sizeof(T) == 4)
            to[0] = std::bit_cast<u32>(low), to[WAVE] = std::bit_cast<u32>(high);
        else
            to[0] = u32(std::bit_cast<u16>(low)) | u32(std::bit_cast<u16>(high)) << 16;
    }
}

// The low word of the result is a half of the first operand, the high word one of the second.
void packed_move(Wave &w, const WaveInstruction &i) {
    Sources s(w, i, 1, 2);
    u32 halves[2];
    for (int l = 0; l < WAVE; l++) {
        if (!(s.lanes >> l & 1)) continue;
        for (int k = 0; k < 2; k++) {
            const u32 *from = i.operands[1 + k].change & HIGH_FOR_LOW ? s.held[k].high : s.held[k].low;
            halves[k] = from[l * s.held[k].step];
        }
        u32 *to = w.vector(i.operands[0]) + l;
        to[0] = halves[0], to[WAVE] = halves[1];
    }
}

template <class F, class R, class... A> auto arguments(R (F::*)(A...) const) { return std::index_sequence_for<A...>(); }
template <class F, class R, class... A> auto after_flag(R (F::*)(bool &, A...) const) {
    return std::index_sequence_for<A...>();
}

// A kind of operations: what runs them, which parameters of their function are operands, and how many results they have.
#define KIND(enter, run, parameters, results)                                     \
    template <class F> void enter(const std::string &name, F) {                   \
        using Count = decltype(parameters(&F::operator()));                       \
        table[name] = {[](Wave &w, const WaveInstruction &i) {                    \
                           run(w, i, &F::operator(), Count{});                    \
                       },                                                         \
                       int(Count::size()) + results};                             \
    }
KIND(op, by_lane, arguments, 1)
KIND(compare, mask_by_lane, arguments, 1)
KIND(carry, carry_by_lane, after_flag, 2)
KIND(scalar, of_scalars, after_flag, 1)
KIND(test, scalar_test, arguments, 0)
KIND(packed, packed_by_lane, arguments, 1)
#undef KIND

// ------------------------------------------------------------------------------------------------------------- numbers

int inexact = 0;

// An approximation within one unit in the last place: rounded down or up, or either. Those of fp32 may take
// subnormal numbers for 0.
template <class T> T approximation(T exact, auto wide) {
    if (inexact == 0 || exact == 0 || std::isinf(exact) || exact != exact || decltype(wide)(exact) == wide) return exact;
    int way = inexact == 2 ? (std::bit_cast<u64>(f64(wide)) * 0x9E3779B97F4A7C15ull >> 63 ? 1 : -1) : inexact;
    T end = std::numeric_limits<T>::infinity() * way;
    return (way > 0) == (decltype(wide)(exact) > wide) ? exact : std::nextafter(exact, end);
}
f32 flushed(f32 x) { return inexact && std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
f32 approximate(f64 exact) { return flushed(approximation(f32(exact), exact)); }
// Of fp64: within 2^29 units in the last place.
f64 coarse(f64 exact) {
    f64 share = inexact == 2 ? f64(i32(std::bit_cast<u64>(exact) * 0x9E3779B97F4A7C15ull >> 32)) * 0x1p-31 : inexact;
    return std::isfinite(exact) ? exact * (1 + share * 0x1p-24) : exact;
}

template <class T> constexpr int MANTISSA = sizeof(T) == 8 ? 52 : sizeof(T) == 4 ? 23 : 10;
template <class T> int exponent(T x) {  // as it is encoded
    return int(std::bit_cast<Bits<sizeof(T)>>(x) >> MANTISSA<T> & ((1 << (8 * sizeof(T) - 1 - MANTISSA<T>)) - 1));
}
template <class T> bool is_nan(T x) { return x != x; }
template <class T> T quiet(T x) {
    return std::bit_cast<T>(Bits<sizeof(T)>(std::bit_cast<Bits<sizeof(T)>>(x) | Bits<sizeof(T)>(1) << (MANTISSA<T> - 1)));
}
template <class T> bool signalling(T x) {
    return is_nan(x) && !(std::bit_cast<Bits<sizeof(T)>>(x) >> (MANTISSA<T> - 1) & 1);
}

template <class T> T greater(T a, T b) {
    if (signalling(a) || signalling(b)) return quiet(signalling(a) ? a : b);
    if (is_nan(a) || is_nan(b)) return is_nan(a) ? b : a;
    return a > b || (a == b && !std::signbit(a)) ? a : b;
}
template <class T> T smaller(T a, T b) {
    if (signalling(a) || signalling(b)) return quiet(signalling(a) ? a : b);
    if (is_nan(a) || is_nan(b)) return is_nan(a) ? b : a;
    return a < b || (a == b && std::signbit(a)) ? a : b;
}

template <class I> I integer(f32 x) {  // toward zero, out of range to the nearest end, NaN to 0
    if (is_nan(x)) return 0;
    if (x >= 2.0f * f32(std::numeric_limits<I>::max() / 2 + 1)) return std::numeric_limits<I>::max();
    return x <= f32(std::numeric_limits<I>::min()) ? std::numeric_limits<I>::min() : I(x);
}

template <class T> bool is_class(T x, u32 asked) {
    bool negative = std::signbit(f64(x));
    int of = is_nan(x)              ? !signalling(x)
             : std::isinf(f64(x))   ? (negative ? 2 : 9)
             : exponent(x) > 0      ? (negative ? 3 : 8)
             : x != 0               ? (negative ? 4 : 7)
                                    : (negative ? 5 : 6);
    return asked >> of & 1;
}

// The steps of a division: its operands brought where nothing overflows, the last step, and what is no number. Taken
// literally, the document's pseudocode of all three makes wrong divisions at either end of the range, which the hardware
// does not: it scales the denominator up where that overflows, the last step by 2^32 both ways, and leaves NaN where a
// quotient overflows. Here each is what makes LLVM's sequence of them right.
template <class T, int BIG, int TINY, int BY> T division_scaled(bool &later, T which, T denominator, T numerator) {
    using Wide = std::conditional_t<sizeof(T) == 4, f64, long double>;
    constexpr T LEAST = std::numeric_limits<T>::min();
    if (numerator == 0 || denominator == 0) return std::numeric_limits<T>::quiet_NaN();
    bool is_denominator = std::bit_cast<Bits<sizeof(T)>>(which) == std::bit_cast<Bits<sizeof(T)>>(denominator);
    bool is_numerator = std::bit_cast<Bits<sizeof(T)>>(which) == std::bit_cast<Bits<sizeof(T)>>(numerator);
    bool small_inverse = std::fabs(Wide(1) / Wide(denominator)) < LEAST;
    bool small_quotient = std::fabs(Wide(numerator) / Wide(denominator)) < LEAST;
    if (exponent(numerator) - exponent(denominator) >= BIG) {
        later = true;
        return is_denominator ? std::ldexp(which, BY) : which;
    }
    if (std::fabs(denominator) < LEAST) return std::ldexp(which, BY);
    if (small_inverse && small_quotient) {
        later = true;
        return is_denominator ? std::ldexp(which, -BY) : which;
    }
    if (small_inverse) return std::ldexp(which, -BY);
    if (small_quotient) {
        later = true;
        return is_numerator ? std::ldexp(which, BY) : which;
    }
    return exponent(numerator) <= TINY ? std::ldexp(which, BY) : which;
}

// Scaled before it is rounded, down where the quotient was scaled up.
template <class T, int BY> T division_step(T a, T b, T c, Bit scaled) {
    using Wide = std::conditional_t<sizeof(T) == 4, f64, __float128>;
    if (!scaled.on) return std::fma(a, b, c);
    if (!std::isfinite(a) || !std::isfinite(b) || !std::isfinite(c)) return std::fma(a, b, c);
    int by = exponent(c) > (sizeof(T) == 4 ? 127 : 1023) ? BY : -BY;
    Wide product = Wide(a) * Wide(b), addend = c, sum = product + addend;
    Wide back = sum - product, lost = (product - (sum - back)) + (addend - back);
    Wide scale = by > 0 ? Wide(std::ldexp(T(1), BY)) : 1 / Wide(std::ldexp(T(1), BY));
    if (lost != 0) {  // to odd, so that the rounding to come sees that something was there
        using B = std::conditional_t<sizeof(T) == 4, u64, unsigned __int128>;
        B bits = std::bit_cast<B>(sum);
        if (!(bits & 1)) bits += (lost > 0) == (sum > 0) ? 1 : -1;
        sum = std::bit_cast<Wide>(bits);
    }
    return T(sum * scale);
}

template <class T, int LEAST> T division_fixed(T quotient, T denominator, T numerator) {
    using L = std::numeric_limits<T>;
    T sign = std::signbit(denominator) != std::signbit(numerator) ? -1 : 1;
    if (is_nan(numerator)) return quiet(numerator);
    if (is_nan(denominator)) return quiet(denominator);
    if (denominator == 0 && numerator == 0) return -L::quiet_NaN();
    if (std::isinf(denominator) && std::isinf(numerator)) return -L::quiet_NaN();
    if (denominator == 0 || std::isinf(numerator)) return sign * L::infinity();
    if (std::isinf(denominator) || numerator == 0) return sign * 0;
    if (exponent(numerator) - exponent(denominator) < LEAST) return sign * 0;
    if (exponent(numerator) - exponent(denominator) > L::max_exponent + 1) return sign * L::infinity();
    return std::copysign(quotient, sign);
}

// ---------------------------------------------------------------------------------------------------------- the table

template <class T> void comparisons(const std::string &type) {
    auto both = [&](const std::string &name, auto function) {
        compare("v_cmp_" + name + "_" + type, function);
        if constexpr (!FLOATING<T>) test("s_cmp_" + name + "_" + type, function);
    };
    both("lt", [](T a, T b) -> bool { return a < b; });
    both("le", [](T a, T b) -> bool { return a <= b; });
    both("gt", [](T a, T b) -> bool { return a > b; });
    both("ge", [](T a, T b) -> bool { return a >= b; });
    both("eq", [](T a, T b) -> bool { return a == b; });
    both(FLOATING<T> ? "neq" : "ne", [](T a, T b) -> bool { return a != b; });
    both("lg", [](T a, T b) -> bool { return a < b || a > b; });
    if constexpr (FLOATING<T>) {
        both("nlt", [](T a, T b) -> bool { return !(a < b); });
        both("nle", [](T a, T b) -> bool { return !(a <= b); });
        both("ngt", [](T a, T b) -> bool { return !(a > b); });
        both("nge", [](T a, T b) -> bool { return !(a >= b); });
        both("nlg", [](T a, T b) -> bool { return !(a < b || a > b); });
        both("o", [](T a, T b) -> bool { return a == a && b == b; });
        both("u", [](T a, T b) -> bool { return a != a || b != b; });
    }
}

// Results of the scalar unit of which SCC says that they are not 0.
template <class F, class R, class... A> void logical(const std::string &name, F, R (F::*)(bool &, A...) const) {
    scalar(name, [](bool &scc, A... a) -> R {
        R value = F{}(scc, a...);
        scc = value != 0;
        return value;
    });
}
template <class F> void logical(const std::string &name, F f) { logical(name, f, &F::operator()); }

template <class T> void scalars(const std::string &b) {
    logical("s_and_b" + b, [](bool &, T x, T y) -> T { return x & y; });
    logical("s_or_b" + b, [](bool &, T x, T y) -> T { return x | y; });
    logical("s_xor_b" + b, [](bool &, T x, T y) -> T { return x ^ y; });
    logical("s_andn2_b" + b, [](bool &, T x, T y) -> T { return x & ~y; });
    logical("s_orn2_b" + b, [](bool &, T x, T y) -> T { return x | ~y; });
    logical("s_not_b" + b, [](bool &, T x) -> T { return ~x; });
    logical("s_bcnt1_i32_b" + b, [](bool &, T x) -> u32 { return u32(std::popcount(x)); });
    logical("s_lshl_b" + b, [](bool &, T x, u32 by) -> T { return x << (by % (8 * sizeof(T))); });
    logical("s_lshr_b" + b, [](bool &, T x, u32 by) -> T { return x >> (by % (8 * sizeof(T))); });
    using S = std::make_signed_t<T>;
    logical("s_ashr_i" + b, [](bool &, S x, u32 by) -> S { return x >> (by % (8 * sizeof(T))); });
    scalar("s_mov_b" + b, [](bool &, T x) -> T { return x; });
    scalar("s_cselect_b" + b, [](bool &scc, T x, T y) -> T { return scc ? x : y; });
}

template <int BY> void scaled_sum(const std::string &name) {
    scalar(name, [](bool &scc, u32 a, u32 b) -> u32 {
        u64 sum = (u64(a) << BY) + b;
        scc = sum >> 32;
        return u32(sum);
    });
}

template <class T> void floats(const std::string &type) {
    comparisons<T>(type);
    op("v_add_" + type, [](T a, T b) -> T { return a + b; });
    op("v_mul_" + type, [](T a, T b) -> T { return a * b; });
    compare("v_cmp_class_" + type, [](T x, u32 asked) -> bool { return is_class(x, asked); });
    if constexpr (sizeof(T) > 2) {
        op("v_sub_" + type, [](T a, T b) -> T { return a - b; });
        op("v_subrev_" + type, [](T a, T b) -> T { return b - a; });
        op("v_fma_" + type, [](T a, T b, T c) -> T { return std::fma(a, b, c); });
        op("v_max_" + type, [](T a, T b) -> T { return greater(a, b); });
        op("v_min_" + type, [](T a, T b) -> T { return smaller(a, b); });
        op("v_floor_" + type, [](T a) -> T { return std::floor(a); });
        op("v_trunc_" + type, [](T a) -> T { return std::trunc(a); });
        op("v_ldexp_" + type, [](T a, i32 by) -> T { return std::ldexp(a, by); });
        op("v_div_fmas_" + type, [](T a, T b, T c, Bit on) -> T {
            return division_step<T, sizeof(T) == 4 ? 64 : 128>(a, b, c, on);
        });
        op("v_div_fixup_" + type, [](T q, T d, T n) -> T {
            return division_fixed<T, sizeof(T) == 4 ? -150 : -1075>(q, d, n);
        });
        carry("v_div_scale_" + type, [](bool &later, T a, T d, T n) -> T {
            if constexpr (sizeof(T) == 4)
                return division_scaled<T, 96, 23, 64>(later, a, d, n);
            else
                return division_scaled<T, 768, 53, 128>(later, a, d, n);
        });
    }
}

u32 reversed(u32 x) {
    u32 y = 0;
    for (int k = 0; k < 32; k++) y |= (x >> k & 1) << (31 - k);
    return y;
}

u32 permuted(u32 high, u32 low, u32 selector) {
    u64 bytes = u64(high) << 32 | low;
    u32 result = 0;
    for (int k = 0; k < 4; k++) {
        u32 which = selector >> 8 * k & 255;
        u32 byte = which > 12   ? 255
                   : which == 12 ? 0
                   : which > 7   ? (bytes >> (16 * (which - 8) + 15) & 1) * 255
                                 : bytes >> 8 * which & 255;
        result |= byte << 8 * k;
    }
    return result;
}

void vector_integers() {
    op("v_add_u32", [](u32 a, u32 b) -> u32 { return a + b; });
    op("v_sub_u32", [](u32 a, u32 b) -> u32 { return a - b; });
    op("v_subrev_u32", [](u32 a, u32 b) -> u32 { return b - a; });
    carry("v_add_co_u32", [](bool &out, u32 a, u32 b) -> u32 { out = a + b < a; return a + b; });
    carry("v_sub_co_u32", [](bool &out, u32 a, u32 b) -> u32 { out = b > a; return a - b; });
    carry("v_subrev_co_u32", [](bool &out, u32 a, u32 b) -> u32 { out = a > b; return b - a; });
    carry("v_addc_co_u32", [](bool &out, u32 a, u32 b, Bit in) -> u32 {
        out = (u64(a) + b + in.on) >> 32;
        return a + b + in.on;
    });
    carry("v_subb_co_u32", [](bool &out, u32 a, u32 b, Bit in) -> u32 {
        out = u64(b) + in.on > a;
        return a - b - in.on;
    });
    carry("v_subbrev_co_u32", [](bool &out, u32 a, u32 b, Bit in) -> u32 {
        out = u64(a) + in.on > b;
        return b - a - in.on;
    });
    carry("v_mad_u64_u32", [](bool &out, u32 a, u32 b, u64 c) -> u64 {
        u64 sum = u64(a) * b + c;
        out = sum < c;
        return sum;
    });
    carry("v_mad_i64_i32", [](bool &, i32 a, i32 b, u64 c) -> u64 { return u64(i64(a) * b) + c; });
    op("v_add3_u32", [](u32 a, u32 b, u32 c) -> u32 { return a + b + c; });
    op("v_lshl_add_u32", [](u32 a, u32 by, u32 c) -> u32 { return (a << (by & 31)) + c; });
    op("v_add_lshl_u32", [](u32 a, u32 b, u32 by) -> u32 { return (a + b) << (by & 31); });
    op("v_lshl_or_b32", [](u32 a, u32 by, u32 c) -> u32 { return (a << (by & 31)) | c; });
    op("v_lshl_add_u64", [](u64 a, u32 by, u64 c) -> u64 { return (a << (by & 7)) + c; });
    op("v_xad_u32", [](u32 a, u32 b, u32 c) -> u32 { return (a ^ b) + c; });
    op("v_and_or_b32", [](u32 a, u32 b, u32 c) -> u32 { return (a & b) | c; });
    op("v_or3_b32", [](u32 a, u32 b, u32 c) -> u32 { return a | b | c; });
    op("v_and_b32", [](u32 a, u32 b) -> u32 { return a & b; });
    op("v_or_b32", [](u32 a, u32 b) -> u32 { return a | b; });
    op("v_xor_b32", [](u32 a, u32 b) -> u32 { return a ^ b; });
    op("v_not_b32", [](u32 a) -> u32 { return ~a; });
    op("v_bfi_b32", [](u32 mask, u32 a, u32 b) -> u32 { return (mask & a) | (~mask & b); });
    op("v_bfm_b32", [](u32 width, u32 from) -> u32 { return ((1u << (width & 31)) - 1) << (from & 31); });
    op("v_bfe_u32", [](u32 a, u32 from, u32 width) -> u32 { return a >> (from & 31) & ((1u << (width & 31)) - 1); });
    op("v_bfe_i32", [](i32 a, u32 from, u32 width) -> i32 {
        if (width %= 32; width == 0) return 0;
        return i32(u32(a >> (from & 31)) << (32 - width)) >> (32 - width);
    });
    op("v_bfrev_b32", [](u32 a) -> u32 { return reversed(a); });
    op("v_bcnt_u32_b32", [](u32 a, u32 b) -> u32 { return u32(std::popcount(a)) + b; });
    op("v_alignbit_b32", [](u32 a, u32 b, u32 by) -> u32 { return u32((u64(a) << 32 | b) >> (by & 31)); });
    op("v_perm_b32", [](u32 a, u32 b, u32 selector) -> u32 { return permuted(a, b, selector); });
    op("v_lshlrev_b32", [](u32 by, u32 a) -> u32 { return a << (by & 31); });
    op("v_lshrrev_b32", [](u32 by, u32 a) -> u32 { return a >> (by & 31); });
    op("v_ashrrev_i32", [](u32 by, i32 a) -> i32 { return a >> (by & 31); });
    op("v_lshlrev_b16", [](u16 by, u16 a) -> u16 { return u16(a << (by & 15)); });
    op("v_lshrrev_b16", [](u16 by, u16 a) -> u16 { return u16(a >> (by & 15)); });
    op("v_add_u16", [](u16 a, u16 b) -> u16 { return u16(a + b); });
    op("v_sub_u16", [](u16 a, u16 b) -> u16 { return u16(a - b); });
    op("v_lshlrev_b64", [](u32 by, u64 a) -> u64 { return a << (by & 63); });
    op("v_lshrrev_b64", [](u32 by, u64 a) -> u64 { return a >> (by & 63); });
    op("v_ashrrev_i64", [](u32 by, i64 a) -> i64 { return a >> (by & 63); });
    packed("v_pk_lshlrev_b16", [](u16 by, u16 a) -> u16 { return u16(a << (by & 15)); });
    packed("v_pk_lshrrev_b16", [](u16 by, u16 a) -> u16 { return u16(a >> (by & 15)); });
    table["v_pk_mov_b32"] = {packed_move, 3};
    packed("v_pk_sub_i16", [](u16 a, u16 b) -> u16 { return u16(a - b); });
    op("v_mul_lo_u32", [](u32 a, u32 b) -> u32 { return a * b; });
    op("v_mul_hi_u32", [](u32 a, u32 b) -> u32 { return u32(u64(a) * b >> 32); });
    op("v_mul_u32_u24", [](u32 a, u32 b) -> u32 { return (a & 0xFFFFFF) * (b & 0xFFFFFF); });
    op("v_mul_i32_i24", [](i32 a, i32 b) -> i32 { return i32(u32(i32(u32(a) << 8) >> 8) * u32(i32(u32(b) << 8) >> 8)); });
    op("v_max_i32", [](i32 a, i32 b) -> i32 { return a > b ? a : b; });
    op("v_min_i32", [](i32 a, i32 b) -> i32 { return a < b ? a : b; });
    op("v_max_u32", [](u32 a, u32 b) -> u32 { return a > b ? a : b; });
    op("v_min_u32", [](u32 a, u32 b) -> u32 { return a < b ? a : b; });
    op("v_max3_i32", [](i32 a, i32 b, i32 c) -> i32 { return std::max({a, b, c}); });
    op("v_max3_u32", [](u32 a, u32 b, u32 c) -> u32 { return std::max({a, b, c}); });
    op("v_min3_i32", [](i32 a, i32 b, i32 c) -> i32 { return std::min({a, b, c}); });
    op("v_min3_u32", [](u32 a, u32 b, u32 c) -> u32 { return std::min({a, b, c}); });
    op("v_med3_i32", [](i32 a, i32 b, i32 c) -> i32 { return std::max(std::min(a, b), std::min(std::max(a, b), c)); });
    op("v_med3_u32", [](u32 a, u32 b, u32 c) -> u32 { return std::max(std::min(a, b), std::min(std::max(a, b), c)); });
    op("v_mov_b32", [](u32 a) -> u32 { return a; });
    op("v_mov_b64", [](u64 a) -> u64 { return a; });
    op("v_cndmask_b32", [](u32 a, u32 b, Bit second) -> u32 { return second.on ? b : a; });
    op("v_pack_b32_f16", [](u16 low, u16 high) -> u32 { return u32(high) << 16 | low; });
}

// Operands of fp32 or, where HIGH_FOR_HIGH says so, halves of 16 bits. The result is fp32 or a half, beside which the
// other half of the register stays.
template <int PART> void mixed_multiply_add(Wave &w, const WaveInstruction &i) {
    Sources s(w, i, 1, 3);
    for (int l = 0; l < WAVE; l++) {
        if (!(s.lanes >> l & 1)) continue;
        f32 a[3];
        for (int k = 0; k < 3; k++) {
            const Place &place = i.operands[1 + k];
            a[k] = place.change & HIGH_FOR_HIGH ? f32(operand<f16>(s.held[k], place, l))
                                                : operand<f32>(s.held[k], place, l);
        }
        f32 sum = std::fma(a[0], a[1], a[2]);
        u32 *to = w.vector(i.operands[0]) + l, half = std::bit_cast<u16>(f16(sum));
        *to = PART == 0   ? std::bit_cast<u32>(sum)
              : PART == 1 ? (*to & 0xFFFF0000u) | half
                          : (*to & 0xFFFFu) | half << 16;
    }
}

void vector_floats() {
    floats<f16>("f16");
    floats<f32>("f32");
    floats<f64>("f64");
    op("v_fmac_f32", [](f32 a, f32 b, f32 c) -> f32 { return std::fma(a, b, c); });
    op("v_fmac_f64", [](f64 a, f64 b, f64 c) -> f64 { return std::fma(a, b, c); });
    op("v_fmamk_f32", [](f32 a, f32 b, f32 c) -> f32 { return std::fma(a, b, c); });
    op("v_fmaak_f32", [](f32 a, f32 b, f32 c) -> f32 { return std::fma(a, b, c); });
    op("v_max3_f32", [](f32 a, f32 b, f32 c) -> f32 { return greater(greater(a, b), c); });
    packed("v_pk_add_f32", [](f32 a, f32 b) -> f32 { return a + b; });
    packed("v_pk_mul_f32", [](f32 a, f32 b) -> f32 { return a * b; });
    packed("v_pk_fma_f32", [](f32 a, f32 b, f32 c) -> f32 { return std::fma(a, b, c); });
    packed("v_pk_mul_f16", [](f16 a, f16 b) -> f16 { return a * b; });
    table["v_fma_mix_f32"] = {mixed_multiply_add<0>, 4};
    table["v_fma_mixlo_f16"] = {mixed_multiply_add<1>, 4};
    table["v_fma_mixhi_f16"] = {mixed_multiply_add<2>, 4};
    op("v_cvt_f16_f32", [](f32 a) -> f16 { return f16(a); });
    op("v_cvt_f32_f16", [](f16 a) -> f32 { return f32(a); });
    op("v_cvt_f64_f32", [](f32 a) -> f64 { return f64(a); });
    op("v_cvt_f32_f64", [](f64 a) -> f32 { return f32(a); });
    op("v_cvt_f32_i32", [](i32 a) -> f32 { return f32(a); });
    op("v_cvt_f32_u32", [](u32 a) -> f32 { return f32(a); });
    op("v_cvt_i32_f32", [](f32 a) -> i32 { return integer<i32>(a); });
    op("v_cvt_u32_f32", [](f32 a) -> u32 { return integer<u32>(a); });
    for (const char *name : {"v_rcp_f32", "v_rcp_iflag_f32"})
        op(name, [](f32 a) -> f32 { return approximate(1 / f64(flushed(a))); });
    op("v_sqrt_f32", [](f32 a) -> f32 { return approximate(std::sqrt(f64(flushed(a)))); });
    op("v_exp_f32", [](f32 a) -> f32 { return approximate(std::exp2(f64(a))); });
    op("v_log_f32", [](f32 a) -> f32 { return approximate(std::log2(f64(flushed(a)))); });
    op("v_rcp_f64", [](f64 a) -> f64 { return coarse(1 / a); });
    op("v_rsq_f64", [](f64 a) -> f64 { return coarse(1 / std::sqrt(a)); });
}

template <class F> void save_exec(const char *name, F) {
    table[name] = {[](Wave &w, const WaveInstruction &i) {
        u64 before = w.pair(EXEC), after = F{}(before, operand<u64>(words(w, i.operands[1]), i.operands[1], 0));
        w.set_pair(EXEC, after);
        w.set_pair(i.operands[0].index, before);
        w.scc = after != 0;
    }, 2};
}

void scalar_integers() {
    scalars<u32>("32");
    scalars<u64>("64");
    scalar("s_add_u32", [](bool &scc, u32 a, u32 b) -> u32 { scc = a + b < a; return a + b; });
    scalar("s_sub_u32", [](bool &scc, u32 a, u32 b) -> u32 { scc = b > a; return a - b; });
    scalar("s_addc_u32", [](bool &scc, u32 a, u32 b) -> u32 {
        u64 sum = u64(a) + b + scc;
        scc = sum >> 32;
        return u32(sum);
    });
    scalar("s_subb_u32", [](bool &scc, u32 a, u32 b) -> u32 {
        u32 difference = a - b - scc;
        scc = u64(b) + scc > a;
        return difference;
    });
    for (const char *name : {"s_add_i32", "s_addk_i32"})
        scalar(name, [](bool &scc, i32 a, i32 b) -> i32 {
            i32 sum;
            scc = __builtin_add_overflow(a, b, &sum);
            return sum;
        });
    scalar("s_sub_i32", [](bool &scc, i32 a, i32 b) -> i32 {
        i32 difference;
        scc = __builtin_sub_overflow(a, b, &difference);
        return difference;
    });
    for (const char *name : {"s_mul_i32", "s_mulk_i32"})
        scalar(name, [](bool &, u32 a, u32 b) -> u32 { return a * b; });
    scalar("s_mul_hi_i32", [](bool &, i32 a, i32 b) -> i32 { return i32(i64(a) * b >> 32); });
    scalar("s_mul_hi_u32", [](bool &, u32 a, u32 b) -> u32 { return u32(u64(a) * b >> 32); });
    scaled_sum<1>("s_lshl1_add_u32");
    scaled_sum<2>("s_lshl2_add_u32");
    scaled_sum<3>("s_lshl3_add_u32");
    scaled_sum<4>("s_lshl4_add_u32");
    logical("s_abs_i32", [](bool &, i32 a) -> i32 { return a < 0 ? i32(0u - u32(a)) : a; });
    scalar("s_max_i32", [](bool &scc, i32 a, i32 b) -> i32 { scc = a >= b; return scc ? a : b; });
    scalar("s_min_i32", [](bool &scc, i32 a, i32 b) -> i32 { scc = a < b; return scc ? a : b; });
    scalar("s_max_u32", [](bool &scc, u32 a, u32 b) -> u32 { scc = a >= b; return scc ? a : b; });
    scalar("s_min_u32", [](bool &scc, u32 a, u32 b) -> u32 { scc = a < b; return scc ? a : b; });
    scalar("s_movk_i32", [](bool &, i32 a) -> i32 { return a; });
    scalar("s_brev_b32", [](bool &, u32 a) -> u32 { return reversed(a); });
    logical("s_bfe_u32", [](bool &, u32 a, u32 b) -> u32 {
        return u32(a >> (b & 31) & ((1ull << std::min(b >> 16 & 127, 32u)) - 1));
    });
    logical("s_bfe_i32", [](bool &, i32 a, u32 b) -> i32 {
        u32 width = std::min(b >> 16 & 127, 32u);
        return width ? i32(u32(a >> (b & 31)) << (32 - width)) >> (32 - width) : 0;
    });
    test("s_bitcmp0_b32", [](u32 a, u32 at) -> bool { return !(a >> (at & 31) & 1); });
    test("s_bitcmp1_b32", [](u32 a, u32 at) -> bool { return a >> (at & 31) & 1; });
    save_exec("s_and_saveexec_b64", [](u64 before, u64 mask) -> u64 { return before & mask; });
    save_exec("s_or_saveexec_b64", [](u64 before, u64 mask) -> u64 { return before | mask; });
}

}  // namespace

std::map<std::string, WaveOperation> &wave_operations() {
    if (table.empty()) {
        comparisons<i16>("i16");
        comparisons<u16>("u16");
        comparisons<i32>("i32");
        comparisons<u32>("u32");
        comparisons<i64>("i64");
        comparisons<u64>("u64");
        vector_integers();
        vector_floats();
        scalar_integers();
    }
    return table;
}

extern "C" void approximate_waves(int how) { inexact = how; }
