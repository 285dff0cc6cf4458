// Loads and stores: checked against what is allocated, written and ordered, and counted.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <set>

#include "machine.h"

namespace {

std::string text(const char *format, auto... values) {
    char line[400];
    snprintf(line, sizeof line, format, values...);
    return line;
}

u64 *counts(Warp &w) {
    return w.block->launch->counts ? w.block->launch->counts + u64(w.pc) * COUNTS : nullptr;
}

// The address that each lane uses, of which those of `w.mask` count.
void addresses(Warp &w, const Instruction &i, int operand, bool wide, u64 *into) {
    if (wide)
        for (int l = 0; l < LANES; l++) into[l] = w.reg<u64>(i.operands[operand])[l] + i64(i.offset);
    else
        for (int l = 0; l < LANES; l++) into[l] = u32(w.reg<u32>(i.operands[operand])[l] + i.offset);
}

// How many distinct pieces of `grain` bytes the lanes touch, whose accesses of `bytes` bytes are aligned to them. They
// are left in `seen`, in order.
int distinct(const u64 *at, int lanes, int bytes, int grain, u64 *seen) {
    int found = 0;
    for (int l = 0; l < lanes; l++)
        for (u64 piece = at[l] / grain; piece <= (at[l] + bytes - 1) / grain; piece++) {
            if (found && seen[found - 1] == piece) continue;
            seen[found++] = piece;
        }
    std::sort(seen, seen + found);
    return std::unique(seen, seen + found) - seen;
}

// The addresses of the lanes that take part, side by side. Returns how many.
int taking_part(const Warp &w, const u64 *at, u64 *into) {
    int lanes = 0;
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) into[lanes++] = at[l];
    return lanes;
}

// Shared memory serves 128 bytes at a time: 32 lanes of up to 4 bytes, 16 of 8, 8 of 16, each bank one word.
void count_shared(Warp &w, const u64 *at, int bytes, u32 lanes = ALL) {
    u64 *to = counts(w);
    if (!to || !w.block->launch->settings->counting) return;
    to[REQUESTS]++;
    int together = bytes <= 4 ? 32 : 128 / bytes;
    for (int first = 0; first < LANES; first += together) {
        std::set<u64> words[32];
        size_t most = 0;
        for (int l = first; l < first + together; l++)
            if (w.mask & lanes & 1u << l)
                for (u64 word = at[l] / 4; word <= (at[l] + bytes - 1) / 4; word++) {
                    words[word % 32].insert(word);
                    most = std::max(most, words[word % 32].size());
                }
        to[WAVEFRONTS] += most;
    }
}

u32 thread_of_launch(const Warp &w, int lane) {
    return w.block->index * w.block->launch->threads + w.first_thread + lane + 1;
}

std::vector<GlobalByte> &log_of(Launch &launch, const Range &range) {
    std::vector<GlobalByte> &found = launch.logs[range.begin];
    if (found.empty()) found.resize(range.end - range.begin);
    return found;
}

// The allocation of `bytes` bytes at `address`, which must be live, long enough and aligned.
const Range &checked(Warp &w, int lane, u64 address, int bytes, int aligned, const char *what) {
    Range &range = w.block->launch->last[w.pc];
    if (!range.holds(address, bytes)) {
        range = memory.find(address);
        if (range.begin == range.end)
            fail(w, lane, text("%s of %d bytes at %#lx, in no live allocation", what, bytes, address));
        if (address >= range.end)
            fail(w, lane,
                 text("%s of %d bytes at %#lx, in no live allocation; the nearest below, of %lu bytes, ends %lu before",
                      what, bytes, address, range.end - range.begin, address - range.end));
        if (address + bytes > range.end)
            fail(w, lane, text("%s of %d bytes at %#lx reaches %lu bytes past its allocation of %lu bytes", what, bytes,
                               address, address + bytes - range.end, range.end - range.begin));
    }
    if (address % aligned)
        fail(w, lane, text("%s of %d bytes at %#lx is not aligned to %s", what, bytes, address,
                           aligned == bytes ? "them" : text("%d", aligned).c_str()));
    return range;
}

void check_written(Warp &w, int lane, u64 address, int bytes, const Range &range) {
    for (u64 word = address & ~7ull; word < address + bytes; word += 8) {
        u64 held;
        memcpy(&held, reinterpret_cast<void *>(word), 8);
        if (held == untouched(word) && word + 4 <= range.end)  // of fewer bytes, one in 256 is the pattern's by chance
            fail(w, lane, text("load of %d bytes at %#lx, byte %lu of an allocation of %lu, which nobody wrote to",
                               bytes, address, word - range.begin, range.end - range.begin));
    }
}

