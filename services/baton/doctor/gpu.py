"""GPUs, their driver, the build of torch, and whether processes can read each other's device memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from baton.doctor.finding import Finding, lack, missing, note, ok
from baton.doctor.machine import Machine, ProbeError
from baton.doctor.wanted import Wanted

_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The oldest driver that programs of a major version of CUDA run with, as NVIDIA's minor version
compatibility has it."""
_QUERY = ("nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader")
_KERNEL_MODULE = re.compile(r"Kernel Module.*?\s(\d+\.[\d.]+)")
_VENDOR, _CLASSES = "0x10de", ("0x0300", "0x0302")
"""NVIDIA's number on the PCI bus, and the first digits of the classes of its GPUs."""
_NODES = ("nvidia[0-9]*", "dxg")
"""What gives a process a GPU in /dev: NVIDIA's driver of Linux, and that of WSL."""
_DRIVER_DO = (
    "install NVIDIA's driver on the node; in a container ask for the device: --gpus all of docker run, "
    "gpu.enabled in the chart"
)


@dataclass(frozen=True, slots=True)
class _Driver:
    version: str
    devices: tuple[str, ...]
    """A line for each device: its name and memory."""

    @property
    def major(self) -> int:
        first = self.version.partition(".")[0]
        return int(first) if first.isdigit() else 0


def count(machine: Machine) -> int:
    """The GPUs that this machine, or container, is given: a container sees all of its node on the bus."""
    return sum(1 for pattern in _NODES for _ in machine.path("/dev").glob(pattern))


def is_wanted(machine: Machine, wanted: Wanted) -> bool:
    """Whether workers here are to compute on a GPU."""
    device = wanted.worker.device
    return device.startswith("cuda") or (device == "auto" and count(machine) > 0)


def _on_the_bus(machine: Machine) -> int:
    """The GPUs on the PCI bus, whether a driver serves them or not."""
    devices = [f"/{one.relative_to(machine.root)}" for one in machine.path("/sys/bus/pci/devices").glob("*")]
    return sum(
        machine.read(f"{device}/vendor").strip() == _VENDOR
        and machine.read(f"{device}/class").startswith(_CLASSES)
        for device in devices
    )


def check(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """The driver and its devices, the build of torch, and CUDA IPC."""
    if not is_wanted(machine, wanted):
        yield _not_wanted(machine, wanted.worker.device)
        return
    driver, failure = _driver(machine)
    if driver is None:
        bus = _on_the_bus(machine)
        yield lack("GPUs", f"{bus} on the bus, but no driver answers: {failure}", _DRIVER_DO)
        return
    yield ok("GPUs", "; ".join(driver.devices))
    yield from _torch(machine, driver)


def _not_wanted(machine: Machine, device: str) -> Finding:
    if count(machine):
        return note("GPUs", f"{count(machine)}, not to be used (--device {device})")
    if bus := _on_the_bus(machine):
        says = f"{bus} on the bus, of which none is given to this machine or container: CPUs compute"
        return note("GPUs", says, _DRIVER_DO)
    return note("GPUs", "none: CPUs compute")


def _driver(machine: Machine) -> tuple[_Driver | None, str]:
    """The driver that nvidia-smi tells of, or the kernel where a container has no nvidia-smi; or None, and
    why."""
    if machine.which(_QUERY[0]) is None:
        version = _KERNEL_MODULE.search(machine.read("/proc/driver/nvidia/version"))
        if version is None or not count(machine):
            return None, "there is no nvidia-smi"
        return _Driver(version[1], (f"{count(machine)}, without nvidia-smi to name them",)), ""
    ran = machine.run(_QUERY)
    rows = [[cell.strip() for cell in line.split(",")] for line in ran.out.splitlines() if line.strip()]
    if ran.status != 0 or not rows or any(len(row) != 3 for row in rows):
        return None, ran.last_words
    return _Driver(rows[0][0], tuple(f"{name}, {memory}" for _, name, memory in rows)), ""


def _torch(machine: Machine, driver: _Driver) -> Iterator[Finding]:
    says = f"driver {driver.version}"
    try:
        told = machine.probe("torch_build")
    except ProbeError as error:
        yield lack("CUDA", f"{says}, but torch cannot be loaded: {error}", "pip install 'baton[worker,gpu]'")
        return
    build, version = told["cuda"], told["version"]
    if not isinstance(build, str):
        do = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        yield lack("CUDA", f"{says}, but torch {version} was built without CUDA", do)
        return
    oldest = _DRIVERS.get(int(build.partition(".")[0]), 0)
    if driver.major < oldest:
        older = _older(driver.major)
        do = f"install driver {oldest} or newer on the node, or a torch of an older CUDA: {older}"
        yield lack("CUDA", f"{says} is too old for torch {version}, whose CUDA {build} wants {oldest}", do)
        return
    if not told["devices"]:
        do = "see that CUDA_VISIBLE_DEVICES names devices, and that the container has /dev/nvidia*"
        yield lack("CUDA", f"{says} and torch {version} fit, but torch finds no device: {told['error']}", do)
        return
    yield ok("CUDA", f"{says}, torch {version} of CUDA {build}, {told['devices']} devices")
    yield _ipc(machine)


def _older(driver: int) -> str:
    fitting = [cuda for cuda, oldest in _DRIVERS.items() if oldest <= driver]
    return f"CUDA {max(fitting)} at most" if fitting else "there is none for a driver this old"


def _ipc(machine: Machine) -> Finding:
    do = (
        "start workers of one node in one container, or pods with hostIPC, and leave expandable_segments out "
        "of PYTORCH_CUDA_ALLOC_CONF"
    )
    try:
        why = str(machine.probe("cuda_ipc")["why"])
    except ProbeError as error:
        why = str(error)
    if not why:
        return ok("CUDA IPC", "another process can read this one's device memory")
    says = f"no other process can read this one's device memory ({why}): KV blocks go through host memory"
    return missing("CUDA IPC", says, do, needed=False)
