"""Batches are a pure function of seed, step and row; text that cannot be trained on is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from corpus import Corpus, _mix, read_corpus

from halfstep.cli.command_line import UsageError


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = tmp_path / "text"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes())
    return read_corpus(path, 32)


def test_batches_repeat_differ_and_are_divided_among_ranks(corpus: Corpus) -> None:
    def inputs(seed: int, step: int, start: int, stop: int) -> torch.Tensor:
        return corpus.batch(seed, step, range(start, stop), 32)[0]

    whole = inputs(3, 7, 0, 12)
    assert torch.equal(whole, torch.cat([inputs(3, 7, start, start + 4) for start in (0, 4, 8)]))
    assert not torch.equal(whole, inputs(4, 7, 0, 12)) and not torch.equal(whole, inputs(3, 8, 0, 12))
    fixed = corpus.validation(range(0, 16), 16, 32)[0]
    assert torch.equal(fixed, torch.cat([corpus.validation(range(at, at + 8), 16, 32)[0] for at in (0, 8)]))
    for windows, count in ((whole, 12), (fixed, 16)):
        assert len({tuple(row.tolist()) for row in windows}) == count


def test_the_windows_of_a_batch_never_change() -> None:
    # recorded: a checkpoint of today must resume on the same batches with every later version
    assert int(_mix(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF  # splitmix64's published first output
    corpus = Corpus("", 1, np.arange(200, dtype=np.uint8), np.arange(40, dtype=np.uint8), "", 0.0)
    assert corpus.batch(0, 0, range(4), 8)[0][:, 0].tolist() == [81, 160, 46, 83]
    assert corpus.batch(2**63 - 1, 10**9, range(2), 8)[0][:, 0].tolist() == [140, 157]


def test_targets_are_the_next_bytes_of_the_same_part(corpus: Corpus) -> None:
    train, val = corpus.train.tobytes(), corpus.val.tobytes()
    for part, (inputs, targets) in (
        (train, corpus.batch(0, 0, range(50), 32)),
        (val, corpus.validation(range(0, 50), 50, 32)),
    ):
        for window, target in zip(inputs.tolist(), targets.tolist(), strict=True):
            assert window[1:] == target[:-1]
            assert bytes([*window, target[-1]]) in part
    assert (len(train), len(val)) == (4500, 500)


def test_a_folder_is_read_whole_in_an_order_of_names_only(tmp_path: Path) -> None:
    names = ["a.txt", "b/c.bin", "b/d/e", ".hidden", "b/.git/f", "empty"]
    for folder, order in (("one", names), ("two", names[::-1])):
        for name in order:
            file = tmp_path / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"" if name == "empty" else name.encode() * 40)
    one, two = (read_corpus(tmp_path / folder, 16) for folder in ("one", "two"))
    assert one.sha256 == two.sha256
    assert one.files == 3
    assert len(one.train) + len(one.val) == 40 * (5 + 7 + 5)


def test_bad_text_is_refused_with_path_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"x" * 65)
    (tmp_path / "exact").write_bytes(b"x" * 66)
    (tmp_path / "folder").mkdir()
    for name, words in (
        ("missing", "does not exist; pass a file"),
        ("empty", "but got 0 in "),
        ("short", r"expected at least 66 bytes .* but got 65 in .*: .* smaller --size"),
        ("folder", "but got 0 in "),
    ):
        with pytest.raises(UsageError, match=words):
            read_corpus(tmp_path / name, 32)
    exact = read_corpus(tmp_path / "exact", 32)
    assert exact.batch(0, 0, range(3), 32)[0].shape == exact.validation(range(3), 3, 32)[0].shape == (3, 32)
