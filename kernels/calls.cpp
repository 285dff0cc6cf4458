// The fastest way from Python into the other C++ files: a module of the running interpreter. With ctypes, a call with ten
// arguments takes 2 to 7 us.
//
// It is optional: without it (no Python.h, an older torch), `native.function` calls through ctypes and Python reads the
// tensors. Tensors are read through the C interface of DLPack, whose structures are fixed for version 1; of
// torch's own headers nothing is needed.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdint>
#include <cstring>

namespace {

// DLPack, version 1 (https://dmlc.github.io/dlpack/latest/c_api.html).
struct DLTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct DLPackExchangeAPI {
    uint32_t major, minor;
    void* previous;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*tensor_from_object)(void* object, DLTensor* out);
};
constexpr int32_t CPU = 1;
constexpr uintptr_t BEYOND_OFFSETS = uintptr_t(1) << 40;  // as in multi_tensor.py

const DLPackExchangeAPI* exchange = nullptr;
PyObject* plain_types[2] = {};
PyObject* is_negative = nullptr;  // the method torch.Tensor.is_neg

// The codes of the dtypes in C++; -1 for others.
int64_t dtype_code(const DLTensor& t) {
    constexpr uint8_t FLOAT = 2, BFLOAT = 4, E4M3FN = 10, E5M2 = 12;
    if (t.lanes != 1) return -1;
    if (t.code == FLOAT && t.bits == 32) return 0;
    if (t.code == FLOAT && t.bits == 16) return 1;
    if (t.code == BFLOAT && t.bits == 16) return 2;
    if (t.code == E4M3FN) return 3;
    if (t.code == E5M2) return 4;
    return -1;
}

// Whether kernels may take the elements of an object in row-major order from `t.data` on; then also its size.
bool is_usual(PyObject* object, DLTensor& t, int64_t& numel) {
    const PyObject* type = (PyObject*)Py_TYPE(object);
    if (type != plain_types[0] && type != plain_types[1]) return false;
    if (exchange->tensor_from_object(object, &t) != 0) {
        PyErr_Clear();
        return false;
    }
    if (t.device_type != CPU) return false;
    numel = 1;
    for (int32_t i = 0; i < t.ndim; ++i) numel *= t.shape[i];
    int64_t expected = 1;
    for (int32_t i = t.ndim - 1; i >= 0 && numel && t.strides; --i) {
        if (t.shape[i] != 1 && t.strides[i] != expected) return false;
        expected *= t.shape[i];
    }
    t.data = (char*)t.data + t.byte_offset;
    if (numel && uintptr_t(t.data) < BEYOND_OFFSETS) return false;
    PyObject* negative = PyObject_Vectorcall(is_negative, &object, 1, nullptr);
    if (!negative) PyErr_Clear();
    Py_XDECREF(negative);
    return negative == Py_False;
}

// use(exchange, Tensor, Parameter, is_neg): what the others need of torch.
PyObject* use(PyObject*, PyObject* const* args, Py_ssize_t n) {
    if (n != 4) return PyErr_Format(PyExc_TypeError, "use takes 4 arguments");
    const void* found = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    if (!found) return nullptr;
    const auto* api = (const DLPackExchangeAPI*)found;
    while (api && api->major > 1) api = (const DLPackExchangeAPI*)api->previous;
    if (!api || api->major != 1) return PyErr_Format(PyExc_RuntimeError, "DLPack is not of version 1");
    exchange = api;
    for (int i = 0; i < 2; ++i) Py_INCREF(plain_types[i] = args[1 + i]);
    Py_INCREF(is_negative = args[3]);
    Py_RETURN_NONE;
}

// code(object): the code of the dtype of a plain, contiguous tensor on the CPU that is not empty; -1 for anything else.
PyObject* code(PyObject*, PyObject* object) {
    DLTensor t;
    int64_t numel = 0;
    const bool usual = exchange && is_usual(object, t, numel) && numel;
    return PyLong_FromLongLong(usual ? dtype_code(t) : -1);
}

