// What each PTX instruction computes, as the PTX ISA says: https://docs.nvidia.com/cuda/parallel-thread-execution
//
// One line an instruction: its name without what only caches hear, and a function of one lane. Compiled with
// -ffp-contract=off; then +, *, / and the square root are rounded once by the processor, as IEEE 754 and PTX have it.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "machine.h"

namespace {

std::map<std::string, Operation> table;

// ------------------------------------------------------------------------------------------------- a function per lane

template <class F, class R, class... A, size_t... I>
void lane_by_lane(Warp &w, const Instruction &i, R (F::*)(A...) const, std::index_sequence<I...>) {
    R *out = w.reg<R>(i.operands[0]);
    std::tuple<const A *...> in{w.reg<A>(i.operands[1 + I])...};
    if (w.mask == ALL) {
        R results[LANES];
        for (int l = 0; l < LANES; l++) results[l] = F{}(std::get<I>(in)[l]...);
        memcpy(out, results, sizeof results);
    } else {
        for (int l = 0; l < LANES; l++)
            if (w.mask >> l & 1) out[l] = F{}(std::get<I>(in)[l]...);
    }
}

template <class F, class R, class... A> void run_lanes(Warp &w, const Instruction &i) {
    lane_by_lane(w, i, static_cast<R (F::*)(A...) const>(&F::operator()), std::index_sequence_for<A...>());
}

template <class F, class R, class... A> void enter(const std::string &name, R (F::*)(A...) const) {
    table[name] = {run_lanes<F, R, A...>, {sizeof(R), sizeof(A)...}};
}

template <class F> void op(const std::string &name, F) { enter(name, &F::operator()); }

// With two results, low and high.
template <class F, class R, class... A, size_t... I>
void pair_by_lane(Warp &w, const Instruction &i, two<R> (F::*)(A...) const, std::index_sequence<I...>) {
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) {
            two<R> both = F{}(w.reg<A>(i.operands[2 + I])[l]...);
            w.reg<R>(i.operands[0])[l] = both.low;
            w.reg<R>(i.operands[1])[l] = both.high;
        }
}

template <class F, class R, class... A> void run_pair(Warp &w, const Instruction &i) {
    pair_by_lane(w, i, static_cast<two<R> (F::*)(A...) const>(&F::operator()), std::index_sequence_for<A...>());
}

template <class F, class R, class... A> void enter_pair(const std::string &name, two<R> (F::*)(A...) const) {
    table[name] = {run_pair<F, R, A...>, {sizeof(R), sizeof(R), sizeof(A)...}};
}

template <class F> void op_pair(const std::string &name, F) { enter_pair(name, &F::operator()); }

// ------------------------------------------------------------------------------------------------------------- numbers

// Every arithmetic NaN of the machine has these bits.
inline f32 canonical(f32 x) { return x == x ? x : std::bit_cast<f32>(0x7FFFFFFFu); }
inline f64 canonical(f64 x) { return x == x ? x : std::bit_cast<f64>(0x7FFFFFFFFFFFFFFFull); }

