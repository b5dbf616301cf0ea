"""The pictures of the live page in the docs: a ring of simulated workers under load, in headless Chromium.

    python -m loadtest.page_images                       # writes docs/images/ui-*.png
    python -m loadtest.page_images --into /tmp/images

Six prefill and six decode workers (`baton worker-sim`) answer three tenants, who ask for more than there are
seats. Meanwhile one worker takes the other role, one drains and one is killed. The byte counts are what the
KV would weigh: a simulated worker sends 8 bytes for a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.process import ready
from baton.router.security.keys import entry_line, new_key
from loadtest.routers.client import Plan
from tests.support.browser import CHROMIUM, Page, browsing
from tests.support.ring import CLUSTER_KEY, Ring, Service, running, running_routers, simulated

SEATS = 8
BLOCKS = 1536
STEPS = {
    "step_base_ms": 24,
    "step_row_ms": 0.3,
    "prefill_ms_per_1k": 150,
    "kv_bytes_per_token": 131072,
    "link_bytes_per_s": 2e9,
}
STREAMS = {"acme": 56, "lab": 28, "night-batch": 18}
"""The streams that each tenant keeps open."""


@dataclass(frozen=True)
class Shot:
    """One picture."""

    name: str
    view: str
    width: int = 1440
    height: int = 1000
    dark: bool = False
    click: str = ""
    """A selector: what is clicked first."""


BEFORE = (
    Shot("ui", "ring", height=1080),
    Shot("ui-memory", "memory", height=960),
    Shot("ui-latency-dark", "latency", height=1450, dark=True),
    Shot("ui-requests", "requests", height=1080, click="#view tbody tr:nth-child(24)"),
    Shot("ui-playground", "playground", height=760),
)
AFTER = (
    Shot("ui-changes-dark", "ring", height=1080, dark=True),
    Shot("ui-narrow", "ring", width=390, height=1400),
)


def keys_of(tmp: Path) -> tuple[Path, dict[str, str]]:
    """Write a file of keys: one for each tenant, and an operator's. Return it, and the keys by tenant."""
    keys = {name: new_key() for name in (*STREAMS, "operators")}
    lines = [entry_line(key, name, name) for name, key in keys.items()]
    lines[-1] = lines[-1].replace('"tenant"', '"operator": true, "tenant"')
    file = tmp / "keys.yaml"
    file.write_text("\n".join(["keys:", *lines]))
    return file, keys


@contextmanager
def load(url: str, keys: Mapping[str, str], seconds: float) -> Iterator[None]:
    """Have all tenants ask, each by a client of its own."""
    clients = []
    for tenant, streams in STREAMS.items():
        plan = Plan(
            streams=streams,
            warm_up_s=0.0,
            seconds=seconds,
            prompt_words=350,
            max_tokens=120,
            stagger_s=6.0,
            headers={"Authorization": f"Bearer {keys[tenant]}"},
        )
        client = subprocess.Popen(
            [sys.executable, "-m", "loadtest.routers.client", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert client.stdin is not None
        client.stdin.write(msgspec.json.encode(plan))
        client.stdin.close()
        clients.append(client)
    try:
        yield
    finally:
        for client in clients:
            client.kill()
            client.wait()


async def take(page: Page, shots: Sequence[Shot], into: Path) -> None:
    for shot in shots:
        await page.appear(width=shot.width, height=shot.height, dark=shot.dark)
        await page.evaluate(f"location.hash = {json.dumps(shot.view)}")
        await asyncio.sleep(2.5)
        if shot.click:
            await page.evaluate(f"document.querySelector({json.dumps(shot.click)}).click()")
            await asyncio.sleep(2.5)
        (into / f"{shot.name}.png").write_bytes(await page.screenshot())


def disturb(ring: Ring) -> None:
    """Have a prefill worker take the other role, another one drain, and kill a decode worker."""
    prefill, decode = ring.of_role("prefill"), ring.of_role("decode")
    decode[-1].kill()
    prefill[-1].process.send_signal(signal.SIGTERM)
    assert isinstance(prefill[0].ready, ready.WorkerReady)
    subprocess.run(
        [sys.executable, "-m", "baton", "switch-role", prefill[0].ready.address, "decode"],
        env={**os.environ, "BATON_CLUSTER_KEY": CLUSTER_KEY},
        check=True,
    )


async def photograph(ring: Ring, operator: str, into: Path, fill_s: float) -> None:
    with tempfile.TemporaryDirectory() as profile:
        async with browsing(Path(profile)) as page:
            await page.run_first(f"sessionStorage.setItem('baton-key', {json.dumps(operator)})")
            await page.open(f"{ring.url}/ui")
            await asyncio.sleep(fill_s)
            await take(page, BEFORE, into)
            await asyncio.to_thread(disturb, ring)
            await take(page, AFTER, into)
            if page.errors:
                raise SystemExit(f"the page complains: {page.errors}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, default=Path("docs/images"), help="the folder for the pictures")
    parser.add_argument("--fill", type=float, default=150.0, help="seconds of load before the first picture")
    chosen = parser.parse_args()
    if CHROMIUM is None:
        raise SystemExit("no Chromium is found: apt-get install chromium")
    chosen.into.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        tmp = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file, keys = keys_of(tmp)
        (tmp / "steps.json").write_bytes(msgspec.json.encode(STEPS))
        options = [
            "--profile",
            str(tmp / "steps.json"),
            "--max-num-seqs",
            str(SEATS),
            "--num-blocks",
            str(BLOCKS),
        ]
        workers: list[Service] = [
            simulated(tmp, f"{role}-{number}", role, *options)
            for role in ("prefill", "decode")
            for number in range(6)
        ]
        stack.enter_context(running(workers))
        slo = ("--api-keys", str(file), "--slo-ttft", "4", "--slo-itl", "0.12")
        rings = stack.enter_context(running_routers(tmp, "demo", {"router": workers}, slo))
        stack.enter_context(load(rings["router"].url, keys, chosen.fill + 120))
        asyncio.run(photograph(rings["router"], keys["operators"], chosen.into, chosen.fill))


if __name__ == "__main__":
    main()
