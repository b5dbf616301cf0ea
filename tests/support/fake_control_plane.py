"""An API server for the real ``helm``: it keeps objects, and refuses what a real one (1.36) was seen to.

It refuses unknown fields and wrong types, by the schemas of Kubernetes, names that its kinds cannot have,
selectors that change, and objects that are there already. It runs on a thread of its own, as helm is a
process that is waited for. No controller runs: pods come of nothing here (`tests.support.kubelet` has those).
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from tests.support.chart import VERSIONS, problems, run_helm
from tests.support.kubelet import matches
from tests.support.secret_protobuf import MAGIC, secret_of
from tests.support.strategic_merge import merged

Object = dict[str, Any]

KINDS: Mapping[str, tuple[str, ...]] = {
    "v1": ("Secret", "Service", "ServiceAccount", "ConfigMap", "Pod", "PersistentVolumeClaim", "Namespace"),
    "apps/v1": ("Deployment",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "policy/v1": ("PodDisruptionBudget",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "networking.k8s.io/v1": ("NetworkPolicy", "Ingress"),
}
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
IMMUTABLE: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "Deployment": (("spec", "selector"),),
    "PersistentVolumeClaim": (
        ("spec", "accessModes"),
        ("spec", "storageClassName"),
        ("spec", "resources", "requests", "storage"),  # may grow, which no test does
    ),
    "RoleBinding": (("roleRef",),),
}
DEFAULT_CLASS = "standard"
"""What a claim gets that names no storage class."""


def plural(kind: str) -> str:
    name = kind.lower()
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith("s") else f"{name}s"


@dataclass
class FakeControlPlane:
    """The objects of a cluster, by API version, kind, namespace and name."""

    objects: dict[tuple[str, str, str, str], Object] = field(default_factory=dict)
    url: str = ""
    _version: int = 1

    def of_kind(self, kind: str) -> dict[str, Object]:
        """By their names, in whatever namespace."""
        return {key[3]: one for key, one in self.objects.items() if key[1] == kind}

    def put(self, one: Object) -> None:
        """As somebody's ``kubectl create`` does. Raises ValueError where it is refused."""
        metadata = one["metadata"]
        self._create(one["apiVersion"], one["kind"], metadata["namespace"], one)

    # --- what is refused

    def _create(self, api: str, kind: str, namespace: str, one: Object) -> Object:
        name = one["metadata"]["name"]
        if (api, kind, namespace, name) in self.objects:
            raise RefusedError(409, "AlreadyExists", f'{plural(kind)} "{name}" already exists')
        if kind == "PersistentVolumeClaim":
            one = {**one, "spec": {"storageClassName": DEFAULT_CLASS, **one["spec"]}}
        return self._keep(api, kind, namespace, name, one)

    def _replace(self, api: str, kind: str, namespace: str, name: str, one: Object) -> Object:
        before = self.objects[api, kind, namespace, name]
        for path in IMMUTABLE.get(kind, ()):
            if _at(before, path) != _at(one, path):
                where = ".".join(path)
                raise RefusedError(422, "Invalid", f'{kind} "{name}" is invalid: {where}: field is immutable')
        return self._keep(api, kind, namespace, name, one)

    def _keep(self, api: str, kind: str, namespace: str, name: str, one: Object) -> Object:
        allowed = DNS_1035 if kind == "Service" else DNS_1123
        if not allowed.fullmatch(name) or (kind == "Service" and len(name) > 63):
            raise RefusedError(422, "Invalid", f'{kind} "{name}" is invalid: metadata.name: Invalid value')
        one = {"apiVersion": api, "kind": kind, **one}
        if not _of_helm(one):
            found = problems([_as_written(one)], VERSIONS[-1:])
            if found:
                raise RefusedError(400, "BadRequest", f"strict decoding error: {'; '.join(found)}")
        self._version += 1
        metadata = {**one["metadata"], "namespace": namespace, "resourceVersion": str(self._version)}
        metadata.setdefault("uid", f"uid-{self._version}")
        one = _stored({**one, "metadata": metadata})
        self.objects[api, kind, namespace, name] = one
        return one

    # --- what is asked

    async def handle(self, request: web.Request) -> web.Response:
        try:
            return web.json_response(self._answer(request, await request.read()))
        except RefusedError as refused:
            return web.json_response(refused.status(), status=refused.code)

    def _answer(self, request: web.Request, body: bytes) -> Object:
        parts = [part for part in request.path.split("/") if part]
        match parts:
            case ["version"]:
                return {"major": "1", "minor": "36", "gitVersion": "v1.36.2"}
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"]}
            case ["apis"]:
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(_groups())}
            case ["api", "v1"]:
                return _resources("v1")
            case ["apis", group, version]:
                return _resources(f"{group}/{version}")
            case ["api", version, "namespaces", namespace, *rest] if rest:
                return self._asked(request, version, namespace, rest, body)
            case ["apis", group, version, "namespaces", namespace, *rest] if rest:
                return self._asked(request, f"{group}/{version}", namespace, rest, body)
        raise RefusedError(404, "NotFound", f"{request.path} is not here")

    def _asked(self, request: web.Request, api: str, namespace: str, rest: list[str], body: bytes) -> Object:
        kind = next((kind for kind in KINDS.get(api, ()) if plural(kind) == rest[0]), None)
        if kind is None:
            raise RefusedError(404, "NotFound", f"{rest[0]} are not here")
        if len(rest) == 1:
            if request.method == "POST":
                return self._create(api, kind, namespace, _read(body))
            return self._list(api, kind, namespace, request.query.get("labelSelector", ""))
        key = (api, kind, namespace, rest[1])
        if key not in self.objects:
            raise RefusedError(404, "NotFound", f'{rest[0]} "{rest[1]}" not found')
        if request.method == "DELETE":
            return self.objects.pop(key)
        if request.method == "PUT":
            return self._replace(*key, _read(body))
        if request.method == "PATCH":
            return self._replace(*key, merged(self.objects[key], json.loads(body)))
        return self.objects[key]

    def _list(self, api: str, kind: str, namespace: str, selector: str) -> Object:
        items = [
            one
            for key, one in self.objects.items()
            if key[:3] == (api, kind, namespace)
            and (not selector or matches(selector, one["metadata"].get("labels", {})))
        ]
        return {"apiVersion": api, "kind": f"{kind}List", "metadata": {}, "items": items}