inline f32 flushed(f32 x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline f32 single(bf16 x) { return std::bit_cast<f32>(u32(x.bits) << 16); }
inline f32 single(f16 x) {
    _Float16 half;
    memcpy(&half, &x, 2);
    return canonical(f32(half));
}

inline f32 number(bf16 x) { return single(x); }
inline f32 number(f16 x) { return single(x); }
inline f32 number(f32 x) { return x; }
inline f64 number(f64 x) { return x; }

inline bf16 to_bf16(f32 x) {
    u32 bits = std::bit_cast<u32>(x);
    if (x != x) return {0x7FFF};
    return {u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline f16 to_f16(f32 x) {
    if (x != x) return {0x7FFF};
    _Float16 half = _Float16(x);
    f16 result;
    memcpy(&result, &half, 2);
    return result;
}

// maxNum and minNum: a NaN beside a number is passed over, and -0 is below +0.
template <class T> inline T greater(T a, T b) {
    if (a != a || b != b) return canonical(a != a ? b : a);
    return a > b || (a == b && !std::signbit(a)) ? a : b;
}
template <class T> inline T smaller(T a, T b) {
    if (a != a || b != b) return canonical(a != a ? b : a);
    return a < b || (a == b && std::signbit(a)) ? a : b;
}

// Rounded toward zero, out of range to the nearest end, NaN to 0.
template <class I, class F> inline I integer(F x) {
    if (x != x) return 0;
    constexpr F above = F(2) * F(std::numeric_limits<I>::max() / 2 + 1);
    if (x >= above) return std::numeric_limits<I>::max();
    if (x <= F(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
    return I(x);
}

int inexact = 0;

// An approximation within 2^-22 of the true value, which is 2 units in the last place at most.
inline f32 approximation(f64 exact) {
    if (inexact == 0 || exact == 0 || std::isinf(exact) || exact != exact) return canonical(f32(exact));
    f64 share = inexact == 2 ? f64(i32(std::bit_cast<u64>(exact) * 0x9E3779B97F4A7C15ull >> 32)) * 0x1p-31 : inexact;
    return canonical(f32(exact * (1 + share * 0x1p-22)));
}

template <class T> using Unsigned = std::make_unsigned_t<T>;

// -------------------------------------------------------------------------------------------------------- whole warps

// F(lane, b) is the lane that a lane reads.
template <class F> void shuffle(Warp &w, const Instruction &i) {
    u32 values[LANES];
    memcpy(values, w.reg<u32>(i.operands[1]), sizeof values);
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        u32 other = F{}(u32(l), w.reg<u32>(i.operands[2])[l]);
        u32 clamp = w.reg<u32>(i.operands[3])[l], members = w.reg<u32>(i.operands[4])[l];
        if (clamp != 31) fail(w, l, "a shuffle within less than the warp, which this machine does not know");
        if (other >= LANES) other = l;
        if ((members & w.alive) & ~w.mask) fail(w, l, "a shuffle that not all its members reach together");
        if (!(w.mask >> other & 1)) fail(w, l, "a shuffle from lane " + std::to_string(other) + ", which does not run");
        w.reg<u32>(i.operands[0])[l] = values[other];
    }
}

template <class T, class F> void reduce(Warp &w, const Instruction &i) {
    const T *values = w.reg<T>(i.operands[1]);
    bool any = false;
    T result{};
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        if (w.reg<u32>(i.operands[2])[l] & w.alive & ~w.mask) fail(w, l, "a reduction that not all its members reach");
        result = any ? F{}(result, values[l]) : values[l];
        any = true;
    }
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) w.reg<T>(i.operands[0])[l] = result;
}

void ballot(Warp &w, const Instruction &i) {
    u32 votes = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        if (w.reg<u32>(i.operands[2])[l] & w.alive & ~w.mask) fail(w, l, "a vote that not all its members reach");
        votes |= u32(w.reg<pred>(i.operands[1])[l].on != 0) << l;
    }
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) w.reg<u32>(i.operands[0])[l] = votes;
}

template <class T, bool SHARED, class F> void atomic(Warp &w, const Instruction &i) {
    u64 at[LANES];
    for (int l = 0; l < LANES; l++)
        at[l] = SHARED ? u32(w.reg<u32>(i.operands[1])[l] + i.offset) : w.reg<u64>(i.operands[1])[l] + i.offset;
    if (SHARED) count_shared_atomics(w, at);
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        T *place = reinterpret_cast<T *>((SHARED ? shared_place : global_place)(w, l, at[l], sizeof(T)));
        T before = *place;
        *place = F{}(before, w.reg<T>(i.operands[2])[l]);
        w.reg<T>(i.operands[0])[l] = before;
    }
}

template <class T, class F> void op_reduce(const std::string &name, F) {
    table[name] = {reduce<T, F>, {sizeof(T), sizeof(T), 4}};
}

template <class F> void op_shuffle(const std::string &name, F) {
    table[name] = {shuffle<F>, {4, 4, 4, 4, 4}};
}

template <class T, bool SHARED, class F> void op_atomic(const std::string &name, F) {
    table[name] = {atomic<T, SHARED, F>, {sizeof(T), SHARED ? 4 : 8, sizeof(T)}};
}

void branch(Warp &w, const Instruction &i) {
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) w.at[l] = i.target;
}

void leave(Warp &w, const Instruction &) { w.alive &= ~w.mask; }

void barrier(Warp &w, const Instruction &) {
    if (w.mask != w.alive) fail(w, 0, "a barrier that a part of the warp reaches without the rest");
    w.waiting = true;
}

// Orders the accesses of one warp's lanes among themselves.
void warp_barrier(Warp &w, const Instruction &i) {
    if (w.mask != w.alive) fail(w, 0, "a barrier of the warp that a part of it reaches without the rest");
    w.step++;
}

// ----------------------------------------------------------------------------------------------------------- the table