// table(chunk, list, ...): (memory, rows, chunk_tensor, chunks, code of each list), the table of multi_tensor.py with one
// operand per list, in `memory`. None unless all are lists of as many plain, contiguous tensors on the CPU, the first ones
// of one shape, and so on, and each list of one dtype.
PyObject* table(PyObject*, PyObject* const* args, Py_ssize_t n) {
    constexpr Py_ssize_t MOST = 8;
    const Py_ssize_t lists = n - 1;
    if (lists < 1 || lists > MOST || !exchange) return PyErr_Format(PyExc_TypeError, "table takes a number and lists");
    const int64_t chunk = PyLong_AsLongLong(args[0]);
    if (chunk <= 0) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "chunk must be positive");
    for (Py_ssize_t list = 1; list <= lists; ++list)
        if (!PyList_CheckExact(args[list])) Py_RETURN_NONE;
    const Py_ssize_t tensors = PyList_GET_SIZE(args[1]);
    PyObject* rows_memory = PyBytes_FromStringAndSize(nullptr, 8 * tensors * (2 + lists));
    if (!rows_memory) return nullptr;
    int64_t* rows = (int64_t*)PyBytes_AS_STRING(rows_memory);
    int64_t codes[MOST], chunks = 0;
    bool usual = tensors > 0;
    for (Py_ssize_t i = 0; i < tensors && usual; ++i) {
        DLTensor first{};
        PyObject* held = nullptr;  // whose shape `first` refers to
        for (Py_ssize_t list = 0; list < lists && usual; ++list) {
            // Lists may change while Python runs, as in a method of a tensor.
            usual = PyList_GET_SIZE(args[1 + list]) == tensors;
            if (!usual) break;
            PyObject* object = PyList_GET_ITEM(args[1 + list], i);
            Py_INCREF(object);
            DLTensor t;
            int64_t numel = 0;
            usual = is_usual(object, t, numel);
            const int64_t code = usual ? dtype_code(t) : -1;
            usual = code >= 0 && (!i || code == codes[list]);
            if (usual && list) {
                usual = t.ndim == first.ndim && !std::memcmp(t.shape, first.shape, sizeof(int64_t) * size_t(t.ndim));
            } else if (usual) {
                first = t;
                held = object;
                Py_INCREF(held);
                rows[i] = numel;
                rows[tensors + i] = chunks;
                chunks += (numel + chunk - 1) / chunk;
            }
            codes[list] = code;
            if (usual) rows[(2 + list) * tensors + i] = int64_t(uintptr_t(t.data));
            Py_DECREF(object);
        }
        Py_XDECREF(held);
    }
    if (!usual || chunks >= int64_t(1) << 31) {
        Py_DECREF(rows_memory);
        Py_RETURN_NONE;
    }
    PyObject* owners_memory = PyBytes_FromStringAndSize(nullptr, 4 * chunks);
    PyObject* result = owners_memory ? PyTuple_New(4 + lists) : nullptr;
    if (result) {
        int32_t* owner = (int32_t*)PyBytes_AS_STRING(owners_memory);
        for (Py_ssize_t i = 0; i < tensors; ++i) {
            const int64_t end = i + 1 < tensors ? rows[tensors + i + 1] : chunks;
            for (int64_t c = rows[tensors + i]; c < end; ++c) owner[c] = int32_t(i);
        }
        PyTuple_SET_ITEM(result, 0, PyTuple_Pack(2, rows_memory, owners_memory));
        PyTuple_SET_ITEM(result, 1, PyLong_FromVoidPtr(rows));
        PyTuple_SET_ITEM(result, 2, PyLong_FromVoidPtr(owner));
        PyTuple_SET_ITEM(result, 3, PyLong_FromLongLong(chunks));
        for (Py_ssize_t list = 0; list < lists; ++list)
            PyTuple_SET_ITEM(result, 4 + list, PyLong_FromLongLong(codes[list]));
    }
    Py_XDECREF(owners_memory);
    Py_DECREF(rows_memory);
    return result;
}

// invoke(function, kinds, ...): call the function that HALFSTEP_PACKED of native.h defined, at an address. `kinds` has one
// byte per argument: p for an address, a tensor or None, i for an integer, f for a float.
PyObject* invoke(PyObject*, PyObject* const* args, Py_ssize_t n) {
    constexpr Py_ssize_t MOST = 32;
    int64_t packed[MOST] = {};
    if (n < 2 || n - 2 > MOST || !PyBytes_Check(args[1]) || PyBytes_GET_SIZE(args[1]) != n - 2)
        return PyErr_Format(PyExc_TypeError, "wrong number of arguments");
    const auto function = (void (*)(const int64_t*))PyLong_AsVoidPtr(args[0]);
    if (!function) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "no function");
    const char* kinds = PyBytes_AS_STRING(args[1]);
    for (Py_ssize_t i = 0; i < n - 2; ++i) {
        PyObject* argument = args[2 + i];
        if (kinds[i] == 'f') {
            const double number = PyFloat_AsDouble(argument);
            if (number == -1.0 && PyErr_Occurred()) return nullptr;
            std::memcpy(packed + i, &number, sizeof number);
        } else if (PyLong_Check(argument)) {
            int overflow = 0;
            packed[i] = PyLong_AsLongLongAndOverflow(argument, &overflow);
            if (overflow) packed[i] = int64_t(PyLong_AsUnsignedLongLong(argument));
            if (packed[i] == -1 && PyErr_Occurred()) return nullptr;
        } else if (kinds[i] == 'p' && argument != Py_None) {
            DLTensor t;
            int64_t numel = 0;
            if (!exchange || !is_usual(argument, t, numel))
                return PyErr_Format(PyExc_TypeError, "argument %zd is no address, plain tensor on the CPU or None", i + 1);
            packed[i] = int64_t(uintptr_t(t.data));
        } else if (kinds[i] != 'p') {
            return PyErr_Format(PyExc_TypeError, "argument %zd is no integer", i + 1);
        }
    }
    Py_BEGIN_ALLOW_THREADS;
    function(packed);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"use", (PyCFunction)(void (*)())use, METH_FASTCALL, nullptr},
                         {"code", code, METH_O, nullptr},
                         {"table", (PyCFunction)(void (*)())table, METH_FASTCALL, nullptr},
                         {"invoke", (PyCFunction)(void (*)())invoke, METH_FASTCALL, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "halfstep_calls", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_halfstep_calls() { return PyModule_Create(&module); }
