"""The role of a worker: which part of a request it computes."""

from __future__ import annotations

from typing import Literal

Role = Literal["prefill", "decode", "both"]

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


def may_prefill(role: Role) -> bool:
    """Whether a worker of this role may compute prompts for decode workers."""
    return role != "decode"


def may_decode(role: Role) -> bool:
    """Whether a worker of this role may generate answers."""
    return role != "prefill"


def takes_over(role: Role) -> bool:
    """Whether requests are handed off to a worker of this role."""
    return role == "decode"


def role_named(name: str | None) -> Role | None:
    """Return the role of this name, or None if there is no such role."""
    return next((role for role in ROLES if role == name), None)
