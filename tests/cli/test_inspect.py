"""halfstep inspect: the table, JSON, sorting, pictures, and errors for files that it cannot read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lookup_run import complaint, lines

from halfstep.cli import inspect as command
from halfstep.numerics.statistics.counts import statistics


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    content = {
        "model": {
            "encoder.layers.0.self_attention.in_proj.weight": torch.randn(300, 5) * 1e-6,
            "bias": torch.tensor([0.0, 1e-9, 1.0, 1e6]),
            "scale": torch.ones(700, dtype=torch.bfloat16),
        },
        "step": torch.tensor(3),
        "lr": 0.1,
    }
    torch.save(content, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def told(*words: object) -> dict[str, Any]:
    content: dict[str, Any] = json.loads("\n".join(lines("inspect", "--json", *map(str, words))))
    return content


def rows_of(printed: list[str]) -> list[list[str]]:
    """The cells of the table's rows, from the first rule to the total."""
    body = printed[next(at for at, line in enumerate(printed) if line.startswith("──")) + 1 :]
    total = next(at for at, line in enumerate(body) if line.startswith("total"))
    return [line.split() for line in body[: total + 1] if not line.startswith("──")]


def test_the_table_lists_tensors_and_fits_the_terminal(checkpoint: Path) -> None:
    for width in ("80", "160"):
        printed = lines("inspect", str(checkpoint), COLUMNS=width)
        rows = rows_of(printed)
        assert not any("…" in line for line in printed), "nothing is cut"
        assert [row[0].split(".")[-1] for row in rows] == ["weight", "scale", "bias", "total"]
        if width == "80":
            assert rows[2][1:6] == ["4", "25.0", "25.0", "0", "25.0"]
    assert rows[1][1:3] == ["bf16", "700"]
    assert rows[2] == "model.bias fp32 4 25.0 25.0 0 25.0 25.0 0 0 2^-30..2^19 0 1 1".split()
    assert "left out: 1 of int64" in printed
    assert any(line.startswith("In fp16: flushed up to 2^-25, subnormal below 2^-14") for line in printed)


def test_json_equals_statistics(checkpoint: Path) -> None:
    content = told(checkpoint, "--scale", "2^10", "--format", "bfloat16", "--advise")
    tensors = {f"model.{name}": tensor for name, tensor in torch.load(checkpoint)["model"].items()}
    expected = json.loads(json.dumps(statistics(tensors, "bf16", 1024.0).as_dict()))
    assert {key: content[key] for key in expected} == expected
    assert (content["left_out"], content["files"]) == ({"int64": 1}, [str(checkpoint)])
    assert content["advice"]["verdict"] == "unscaled"


@pytest.mark.parametrize(
    ("sort", "first"), [("size", "weight"), ("lost", "bias"), ("zero", "bias"), ("name", "bias"), ("file", "weight")]
)
def test_sorting_and_limits(sort: str, first: str, checkpoint: Path) -> None:
    printed = lines("inspect", str(checkpoint), "--sort", sort, "--limit", "1")
    assert [row[0].split(".")[-1] for row in rows_of(printed)] == [first, "total"]
    assert "2 more tensors: --limit 0 shows all" in printed
    assert len(rows_of(lines("inspect", str(checkpoint), "--limit", "0"))) == 4


def test_pictures_and_advice(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "picture.png"
    for options in ([], ["--advise"]):
        printed = lines("inspect", str(checkpoint), "--out", str(out), *options)
        assert out.read_bytes()[:4] == b"\x89PNG"
        out.unlink()
    assert any("no scale is good enough" in line for line in printed)


def test_parts_of_one_checkpoint_and_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{number}.pt" for number in range(3)]
    for number, file in enumerate(files):
        torch.save({f"w{number}.{part}": torch.full((100,), 2.0**part) for part in range(4)}, file)
    monkeypatch.setattr(command, "BATCH", 1000)
    content = told(*files)
    assert [row["elements"] for row in content["tensors"]] == [100] * 12
    assert content["total"]["exponents"] == {"0": 300, "1": 300, "2": 300, "3": 300}


def test_long_tensors_are_counted_in_pieces(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = told(checkpoint)
    calls = []
    monkeypatch.setattr(command, "BATCH", 1000)
    monkeypatch.setattr(command.Progress, "show", lambda self, done=None, text=None: calls.append(done))
    assert told(checkpoint) == at_once
    # 300 * 5 fp32, 4 fp32 and 700 bf16 in batches of 1,000 bytes
    assert len(calls) > 7


def test_values_count_once(tmp_path: Path) -> None:
    """What an expanded tensor repeats is beyond any memory."""
    file = tmp_path / "x.pt"
    torch.save({"expanded": torch.tensor([[1.0], [2.0]]).expand(2, 10**12), "empty": torch.empty(0, 5)}, file)
    assert [row["elements"] for row in told(file)["tensors"]] == [2, 0]
    torch.save({"windows": torch.zeros(2000).unfold(0, 1000, 1)}, file)
    strides = "the strides of 'windows' turn 2,000 elements into 1,001,000: save a copy"
    assert strides in complaint("inspect", str(file))


def test_nothing_in_a_file_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "\x1b[31mx.pt"
    torch.save({"\x1b[2J\rw$\\frac$": torch.ones(3)}, path)
    printed = lines("inspect", str(path), "--advise", "--out", str(tmp_path / "x.png"))
    printed += lines("inspect", str(path), "--json")
    path.write_bytes(path.read_bytes()[:-30])
    refused = complaint("inspect", str(path))
    assert r"\x1b[2J\rw$\frac$" in "".join(printed) and r"\x1b[31mx.pt" in refused
    assert all(line.isprintable() for line in (*printed, refused))
