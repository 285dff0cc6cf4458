"""calls.cpp, the fast way into C++: what it accepts, and that results do not depend on it."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import halfstep
from halfstep.kernels import cast, native, unscale
from halfstep.kernels.multi_tensor import TensorTable

pytestmark = pytest.mark.skipif(native.calls() is None, reason="needs calls.cpp")

TOY = """#include "native.h"
extern "C" void halfstep_toy(const float* from, double* to, int32_t sign, float factor, uint64_t seed, int64_t* big) {
    *to = double(from ? *from : 7.0f) * sign * factor;
    *big = int64_t(seed);
}
HALFSTEP_PACKED(halfstep_toy)

// Copies a table with two operands out.
extern "C" void halfstep_look(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
                              int32_t first, int32_t second, int64_t* out, int32_t threads) {
    const int64_t head[] = {tensors, chunks, first, second, threads};
    for (int64_t number : head) *out++ = number;
    for (int64_t i = 0; i < 4 * tensors; ++i) *out++ = rows[i];
    for (int64_t i = 0; i < chunks; ++i) *out++ = chunk_tensor[i];
}
HALFSTEP_PACKED(halfstep_look)
"""
WAIT = """#include <atomic>
// Sets flags[0] and waits until flags[1] is set. The tensors are written afterwards.
extern "C" void halfstep_wait(const int64_t* rows, const int32_t* chunk_tensor, int64_t tensors, int64_t chunks,
                              int32_t dtype, int32_t* flags, int32_t threads) {
    auto* shared = (std::atomic<int32_t>*)flags;
    shared[0] = 1;
    while (!shared[1]) {}
    for (int64_t i = 0; i < tensors; ++i) *(float*)rows[2 * tensors + i] = 1.0f;
}
HALFSTEP_PACKED(halfstep_wait)
"""
ALL = 255  # allows every dtype in a list


@contextmanager
def without_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which the module is not available."""
    kept = (native.function, native.list_function, cast._quick, cast._native_list)
    with monkeypatch.context() as patched:
        patched.setattr(native, "calls", lambda: None)
        for one in kept:
            one.cache_clear()
        try:
            yield
        finally:
            for one in kept:
                one.cache_clear()


