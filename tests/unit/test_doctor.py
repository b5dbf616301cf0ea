"""``baton doctor``: each lack is provoked, is told apart from what only is worth knowing, and says what to
do."""

from __future__ import annotations

import http.server
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.doctor import (
    cgroup,
    clock,
    cpu,
    examination,
    gpu,
    hub,
    limits,
    memory,
    network,
    packages,
    transports,
)
from baton.doctor.finding import Finding, Judgement, lack
from baton.doctor.machine import Machine, ProbeError, Ran, Space, size_text
from baton.doctor.wanted import PARTS, Wanted
from baton.process.options import ConfigError
from baton.worker.config import WorkerConfig
from tests.support.redis_server import RedisServer, needs_redis

GPU = {"vendor": "0x10de\n", "class": "0x030200\n"}
"""What the PCI bus says of one."""


class PretendMachine(Machine):
    """A machine that has what it is told to have."""

    def __init__(
        self,
        root: Path,
        files: Mapping[str, str] | None = None,
        *,
        commands: Mapping[str, Ran] | None = None,
        probes: Mapping[str, Mapping[str, object]] | None = None,
        versions: Mapping[str, str] | None = None,
        hard: int = resource.RLIM_INFINITY,
        space: Space | None = None,
        cores: int = 4,
        clock_state: int | None = 0,
        requirements: Sequence[str] = (),
    ) -> None:
        super().__init__(root)
        for name, text in (files or {}).items():
            self.path(name).parent.mkdir(parents=True, exist_ok=True)
            self.path(name).write_text(text)
        self._commands, self._probes, self._versions = commands or {}, probes or {}, versions or {}
        self._hard, self._space, self._cores, self._clock_state = hard, space, cores, clock_state
        self._requirements = list(requirements)

    def which(self, command: str) -> str | None:
        return f"/usr/bin/{command}" if command in self._commands else None

    def run(self, command: Sequence[str], timeout_s: float = 1.0) -> Ran:
        return self._commands[command[0]]

    def probe(self, name: str, *arguments: str) -> dict[str, object]:
        key = " ".join((name, *arguments[:1]))
        if key not in self._probes:
            raise ProbeError("the process ended with status -11")
        return dict(self._probes[key])

    def limit(self, which: int) -> tuple[int, int]:
        return self._hard, self._hard

    def space(self, name: str) -> Space | None:
        return self._space

    def cores(self) -> int:
        return self._cores

    def clock_state(self) -> int | None:
        return self._clock_state

    def version(self, package: str) -> str | None:
        return self._versions.get(package)

    def requirements(self) -> list[str]:
        return self._requirements


def wanted(role: str = "worker", **worker: object) -> Wanted:
    assert role in PARTS
    return Wanted(role=role, worker=WorkerConfig(role="both", **worker))  # type: ignore[arg-type]


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in findings}


def lacking(findings: Iterator[Finding]) -> dict[str, str]:
    """What lacks, with what is said of it and what to do."""
    return {one.name: f"{one.says} → {one.do}" for one in findings if one.verdict is Judgement.LACK}