template <class T> void integers(const std::string &t) {
    op("add." + t, [](T a, T b) -> T { return T(Unsigned<T>(a) + Unsigned<T>(b)); });
    op("sub." + t, [](T a, T b) -> T { return T(Unsigned<T>(a) - Unsigned<T>(b)); });
    op("mul.lo." + t, [](T a, T b) -> T { return T(u64(a) * u64(b)); });
    op("mad.lo." + t, [](T a, T b, T c) -> T { return T(u64(a) * u64(b) + u64(c)); });
    op("max." + t, [](T a, T b) -> T { return a > b ? a : b; });
    op("min." + t, [](T a, T b) -> T { return a < b ? a : b; });
    // Division by 0 has no defined result; all ones is what the machine gives.
    op("div." + t, [](T a, T b) -> T { return b == 0 ? T(-1) : b == T(-1) && std::is_signed_v<T> ? T(0 - u64(a)) : T(a / b); });
    op("rem." + t, [](T a, T b) -> T { return b == 0 ? a : b == T(-1) && std::is_signed_v<T> ? T(0) : T(a % b); });
    op("neg." + t, [](T a) -> T { return T(0 - u64(a)); });
    op("abs." + t, [](T a) -> T { return a < 0 ? T(0 - u64(a)) : a; });
    op("shr." + t, [](T a, u32 n) -> T { return T(n < 8 * sizeof(T) ? a >> n : std::is_signed_v<T> && a < 0 ? -1 : 0); });
    op("setp.eq." + t, [](T a, T b) -> pred { return {u8(a == b)}; });
    op("setp.ne." + t, [](T a, T b) -> pred { return {u8(a != b)}; });
    op("setp.lt." + t, [](T a, T b) -> pred { return {u8(a < b)}; });
    op("setp.le." + t, [](T a, T b) -> pred { return {u8(a <= b)}; });
    op("setp.gt." + t, [](T a, T b) -> pred { return {u8(a > b)}; });
    op("setp.ge." + t, [](T a, T b) -> pred { return {u8(a >= b)}; });
    op("cvt.rn.f32." + t, [](T a) -> f32 { return f32(a); });
    op("cvt.rn.f64." + t, [](T a) -> f64 { return f64(a); });
    op("cvt.rzi." + t + ".f32", [](f32 a) -> T { return integer<T>(a); });
    op("cvt.rmi." + t + ".f32", [](f32 a) -> T { return integer<T>(std::floor(a)); });
    op("cvt.rzi." + t + ".f64", [](f64 a) -> T { return integer<T>(a); });
}

template <class To, class From> void conversion(const std::string &to, const std::string &from) {
    op("cvt." + to + "." + from, [](From a) -> To { return To(a); });
    // What is narrower than its register lies in the low bits.
    op("cvt." + to + "." + from + ".of16", [](u16 a) -> To { return To(From(a)); });
    op("cvt." + to + "." + from + ".of32", [](u32 a) -> To { return To(From(a)); });
    op("cvt." + to + "." + from + ".of64", [](u64 a) -> To { return To(From(a)); });
}

template <class T> void conversions(const std::string &from) {
    conversion<i16, T>("s16", from);
    conversion<u16, T>("u16", from);
    conversion<i32, T>("s32", from);
    conversion<u32, T>("u32", from);
    conversion<i64, T>("s64", from);
    conversion<u64, T>("u64", from);
}

// Two in one register.
template <class T> void packed_integers(const std::string &t) {
    using P = two<T>;
    op("add." + t, [](P a, P b) -> P { return {T(a.low + b.low), T(a.high + b.high)}; });
    op("sub." + t, [](P a, P b) -> P { return {T(a.low - b.low), T(a.high - b.high)}; });
    op("max." + t, [](P a, P b) -> P { return {std::max(a.low, b.low), std::max(a.high, b.high)}; });
    op("min." + t, [](P a, P b) -> P { return {std::min(a.low, b.low), std::min(a.high, b.high)}; });
}

// T twice as wide as S.
template <class T, class S> void products(const std::string &s) {
    op("mul.wide." + s, [](S a, S b) -> T { return T(a) * T(b); });
    op("mad.wide." + s, [](S a, S b, T c) -> T { return T(u64(T(a) * T(b)) + u64(c)); });
    op("mul.hi." + s, [](S a, S b) -> S { return S(T(a) * T(b) >> 8 * sizeof(S)); });
}

template <class T> void bits(const std::string &t) {
    op("mov." + t, [](T a) -> T { return a; });
    op("and." + t, [](T a, T b) -> T { return a & b; });
    op("or." + t, [](T a, T b) -> T { return a | b; });
    op("xor." + t, [](T a, T b) -> T { return a ^ b; });
    op("not." + t, [](T a) -> T { return ~a; });
    op("shl." + t, [](T a, u32 n) -> T { return n < 8 * sizeof(T) ? T(a << n) : T(0); });
    op("shr." + t, [](T a, u32 n) -> T { return n < 8 * sizeof(T) ? T(a >> n) : T(0); });
    op("selp." + t, [](T a, T b, pred p) -> T { return p.on ? a : b; });
    op("setp.eq." + t, [](T a, T b) -> pred { return {u8(a == b)}; });
    op("setp.ne." + t, [](T a, T b) -> pred { return {u8(a != b)}; });
}