constexpr i32 BY_ATOMICS = -2;            // as the writer of a byte of shared memory
constexpr size_t MOST_LOGGED = 4 << 20;  // bytes of an allocation whose accesses are logged one by one

void log_read(Warp &w, int lane, u64 address, int bytes, const Range &range) {
    if (range.end - range.begin > MOST_LOGGED) return;
    std::vector<GlobalByte> &log = log_of(*w.block->launch, range);
    for (u64 at = address; at < address + bytes; at++) {
        GlobalByte &byte = log[at - range.begin];
        if (byte.writer && (byte.writer - 1) / w.block->launch->threads != w.block->index)
            fail(w, lane, text("load of byte %lu of an allocation of %lu, which block %u writes in the same launch",
                               at - range.begin, range.end - range.begin,
                               (byte.writer - 1) / w.block->launch->threads));
        byte.reader_block = w.block->index + 1;
    }
}

void log_write(Warp &w, int lane, u64 address, int bytes, const Range &range, const u8 *value) {
    if (range.end - range.begin > MOST_LOGGED) return;
    std::vector<GlobalByte> &log = log_of(*w.block->launch, range);
    u32 me = thread_of_launch(w, lane);
    for (int k = 0; k < bytes; k++) {
        GlobalByte &byte = log[address + k - range.begin];
        bool same = value[k] == reinterpret_cast<u8 *>(address)[k];
        if (byte.writer && byte.writer != me && !same)
            fail(w, lane, text("store to byte %lu of an allocation of %lu, to which thread %u of block %u stored "
                               "another value in the same launch",
                               address + k - range.begin, range.end - range.begin,
                               (byte.writer - 1) % w.block->launch->threads,
                               (byte.writer - 1) / w.block->launch->threads));
        if (byte.reader_block && byte.reader_block != w.block->index + 1 && !same)
            fail(w, lane, text("store to byte %lu of an allocation of %lu, which block %u reads in the same launch",
                               address + k - range.begin, range.end - range.begin, byte.reader_block - 1));
        byte.writer = me;
    }
}

// A value between memory and a register that may be wider: bytes are kept in 16 bits.
void widen(u8 *target, int wide, const u8 *source, int bytes) {
    memcpy(target, source, bytes);
    if (wide > bytes) memset(target + bytes, 0, wide - bytes);
}

u8 *shared_bytes(Warp &w, int lane, u64 address, int bytes, const char *what) {
    if (address + bytes > w.block->shared.size())
        fail(w, lane, text("%s of %d bytes at %lu of shared memory, of which the block has %lu", what, bytes, address,
                           w.block->shared.size()));
    if (address % bytes)
        fail(w, lane, text("%s of %d bytes at %lu of shared memory is not aligned to them", what, bytes, address));
    return w.block->shared.data() + address;
}

Touch touch(const Warp &w, int lane) {
    return {w.first_thread + lane, w.first_thread / LANES, w.block->phase, w.step};
}

// Whether no barrier lies between an earlier access of another thread and one of `now`.
bool unordered(const Touch &before, const Touch &now) {
    if (before.phase != now.phase || before.thread == now.thread) return false;
    return before.warp != now.warp || before.step == now.step;
}

void log_shared_read(Warp &w, int lane, u64 address, int bytes) {
    Touch me = touch(w, lane);
    for (int k = 0; k < bytes; k++) {
        SharedByte &byte = w.block->shared_log[address + k];
        if (byte.write.phase == 0)
            fail(w, lane, text("load of byte %lu of shared memory, which nobody wrote to", address + k));
        if (unordered(byte.write, me))
            fail(w, lane, text("load of byte %lu of shared memory, which thread %d wrote with no barrier between",
                               address + k, byte.write.thread));
        Touch now = me;
        if (byte.read.phase == me.phase && byte.read.thread != me.thread) {
            now.thread = byte.read.warp == me.warp ? -2 : -3;
            if (now.thread == -3) now.warp = -1;
        }
        byte.read = now;
    }
}

