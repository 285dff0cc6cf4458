"""Optimizers on the host: the bits of a step on the device, and only weights in device memory."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import error_of, refuses
from layouts import Layouts, some
from release_models import BF16, Net, gradient_bytes, loss_of, made, same
from stream_model import Model
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import halfstep
from halfstep.integrations.offload import OffloadedAdam, OffloadedAdamW, OffloadedMuon
from halfstep.integrations.release import step_in_backward
from halfstep.kernels import adam, muon
from halfstep.numerics.planning import plan, unit
from halfstep.numerics.scaling.sharding import Sharding, is_sharded, local

FP16 = torch.float16
LAYOUTS: Layouts = {
    **some("split", "split24, 8 bits"),
    "full, amsgrad": (BF16, {"master_weights": "full", "amsgrad": True}),
    "fp32, clipped": (torch.float32, {"max_grad_norm": 3.4}),
}
MODES: tuple[Any, ...] = ("copy", "step", None)
Run = tuple[Net, Any]


def _pair(layout: str, mode: Any, bucket_bytes: int = 400) -> tuple[Run, Run]:
    """A run on the device, and one whose optimizer is offloaded."""
    (dtype, options), muon = LAYOUTS[layout.removeprefix("Muon, ")], layout.startswith("Muon")
    device, host = made(dtype), made(dtype)
    on_device, on_host = (halfstep.Muon, OffloadedMuon) if muon else (halfstep.AdamW, OffloadedAdamW)
    groups: Any = halfstep.muon_groups if muon else Net.parameters
    return (device, on_device(groups(device), lr=0.01, **options)), (
        host,
        on_host(groups(host), lr=0.01, in_backward=mode, bucket_bytes=bucket_bytes, **options),
    )


def _combined(layout: str, mode: Any) -> bool:
    return mode != "step" or "max_grad_norm" not in LAYOUTS[layout][1]


CASES = [(layout, mode) for layout in LAYOUTS for mode in MODES if _combined(layout, mode)]
CASES += [(f"Muon, {layout}", "copy") for layout in LAYOUTS if "amsgrad" not in layout] + [("Muon, split", None)]
cases = pytest.mark.parametrize(("layout", "mode"), CASES)


@contextmanager
def on_a_gpu(
    order: Any = "late",
    count: int = 3,
    seed: int = 0,
    size: int = 5,
    mesh: Any = None,
    dtype: Any = torch.float32,
    **options: Any,
) -> Iterator[tuple[Model, list[Any], OffloadedAdam]]:
    """Weights of 0 on a model of a GPU; Adam moves them by 0.5 in a step, against the sign of the gradient.

    With a mesh they are DTensors, sharded by rows.
    """
    with Model(order, seed=seed) as model:
        weights = [torch.zeros(size, dtype=dtype, device=model.device) for _ in range(count)]
        parameters = [torch.nn.Parameter(w) if mesh is None else _sharded(w, mesh) for w in weights]
        options = {"lr": 0.5, "betas": (0.0, 0.0), "eps": 0.0, "bucket_bytes": 20, **options}
        yield model, parameters, OffloadedAdam(parameters, **options)


def _give(optimizer: Any, parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """A complete gradient, as autograd or FSDP2 gives it: it is added to the one of an earlier backward."""
    if parameter.grad is None:
        parameter.grad = Sharding(parameter).like(grad)
    elif is_sharded(parameter):
        parameter.grad._local_tensor += grad  # type: ignore[attr-defined]
    else:
        optimizer._add(optimizer._mirrors[id(parameter)], grad)
    if optimizer.in_backward is not None:
        optimizer._take(parameter)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Of GPUs, with this rank alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cuda", [0], _init_backend=False)
    dist.destroy_process_group()


def _sharded(values: torch.Tensor, mesh: Any) -> torch.nn.Parameter:
    meta = TensorMeta(values.shape, values.stride(), values.dtype)
    return torch.nn.Parameter(DTensor(values, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False))


orders = pytest.mark.parametrize("order", ["late", "random", "at once"])


@cases
@pytest.mark.parametrize("bucket_bytes", [1, 400, 2**20])
def test_a_step_has_the_bits_of_a_step_on_the_device(layout: str, mode: Any, bucket_bytes: int) -> None:
    runs = _pair(layout, mode, bucket_bytes)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for _, optimizer in runs]
    for step in range(5):
        for (net, optimizer), scheduler in zip(runs, schedulers, strict=True):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            if optimizer is runs[1][1] and mode is not None:
                assert gradient_bytes(net) == 0
            optimizer.step()
            scheduler.step()
        assert same(*runs)
    assert gradient_bytes(runs[1][0]) == 0
    masters = runs[1][1].masters()
    for parameter, other in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
        assert torch.equal(masters[other], runs[0][1].masters()[parameter])
    assert set(masters) == set(runs[1][0].parameters()) and len(masters) == len(list(runs[1][0].parameters()))


@pytest.mark.parametrize("mode", ["copy", None])
def test_gradients_with_a_graph_and_those_that_autograd_does_not_store(mode: Any) -> None:
    runs = _pair("split", mode)
    for net, optimizer in runs:
        for step in range(3):
            net.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a reference cycle
                loss_of(net, step).backward(create_graph=True)
                loss_of(net, step).backward(create_graph=True)
            torch.autograd.grad(loss_of(net, step + 1), [net.first.weight, net.second.weight])  # stores nothing
            optimizer.step()
    assert same(*runs)


@orders
def test_what_is_added_to_a_gradient_may_be_written_at_once(order: str) -> None:
    with on_a_gpu(order, 1) as (model, (parameter,), optimizer):
        _give(optimizer, parameter, torch.full((5,), 3.0, device=model.device))
        assert parameter.grad is not None
        noise = torch.full((5,), -1.0, device=model.device)
        parameter.grad += noise
        noise.fill_(-9.0)
        assert parameter.grad.tolist() == [2.0] * 5
        parameter.grad.data = torch.full((5,), -4.0, device=model.device)
        assert parameter.grad.data.tolist() == [-4.0] * 5
        optimizer.step()
        assert parameter.tolist() == [0.5] * 5
    text = error_of(RuntimeError, lambda: setattr(parameter.grad, "data", torch.zeros(5, dtype=BF16)))
    assert "shape (5,) and dtype torch.float32" in text and "call zero_grad() first" in text


def test_groups_that_other_code_changes_in_place() -> None:
    """A parameter leaves, and returns with its state into a group of its own."""
    runs = _pair("split", "copy")
    for net, optimizer in runs:
        groups = optimizer.param_groups
        bias = net.norm.bias
        for step in range(6):
            if step == 2:
                groups[0]["params"] = [parameter for parameter in groups[0]["params"] if parameter is not bias]
            if step == 4:
                groups.append({**groups[0], "params": [bias], "lr": 0.1})
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
    assert same(*runs)


@orders
@pytest.mark.parametrize("mode", ["copy", None])
def test_writes_that_leave_no_trace_and_gradients_that_are_read_before_they_arrive(mode: Any, order: str) -> None:
    with on_a_gpu(order, in_backward=mode) as (model, parameters, optimizer):
        for step in range(3):
            for parameter in parameters:
                _give(optimizer, parameter, torch.full((5,), 3.0, device=model.device))
            if mode == "copy":
                assert parameters[0].grad is not None
                assert parameters[0].grad.norm().item() == pytest.approx(3 * 5**0.5)
            parameters[1].data.fill_(8.0 + step)  # on the device, after the gradients and before the step
            optimizer.step()
            torch.full((5,), 7.0, device=model.device)
            for parameter in parameters:
                parameter.grad = None
        assert [parameter.tolist()[0] for parameter in parameters] == [-1.5, 9.5, -1.5]


def test_weights_that_other_code_writes_arrive_before_they_are_read() -> None:
    """By `masters`, by a first step, which makes masters of them, and by a later one, which compares them."""
    with on_a_gpu(count=1) as (_, (parameter,), optimizer):
        parameter.data.fill_(3.0)
        assert optimizer.masters()[parameter].tolist() == [3.0] * 5
    with on_a_gpu(count=1, dtype=BF16, master_weights="full") as (_, (parameter,), optimizer):
        writes: list[tuple[float, Any]] = [
            (8.0, lambda: parameter.data.fill_(8.0)),
            (2.0, lambda: parameter.detach().fill_(2.0)),
            (6.0, lambda: setattr(parameter, "data", torch.full_like(parameter, 6.0))),
        ]
        for value, write in writes:
            write()
            _give(optimizer, parameter, torch.ones_like(parameter))
            optimizer.step()
            assert optimizer.state[parameter]["master"].tolist() == [value - 0.5] * 5


def test_refresh_master_takes_what_other_code_wrote() -> None:
    runs = _pair("split", "copy")
    for net, optimizer in runs:
        loss_of(net, 0).backward()
        optimizer.step()
        with torch.no_grad():
            net.first.weight.fill_(0.25)
        optimizer.refresh_master(net.first.weight)
        optimizer.refresh_master()
    assert same(*runs)
    text = "Expected parameters[0] to be a parameter of this optimizer"
    refuses(ValueError, text, lambda: runs[1][1].refresh_master(torch.ones(1)))


def test_a_parameter_that_is_given_twice_and_a_default_dtype_and_device(default_bf16: None) -> None:
    runs = _pair("split", "copy")
    for net, optimizer in runs:
        loss_of(net, 1).backward()
        with torch.device("meta"):
            optimizer.step()
    assert same(*runs)
    with torch.device("meta"), pytest.warns(UserWarning, match="duplicate parameters"):
        net = Net().to_empty(device="cpu").to(BF16)
        optimizer = OffloadedAdamW([*net.parameters(), net.norm.bias])
    assert all(mirror.host.device.type == "cpu" for mirror in optimizer._mirrors.values())


def test_the_device_holds_weights_only() -> None:
    """With the memory of the device counted by the model of a GPU."""
    with Model("late") as model:
        parameters = [torch.nn.Parameter(torch.zeros(1000, dtype=BF16, device=model.device)) for _ in range(4)]
        optimizer = OffloadedAdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
            optimizer._take(parameter)
        optimizer.step()
        state = [value for one in optimizer.state.values() for value in one.values()]
        assert state and all(model.memory.holds(one) is False for one in state)
        assert all(parameter.grad.untyped_storage().nbytes() == 0 for parameter in parameters)
        assert not optimizer._in_flight
        assert all(model.pinned.holds(mirror.host) for mirror in optimizer._mirrors.values())


@pytest.mark.parametrize("options", [{}, {"state_dtype": BF16}])
def test_the_host_holds_what_is_planned(options: dict[str, Any]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(50, 30), torch.nn.Linear(30, 50)).bfloat16()
    optimizer = OffloadedAdamW(net.parameters(), **options)
    net(torch.ones(2, 50, dtype=BF16)).sum().backward()
    optimizer.step()
    hosts = [mirror.host for mirror in optimizer._mirrors.values()]
    tensors = [*hosts, *(host.grad for host in hosts), *(v for one in optimizer.state.values() for v in one.values())]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    shapes = [parameter.shape for parameter in net.parameters()]
    row = "halfstep-split-bf16" if options else "halfstep-split"
    planned = plan(units=[unit("all", shapes)], optimizer=row, offload=True)
    assert sum(storages.values()) == planned.totals.host
    assert planned.totals.state == sum(p.untyped_storage().nbytes() for p in net.parameters())


@orders
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("mode", "micro"), [("copy", 1), ("copy", 2), (None, 1)])
@pytest.mark.parametrize("sharded", [False, True])
def test_any_order_of_streams_gives_the_same_weights(
    order: str, seed: int, mode: Any, micro: int, sharded: bool, mesh: Any
) -> None:
    """Gradients leave and weights return on streams of their own; compute reads and frees in between."""
    mesh = mesh if sharded else None
    with on_a_gpu(order, seed=seed, in_backward=mode, mesh=mesh) as (model, parameters, optimizer):
        for step in range(4):
            for factor in (-1.0, 2.0)[-micro:]:
                for number, parameter in enumerate(parameters):
                    sign = -1.0 if number == step % 3 else 1.0
                    _give(optimizer, parameter, torch.full((5,), factor * sign, device=model.device))
                    torch.full((5,), 7.0, device=model.device)  # in the memory of a gradient, if that is free too early
            assert all((one.host.grad is None) == (micro == 1) for one in optimizer._mirrors.values())
            optimizer.step()
            optimizer.zero_grad()
            read = [local(parameter.detach()) * 1.0 for parameter in parameters]  # before the next weights return
        for number, (parameter, before) in enumerate(zip(map(local, parameters), read, strict=True)):
            moves = sum(1.0 if number == step % 3 else -1.0 for step in range(4))
            assert parameter.tolist() == [0.5 * moves] * 5 and before.tolist() == parameter.tolist()
        assert model.pageable == [] or set(model.pageable) == {"a copy from the device"}  # tolist


MATRICES = ((33, 64), (17,), (96, 20), (48, 48), (2, 40, 72))


def _trained_by_muon(cls: Any, device: torch.device, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Weights and states after steps of which the second one overflows, with the first matrix on the CPU."""
    random = torch.Generator().manual_seed(0)
    devices = [torch.device("cpu"), *[device] * 4]
    values = [(torch.randn(shape, generator=random) * 0.1).bfloat16() for shape in MATRICES]
    parameters = [torch.nn.Parameter(value.to(on)) for value, on in zip(values, devices, strict=True)]
    vectors = [parameter for parameter in parameters if parameter.dim() == 1]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    optimizer = cls([{"params": matrices}, {"params": vectors, "algorithm": "adamw"}], lr=0.02, **options)
    scaler = halfstep.GradScaler("cpu", init_scale=1.0, growth_interval=1000)
    scaler.scale(torch.zeros(()))
    for step in range(4):
        for parameter in reversed(parameters):
            grad = torch.randn(parameter.shape, generator=random).bfloat16() * (torch.inf if step == 1 else 1)
            parameter.grad = grad.to(parameter.device)
            if options.get("in_backward"):
                optimizer._take(parameter)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.full((5000,), 7.0, device=device)  # in memory that was freed too early
    states = optimizer.canonical_state_dict()["state"]
    values = [*parameters, *(states[number][key] for number in sorted(states) for key in sorted(states[number]))]
    return [value.detach().cpu() for value in values], optimizer


