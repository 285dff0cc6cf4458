"""Metadata of sharded checkpoints that does not describe its tensors and files: each fault is refused and named."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from halfstep.integrations import checkpoint_metadata
from halfstep.integrations.checkpoint_files import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

NAME = "model.weight"
TENSOR = f"its tensor '{NAME}' of shape [4, 3]"
INDEX = MetadataIndex(NAME, torch.Size([0, 0]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {"model": {"weight": torch.arange(12.0).view(4, 3)}, "seen": 5}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_what_torch_wrote_is_read(folder: Path) -> None:
    found = checkpoint_metadata.read(folder)
    assert found.state_dict_metadata[NAME].size == (4, 3)
    assert found.planner_data == {NAME: ("model", "weight"), "seen": ("seen",)}


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^its file \.metadata is missing$"):
        checkpoint_metadata.read(tmp_path)


def set_to(field: str, value: Any) -> Callable[[Any], None]:
    """A change of a field of the metadata."""
    return lambda metadata: object.__setattr__(metadata, field, value)


def parts(*ranges: tuple[int, int]) -> Callable[[Any], None]:
    """The tensor consists of these ranges of its rows."""

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[NAME].chunks[:] = [
            ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([rows, 3])) for first, rows in ranges
        ]

    return change


def in_part(field: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata[NAME].chunks[0], field, value)


def in_storage(field: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata.storage_data[INDEX], field, value)


def of_another_index(metadata: Any) -> None:
    index = MetadataIndex(NAME)
    object.__setattr__(index, "offset", (0, 0))
    metadata.storage_data[index] = metadata.storage_data.pop(INDEX)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to("state_dict_metadata", []), "the list of tensors"),
        (set_to("storage_data", None), "the list of byte ranges"),
        (lambda metadata: metadata.state_dict_metadata.update({5: None}), "a name"),
        (lambda metadata: metadata.planner_data.update({"x": ("x",)}), "it has a path for 'x', but no such entry"),
        (lambda metadata: metadata.planner_data.update({NAME: "model"}), "a path"),
        (lambda metadata: metadata.planner_data.update({NAME: ("model", 2**31)}), "a path"),
        (lambda metadata: metadata.planner_data.update({NAME: ("model", 1.5)}), "a path"),
        (lambda metadata: setattr(metadata.state_dict_metadata[NAME], "properties", None), "a dtype"),
        (lambda metadata: setattr(metadata.state_dict_metadata[NAME], "size", (4, 3)), "a tensor's entry"),
        (in_part("offsets", (0, 0)), "a tensor's part"),
        (
            in_part("sizes", torch.Size([4, 4])),
            f"{TENSOR} has a part that extends beyond it",
        ),
        (parts((0, 2)), f"{TENSOR} has parts that do not cover it exactly"),
        (parts((0, 2), (1, 2)), f"{TENSOR} has parts that overlap"),
        (of_another_index, "a tensor's offset"),
        (lambda metadata: metadata.storage_data.pop(INDEX), f"it has no byte range for '{NAME}', or one that is too"),
        (in_storage("length", 47), f"it has no byte range for '{NAME}', or one that is too short"),
        (in_storage("length", -1), "a length"),
        (in_storage("offset", 2**63), "an offset"),
        (in_storage("relative_path", "../x"), "expected the name of a file in the folder, but got '../x'"),
        (in_storage("length", 2**40), "it does not match the file __0_0.distcp"),
    ],
)
def test_a_fault_is_refused_and_named(folder: Path, change: Callable[[Any], None], message: str) -> None:
    path = folder / checkpoint_metadata.METADATA
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError) as raised:
        checkpoint_metadata.read(folder)
    assert str(raised.value).startswith("its .metadata cannot be used: ") and message in str(raised.value)
