// Runs a kernel for CDNA 3: control, memory and what passes between lanes. What an instruction computes: vector.cpp.
#include <algorithm>
#include <cstring>

#include "waves.h"

namespace {

std::map<std::string, WaveOperation> table;

// ------------------------------------------------------------------------------------------------------------- memory

// The address of a lane, and whether it is masked: a raw buffer reads 0 and stores nothing from its end on.
struct Address {
    u64 at;
    bool masked = false;
};

Address global_address(Wave &w, const WaveInstruction &i, int lane) {
    const Place &vector = i.operands[1], &scalar = i.operands[2];
    Words held = words(w, vector);
    u64 at = held.low[lane];
    at = scalar.kind == NONE ? at | u64(held.high[lane]) << 32 : at + w.pair(scalar.index);
    return {at + i64(i.offsets[0])};
}

Address buffer_address(Wave &w, const WaveInstruction &i, int lane) {
    const u32 *resource = w.scalars + i.operands[2].index;
    Words scalar = words(w, i.operands[3]);
    if (resource[1] >> 16 || *scalar.low) fail(w, lane, "a buffer with a stride or a scalar offset, which this machine does not know");
    u64 offset = u64(i.offsets[0]) + (i.operands[1].kind == NONE ? 0 : words(w, i.operands[1]).low[lane]);
    u64 bytes = u64(i.values) * i.bytes;
    if (offset < resource[2] && offset + bytes > resource[2]) fail(w, lane, "an access that a buffer's end cuts in two");
    return {(u64(resource[1]) << 32 | resource[0]) + offset, offset >= resource[2]};
}

using Addressing = Address (*)(Wave &, const WaveInstruction &, int);

// Memory takes any alignment; what Triton compiles keeps to words.
int aligned(const WaveInstruction &i) { return i.bytes; }

void put(Wave &w, const WaveInstruction &i, int first, int lane, const u8 *from, int bytes) {
    u32 *to = w.vector(i.operands[0]) + first * WAVE + lane;
    if (bytes < 4) {
        u32 value = 0;
        memcpy(&value, from, bytes);
        *to = i.sign ? u32(i32(value << (32 - 8 * bytes)) >> (32 - 8 * bytes)) : value;
    } else {
        for (int k = 0; k < bytes / 4; k++) memcpy(to + k * WAVE, from + 4 * k, 4);
    }
}

void take(Wave &w, const Place &place, int lane, u8 *into, int bytes) {
    const u32 *from = w.vector(place) + lane;
    u32 first = *from >> (place.change & HIGH_FOR_LOW ? 16 : 0);
    memcpy(into, &first, std::min(bytes, 4));
    for (int k = 1; k < bytes / 4; k++) memcpy(into + 4 * k, from + k * WAVE, 4);
}

template <Addressing ADDRESS> void load(Wave &w, const WaveInstruction &i) {
    static const u8 zeros[16] = {};
    int bytes = i.values * i.bytes;
    Address at[WAVE];
    for (int l = 0; l < WAVE; l++)  // before the first register changes, which may hold an address
        if (w.pair(EXEC) >> l & 1) at[l] = ADDRESS(w, i, l);
    for (int l = 0; l < WAVE; l++)
        if (w.pair(EXEC) >> l & 1)
            put(w, i, 0, l, at[l].masked ? zeros : read_global(w, l, at[l].at, bytes, aligned(i)), bytes);
    u64 active[WAVE];
    int lanes = 0;
    for (int l = 0; l < WAVE; l++)
        if (w.pair(EXEC) >> l & 1 && !at[l].masked) active[lanes++] = at[l].at;
    if (lanes) count_global(w, active, lanes, bytes, false);
}

template <Addressing ADDRESS> void store(Wave &w, const WaveInstruction &i) {
    int bytes = i.values * i.bytes, lanes = 0;
    u64 active[WAVE];
    for (int l = 0; l < WAVE; l++) {
        if (!(w.pair(EXEC) >> l & 1)) continue;
        u8 value[16];
        take(w, i.operands[0], l, value, bytes);
        if (Address at = ADDRESS(w, i, l); !at.masked) {
            write_global(w, l, at.at, value, bytes, aligned(i));
            active[lanes++] = at.at;
        }
    }
    if (lanes) count_global(w, active, lanes, bytes, true);
}

void load_scalars(Wave &w, const WaveInstruction &i) {
    u64 at = w.pair(i.operands[1].index) + i64(i.offsets[0]);
    if (i.operands[2].kind) at += *words(w, i.operands[2]).low;
    const u8 *from = read_global(w, 0, at, 4 * i.values, 4);
    memcpy(w.scalars + i.operands[0].index, from, 4 * i.values);
}

template <class T, Addressing ADDRESS, class F> void atomic(Wave &w, const WaveInstruction &i) {
    for (int l = 0; l < WAVE; l++) {
        if (!(w.pair(EXEC) >> l & 1)) continue;
        Address at = ADDRESS(w, i, l);
        if (at.masked) continue;
        T value;
        take(w, i.operands[0], l, reinterpret_cast<u8 *>(&value), sizeof(T));
        T *place = reinterpret_cast<T *>(global_place(w, l, at.at, sizeof(T)));
        *place = F{}(*place, value);
    }
}

void load_local(Wave &w, const WaveInstruction &i) {
    w.step++;  // accesses of a wave are in order
    u32 at[WAVE];
    memcpy(at, w.vector(i.operands[1]), sizeof at);
    for (int l = 0; l < WAVE; l++)
        for (int k = 0; k < i.values; k++)
            if (w.pair(EXEC) >> l & 1)
                put(w, i, k * i.bytes / 4, l, read_shared(w, l, u64(at[l]) + i.offsets[k], i.bytes), i.bytes);
}

void store_local(Wave &w, const WaveInstruction &i) {
    w.step++;
    for (int l = 0; l < WAVE; l++)
        for (int k = 0; k < i.values; k++)
            if (w.pair(EXEC) >> l & 1) {
                u8 value[16];
                take(w, i.operands[k], l, value, i.bytes);
                write_shared(w, l, u64(w.vector(i.operands[2])[l]) + i.offsets[k], value, i.bytes);
            }
}

void add_local(Wave &w, const WaveInstruction &i) {
    w.step++;
    for (int l = 0; l < WAVE; l++)
        if (w.pair(EXEC) >> l & 1) {
            u8 *place = shared_place(w, l, u64(w.vector(i.operands[2])[l]) + i.offsets[0], 4);
            *reinterpret_cast<u32 *>(place) += w.vector(i.operands[0])[l];
        }
}

// ------------------------------------------------------------------------------------------------------- between lanes

// What each lane receives from the lane that `from` names; nothing from one that does not run.
template <class F> void exchange(Wave &w, const Place &to, const Place &what, F from) {
    u32 values[WAVE];
    memcpy(values, w.vector(what), sizeof values);
    u64 exec = w.pair(EXEC);
    int source[WAVE];
    for (int l = 0; l < WAVE; l++) source[l] = from(l);
    for (int l = 0; l < WAVE; l++)
        if (exec >> l & 1) w.vector(to)[l] = exec >> source[l] & 1 ? values[source[l]] : 0;
}

void permute(Wave &w, const WaveInstruction &i) {
    const u32 *at = w.vector(i.operands[1]);
    exchange(w, i.operands[0], i.operands[2], [&](int l) { return (at[l] + i.offsets[0]) / 4 % WAVE; });
}

// Within 32 lanes: their numbers are masked by 5 bits, others are set, others turned round.
void swizzle(Wave &w, const WaveInstruction &i) {
    u32 by = i.offsets[0];
    exchange(w, i.operands[0], i.operands[1],
             [&](int l) { return (l & 32) | (((l & 31 & by) | (by >> 5 & 31)) ^ (by >> 10 & 31)); });
}

void read_first_lane(Wave &w, const WaveInstruction &i) {
    u64 exec = w.pair(EXEC);
    w.scalars[i.operands[0].index] = words(w, i.operands[1]).low[exec ? __builtin_ctzll(exec) : 0];
}

void read_lane(Wave &w, const WaveInstruction &i) {
    w.scalars[i.operands[0].index] = w.vector(i.operands[1])[*words(w, i.operands[2]).low % WAVE];
}

void write_lane(Wave &w, const WaveInstruction &i) {
    w.vector(i.operands[0])[*words(w, i.operands[2]).low % WAVE] = *words(w, i.operands[1]).low;
}

// The bits of the mask below this lane, counted onto a sum.
template <int HIGH> void count_below(Wave &w, const WaveInstruction &i) {
    Words mask = words(w, i.operands[1]), sum = words(w, i.operands[2]);
    for (int l = 0; l < WAVE; l++)
        if (w.pair(EXEC) >> l & 1) {
            u32 below = u32(((1ull << l) - 1) >> (HIGH ? 32 : 0));
            w.vector(i.operands[0])[l] = sum.low[l * sum.step] + __builtin_popcount(mask.low[l * mask.step] & below);
        }
}

// ------------------------------------------------------------------------------------------------------------- control

template <class F> void branch(Wave &w, const WaveInstruction &i) {
    if (F{}(w)) w.next = i.target;
}

template <class F> void enter_branch(const char *name, F) { table[name] = {branch<F>, 0}; }

void fill() {
    table["global_load"] = {load<global_address>};
    table["global_store"] = {store<global_address>};
    table["buffer_load"] = {load<buffer_address>};
    table["buffer_store"] = {store<buffer_address>};
    table["s_load"] = {load_scalars};
    table["ds_read"] = {load_local};
    table["ds_write"] = {store_local};
    table["ds_add_u32"] = {add_local};
    table["ds_bpermute_b32"] = {permute};
    table["ds_swizzle_b32"] = {swizzle};
    auto bits_or = [](u32 a, u32 b) { return a | b; };
    auto greater = [](i64 a, i64 b) { return a > b ? a : b; };
    auto sum = [](u64 a, u64 b) { return a + b; };
    table["global_atomic_or"] = {atomic<u32, global_address, decltype(bits_or)>};
    table["global_atomic_smax_x2"] = {atomic<i64, global_address, decltype(greater)>};
    table["global_atomic_add_x2"] = {atomic<u64, global_address, decltype(sum)>};
    table["buffer_atomic_add_x2"] = {atomic<u64, buffer_address, decltype(sum)>};
    table["v_readfirstlane_b32"] = {read_first_lane, 2};
    table["v_readlane_b32"] = {read_lane, 3};
    table["v_writelane_b32"] = {write_lane, 3};
    table["v_mbcnt_lo_u32_b32"] = {count_below<0>, 3};
    table["v_mbcnt_hi_u32_b32"] = {count_below<1>, 3};
    enter_branch("s_branch", [](Wave &) { return true; });
    enter_branch("s_cbranch_scc0", [](Wave &w) { return !w.scc; });
    enter_branch("s_cbranch_scc1", [](Wave &w) { return w.scc; });
    enter_branch("s_cbranch_vccz", [](Wave &w) { return w.pair(VCC) == 0; });
    enter_branch("s_cbranch_vccnz", [](Wave &w) { return w.pair(VCC) != 0; });
    enter_branch("s_cbranch_execz", [](Wave &w) { return w.pair(EXEC) == 0; });
    enter_branch("s_cbranch_execnz", [](Wave &w) { return w.pair(EXEC) != 0; });
    table["s_endpgm"] = {[](Wave &w, const WaveInstruction &) { w.alive = 0; }, 0};
    table["s_barrier"] = {[](Wave &w, const WaveInstruction &) { w.waiting = true; }, 0};
    // What only the order of memory and the pipeline hear: here every access is done before the next instruction.
    for (const char *name : {"s_waitcnt", "s_nop", "buffer_wbl2", "buffer_inv"})
        table[name] = {[](Wave &, const WaveInstruction &) {}, 0};
    table.merge(wave_operations());
}

std::vector<void (*)(Wave &, const WaveInstruction &)> runs;

struct WaveProgram {
    const WaveInstruction *code;
    i32 length;
    i32 entry;         // where it begins
    i32 vectors;       // registers of a wave
    i32 user_scalars;  // the address of the arguments, then the first of these themselves; the block's number follows
    const u8 *arguments;
    i32 argument_bytes;
};

void run_wave(Wave &w, const WaveProgram &program, u64 *counts) {
    w.waiting = false;
    for (u64 steps = 0; w.alive && !w.waiting; steps++) {
        if (steps == MOST_STEPS) fail(w, 0, "a loop that does not end");
        w.next = w.pc + 1;
        if (counts) {
            counts[u64(w.pc) * COUNTS + THREADS] += __builtin_popcountll(w.pair(EXEC));
            counts[u64(w.pc) * COUNTS + WARPS]++;
        }
        runs[program.code[w.pc].operation](w, program.code[w.pc]);
        w.pc = w.next;
    }
}

// What registers hold before anything is written to them.
u32 garbage(u32 seed) { return (seed + 1) * 0x9E3779B9u ^ 0xA7C15F3Du; }

}  // namespace

