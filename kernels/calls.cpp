// A module of the running Python interpreter that calls the functions of the other C++ files. Through ctypes, a call with
// ten arguments takes 2 to 7 us; through this module it takes about 0.3 us, including the description of a tensor.
//
// The module is optional. Without it (no Python.h, an older torch, another interpreter), `native.function` calls through
// ctypes, and Python describes the tensors. Tensors are read through the C interface of DLPack, whose structures are fixed
// for version 1. The headers of torch are not used, because compiling a file that includes them takes half a minute.
//
// A tensor is "usual" if its type is exactly torch.Tensor or torch.nn.Parameter, its elements are in the memory of the CPU
// in row-major order without gaps, and it is not a lazy negation. Other tensors are left to Python.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#ifdef Py_GIL_DISABLED
#error "calls.cpp relies on the global interpreter lock"
#endif

namespace {

// The structures of DLPack, version 1 (https://dmlc.github.io/dlpack/latest/c_api.html).
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
    DLPackExchangeAPI* previous;  // the table of functions of an older version, or null
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*tensor_from_object)(void* object, DLTensor* out);  // may be null
};
constexpr int32_t CPU = 1;                                   // DLPack's number of the device
constexpr uintptr_t BEYOND_OFFSETS = uintptr_t(1) << 40;     // as in multi_tensor.py
constexpr Py_ssize_t MOST_QUESTIONS = 4;

// What `use` was given. All references are owned, and never released: the module lives as long as the process.
const DLPackExchangeAPI* exchange = nullptr;
PyObject* plain_types[2] = {};
PyObject* is_negative = nullptr;  // the method torch.Tensor.is_neg
PyObject* questions[MOST_QUESTIONS] = {};

// The codes of dtypes in C++, which are those of cast.py; -1 for other dtypes.
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

// Answers of functions that may also have raised an exception.
enum Answer { NO, YES, RAISED };

// Whether an object may be a usual tensor, as far as its type and its lazy negation tell. Asking runs Python if a mode of
// torch is active, so all objects are asked before the first one is described: what `describe` returns refers to the
// memory of the tensor, which Python code could change.
Answer may_be_usual(PyObject* object) {
    const PyObject* type = (PyObject*)Py_TYPE(object);
    if (type != plain_types[0] && type != plain_types[1]) return NO;
    PyObject* negative = PyObject_Vectorcall(is_negative, &object, 1, nullptr);
    if (!negative) return RAISED;
    Py_DECREF(negative);
    return negative == Py_False ? YES : NO;
}

// Describe an object for which `may_be_usual` said yes. Returns false if the tensor is not usual after all. The shape in
// the description refers to memory of the tensor. This runs no Python.
bool describe(PyObject* object, DLTensor& t, int64_t& numel, int64_t& code) {
    if (exchange->tensor_from_object(object, &t) != 0) {  // a layout or dtype that DLPack does not have
        PyErr_Clear();
        return false;
    }
    code = dtype_code(t);
    if (t.device_type != CPU) return false;
    numel = 1;  // torch refuses shapes whose product overflows
    for (int32_t i = 0; i < t.ndim; ++i) numel *= t.shape[i];
    int64_t expected = 1;
    for (int32_t i = t.ndim - 1; i >= 0 && numel && t.strides; --i) {
        if (t.shape[i] != 1 && t.strides[i] != expected) return false;
        expected *= t.shape[i];
    }
    t.data = (char*)t.data + t.byte_offset;
    return !numel || uintptr_t(t.data) >= BEYOND_OFFSETS;  // lower addresses are storage offsets without a memory
}