// Comparisons are false beside a NaN, those that end in u true.
template <class T, class ORDERED, class UNORDERED>
void comparison(const std::string &t, const char *ordered, ORDERED, const char *unordered, UNORDERED) {
    op(std::string("setp.") + ordered + "." + t, [](T a, T b) -> pred { return {u8(ORDERED{}(number(a), number(b)))}; });
    op(std::string("setp.") + unordered + "." + t, [](T a, T b) -> pred { return {u8(UNORDERED{}(number(a), number(b)))}; });
    if constexpr (sizeof(T) == 2) {
        op_pair(std::string("setp.") + ordered + "." + t + "x2", [](two<T> a, two<T> b) -> two<pred> {
            return {{u8(ORDERED{}(number(a.low), number(b.low)))}, {u8(ORDERED{}(number(a.high), number(b.high)))}};
        });
        op_pair(std::string("setp.") + unordered + "." + t + "x2", [](two<T> a, two<T> b) -> two<pred> {
            return {{u8(UNORDERED{}(number(a.low), number(b.low)))}, {u8(UNORDERED{}(number(a.high), number(b.high)))}};
        });
    }
}

template <class T> void comparisons(const std::string &t) {
    comparison<T>(t, "eq", [](auto a, auto b) { return a == b; }, "equ", [](auto a, auto b) { return !(a < b || a > b); });
    comparison<T>(t, "ne", [](auto a, auto b) { return a < b || a > b; }, "neu", [](auto a, auto b) { return a != b; });
    comparison<T>(t, "lt", [](auto a, auto b) { return a < b; }, "ltu", [](auto a, auto b) { return !(a >= b); });
    comparison<T>(t, "le", [](auto a, auto b) { return a <= b; }, "leu", [](auto a, auto b) { return !(a > b); });
    comparison<T>(t, "gt", [](auto a, auto b) { return a > b; }, "gtu", [](auto a, auto b) { return !(a <= b); });
    comparison<T>(t, "ge", [](auto a, auto b) { return a >= b; }, "geu", [](auto a, auto b) { return !(a < b); });
    comparison<T>(t, "num", [](auto a, auto b) { return a == a && b == b; }, "nan",
                  [](auto a, auto b) { return a != a || b != b; });
}

template <class T> void floats(const std::string &t) {
    for (const char *rn : {"", "rn."}) {
        op(std::string("add.") + rn + t, [](T a, T b) -> T { return canonical(a + b); });
        op(std::string("sub.") + rn + t, [](T a, T b) -> T { return canonical(a - b); });
        op(std::string("mul.") + rn + t, [](T a, T b) -> T { return canonical(a * b); });
    }
    op("fma.rn." + t, [](T a, T b, T c) -> T { return canonical(std::fma(a, b, c)); });
    op("div.rn." + t, [](T a, T b) -> T { return canonical(a / b); });
    op("rcp.rn." + t, [](T a) -> T { return canonical(T(1) / a); });
    op("sqrt.rn." + t, [](T a) -> T { return canonical(std::sqrt(a)); });
    op("max." + t, [](T a, T b) -> T { return greater(a, b); });
    op("min." + t, [](T a, T b) -> T { return smaller(a, b); });
    op("max." + t + ".of3", [](T a, T b, T c) -> T { return greater(greater(a, b), c); });
    op("min." + t + ".of3", [](T a, T b, T c) -> T { return smaller(smaller(a, b), c); });
    op("max.NaN." + t + ".of3", [](T a, T b, T c) -> T {
        return canonical(a != a || b != b || c != c ? a + b + c : greater(greater(a, b), c));
    });
    op("max.NaN." + t, [](T a, T b) -> T { return canonical(a != a || b != b ? a + b : greater(a, b)); });
    op("min.NaN." + t, [](T a, T b) -> T { return canonical(a != a || b != b ? a + b : smaller(a, b)); });
    op("abs." + t, [](T a) -> T { return std::fabs(a); });
    op("neg." + t, [](T a) -> T { return -a; });
    op("selp." + t, [](T a, T b, pred p) -> T { return p.on ? a : b; });
    op("mov." + t, [](T a) -> T { return a; });
}

// Operands of 16 bits beside one of 32, and a result of 32: sm_100.
template <class T> void mixed(const std::string &t) {
    op("add.rn.f32." + t, [](T a, f32 c) -> f32 { return canonical(single(a) + c); });
    op("sub.rn.f32." + t, [](T a, f32 c) -> f32 { return canonical(single(a) - c); });
    op("fma.rn.f32." + t, [](T a, T b, f32 c) -> f32 { return canonical(std::fma(single(a), single(b), c)); });
}

