"""Encode all 2^32 fp32 patterns with `halfstep.encode`, and compare with torch and ml_dtypes.

    python tests/support/codec_walk.py FORMAT ...    walks these (all seven without one), prints what was counted
    python tests/support/codec_walk.py --record      also writes it to tests/numerics/formats/codec_certificate.json

One core, a minute or two per format. The digest is SHA-256 of the codes in the order of the patterns, little-endian.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

import halfstep
from halfstep.numerics.formats.table import formats

FORMATS = ("fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
CERTIFICATE = Path(__file__).resolve().parents[1] / "numerics" / "formats" / "codec_certificate.json"
CHUNK = 2**22


def is_nan(codes: np.ndarray, name: str) -> np.ndarray:
    """Whether codes are NaN, by the definition of each format."""
    if name in ("fp16", "bf16", "e5m2"):
        infinity = {"fp16": 0x7C00, "bf16": 0x7F80, "e5m2": 0x7C}[name]
        return codes & (codes.dtype.type(0xFFFF if codes.itemsize == 2 else 0xFF) >> 1) > infinity
    if name == "e4m3fn":
        return codes & 0x7F == 0x7F
    return codes == (0xFF if name == "e8m0fnu" else 0x80)


def by_torch(values: np.ndarray, name: str) -> np.ndarray:
    """The codes that torch converts to."""
    dtype = getattr(torch, str(formats[name].torch))
    carrier = torch.int16 if formats[name].bits == 16 else torch.uint8
    codes = torch.from_numpy(values).to(dtype).view(carrier).numpy()
    return codes.view(np.uint16) if codes.dtype == np.int16 else codes


def torch_saturates() -> bool:
    """Whether torch's conversion to float8_e4m3fn gives its largest number on overflow, as it does since 2.12."""
    return bool(torch.tensor(1e9).to(torch.float8_e4m3fn).float() == 448)


def by_ml_dtypes(values: np.ndarray, name: str) -> np.ndarray | None:
    """The codes that ml_dtypes converts to; it has no fp16."""
    if name == "fp16":
        return None
    with np.errstate(all="ignore"):
        result = values.astype(getattr(ml_dtypes, str(formats[name].ml_dtypes)))
    return result.view(np.uint16 if formats[name].bits == 16 else np.uint8)


def explained(values: np.ndarray, ours: np.ndarray, theirs: np.ndarray, name: str, who: str) -> Counter[str]:
    """The number of patterns with equal codes, and of others by reason. ``"unexplained"`` must not occur.

    A NaN equals any NaN: which one is a choice of each library's.
    """
    alike = (ours == theirs) | (is_nan(ours, name) & is_nan(theirs, name))
    counts = Counter({"alike": int(alike.sum())})
    other = np.flatnonzero(~alike)
    if not other.size:
        return counts
    x, mine, yours = values[other], ours[other], theirs[other]
    rest = np.ones(other.size, bool)

    def because(reason: str, where: np.ndarray) -> None:
        nonlocal rest
        found = rest & where
        if found.any():
            counts[f"{who}: {reason}"] += int(found.sum())
        rest = rest & ~found

    if name == "e4m3fn" and who == "torch":
        saturated = (yours & 0x7F == 0x7E) & is_nan(mine, name) & (np.signbit(x) == (yours >= 0x80))
        because("saturates, infinities too, since 2.12", saturated & (np.abs(x) > 464))
    if name == "e8m0fnu":
        if who == "torch":
            because("drops the sign of negative numbers", (x < 0) & (yours == by_torch(-x, name)) & is_nan(mine, name))
        else:
            because("zero is NaN", (x == 0) & is_nan(yours, name) & (mine == 0))
        low = (x > 2.0**-127) & (x < 1.5 * 2.0**-127)
        because("between 2^-127 and 1.5 * 2^-127 goes to 2^-126, which is farther", low & (mine == 0) & (yours == 1))
    if rest.any():
        counts["unexplained"] = int(rest.sum())
        first = int(other[np.flatnonzero(rest)[0]])
        print(f"{name}, {who}: {values[first]!r} ours {ours[first]:#x} theirs {theirs[first]:#x}", file=sys.stderr)
    return counts


def walk(name: str, total: int = 2**32, step: int = 1) -> dict[str, object]:
    """Encode every `step`-th pattern below `total`. Returns the counts and the digest of the codes."""
    digest, counts, nans = hashlib.sha256(), Counter[str](), 0
    for start in range(0, total, CHUNK * step):
        patterns = np.arange(start, min(start + CHUNK * step, total), step, dtype=np.uint64).astype(np.uint32)
        values = patterns.view(np.float32)
        ours = halfstep.encode(values, name)
        digest.update(ours.astype(ours.dtype.newbyteorder("<"), copy=False).tobytes())
        nan = np.isnan(values)
        nans += int(nan.sum())
        assert is_nan(ours[nan], name).all(), "a NaN was lost"
        for who, theirs in (("torch", by_torch(values, name)), ("ml_dtypes", by_ml_dtypes(values, name))):
            if theirs is not None:
                found = explained(values, ours, theirs, name, who)
                counts[f"{who}: alike"] += found.pop("alike")
                counts += found
    return {"patterns": len(range(0, total, step)), "NaN": nans, **dict(sorted(counts.items())),
            "sha256": digest.hexdigest()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.formats:
        start = time.perf_counter()
        result = walk(name)
        print(f"{name} {(time.perf_counter() - start) / 60:.1f} min {json.dumps(result)}", flush=True)
        if options.record:
            known = json.loads(CERTIFICATE.read_text()) if CERTIFICATE.exists() else {}
            CERTIFICATE.write_text(json.dumps({**known, name: result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
