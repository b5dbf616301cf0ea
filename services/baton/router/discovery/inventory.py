"""The known EndpointSlices, from lists and the events of watches. Pure: no clock, no network."""

from __future__ import annotations

from collections.abc import Iterable

from baton.router.discovery.endpoint import Endpoint
from baton.router.discovery.slices import EndpointSlice, endpoints_of


class Inventory:
    """The known EndpointSlices. Events may come twice, late or not at all; the next list corrects the
    errors."""

    def __init__(self, port_name: str) -> None:
        self._port_name = port_name
        self._slices: dict[tuple[str, str], EndpointSlice] = {}
        self._gone: dict[tuple[str, str], str] = {}
        """Slices deleted since the last list, with the version of each deletion."""

    def replace(self, slices: Iterable[EndpointSlice]) -> None:
        """Replace all slices by those of a list."""
        self._slices = {each.key: each for each in slices}
        self._gone.clear()

    def apply(self, kind: str, changed: EndpointSlice) -> None:
        """Apply an event, ADDED, MODIFIED or DELETED, unless the known slice is newer."""
        known = self._slices.get(changed.key)
        version = self._gone.get(changed.key) if known is None else known.metadata.resource_version
        if version is not None and _older(changed.metadata.resource_version, version):
            return
        if kind == "DELETED":
            self._slices.pop(changed.key, None)
            self._gone[changed.key] = changed.metadata.resource_version
        else:
            self._slices[changed.key] = changed
            self._gone.pop(changed.key, None)

    def endpoints(self) -> list[Endpoint]:
        return endpoints_of(self._slices.values(), self._port_name)


def _older(version: str, than: str) -> bool:
    """Whether ``version`` is older. Resource versions are decimal numbers that grow (guaranteed since
    Kubernetes 1.35, and true before). Other versions cannot be compared: the last one counts."""
    if version.isdecimal() and than.isdecimal():
        return int(version) < int(than)
    return False