class Wrapped(torch.Tensor):
    """A subclass without operations of its own."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("toy")
    source = folder / "toy.cpp"
    source.write_text((TOY + WAIT).replace('"native.h"', f'"{Path(native.__file__).parent / "native.h"}"'))
    command = native.compiler()
    assert command is not None and native._build(source, folder / "toy.so", command) == ""
    return ctypes.CDLL(str(folder / "toy.so"))


def test_invoke_passes_numbers_addresses_and_tensors(toy: ctypes.CDLL) -> None:
    function = ctypes.cast(toy.halfstep_toy_packed, ctypes.c_void_p).value
    invoke, kinds = native.calls().invoke, b"ppifip"
    x, y, big = torch.tensor(3.0), torch.zeros((), dtype=torch.float64), ctypes.c_int64()
    at = ctypes.addressof(big)
    invoke(function, kinds, x.data_ptr(), y.data_ptr(), -1, 0.5, 2**63 + 1, at)
    assert (y.item(), big.value) == (-1.5, 1 - 2**63)
    invoke(function, kinds, None, y.data_ptr(), True, 2, -5, at)  # an integer for a float, as with ctypes
    assert (y.item(), big.value) == (14.0, -5)
    for wrong, error in (
        ((x.data_ptr(), y.data_ptr(), 1.5, 1.0, 0, at), "argument 3 is no integer"),
        ((x.data_ptr(), y.data_ptr(), None, 1.0, 0, at), "argument 3 is no integer"),
        ((x.data_ptr(), y.data_ptr(), 1, "a", 0, at), "must be real number, not str"),
        (("a", y.data_ptr(), 1, 1.0, 0, at), "argument 1 is no address, plain tensor on the CPU or None"),
        ((torch.empty(2, device="meta"), y.data_ptr(), 1, 1.0, 0, at), "argument 1 is no address"),
        ((x.data_ptr(),), "wrong number of arguments"),
    ):
        with pytest.raises(TypeError, match=error):
            invoke(function, kinds, *wrong)
    with pytest.raises(OverflowError):
        invoke(function, kinds, None, y.data_ptr(), 1, 1.0, 2**64, at)
    with pytest.raises(ValueError, match="no function"):
        invoke(0, b"")
    function_of_tensors = torch.zeros(1), torch.zeros(1)
    invoke(function, kinds, function_of_tensors[0], y.data_ptr(), 1, 1.0, 0, function_of_tensors[1].new_zeros(2))
    assert y.item() == 0.0


@pytest.fixture(scope="module")
def look(toy: ctypes.CDLL) -> Callable[..., list[int] | None]:
    """A function that returns what a C++ function gets for lists; None if it is not called."""
    address = ctypes.cast(toy.halfstep_look_packed, ctypes.c_void_p).value

    def of(chunk: int, *lists: object, codes: tuple[int, ...] = (ALL, ALL), threads: object = lambda: 3) -> object:
        memory = (ctypes.c_int64 * 100_000)()
        call = native.calls().invoke_with_lists
        done = call(address, b"p", chunk, bytes(codes), threads, *lists, ctypes.addressof(memory))
        return list(memory) if done else None

    return of  # type: ignore[return-value]


Look = Callable[..., "list[int] | None"]


@pytest.mark.parametrize("copies", [1, 300])
def test_a_table_is_that_of_tensor_table(look: Look, copies: int) -> None:
    shapes = [(5000,), (3, 4), (0,), (), (4096,), (2, 1, 3)] * copies
    tensors = [torch.randn(shape) for shape in shapes]
    targets = [torch.empty_like(one, dtype=torch.float16) for one in tensors]
    addresses = [[one.data_ptr() for one in some] for some in (tensors, targets)]
    want = TensorTable([one.numel() for one in tensors], 2, 4096, torch.device("cpu"), addresses)
    found = look(4096, tensors, targets)
    assert found is not None
    n = len(tensors)
    assert found[:5] == [n, want.chunks, 0, 1, 1 if want.chunks <= 8 else 3]
    assert found[5 : 5 + 4 * n] == want.rows.flatten().tolist()
    assert found[5 + 4 * n :][: want.chunks] == want.chunk_tensor.tolist()


def test_codes_are_those_of_the_dtypes(look: Look) -> None:
    for dtype, code in cast.CODES.items():
        x = torch.zeros(3).to(dtype)
        found = look(64, [x], [x])
        assert found is not None and found[2:4] == [code, code]
        assert native.calls().code(x) == code
        assert look(64, [x], [x], codes=(1 << code, ALL)) is not None
        assert look(64, [x], [x], codes=(ALL, ALL ^ (1 << code))) is None


def freed() -> torch.Tensor:
    tensor = torch.randn(5)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "unusual",
    [
        pytest.param(lambda: torch.randn(4, 4).t(), id="transposed"),
        pytest.param(lambda: torch.randn(8)[::2], id="strided"),
        pytest.param(lambda: torch.randn(4)._neg_view(), id="negated"),
        pytest.param(lambda: torch.randn(4).double(), id="fp64"),
        pytest.param(lambda: torch.arange(4), id="integers"),
        pytest.param(lambda: torch.empty(3, device="meta"), id="meta"),
        pytest.param(lambda: torch.randn(3).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.randn(3).as_subclass(Wrapped), id="subclass"),
        pytest.param(freed, id="freed"),
        pytest.param(lambda: 1.0, id="number"),
    ],
)
def test_what_is_unusual_has_no_table(look: Look, unusual: object) -> None:
    one, usual = unusual(), torch.randn(4)  # type: ignore[operator]
    assert look(64, [usual, usual], [usual, usual]) is not None
    assert look(64, [one], [one]) is None
    assert look(64, [usual, one], [usual, usual]) is None
    assert look(64, [usual, usual], [usual, one]) is None
    assert native.calls().code(one) == -1
    assert cast._quick(torch.bfloat16)(one) is None


def test_lists_that_do_not_fit_have_no_table(look: Look) -> None:
    x = torch.randn(6)
    assert look(64, [], []) is None
    assert look(64, (x,), [x]) is None
    assert look(64, [x], [x, x]) is None
    assert look(64, [x], [x.view(2, 3)]) is None
    assert look(64, [x], [x[:5]]) is None
    assert look(64, [x, x.half()], [x, x]) is None
    with FakeTensorMode():
        assert look(64, [x], [x]) is None and native.calls().code(x) == -1
    assert native.calls().code(torch.empty(0)) == -1 and cast._quick(torch.bfloat16)(torch.empty(0)) is None


def test_transforms_are_left_to_python(look: Look) -> None:
    outside, seen = torch.randn(4), []

    def asked(x: torch.Tensor) -> torch.Tensor:
        for one in (x, outside):
            seen.append((look(64, [one], [one]), native.calls().code(one), cast._quick(torch.float16)(one)))
        seen.append(unscale._is_quick([outside]))
        return x.sum()

    torch.func.vmap(asked)(torch.randn(3, 4))
    torch.func.grad(asked)(torch.randn(4))
    assert seen == [(None, -1, None), (None, -1, None), False] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_do_not_depend_on_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [0, 1, 7, 4096, 4097, 20000]
    tensors = [torch.randn(size, generator=generator, dtype=torch.float32).to(dtype) for size in sizes]
    bad = [one.clone() for one in tensors]
    bad[2][3], bad[5][-1] = float("inf"), float("nan")
    rows = torch.randn(5, 77, generator=generator, dtype=torch.float32).to(dtype).requires_grad_()

    def results() -> list[torch.Tensor]:
        found = [*halfstep.foreach_check(tensors), *halfstep.foreach_check(bad, 0.5)]
        found += halfstep.foreach_check(tensors, torch.tensor(0.25))
        for by in (0.3, torch.tensor(0.3)):
            own = [one.clone() for one in bad]
            versions = [one._version for one in own]
            found += [*halfstep.foreach_unscale_(own, by), *own]
            assert all(one._version > version for one, version in zip(own, versions, strict=True))
        for target in cast.DTYPES:
            outs = [torch.empty_like(one, dtype=target) for one in tensors]
            result = halfstep.foreach_cast(tensors, target, out=outs)
            assert all(one is out for one, out in zip(result, outs, strict=True)) and outs[1]._version > 0
            found += [*result, *halfstep.foreach_cast(tensors, target), halfstep.cast(tensors[5], target)]
        y = halfstep.softmax(rows)
        (gradient,) = torch.autograd.grad(y, rows, torch.ones_like(y) * rows)
        return [*found, y.detach(), gradient.detach()]

    with_it = results()
    with without_calls(monkeypatch):
        assert not unscale._is_quick([torch.zeros(1)])
        without = results()
    for one, other in zip(with_it, without, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_a_factor_may_be_of_a_subclass() -> None:
    factor = torch.tensor(0.5).as_subclass(Wrapped)
    assert halfstep.foreach_check([torch.tensor([4.0])], factor).sum_of_squares.item() == 4.0


def test_a_cast_is_differentiated_as_before() -> None:
    x = torch.randn(8, requires_grad=True)
    y = halfstep.cast(x, torch.bfloat16)
    y.backward(torch.full((8,), 3.0, dtype=torch.bfloat16))
    assert x.grad is not None and x.grad.dtype == torch.float32 and x.grad.tolist() == [3.0] * 8


def test_it_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an older torch nor a missing header is an error or a warning."""
    assert unscale._is_quick([torch.zeros(1)])
    with monkeypatch.context() as patched:
        patched.setattr(native, "_compiled", lambda family, source: "no Python.h")
        native.calls.cache_clear()
        assert native.calls() is None and not unscale._is_quick([torch.zeros(1)])
    native.calls.cache_clear()
    assert unscale._is_quick([torch.zeros(1)])


