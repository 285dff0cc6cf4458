"""What a sharded checkpoint refuses on one rank, the others being imagined."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from halfstep.integrations import checkpoint_sharded
from halfstep.integrations.checkpoint_files import CheckpointError


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


def test_uneven_parts_are_refused_where_torch_misplaces_them(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(rows: int, *dims: int) -> None:
        value: DTensor = distribute_tensor(torch.zeros(rows, 6), mesh, [Shard(dim) for dim in dims])
        checkpoint_sharded._serialize_beside({"model": {"up.weight": value}}, {}, io.BytesIO())

    keep(6, 0, 0)
    monkeypatch.setattr(checkpoint_sharded, "UNEVEN_PARTS_SINCE", (99, 0))
    keep(8, 0, 0)
    keep(6, 0, 1)
    with pytest.raises(CheckpointError) as error:
        keep(6, 0, 0)
    assert str(error.value) == (
        "dimension 0 of model.up.weight has 6 elements, which 2 x 2 ranks do not divide; torch "
        f"{torch.__version__} would save and load its parts at wrong places; use a size that they divide, or torch "
        "2.13 or later"
    )
