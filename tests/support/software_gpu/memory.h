// Where tensors lie: every allocation of torch on the CPU, and what is known of its bytes.
//
// `watch` puts an allocator under torch that lists what lives, fills new memory with a pattern by which a kernel that
// reads it before anyone wrote to it is found, keeps a margin free on either side, and holds freed memory back for a
// while so that its address stays nobody's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

struct Range {
    uintptr_t begin = 0, end = 0;
    bool holds(uintptr_t address, size_t bytes) const { return address >= begin && address + bytes <= end; }
};

class Memory {
  public:
    // The live allocation that begins nearest below `address`, or an empty range.
    Range find(uintptr_t address);
    bool read_only(uintptr_t address, size_t bytes);

    void *take(size_t bytes);
    void give(void *data);
    // Memory that something else than torch's allocator owns: numpy's, a file's.
    void adopt(uintptr_t begin, size_t bytes, bool on);
    void protect(uintptr_t begin, size_t bytes, bool on);

  private:
    Range below(uintptr_t address);
    std::mutex lock;
    std::map<uintptr_t, size_t> live_;
    std::map<uintptr_t, size_t> protected_;
    std::vector<std::pair<void *, size_t>> held_back_;
    size_t held_bytes_ = 0;
};

extern Memory memory;

// What the eight bytes at a multiple of eight hold in memory that nobody wrote to yet.
inline uint64_t untouched(uintptr_t address) {
    return (address >> 3) * 0x9E3779B97F4A7C15ull ^ 0xA7C15F3D2B94E681ull;
}