// A number rounded to odd keeps what a later rounding to fewer bits needs to know.
inline f64 odd_sum(f64 a, f64 b) {
    f64 sum = a + b, from_b = sum - a, error = (a - (sum - from_b)) + (b - from_b);
    u64 bits = std::bit_cast<u64>(sum);
    if (!std::isfinite(sum) || error == 0 || bits & 1) return sum;
    return std::bit_cast<f64>((error > 0) == (sum > 0) ? bits + 1 : bits - 1);
}
inline f32 odd_single(f64 x) {
    f32 nearest = f32(x);
    if (!std::isfinite(nearest) || f64(nearest) == x || std::bit_cast<u32>(nearest) & 1) return nearest;
    return std::nextafter(nearest, x > nearest ? INFINITY : -INFINITY);
}
template <class T, T (*ROUND)(f32)> T fused(T a, T b, T c) {
    return ROUND(odd_single(odd_sum(f64(single(a)) * f64(single(b)), single(c))));
}

// FP8 of the OCP specification: codes of a format with MANTISSA bits, whose largest finite number has the code LARGEST.
template <int MANTISSA, int BIAS, u8 LARGEST> struct fp8 {
    static f64 value(u8 code) {
        i32 exponent = code >> MANTISSA & ((1 << (7 - MANTISSA)) - 1), rest = code & ((1 << MANTISSA) - 1);
        f64 size = exponent ? std::ldexp(rest + (1 << MANTISSA), exponent - BIAS - MANTISSA) : std::ldexp(rest, 1 - BIAS - MANTISSA);
        return code & 0x80 ? -size : size;
    }
    // To nearest even; what is larger than the largest finite number becomes that, and NaN the code 0x7F.
    static u8 saturated(f32 x) {
        if (std::isnan(x)) return 0x7F;
        const u8 sign = std::signbit(x) ? 0x80 : 0;
        const f64 size = std::fabs(f64(x));
        if (size >= value(LARGEST)) return sign | LARGEST;
        u8 below = 0;
        for (u8 step = 0x40; step; step >>= 1)
            if (below + step <= LARGEST && value(below + step) <= size) below += step;
        const f64 down = size - value(below), up = value(below + 1) - size;
        return sign | (below + (up < down || (up == down && below & 1)));
    }
    static f16 half(u8 code) {
        if ((code & 0x7F) > LARGEST) return {u16(MANTISSA == 2 && (code & 0x7F) == 0x7C ? (code & 0x80) << 8 | 0x7C00 : 0x7FFF)};
        return {std::bit_cast<u16>(_Float16(value(code)))};
    }
};

template <class FORMAT> void bytes(const std::string &t) {
    op("cvt.rn.satfinite." + t + "x2.f32", [](f32 high, f32 low) -> u16 {
        return u16(FORMAT::saturated(high) << 8 | FORMAT::saturated(low));
    });
    op("cvt.rn.f16x2." + t + "x2", [](u16 a) -> two<f16> {
        return {FORMAT::half(u8(a)), FORMAT::half(u8(a >> 8))};
    });
}

// Codes of BITS bits: FP6, of which two are two bytes, and FP4, of which they are one. sm_100.
template <class FORMAT, int BITS> void few_bits(const std::string &t) {
    using Both = std::conditional_t<BITS == 4, u8, u16>;
    op("cvt.rn.satfinite." + t + "x2.f32", [](f32 high, f32 low) -> Both {
        auto code = [](f32 x) {
            u8 wide = std::isnan(x) ? FORMAT::saturated(INFINITY) : FORMAT::saturated(x);
            return (wide & 0x7F) | (wide & 0x80) >> (8 - BITS);
        };
        return Both(code(high) << (BITS == 4 ? 4 : 8) | code(low));
    });
}