@orders
@pytest.mark.parametrize("mode", ["copy", None])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit", "max_grad_norm": 30.0}], ids=["fp32", "8 bits"])
def test_matrices_are_orthogonalized_on_the_device(
    options: dict[str, Any], bucket_bytes: int, mode: Any, order: str
) -> None:
    """And have the bits of a step there, whatever streams are executed in between."""
    expected, _ = _trained_by_muon(halfstep.Muon, torch.device("cpu"), **options)
    offloaded = partial(OffloadedMuon, in_backward=mode, bucket_bytes=bucket_bytes)
    with Model(order) as model:
        tensors, optimizer = _trained_by_muon(offloaded, model.device, **options)
        scratch = optimizer._plans.scratch
        assert {use for on, _, use in scratch if on == model.device} == {"parts"}
        pinned = {use for (_, _, use), memory in scratch.items() if model.pinned.holds(memory)}
        assert pinned == {"pinned, 0", "pinned, 1"} if bucket_bytes == 1 else {"pinned, 0"} <= pinned
    assert all(map(torch.equal, tensors, expected))


def test_muon_holds_and_copies_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    with Model("late") as model:
        parameters = [torch.nn.Parameter(torch.ones(shape, dtype=BF16, device=model.device)) for shape in MATRICES]
        vectors = {"params": parameters[1:2], "algorithm": "adamw"}
        optimizer = OffloadedMuon([{"params": parameters[:1] + parameters[2:]}, vectors])
        copied, copy = [], model._copy

        def counted(target: torch.Tensor, source: torch.Tensor, *rest: Any) -> torch.Tensor:
            copied.append(source.nbytes * (model.is_here(target) != model.is_here(source)))
            return copy(target, source, *rest)

        monkeypatch.setattr(model, "_copy", counted)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
            optimizer._take(parameter)
        optimizer.step()
        hosts = [mirror.host for mirror in optimizer._mirrors.values()]
        scratch = list(optimizer._plans.scratch.values())
        on_host = [*hosts, *(host.grad for host in hosts), *filter(model.pinned.holds, scratch)]
        on_host += [value for state in optimizer.state.values() for value in state.values()]
        on_device = sum(memory.nbytes for memory in scratch if model.is_here(memory))
    planned = plan(units=[unit("all", MATRICES)], optimizer="halfstep-muon", offload=True)
    assert sum(tensor.nbytes for tensor in on_host) == planned.totals.host
    assert on_device == planned.part("scratch").bytes
    assert sum(copied) == sum(message.bytes for message in planned.communication)