def doctor(
    *arguments: str, before: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit status of the command, and its findings by name."""
    done = subprocess.run(
        [*before, sys.executable, "-m", "baton", "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["lacks"] == sum(one["verdict"] == "lack" for one in told["findings"])
    return done.returncode, {one["name"]: one for one in told["findings"]}


def shell(limit: str) -> tuple[str, ...]:
    """What runs a command with a limit of the shell's, as a user whom it binds."""
    bound = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock") if os.geteuid() == 0 else ()
    return (*bound, "bash", "-c", f'{limit}; exec "$0" "$@"')


@contextmanager
def free_port() -> Iterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    yield str(port)


class TestThisMachine:
    def test_a_report_for_a_person(self) -> None:
        with free_port() as port:
            done = subprocess.run(
                [sys.executable, "-m", "baton", "doctor", "--port", port, "--timeout", "0.5"],
                capture_output=True,
                text=True,
                timeout=600,
            )
        lines = done.stdout.splitlines()
        assert done.returncode == (0 if "0 lacking" in lines[-1] else 1), done.stdout + done.stderr
        assert lines[-1].startswith("for ring: ")
        assert max(map(len, lines)) <= 110
        areas = [line.split()[0] for line in lines if line[:1].strip() and not line.startswith("for ")]
        assert areas == list(examination.AREAS)
        assert f"port {port}" in done.stdout

    def test_few_files_and_little_locked_memory(self) -> None:
        status, found = doctor(
            "--role", "decode", "--require-rdma", before=shell("ulimit -n 64 && ulimit -l 64")
        )
        assert status == 1
        assert found["open files"]["verdict"] == "lack"
        assert "64 (the hard limit" in found["open files"]["says"]
        assert "LimitNOFILE" in found["open files"]["do"]
        assert found["locked memory"]["verdict"] == "lack"
        assert found["locked memory"]["says"].startswith("64 KiB")
        assert "ulimit -l unlimited" in found["locked memory"]["do"]

    def test_a_tiny_dev_shm(self) -> None:
        pytest.importorskip("ucxx")
        mount = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$0" "$@"'
        inside = ("unshare", "-m", "sh", "-c", mount)
        if subprocess.run([*inside, "true"], capture_output=True).returncode:
            pytest.skip("this user may not mount")
        status, found = doctor("--role", "decode", before=inside)
        assert status == 1
        assert found["/dev/shm"]["verdict"] == "lack"
        assert found["/dev/shm"]["says"].startswith("64 KiB")
        assert "--shm-size" in found["/dev/shm"]["do"]
        # What the figure stands for: UCX goes without that memory.
        assert "posix" not in found["ucx"]["says"]

    def test_a_router_needs_no_compiler(self) -> None:
        with free_port() as port:
            status, found = doctor(
                "--role", "router", "--port", port, environment={"CXX": "no-such-compiler"}
            )
        assert status == 0, found
        assert {"compiler", "ucx", "GPUs", "/dev/shm"}.isdisjoint(found)


class TestCompiler:
    def test_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        told = lacking(cpu.check(Machine(), wanted(device="cpu")))
        assert "no C++ compiler" in told["compiler"]
        assert "apt-get install g++" in told["compiler"]

    def test_one_that_cannot_build(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        broken = tmp_path / "g++"
        broken.write_text("#!/bin/sh\ncase $1 in --version) echo 9 ;; *) echo no omp.h >&2; exit 1 ;; esac\n")
        broken.chmod(0o755)
        monkeypatch.setenv("CXX", str(broken))
        told = lacking(cpu.check(Machine(), wanted(device="cpu")))
        assert "cannot build the CPU kernels: no omp.h" in told["compiler"]

    @pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
    def test_one_that_can(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "new"))
        found = by_name(cpu.check(Machine(), wanted(device="cpu")))["compiler"]
        assert found.verdict is Judgement.OK
        assert "builds the CPU kernels" in found.says
        (tmp_path / "file").touch()
        monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "file" / "new"))
        assert "BATON_CACHE_DIR" in lacking(cpu.check(Machine(), wanted(device="cpu")))["compiler"]

    def test_none_where_plain_torch_is_meant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.setenv("BATON_CPU_KERNELS", "plain")
        assert "compiler" not in lacking(cpu.check(Machine(), wanted(device="cpu")))

    def test_on_a_gpu_triton_needs_one_of_c(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.delenv("CC", raising=False)
        assert set(lacking(cpu.check(PretendMachine(tmp_path), wanted(device="cuda")))) == {"C compiler"}


class TestProcessor:
    @pytest.mark.skipif(os.uname().machine != "x86_64", reason="reads the flags of x86-64")
    @pytest.mark.parametrize(
        ("flags", "verdict", "says"),
        [
            ("sse4_2 avx2 avx512f avx512_bf16", Judgement.OK, "16 floats at a time, bfloat16 in pairs"),
            ("avx2 avx512f", Judgement.OK, "16 floats at a time, bfloat16 as floats"),
            ("avx2", Judgement.OK, "8 floats at a time"),
            ("sse4_2", Judgement.NOTE, "several times slower"),
        ],
    )
    def test_features(self, tmp_path: Path, flags: str, verdict: Judgement, says: str) -> None:
        info = f"vendor_id\t: AuthenticAMD\nmodel name\t: X\nflags\t\t: {flags}\n"
        found = by_name(cpu.check(PretendMachine(tmp_path, {"/proc/cpuinfo": info}), wanted(device="cpu")))
        assert found["CPU features"].verdict is verdict
        assert says in found["CPU features"].says

    @pytest.mark.parametrize(
        "files",
        [
            {"/proc/self/cgroup": "0::/pod/main\n", "/sys/fs/cgroup/pod/cpu.max": "150000 100000\n"},
            {
                "/proc/self/cgroup": "4:cpu:/pod\n3:memory:/pod\n",
                "/sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "150000\n",
                "/sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n",
            },
        ],
    )
    def test_a_quota_below_the_cores(self, tmp_path: Path, files: Mapping[str, str]) -> None:
        machine = PretendMachine(tmp_path, files, cores=16)
        assert cgroup.cpu_quota(machine) == 1.5
        found = by_name(cpu.check(machine, wanted(device="cpu")))["cores"]
        assert found.verdict is Judgement.NOTE
        assert "16 to be seen, but time for 1.5" in found.says
        assert "--threads" in found.do

    def test_pages_that_move_between_nodes(self, tmp_path: Path) -> None:
        nodes = {f"/sys/devices/system/node/node{each}/cpulist": f"{each}\n" for each in (0, 1)}
        moving = {**nodes, "/proc/sys/kernel/numa_balancing": "1\n"}
        found = by_name(cpu.check(PretendMachine(tmp_path, moving), wanted(device="cpu")))["NUMA"]
        assert found.verdict is Judgement.NOTE
        assert "kernel.numa_balancing=0" in found.do


MEMINFO = "MemTotal:       8388608 kB\nMemAvailable:   6291456 kB\n"


class TestMemory:
    def test_enough(self, tmp_path: Path) -> None:
        machine = PretendMachine(tmp_path, {"/proc/meminfo": MEMINFO}, space=Space(1 << 30, 1 << 30))
        assert not lacking(memory.check(machine, wanted("ring")))

    @pytest.mark.parametrize(
        "files",
        [
            {
                "/proc/self/cgroup": "0::/\n",
                "/sys/fs/cgroup/memory.max": f"{1 << 30}\n",
                "/sys/fs/cgroup/memory.current": f"{600 << 20}\n",
                "/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {100 << 20}\n",
            },
            {
                "/proc/self/cgroup": "3:memory:/\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{1 << 30}\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{500 << 20}\n",
            },
        ],
    )
    def test_a_container_that_is_too_small(self, tmp_path: Path, files: Mapping[str, str]) -> None:
        machine = PretendMachine(tmp_path, {"/proc/meminfo": MEMINFO, **files}, space=Space(1 << 30, 1 << 30))
        told = lacking(memory.check(machine, wanted()))["memory"]
        assert told.startswith("524 MiB of the container's 1.0 GiB can be had")
        assert "resources.limits.memory" in told
        assert not lacking(memory.check(machine, wanted("router")))

    def test_weights_that_do_not_fit(self, tmp_path: Path) -> None:
        model = tmp_path / "model"
        model.mkdir()
        with (model / "model.safetensors").open("wb") as file:
            file.truncate(6 << 30)
        machine = PretendMachine(tmp_path, {"/proc/meminfo": MEMINFO}, space=Space(1 << 30, 1 << 30))
        assert "needs 7.0 GiB" in lacking(memory.check(machine, wanted(model=str(model))))["memory"]
        assert not lacking(memory.check(machine, wanted(model=str(model), device="cuda")))

    @pytest.mark.parametrize(
        ("role", "free", "connector", "verdict"),
        [
            ("worker", 64 << 20, "auto", Judgement.LACK),
            ("worker", 66 << 20, "auto", Judgement.OK),
            ("ring", 66 << 20, "ucx", Judgement.NOTE),
            ("worker", 64 << 10, "tcp", Judgement.OK),
        ],
    )
    def test_dev_shm(self, tmp_path: Path, role: str, free: int, connector: str, verdict: Judgement) -> None:
        versions = {"ucxx-cu13": "0.52.0"}
        files = {"/proc/meminfo": MEMINFO}
        machine = PretendMachine(tmp_path, files, versions=versions, space=Space(free, free))
        assert (
            by_name(memory.check(machine, wanted(role, connector=connector)))["/dev/shm"].verdict is verdict
        )


class TestLimits:
    @pytest.mark.parametrize(
        ("hard", "verdict"), [(1023, Judgement.LACK), (1024, Judgement.NOTE), (65536, Judgement.OK)]
    )
    def test_files_of_a_router(self, tmp_path: Path, hard: int, verdict: Judgement) -> None:
        found = by_name(limits.check(PretendMachine(tmp_path, hard=hard), wanted("router")))
        assert found["open files"].verdict is verdict

    def test_locked_memory_beside_an_rdma_device(self, tmp_path: Path) -> None:
        files = {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"}
        assert not lacking(limits.check(PretendMachine(tmp_path / "none", hard=1 << 16), wanted()))
        machine = PretendMachine(tmp_path, files, hard=1 << 16)
        assert not lacking(limits.check(machine, wanted())), "the node's, which this pod is not given"
        assert set(lacking(limits.check(machine, wanted(require_rdma=True)))) == {"locked memory"}
        files["/dev/infiniband/uverbs0"] = ""
        machine = PretendMachine(tmp_path, files, hard=1 << 16)
        assert "LimitMEMLOCK" in lacking(limits.check(machine, wanted()))["locked memory"]
        holder = {**files, "/proc/self/status": "CapEff:\t0000000000004000\n"}
        assert not lacking(limits.check(PretendMachine(tmp_path, holder, hard=1 << 16), wanted()))


def gpus(root: Path, driver: str, build: Mapping[str, object] | None, ipc: str = "") -> PretendMachine:
    """A machine with two GPUs, a driver, and a torch."""
    files = {f"/sys/bus/pci/devices/{each}/{name}": text for each in (0, 1) for name, text in GPU.items()}
    files |= {f"/dev/nvidia{each}": "" for each in (0, 1)}
    rows = "".join(f"{driver}, NVIDIA H100 80GB HBM3, 81559 MiB\n" for _ in range(2))
    probes: dict[str, Mapping[str, object]] = {"cuda_ipc": {"why": ipc}}
    if build is not None:
        probes["torch_build"] = build
    return PretendMachine(root, files, commands={"nvidia-smi": Ran(0, rows, "")}, probes=probes)


CUDA_BUILD = {"version": "2.13.0+cu130", "cuda": "13.0", "devices": 2, "error": ""}


class TestGpus:
    def test_all_is_well(self, tmp_path: Path) -> None:
        found = by_name(gpu.check(gpus(tmp_path, "580.95.05", CUDA_BUILD), wanted()))
        assert {one.verdict for one in found.values()} == {Judgement.OK}
        assert set(found) == {"GPUs", "CUDA", "CUDA IPC"}

    def test_a_driver_that_is_too_old(self, tmp_path: Path) -> None:
        told = lacking(gpu.check(gpus(tmp_path, "570.86.15", CUDA_BUILD), wanted()))["CUDA"]
        assert "driver 570.86.15 is too old for torch 2.13.0+cu130, whose CUDA 13.0 wants 580" in told
        assert "install driver 580 or newer" in told
        assert "CUDA 12 at most" in told

    @pytest.mark.parametrize(
        ("build", "says"),
        [
            ({"version": "2.13.0+cpu", "cuda": None, "devices": 0, "error": ""}, "was built without CUDA"),
            ({**CUDA_BUILD, "devices": 0, "error": "No CUDA GPUs"}, "torch finds no device: No CUDA GPUs"),
            (None, "torch cannot be loaded: the process ended"),
        ],
    )
    def test_a_torch_that_cannot(self, tmp_path: Path, build: Mapping[str, object] | None, says: str) -> None:
        assert says in lacking(gpu.check(gpus(tmp_path, "580.95.05", build), wanted()))["CUDA"]

    def test_no_driver(self, tmp_path: Path) -> None:
        files = {f"/sys/bus/pci/devices/0/{name}": text for name, text in GPU.items()}
        # A container without a GPU, on a node that has one.
        found = by_name(gpu.check(PretendMachine(tmp_path, files), wanted()))["GPUs"]
        assert found.verdict is Judgement.NOTE
        assert "none is given to this machine or container" in found.says
        assert "--gpus all" in found.do
        files["/dev/nvidia0"] = ""
        told = lacking(gpu.check(PretendMachine(tmp_path, files), wanted()))["GPUs"]
        assert told.startswith(
            "1 on the bus, but no driver answers: there is no nvidia-smi → install NVIDIA's"
        )
        failing = {"nvidia-smi": Ran(9, "", "Failed to initialize NVML\n")}
        told = lacking(gpu.check(PretendMachine(tmp_path, files, commands=failing), wanted()))["GPUs"]
        assert "Failed to initialize NVML" in told

    def test_a_driver_without_its_tool(self, tmp_path: Path) -> None:
        text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
        files = {"/dev/nvidia0": "", "/proc/driver/nvidia/version": text}
        machine = PretendMachine(tmp_path, files, probes={"torch_build": CUDA_BUILD})
        assert "driver 570.86.15 is too old" in lacking(gpu.check(machine, wanted()))["CUDA"]

    def test_none_is_needed_unless_asked_for(self, tmp_path: Path) -> None:
        machine = PretendMachine(tmp_path)
        assert not lacking(gpu.check(machine, wanted()))
        assert not lacking(gpu.check(machine, wanted(device="cpu")))
        assert set(lacking(gpu.check(machine, wanted(device="cuda:1")))) == {"GPUs"}

    def test_memory_that_other_processes_cannot_read(self, tmp_path: Path) -> None:
        found = by_name(gpu.check(gpus(tmp_path, "580.95", CUDA_BUILD, "no handle"), wanted()))["CUDA IPC"]
        assert found.verdict is Judgement.NOTE
        assert "expandable_segments" in found.do


class TestTransports:
    @pytest.mark.parametrize(
        ("tls", "verdict", "says"),
        [
            ("no-such-transport", Judgement.LACK, "(UCX_TLS=no-such-transport)"),
            ("self", Judgement.LACK, "no transport to another process"),
            ("sm,self", Judgement.NOTE, "reach this node alone"),
            ("tcp,self", Judgement.OK, "starts with tcp"),
        ],
    )
    def test_ucx_of_this_machine(
        self, monkeypatch: pytest.MonkeyPatch, tls: str, verdict: Judgement, says: str
    ) -> None:
        pytest.importorskip("ucxx")
        monkeypatch.setenv("UCX_TLS", tls)
        found = by_name(transports.check(Machine(), wanted(connector="ucx")))["ucx"]
        assert found.verdict is verdict
        assert says in found.says
        assert verdict is Judgement.OK or "UCX_TLS" in found.do

    @pytest.mark.parametrize(("connector", "verdict"), [("auto", Judgement.NOTE), ("ucx", Judgement.LACK)])
    def test_a_package_that_is_not_there(self, tmp_path: Path, connector: str, verdict: Judgement) -> None:
        absent = {"connector ucx": {"missing": "needs ucxx", "installed": False}}
        found = by_name(
            transports.check(PretendMachine(tmp_path, probes=absent), wanted(connector=connector))
        )
        assert found["ucx"].verdict is verdict
        assert "pip install 'baton[ucx]'" in found["ucx"].do

    def test_a_library_that_ends_its_process(self, tmp_path: Path) -> None:
        told = lacking(transports.check(PretendMachine(tmp_path), wanted(connector="nixl")))["nixl"]
        assert "ends its process: the process ended with status -11" in told

    @pytest.mark.parametrize(
        ("files", "without", "says"),
        [
            ({}, "no verbs", "no device in /sys/class/infiniband"),
            ({"state": "4: ACTIVE\n"}, "no verbs", "no /dev/infiniband/uverbs*"),
            ({"state": "1: DOWN\n", "uverbs": ""}, "", "none is active"),
            (
                {"state": "4: ACTIVE\n", "uverbs": ""},
                "no verbs",
                "no connector moves KV blocks by it (ucx: no",
            ),
            ({"state": "4: ACTIVE\n", "uverbs": ""}, "", None),
        ],
    )
    def test_rdma(self, tmp_path: Path, files: Mapping[str, str], without: str, says: str | None) -> None:
        places = {"state": "/sys/class/infiniband/mlx5_0/ports/1/state", "uverbs": "/dev/infiniband/uverbs0"}
        told = {"missing": "", "installed": True, "transports": "tcp rc_verbs", "missing_for_rdma": without}
        machine = PretendMachine(
            tmp_path,
            {places[name]: text for name, text in files.items()},
            probes={"connector ucx": told, "connector nixl": told},
        )
        found = lacking(transports.check(machine, wanted(require_rdma=True)))
        assert set(found) == ({"RDMA"} if says else set())
        assert says is None or says in found["RDMA"]
        plain = by_name(transports.check(machine, wanted()))["RDMA"]
        assert plain.verdict is (Judgement.NOTE if says else Judgement.OK)
        assert says is None or says in plain.says


@contextmanager
def answering(status: int, date: str | None = None) -> Iterator[str]:
    """The address of a server that answers everything with a status, and tells this time."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def do_HEAD(self) -> None:
            self.do_GET()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return date or super().date_time_string(timestamp)

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class TestNetwork:
    def test_a_port_that_is_taken(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            told = lacking(network.check(Machine(), Wanted(port=(str(port),))))
        assert f"is taken by process {os.getpid()} (" in told[f"port {port}"]
        assert "another port" in told[f"port {port}"]

    def test_arguments_of_the_process_that_took_it_are_not_told(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            files = {
                "/proc/net/tcp": f"sl\n0: 0100007F:{port:04X} 00000000:0000 0A 0:0 00:0 0 0 0 4242 1\n",
                "/proc/77/comm": "baton\n",
                "/proc/77/cmdline": "baton\0router\0--api-key\0secret\0",
            }
            machine = PretendMachine(tmp_path, files)
            machine.path("/proc/77/fd").mkdir()
            machine.path("/proc/77/fd/3").symlink_to("socket:[4242]")
            told = lacking(network.check(machine, Wanted(port=(str(port),))))[f"port {port}"]
        assert "is taken by process 77 (baton) →" in told

    def test_the_ports_of_a_router_are_those_of_its_options(self) -> None:
        assert set(by_name(network.check(Machine(), Wanted(role="router")))) == {"port 8000", "port 8001"}
        assert not by_name(network.check(Machine(), Wanted(role="worker")))

    def test_a_cluster_key_is_needed_beyond_this_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("BATON_CLUSTER_KEY", raising=False)
        told = lacking(network.check(Machine(), Wanted(role="worker", host="0.0.0.0")))["cluster key"]
        assert "openssl rand -hex 32" in told
        monkeypatch.setenv("BATON_CLUSTER_KEY", "0123456789abcdef")
        assert not lacking(network.check(Machine(), Wanted(role="worker", host="0.0.0.0")))

    def test_a_router(self) -> None:
        with answering(200) as url:
            found = by_name(network.check(Machine(), Wanted(role="worker", router=url)))
        assert {name: one.verdict for name, one in found.items()} == {
            "router": Judgement.OK,
            "clock of the router": Judgement.OK,
        }

    def test_a_router_whose_clock_is_behind(self) -> None:
        with answering(503, "Sat, 01 Jan 2000 00:00:00 GMT") as url:
            told = lacking(network.check(Machine(), Wanted(role="worker", router=url)))
        assert "it cannot place requests" in told["router"]
        assert "s behind this machine's → have chrony" in told["clock of the router"]

    @pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:8000", "http://"])
    def test_a_router_that_is_not_there(self, url: str) -> None:
        assert url in lacking(network.check(Machine(), Wanted(role="worker", router=url)))["router"]

    @pytest.mark.parametrize("url", ["redis://:secret@127.0.0.1:9", "http://:secret@127.0.0.1"])
    def test_a_redis_that_is_not_there(self, url: str) -> None:
        told = lacking(network.check(Machine(), Wanted(role="worker", redis=url)))["Redis"]
        assert "secret" not in told

    @needs_redis
    def test_redis(self, tmp_path: Path) -> None:
        server = RedisServer(tmp_path)
        server.start()
        try:
            found = by_name(network.check(Machine(), Wanted(role="worker", redis=server.url)))
        finally:
            server.kill()
        assert {name: one.verdict for name, one in found.items()} == {
            "Redis": Judgement.OK,
            "clock of Redis": Judgement.OK,
        }


class TestHub:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "huggingface"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def test_out_of_reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        told = lacking(hub.check(Machine(), wanted(model="nobody/nothing")))
        assert set(told) == {"hub"}
        assert "is out of reach: [Errno 111] Connection refused" in told["hub"]
        assert "HF_ENDPOINT" in told["hub"]
        assert not lacking(hub.check(Machine(), wanted()))  # the demo model is here

    @pytest.mark.parametrize(
        ("status", "verdict"), [(200, Judgement.OK), (403, Judgement.OK), (503, Judgement.LACK)]
    )
    def test_an_answer(self, monkeypatch: pytest.MonkeyPatch, status: int, verdict: Judgement) -> None:
        with answering(status) as url:
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
            found = by_name(hub.check(Machine(), wanted(model="nobody/nothing")))
        assert found["hub"].verdict is verdict

    def test_offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        told = lacking(hub.check(Machine(), wanted(model="nobody/nothing")))
        assert set(told) == {"model", "hub"}
        assert "unset HF_HUB_OFFLINE" in told["model"]

    def test_a_folder_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        assert set(lacking(hub.check(Machine(), wanted(model="/models/none")))) == {"model"}

    def test_a_cache_that_cannot_be_written(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HOME", "/proc/nowhere")
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        told = lacking(hub.check(Machine(), wanted(model="nobody/nothing")))
        assert "/proc/nowhere cannot be written" in told["HF_HOME"]


REQUIREMENTS = ("fastapi>=0.115", 'torch>=2.10; extra == "worker"', 'triton>=3.5; extra == "gpu"')


class TestPackages:
    @pytest.mark.parametrize(
        ("versions", "role", "lacks"),
        [
            ({"fastapi": "0.165.0", "torch": "2.13.0+cpu"}, "worker", {}),
            ({"fastapi": "0.165.0"}, "worker", {"baton[worker]": "not installed: torch"}),
            ({"fastapi": "0.165.0"}, "router", {}),
            ({"fastapi": "0.100"}, "router", {"baton": "unfit: fastapi 0.100 (not >=0.115)"}),
            ({"fastapi": "0.165.0", "torch": "2.13.0", "triton": "2.1"}, "worker", {}),
        ],
    )
    def test_versions(
        self, tmp_path: Path, versions: Mapping[str, str], role: str, lacks: Mapping[str, str]
    ) -> None:
        machine = PretendMachine(tmp_path, versions=versions, requirements=REQUIREMENTS)
        found = list(packages.check(machine, wanted(role)))
        assert ("baton[gpu]" in {one.name for one in found}) is ("triton" in versions)
        told = lacking(iter(found))
        assert any("unfit: triton 2.1 (not >=3.5)" in one.says for one in found) is ("triton" in versions)
        assert set(told) == set(lacks)
        for name, says in lacks.items():
            assert told[name].startswith(says)
            assert "pip install" in told[name]


@pytest.mark.parametrize(
    ("state", "verdict"), [(0, Judgement.OK), (5, Judgement.NOTE), (None, Judgement.NOTE)]
)
def test_the_clock(tmp_path: Path, state: int | None, verdict: Judgement) -> None:
    (found,) = clock.check(PretendMachine(tmp_path, clock_state=state), wanted())
    assert found.verdict is verdict


class TestReport:
    def test_a_check_that_fails_is_a_lack(self, tmp_path: Path) -> None:
        def broken(machine: Machine, wanted: Wanted) -> list[Finding]:
            raise LookupError("no such field")

        areas = {"odd": examination.Area(broken)}
        found = examination.examine(PretendMachine(tmp_path), wanted(), areas)
        assert found.count(Judgement.LACK) == 1
        assert "no such field" in found.findings["odd"][0].says

    def test_a_lack_says_what_to_do(self) -> None:
        with pytest.raises(ValueError, match="does not say what to do"):
            lack("thing", "is not there", "")

    def test_the_document_is_as_documented(self, tmp_path: Path) -> None:
        areas = {"clock": examination.AREAS["clock"]}
        document = examination.examine(PretendMachine(tmp_path, clock_state=5), wanted(), areas).document()
        page = Path(__file__).parents[2].joinpath("docs/operations.md").read_text()
        findings = document["findings"]
        assert isinstance(findings, list)
        (finding,) = findings
        assert {"area", "name", "verdict", "says", "do"} == set(finding)
        for field in (*document, *finding):
            assert f"`{field}`" in page, f"docs/operations.md does not name {field}"

    @pytest.mark.parametrize("port", ["http", "0", "65536"])
    def test_a_port_that_is_none(self, port: str) -> None:
        with pytest.raises(ConfigError, match="--port: must be a number from 1 to 65535"):
            Wanted(port=(port,))

    def test_a_role_that_is_not_known(self) -> None:
        with pytest.raises(ConfigError, match="--role: must be one of ring, router, prefill, decode, worker"):
            Wanted(role="planner")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("size", "text"), [(64, "64 B"), (65536, "64 KiB"), (68_000_000, "65 MiB"), (5 << 41, "10240 GiB")]
    )
    def test_sizes(self, size: int, text: str) -> None:
        assert size_text(size) == text
