// The machine that runs AMD's assembly for CDNA 3: 64 lanes in step under one program counter, masked by EXEC.
#pragma once

#include "machine.h"

constexpr int WAVE = 64;
constexpr int VCC = 106, EXEC = 126;  // where they lie among the scalar registers

enum Kind { NONE, VECTOR, SCALAR, CONSTANT };
// What changes an operand. The two results of a packed operation take halves of their own, and signs of their own.
enum Change { NEGATED = 1, ABSOLUTE = 2, EXTENDED = 4, HIGH_FOR_LOW = 8, HIGH_FOR_HIGH = 16, NEGATED_HIGH = 32 };

// One operand and one instruction as amd.py makes them; the same fields in the same order stand there.
struct Place {
    i32 kind;
    i32 index;   // of the register
    i32 change;  // a set of `Change`
    i32 part;    // SDWA: 0 all of the register, 1 to 4 a byte, 5 and 6 a word
    u64 value;   // of a constant
};
struct WaveInstruction {
    Place operands[7];  // results first, then what it reads
    i32 operation;
    i32 values;             // of a memory access: how many,
    i32 bytes;              // of how many bytes each,
    i32 sign;               // extended by sign,
    i32 offsets[2];         // at these distances from the address
    i32 target;             // of a branch: an index of an instruction
    i32 dpp;                // 0 none; else 1 + the control word of the encoding
    i32 rows, banks, zero;  // DPP: which rows and banks of lanes take part, whether 0 comes from where no lane is
    i32 keep;               // SDWA: what is not written stays as it was
};

// `Warp` is what the checks of memory know: who accesses, and between which barriers.
struct Wave : Warp {
    u32 *vectors;  // 64 lanes of each
    u32 scalars[128];
    bool scc;

    u64 pair(int index) const { return u64(scalars[index + 1]) << 32 | scalars[index]; }
    void set_pair(int index, u64 value) {
        scalars[index] = u32(value);
        scalars[index + 1] = u32(value >> 32);
    }
    u32 *vector(const Place &place) { return vectors + place.index * WAVE; }
};

// An operand as words: that of lane l is low[l * step], of 64 bits with high[l * step] above it.
struct Words {
    const u32 *low, *high;
    int step;
};

inline Words words(Wave &w, const Place &place) {
    if (place.kind == VECTOR) return {w.vector(place), w.vector(place) + WAVE, 1};
    if (place.kind == SCALAR) return {w.scalars + place.index, w.scalars + place.index + 1, 0};
    auto *value = reinterpret_cast<const u32 *>(&place.value);
    return {value, value + 1, 0};
}

struct WaveOperation {
    void (*run)(Wave &, const WaveInstruction &);
    int operands = -1;  // how many; -1 where amd.py knows
};
std::map<std::string, WaveOperation> &wave_operations();
