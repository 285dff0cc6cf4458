"""The codec's benchmark: a peer is timed only if it agrees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from halfstep.__main__ import main
from halfstep.bench import codec_speed as bench
from halfstep.numerics.formats import codec


def test_two_tables_of_figures(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["bench", "codec", "--size", "4096", "--turns", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    names = [row[0].strip() for row in rows]
    assert names == ["to nearest even", "---", *bench.NEAREST, "halfstep, and over gfloat", "---", *bench.BY_MODE]
    assert all(float(row[1]) > 0 for row in rows[2 : 2 + len(bench.NEAREST)])


def test_a_peer_with_other_results_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.measure("fp16", "nearest", 4096, 1)["torch"] > 0
    encode = codec.encode

    def off_by_one(*args: Any, **options: Any) -> Any:
        return encode(*args, **options) + np.uint16(1)

    monkeypatch.setattr(codec, "encode", off_by_one)
    assert np.isnan(bench.measure("fp16", "nearest", 4096, 1)["torch"])


@pytest.mark.parametrize("option", ["--size", "--turns"])
def test_a_bad_number_is_refused(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["bench", "codec", option, "0"]) == 2
    assert f"argument {option}: expected an integer " in capsys.readouterr().err