def test_a_lazy_copy_is_copied_before_it_is_written() -> None:
    x = torch.ones(5)
    lazy = torch._lazy_clone(x)
    halfstep.foreach_unscale_([lazy], 0.5)
    assert x.tolist() == [1.0] * 5 and lazy.tolist() == [0.5] * 5


# ------------------------------------------------------------------------------------------------- hostile conditions


class Exchange(ctypes.Structure):
    """``DLPackExchangeAPI``."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 3),
        ("tensor_from_object", ctypes.c_void_p),
    ]


def capsule(content: object, name: bytes = b"dlpack_exchange_api") -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(content), name, None)  # type: ignore[arg-type]


def torchs() -> Exchange:
    """torch's own table of functions."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = get(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")  # type: ignore[attr-defined]
    return Exchange.from_address(address)


@pytest.fixture
def fresh(tmp_path: Path) -> Any:
    """Another copy of the module, with variables of its own, for which `use` was not called."""
    path = tmp_path / "copy.so"
    shutil.copy(native.calls().__spec__.origin, path)
    loader = ExtensionFileLoader("halfstep_calls", str(path))
    return module_from_spec(ModuleSpec(loader.name, loader, origin=str(path)))


PLAIN = (torch.Tensor, torch.nn.Parameter)
IS_NEG = torch.Tensor.is_neg


