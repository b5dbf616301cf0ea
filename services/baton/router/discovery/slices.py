"""EndpointSlices (``discovery.k8s.io/v1``) as the API server sends them, and the workers in them.

Only the fields that are used are decoded. A null or absent condition has the API's meaning: ``ready`` and
``serving`` are true, ``terminating`` is false.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from baton.core.role import role_named
from baton.process.options import join_address
from baton.router.discovery.endpoint import Endpoint

ROLE_LABEL = "baton.dev/role"
MODEL_LABEL = "baton.dev/model"
REVISION_LABEL = "baton.dev/revision"
"""The labels of the Service, which Kubernetes copies to its slices. Labels of pods are in no slice."""


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None


class Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class TargetRef(msgspec.Struct, frozen=True):
    kind: str = ""
    uid: str = ""


class SliceEndpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: list[str] | None = None
    conditions: Conditions | None = None
    target_ref: TargetRef | None = None
    zone: str | None = None


class Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    metadata: Metadata = Metadata()
    address_type: str = ""
    endpoints: list[SliceEndpoint] | None = None
    ports: list[Port] | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.metadata.namespace, self.metadata.name


class EndpointSliceList(msgspec.Struct, frozen=True):
    metadata: Metadata = Metadata()
    items: list[EndpointSlice] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """An event of a watch. ``object`` is an EndpointSlice, or a Status if ``type`` is ERROR."""

    type: str
    object: msgspec.Raw


class ApiStatus(msgspec.Struct, frozen=True):
    code: int = 0
    reason: str = ""
    message: str = ""


def endpoints_of(slices: Iterable[EndpointSlice], port_name: str) -> list[Endpoint]:
    """Return the workers in ``slices``, ordered by address, each once.

    An endpoint may be in several slices for a while, when it is moved from one to another. If the slices do
    not agree, the least favourable conditions count. A pod with addresses of both families is one worker,
    called at its IPv4 address.
    """
    found: dict[str, Endpoint] = {}
    for one in sorted(slices, key=lambda each: (each.address_type != "IPv4", each.key)):
        for endpoint in _endpoints(one, port_name):
            known = found.get(endpoint.address)
            found[endpoint.address] = endpoint if known is None else _cautious(known, endpoint)
    by_pod: dict[tuple[str, int], Endpoint] = {}
    for endpoint in found.values():
        port = int(endpoint.address.rpartition(":")[2])
        pod = (endpoint.uid or endpoint.address, port)
        by_pod[pod] = _cautious(by_pod[pod], endpoint) if pod in by_pod else endpoint
    return sorted(by_pod.values(), key=lambda each: each.address)


def _endpoints(one: EndpointSlice, port_name: str) -> Iterable[Endpoint]:
    port = next((p.port for p in one.ports or () if (p.name or "") == port_name and p.port), None)
    if port is None:
        return
    labels = one.metadata.labels or {}
    role = role_named(labels.get(ROLE_LABEL))
    for endpoint in one.endpoints or ():
        if not endpoint.addresses:  # a pod without an address
            continue
        conditions = endpoint.conditions or Conditions()
        target = endpoint.target_ref
        yield Endpoint(
            # The schema allows more than one address: all are of the same endpoint.
            address=join_address(endpoint.addresses[0], port),
            uid=target.uid if target is not None and target.kind == "Pod" else "",
            ready=conditions.ready is not False,
            serving=conditions.serving is not False,
            terminating=conditions.terminating is True,
            role=role,
            model=labels.get(MODEL_LABEL, ""),
            revision=labels.get(REVISION_LABEL, ""),
            zone=endpoint.zone or "",
        )


def _cautious(one: Endpoint, other: Endpoint) -> Endpoint:
    """Merge two descriptions of one address or one pod, at the first one's address. If they are of two pods,
    the pod that is not ending counts: an ended pod's address may be given to another."""
    if one.uid != other.uid:
        return one if one.admits or not other.admits else other
    return replace(
        one,
        ready=one.ready and other.ready,
        serving=one.serving and other.serving,
        terminating=one.terminating or other.terminating,
    )