def test_the_host_launches_other_matrices_while_some_are_orthogonalized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three on the GPU, and one whose parameter is on the CPU."""
    events: list[str] = []
    for family, event in ((muon.MOMENTUM, "M"), (muon.WEIGHT, "W")):
        monkeypatch.setattr(family, "launch", lambda *arguments, event=event: partial(events.append, event))
    monkeypatch.setattr(muon, "orthogonalize", lambda *_: events.append("P"))
    with Model("late") as model:
        _trained_by_muon(partial(OffloadedMuon, bucket_bytes=1), model.device)
    assert "".join(events) == "MP MP W MP W MPW W".replace(" ", "") * 4


class _Watched:
    """The order of events in the steps of an offloaded optimizer on a model of a GPU."""

    def __init__(self, model: Model, optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        # ("step", n) when the parameters of a bucket are stepped on the host, ("return", n) when the copy of their
        # weights to the device is enqueued, with the place of the first parameter.
        self.events: list[tuple[str, int]] = []
        # At each step of a bucket, the places of the parameters whose gradient had arrived, and the number of buckets
        # that had their weights on the host.
        self.arrived: list[list[int]] = []
        self.read: list[int] = []
        mirrors = list(optimizer._mirrors.values())
        launch, copy = adam.launch, model._copy

        def watched_launch(batch: Any, *rest: Any) -> partial[None]:
            call = launch(batch, *rest)
            place = next(
                n for n, one in enumerate(mirrors) if one.host.data_ptr() == batch.lists[adam.PARAM][0].data_ptr()
            )

            def run() -> None:
                self.events.append(("step", place))
                self.arrived.append([n for n, one in enumerate(mirrors) if one.arriving.query()])
                self.read.append(sum(event.query() for (event,) in optimizer._weights_arriving.values()))
                call()

            return partial(run)

        def watched_copy(target: torch.Tensor, source: torch.Tensor, *rest: Any) -> torch.Tensor:
            for place, one in enumerate(mirrors):
                if model.is_here(target) and target.data_ptr() == one.parameter.data_ptr():
                    assert model.current is optimizer._streams[model.device].back
                    self.events.append(("return", place))
            return copy(target, source, *rest)

        monkeypatch.setattr(adam, "launch", watched_launch)
        monkeypatch.setattr(model, "_copy", watched_copy)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("mode", ["copy", None])
def test_a_bucket_waits_for_its_gradients_only_and_returns_while_the_next_is_stepped(
    mode: Any, clips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1e9 if clips else None
    with on_a_gpu(count=4, in_backward=mode, max_grad_norm=limit) as (model, parameters, optimizer):
        for step in range(3):
            if step == 1:  # the first step creates the state
                watched = _Watched(model, optimizer, monkeypatch)
            if step == 2:
                parameters[0].detach().fill_(1.0)
                optimizer.masters()
            for parameter in reversed(parameters):
                _give(optimizer, parameter, torch.ones_like(parameter))
            optimizer.step()
            optimizer.zero_grad()
        assert watched.events == [(what, place) for place in (3, 2, 1, 0) for what in ("step", "return")] * 2
        last = [0 in arrived for arrived in watched.arrived]
        assert last == ([True] * 4 if clips else [False] * 3 + [True]) * 2
        assert watched.read == [1, 2, 3, 4] * 2


def test_gradients_that_arrive_late_are_reordered_for_stochastic_rounding() -> None:
    """The bits of stochastic rounding depend on the order of rows; the gradients have that of channels_last."""
    options: dict[str, Any] = {"lr": 0.1, "master_weights": None, "rounding": "stochastic"}
    start = torch.arange(54, dtype=BF16).reshape(2, 3, 3, 3).to(memory_format=torch.channels_last)
    grads = [torch.randn(start.shape, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3)]
    expected = torch.nn.Parameter(start.clone())
    reference = halfstep.AdamW([expected], **options)
    for grad in grads:
        expected.grad = grad.to(memory_format=torch.channels_last)
        reference.step()
    with Model("late") as model:
        parameter = torch.nn.Parameter(start.to(model.device))
        assert not parameter.is_contiguous()
        optimizer = OffloadedAdamW([parameter], **options)
        for grad in grads:
            _give(optimizer, parameter, grad.to(model.device).to(memory_format=torch.channels_last))
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(parameter.cpu(), expected.detach())


def test_after_an_interrupt_in_a_step_all_weights_are_stepped_and_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT while the first bucket is stepped is raised after the last one, and what follows reads the new weights."""
    with on_a_gpu() as (model, parameters, optimizer):
        launch, interrupts = adam.launch, [signal.SIGINT]

        def interrupted(*given: Any) -> partial[None]:
            call = launch(*given)

            def run() -> None:
                call()
                if interrupts:
                    signal.raise_signal(interrupts.pop())

            return partial(run)

        monkeypatch.setattr(adam, "launch", interrupted)
        for step in (1, 2):
            for parameter in reversed(parameters):
                _give(optimizer, parameter, torch.full((5,), -1.0, device=model.device))
            if step == 1:
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
            read = [parameter.detach() * 1.0 for parameter in parameters]
            assert [one.tolist() for one in read] == [[0.5 * step] * 5] * 3


