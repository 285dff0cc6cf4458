"""torch's wrappers of modules are found, even those created before halfstep was imported."""

from pathlib import Path

import forks

PROGRAM = """
import sys
import halfstep
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)

def wrap():
    fsdp = FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
    return DistributedDataParallel(torch.nn.Linear(2, 2)), fsdp

earlier = wrap()
optimizer = halfstep.AdamW([*earlier[0].parameters(), *earlier[1].parameters()])
later = wrap()

from halfstep.numerics.scaling.wrappers import wrapped_by

for index, name in enumerate(("DistributedDataParallel", "FullyShardedDataParallel")):
    assert set(wrapped_by(name)) == {earlier[index], later[index]}, name
torch.distributed.destroy_process_group()
"""


def test_modules_that_were_wrapped_before_the_import_are_known(tmp_path: Path) -> None:
    result = forks.run(["-c", PROGRAM, tmp_path / "store"])
    assert result.returncode == 0, result.stderr
