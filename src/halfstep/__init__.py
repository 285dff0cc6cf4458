"""Half-precision training for PyTorch with less memory and less memory traffic.

Public names are loaded at their first use, so that `import halfstep` imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from halfstep._version import __version__
from halfstep.numerics import messages

if TYPE_CHECKING:
    from halfstep.integrations.doctor import doctor
    from halfstep.integrations.monitor import AmpMonitor
    from halfstep.integrations.optim import SGD, Adam, AdamW, Muon, muon_groups
    from halfstep.integrations.precision import cast_parameters
    from halfstep.integrations.scheduler import SkipAwareScheduler
    from halfstep.kernels.backend import backend
    from halfstep.kernels.cast import cast, foreach_cast
    from halfstep.kernels.log_probabilities import cross_entropy, log_probabilities
    from halfstep.kernels.softmax import log_softmax, softmax
    from halfstep.kernels.unscale import foreach_check, foreach_unscale_
    from halfstep.numerics.formats.codec import decode, encode, round_to
    from halfstep.numerics.formats.table import formats
    from halfstep.numerics.scaling.scaler import GradScaler
    from halfstep.numerics.statistics.advice import advise_scale
    from halfstep.numerics.statistics.counts import statistics

_NAMES = {
    "integrations.doctor": "doctor",
    "integrations.monitor": "AmpMonitor",
    "integrations.optim": "SGD Adam AdamW Muon muon_groups",
    "integrations.precision": "cast_parameters",
    "integrations.scheduler": "SkipAwareScheduler",
    "kernels.backend": "backend",
    "kernels.cast": "cast foreach_cast",
    "kernels.log_probabilities": "cross_entropy log_probabilities",
    "kernels.softmax": "log_softmax softmax",
    "kernels.unscale": "foreach_check foreach_unscale_",
    "numerics.formats.codec": "decode encode round_to",
    "numerics.formats.table": "formats",
    "numerics.scaling.scaler": "GradScaler",
    "numerics.statistics.advice": "advise_scale",
    "numerics.statistics.counts": "statistics",
}
_HOME = {name: f"halfstep.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "SGD", "Adam", "AdamW", "AmpMonitor", "GradScaler", "Muon", "SkipAwareScheduler", "__version__", "advise_scale",
    "backend", "cast", "cast_parameters", "cross_entropy", "decode", "doctor", "encode", "foreach_cast",
    "foreach_check", "foreach_unscale_", "formats", "log_probabilities", "log_softmax", "muon_groups", "round_to",
    "softmax", "statistics",
]  # fmt: skip

messages.presenter = "halfstep.cli.results"  # results do not know who words and draws them


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}; public names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