// use(exchange, plain_types, is_neg, questions): what the other functions need of torch. `plain_types` are two types, and
// `questions` are at most four functions without arguments.
PyObject* use(PyObject*, PyObject* const* args, Py_ssize_t n) {
    if (n != 4 || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != 2 || !PyTuple_Check(args[3]) ||
        PyTuple_GET_SIZE(args[3]) > MOST_QUESTIONS)
        return PyErr_Format(PyExc_TypeError, "use takes a capsule, two types, a method and at most four functions");
    const auto* api = (const DLPackExchangeAPI*)PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    if (!api) return nullptr;
    while (api && api->major > 1) api = api->previous;
    if (!api || api->major != 1 || !api->tensor_from_object)
        return PyErr_Format(PyExc_RuntimeError, "the exchange of tensors by DLPack is not of version 1");
    exchange = api;
    const auto keep = [](PyObject*& place, PyObject* object) {
        PyObject* before = place;
        Py_XINCREF(place = object);
        Py_XDECREF(before);
    };
    for (Py_ssize_t i = 0; i < 2; ++i) keep(plain_types[i], PyTuple_GET_ITEM(args[1], i));
    keep(is_negative, args[2]);
    for (Py_ssize_t i = 0; i < MOST_QUESTIONS; ++i)
        keep(questions[i], i < PyTuple_GET_SIZE(args[3]) ? PyTuple_GET_ITEM(args[3], i) : nullptr);
    Py_RETURN_NONE;
}

// Whether one of the questions is answered by something other than False and 0: something watches operations.
Answer is_watched() {
    for (PyObject* question : questions) {
        if (!question) break;
        PyObject* answer = PyObject_CallNoArgs(question);
        if (!answer) return RAISED;
        const int truth = PyObject_IsTrue(answer);
        Py_DECREF(answer);
        if (truth) return truth < 0 ? RAISED : YES;
    }
    return NO;
}

PyObject* no_exchange() { return PyErr_Format(PyExc_RuntimeError, "`use` was not called"); }

// code(object): the code of the dtype of a usual tensor that is not empty; -1 for anything else, and if `is_watched`.
PyObject* code(PyObject*, PyObject* object) {
    if (!exchange) return no_exchange();
    const Answer seen = is_watched(), answer = seen == NO ? may_be_usual(object) : NO;
    if (seen == RAISED || answer == RAISED) return nullptr;
    DLTensor t;
    int64_t numel = 0, found = -1;
    const bool usual = answer == YES && describe(object, t, numel, found) && numel;
    return PyLong_FromLongLong(usual ? found : -1);
}

// Memory for the length of a call: a few tensors need no allocation.
template <typename T, size_t FEW> struct Temporary {
    T few[FEW];
    T* data = few;
    bool take(size_t count) {
        if (count > FEW) data = count <= SIZE_MAX / sizeof(T) ? (T*)std::malloc(count * sizeof(T)) : nullptr;
        if (!data) PyErr_NoMemory();
        return data;
    }
    ~Temporary() {
        if (data != few) std::free(data);
    }
};

constexpr Py_ssize_t MOST_ARGUMENTS = 32;

// Convert arguments to 64 bits each. `kinds` has one letter for each: p for an address, a usual tensor of any dtype or None,
// i for an integer, f for a float. Returns false with an exception if one is of another kind.
bool pack(PyObject* const* args, const char* kinds, Py_ssize_t n, int64_t* packed) {
    // Numbers first, as converting them may run Python, which could change the memory of a tensor.
    for (Py_ssize_t i = 0; i < n; ++i) {
        PyObject* argument = args[i];
        if (kinds[i] == 'f') {
            const double number = PyFloat_AsDouble(argument);
            if (number == -1.0 && PyErr_Occurred()) return false;
            std::memcpy(packed + i, &number, sizeof number);
        } else if (PyLong_Check(argument)) {
            int overflow = 0;
            packed[i] = PyLong_AsLongLongAndOverflow(argument, &overflow);
            if (overflow) packed[i] = int64_t(PyLong_AsUnsignedLongLong(argument));
            if (packed[i] == -1 && PyErr_Occurred()) return false;
        } else if (kinds[i] != 'p') {
            PyErr_Format(PyExc_TypeError, "argument %zd is no integer", i + 1);
            return false;
        } else if (argument == Py_None) {
            packed[i] = 0;
        } else {
            const Answer answer = exchange ? may_be_usual(argument) : NO;
            if (answer == NO)
                PyErr_Format(PyExc_TypeError, "argument %zd is no address, plain tensor on the CPU or None", i + 1);
            if (answer != YES) return false;
        }
    }
    for (Py_ssize_t i = 0; i < n; ++i) {
        if (kinds[i] != 'p' || PyLong_Check(args[i]) || args[i] == Py_None) continue;
        DLTensor t;
        int64_t numel = 0, code = 0;
        if (!describe(args[i], t, numel, code)) {
            PyErr_Format(PyExc_TypeError, "argument %zd is no address, plain tensor on the CPU or None", i + 1);
            return false;
        }
        packed[i] = int64_t(uintptr_t(t.data));
    }
    return true;
}