void log_shared_write(Warp &w, int lane, u64 address, const u8 *value, int bytes) {
    Touch me = touch(w, lane);
    for (int k = 0; k < bytes; k++) {
        SharedByte &byte = w.block->shared_log[address + k];
        bool same = w.block->shared[address + k] == value[k];  // stored twice, which is harmless
        if (!same && unordered(byte.write, me))
            fail(w, lane, text("store to byte %lu of shared memory, to which thread %d stored another value with no "
                               "barrier between", address + k, byte.write.thread));
        if (!same && unordered(byte.read, me))
            fail(w, lane, text("store to byte %lu of shared memory, which %s read with no barrier between", address + k,
                               byte.read.thread < 0 ? "other threads"
                                                    : text("thread %d", byte.read.thread).c_str()));
        byte.write = me;
    }
}

}  // namespace

void count_global(Warp &w, const u64 *at, int lanes, int bytes, bool store) {
    u64 *to = counts(w);
    if (!to || !w.block->launch->settings->counting) return;
    u64 seen[2 * LANES * 16];  // a wave of AMD has twice the lanes
    to[REQUESTS]++;
    to[LINES] += distinct(at, lanes, bytes, store ? 128 : 64, seen);
    // What a perfect layout would take for the same distinct bytes; an address is a multiple of the access's width.
    to[LEAST] += (u64(distinct(at, lanes, bytes, bytes, seen)) * bytes + 31) / 32;
    int sectors = distinct(at, lanes, bytes, 32, seen);
    to[SECTORS] += sectors;
    for (int k = 0; k < sectors; k++) to[FRESH] += w.block->launch->touched[store].insert(seen[k]).second;
}

void count_slow(Warp &w) {
    if (u64 *to = counts(w)) to[SLOW]++;
}

const u8 *read_global(Warp &w, int lane, u64 address, int bytes, int aligned) {
    const Settings &settings = *w.block->launch->settings;
    const Range &range = checked(w, lane, address, bytes, aligned, "load");
    check_written(w, lane, address, bytes, range);
    if (settings.races) log_read(w, lane, address, bytes, range);
    return reinterpret_cast<u8 *>(address);
}

void write_global(Warp &w, int lane, u64 address, const u8 *value, int bytes, int aligned) {
    const Range &range = checked(w, lane, address, bytes, aligned, "store");
    if (memory.read_only(address, bytes))
        fail(w, lane, text("store of %d bytes at byte %lu of an allocation of %lu that is only to be read", bytes,
                           address - range.begin, range.end - range.begin));
    if (w.block->launch->settings->races) log_write(w, lane, address, bytes, range, value);
    memcpy(reinterpret_cast<void *>(address), value, bytes);
}

const u8 *read_shared(Warp &w, int lane, u64 address, int bytes) {
    const u8 *from = shared_bytes(w, lane, address, bytes, "load");
    log_shared_read(w, lane, address, bytes);
    return from;
}

void write_shared(Warp &w, int lane, u64 address, const u8 *value, int bytes) {
    u8 *to = shared_bytes(w, lane, address, bytes, "store");
    log_shared_write(w, lane, address, value, bytes);
    memcpy(to, value, bytes);
}

void load_global(Warp &w, const Instruction &i) {
    u64 at[LANES];
    int bytes = i.values * i.bytes;
    addresses(w, i, i.values, true, at);
    u64 active[LANES];
    count_global(w, active, taking_part(w, at, active), bytes, false);
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        const u8 *from = read_global(w, l, at[l], bytes, bytes);
        for (int v = 0; v < i.values; v++)
            widen(w.registers + i.operands[v] + l * i.wide, i.wide, from + v * i.bytes, i.bytes);
    }
}

void store_global(Warp &w, const Instruction &i) {
    u64 at[LANES];
    int bytes = i.values * i.bytes;
    addresses(w, i, 0, true, at);
    u64 active[LANES];
    count_global(w, active, taking_part(w, at, active), bytes, true);
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        u8 value[64];
        for (int v = 0; v < i.values; v++)
            memcpy(value + v * i.bytes, w.registers + i.operands[1 + v] + l * i.wide, i.bytes);
        write_global(w, l, at[l], value, bytes, bytes);
    }
}

void load_shared(Warp &w, const Instruction &i) {
    u64 at[LANES];
    int bytes = i.values * i.bytes;
    addresses(w, i, i.values, false, at);
    count_shared(w, at, bytes);
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        const u8 *from = read_shared(w, l, at[l], bytes);
        for (int v = 0; v < i.values; v++)
            widen(w.registers + i.operands[v] + l * i.wide, i.wide, from + v * i.bytes, i.bytes);
    }
}