extern "C" {

// The number of an operation and of its operands, -1 for one that this machine does not know.
int find_wave_operation(const char *name, int *operands) {
    static std::map<std::string, int> known;
    if (table.empty()) fill();
    auto found = table.find(name);
    if (found == table.end()) return -1;
    if (!known.count(name)) {
        known[name] = runs.size();
        runs.push_back(found->second.run);
    }
    *operands = found->second.operands;
    return known[name];
}

// Run blocks of `threads` threads. Returns null, or what went wrong; then `where` holds the instruction, the block and
// the thread.
const char *run_waves(const WaveProgram *program, const u32 *grid, u32 threads, u32 shared_bytes,
                      const Settings *settings, u64 *counts, i32 *where) {
    Launch launch{settings, counts, threads, {}, std::vector<Range>(program->length)};
    Block block{&launch, 0, std::vector<u8>(shared_bytes), std::vector<SharedByte>(shared_bytes)};
    std::vector<u64> arguments(program->argument_bytes / 8 + 1);
    memcpy(arguments.data(), program->arguments, program->argument_bytes);
    memory.adopt(uintptr_t(arguments.data()), program->argument_bytes, true);
    std::vector<Wave> all(threads / WAVE);
    std::vector<u32> vectors(all.size() * program->vectors * WAVE);
    const char *failed = nullptr;
    try {
        u32 blocks = grid[0] * grid[1] * grid[2];
        for (u32 turn = 0; turn < blocks; turn++) {
            block.index = settings->reversed ? blocks - 1 - turn : turn;
            block.phase = 1;
            std::fill(block.shared_log.begin(), block.shared_log.end(), SharedByte{});
            for (size_t k = 0; k < vectors.size(); k++) vectors[k] = garbage(k + turn);
            for (u32 k = 0; k < all.size(); k++) {
                Wave &w = all[k];
                w.block = &block;
                w.vectors = vectors.data() + k * program->vectors * WAVE;
                w.first_thread = k * WAVE;
                w.alive = 1;
                w.pc = program->entry;
                w.scc = false;
                for (int s = 0; s < 128; s++) w.scalars[s] = garbage(s);
                w.set_pair(0, u64(arguments.data()));
                memcpy(w.scalars + 2, arguments.data(), std::min(4 * (program->user_scalars - 2), program->argument_bytes));
                w.scalars[program->user_scalars] = block.index;
                w.set_pair(EXEC, ~0ull);
                for (int l = 0; l < WAVE; l++) w.vectors[l] = w.first_thread + l;
            }
            for (bool done = false; !done; block.phase++) {
                done = true;
                for (u32 k = 0; k < all.size(); k++)
                    run_wave(all[settings->reversed ? all.size() - 1 - k : k], *program, counts);
                const Wave *waiting = nullptr, *gone = nullptr;
                for (Wave &w : all) (w.alive ? waiting : gone) = &w;
                if (waiting && gone)
                    fail(*waiting, 0, "a barrier that wave " + std::to_string(gone - all.data()) + " never reaches");
                if (waiting) done = false;
            }
        }
    } catch (const Fault &fault) {
        failed = reported(fault, where);
    }
    memory.adopt(uintptr_t(arguments.data()), 0, false);
    return failed;
}
}
