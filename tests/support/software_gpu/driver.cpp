// The CUDA driver and the HIP runtime that Triton finds: load modules and launch through the two functions that Python
// sets, and answer the rest as an idle GPU would.
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <string>

typedef int Result;

// The beginning of CUlaunchConfig.
struct LaunchConfig {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
};

// 0, or why it failed, in words that live until the next call.
using Load = uint64_t (*)(const char *image, const char **why);
using Launch = const char *(*)(uint64_t kernel, const unsigned *grid, unsigned threads, unsigned shared, void *stream,
                               void **arguments);

static Load load = nullptr;
static Launch launch = nullptr;
static std::string failure = "no error";

extern "C" {

void on_load(Load function) { load = function; }
void on_launch(Launch function) { launch = function; }

Result cuModuleLoadData(void **module, const void *image) {
    const char *why = nullptr;
    uint64_t loaded = load(static_cast<const char *>(image), &why);
    *module = reinterpret_cast<void *>(loaded);
    if (loaded) return 0;
    failure = why ? why : "the module did not load";
    return 1;
}
Result cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = module;
    return 0;
}
Result cuLaunchKernelEx(const LaunchConfig *config, void *function, void **arguments, void **extra) {
    const char *why = launch(reinterpret_cast<uint64_t>(function), config->grid, config->block[0],
                             config->shared_bytes, config->stream, arguments);
    if (why == nullptr) return 0;
    failure = why;
    return 1;
}
Result cuGetErrorString(Result code, const char **text) {
    *text = failure.c_str();
    return 0;
}
Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}
Result cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}
Result cuDeviceGetAttribute(int *value, int which, int device) {
    *value = 232448;  // what matters is that every kernel's shared memory fits
    return 0;
}
Result cuCtxGetCurrent(void **context) {
    *context = reinterpret_cast<void *>(1);
    return 0;
}
Result cuCtxSetCurrent(void *context) { return 0; }
Result cuCtxGetDevice(int *device) {
    *device = 0;
    return 0;
}
Result cuDevicePrimaryCtxRetain(void **context, int device) { return cuCtxGetCurrent(context); }
Result cuCtxGetLimit(size_t *value, int which) {
    *value = 0;
    return 0;
}
Result cuCtxSetLimit(int which, size_t value) { return 0; }
Result cuModuleUnload(void *module) { return 0; }
Result cuFuncGetAttribute(int *value, int which, void *function) {
    *value = which == 0 ? 1024 : 0;  // threads per block; no shared, local or constant memory of its own
    return 0;
}
Result cuFuncSetAttribute(void *function, int which, int value) { return 0; }
Result cuFuncSetCacheConfig(void *function, int config) { return 0; }
Result cuPointerGetAttribute(void *data, int which, uint64_t address) {
    memcpy(data, &address, 8);  // the device's address is the host's
    return 0;
}
Result cuOccupancyMaxActiveClusters(int *count, void *function, const void *config) {
    *count = 1;
    return 0;
}
Result cuStreamIsCapturing(void *stream, int *status) {
    *status = 0;
    return 0;
}
Result cuTensorMapEncodeTiled(void) { return 1; }
Result cuTensorMapEncodeIm2col(void) { return 1; }

// HIP gives its functions by name.
Result hipGetProcAddress(const char *name, void **function, int version, uint64_t flags, int *status) {
    static const auto missing = +[]() -> Result { return 1; };
    void *found = dlsym(RTLD_DEFAULT, name);
    *function = found ? found : reinterpret_cast<void *>(missing);
    return 0;
}
Result hipDriverGetVersion(int *version) {
    *version = 70000000;
    return 0;
}
const char *hipGetErrorString(Result code) { return failure.c_str(); }
Result hipModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void **values) {
    return cuModuleLoadData(module, image);
}
Result hipModuleGetFunction(void **function, void *module, const char *name) {
    return cuModuleGetFunction(function, module, name);
}
Result hipFuncGetAttribute(int *value, int which, void *function) { return cuFuncGetAttribute(value, which, function); }
Result hipPointerGetAttribute(void *data, int which, uint64_t address) {
    return cuPointerGetAttribute(data, which, address);
}
Result hipModuleLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                             unsigned shared, void *stream, void **arguments, void **extra) {
    LaunchConfig config{{x, y, z}, {threads, 1, 1}, shared, stream};
    return cuLaunchKernelEx(&config, function, arguments, extra);
}
}
