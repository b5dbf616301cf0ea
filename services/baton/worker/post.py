"""What a worker is for, for as long as it is."""

from __future__ import annotations

from dataclasses import dataclass

from baton.connector.identity import new_incarnation
from baton.worker.config import RoleName


@dataclass(frozen=True, slots=True)
class Post:
    """A role, and the name that the process has in it.

    Each has a name of its own: who still holds a greeting, a handle, a link or an operator's proof from
    before a change of role is refused by name, as if the process had been started again, and never served in
    the wrong role.
    """

    role: RoleName
    incarnation: str

    @classmethod
    def new(cls, role: RoleName) -> Post:
        return cls(role, new_incarnation())