def test_what_is_computed_before_a_step_reads_the_weights_before_it() -> None:
    with on_a_gpu(count=1) as (model, (parameter,), optimizer):
        read = []
        for _ in range(3):
            parameter.grad = torch.ones(5, device=model.device)
            optimizer._take(parameter)
            read.append(parameter.detach() * 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert [one.tolist() for one in read] == [[-0.5 * step] * 5 for step in range(3)]


def test_a_step_in_the_backward_waits_for_what_fsdp2_copies_to_the_host(mesh: Any) -> None:
    """With torch's `CPUOffloadPolicy`, it calls hooks before the gradient has arrived."""
    with Model("late") as model:
        parameters = torch.nn.ParameterList([_sharded(torch.zeros(5), mesh)])
        optimizer = halfstep.Adam(parameters, lr=0.5, betas=(0.0, 0.0), eps=0.0)
        handle = step_in_backward(parameters, optimizer, bucket_bytes=1)
        grad = torch.full((5,), 3.0, device=model.device)
        parameters[0].grad = Sharding(parameters[0]).like(grad.to("cpu", non_blocking=True))
        handle._take(parameters[0])
        assert local(parameters[0].detach()).tolist() == [-0.5] * 5


def test_at_most_two_buckets_of_gradients_are_being_copied() -> None:
    under_way = []
    with on_a_gpu(count=9) as (_, parameters, optimizer):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
            optimizer._take(parameter)
            under_way.append(sum(grad.nbytes for _, grad in optimizer._in_flight))
        assert max(under_way) == 40


def test_a_step_of_a_bucket_that_failed_is_raised_by_step() -> None:
    net = made()
    optimizer = OffloadedAdamW(net.parameters(), in_backward="step", bucket_bytes=1)
    optimizer.param_groups[0]["lr"] = -1.0
    loss_of(net, 1).backward()
    refuses(ValueError, "Invalid learning rate", optimizer.step)


def test_the_optimizer_dies_with_its_references() -> None:
    net = made()
    optimizer = OffloadedAdamW(net.parameters(), in_backward="step", bucket_bytes=1)
    loss_of(net, 1).backward()
    optimizer.step()
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    assert all(parameter.grad is None for parameter in net.parameters())
    loss_of(net, 1).backward()
    assert gradient_bytes(net) > 0


def test_masters_are_those_of_weights_that_other_code_wrote() -> None:
    weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = OffloadedAdamW([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with torch.no_grad():
        weight.fill_(3.0)
    assert (optimizer.masters()[weight].bfloat16() == 3.0).all()


def test_errors_name_the_argument_and_the_remedy(mesh: Any) -> None:
    net, half, sparse = made(), made(FP16), torch.nn.Embedding(9, 4, sparse=True)
    optimizer, refusing = OffloadedAdamW(net.parameters()), OffloadedAdamW(sparse.parameters())
    wide = torch.nn.Parameter(torch.empty(2, dtype=torch.float64))
    flat = torch.nn.Parameter(torch.ones(6))
    flat._fsdp_flattened = True  # type: ignore[attr-defined]

    def new(*params: Any, **options: Any) -> partial[Any]:
        return partial(OffloadedAdamW, params or list(net.parameters()), **options)

    refuses(ValueError, "in_backward to be 'copy', 'step' or None, but got 'later'", new(in_backward="later"))
    for size in (0, 1.5, True):
        refuses(ValueError, f"integer of at least 1, but got {size!r}", new(bucket_bytes=size))
    limited = new(in_backward="step", max_grad_norm=1.0)
    refuses(ValueError, "but got 1.0: the norm is known after the backward; use in_backward='copy'", limited)
    scaled = new(*half.parameters(), in_backward="step")
    refuses(TypeError, "torch.float16, whose loss must be scaled: use in_backward='copy' with a scaler", scaled)
    refuses(TypeError, "torch.float32 on meta: move the model to its device first", new(torch.empty(2, device="meta")))
    refuses(TypeError, "float16 or bfloat16, but got torch.float64", new(wide))
    refuses(TypeError, "but got one in torch.float64 on cpu", new(wide.detach()))
    refuses(ValueError, "can't optimize a non-leaf Tensor", new(wide * 2))
    refuses(TypeError, "optimizer can only optimize Tensors", new(3))
    on_host = (
        "Expected a shard on a cuda device, like its mesh, but got a parameter of shape (6,) on cpu: with CPUOffload"
    )
    refuses(TypeError, on_host, new(_sharded(torch.ones(6), mesh)))
    refuses(TypeError, "but got a flat parameter of FullyShardedDataParallel of shape (6,), which replaces", new(flat))
    stepping = partial(OffloadedMuon, [torch.nn.Parameter(torch.ones(2, 2))], in_backward="step")
    refuses(ValueError, "in_backward to be 'copy' or None for Muon, but got 'step', whose products would", stepping)
    refuses(KeyError, "not a parameter of this optimizer", lambda: optimizer.masters()[torch.ones(1)])
    for call in (lambda: copy.deepcopy(optimizer), lambda: pickle.dumps(optimizer)):
        refuses(TypeError, "save state_dict(), and load it into an optimizer of the copied model", call)
    backward = sparse(torch.tensor([1])).sum().backward
    refuses(RuntimeError, "but got layout torch.sparse_coo: use sparse=False in the embedding", backward)
    assert refusing.state == {}
