"""axe-core over a page in the browser: what keeps people with assistive technology from using it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.browser import Page

SCRIPT = Path(__file__).with_name("vendor") / "axe.min.js"
_RUN = """axe.run().then((found) => JSON.stringify(found.violations.map((each) =>
  [each.impact, each.id, each.nodes.slice(0, 3).map((node) => node.html.slice(0, 200))])))"""


async def serious_faults(page: Page) -> list[str]:
    """Return the faults that axe calls serious or critical, each with the first elements that have it."""
    if not await page.evaluate("typeof axe !== 'undefined'"):
        await page.evaluate(SCRIPT.read_text() + "; 0")
    found = json.loads(await page.evaluate(_RUN))
    return [f"{rule}: {nodes}" for impact, rule, nodes in found if impact in ("serious", "critical")]
