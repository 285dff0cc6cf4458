"""halfstep inspect: the table, JSON, sorting, pictures, and what it says about files it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halfstep.cli import inspect as command
from halfstep.cli.inspect import main
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


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def rows_of(lines: list[str]) -> list[list[str]]:
    """The cells of the table's rows, from the first rule to the total."""
    body = lines[next(place for place, line in enumerate(lines) if line[:2] in ("──", "--")) + 1 :]
    total = next(place for place, line in enumerate(body) if line.startswith("total"))
    return [line.split() for line in body[: total + 1] if line[:2] not in ("──", "--")]


def test_the_table(checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for width in ("80", "160"):
        monkeypatch.setenv("COLUMNS", width)
        assert main([str(checkpoint)]) == 0
        lines = lines_of(capsys)
        rows = rows_of(lines)
        assert not any("…" in line for line in lines), "nothing is cut"
        assert [row[0].split(".")[-1] for row in rows] == ["weight", "scale", "bias", "total"]
        if width == "80":
            assert rows[2][1:6] == ["4", "25.0", "25.0", "0", "25.0"]
    assert rows[1][1:3] == ["bf16", "700"]
    assert rows[2] == "model.bias fp32 4 25.0 25.0 0 25.0 25.0 0 0 2^-30..2^19 0 1 1".split()
    assert "left out: 1 of int64" in lines
    assert any(line.startswith("In fp16: flushed up to 2^-25, subnormal below 2^-14") for line in lines)


def test_json_is_what_statistics_says(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkpoint), "--json", "--scale", "2^10", "--format", "bfloat16", "--advise"]) == 0
    content = json.loads(capsys.readouterr().out)
    tensors = {f"model.{name}": tensor for name, tensor in torch.load(checkpoint)["model"].items()}
    expected = json.loads(json.dumps(statistics(tensors, "bf16", 1024.0).as_dict()))
    assert {key: content[key] for key in expected} == expected
    assert content["left_out"] == {"int64": 1}
    assert content["files"] == [str(checkpoint)]
    assert content["advice"]["verdict"] == "unscaled"


@pytest.mark.parametrize(
    ("sort", "first"), [("size", "weight"), ("lost", "bias"), ("zero", "bias"), ("name", "bias"), ("file", "weight")]
)
def test_sorting_and_limits(sort: str, first: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkpoint), "--sort", sort, "--limit", "1"]) == 0
    lines = lines_of(capsys)
    assert [row[0].split(".")[-1] for row in rows_of(lines)] == [first, "total"]
    assert "2 more tensors: --limit 0 shows all" in lines
    assert main([str(checkpoint), "--limit", "0"]) == 0
    assert len(rows_of(lines_of(capsys))) == 4


def test_pictures_and_advice(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for options in ([], ["--advise"]):
        out = tmp_path / "picture.png"
        assert main([str(checkpoint), "--out", str(out), *options]) == 0
        assert out.read_bytes()[:4] == b"\x89PNG"
        out.unlink()
    assert "no scale is good enough" in capsys.readouterr().out


def test_parts_of_one_checkpoint_and_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        torch.save({f"w{number}.{part}": torch.full((100,), 2.0**part) for part in range(4)}, tmp_path / f"{number}.pt")
    monkeypatch.setattr(command, "BATCH", 1000)
    assert main([*(str(tmp_path / f"{number}.pt") for number in range(3)), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [row["elements"] for row in content["tensors"]] == [100] * 12
    assert content["total"]["exponents"] == {"0": 300, "1": 300, "2": 300, "3": 300}


def test_small_safetensors_are_counted_without_torch_as_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.cat([torch.randn(500) * 10.0**power for power in range(-44, 38, 2)])
    values = torch.cat([values, torch.tensor([0.0, -0.0, 1e-45, float("inf"), float("nan"), 65520, 65519, 6e-8, 2e-8])])
    tensors = {str(dtype): values.to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    tensors["none"] = torch.zeros(0, 2)
    file = str(tmp_path / "x.safetensors")
    save_file(tensors, file)
    for options in ("", "-f bf16 --scale 2^-20", "-f e4m3fn --scale 3", "-f e5m2 --scale 2^100", "--scale 1e30"):
        found = []
        for small in (1 << 20, 0):
            monkeypatch.setattr(command, "SMALL", small)
            assert main([file, "--json", *options.split()]) == 0
            found.append(json.loads(capsys.readouterr().out))
        order = {row["name"]: row for row in found[0].pop("tensors")}
        assert order == {row["name"]: row for row in found[1].pop("tensors")} and found[0] == found[1]


def test_values_count_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an expanded tensor repeats is beyond any memory."""
    content = {
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 10**12),
        "empty": torch.empty(0, 5),
    }
    torch.save(content, tmp_path / "x.pt")
    assert main([str(tmp_path / "x.pt"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tensors"]
    assert [row["elements"] for row in rows] == [2, 0]
    torch.save({"windows": torch.zeros(2000).unfold(0, 1000, 1)}, tmp_path / "x.pt")
    assert main([str(tmp_path / "x.pt")]) == 2
    assert "the strides of 'windows' make 1,001,000 elements of 2,000: save a copy" in capsys.readouterr().err


def test_nothing_in_a_file_reaches_the_terminal_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "\x1b[31mx.pt"
    torch.save({"\x1b[2J\rw$\\frac$": torch.ones(3)}, path)
    assert main([str(path), "--advise", "--out", str(tmp_path / "x.png")]) == 0
    assert main([str(path), "--json"]) == 0
    path.write_bytes(path.read_bytes()[:-30])
    assert main([str(path)]) == 2
    printed = capsys.readouterr()
    assert r"\x1b[2J\rw$\frac$" in printed.out and r"\x1b[31mx.pt" in printed.err
    assert all(sign.isprintable() or sign == "\n" for sign in printed.out + printed.err)
    assert printed.err.count("\n") == 1
