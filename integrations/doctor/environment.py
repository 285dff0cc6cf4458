"""What is wrong with a machine and the variables that a launcher has set, and which variables help to debug."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from halfstep.integrations.doctor.findings import Diagnosis, Finding, in_order
from halfstep.kernels import native

OLDEST = {"torch": (2, 11), "triton": (3, 6)}
# Interfaces that reach no other machine.
_LOCAL_INTERFACES = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel", "tunl", "sit", "ip6tnl", "dummy")

DEBUGGING = (
    ("TORCH_DISTRIBUTED_DEBUG=DETAIL", "checks that all ranks call the same collective with the same shapes; slow"),
    ("TORCH_CPP_LOG_LEVEL=INFO", "the rendezvous and the process groups as they are made"),
    ("NCCL_DEBUG=INFO", "the interfaces, rings and versions that NCCL chose, and its warnings"),
    ("TORCH_NCCL_TRACE_BUFFER_SIZE=2000", "the last collectives of each rank, which a time-out then dumps"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT=1", "writes that record when a collective times out"),
    ("TORCH_SHOW_CPP_STACKTRACES=1", "the C++ side of an error's traceback"),
    ("CUDA_LAUNCH_BLOCKING=1", "the line whose kernel failed, since each launch waits; slow"),
    ("TORCH_LOGS=recompiles,graph_breaks", "why torch.compile compiles again, and where it leaves the graph"),
    ("HALFSTEP_BACKEND=reference", "the same bits from plain torch: whether a kernel of halfstep is at fault"),
)


@dataclass(frozen=True)
class Machine:
    """A machine as far as a training depends on it.

    Attributes:
        variables: the environment variables.
        cores: processors that this process may use.
        gpus: GPUs that torch can use.
        gpu_files: whether the system has a GPU, whether or not torch can use it.
        cuda: the CUDA or ROCm version that torch was built for; None for a CPU build.
        compiler: whether there is a C++ compiler.
        versions: versions of torch and triton, of what is installed.
        interfaces: names of network interfaces.
        shared_memory: bytes of /dev/shm; None if there is none.
    """

    variables: Mapping[str, str]
    cores: int = 1
    gpus: int = 0
    gpu_files: bool = False
    cuda: str | None = None
    compiler: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ("lo",)
    shared_memory: int | None = None

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        shm = Path("/dev/shm")
        versions = {"torch": torch.__version__}
        if importlib.util.find_spec("triton") is not None:
            import triton

            versions["triton"] = triton.__version__
        return cls(
            variables=dict(os.environ),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
            gpu_files=any(Path(name).exists() for name in ("/dev/nvidia0", "/dev/kfd")),
            cuda=torch.version.cuda or getattr(torch.version, "hip", None),
            compiler=native.compiler() is not None,
            versions=versions,
            interfaces=tuple(name for _, name in socket.if_nameindex()),
            shared_memory=shutil.disk_usage(shm).total if shm.is_dir() else None,
        )

    def number(self, name: str) -> int | None:
        """A variable as a number; None if it is not set or no number."""
        text = self.variables.get(name, "")
        return int(text) if text.strip().isdecimal() else None

    def nodes(self) -> int:
        """The number of machines that the launcher says."""
        world, local = self.number("WORLD_SIZE"), self.number("LOCAL_WORLD_SIZE")
        if world and local:
            return -(-world // local)
        return self.number("SLURM_NNODES") or 1

    def outside(self) -> list[str]:
        """Interfaces that may reach other machines."""
        return [name for name in self.interfaces if not name.startswith(_LOCAL_INTERFACES)]

    def facts(self) -> list[tuple[str, str]]:
        """What there is, in words."""
        world, rank = self.number("WORLD_SIZE"), self.number("RANK")
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in self.variables else "variables of torchrun"
        if world is None:
            launcher = "SLURM" if "SLURM_JOB_ID" in self.variables else "none: one process"
        return [
            *((name, version) for name, version in self.versions.items()),
            ("built for", f"GPUs ({self.cuda})" if self.cuda else "the CPU"),
            ("GPUs", str(self.gpus)),
            ("kernels", "Triton" if self.gpus and "triton" in self.versions else "C++" if self.compiler else "torch"),
            ("cores", str(self.cores)),
            ("launcher", launcher),
            *([("rank", f"{rank} of {world} on {self.nodes()} machines")] if world is not None else []),
            ("backend", "nccl" if self.gpus else "gloo"),
            ("interfaces", ", ".join(self.outside()) or "none to other machines"),
        ]


def examine_environment(machine: Machine | None = None) -> Diagnosis:
    """Examine a machine, by default this one, and what a launcher (torchrun, SLURM) has set.

    Nothing is run and no other machine is asked.
    """
    machine = Machine.here() if machine is None else machine
    checks = (_installed, _launched, _network, _settings)
    return in_order("this environment", [finding for check in checks for finding in check(machine)])


def _installed(machine: Machine) -> Iterator[Finding]:
    for name, version in machine.versions.items():
        parts = version.split("+")[0].split(".")[:2]
        if all(part.isdecimal() for part in parts) and tuple(map(int, parts)) < OLDEST[name]:
            least = ".".join(map(str, OLDEST[name]))
            yield Finding(
                "version-too-old",
                "error",
                f"{name} {version}",
                f"halfstep needs {name} {least} or newer",
                "kernels fail or give other bits",
                f"pip install '{name}>={least}'",
            )
    if machine.gpu_files and not machine.gpus:
        yield Finding(
            "gpu-not-usable",
            "error",
            "torch.cuda",
            "the machine has a GPU, and torch " + ("is a build for the CPU" if not machine.cuda else "cannot use it"),
            "training runs on the CPU",
            "install a build of torch for the GPU"
            if not machine.cuda
            else f"install a driver for {machine.cuda}, and check CUDA_VISIBLE_DEVICES",
        )
    if machine.gpus and "triton" not in machine.versions:
        yield Finding(
            "no-triton",
            "warning",
            "triton",
            "there is a GPU, and Triton is not installed",
            "halfstep runs as plain torch: the same bits, with several times the memory traffic",
            "pip install triton",
        )
    if not machine.gpus and not machine.compiler:
        yield Finding(
            "no-compiler",
            "warning",
            "C++",
            "there is no C++ compiler",
            "on the CPU, halfstep runs as plain torch: the same bits, slower",
            "install g++ or clang++, or point CXX at one",
        )


def _launched(machine: Machine) -> Iterator[Finding]:
    world, rank, local = (machine.number(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    tasks = machine.number("SLURM_NTASKS") or 1
    if world is None and tasks > 1:
        yield Finding(
            "ranks-not-set",
            "error",
            f"SLURM_NTASKS={tasks}",
            "SLURM started several tasks, and WORLD_SIZE and RANK are not set",
            f"each of {tasks} tasks trains alone, on all data",
            "start torchrun once per machine, or set RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_NTASKS, "
            "LOCAL_RANK=$SLURM_LOCALID, MASTER_ADDR and MASTER_PORT",
        )
    if world is not None and world > 1:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not machine.variables.get(name)]
        if missing:
            yield Finding(
                "ranks-not-set",
                "error",
                ", ".join(missing),
                f"WORLD_SIZE is {world}, and these are not set",
                "init_process_group fails",
                "start with torchrun, which sets them all",
            )
        if rank is not None and rank >= world:
            yield Finding(
                "rank-out-of-range",
                "error",
                f"RANK={rank}",
                f"ranks of WORLD_SIZE={world} are 0 to {world - 1}",
                "the other ranks wait for one that never comes",
                "set RANK below WORLD_SIZE, each once",
            )
        if local is not None and machine.gpus and local >= machine.gpus:
            yield Finding(
                "rank-without-gpu",
                "error",
                f"LOCAL_RANK={local}",
                f"this machine has {machine.gpus} GPUs that torch can use",
                "the rank fails, or shares a GPU with another",
                "start at most one rank per GPU, and check CUDA_VISIBLE_DEVICES",
            )
        if machine.nodes() > 1 and machine.variables.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
            yield Finding(
                "master-is-local",
                "error",
                f"MASTER_ADDR={machine.variables['MASTER_ADDR']}",
                f"the job has {machine.nodes()} machines, and each looks for the first rank on itself",
                "all other machines wait until they time out",
                "set MASTER_ADDR to the first machine's name",
            )


def _network(machine: Machine) -> Iterator[Finding]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = machine.variables.get(name, "")
        if not wanted or wanted.startswith("^"):
            continue
        exact = wanted.startswith("=") or name.startswith("GLOO")
        known = [
            one
            for one in wanted.lstrip("=").split(",")
            if any(there == one or (not exact and there.startswith(one)) for there in machine.interfaces)
        ]
        if not known:
            yield Finding(
                "interface-not-there",
                "error",
                f"{name}={wanted}",
                f"this machine has {', '.join(machine.interfaces)}",
                "init_process_group fails on this machine",
                f"unset {name}, or set it to an interface that all machines have",
            )
    chosen = machine.variables.get("NCCL_SOCKET_IFNAME") or machine.variables.get("GLOO_SOCKET_IFNAME")
    if machine.nodes() > 1 and not chosen and len(machine.outside()) > 1:
        yield Finding(
            "interface-not-chosen",
            "warning",
            ", ".join(machine.outside()),
            "several interfaces may lead to the other machines, and none is chosen",
            "ranks may wait for each other on a network that does not connect them, or on the slow one",
            "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the one that does",
        )


def _settings(machine: Machine) -> Iterator[Finding]:
    get = machine.variables.get
    if get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield Finding(
            "kernels-interpreted",
            "warning",
            "TRITON_INTERPRET",
            "Triton's kernels run in its interpreter",
            "each takes longer than plain torch",
            "unset TRITON_INTERPRET; it serves tests without a GPU",
        )
    for name, value, stake in (
        ("CUDA_LAUNCH_BLOCKING", "1", "the host waits for each kernel"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "each collective is preceded by another one that compares shapes"),
        ("NCCL_P2P_DISABLE", "1", "GPUs of a machine send through host memory"),
        ("NCCL_IB_DISABLE", "1", "machines send over TCP instead of InfiniBand"),
    ):
        if get(name, "").upper() == value:
            yield Finding(
                "slow-setting", "warning", f"{name}={value}", "a setting for debugging is on", stake, f"unset {name}"
            )
    if get("CUDA_VISIBLE_DEVICES") == "" and machine.gpu_files:
        yield Finding(
            "gpus-hidden",
            "error",
            "CUDA_VISIBLE_DEVICES",
            "it is set and empty, which hides all GPUs",
            "training runs on the CPU",
            "unset it, or name the GPUs: 0,1",
        )
    share = machine.cores // (machine.number("LOCAL_WORLD_SIZE") or 1)
    if not machine.gpus and machine.number("OMP_NUM_THREADS") == 1 and machine.number("WORLD_SIZE") and share > 1:
        yield Finding(
            "one-thread-per-rank",
            "warning",
            "OMP_NUM_THREADS=1",
            f"torchrun sets it, and each rank has {share} cores",
            f"steps on the CPU use 1 of {share} cores",
            f"set OMP_NUM_THREADS={share} before torchrun",
        )
    if machine.shared_memory is not None and machine.shared_memory < 1 << 28:
        yield Finding(
            "little-shared-memory",
            "warning",
            "/dev/shm",
            f"it has {machine.shared_memory >> 20} MiB, as containers have by default",
            "DataLoader workers and ranks of one machine end with a bus error",
            "start the container with --shm-size=8g or --ipc=host",
        )
