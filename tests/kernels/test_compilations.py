"""How often kernels are compiled: once per code path, not once per length, number of tensors or option.

Triton compiles a kernel anew for each integer argument that is 1, that 16 divides, or that takes 64 bits. Here launches
are recorded in a process of their own, and told apart as Triton's cache would; nothing is compiled, so that no compiler
and no GPU is needed.
"""

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

LAUNCHES = """
import json
import torch
import halfstep
from halfstep.bench.audit.families import adam, cast, loss_scale, sgd, softmax, statistics, unscale
from halfstep.bench.audit.launches import recording
from halfstep.kernels import backend
from halfstep.kernels.softmax import dispatch

families = adam, cast, loss_scale, sgd, softmax, statistics, unscale
LENGTHS = [*range(1, 19), 24, 31, 32, 33, 34, 40, 48, 64]


def both_ways(x, dim=-1, exact=True, **options):
    y = halfstep.softmax(x, dim, precision="exact" if exact else "fast", **options)
    dispatch.backward(y, y, dim, 1.0, options.get("causal", False), False, exact, y.dtype)


def short_rows(causal):
    for shape in ((7, None), (None, 64, None), (2, 3, None, None)):
        for length in LENGTHS:
            both_ways(torch.empty([length if size is None else size for size in shape]), causal=causal)


def one_mask_for_all_queries():
    for length in LENGTHS:
        halfstep.softmax(torch.empty(2, 3, length, length), mask=torch.empty(2, 1, 1, length, dtype=torch.bool))


def another_dimension():
    for length in LENGTHS:
        both_ways(torch.empty(length, length, 64), -2, False)


def long_rows():
    for rows in (1, 2, 5, 8):
        for length in range(2**19, 2**20, 2**17 - 80):
            both_ways(torch.empty(rows, length))


def rows_that_begin_anywhere():
    for begin in range(8):
        both_ways(torch.empty(7 * 33 + begin)[begin:].view(7, 33))


def lists_of_tensors():
    for count in LENGTHS:
        grads = [torch.empty(5 + index) for index in range(count)]
        halfstep.foreach_check(grads)
        halfstep.foreach_cast(grads, torch.float8_e5m2)
        optimizer = halfstep.AdamW([torch.nn.Parameter(grad) for grad in grads])
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()


def lists_of_two_dtypes():
    for count in LENGTHS:
        halfstep.foreach_check([*(torch.empty(3) for _ in range(count)), torch.empty(3, dtype=torch.bfloat16)])


def one_tensor():
    for length in LENGTHS:
        for begin in (0, 1):
            x = torch.empty(length + begin)[begin:]
            halfstep.cast(x, torch.bfloat16, rounding="stochastic", seed=length, offset=length)


def options_of_scalers():
    for interval in (1, 2000, 2001):
        for hysteresis in (1, 2, 16):
            scaler = halfstep.GradScaler("cpu", growth_interval=interval, hysteresis=hysteresis)
            parameter = torch.nn.Parameter(torch.empty(3))
            parameter.grad = scaler.scale(torch.empty(3))
            scaler.step(halfstep.AdamW([parameter]))
            scaler.update()


def amp_step(**options):
    # After a first step, which creates the state.
    parameters = [torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in ((64, 64), (64, 65), (64,))]
    optimizer, scaler = halfstep.AdamW(parameters, **options), halfstep.GradScaler("cpu")

    def step():
        scaler.scale(sum(parameter.sum() for parameter in parameters)).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    step()
    return step


def large():
    # Sizes and steps that need 64 bits. The memory is never touched.
    for beyond in (0, 2**31):
        halfstep.cast(torch.empty(beyond + 80, dtype=torch.float8_e5m2), torch.float8_e4m3fn)
        for shape, steps in (((2, 32), (beyond + 64, 1)), ((32, 2), (1, beyond + 64))):
            x, mask = (torch.empty(beyond + 128, dtype=dtype) for dtype in (torch.bfloat16, torch.bool))
            x, mask = x.as_strided(shape, steps), mask.as_strided(shape, steps)
            for dim in (0, 1):
                halfstep.softmax(x, dim, precision="fast")
                halfstep.softmax(x, dim, mask=mask, precision="fast")
                halfstep.softmax(x.contiguous(), dim, mask=mask, precision="fast")


def one_number_of_several():
    # Of three numbers, the address of one is a multiple of 16.
    for number in torch.ones(3):
        parameter = torch.nn.Parameter(torch.ones(5))
        parameter.grad = torch.ones(5)
        halfstep.foreach_check([parameter.grad], number)
        optimizer = halfstep.AdamW([parameter])
        optimizer.grad_scale = number
        optimizer.step()
        optimizer.found_inf = number
        optimizer.step()
        scaler = halfstep.GradScaler("cpu")
        scaler.scale(number)
        scaler._scale = number
        scaler.step(optimizer)
        scaler.update()


jobs = {
    "AMP step": amp_step(),
    "AMP step, 8 bits": amp_step(state_dtype="8bit"),
    "short rows": lambda: short_rows(False),
    "short rows, causal": lambda: short_rows(True),
    "one mask for all queries": one_mask_for_all_queries,
    "another dimension": another_dimension,
    "long rows": long_rows,
    "rows that begin anywhere": rows_that_begin_anywhere,
    "lists of tensors": lists_of_tensors,
    "lists of two dtypes": lists_of_two_dtypes,
    "one tensor": one_tensor,
    "options of scalers": options_of_scalers,
    "large": large,
    "one number of several": one_number_of_several,
    "audit": lambda: [variant.launch() for family in families for variant in family.variants()],
}


class Asked(dict):
    # Takes the place of what was compiled, and notes what is looked up.
    def get(self, form):
        asked.append(form)
        return None


def record(target):
    global asked
    backend._compiled = Asked()
    result, of_triton = {"launches": {}}, {}
    for name, job in jobs.items():
        forms, asked = {}, []
        with recording(target) as launches:
            job()
        result["launches"][name] = len(launches)
        for form, launch in zip(asked, launches, strict=True):
            of_triton.setdefault(form, set()).add(launch.key)
        for launch in launches:
            forms.setdefault(launch.kernel.__name__, set()).add(launch.key)
        result[name] = {kernel: len(keys) for kernel, keys in forms.items()}
    result["several of Triton's"] = {str(form): sorted(keys) for form, keys in of_triton.items() if len(keys) > 1}
    return result


print(json.dumps({target: record(target) for target in ("sm_90", "gfx942")}))
"""