void store_shared(Warp &w, const Instruction &i) {
    u64 at[LANES];
    int bytes = i.values * i.bytes;
    addresses(w, i, 0, false, at);
    count_shared(w, at, bytes);
    for (int l = 0; l < LANES; l++) {
        if (!(w.mask >> l & 1)) continue;
        u8 value[64];
        for (int v = 0; v < i.values; v++)
            memcpy(value + v * i.bytes, w.registers + i.operands[1 + v] + l * i.wide, i.bytes);
        write_shared(w, l, at[l], value, bytes);
    }
}

// Matrices of 8 x 8 elements of 16 bits. Lane 8 m + r gives the address of row r of matrix m; lane l holds of each
// matrix the elements 2 (l % 4) and the next of row l / 4, or of the transposed matrix, which `wide` says. Calls `each`
// with a lane, the address of an element and its place in the lane's registers.
template <class F>
static void for_matrices(Warp &w, const Instruction &i, int address, int held, const char *what, F each) {
    if (w.mask != ALL) fail(w, 0, text("%s of a matrix by a part of the warp", what));
    u64 at[LANES];
    addresses(w, i, address, false, at);
    count_shared(w, at, 16, i.values == 4 ? ALL : (1u << 8 * i.values) - 1);
    for (int row = 0; row < 8 * i.values; row++) shared_bytes(w, row, at[row], 16, what);
    for (int m = 0; m < i.values; m++)
        for (int l = 0; l < LANES; l++)
            for (int k = 0; k < 2; k++) {
                int row = i.wide ? 2 * (l % 4) + k : l / 4, column = i.wide ? l / 4 : 2 * (l % 4) + k;
                each(l, at[8 * m + row] + 2 * column, w.registers + i.operands[held + m] + 4 * l + 2 * k);
            }
}

void load_matrix(Warp &w, const Instruction &i) {
    for_matrices(w, i, i.values, 0, "load", [&](int lane, u64 address, u8 *value) {
        log_shared_read(w, lane, address, 2);
        memcpy(value, &w.block->shared[address], 2);
    });
}

void store_matrix(Warp &w, const Instruction &i) {
    for_matrices(w, i, 0, 1, "store", [&](int lane, u64 address, u8 *value) {
        log_shared_write(w, lane, address, value, 2);
        memcpy(&w.block->shared[address], value, 2);
    });
}

// Lanes at one bank take turns, those at one place too.
void count_shared_atomics(Warp &w, const u64 *at) {
    u64 *to = counts(w);
    if (!to || !w.block->launch->settings->counting) return;
    int lanes[32] = {};
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) lanes[at[l] / 4 % 32]++;
    to[REQUESTS]++;
    to[WAVEFRONTS] += *std::max_element(lanes, lanes + 32);
}

u8 *global_place(Warp &w, int lane, u64 address, int bytes) {
    const Range &range = checked(w, lane, address, bytes, bytes, "atomic operation");
    check_written(w, lane, address, bytes, range);
    if (memory.read_only(address, bytes)) fail(w, lane, "atomic operation on memory that is only to be read");
    return reinterpret_cast<u8 *>(address);
}

// Atomic operations are ordered among themselves, not against the stores and loads of other threads.
u8 *shared_place(Warp &w, int lane, u64 address, int bytes) {
    u8 *place = shared_bytes(w, lane, address, bytes, "atomic operation");
    Touch me = touch(w, lane);
    for (int k = 0; k < bytes; k++) {
        SharedByte &byte = w.block->shared_log[address + k];
        if (byte.write.phase == 0)
            fail(w, lane, text("atomic operation on byte %lu of shared memory, which nobody wrote to", address + k));
        bool stored = byte.write.thread >= 0 && unordered(byte.write, me);
        if (stored || unordered(byte.read, me))
            fail(w, lane, text("atomic operation on byte %lu of shared memory, which another thread %s with no barrier "
                               "between", address + k, stored ? "wrote" : "read"));
        // Of one warp as long as no other one takes part: what that warp does next need only be ordered within it.
        bool alone = byte.write.phase != me.phase || byte.write.warp == me.warp;
        byte.write = {BY_ATOMICS, alone ? me.warp : -1, me.phase, me.step};
    }
    return place;
}
