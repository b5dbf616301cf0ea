"""Tests that hold a clock to another one, on machines that do other things as well."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ParamSpec

TRIES = 3
P = ParamSpec("P")


def undisturbed(test: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """Runs a test again, twice at most, when it fails: a machine that stands still for a moment holds up one
    run, and wrong code fails all of them. The fixtures are the same in each."""

    @functools.wraps(test)
    async def tried(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(TRIES - 1):
            with suppress(AssertionError):
                await test(*args, **kwargs)
                return
        await test(*args, **kwargs)

    return tried