def test_nothing_works_before_use(fresh: Any) -> None:
    x = torch.zeros(3)
    for call in (
        lambda: fresh.code(x),
        lambda: fresh.cast((), x),
        lambda: fresh.invoke_with_lists(1, b"", 1, b"\1", int, [x]),
    ):
        with pytest.raises(RuntimeError, match="`use` was not called"):
            call()


def test_an_exchange_must_be_of_version_1_and_describe_tensors(fresh: Any) -> None:
    first = torchs()
    assert first.major == 1 and first.tensor_from_object
    empty = Exchange(major=1, minor=1)  # DLPack allows a producer to leave the function out
    newer = Exchange(major=2)
    for wrong in (empty, newer, Exchange(major=0)):
        with pytest.raises(RuntimeError, match="not of version 1"):
            fresh.use(capsule(wrong), PLAIN, IS_NEG, ())
        with pytest.raises(RuntimeError, match="`use` was not called"):
            fresh.code(torch.zeros(3))
    newer.previous = ctypes.addressof(first)
    fresh.use(capsule(newer), PLAIN, IS_NEG, ())
    assert fresh.code(torch.zeros(3, dtype=torch.float16)) == 1


@pytest.mark.parametrize("exchange", [5, object(), capsule(Exchange(major=1), b"another")], ids=["5", "object", "name"])
def test_an_unknown_exchange_is_not_used(exchange: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a version of torch has under this name, the rest works without the module, and nothing is raised."""
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", exchange)
    native.calls.cache_clear()
    try:
        assert native.calls() is None
    finally:
        monkeypatch.undo()
        native.calls.cache_clear()


def test_wrong_numbers_of_arguments_are_errors() -> None:
    module, x = native.calls(), torch.zeros(3)
    questions = (bool,) * 5
    api = torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    for call in (
        lambda: module.use(),
        lambda: module.use(api, PLAIN, IS_NEG),
        lambda: module.use(api, PLAIN[:1], IS_NEG, ()),
        lambda: module.use(api, PLAIN, IS_NEG, questions),
        lambda: module.code(),
        lambda: module.code(x, x),
        lambda: module.cast(x),
        lambda: module.cast((1, 2), x),
        lambda: module.cast((), x, x),
        lambda: module.invoke(1),
        lambda: module.invoke(1, "p", 1),
        lambda: module.invoke(1, b"pp", 1),
        lambda: module.invoke(1, b"i" * 40, *range(40)),
        lambda: module.invoke_with_lists(),
        lambda: module.invoke_with_lists(1, b"", 1, b"", int),
        lambda: module.invoke_with_lists(1, b"i", 1, b"\1", int, [x]),
        lambda: module.invoke_with_lists(1, b"", 1, b"\1", int, [x], 1),
        lambda: module.invoke_with_lists(1, b"", 1, b"\1" * 5, int, *[[x]] * 5),
        lambda: module.invoke_with_lists(1, b"i" * 30, 1, b"\1", int, [x], *range(30)),
        lambda: module.invoke_with_lists("1", b"", 1, b"\1", int, [x]),
        lambda: module.invoke_with_lists(1, b"", "1", b"\1", int, [x]),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError, match="chunk must be positive"):
        module.invoke_with_lists(1, b"", 0, b"\1", int, [x])
    with pytest.raises(ValueError, match="no function"):
        module.invoke_with_lists(0, b"", 1, b"\1", int, [x])


class Failing(TorchFunctionMode):
    """A mode in which every function of torch fails."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise KeyboardInterrupt("in the mode")


def test_exceptions_of_what_is_called_are_raised(look: Look, fresh: Any) -> None:
    x = torch.zeros(3)
    with Failing():
        for call in (
            lambda: native.calls().code(x),
            lambda: cast._quick(torch.bfloat16)(x),
            lambda: look(4096, [x], [x]),
            lambda: native.calls().invoke(1, b"p", x),
        ):
            with pytest.raises(KeyboardInterrupt, match="in the mode"):
                call()

    def no_number() -> int:
        raise ZeroDivisionError

    many = torch.zeros(100_000)
    assert look(4096, [x], [x], threads=no_number) is not None  # not called for few chunks
    with pytest.raises(ZeroDivisionError):
        look(4096, [many], [many], threads=no_number)
    with pytest.raises(TypeError):
        look(4096, [many], [many], threads=str)
    with pytest.raises(OverflowError):
        look(4096, [many], [many], threads=lambda: 2**70)
    fresh.use(torch.Tensor.__dlpack_c_exchange_api__, PLAIN, IS_NEG, (no_number,))  # type: ignore[attr-defined]
    for call in (lambda: fresh.code(x), lambda: fresh.invoke_with_lists(1, b"", 1, b"\1", int, [x])):
        with pytest.raises(ZeroDivisionError):
            call()


def test_no_reference_is_lost_or_kept(look: Look, toy: ctypes.CDLL) -> None:
    """Neither by calls that succeed nor by those that stop at any of their checks."""
    module, x, y, other = native.calls(), torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(4)
    many, text, wide = torch.zeros(50_000), "text", torch.zeros(3, dtype=torch.float64)
    out, sources, targets, mixed = torch.zeros(3), [x] * 100, [x] * 100, [x] * 99 + [wide]
    toy_function = ctypes.cast(toy.halfstep_toy_packed, ctypes.c_void_p).value
    look_function = ctypes.cast(toy.halfstep_look_packed, ctypes.c_void_p).value
    memory = (ctypes.c_int64 * 1000)()
    at, codes, kinds, threads, quick = (
        ctypes.addressof(memory),
        b"\xff\xff",
        b"ppifip",
        lambda: 3,
        cast._quick(torch.float16),
    )
    fp8 = cast._quick(torch.float8_e5m2)
    api = torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]

    def failing(call: Callable[[], object]) -> None:
        with suppress(TypeError, OverflowError):
            call()

    def lists(*given: object) -> object:
        return module.invoke_with_lists(look_function, b"p", 4096, codes, threads, *given, at)

    jobs: list[Callable[[], object]] = [
        lambda: module.use(api, PLAIN, IS_NEG, (torch._C._len_torch_dispatch_stack, torch._C._is_tracing)),
        lambda: module.code(x),
        lambda: module.code(text),
        lambda: module.code(wide),
        lambda: quick(x),
        lambda: quick(y),
        lambda: fp8(x),
        lambda: fp8(many),
        lambda: fp8(wide),
        lambda: module.invoke(toy_function, kinds, x, out, 1, 1.0, 0, at),
        lambda: failing(lambda: module.invoke(toy_function, kinds, x, text, 1, 1.0, 0, at)),
        lambda: failing(lambda: module.invoke(toy_function, kinds, x, out, 1, 1.0, 2**70, at)),
        lambda: lists([x], [y]),
        lambda: lists(sources, targets),
        lambda: lists([many], [many]),
        lambda: lists(sources, mixed),
        lambda: lists(mixed, sources),
        lambda: lists([x], [other]),
        lambda: lists([x], [x, x]),
        lambda: lists([x], (x,)),
        lambda: lists([x], [text]),
        lambda: failing(lambda: lists([x])),
        lambda: failing(lambda: module.invoke_with_lists(look_function, b"p", 4096, codes, threads, [x], [x], text)),
        lambda: failing(lambda: module.invoke_with_lists(look_function, b"p", 4096, codes, str, [many], [many], at)),
    ]
    held = [x, y, other, many, text, wide, out, *sources[:1], sources, targets, mixed, PLAIN, IS_NEG, api, codes, kinds]
    held += [threads, None, True, False, torch.Tensor, torch.nn.Parameter, *jobs]

    def counted(times: int) -> tuple[list[int], int]:
        for job in jobs:
            for _ in range(times):
                job()
        gc.collect()
        return [sys.getrefcount(one) for one in held], tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        counted(10)
        counts, memory_before = counted(10)
        after, memory_after = counted(4000)
    finally:
        tracemalloc.stop()
        native.calls.cache_clear()
        native.calls()  # with all questions again
    assert max(abs(a - b) for a, b in zip(after, counts, strict=True)) < 100  # a leak would be of 4,000
    assert memory_after - memory_before < 50_000