template <class T, T (*ROUND)(f32)> void halves(const std::string &t) {
    for (const char *rn : {"", "rn."}) {
        op(std::string("add.") + rn + t, [](T a, T b) -> T { return ROUND(odd_single(odd_sum(single(a), single(b)))); });
        op(std::string("sub.") + rn + t, [](T a, T b) -> T { return ROUND(odd_single(odd_sum(single(a), -single(b)))); });
        op(std::string("add.") + rn + t + "x2", [](two<T> a, two<T> b) -> two<T> {
            return {ROUND(odd_single(odd_sum(single(a.low), single(b.low)))),
                    ROUND(odd_single(odd_sum(single(a.high), single(b.high))))};
        });
    }
    op("fma.rn." + t, [](T a, T b, T c) -> T { return fused<T, ROUND>(a, b, c); });
    op("fma.rn." + t + "x2", [](two<T> a, two<T> b, two<T> c) -> two<T> {
        return {fused<T, ROUND>(a.low, b.low, c.low), fused<T, ROUND>(a.high, b.high, c.high)};
    });
    op("cvt.f32." + t, [](T a) -> f32 { return single(a); });
    op("cvt.rn." + t + ".f32", [](f32 a) -> T { return ROUND(a); });
    op("cvt.rn." + t + "x2.f32", [](f32 high, f32 low) -> two<T> { return {ROUND(low), ROUND(high)}; });
    // The product of two halves fits fp32 (fp16 always, bf16 but for the range), so that it is rounded once.
    for (const char *rn : {"", "rn."}) {
        op(std::string("mul.") + rn + t, [](T a, T b) -> T { return ROUND(single(a) * single(b)); });
        op(std::string("mul.") + rn + t + "x2", [](two<T> a, two<T> b) -> two<T> {
            return {ROUND(single(a.low) * single(b.low)), ROUND(single(a.high) * single(b.high))};
        });
    }
    op("max." + t, [](T a, T b) -> T { return ROUND(greater(single(a), single(b))); });
    op("min." + t, [](T a, T b) -> T { return ROUND(smaller(single(a), single(b))); });
    op("max." + t + "x2", [](two<T> a, two<T> b) -> two<T> {
        return {ROUND(greater(single(a.low), single(b.low))), ROUND(greater(single(a.high), single(b.high)))};
    });
    op("min." + t + "x2", [](two<T> a, two<T> b) -> two<T> {
        return {ROUND(smaller(single(a.low), single(b.low))), ROUND(smaller(single(a.high), single(b.high)))};
    });
    op("abs." + t, [](T a) -> T { return {u16(a.bits & 0x7FFF)}; });
    op("neg." + t, [](T a) -> T { return {u16(a.bits ^ 0x8000)}; });
    op("abs." + t + "x2", [](u32 a) -> u32 { return a & 0x7FFF7FFF; });
    op("neg." + t + "x2", [](u32 a) -> u32 { return a ^ 0x80008000; });
    comparisons<T>(t);
    mixed<T>(t);
}

// ptxas computes correctly rounded roots and quotients with a short sequence, and calls a subroutine where that does not
// hold. Of the root the test is in the sequence. Of the quotient it is an instruction (FCHK) without a description: what
// is here is where each step of the sequence is exact, or rounds to normal numbers.
bool root_is_slow(f32 x) { return std::bit_cast<u32>(x) - 0x0D000000u > 0x727FFFFFu; }
bool quotient_is_slow(f32 a, f32 b) {
    f32 above = std::fabs(a), below = std::fabs(b), quotient = above / below;
    return !(below >= 0x1p-126f && below < 0x1p126f && above >= 0x1p-102f && above < 0x1p127f && quotient >= 0x1p-125f &&
             quotient < 0x1p127f);
}

Run plain_root, plain_quotient;

void root(Warp &w, const Instruction &i) {
    bool slow = false;
    for (int l = 0; l < LANES; l++) slow |= w.mask >> l & 1 && root_is_slow(w.reg<f32>(i.operands[1])[l]);
    if (slow) count_slow(w);
    plain_root(w, i);
}

void quotient(Warp &w, const Instruction &i) {
    const f32 *a = w.reg<f32>(i.operands[1]), *b = w.reg<f32>(i.operands[2]);
    bool slow = false;
    for (int l = 0; l < LANES; l++) slow |= w.mask >> l & 1 && quotient_is_slow(a[l], b[l]);
    if (slow) count_slow(w);
    plain_quotient(w, i);
}

void count_slow_lanes() {
    plain_root = std::exchange(table["sqrt.rn.f32"].run, root);
    plain_quotient = std::exchange(table["div.rn.f32"].run, quotient);
}

