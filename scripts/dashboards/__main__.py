"""Write Grafana's dashboards.

python -m scripts.dashboards            # into helm/baton/dashboards
python -m scripts.dashboards --check    # exit status 1 if what is there is not what this would write
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scripts.dashboards import cache, decode, first_token, handoff, overview, planner, prefill, router
from scripts.dashboards.panels import Dashboard, document

FOLDER = Path(__file__).parents[2] / "helm" / "baton" / "dashboards"
DASHBOARDS: tuple[Dashboard, ...] = tuple(
    module.DASHBOARD for module in (overview, first_token, prefill, decode, handoff, cache, router, planner)
)


def written(dashboard: Dashboard) -> str:
    return json.dumps(document(dashboard), indent=1) + "\n"


def main() -> int:
    paths = {FOLDER / f"{dashboard.uid}.json": written(dashboard) for dashboard in DASHBOARDS}
    if "--check" in sys.argv[1:]:
        stale = [path for path, text in paths.items() if not path.exists() or path.read_text() != text]
        stale += [path for path in FOLDER.glob("*.json") if path not in paths]
        for path in stale:
            print(f"{path} is not current: run python -m scripts.dashboards", file=sys.stderr)
        return int(bool(stale))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
