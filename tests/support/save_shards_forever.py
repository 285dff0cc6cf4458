"""One of two ranks that save shards until killed: python save_shards_forever.py RANK PORT FOLDER.

Prints each step once its checkpoint is on disk, and the error that ends it if the other rank is gone.
"""

import itertools
import os
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

import halfstep
from halfstep.integrations import checkpoint

NUMBERS = 200_000


def model_of() -> torch.nn.Module:
    return torch.nn.Linear(NUMBERS, 1, bias=False).bfloat16()


def main(rank: int, port: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = model_of()
    fully_shard(model, shard_placement_fn=lambda parameter: torch.distributed.tensor.Shard(1))
    optimizer = halfstep.AdamW(model.parameters())
    try:
        for step in itertools.count():
            with torch.no_grad():
                model.weight.fill_(float(step))  # type: ignore[union-attr,operator]
            state = {"step": step}
            if step % 2:
                checkpoint.save(folder, step, state, model=model, optimizer=optimizer, asynchronous=True).result()
            else:
                checkpoint.save(folder, step, state, model=model, optimizer=optimizer)
            print(step, flush=True)
    except checkpoint.CheckpointError as error:
        print(f"ended: {error}", flush=True)
    os._exit(0)  # torch's teardown waits for the rank that is gone


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
