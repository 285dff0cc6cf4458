// Fill the table of multi_tensor.py for lists of tensors on the CPU. Python would take 0.5 us per tensor to read its address,
// size and dtype, more than the kernels need for a small one. Tensors are read through the C interface of DLPack, whose structures
// are fixed for version 1.
#include "native.h"

namespace {

struct DLTensor {  // https://dmlc.github.io/dlpack/latest/c_api.html
    char* data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct ExchangeAPI {
    uint32_t major, minor;
    const ExchangeAPI* older;
    void* others[3];
    int (*describe)(void* tensor, DLTensor* out);
};
constexpr int32_t CPU = 1;
constexpr uintptr_t BEYOND_OFFSETS = uintptr_t(1) << 40;  // as in multi_tensor.py

// The codes of cast.py; -1 for other dtypes.
int64_t dtype_code(const DLTensor& t) {
    constexpr uint8_t FLOAT = 2, BFLOAT = 4, E4M3FN = 10, E5M2 = 12;
    if (t.lanes != 1) return -1;
    if (t.code == FLOAT) return t.bits == 32 ? halfstep::F32 : t.bits == 16 ? halfstep::F16 : -1;
    return t.code == BFLOAT ? halfstep::BF16 : t.code == E4M3FN ? 3 : t.code == E5M2 ? 4 : -1;
}

bool row_major(const DLTensor& t) {
    int64_t expected = 1;
    for (int32_t i = t.ndim - 1; i >= 0 && t.strides; --i) {
        if (t.shape[i] != 1 && t.strides[i] != expected) return false;
        expected *= t.shape[i];
    }
    return true;
}

}  // namespace

// Write the table of lists of tensors, the rows after the operands being the index and the number of chunks of each tensor. This
// calls functions of torch, so the caller holds the lock of the interpreter.
//
// `objects` are the tensors of the first list, then those of the second one, and so on, at most four lists of `tensors` each. Bit i
// of byte k of `allowed` allows the dtype of code i in list k. Returns false if a tensor is not on the CPU, has a dtype that is not
// allowed or not that of its list, has no memory of its own, is not contiguous, or has another shape than that of the first list.
extern "C" bool halfstep_table(const void* api, void** objects, int64_t tensors, int64_t lists, int64_t allowed, int64_t chunk,
                               int64_t* rows) {
    const ExchangeAPI* exchange = (const ExchangeAPI*)api;
    while (exchange && exchange->major > 1) exchange = exchange->older;
    if (!exchange || exchange->major != 1 || !exchange->describe) return false;
    int64_t chunks = 0, codes[4] = {};
    for (int64_t i = 0; i < tensors; ++i) {
        DLTensor first{};
        for (int64_t list = 0; list < lists; ++list) {
            DLTensor t;
            if (exchange->describe(objects[list * tensors + i], &t) != 0) return false;
            const int64_t code = dtype_code(t);
            if (t.device_type != CPU || code < 0 || !(allowed >> (8 * list + code) & 1)) return false;
            if (i == 0) codes[list] = code;
            if (list == 0) first = t;
            if (code != codes[list] || t.ndim != first.ndim) return false;
            int64_t numel = 1;  // torch refuses shapes whose product overflows
            for (int32_t k = 0; k < t.ndim; ++k) {
                if (t.shape[k] != first.shape[k]) return false;
                numel *= t.shape[k];
            }
            t.data += t.byte_offset;
            // A low address is an offset in a storage without memory.
            if (numel && (!row_major(t) || uintptr_t(t.data) < BEYOND_OFFSETS)) return false;
            rows[(2 + list) * tensors + i] = int64_t(uintptr_t(t.data));
            if (list) continue;
            rows[i] = numel;
            rows[tensors + i] = chunks;
            rows[(2 + lists) * tensors + i] = i;
            chunks += rows[(3 + lists) * tensors + i] = numel / chunk + (numel % chunk != 0);
            if (chunks >= int64_t(1) << 31) return false;
        }
    }
    return true;
}