class RefusedError(ValueError):
    """What the API server says no to."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    def status(self) -> Object:
        told = {"status": "Failure", "code": self.code, "reason": self.reason, "message": str(self)}
        return {"kind": "Status", "apiVersion": "v1", **told}


class Helm:
    """The real helm, with this cluster."""

    def __init__(self, plane: FakeControlPlane, kubeconfig: Path, namespace: str = "serving") -> None:
        self.plane = plane
        self.namespace = namespace
        self._options = ["--kubeconfig", str(kubeconfig), "--namespace", namespace]

    def __call__(self, *arguments: str, values: Object | None = None) -> str:
        """What it prints. Raises `tests.support.chart.RenderError` with what it says."""
        if arguments[0] in ("install", "upgrade"):
            # What is in question is what the server takes; what helm would find before is asked elsewhere.
            arguments = (*arguments, "--disable-openapi-validation", "-f", "-")
        return run_helm(*arguments, *self._options, given=json.dumps(values or {}))


@contextmanager
def control_plane(folder: Path) -> Iterator[Helm]:
    """A cluster with nothing in it, for as long as the context lasts."""
    plane = FakeControlPlane()
    started = threading.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> web.AppRunner:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", plane.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        plane.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(serve())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, name="control plane")
    thread.start()
    started.wait()
    config = folder / "kubeconfig"
    config.write_text(yaml.safe_dump(_kubeconfig(plane.url)))
    try:
        yield Helm(plane, config)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _kubeconfig(url: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {"token": "test"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }


def _groups() -> Iterator[Object]:
    for api in KINDS:
        group, _, version = api.rpartition("/")
        if group:
            versions = [{"groupVersion": api, "version": version}]
            yield {"name": group, "versions": versions, "preferredVersion": versions[0]}


def _resources(api: str) -> Object:
    if api not in KINDS:
        raise RefusedError(404, "NotFound", f"{api} is not here")
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {
            "name": plural(kind),
            "singularName": kind.lower(),
            "namespaced": kind != "Namespace",
            "kind": kind,
            "verbs": verbs,
        }
        for kind in KINDS[api]
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": resources}


def _read(body: bytes) -> Object:
    if body.startswith(MAGIC):
        return secret_of(body)
    found: Object = json.loads(body)
    return found


def _of_helm(one: Object) -> bool:
    """Whether it is one of helm's own records."""
    return bool(one.get("type") == "helm.sh/release.v1")


def _as_written(one: Object) -> Object:
    """``one`` without what the server adds."""
    ours = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation")
    metadata = {key: value for key, value in one["metadata"].items() if key not in ours}
    return {**one, "metadata": metadata}


def _stored(one: Object) -> Object:
    """As the server keeps it: what a Secret has as text becomes data."""
    if one["kind"] != "Secret" or "stringData" not in one:
        return one
    text = {key: base64.b64encode(value.encode()).decode() for key, value in one["stringData"].items()}
    kept = {key: value for key, value in one.items() if key != "stringData"}
    return {**kept, "data": {**one.get("data", {}), **text}}


def _at(one: Object, path: tuple[str, ...]) -> object:
    value: Any = one
    for part in path:
        value = (value or {}).get(part)
    found: object = value
    return found