def test_two_threads_call_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lists = [[torch.randn(n, generator=generator) for n in (3, 5000, 1, 700)] for _ in range(2)]
    wants = [(halfstep.foreach_check(one).sum_of_squares.item(), [x.to(torch.float16) for x in one]) for one in lists]
    wrong: list[object] = []

    def work(mine: list[torch.Tensor], squares: float, halves: list[torch.Tensor]) -> None:
        outs = [torch.empty_like(one) for one in halves]
        for _ in range(1500):
            found = halfstep.foreach_check(mine).sum_of_squares.item()
            halfstep.foreach_cast(mine, torch.float16, out=outs)
            single = halfstep.cast(mine[1], torch.float16)
            if found != squares or not all(map(torch.equal, outs, halves)) or not torch.equal(single, halves[1]):
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(one, *want)) for one, want in zip(lists, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_live_as_long_as_a_call_uses_them(toy: ctypes.CDLL) -> None:
    """Another thread may empty a list while the C++ function runs, without the lock of the interpreter."""
    function = ctypes.cast(toy.halfstep_wait_packed, ctypes.c_void_p).value
    flags = (ctypes.c_int32 * 2)()  # the function has begun, and may end
    tensors = [torch.zeros(3), torch.zeros(5)]
    alive = [weakref.ref(one) for one in tensors]
    call = partial(
        native.calls().invoke_with_lists, function, b"p", 4096, b"\xff", int, tensors, ctypes.addressof(flags)
    )
    thread = threading.Thread(target=call)
    thread.start()
    while thread.is_alive() and not flags[0]:
        time.sleep(0.001)
    tensors.clear()
    gc.collect()
    during = [one() is not None for one in alive]
    flags[1] = 1
    thread.join()
    assert during == [True, True] and [one() is None for one in alive] == [True, True]


IN_ANOTHER_INTERPRETER = """
try:
    import _interpreters as interpreters  # Python 3.13
    options, run = ("legacy",), interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    options, run = (), interpreters.run_string
from halfstep.kernels import native
path = native.calls().__spec__.origin
code = f'''
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
try:
    loader = ExtensionFileLoader("halfstep_calls", {path!r})
    module_from_spec(ModuleSpec(loader.name, loader, origin={path!r}))
except ImportError as error:
    assert "main interpreter" in str(error) or "subinterpreters" in str(error), error
else:
    raise AssertionError("it was imported")
'''
other = interpreters.create(*options)
assert run(other, code) is None  # Python 3.13 returns an error, earlier versions raise it
interpreters.destroy(other)
print("refused")
"""


def test_other_interpreters_are_refused() -> None:
    """The variables of the module hold objects of the main interpreter.

    This needs a process of its own: after a second interpreter was created, torch's autograd engine always fails.
    """
    done = subprocess.run([sys.executable, "-c", IN_ANOTHER_INTERPRETER], capture_output=True, text=True)
    assert done.stdout == "refused\n", done.stderr


def test_builds_without_the_global_lock_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else real(name))
    native.calls.cache_clear()
    try:
        assert native.calls() is None
    finally:
        monkeypatch.undo()
        native.calls.cache_clear()
    command, source = native.compiler(), Path(native.__file__).parent / "calls.cpp"
    assert command is not None
    complaint = native._build(source, tmp_path / "calls.so", [*command, "-DPy_GIL_DISABLED"])
    assert "relies on the global interpreter lock" in complaint


