#include "memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <cstring>
#include <new>

Memory memory;

namespace {

constexpr size_t ALIGNED = 512;            // as torch's allocator on GPUs has it
constexpr size_t MARGIN = 512;             // bytes on either side that belong to nobody
constexpr size_t HELD_BACK = 64ull << 20;  // bytes of freed memory that are not used again yet

size_t padded(size_t bytes) { return (bytes + ALIGNED - 1) / ALIGNED * ALIGNED; }

}  // namespace

// Set by Python: looks for a tensor at an address that torch's allocator did not give, and adopts its memory.
static int (*ask)(uint64_t address) = nullptr;

Range Memory::below(uintptr_t address) {
    std::lock_guard<std::mutex> guard(lock);
    auto after = live_.upper_bound(address);
    if (after == live_.begin()) return {};
    auto found = std::prev(after);
    return {found->first, found->first + found->second};
}

Range Memory::find(uintptr_t address) {
    Range found = below(address);
    return address >= found.end && ask && ask(address) ? below(address) : found;
}

bool Memory::read_only(uintptr_t address, size_t bytes) {
    if (protected_.empty()) return false;
    auto after = protected_.lower_bound(address + bytes);
    if (after == protected_.begin()) return false;
    auto found = std::prev(after);
    return found->first + found->second > address;
}

void *Memory::take(size_t bytes) {
    void *base = std::aligned_alloc(ALIGNED, padded(bytes) + 2 * MARGIN);
    if (base == nullptr) throw std::bad_alloc();
    auto *words = static_cast<uint64_t *>(base);
    for (size_t i = 0; i < (padded(bytes) + 2 * MARGIN) / 8; i++) words[i] = untouched(uintptr_t(words + i));
    void *data = static_cast<char *>(base) + MARGIN;
    std::lock_guard<std::mutex> guard(lock);
    live_[uintptr_t(data)] = bytes;
    return data;
}

void Memory::give(void *data) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = live_.find(uintptr_t(data));
    size_t bytes = found->second;
    live_.erase(found);
    held_back_.emplace_back(static_cast<char *>(data) - MARGIN, bytes);
    held_bytes_ += bytes;
    size_t done = 0;
    while (held_bytes_ > HELD_BACK) {
        std::free(held_back_[done].first);
        held_bytes_ -= held_back_[done++].second;
    }
    held_back_.erase(held_back_.begin(), held_back_.begin() + done);
}

void Memory::adopt(uintptr_t begin, size_t bytes, bool on) {
    std::lock_guard<std::mutex> guard(lock);
    if (on)
        live_[begin] = bytes;
    else
        live_.erase(begin);
}

void Memory::protect(uintptr_t begin, size_t bytes, bool on) {
    std::lock_guard<std::mutex> guard(lock);
    if (on && bytes)
        protected_[begin] = bytes;
    else
        protected_.erase(begin);
}

namespace {

struct Watching final : c10::Allocator {
    static void release(void *data) { memory.give(data); }
    c10::DataPtr allocate(size_t bytes) override {
        void *data = bytes ? memory.take(bytes) : nullptr;
        return {data, data, bytes ? &release : &c10::detail::deleteNothing, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *target, const void *source, size_t bytes) const override { memcpy(target, source, bytes); }
};

Watching watching;

}  // namespace

// From here on every CPU tensor of torch lies in watched memory.
extern "C" void watch() { c10::SetCPUAllocator(&watching, 255); }

extern "C" void protect(uint64_t begin, uint64_t bytes, int on) { memory.protect(begin, bytes, on); }

extern "C" void adopt(uint64_t begin, uint64_t bytes, int on) { memory.adopt(begin, bytes, on); }

extern "C" void on_foreign(int (*function)(uint64_t)) { ask = function; }