@functools.cache
def recorded() -> dict[str, dict[str, Any]]:
    """By target, how many forms of each kernel a job needs; and what `launch_kernel` takes for one form and is not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", LAUNCHES], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Of up to 64 columns, in vectors of 1, 2 and 4 elements of fp32: a few numbers of parts for each power of two, with and
# without elements beyond the end.
ROW_FORMS = 21
ROWS = ("forward_row_kernel", "backward_row_kernel")
LISTS = ("check_kernel", "finish_kernel", "cast_kernel", "multi_cast_kernel", "prepare_kernel", "adam_kernel")


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        pytest.param("short rows", dict.fromkeys(ROWS, ROW_FORMS), marks=pytest.mark.exhaustive),
        ("short rows, causal", dict.fromkeys(ROWS, ROW_FORMS)),
        ("one mask for all queries", {"forward_row_kernel": ROW_FORMS}),
        # Tiles of 1, 2, 4, 8, 16, 32 and 64 columns; forward 16, 32 and 48 are forms of their own.
        ("another dimension", {"forward_strided_kernel": 7 + 3, "backward_strided_kernel": 7}),
        # Rows that a multiple of their groups fills and others; two launches each.
        ("long rows", {"forward_row_kernel": 4, "backward_row_kernel": 4}),
        # Of addresses, Triton asks whether 16 divides them; y and the gradients are allocated where it does.
        ("rows that begin anywhere", {"forward_row_kernel": 2, "backward_row_kernel": 1}),
        ("lists of tensors", dict.fromkeys(LISTS, 1)),
        ("lists of two dtypes", {"check_kernel": 2, "finish_kernel": 1}),
        ("one tensor", {"cast_kernel": 1}),
        ("options of scalers", {"loss_scale_kernel": 1}),
    ],
)
def test_a_kernel_is_compiled_once_per_code_path(job: str, expected: dict[str, int]) -> None:
    forms = recorded()["sm_90"][job]
    assert {kernel: forms[kernel] for kernel in expected} == expected
    assert forms == expected or job == "options of scalers"


def test_the_launches_of_a_step_that_the_readme_names() -> None:
    """With moments in 8 bits, those of vectors are in fp32, and take the two launches of another layout."""
    launches = recorded()["sm_90"]["launches"]
    assert (launches["AMP step"], launches["AMP step, 8 bits"]) == (5, 7)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_what_is_launched_again_is_what_triton_would_choose(target: str) -> None:
    assert recorded()[target]["several of Triton's"] == {}
