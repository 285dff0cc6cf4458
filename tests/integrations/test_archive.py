"""What `checkpoint.save` accepts `load` gives back; what it could not give back it refuses, naming where it stands."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import random
import uuid
from pathlib import Path
from typing import Any

import checkpoint_attacks as attacks
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from halfstep.integrations import archive, checkpoint, pickle_data

pytestmark = pytest.mark.sample(3)


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Progress:
    seen: int = 0


Pair = collections.namedtuple("Pair", "a b")


class Text(str):
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
LAUGH: list[Any] = [0, 0]
for _ in range(40):
    LAUGH = [LAUGH, LAUGH]

REFUSED: dict[str, tuple[Any, str]] = {
    "Path": (Path("x"), r"a pathlib\S*Path, which load could not restore: save str\(\.\.\.\) of it"),
    "Enum": (Colour.RED, r"save its value"),
    "IntEnum": (Level.HIGH, r"save its value"),
    "dataclass": (Progress(), r"Progress, which load could not restore: .*save dataclasses.asdict"),
    "deque": (collections.deque([1]), r"collections.deque.*save list\(\.\.\.\) of it"),
    "namedtuple": (Pair(1, 2), r"save tuple\(\.\.\.\) of it"),
    "defaultdict": (collections.defaultdict(int), r"save dict\(\.\.\.\) of it"),
    "datetime": (datetime.datetime(2026, 1, 1), r"save its isoformat\(\)"),
    "timedelta": (datetime.timedelta(1), r"save its total_seconds\(\)"),
    "Decimal": (decimal.Decimal(1), r"decimal.Decimal"),
    "Fraction": (fractions.Fraction(1, 2), r"fractions.Fraction"),
    "UUID": (uuid.UUID(int=1), r"uuid.UUID"),
    "str subclass": (Text("x"), r"save str\(\.\.\.\) of it"),
    "range": (range(3), r"a range, which"),
    "function": (print, r"builtin_function_or_method"),
    "numpy text": (np.array(["a"]), r"a numpy array of dtype <U1, .*save its .tolist\(\)"),
    "numpy objects": (np.array([None], dtype=object), r"a numpy array of dtype object"),
    "numpy time": (np.datetime64(0, "s"), r"save its item\(\)"),
    "numpy generator": (np.random.default_rng(0), r"save its bit_generator.state"),
    "torch generator": (torch.Generator(), r"save its get_state\(\)"),
    "sparse": (torch.eye(2).to_sparse_csr(), r"a tensor of layout torch.sparse_csr .*to_dense\(\)"),
    "meta": (torch.empty(2, device="meta"), r"on meta, which load could not restore"),
    "key": ({Path("x"): 1}, r"a dict of which a key contains a \w*Path.*use strings or numbers"),
    "set": ({Colour.RED}, r"a set of which a key contains a Colour"),
    "cycle": (CYCLE, r"contains itself"),
    "deep": (DEEP, r"nested more than 100 deep"),
    "laugh": (LAUGH, r"expands to \d.* values"),
    "reserved": ({archive.NUMPY: 1}, r"a dict with the key 'halfstep.numpy'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_load_could_not_give_back_is_refused_with_its_place_and_a_remedy(tmp_path: Path, name: str) -> None:
    checkpoint.save(tmp_path, 1, {"good": 1})
    value, words = REFUSED[name]
    with pytest.raises(checkpoint.CheckpointError, match=rf"cannot write .*state\['a'\]\[1\].* but got .*{words}"):
        checkpoint.save(tmp_path, 2, {"a": [0, value]})
    model = attacks.model_of()
    with pytest.raises(checkpoint.CheckpointError, match=rf"cannot write .*state\['a'\]\[1\].* but got .*{words}"):
        checkpoint.save(tmp_path, 2, {"a": [0, value]}, model=model)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.pt"]


def test_the_refusal_names_options_of_the_optimizer_too(tmp_path: Path) -> None:
    model = attacks.model_of()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["made"] = Path("x")
    with pytest.raises(
        checkpoint.CheckpointError, match=r"optimizer\.param_groups\[0\]\.made to be .* but got a pathlib"
    ):
        checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)


def same(a: Any, b: Any) -> bool:
    """Whether both are the same, types and bits included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        bits = [one.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
        return alike and torch.equal(*bits)
    if isinstance(a, (np.ndarray, np.generic)):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b) if isinstance(a, (float, complex)) else bool(a == b)


