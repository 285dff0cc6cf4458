"""`halfstep bench predict`: the formulas, the record that is there, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfstep.bench import predict

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / predict.COUNTS_FILE


def counts(**kernel: float) -> dict:
    return {"triton": "3.7.1", "targets": {"sm_90": {"a case": {"a_kernel": kernel}}}}


def test_parts_of_the_time_of_memory() -> None:
    """A kernel that moves 32 B per element, at 0.9 * 3.35 TB/s: 10.61 ps. An H100 issues 29.65 instructions per ps."""
    (found,) = predict.predict(counts(instructions=100.0, sectors=1.0, wavefronts=0.4))
    assert found.bytes == 32
    assert found.issue == pytest.approx(100 / (132 * 128 * 1.755) * 0.9 * 3350 / 32, rel=1e-12)
    assert found.issue == pytest.approx(0.3178, abs=1e-4)
    assert found.shared == pytest.approx(0.4 / (132 * 1.755) * 0.9 * 3350 / 32, rel=1e-12)
    assert found.within


@pytest.mark.parametrize(("instructions", "wavefronts"), [(190.0, 0.0), (1.0, 0.6)])
def test_what_is_above_a_limit_says_so(instructions: float, wavefronts: float) -> None:
    (found,) = predict.predict(counts(instructions=instructions, sectors=1.0, wavefronts=wavefronts))
    assert not found.within


def test_a_kernel_that_moves_nothing_is_left_out() -> None:
    assert list(predict.predict(counts(instructions=100.0, sectors=0.03, wavefronts=0.0))) == []


def test_every_recorded_case_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main(["--counts", str(RECORDED), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    recorded = json.loads(RECORDED.read_text())
    for name, gpu in predict.GPUS.items():
        cases = {one["case"] for one in shown["predictions"] if one["gpu"] == name}
        assert cases == set(recorded["targets"][gpu.target])
    by_case = {(one["case"], one["gpu"]): one for one in shown["predictions"]}
    adam = by_case["AdamW fp32", "H100"]
    assert adam["within"] and 28 <= adam["bytes"] < 30 and adam["shared"] == 0


def test_the_table_marks_what_is_above(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    file.write_text(json.dumps(counts(instructions=190.0, sectors=1.0, wavefronts=0.0)))
    assert predict.main(["--counts", str(file)]) == 0
    out = capsys.readouterr().out
    assert "Predicted from the PTX of Triton 3.7.1" in out and "60 + 0*" in out


@pytest.mark.parametrize("content", ["", "[]", '{"targets": {"sm_90": {"a": {"b": {}}}}}', '{"targets": 3}'])
def test_what_is_no_record_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "counts.json"
    file.write_text(content)
    assert predict.main(["--counts", str(file)]) == 2
    assert (
        f"expected --counts to be a file of make bounds, but got {file}, which holds no counts"
        in capsys.readouterr().err
    )


def test_outside_a_checkout_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert predict.main([]) == 2
    assert "it comes with a checkout of halfstep: run this in its root, or name the file" in capsys.readouterr().err
