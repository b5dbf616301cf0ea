"""Draw every dashboard from a real Prometheus' answers.

    python -m scripts.dashboard_pictures [--seconds 120] [--into docs/images/dashboards]

Grafana is not needed: panels, queries, units, thresholds and places are read from the JSON that Grafana
imports. The rings are those of ``loadtest.observed``: simulated workers with tenants and more requests than
they are let in, of which one is killed meanwhile, and a ring of the demo model with a planner. Needs Debian's
prometheus, and matplotlib (``pip install 'baton[bench]'``).
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from loadtest.observed import LOOK_BACK, observed, watch
from scripts.dashboard_pictures.answers import Source, Span
from scripts.dashboard_pictures.drawing import drawn
from scripts.dashboard_pictures.reading import read
from tests.support.prometheus import DASHBOARDS, PROMETHEUS, ROOT

FOLDER = ROOT / "docs" / "images" / "dashboards"
STEP_S = 1.0
COLOURS = 128


def main() -> int:
    chosen = _options()
    if PROMETHEUS is None:
        print("NOT RUN: there is no prometheus here (apt-get install prometheus)", file=sys.stderr)
        return 1
    chosen.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, observed(Path(scratch)) as run:
        began = time.time()
        watch(run.server, run.simulation, chosen.seconds)
        span = Span(began, time.time(), STEP_S)
        source = Source(run.server.url, span, LOOK_BACK, {**run.names, **run.peers})
        for path in DASHBOARDS:
            picture = read(path)
            file = chosen.into / f"{picture.name}.png"
            save(drawn(picture, source.ask, source.seconds), file)
            print(f"{file}: {len(picture.panels)} panels, {file.stat().st_size / 1e3:.0f} kB")
    return 0


def save(figure: Figure, file: Path) -> None:
    """Write a picture as a PNG of ``COLOURS`` colours, a third of what all of them take."""
    drawn_bytes = io.BytesIO()
    figure.savefig(drawn_bytes, format="png")
    Image.open(drawn_bytes).convert("RGB").quantize(COLOURS).save(file, optimize=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of load, which the pictures show")
    parser.add_argument("--into", type=Path, default=FOLDER, help="the folder of the pictures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
