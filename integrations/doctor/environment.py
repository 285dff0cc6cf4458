"""What is wrong with a machine and the variables that a launcher has set."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from halfstep.integrations.doctor.findings import Diagnosis, Finding, count, find
from halfstep.kernels import compiler

OLDEST = {"torch": (2, 11), "triton": (3, 6)}
# Interfaces that reach no other machine.
_LOCAL_INTERFACES = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel", "tunl", "sit", "ip6tnl", "dummy")
# Variables that slow a training down, and what they do.
_SLOW = (
    ("CUDA_LAUNCH_BLOCKING", "1", "the host waits for each kernel"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "each collective is preceded by another one that compares shapes"),
    ("NCCL_P2P_DISABLE", "1", "GPUs of a machine send through host memory"),
    ("NCCL_IB_DISABLE", "1", "machines send over TCP instead of InfiniBand"),
)


@dataclass(frozen=True)
class Machine:
    """A machine as far as a training depends on it."""

    variables: Mapping[str, str]  # of the environment
    cores: int = 1  # processors that this process may use
    gpus: int = 0  # those that torch can use
    gpu_files: bool = False  # whether the system has a GPU, whether or not torch can use it
    cuda: str | None = None  # the CUDA or ROCm version that torch was built for; None for a CPU build
    compiler: bool = True  # whether there is a C++ compiler
    versions: Mapping[str, str] = field(default_factory=dict)  # of torch and triton, if installed
    interfaces: tuple[str, ...] = ("lo",)  # of the network
    shared_memory: int | None = None  # bytes of /dev/shm; None if there is none

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        shm, versions = Path("/dev/shm"), {"torch": str(torch.__version__)}
        with suppress(importlib.metadata.PackageNotFoundError):
            versions["triton"] = importlib.metadata.version("triton")
        return cls(
            variables=dict(os.environ),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
            gpu_files=any(Path(name).exists() for name in ("/dev/nvidia0", "/dev/kfd")),
            cuda=torch.version.cuda or getattr(torch.version, "hip", None),
            compiler=compiler.compiler() is not None,
            versions=versions,
            interfaces=tuple(name for _, name in socket.if_nameindex()),
            shared_memory=shutil.disk_usage(shm).total if shm.is_dir() else None,
        )

    def number(self, name: str) -> int:
        """A variable as a number; 0 if it is not set or no number."""
        text = self.variables.get(name, "")
        return int(text) if text.strip().isdecimal() else 0

    def nodes(self) -> int:
        """The number of machines that the launcher says."""
        world, local = self.number("WORLD_SIZE"), self.number("LOCAL_WORLD_SIZE")
        return -(-world // local) if world and local else self.number("SLURM_NNODES") or 1

    def outside(self) -> list[str]:
        """Interfaces that may reach other machines."""
        return [name for name in self.interfaces if not name.startswith(_LOCAL_INTERFACES)]

    def facts(self) -> list[tuple[str, str]]:
        """What there is, in words."""
        world = self.number("WORLD_SIZE")
        return [
            *self.versions.items(),
            ("built for", f"GPUs ({self.cuda})" if self.cuda else "the CPU"),
            ("GPUs", str(self.gpus)),
            ("kernels", "Triton" if self.gpus and "triton" in self.versions else "C++" if self.compiler else "torch"),
            ("cores", str(self.cores)),
            ("rank", f"{self.number('RANK')} of {world} on {self.nodes()} machines" if world else "one process"),
            ("interfaces", ", ".join(self.outside()) or "none to other machines"),
        ]


def examine_environment(machine: Machine | None = None) -> Diagnosis:
    """Examine a machine, by default this one, and what a launcher (torchrun, SLURM) has set.

    Nothing is run, and no other machine is contacted.
    """
    machine = Machine.here() if machine is None else machine
    checks = (_installed, _launched, _network, _settings)
    return Diagnosis.of("this environment", (finding for check in checks for finding in check(machine)))


def _installed(machine: Machine) -> Iterator[Finding]:
    for name, version in machine.versions.items():
        parts = version.split("+")[0].split(".")[:2]
        if all(part.isdecimal() for part in parts) and tuple(map(int, parts)) < OLDEST[name]:
            yield find("version-too-old", f"{name} {version}", name=name, least=".".join(map(str, OLDEST[name])))
    if machine.gpu_files and not machine.gpus:
        what, remedy = "is a build for the CPU", "install one for the GPU"
        if machine.cuda:
            what, remedy = "cannot use it", f"install a driver for {machine.cuda}, and check CUDA_VISIBLE_DEVICES"
        yield find("gpu-not-usable", "torch.cuda", what=what, remedy=remedy)
    if machine.gpus and "triton" not in machine.versions:
        yield find("no-triton", "triton")
    if not machine.gpus and not machine.compiler:
        yield find("no-compiler", "C++")


def _launched(machine: Machine) -> Iterator[Finding]:
    get, nodes = machine.variables.get, machine.nodes()
    world, rank, local, tasks = map(machine.number, ("WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_NTASKS"))
    if tasks > 1 and not world:
        text = "SLURM started several tasks, and WORLD_SIZE and RANK are not set"
        remedy = (
            ", or set RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_NTASKS, LOCAL_RANK=$SLURM_LOCALID, MASTER_ADDR, MASTER_PORT"
        )
        stake = f"each of {tasks} tasks trains alone, on all data"
        yield find("ranks-not-set", f"SLURM_NTASKS={tasks}", what=text, stake=stake, remedy=remedy)
    if world > 1 and (missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not get(name)]):
        text, remedy = f"WORLD_SIZE is {world}, and these are not set", ", which sets them all"
        yield find("ranks-not-set", ", ".join(missing), what=text, stake="init_process_group fails", remedy=remedy)
    if rank >= world > 1:
        yield find("rank-out-of-range", f"RANK={rank}", world=world, last=world - 1)
    if world > 1 and local >= machine.gpus > 0:
        yield find("rank-without-gpu", f"LOCAL_RANK={local}", gpus=count(machine.gpus, "GPU"))
    if world > 1 and nodes > 1 and get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
        yield find("master-is-local", f"MASTER_ADDR={get('MASTER_ADDR')}", nodes=nodes)


def _network(machine: Machine) -> Iterator[Finding]:
    chosen = {name: machine.variables.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    for name, setting in chosen.items():
        names = tuple(setting.lstrip("=").split(","))
        # NCCL takes the beginning of a name, unless = is in front of it; ^ excludes names.
        exact = setting.startswith("=") or name.startswith("GLOO")
        matches = (interface in names if exact else interface.startswith(names) for interface in machine.interfaces)
        if setting and not setting.startswith("^") and not any(matches):
            yield find("interface-not-there", f"{name}={setting}", name=name, interfaces=", ".join(machine.interfaces))
    if machine.nodes() > 1 and not any(chosen.values()) and len(machine.outside()) > 1:
        yield find("interface-not-chosen", ", ".join(machine.outside()))


def _settings(machine: Machine) -> Iterator[Finding]:
    get = machine.variables.get
    if get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield find("kernels-interpreted", "TRITON_INTERPRET")
    for name, value, stake in _SLOW:
        if get(name, "").upper() == value:
            yield find("slow-setting", f"{name}={value}", name=name, stake=stake)
    if get("CUDA_VISIBLE_DEVICES") == "" and machine.gpu_files:
        yield find("gpus-hidden", "CUDA_VISIBLE_DEVICES")
    cores = machine.cores // (machine.number("LOCAL_WORLD_SIZE") or 1)
    if not machine.gpus and machine.number("OMP_NUM_THREADS") == 1 and machine.number("WORLD_SIZE") and cores > 1:
        yield find("one-thread-per-rank", "OMP_NUM_THREADS=1", cores=cores)
    if machine.shared_memory is not None and machine.shared_memory < 1 << 28:
        yield find("little-shared-memory", "/dev/shm", size=machine.shared_memory >> 20)
