"""Overflow in other libraries' casts, as the lookup describes it, against the installed torch and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch
from lookup_run import lines, results

NEW_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
CASTS = {
    "torch": lambda value, dtype: torch.tensor(value).to(getattr(torch, dtype)).float().item(),
    "ml_dtypes": lambda value, dtype: float(np.array(value).astype(getattr(ml_dtypes, dtype))),
}
STORED = {"e4m3fn": {"torch": "448.0" if NEW_TORCH else "nan", "ml_dtypes": "nan"}}
STORED["e5m2"] = dict.fromkeys(CASTS, "inf")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("format", "limit"), [("e4m3fn", 464.0), ("e5m2", 61440.0)])
@pytest.mark.parametrize("library", CASTS)
def test_overflow_matches_installed_libraries(library: str, format: str, limit: float) -> None:
    beyond = np.nextafter(np.float32(limit), np.float32("inf")) if format == "e4m3fn" else limit
    for value in (float(beyond), 1e9, float("inf")):
        assert str(CASTS[library](value, f"float8_{format}")) == STORED[format][library], value
    below = float(np.nextafter(np.float32(limit), np.float32(0)))
    assert CASTS[library](below, f"float8_{format}") == {"e4m3fn": 448, "e5m2": 57344}[format]


def test_e8m0_has_no_sign_in_torch() -> None:
    assert CASTS["torch"](-3.0, "float8_e8m0fnu") == 4 and CASTS["torch"](0.0, "float8_e8m0fnu") == 2.0**-127
    assert str(CASTS["ml_dtypes"](-3.0, "float8_e8m0fnu")) == "nan"


def test_overflow_elsewhere_is_described() -> None:
    for number, format, words in (
        ("465", "e4m3", "the largest number in torch from 2.12 on"),
        ("-inf", "e5m2", "the largest number in NVIDIA's instructions"),
    ):
        for command in (("encode", number, "-f", format), ("why", number, format)):
            assert results(*command)[0]["elsewhere"].startswith(words)
    assert results("encode", "464", "-f", "e4m3")[0]["elsewhere"] is None
    assert results("why", "1e9", "fp16")[0]["elsewhere"] is None
    shown = " ".join(" ".join(lines("encode", "500", "-f", "e4m3", "e5m2")).split())
    assert "e4m3fn elsewhere the largest number in torch" in shown and "e5m2 elsewhere" not in shown
