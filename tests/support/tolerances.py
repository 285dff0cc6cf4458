"""Every tolerance of the test suite, with its reason. What is not listed here is compared bit for bit."""

from __future__ import annotations

import torch

# Unit roundoff: half an ulp relative to the value.
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