def test_a_build_belongs_to_one_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A module compiled by another version of Python is not loaded, and a damaged one is compiled again."""
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    source = Path(native.__file__).parent / "calls.cpp"

    def built() -> Path:
        found = native._compiled(native.CALLS, source)
        assert not isinstance(found, str), found
        return Path(found._name)

    first = built()
    assert built() == first and first.parent == tmp_path / "cache"
    with monkeypatch.context() as patched:
        patched.setattr(sys, "version", "3.99.0 (another one)")
        another = built()
    assert another != first and first.exists()
    content = first.read_bytes()
    for damaged in (content[: len(content) // 2], b"", content[:-1] + b"x"):
        # A new file: the old one is mapped into this process.
        first.unlink()
        first.write_bytes(damaged)
        first.chmod(0o755)
        again = built()
        assert again.read_bytes() != damaged and native._digest(again.read_bytes()) == again.stem.rpartition("-")[2]
        first = again
    if os.geteuid() == 0:  # only root can give a file away
        os.chown(first, 12345, 12345)
        assert not native._holds_what_it_says(first)
        assert os.stat(built()).st_uid == 0


def test_nothing_is_copied_to_the_cpu_for_tensors_elsewhere() -> None:
    """A copy of the factor would wait for a GPU, and fails for meta tensors."""
    x, factor = torch.ones(3, device="meta"), torch.ones((), device="meta")
    assert halfstep.foreach_unscale_([x], factor).norm.is_meta
    assert halfstep.foreach_check([x], factor).sum_of_squares.is_meta
    assert unscale.check([x], unscale.Factor(factor)).sum_of_squares.is_meta
