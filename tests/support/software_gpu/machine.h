// The machine that runs PTX: what an instruction is, and what the operations know of the warp that runs them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "memory.h"

constexpr int LANES = 32;
constexpr uint32_t ALL = 0xFFFFFFFFu;

using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using f32 = float;
using f64 = double;
struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};
struct pred {  // of its own type, so that templates tell it from a byte
    u8 on;
};
template <class T> struct two {  // a packed pair, the low half first
    T low, high;
};

// One instruction as ptx.py makes it; the same fields in the same order stand there.
struct Instruction {
    i32 operation;
    i32 predicate;    // where the predicate that guards it lies in the warp's registers; -1: none
    i32 negated;      // whether it runs where the predicate does not hold
    i32 operands[8];  // where its registers lie: results first, then what it reads
    i32 values;       // of a memory access: how many,
    i32 bytes;        // of how many bytes each,
    i32 wide;         // in registers of how many bytes,
    i32 offset;       // at this distance from the address
    i32 target;       // of a branch: an index of an instruction
};

// What is counted per instruction. ptx.py names them in the same order.
// FRESH: sectors that no instruction of the launch loaded before, or for stores stored to before. SLOW: warps in which a
// lane's division or root takes the subroutine that ptxas calls where its short sequence does not hold.
enum Count { THREADS, WARPS, DIVERGED, REQUESTS, SECTORS, LEAST, LINES, WAVEFRONTS, FRESH, SLOW, COUNTS };

// Instructions of a warp or wave between two barriers; a loop that does not end has more.
constexpr u64 MOST_STEPS = 1ull << 24;

struct Settings {
    i32 inexact;      // approximations: 0 correctly rounded, 1 and -1 the ends of their error, 2 anywhere between
    i32 races;        // look for races in global memory too
    i32 reversed;     // blocks and warps run last to first
    i32 counting;     // sectors, lines and wavefronts
};

struct Block;

struct Warp {
    Block *block;
    u8 *registers;
    u32 mask = 0;            // the lanes that run now
    u32 alive = 0;           // those that have not returned
    i32 at[LANES] = {};      // the next instruction of each
    bool waiting = false;    // at a barrier
    i32 pc = 0;              // the instruction that runs now, and
    i32 next = 0;            // the one after it
    i32 first_thread = 0;
    u32 step = 0;  // grows with every barrier of this warp alone

    template <class T> T *reg(i32 place) { return reinterpret_cast<T *>(registers + place); }
};

// Who wrote or read a byte of shared memory last.
struct Touch {
    i32 thread = -1;  // -2: several of the warp, -3: of the block
    i32 warp = -1;
    u32 phase = 0;  // between which barriers of the block; 0: never
    u32 step = 0;   // and of the warp
};

struct SharedByte {
    Touch write, read;
};

struct Launch;

struct Block {
    Launch *launch;
    u32 index;  // in the order of the grid
    std::vector<u8> shared;
    std::vector<SharedByte> shared_log;
    u32 phase = 1;  // grows with every barrier
};

// Who touched a byte of global memory last: thread and block, counted from 1 over the launch; 0 for none.
struct GlobalByte {
    u32 writer = 0, reader_block = 0;
};

struct Launch {
    const Settings *settings;
    u64 *counts;  // COUNTS per instruction, or null
    u32 threads;  // of a block
    std::map<uintptr_t, std::vector<GlobalByte>> logs;  // by where an allocation begins
    std::vector<Range> last;  // per instruction: the allocation that it last went to
    std::unordered_set<u64> touched[2];  // sectors loaded, and stored to
};

using Run = void (*)(Warp &, const Instruction &);

struct Operation {
    Run run;
    std::vector<u8> widths;  // bytes per operand, results first; empty where the instruction says
};

std::map<std::string, Operation> &operations();

// What a run ends with where a kernel does what it must not.
struct Fault {
    i32 instruction;
    u32 block;
    i32 thread;
    std::string what;
};
[[noreturn]] void fail(const Warp &warp, int lane, const std::string &what);
// The words of a fault, for Python; `where` receives the instruction, the block and the thread.
const char *reported(const Fault &, i32 *where);

void load_global(Warp &, const Instruction &);
void store_global(Warp &, const Instruction &);
void load_shared(Warp &, const Instruction &);
void store_shared(Warp &, const Instruction &);
void load_matrix(Warp &, const Instruction &);
void store_matrix(Warp &, const Instruction &);
// The same of one lane. Loads give where the value lies.
const u8 *read_global(Warp &, int lane, u64 address, int bytes, int aligned);
void write_global(Warp &, int lane, u64 address, const u8 *value, int bytes, int aligned);
const u8 *read_shared(Warp &, int lane, u64 address, int bytes);
void write_shared(Warp &, int lane, u64 address, const u8 *value, int bytes);
// For atomic operations: the address of `bytes` bytes, checked like a load and a store, and counted once per warp.
u8 *global_place(Warp &, int lane, u64 address, int bytes);
u8 *shared_place(Warp &, int lane, u64 address, int bytes);
void count_shared_atomics(Warp &, const u64 *addresses);
// Count one access of `lanes` lanes to global memory, of `bytes` bytes each at its own address.
void count_global(Warp &, const u64 *addresses, int lanes, int bytes, bool store);
void count_slow(Warp &);
