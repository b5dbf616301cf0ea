"""Prints the version of torch, the CUDA that it was built for, and the devices that it finds."""

from __future__ import annotations

import orjson


def main() -> None:
    import torch

    error = ""
    if torch.version.cuda is not None:
        try:
            torch.zeros(1, device="cuda")
        except (RuntimeError, AssertionError) as failure:
            error = str(failure).partition("\n")[0]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    told = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices, "error": error}
    print(orjson.dumps(told).decode())


if __name__ == "__main__":
    main()
