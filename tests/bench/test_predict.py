"""`halfstep bench predict`: its tables, the record that is there and its limits, and what is refused."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from halfstep.bench import predict, predictor

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / predict.COUNTS_FILE

ZERO = "the slow path of the root and the quotient of a zero"
# Cases beyond a limit, and the most that they may be beyond it: issue over memory on H100 and B200, shared memory over
# memory on B200; and why. The first pattern that fits counts. tests/support/instruction_bounds.py has what they need.
EXCEPTIONS: dict[str, tuple[float, float, float, str]] = {
    "statistics bf16 with errors": (2.94, 5.28, 0.20, "a division, a rounding and a second word per element"),
    "statistics bf16": (1.01, 1.79, 0.20, "16 instructions form a place and add a bit, for 2 bytes"),
    "statistics bf16, scale 0.3": (1.19, 2.06, 0.20, "the same and a product, for 2 bytes"),
    "statistics bf16 with errors, scale 0.3": (4.38, 7.79, 0.20, "products have errors of up to three words"),
    "AdamW bf16 split, bf16 moments, zero gradients and moments": (0.62, 1.07, 0.20, ZERO),
    "AdamW bf16 no master, 8-bit moments, stochastic": (0.71, 1.01, 0.20, "three random roundings for 10 bytes in all"),
}


def kernel(**changes: Any) -> dict[str, Any]:
    """A record of 2^20 elements in 512 blocks of 256 threads, of 32 bytes each, read once."""
    plain = {"elements": 1 << 20, "blocks": 512, "threads": 256, "registers": 32, "shared_bytes": 0, "trips": 1.0}
    work = {"issued": 100.0, "sectors": 1.0, "loaded": 0.5, "fresh": 1.0, "wavefronts": 0.4, "spilled": 0}
    return {**plain, **work, **changes}


def counts(**changes: Any) -> dict[str, Any]:
    made = {"triton": "3.7.1", "targets": {"sm_90": {"a case": {"a_kernel": kernel(**changes)}}}, "peers": {}}
    return json.loads(json.dumps(made))


def test_parts_of_the_time_of_memory() -> None:
    """A kernel that moves 32 B per element, at 0.9 * 3.35 TB/s: 10.61 ps. An H100 issues 29.65 instructions per ps."""
    found = {one.gpu: one for one in predict.limits(counts())}
    assert set(found) == {"H100", "H200"}
    one = found["H100"]
    assert one.bytes == 32 and one.resident == 8
    # 64 times the 512 blocks of the record for 64 times its elements; 8 on each of 132 multiprocessors are a wave.
    assert one.waves == pytest.approx(64 * 512 / (8 * 132)) and one.tail == pytest.approx(32 / one.waves - 1)
    assert next(predict.limits(counts(), 1 << 20)).waves == pytest.approx(512 / (8 * 132))
    assert one.issue == pytest.approx(100 / (132 * 128 * 1.755) * 0.9 * 3350 / 32, rel=1e-12)
    assert one.issue == pytest.approx(0.3178, abs=1e-4)
    assert one.shared == pytest.approx(0.4 / (132 * 1.755) * 0.9 * 3350 / 32, rel=1e-12)
    assert one.within


@pytest.mark.parametrize("changes", [{"issued": 190.0}, {"wavefronts": 0.6}])
def test_what_is_above_a_limit_says_so(changes: dict[str, float]) -> None:
    assert not next(predict.limits(counts(**changes))).within


def test_the_limits_are_those_of_the_machine_code() -> None:
    """Where it was counted; times keep the weights to which their model was fitted."""
    one, plain = (next(predict.limits(counts(**given))) for given in ({"machine": 80.0}, {}))
    assert one.issue == pytest.approx(0.8 * plain.issue)
    given = [counts(fresh=0.1, sectors=0.1), counts(fresh=0.1, sectors=0.1, machine=1.0)]
    first, second = (next(predict.times(one, 1 << 26)).predicted_us for one in given)
    assert first == second


def test_a_kernel_that_moves_nothing_is_left_out() -> None:
    assert list(predict.limits(counts(sectors=0.03, fresh=0.03))) == []


def test_times_of_ours_stand_before_those_of_the_peers_with_the_same_job() -> None:
    record = counts()
    record["targets"]["sm_90"]["softmax bf16, 64 columns"] = {"ours": kernel()}
    record["peers"]["sm_90"] = {
        "liger softmax bf16, 64 columns": {"peer": "liger 1", "kernels": {"k": kernel(fresh=2.0, sectors=2.0)}}
    }
    found = [one for one in predict.times(record, 1 << 26) if one.gpu == "H100"]
    assert [(one.case, one.peer) for one in found] == [
        ("a case", None),
        ("softmax bf16, 64 columns", None),
        ("liger softmax bf16, 64 columns", "liger 1"),
    ]
    gpu = predictor.GPUS["H100"]
    memory = 32 * 2**26 / (0.9 * 3.35e12)
    assert found[1].predicted_us == pytest.approx(1e6 * (gpu.first + memory))
    assert found[2].predicted_us == pytest.approx(1e6 * (gpu.first + 2 * memory))
    assert found[1].error_us == pytest.approx(predictor.ERROR.ninth * found[1].predicted_us)


def test_every_recorded_case_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main(["--counts", str(RECORDED), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    recorded = json.loads(RECORDED.read_text())
    for name in predict.SHOWN:
        gpu = predictor.GPUS[name]
        own = set(recorded["targets"][gpu.target])
        assert {one["case"] for one in shown["limits"] if one["gpu"] == name} == own
        if gpu.reached is not None:
            timed = {one["case"] for one in shown["predicted_times"] if one["gpu"] == name}
            assert timed == own | set(recorded["peers"][gpu.target])
    assert not [one for one in shown["predicted_times"] if one["gpu"] == "MI300X"]  # nothing was fitted to it
    adam = next(one for one in shown["limits"] if (one["case"], one["gpu"]) == ("AdamW fp32", "H100"))
    assert adam["within"] and 28 <= adam["bytes"] < 30 and adam["shared"] == 0


def test_no_figure_without_the_word_and_the_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert predict.main(["--counts", str(RECORDED)]) == 0
    title, _, header, rule, *rest = capsys.readouterr().out.splitlines()
    assert title.startswith("Predicted µs of a call with 67,108,864 elements") and set(rule) == {"─"}
    assert header.count("predicted, ") == 4
    table, note = rest[: rest.index("")], " ".join(rest[rest.index("") + 1 :])
    assert all(line.count("±") == 4 for line in table) and len(table) > 40
    assert note.startswith(f"Predicted, none measured: of {predictor.ERROR.rows} published times")
    assert f"nine of ten within {predictor.ERROR.ninth:.0%}, which is the ± here" in note


def test_the_table_of_limits_marks_what_is_above(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    file.write_text(json.dumps(counts(issued=190.0, wavefronts=0.0)))
    assert predict.main(["--counts", str(file), "--limits"]) == 0
    out = capsys.readouterr().out
    assert "Predicted from the kernels of Triton 3.7.1" in out and "60 + 0*" in out


def test_the_recorded_kernels_are_within_the_limits() -> None:
    """Issue at most 60 % of the time of memory on an H100 and 85 % on a B200, shared memory at most 20 %; what is
    beyond is named above, and may not get worse."""
    found = list(predict.limits(json.loads(RECORDED.read_text())))
    beyond, used = [], set()
    for case in dict.fromkeys(one.case for one in found):
        of = [one for one in found if one.case == case]
        pattern = next((pattern for pattern in EXCEPTIONS if fnmatchcase(case, pattern)), None)
        used.add(pattern)
        h100, b200, shared = EXCEPTIONS[pattern][:3] if pattern else (0.60, 0.85, 0.20)
        for one in of:
            most = {"H100": h100, "B200": b200}.get(one.gpu)
            if most is not None and (one.issue > most or one.shared > shared):
                beyond.append(f"{one.case} on {one.gpu}: issue {one.issue:.2f}, shared {one.shared:.2f}")
    assert not beyond
    assert set(EXCEPTIONS) <= used, "an exception that nothing needs"


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