// The function at an address, which HALFSTEP_PACKED of native.h defined; null with an exception if there is none.
using Packed = void (*)(const int64_t*);
Packed function_at(PyObject* address) {
    const auto function = (Packed)PyLong_AsVoidPtr(address);
    if (!function && !PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "no function");
    return function;
}

// invoke(function, kinds, ...): call a function. `kinds` is as in `pack`, with one letter per argument.
PyObject* invoke(PyObject*, PyObject* const* args, Py_ssize_t n) {
    int64_t packed[MOST_ARGUMENTS] = {};
    if (n < 2 || n - 2 > MOST_ARGUMENTS || !PyBytes_Check(args[1]) || PyBytes_GET_SIZE(args[1]) != n - 2)
        return PyErr_Format(PyExc_TypeError, "wrong number of arguments");
    const Packed function = function_at(args[0]);
    if (!function || !pack(args + 2, PyBytes_AS_STRING(args[1]), n - 2, packed)) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    function(packed);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

constexpr Py_ssize_t MOST_LISTS = 4;
constexpr int64_t FEW_CHUNKS = 8;  // as in native.h: kernels process so many chunks in one thread

// Call the function `native.threads`. Returns false with an exception if it raised one.
bool ask_threads(PyObject* function, int64_t& threads) {
    PyObject* answer = PyObject_CallNoArgs(function);
    if (!answer) return false;
    threads = PyLong_AsLongLong(answer);
    Py_DECREF(answer);
    return threads != -1 || !PyErr_Occurred();
}

// The elements of lists, which this keeps alive, whatever other threads do to the lists.
struct Elements {
    Temporary<PyObject*, 16> objects;
    size_t count = 0;
    void add(PyObject* object) {
        Py_INCREF(object);
        objects.data[count++] = object;
    }
    ~Elements() {
        while (count) Py_DECREF(objects.data[--count]);
    }
};

// invoke_with_lists(function, kinds, chunk, codes, threads, list, ..., argument, ...): call a function with the table of
// multi_tensor.py that has one operand per list, and return True. The parameters of the function are rows, chunk_tensor,
// tensors, chunks, the code of the dtype of each list, the arguments, for which `kinds` is as in `pack`, and a number of
// threads. `threads` is a function that returns this number. It is called for many chunks only, since kernels use one thread
// for few.
//
// Without a call, return False if `is_watched`, and unless all lists are not empty and have the same number of usual tensors,
// tensors at the same place in their lists have the same shape, and all tensors of a list have one dtype that `codes` allows.
// `codes` is one byte per list, in which bit i stands for the dtype of code i.
PyObject* invoke_with_lists(PyObject*, PyObject* const* args, Py_ssize_t n) {
    if (!exchange) return no_exchange();
    if (n < 5 || !PyBytes_Check(args[1]) || !PyBytes_Check(args[3]))
        return PyErr_Format(PyExc_TypeError, "wrong number of arguments");
    const Py_ssize_t lists = PyBytes_GET_SIZE(args[3]), others = PyBytes_GET_SIZE(args[1]);
    if (lists < 1 || lists > MOST_LISTS || n != 5 + lists + others || n > MOST_ARGUMENTS)
        return PyErr_Format(PyExc_TypeError, "wrong number of arguments");
    const Packed function = function_at(args[0]);
    if (!function) return nullptr;
    const int64_t chunk = PyLong_AsLongLong(args[2]);
    if (chunk <= 0)
        return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "chunk must be positive");
    const char* allowed = PyBytes_AS_STRING(args[3]);
    const Answer seen = is_watched();
    if (seen == RAISED) return nullptr;
    if (seen == YES) Py_RETURN_FALSE;
    const Py_ssize_t tensors = PyList_CheckExact(args[5]) ? PyList_GET_SIZE(args[5]) : 0;
    if (!tensors) Py_RETURN_FALSE;
    Elements kept;  // the tensors of the first list, then those of the second one, ...
    if (!kept.objects.take(size_t(lists) * size_t(tensors))) return nullptr;
    for (Py_ssize_t list = 0; list < lists; ++list) {
        PyObject* one = args[5 + list];
        if (!PyList_CheckExact(one) || PyList_GET_SIZE(one) != tensors) Py_RETURN_FALSE;
        for (Py_ssize_t i = 0; i < tensors; ++i) kept.add(PyList_GET_ITEM(one, i));
    }
    for (size_t i = 0; i < kept.count; ++i) {
        const Answer answer = may_be_usual(kept.objects.data[i]);
        if (answer == RAISED) return nullptr;
        if (answer == NO) Py_RETURN_FALSE;
    }
    int64_t packed[MOST_ARGUMENTS] = {};
    if (!pack(args + 5 + lists, PyBytes_AS_STRING(args[1]), others, packed + 4 + lists)) return nullptr;
    Temporary<int64_t, 64> rows;
    if (!rows.take(size_t(tensors) * size_t(2 + lists))) return nullptr;
    // No Python code runs in this loop, which compares shapes where they are in the memory of the tensors.
    int64_t chunks = 0;
    for (Py_ssize_t i = 0; i < tensors; ++i) {
        DLTensor first{};
        for (Py_ssize_t list = 0; list < lists; ++list) {
            DLTensor t;
            int64_t numel = 0, code = 0;
            if (!describe(kept.objects.data[list * tensors + i], t, numel, code)) Py_RETURN_FALSE;
            if (code < 0 || (i ? code != packed[4 + list] : !(uint8_t(allowed[list]) >> code & 1))) Py_RETURN_FALSE;
            packed[4 + list] = code;
            if (list) {
                if (t.ndim != first.ndim) Py_RETURN_FALSE;
                for (int32_t k = 0; k < t.ndim; ++k)
                    if (t.shape[k] != first.shape[k]) Py_RETURN_FALSE;
            } else {
                first = t;
                rows.data[i] = numel;
                rows.data[tensors + i] = chunks;
                chunks += numel / chunk + (numel % chunk != 0);
                if (chunks >= int64_t(1) << 31) Py_RETURN_FALSE;
            }
            rows.data[(2 + list) * tensors + i] = int64_t(uintptr_t(t.data));
        }
    }
    Temporary<int32_t, 64> chunk_tensor;
    if (!chunk_tensor.take(size_t(chunks))) return nullptr;
    for (Py_ssize_t i = 0; i < tensors; ++i) {
        const int64_t end = i + 1 < tensors ? rows.data[tensors + i + 1] : chunks;
        for (int64_t c = rows.data[tensors + i]; c < end; ++c) chunk_tensor.data[c] = int32_t(i);
    }
    int64_t& threads = packed[4 + lists + others];
    threads = 1;
    if (chunks > FEW_CHUNKS && !ask_threads(args[4], threads)) return nullptr;
    packed[0] = int64_t(uintptr_t(rows.data));
    packed[1] = int64_t(uintptr_t(chunk_tensor.data));
    packed[2] = tensors;
    packed[3] = chunks;
    Py_BEGIN_ALLOW_THREADS;
    function(packed);
    Py_END_ALLOW_THREADS;
    Py_RETURN_TRUE;
}