KEPT = {
    "python": random.getstate(),
    "numpy": np.random.RandomState(0).get_state(),
    "generator": np.random.default_rng(0).bit_generator.state,
    "torch": torch.get_rng_state(),
    "float64": np.float64(0.1),
    "bool_": np.bool_(True),
    "zero-dim": np.array(3, dtype=np.int8),
    "reversed": np.arange(6).reshape(2, 3)[:, ::-1],
    "empty": np.zeros((0, 3), dtype=np.complex64),
    "complex": 1 - 2j,
    "bytes": (b"\x00\xff", bytearray(b"ab"), b"", bytearray()),
    "sets": ({1, "a", (2, None)}, frozenset({1}), set()),
    "torch's": (torch.Size([2, 3]), torch.bfloat16, torch.float8_e4m3fn, torch.device("cuda", 1), torch.device("cpu")),
    "counted": collections.Counter("aab"),
    "ordered": collections.OrderedDict(b=1, a=2),
    "whole": (2**200, -(2**4000), 0, -1, 255, 65536, 2**31, -(2**31) - 1, True),
    "floats": (0.1, -0.0, float("inf"), float("nan"), 5e-324),
    "text": ("", "a\nb", "\ud800", "é" * 300),
    "keys": {1: "a", 2.5: "b", None: "c", (1, "x"): "d"},
    "tensors": [
        *(torch.arange(12).view(3, 4).t(), torch.zeros(0, 2), torch.tensor(2.5), torch.ones(3, dtype=torch.uint16)),
        *(torch.tensor([1 + 2j]).conj(), torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))),
        *(torch.ones(3).to(torch.float8_e5m2), torch.tensor([True, False]), torch.ones(1).expand(4)),
    ],
}


def _back(value: Any) -> Any:
    written = io.BytesIO()
    archive.write(written, value, "state")
    return archive.read(written, length=len(written.getvalue()))


@pytest.mark.parametrize("name", KEPT)
def test_what_people_keep_comes_back(tmp_path: Path, name: str) -> None:
    assert same(_back(KEPT[name]), KEPT[name])
    path = checkpoint.save(tmp_path, 1, {"x": KEPT[name]})
    assert same(checkpoint.load(path)["x"], KEPT[name])


def test_a_random_state_that_was_kept_goes_on(tmp_path: Path) -> None:
    drawn, mine = np.random.RandomState(3), random.Random(3)
    path = checkpoint.save(tmp_path, 1, {"numpy": drawn.get_state(), "python": mine.getstate()})
    expected = drawn.normal(size=5), mine.random()
    state = checkpoint.load(path)
    other, another = np.random.RandomState(0), random.Random(0)
    other.set_state(state["numpy"])
    another.setstate(state["python"])
    assert np.array_equal(other.normal(size=5), expected[0]) and another.random() == expected[1]


def test_sparse_tensors_come_back_too() -> None:
    for sparse in (torch.eye(3).to_sparse(), torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,))):
        back = _back(sparse)
        assert back.is_coalesced() == sparse.is_coalesced() and torch.equal(back.to_dense(), sparse.to_dense())


def test_what_is_shared_stays_shared() -> None:
    weights = torch.arange(6.0)
    shared = [1]
    back = _back({"a": weights, "b": weights[2:4], "c": weights, "one": shared, "other": shared})
    assert back["a"] is back["c"] and back["one"] is back["other"]
    back["a"][2] = 9
    assert back["b"][0] == 9


def test_torch_reads_it_with_weights_only_and_maps_it(tmp_path: Path) -> None:
    state = {name: KEPT[name] for name in ("tensors", "keys", "text", "counted", "ordered", "torch", "complex")}
    path = checkpoint.save(tmp_path, 1, state)
    for mapped in (False, True):
        found = torch.load(path, weights_only=True, mmap=mapped)
        assert same(found, {**state, "tensors": found["tensors"]})
        assert all(torch.equal(a.cfloat(), b.cfloat()) for a, b in zip(found["tensors"], state["tensors"], strict=True))


