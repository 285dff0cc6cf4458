// Runs a kernel: block after block, in each the warps in turn up to the next barrier, in each warp the lanes that are
// furthest behind, so that lanes that took different branches meet again where they can.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "machine.h"

namespace {

// A constant or parameter: `bytes` bytes of `value` in all lanes of the register at `place`.
struct Constant {
    i32 place, bytes;
    u64 value;
};

// What a register holds before the first instruction: which part of the thread's index or the launch's.
enum Special { THREAD, BLOCK_X, BLOCK_Y, BLOCK_Z, THREADS_OF_BLOCK, BLOCKS_X, BLOCKS_Y, BLOCKS_Z, LANE };

struct Program {
    const Instruction *code;
    i32 length;
    i32 register_bytes;  // of a warp
    const Constant *constants;
    i32 constant_count;
    const i32 *specials;  // pairs of Special and place
    i32 special_count;
};

std::vector<Run> runs;

void fill_lanes(u8 *registers, i32 place, u32 value) {
    for (int l = 0; l < LANES; l++) memcpy(registers + place + 4 * l, &value, 4);
}

u32 guarded(Warp &w, const Instruction &i) {
    const u8 *on = w.reg<u8>(i.predicate);
    u32 holds = 0;
    for (int l = 0; l < LANES; l++) holds |= u32((on[l] != 0) != (i.negated != 0)) << l;
    return holds;
}

// Until the warp is done or waits at a barrier.
void run_warp(Warp &w, const Program &program, u64 *counts) {
    w.waiting = false;
    for (u64 steps = 0; w.alive && !w.waiting;) {
        if (steps > MOST_STEPS) fail(w, 0, "a loop that does not end");
        i32 pc = program.length, limit = program.length;
        u32 group = 0;
        for (int l = 0; l < LANES; l++)
            if (w.alive >> l & 1) pc = std::min(pc, w.at[l]);
        for (int l = 0; l < LANES; l++)
            if (w.alive >> l & 1) {
                if (w.at[l] == pc)
                    group |= 1u << l;
                else
                    limit = std::min(limit, w.at[l]);  // from here on others may come along
            }
        bool jumped = false;
        steps -= pc;
        for (; pc < limit && !jumped; pc++) {
            const Instruction &i = program.code[pc];
            w.pc = pc;
            w.mask = i.predicate < 0 ? group : group & guarded(w, i);
            bool control = i.target >= 0;
            if (counts) {
                counts[u64(pc) * COUNTS + THREADS] += __builtin_popcount(w.mask);
                counts[u64(pc) * COUNTS + WARPS] += w.mask != 0;
                if (control) counts[u64(pc) * COUNTS + DIVERGED] += w.mask != 0 && w.mask != group;
            }
            if (control)
                for (int l = 0; l < LANES; l++)
                    if (group >> l & 1) w.at[l] = pc + 1;
            if (w.mask) runs[i.operation](w, i);
            jumped = control;
        }
        steps += pc;
        if (!jumped)
            for (int l = 0; l < LANES; l++)
                if (group >> l & 1) w.at[l] = pc;
    }
}

}  // namespace

void fail(const Warp &warp, int lane, const std::string &what) {
    throw Fault{warp.pc, warp.block->index, warp.first_thread + lane, what};
}

const char *reported(const Fault &fault, i32 *where) {
    thread_local std::string reason;
    where[0] = fault.instruction, where[1] = fault.block, where[2] = fault.thread;
    reason = fault.what;
    return reason.c_str();
}

extern "C" {

// The index of an operation and the bytes of its operands, -1 for one that this machine does not know.
int find_operation(const char *name, u8 *widths, int *count) {
    static std::map<std::string, int> known;
    auto &table = operations();
    auto found = table.find(name);
    if (found == table.end()) return -1;
    if (!known.count(name)) {
        known[name] = runs.size();
        runs.push_back(found->second.run);
    }
    *count = found->second.widths.size();
    std::copy(found->second.widths.begin(), found->second.widths.end(), widths);
    return known[name];
}

// Run `blocks` blocks of `threads` threads. Returns null, or what went wrong; then `where` holds the instruction, the
// block and the thread.
const char *run(const Program *program, const u32 *grid, u32 threads, u32 shared_bytes, const Settings *settings,
                u64 *counts, i32 *where) {
    Launch launch{settings, counts, threads, {}, std::vector<Range>(program->length)};
    u32 warps = (threads + LANES - 1) / LANES;
    std::vector<u8> registers(u64(program->register_bytes) * warps);
    Block block{&launch, 0, std::vector<u8>(shared_bytes), std::vector<SharedByte>(shared_bytes)};
    std::vector<Warp> all(warps);
    for (u32 k = 0; k < warps; k++) {
        Warp &w = all[k];
        w.block = &block;
        w.registers = registers.data() + u64(program->register_bytes) * k;
        w.first_thread = k * LANES;
        for (int c = 0; c < program->constant_count; c++)
            for (int l = 0; l < LANES; l++) {
                const Constant &constant = program->constants[c];
                memcpy(w.registers + constant.place + constant.bytes * l, &constant.value, constant.bytes);
            }
    }
    u32 blocks = grid[0] * grid[1] * grid[2];
    try {
        for (u32 turn = 0; turn < blocks; turn++) {
            u32 b = settings->reversed ? blocks - 1 - turn : turn;
            block.index = b;
            block.phase = 1;
            std::fill(block.shared_log.begin(), block.shared_log.end(), SharedByte{});
            for (Warp &w : all) {
                w.alive = threads - w.first_thread >= LANES ? ALL : (1u << (threads - w.first_thread)) - 1;
                std::fill(w.at, w.at + LANES, 0);
                for (int s = 0; s < program->special_count; s++) {
                    i32 place = program->specials[2 * s + 1];
                    switch (program->specials[2 * s]) {
                        case BLOCK_X: fill_lanes(w.registers, place, b % grid[0]); break;
                        case BLOCK_Y: fill_lanes(w.registers, place, b / grid[0] % grid[1]); break;
                        case BLOCK_Z: fill_lanes(w.registers, place, b / grid[0] / grid[1]); break;
                        case THREADS_OF_BLOCK: fill_lanes(w.registers, place, threads); break;
                        case BLOCKS_X: fill_lanes(w.registers, place, grid[0]); break;
                        case BLOCKS_Y: fill_lanes(w.registers, place, grid[1]); break;
                        case BLOCKS_Z: fill_lanes(w.registers, place, grid[2]); break;
                        case THREAD:
                            for (int l = 0; l < LANES; l++) w.reg<u32>(place)[l] = w.first_thread + l;
                            break;
                        case LANE:
                            for (int l = 0; l < LANES; l++) w.reg<u32>(place)[l] = l;
                            break;
                    }
                }
            }
            for (bool done = false; !done;) {
                done = true;
                for (u32 k = 0; k < warps; k++) run_warp(all[settings->reversed ? warps - 1 - k : k], *program, counts);
                const Warp *waiting = nullptr, *gone = nullptr;
                for (Warp &w : all) (w.alive ? waiting : gone) = &w;
                if (waiting && gone)
                    fail(*waiting, 0, "a barrier that warp " + std::to_string(gone - all.data()) + " never reaches");
                if (waiting) done = false;
                block.phase++;
            }
        }
    } catch (const Fault &fault) {
        return reported(fault, where);
    }
    return nullptr;
}
}
