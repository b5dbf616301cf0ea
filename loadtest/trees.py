"""Source trees whose processes are compared or attacked: this one, and other checkouts of it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def python_path(tree: Path) -> str:
    """Return the PYTHONPATH of processes that run the Baton of that tree."""
    return os.pathsep.join(str(tree / part) for part in ("services", "kernels"))


def tree(text: str) -> Path:
    """Parse an option's value. Raises argparse.ArgumentTypeError for a folder that is no source tree."""
    path = Path(text).resolve()
    if not (path / "services" / "baton").is_dir():
        raise argparse.ArgumentTypeError(f"{path} has no services/baton")
    return path
