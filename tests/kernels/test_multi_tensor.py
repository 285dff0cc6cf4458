"""The device table and the checks of lists: the content of rows, when they are written, and errors."""

import threading

import pytest
import torch
from errors import error_of
from implementations import using

import halfstep
from halfstep.kernels.multi_tensor import ADDRESSES, FIRST_CHUNK, NUMEL, TableCache, TensorTable, check_tensor_list

CPU = torch.device("cpu")


def test_rows_hold_sizes_first_chunks_and_addresses() -> None:
    table = TensorTable([5, 0, 4, 1, 9], operands=2, chunk=4, device=CPU)
    assert table.rows.dtype == torch.int64 and table.chunk_tensor.dtype == torch.int32
    assert table.rows[NUMEL].tolist() == [5, 0, 4, 1, 9]
    assert table.rows[FIRST_CHUNK].tolist() == [0, 2, 2, 3, 4]
    assert table.chunk_tensor.tolist() == [0, 0, 2, 3, 4, 4, 4]
    assert (table.tensors, table.chunks, table.chunk) == (5, 7, 4)
    assert table.written[0] is None and table.written[1] is None
    table.write(1, [10, 20, 30, 40, 2**63 - 1])
    assert table.rows[ADDRESSES + 1].tolist() == [10, 20, 30, 40, 2**63 - 1]
    assert table.rows[ADDRESSES].tolist() == [0] * 5
    assert table.written[1] == [10, 20, 30, 40, 2**63 - 1]


def test_sizes_beyond_32_bits() -> None:
    """Rows only: no tensor of that size is made."""
    huge = 2**40
    table = TensorTable([7, huge + 1, 7], operands=1, chunk=2**20, device=CPU)
    assert table.rows[NUMEL].tolist() == [7, huge + 1, 7]
    assert table.rows[FIRST_CHUNK].tolist() == [0, 1, 2 + 2**20]
    assert table.chunks == 3 + 2**20
    assert table.chunk_tensor[[0, 1, 2**20 + 1, 2**20 + 2]].tolist() == [0, 1, 1, 2]
    # What every kernel computes: the element a chunk starts at, chunk * size in 64 bits.
    chunk = torch.tensor(2**20 + 1, dtype=torch.int32)
    start = (chunk - table.rows[FIRST_CHUNK, 1]) * table.chunk
    assert start.dtype == torch.int64 and start.item() == huge


def test_too_many_chunks_for_one_launch_are_refused_before_anything_is_made() -> None:
    assert error_of(ValueError, lambda: TensorTable([2**62, 5], operands=1, chunk=4096, device=CPU)) == (
        f"Expected at most 2^31 - 1 chunks of 4096 elements for one launch, but got {2**50 + 1}: split the list"
    )


def test_the_cache_finds_a_table_again_and_follows_its_tensors() -> None:
    cache = TableCache(operands=2, chunk=4)
    first, second = [torch.ones(5), torch.ones(6)], [torch.ones(5), torch.ones(6)]
    table = cache.table(first, second)
    assert table.rows[ADDRESSES].tolist() == [t.data_ptr() for t in first]
    assert table.rows[ADDRESSES + 1].tolist() == [t.data_ptr() for t in second]
    version = table.rows._version
    assert cache.table(first, second) is table and table.rows._version == version
    assert cache.table(second, first) is table
    assert table.rows[ADDRESSES].tolist() == [t.data_ptr() for t in second]
    assert cache.table([torch.ones(6), torch.ones(5)], first) is not table, "other sizes, another table"


def test_threads_do_not_read_each_others_tables() -> None:
    """Lists of the same sizes at the same time: a table shared between threads gave one thread the other's sums."""
    wrong: list[float] = []

    def work(value: float) -> None:
        tensors = [torch.full((4 * 4096,), value) for _ in range(20)]
        expected = value * value * 20 * 4 * 4096
        for _ in range(100):
            found = halfstep.foreach_check(tensors).sum_of_squares.item()
            if found != expected:
                wrong.append(found)

    with using("native", "unscale"):
        threads = [threading.Thread(target=work, args=(float(value),)) for value in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


# -------------------------------------------------------------------------------------------------------------- checks

REMEDY = ": use torch.as_tensor() or leave it out"


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (torch.ones(3), TypeError, "Expected grads to be a list of tensors, but got one tensor: pass [grads]"),
        ([torch.ones(1), None], TypeError, "Expected grads[1] to be a tensor, but got a NoneType" + REMEDY),
        ([1.0], TypeError, "Expected grads[0] to be a tensor, but got a float" + REMEDY),
        (
            [torch.ones(2).to_sparse()],
            TypeError,
            "Expected grads[0] to be a dense tensor, but got layout torch.sparse_coo: use .to_dense()",
        ),
        (
            [torch.ones(1), torch.ones(2).double()],
            TypeError,
            "Expected grads[1] to have dtype float32, float16 or bfloat16, but got torch.float64: "
            "convert it with .to() or leave it out",
        ),
        (
            [torch.ones(1), torch.ones(1, device="meta")],
            ValueError,
            "Expected grads[1] to be on the device of grads[0], cpu, but got meta: call once per device",
        ),
    ],
)
def test_bad_lists_are_refused(tensors: object, error: type[Exception], message: str) -> None:
    assert error_of(error, lambda: check_tensor_list(tensors, "grads")) == message  # type: ignore[arg-type]