def test_what_torch_wrote_is_read() -> None:
    state = {name: KEPT[name] for name in KEPT if name not in ("numpy", "generator", "float64", "bool_")}
    state = {name: value for name, value in state.items() if name not in ("zero-dim", "reversed", "empty", "tensors")}
    state["tensors"] = [one for one in KEPT["tensors"] if not one.is_conj()]
    written = io.BytesIO()
    torch.save(state, written)
    assert same(archive.read(written, length=len(written.getvalue())), state)


_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.complex_numbers()
)
_keys = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
_dtypes = hypothesis_numpy.integer_dtypes() | hypothesis_numpy.floating_dtypes(sizes=(16, 32, 64))
_arrays = hypothesis_numpy.arrays(_dtypes, hypothesis_numpy.array_shapes(min_dims=0, min_side=0, max_side=4))
_values = st.recursive(
    _scalars | _arrays | st.sets(st.integers() | st.text(max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_keys, inner, max_size=4)
        | st.tuples(inner, inner)
        | inner.map(lambda one: collections.OrderedDict(x=one))
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_values)
def test_whatever_is_accepted_comes_back_the_same(value: Any) -> None:
    def native(one: Any) -> Any:  # big-endian numbers come back in the machine's order
        if isinstance(one, np.ndarray):
            return one.astype(one.dtype.newbyteorder("="))
        if isinstance(one, dict):
            return type(one)((key, native(inner)) for key, inner in one.items())
        return type(one)(map(native, one)) if isinstance(one, (list, tuple)) else one

    assert same(_back(value), native(value))


@pytest.mark.parametrize("number", range(len(attacks.bombs())))
def test_a_pickle_that_asks_for_much_or_for_code_is_an_error(number: int) -> None:
    try:
        value = pickle_data.resolved(pickle_data.read(attacks.bombs()[number], {}), lambda one: one, pickle_data.MOST)
    except pickle_data.PickleError:
        return
    assert value == [], "a number in the memo reserves nothing here, and does no harm"


def _repeated(what: bytes, times: int) -> bytes:
    return what + b"q\x01" + b"h\x00h\x01R0" * times + b"R."


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (
            b"c__builtin__\nset\nq\x00" + _repeated(b"](" + b"N" * 10**6 + b"e\x85", 20),
            "it copies more than 10,000,000",
        ),
        (b"c_codecs\nencode\nq\x00" + _repeated(b"X\x40\x42\x0f\x00" + b"x" * 10**6 + b"\x85", 20), "it copies more"),
        (
            b"ctorch.serialization\n_get_layout\n]" + b"q\x000h\x00h\x00\x86" * 14 + b"\x85R.",
            "expected a dense or COO tensor, but got layout tuple",
        ),
        (b"}\x8b\x40\x42\x0f\x00" + b"\x7f" * 10**6 + b"Ns.", "a key contains a int, or more than 1000 parts"),
        (b"}X\x80\x84\x1e\x00" + b"x" * 2 * 10**6 + b"Ns.", "a key contains a str, or more than 1000 parts"),
    ],
    ids=["set", "bytes", "layout", "number", "string"],
)
def test_what_a_few_bytes_repeat_is_counted(pickled: bytes, said: str) -> None:
    with pytest.raises(pickle_data.PickleError, match=said):
        pickle_data.read(b"\x80\x02" + pickled, archive._NAMES)


@pytest.mark.parametrize(("module", "name"), attacks.NAMED)
def test_a_name_is_never_looked_up(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    def looked(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"{arguments} was looked up")

    monkeypatch.setattr("builtins.__import__", looked)
    text = b"c" + module.encode() + b"\n" + name.encode() + b"\n)R."
    with pytest.raises(pickle_data.PickleError, match="which no checkpoint needs"):
        pickle_data.read(b"\x80\x02" + text, {})