void fill() {
    integers<i16>("s16");
    integers<u16>("u16");
    integers<i32>("s32");
    integers<u32>("u32");
    integers<i64>("s64");
    integers<u64>("u64");
    conversions<int8_t>("s8");
    conversions<u8>("u8");
    conversions<i16>("s16");
    conversions<u16>("u16");
    conversions<i32>("s32");
    conversions<u32>("u32");
    conversions<i64>("s64");
    conversions<u64>("u64");
    packed_integers<i16>("s16x2");
    packed_integers<u16>("u16x2");
    products<i32, i16>("s16");
    products<u32, u16>("u16");
    products<i64, i32>("s32");
    products<u64, u32>("u32");
    bits<u16>("b16");
    bits<u32>("b32");
    bits<u64>("b64");
    for (auto [name, same] : {std::pair{"mov.u16", "mov.b16"}, {"mov.s16", "mov.b16"}, {"mov.u32", "mov.b32"},
                              {"mov.s32", "mov.b32"}, {"mov.u64", "mov.b64"}, {"mov.s64", "mov.b64"}})
        table[name] = table[same];
    op("bfe.u32", [](u32 a, u32 from, u32 count) -> u32 {
        from &= 255, count &= 255;
        return from > 31 ? 0 : u32((u64(a) >> from) & ((1ull << std::min(count, 32u)) - 1));
    });
    op("bfe.s32", [](i32 a, u32 from, u32 count) -> i32 {
        from &= 255, count = std::min(count & 255, 32u);
        if (count == 0) return 0;
        u64 endless = u64(i64(a));  // the sign goes on above bit 31
        u64 sign = endless >> std::min(from + count - 1, 63u) & 1;
        u64 field = endless >> std::min(from, 63u) & ((1ull << count) - 1);
        return i32(field | (sign ? ~0ull << count : 0));
    });
    op("popc.b32", [](u32 a) -> u32 { return u32(std::popcount(a)); });
    op("clz.b32", [](u32 a) -> u32 { return u32(std::countl_zero(a)); });
    op("prmt.b32", [](u32 a, u32 b, u32 selector) -> u32 {
        u64 bytes = u64(b) << 32 | a;
        u32 result = 0;
        for (int k = 0; k < 4; k++) {
            u32 chosen = selector >> 4 * k & 15;
            u32 byte = bytes >> 8 * (chosen & 7) & 255;
            result |= (chosen & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * k;
        }
        return result;
    });
    op("lop3.b32", [](u32 a, u32 b, u32 c, u32 values) -> u32 {
        u32 result = 0;
        for (int k = 0; k < 8; k++)
            if (values >> k & 1) result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
        return result;
    });
    op("shf.r.wrap.b32", [](u32 low, u32 high, u32 places) -> u32 {
        return u32((u64(high) << 32 | low) >> (places & 31));
    });

    op("mov.pred", [](pred a) -> pred { return a; });
    op("and.pred", [](pred a, pred b) -> pred { return {u8(a.on & b.on)}; });
    op("or.pred", [](pred a, pred b) -> pred { return {u8(a.on | b.on)}; });
    op("xor.pred", [](pred a, pred b) -> pred { return {u8(a.on ^ b.on)}; });
    op("not.pred", [](pred a) -> pred { return {u8(!a.on)}; });

    op("mov.b64.pack", [](u32 low, u32 high) -> u64 { return u64(high) << 32 | low; });
    op("mov.b32.pack", [](u16 low, u16 high) -> u32 { return u32(high) << 16 | low; });
    op("mov.b32.pack4", [](u8 a, u8 b, u8 c, u8 d) -> u32 { return u32(d) << 24 | u32(c) << 16 | u32(b) << 8 | a; });
    op_pair("mov.b64.unpack", [](u64 a) -> two<u32> { return {u32(a), u32(a >> 32)}; });
    op_pair("mov.b32.unpack", [](u32 a) -> two<u16> { return {u16(a), u16(a >> 16)}; });

    floats<f32>("f32");
    floats<f64>("f64");
    comparisons<f32>("f32");
    comparisons<f64>("f64");
    halves<f16, to_f16>("f16");
    halves<bf16, to_bf16>("bf16");
    bytes<fp8<3, 7, 0x7E>>("e4m3");
    bytes<fp8<2, 15, 0x7B>>("e5m2");
    few_bits<fp8<3, 1, 0x1F>, 6>("e2m3");
    few_bits<fp8<2, 3, 0x1F>, 6>("e3m2");
    few_bits<fp8<1, 1, 0x07>, 4>("e2m1");
    op("cvt.f64.f32", [](f32 a) -> f64 { return canonical(f64(a)); });
    op("cvt.rn.f32.f64", [](f64 a) -> f32 { return canonical(f32(a)); });
    op("fma.rn.ftz.f32", [](f32 a, f32 b, f32 c) -> f32 {
        return flushed(canonical(std::fma(flushed(a), flushed(b), flushed(c))));
    });
    for (const char *rn : {"", "rn."}) {
        std::string t = std::string(rn) + "ftz.f32";
        op("add." + t, [](f32 a, f32 b) -> f32 { return flushed(canonical(flushed(a) + flushed(b))); });
        op("sub." + t, [](f32 a, f32 b) -> f32 { return flushed(canonical(flushed(a) - flushed(b))); });
        op("mul." + t, [](f32 a, f32 b) -> f32 { return flushed(canonical(flushed(a) * flushed(b))); });
    }
    op("cvt.s8.s32", [](i32 a) -> i16 { return int8_t(a); });
    op("cvt.rmi.ftz.f32.f32", [](f32 a) -> f32 { return canonical(std::floor(flushed(a))); });
    op("copysign.f32", [](f32 sign, f32 a) -> f32 { return std::copysign(a, sign); });
    op("min.xorsign.abs.f32", [](f32 a, f32 b) -> f32 {
        f32 least = smaller(std::fabs(a), std::fabs(b));
        return std::signbit(a) != std::signbit(b) ? -least : least;
    });
    op("div.rn.ftz.f32", [](f32 a, f32 b) -> f32 { return flushed(canonical(flushed(a) / flushed(b))); });
    op("sqrt.rn.ftz.f32", [](f32 a) -> f32 { return flushed(canonical(std::sqrt(flushed(a)))); });
    count_slow_lanes();
    op("sqrt.approx.ftz.f32", [](f32 a) -> f32 { return flushed(approximation(std::sqrt(f64(flushed(a))))); });
    op("rsqrt.approx.f32", [](f32 a) -> f32 { return approximation(1 / std::sqrt(f64(a))); });
    op("rsqrt.approx.ftz.f32", [](f32 a) -> f32 { return flushed(approximation(1 / std::sqrt(f64(flushed(a))))); });
    op("rcp.approx.ftz.f32", [](f32 a) -> f32 { return flushed(approximation(1 / f64(flushed(a)))); });
    op("ex2.approx.f32", [](f32 a) -> f32 { return approximation(std::exp2(f64(a))); });
    op("ex2.approx.ftz.f32", [](f32 a) -> f32 { return flushed(approximation(std::exp2(f64(flushed(a))))); });
    op("lg2.approx.f32", [](f32 a) -> f32 { return approximation(std::log2(f64(a))); });
    op("lg2.approx.ftz.f32", [](f32 a) -> f32 { return flushed(approximation(std::log2(f64(flushed(a))))); });
    op("div.full.f32", [](f32 a, f32 b) -> f32 { return approximation(f64(a) / f64(b)); });

    for (const char *rn : {"", "rn."}) {
        using P = two<f32>;
        op(std::string("add.") + rn + "f32x2", [](P a, P b) -> P { return {canonical(a.low + b.low), canonical(a.high + b.high)}; });
        op(std::string("sub.") + rn + "f32x2", [](P a, P b) -> P { return {canonical(a.low - b.low), canonical(a.high - b.high)}; });
        op(std::string("mul.") + rn + "f32x2", [](P a, P b) -> P { return {canonical(a.low * b.low), canonical(a.high * b.high)}; });
    }
    op("fma.rn.f32x2", [](two<f32> a, two<f32> b, two<f32> c) -> two<f32> {
        return {canonical(std::fma(a.low, b.low, c.low)), canonical(std::fma(a.high, b.high, c.high))};
    });

    op_shuffle("shfl.sync.bfly.b32", [](u32 lane, u32 b) { return lane ^ b; });
    op_shuffle("shfl.sync.idx.b32", [](u32, u32 b) { return b % LANES; });
    table["vote.sync.ballot.b32"] = {ballot, {4, 1, 4}};
    op_reduce<i32>("redux.sync.max.s32", [](i32 a, i32 b) { return std::max(a, b); });
    op_reduce<i32>("redux.sync.min.s32", [](i32 a, i32 b) { return std::min(a, b); });
    op_reduce<u32>("redux.sync.max.u32", [](u32 a, u32 b) { return std::max(a, b); });
    op_reduce<u32>("redux.sync.min.u32", [](u32 a, u32 b) { return std::min(a, b); });
    op_reduce<u32>("redux.sync.or.b32", [](u32 a, u32 b) { return a | b; });
    op_reduce<u32>("redux.sync.add.s32", [](u32 a, u32 b) { return a + b; });
    op_reduce<f32>("redux.sync.max.f32", [](f32 a, f32 b) { return greater(a, b); });
    op_reduce<f32>("redux.sync.max.NaN.f32", [](f32 a, f32 b) { return a != a || b != b ? canonical(a + b) : greater(a, b); });
    op_atomic<u64, false>("atom.global.add.u64", [](u64 a, u64 b) { return a + b; });
    op_atomic<f32, false>("atom.global.add.f32", [](f32 a, f32 b) { return canonical(a + b); });
    op_atomic<u32, false>("atom.global.add.u32", [](u32 a, u32 b) { return a + b; });
    op_atomic<u32, false>("atom.global.or.b32", [](u32 a, u32 b) { return a | b; });
    op_atomic<i64, false>("atom.global.max.s64", [](i64 a, i64 b) { return std::max(a, b); });
    op_atomic<u32, true>("atom.shared.add.u32", [](u32 a, u32 b) { return a + b; });

    // A hint to the cache, which the accesses that take it ignore.
    op("createpolicy.fractional.b64", [](f32) -> u64 { return 0; });
    table["ld.global"] = {load_global, {}};
    table["st.global"] = {store_global, {}};
    table["ld.shared"] = {load_shared, {}};
    table["st.shared"] = {store_shared, {}};
    table["ldmatrix"] = {load_matrix, {}};
    table["stmatrix"] = {store_matrix, {}};
    table["bar.sync"] = {barrier, {}};
    table["bar.warp.sync"] = {warp_barrier, {}};
    table["bra"] = {branch, {}};
    table["ret"] = {leave, {}};
}

}  // namespace

std::map<std::string, Operation> &operations() {
    if (table.empty()) fill();
    return table;
}

extern "C" void approximate(int end) { inexact = end; }
