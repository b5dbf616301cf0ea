"""Prints why another process cannot open this one's device memory; empty: it can.

Called with a handle, it is that other process.
"""

from __future__ import annotations

import subprocess
import sys

import orjson

_OPEN_S = 60.0
_BYTES = 1 << 20


def main() -> None:
    import torch

    from baton.transport.cuda_ipc import CudaIpc

    memory = torch.zeros(_BYTES, dtype=torch.uint8, device="cuda")
    ipc = CudaIpc()
    if len(sys.argv) > 1:
        sys.exit(0 if ipc.opens(bytes.fromhex(sys.argv[1])) else 1)
    print(orjson.dumps({"why": _why(ipc.handle(memory.data_ptr()))}).decode())


def _why(handle: bytes) -> str:
    if not handle:
        return "the driver gives no handle"
    command = (sys.executable, "-P", "-m", "baton.doctor.probes.cuda_ipc", handle.hex())
    opened = subprocess.run(command, capture_output=True, timeout=_OPEN_S, check=False)
    return "" if opened.returncode == 0 else "it cannot open the handle"


if __name__ == "__main__":
    main()
