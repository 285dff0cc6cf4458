"""Save checkpoints until killed, and print a line for each: `python save_forever.py FOLDER`."""

from __future__ import annotations

import sys

import torch

from halfstep.integrations import checkpoint

folder = sys.argv[1]
step = max([number for number, _ in checkpoint.checkpoints(folder)], default=-1)
while True:
    step += 1
    checkpoint.save(folder, step, {"step": step, "weights": torch.full((300_000,), float(step))})
    print(step, flush=True)
