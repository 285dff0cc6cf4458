"""Where memory comes from: nothing of ours takes torch's default dtype or device, and no kernel an unchecked address.

Scripts set both (``torch.set_default_dtype(torch.bfloat16)``, ``with torch.device("meta")``), and C++ writes fp32 where
it was told that fp32 is.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for layer in ("kernels", "numerics", "integrations") for path in (ROOT / layer).rglob("*.py"))

# What torch makes of nothing but sizes and numbers.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor"),
    *("tril_indices", "triu_indices", "zeros"),
}
# These know no device, or not even a dtype.
CONSTRUCTORS = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor"}
GLOBALS = {"set_default_dtype", "set_default_device", "set_default_tensor_type"}


def calls(source: str) -> list[tuple[ast.Call, str]]:
    """The calls of ``torch.name(...)`` and of others' ``name(...)``, with the name; of the latter with a dot."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            found.append((node, node.func.attr if of_torch else f".{node.func.attr}"))
    return found


def careless(source: str) -> list[str]:
    """Allocations without a dtype or a device, which then depend on global defaults."""
    wrong = []
    for call, name in calls(source):
        given = {keyword.arg for keyword in call.keywords}
        missing = {"dtype", "device"} - given
        if name in FACTORIES and missing:
            wrong.append(f"line {call.lineno}: torch.{name} without {' and '.join(sorted(missing))}")
        if name in CONSTRUCTORS | GLOBALS:
            wrong.append(f"line {call.lineno}: torch.{name}")
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_allocation_names_dtype_and_device(path: Path) -> None:
    assert careless(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = torch.zeros(3, 4)", "line 1: torch.zeros without device and dtype"),
        ("torch.zeros(3, device=device)", "line 1: torch.zeros without dtype"),
        ("def f():\n    return [torch.tensor(x, dtype=torch.int64) for x in y]", "line 2: torch.tensor without device"),
        ("torch.arange(n)", "line 1: torch.arange without device and dtype"),
        ("torch.as_tensor(value, dtype=torch.float32)", "line 1: torch.as_tensor without device"),
        ("torch.Tensor([1.0])", "line 1: torch.Tensor"),
        ("torch.set_default_dtype(torch.float32)", "line 1: torch.set_default_dtype"),
    ],
)
def test_the_check_of_allocations_can_fail(source: str, complaint: str) -> None:
    assert careless(source) == [complaint]


def test_the_check_of_allocations_allows_what_it_should() -> None:
    source = "torch.zeros(3, dtype=d, device=e); torch.empty_like(x); x.new_zeros(3); np.zeros(3); zeros(3)"
    assert careless(source) == []


def addresses(source: str) -> list[str]:
    """Where ``data_ptr`` is named."""
    return [
        f"line {node.lineno}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr == "data_ptr"
    ]


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.parent.name == "kernels"], ids=lambda path: path.name
)
def test_addresses_are_taken_in_one_place(path: Path) -> None:
    """`multi_tensor.address` and tables refuse those of tensors that have no memory."""
    assert bool(addresses(path.read_text())) is (path.name == "multi_tensor.py")


def test_the_check_of_addresses_can_fail() -> None:
    assert addresses("f(x.data_ptr())") == addresses("list(map(torch.Tensor.data_ptr, xs))") == ["line 1"]