// The attribute of an object as a number; -2 with an exception if there is none.
long number_of(PyObject* object, PyObject* name) {
    PyObject* found = PyObject_GetAttr(object, name);
    if (!found) return -2;
    const long number = PyLong_AsLong(found);
    Py_DECREF(found);
    return number == -1 && PyErr_Occurred() ? -2 : number;
}

// cast(plan, object): a new tensor with the values of a usual tensor that is not empty, rounded to nearest; None for anything
// else, if `is_watched`, and if only Python knows the derivative. The plan is a tuple of
//   0. for the code of each dtype, the method of torch that converts from this dtype, with its derivative, or None,
//   1. a function that returns a new tensor like its argument, with the dtype of the result,
//   2. the address of the packed form of halfstep_cast, for codes without a method,
//   3. the code of the dtype of the result,
//   4. the number of elements per chunk,
//   5. the function `native.threads`,
//   6. the module torch.autograd.forward_ad, whose `_current_level` is -1 while forward-mode differentiation is not used.
PyObject* cast(PyObject*, PyObject* const* args, Py_ssize_t n) {
    if (!exchange) return no_exchange();
    if (n != 2 || !PyTuple_Check(args[0]) || PyTuple_GET_SIZE(args[0]) != 7 || !PyTuple_Check(PyTuple_GET_ITEM(args[0], 0)))
        return PyErr_Format(PyExc_TypeError, "cast takes a plan and an object");
    const auto plan = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(args[0], i); };
    PyObject* object = args[1];
    const Answer seen = is_watched(), answer = seen == NO ? may_be_usual(object) : NO;
    if (seen == RAISED || answer == RAISED) return nullptr;
    DLTensor t;
    int64_t numel = 0, code = -1;
    if (answer == NO || !describe(object, t, numel, code) || !numel) Py_RETURN_NONE;
    if (code < 0 || code >= PyTuple_GET_SIZE(plan(0))) Py_RETURN_NONE;
    PyObject* method = PyTuple_GET_ITEM(plan(0), code);
    if (method != Py_None) return PyObject_Vectorcall(method, &object, 1, nullptr);
    static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
    static PyObject* const level = PyUnicode_InternFromString("_current_level");
    if (!requires_grad || !level) return nullptr;
    const long differentiable = number_of(object, requires_grad), forward_mode = number_of(plan(6), level);
    if (PyErr_Occurred()) return nullptr;
    if (differentiable || forward_mode >= 0) Py_RETURN_NONE;
    const Packed function = function_at(plan(2));
    const int64_t target = PyLong_AsLongLong(plan(3)), chunk = PyLong_AsLongLong(plan(4));
    if (!function || PyErr_Occurred()) return nullptr;
    const int64_t chunks = chunk > 0 ? numel / chunk + (numel % chunk != 0) : 0;
    int64_t threads = 1;
    if (chunks > FEW_CHUNKS && !ask_threads(plan(5), threads)) return nullptr;
    PyObject* result = PyObject_Vectorcall(plan(1), &object, 1, nullptr);
    if (!result) return nullptr;
    // Allocating has run code of torch, and may have run Python: the addresses are taken now.
    DLTensor from, to;
    int64_t numels[2], codes[2];
    if (!describe(object, from, numels[0], codes[0]) || !describe(result, to, numels[1], codes[1]) || numels[0] != numel ||
        numels[1] != numel || codes[0] != code || codes[1] != target || !chunks) {
        Py_DECREF(result);
        Py_RETURN_NONE;
    }
    const int64_t rows[6] = {numel, 0, int64_t(uintptr_t(from.data)), int64_t(uintptr_t(to.data)), 0, 0};
    const int64_t packed[] = {int64_t(uintptr_t(rows)), 0, 1, chunks, code, target, 0, 0, 0, threads};
    Py_BEGIN_ALLOW_THREADS;
    function(packed);
    Py_END_ALLOW_THREADS;
    return result;
}

template <typename F> constexpr PyCFunction method(F* function) { return (PyCFunction)(void (*)())function; }
PyMethodDef methods[] = {{"use", method(use), METH_FASTCALL, nullptr},
                         {"code", code, METH_O, nullptr},
                         {"cast", method(cast), METH_FASTCALL, nullptr},
                         {"invoke", method(invoke), METH_FASTCALL, nullptr},
                         {"invoke_with_lists", method(invoke_with_lists), METH_FASTCALL, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

// Objects of one interpreter must not be used in another one, and the variables above exist once per process. Creating the
// module is the step that runs in each interpreter.
PyObject* create(PyObject* spec, PyModuleDef*) {
    if (PyInterpreterState_Get() != PyInterpreterState_Main())
        return PyErr_Format(PyExc_ImportError, "halfstep_calls is available in the main interpreter only");
    PyObject* name = PyObject_GetAttrString(spec, "name");
    PyObject* module = name ? PyModule_NewObject(name) : nullptr;
    Py_XDECREF(name);
    return module;
}
PyModuleDef_Slot slots[] = {{Py_mod_create, (void*)create}, {0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "halfstep_calls", nullptr, 0, methods, slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_halfstep_calls() { return PyModuleDef_Init(&module); }
