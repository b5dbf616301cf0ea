"""Releases of the chart by the real helm, before an API server: what a rendering alone cannot show."""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, RenderError
from tests.support.fake_control_plane import Helm, RefusedError, control_plane

pytestmark = pytest.mark.deep

Object = dict[str, Any]
REDIS: Object = {"redis": {"mode": "bundled"}}


@pytest.fixture
def helm(tmp_path: Path) -> Iterator[Helm]:
    with control_plane(tmp_path) as running:
        yield running


def install(helm: Helm, name: str = "baton", chart: Path = CHART, **values: Any) -> None:
    helm("install", name, str(chart), values=values)


def upgrade(helm: Helm, name: str = "baton", chart: Path = CHART, **values: Any) -> None:
    helm("upgrade", name, str(chart), values=values)


def key_of(helm: Helm, name: str, key: str) -> str:
    return base64.b64decode(helm.plane.of_kind("Secret")[name]["data"][key]).decode()


def secret(name: str, **data: str) -> Object:
    metadata = {"name": name, "namespace": "serving"}
    text = {key.replace("_", "-"): value for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": text}


@pytest.fixture
def older_chart(tmp_path: Path) -> Path:
    """One that has none of its Secrets kept, as charts once had none."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    names = chart / "templates" / "_names.tpl"
    text = names.read_text()
    assert '{"helm.sh/resource-policy": "keep"}' in text
    names.write_text(text.replace('{"helm.sh/resource-policy": "keep"}', "{}"))
    return chart


class TestSecrets:
    def test_what_is_drawn_stays_through_upgrades_and_rollbacks(self, helm: Helm) -> None:
        install(helm, **REDIS)
        before = key_of(helm, "baton-cluster-key", "cluster-key"), key_of(helm, "baton-redis", "password")
        upgrade(helm, **REDIS, router={"replicas": 3})
        helm("rollback", "baton")
        assert helm.plane.of_kind("Deployment")["baton-router"]["spec"]["replicas"] == 1
        after = key_of(helm, "baton-cluster-key", "cluster-key"), key_of(helm, "baton-redis", "password")
        assert after == before

    def test_one_of_the_users_may_be_named_as_the_docs_say(self, helm: Helm) -> None:
        """The chart's own stays: what runs asks for it until it is rolled."""
        install(helm, **REDIS)
        helm.plane.put(secret("ring-cluster-key", cluster_key="k" * 32))
        helm.plane.put(secret("ring-redis", password="p" * 32))
        upgrade(
            helm,
            redis={"mode": "bundled", "existingSecret": "ring-redis"},
            clusterKey={"existingSecret": "ring-cluster-key"},
        )
        assert {"baton-cluster-key", "baton-redis"} < set(helm.plane.of_kind("Secret"))
        container = helm.plane.of_kind("Deployment")["baton-router"]["spec"]["template"]["spec"][
            "containers"
        ][0]
        named = {env["name"]: env.get("valueFrom", {}).get("secretKeyRef") for env in container["env"]}
        assert named["BATON_CLUSTER_KEY"]["name"] == "ring-cluster-key"

    def test_the_charts_own_may_be_named_once_it_is_kept(self, helm: Helm) -> None:
        install(helm)
        before = key_of(helm, "baton-cluster-key", "cluster-key")
        upgrade(helm, clusterKey={"existingSecret": "baton-cluster-key"})
        assert key_of(helm, "baton-cluster-key", "cluster-key") == before

    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("clusterKey.existingSecret", {"clusterKey": {"existingSecret": "baton-cluster-key"}, **REDIS}),
            ("redis.existingSecret", {"redis": {"mode": "bundled", "existingSecret": "baton-redis"}}),
        ],
    )
    def test_what_helm_would_delete_is_refused(
        self, helm: Helm, older_chart: Path, field: str, values: Object
    ) -> None:
        install(helm, chart=older_chart, **REDIS)
        before = set(helm.plane.of_kind("Secret"))
        with pytest.raises(
            RenderError, match=rf"{re.escape(field)}: baton-.* is the Secret that this release made"
        ):
            upgrade(helm, **values)
        assert set(helm.plane.of_kind("Secret")) == before

    def test_an_older_chart_loses_the_key(self, helm: Helm, older_chart: Path) -> None:
        """What the refusal is for. It shows as well that the fake server and helm do their part in it."""
        (older_chart / "templates" / "validate.yaml").write_text("")
        install(helm, chart=older_chart)
        upgrade(helm, chart=older_chart, clusterKey={"existingSecret": "baton-cluster-key"})
        assert "baton-cluster-key" not in helm.plane.of_kind("Secret")

    def test_secrets_made_by_hand_are_not_taken_over(self, helm: Helm) -> None:
        helm.plane.put(secret("baton-cluster-key", cluster_key="k" * 32))
        with pytest.raises(RenderError, match="invalid ownership metadata"):
            install(helm)
        install(helm, clusterKey={"existingSecret": "baton-cluster-key"})
        assert key_of(helm, "baton-cluster-key", "cluster-key") == "k" * 32

    def test_an_uninstalled_release_comes_back_with_its_key(self, helm: Helm) -> None:
        install(helm)
        before = key_of(helm, "baton-cluster-key", "cluster-key")
        helm("uninstall", "baton")
        assert not helm.plane.of_kind("Deployment")
        install(helm)
        assert key_of(helm, "baton-cluster-key", "cluster-key") == before


PVC: dict[str, Any] = {"model": {"name": "org/model", "cache": {"type": "pvc", "size": "500Gi"}}}
FAST: dict[str, Any] = {
    "model": {"name": "org/model", "cache": {**PVC["model"]["cache"], "storageClass": "fast"}}
}


class TestRollback:
    """Helm adopts nothing when it rolls back: what is kept must be in every revision between."""

    def test_across_secrets_of_the_users(self, helm: Helm) -> None:
        install(helm, **REDIS)
        before = key_of(helm, "baton-cluster-key", "cluster-key"), key_of(helm, "baton-redis", "password")
        helm.plane.put(secret("ring-cluster-key", cluster_key="k" * 32))
        helm.plane.put(secret("ring-redis", password="p" * 32))
        theirs: Object = {
            "redis": {"mode": "bundled", "existingSecret": "ring-redis"},
            "clusterKey": {"existingSecret": "ring-cluster-key"},
        }
        upgrade(helm, **theirs)
        upgrade(helm, **theirs, router={"replicas": 3})
        helm("rollback", "baton", "1")
        after = key_of(helm, "baton-cluster-key", "cluster-key"), key_of(helm, "baton-redis", "password")
        assert after == before
        assert env_of(helm, "baton-router")["BATON_CLUSTER_KEY"]["name"] == "baton-cluster-key"
        assert key_of(helm, "ring-cluster-key", "cluster-key") == "k" * 32
        upgrade(helm, **theirs)  # and there again
        helm("rollback", "baton", "2")

    def test_to_a_bundled_redis(self, helm: Helm) -> None:
        install(helm, **REDIS)
        before = key_of(helm, "baton-redis", "password")
        upgrade(helm, redis={"mode": "external", "url": "redis://elsewhere:6379/0"})
        assert "baton-redis" not in helm.plane.of_kind("Deployment")
        helm("rollback", "baton", "1")
        assert "baton-redis" in helm.plane.of_kind("Deployment")
        assert key_of(helm, "baton-redis", "password") == before

    @pytest.mark.parametrize(
        ("first", "then"),
        [
            (PVC, {"type": "hostPath", "hostPath": "/mnt"}),
            (FAST, {"type": "hostPath", "hostPath": "/mnt"}),
            (FAST, {"type": "none"}),
            (FAST, {"type": "pvc", "existingClaim": "another"}),
        ],
    )
    def test_to_a_claim_that_is_kept(self, helm: Helm, first: Object, then: Object) -> None:
        """Whatever else of the values went with it: its size, its class."""
        install(helm, **first)
        before = helm.plane.of_kind("PersistentVolumeClaim")["baton-models"]
        upgrade(helm, model={"name": "org/model", "cache": then})
        helm("rollback", "baton", "1")
        after = helm.plane.of_kind("PersistentVolumeClaim")["baton-models"]
        assert (after["spec"], after["metadata"]["uid"]) == (before["spec"], before["metadata"]["uid"])

    def test_a_claim_that_is_not_kept_goes(self, helm: Helm) -> None:
        install(helm, model={"name": "org/model", "cache": {"type": "pvc", "keep": False}})
        upgrade(helm, model={"name": "org/model"})
        assert not helm.plane.of_kind("PersistentVolumeClaim")

    def test_what_is_kept_of_another_release_is_not_taken(self, helm: Helm) -> None:
        install(helm, fullnameOverride="ring")
        helm("uninstall", "baton")
        theirs: Object = {"clusterKey": {"existingSecret": "mine"}, "fullnameOverride": "ring"}
        install(helm, "second", **theirs)
        manifest = yaml.safe_load_all(helm("get", "manifest", "second"))
        assert not [one for one in manifest if one and one["kind"] == "Secret"]


class TestClusterKey:
    """While a cluster key is replaced, pods of both keys run, and the new ones accept either."""

    def test_the_one_that_runs_is_accepted_until_the_next_upgrade(self, helm: Helm) -> None:
        install(helm, planner={"enabled": True, "gpuBudget": 2})
        theirs: Object = {"clusterKey": {"existingSecret": "mine", "key": "k"}}
        upgrade(helm, **theirs, planner={"enabled": True, "gpuBudget": 2})
        for component in ("router", "prefill", "decode", "planner"):
            env = env_of(helm, f"baton-{component}")
            assert env["BATON_CLUSTER_KEY"] == {"name": "mine", "key": "k"}
            previous = {"name": "baton-cluster-key", "key": "cluster-key", "optional": True}
            assert env["BATON_CLUSTER_KEY_PREVIOUS"] == previous
        assert "accept the cluster key of Secret baton-cluster-key as well" in helm("get", "notes", "baton")
        upgrade(helm, **theirs)
        previous = {"name": "mine", "key": "k-previous", "optional": True}
        assert env_of(helm, "baton-decode")["BATON_CLUSTER_KEY_PREVIOUS"] == previous
        assert "as well" not in helm("get", "notes", "baton")

    def test_one_that_is_named_stays(self, helm: Helm) -> None:
        keys: Object = {"clusterKey": {"existingSecret": "mine", "previousSecret": "old"}}
        for step in (install, upgrade, upgrade):
            step(helm, **keys)
            previous = {"name": "old", "key": "cluster-key", "optional": True}
            assert env_of(helm, "baton-decode")["BATON_CLUSTER_KEY_PREVIOUS"] == previous


def env_of(helm: Helm, deployment: str) -> dict[str, Object]:
    """The variables of a container that are of Secrets, and of which."""
    [container] = helm.plane.of_kind("Deployment")[deployment]["spec"]["template"]["spec"]["containers"]
    sources = {each["name"]: each.get("valueFrom", {}).get("secretKeyRef") for each in container["env"]}
    return {name: source for name, source in sources.items() if source}


class TestNames:
    def test_what_pods_are_known_by_cannot_change(self, helm: Helm) -> None:
        install(helm, fullnameOverride="ring")
        services = {name: each["spec"] for name, each in helm.plane.of_kind("Service").items()}
        with pytest.raises(
            RenderError, match=r"nameOverride: cannot become relay; the pods of Deployment ring-"
        ):
            upgrade(helm, fullnameOverride="ring", nameOverride="relay")
        assert {name: each["spec"] for name, each in helm.plane.of_kind("Service").items()} == services
        upgrade(helm, nameOverride="relay", fullnameOverride="other")
        assert "other-router" in helm.plane.of_kind("Deployment")

    def test_a_release_cannot_have_the_names_of_another(self, helm: Helm) -> None:
        install(helm, "x")
        with pytest.raises(RenderError, match="the release x has objects of the name x-baton already"):
            install(helm, "x-baton")
        install(helm, "x-baton", fullnameOverride="second")

    @pytest.mark.parametrize("name", ["a.b", "1st"])
    def test_a_name_that_no_service_can_have(self, helm: Helm, name: str) -> None:
        with pytest.raises(
            RenderError, match=rf"fullnameOverride: {re.escape(name)}-baton cannot be the name of a Service"
        ):
            install(helm, name)
        assert not helm.plane.objects, "nothing was begun"
        install(helm, name, fullnameOverride="ring")


class TestTrials:
    """Of a node of 2 CPUs and 4 GiB, what Kubernetes' own pods ask for (minikube: 0.85 CPU, 0.4 GiB) is left
    out."""

    @pytest.mark.parametrize("example", ["cpu-trial", "simulated"])
    def test_a_trial_fits_a_small_node_with_its_upgrade(self, helm: Helm, example: str) -> None:
        values = yaml.safe_load((CHART / f"examples/{example}.yaml").read_text())
        install(helm, **values)
        cpus = memory = 0.0
        for name, one in helm.plane.of_kind("Deployment").items():
            spec = one["spec"]
            surge = spec["strategy"].get("rollingUpdate", {}).get("maxSurge", 0)
            for container in spec["template"]["spec"]["containers"]:
                requests = container["resources"]["requests"]
                cpus += (spec["replicas"] + surge) * cores(requests["cpu"])
                memory += (spec["replicas"] + surge) * gib(requests["memory"])
            assert spec["replicas"], name
        assert cpus <= 2 - 0.85
        assert memory <= 3.75 - 0.4

    def test_the_tests_pod_can_be_placed_and_sized(self, helm: Helm) -> None:
        test = {
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "resources": {
                "requests": {"cpu": "50m", "memory": "64Mi"},
                "limits": {"cpu": "1", "memory": "128Mi"},
            },
        }
        install(helm, test=test)
        hooks = [each for each in yaml.safe_load_all(helm("get", "hooks", "baton")) if each]
        [pod] = [each for each in hooks if each["metadata"]["name"] == "baton-test"]
        assert pod["spec"]["nodeSelector"] == test["nodeSelector"]
        assert pod["spec"]["tolerations"] == test["tolerations"]
        assert pod["spec"]["containers"][0]["resources"] == test["resources"]


class TestTheServer:
    """That it refuses at all what the tests above count on."""

    def test_unknown_fields(self, helm: Helm) -> None:
        with pytest.raises(RefusedError, match=r"strict decoding error.*replica"):
            helm.plane.put(
                {
                    "apiVersion": "policy/v1",
                    "kind": "PodDisruptionBudget",
                    "metadata": {"name": "a", "namespace": "serving"},
                    "spec": {"replica": 1},
                }
            )

    def test_selectors_that_change(self, helm: Helm, tmp_path: Path) -> None:
        install(helm, fullnameOverride="ring")
        chart = tmp_path / "unchecked"
        shutil.copytree(CHART, chart)
        (chart / "templates" / "validate.yaml").write_text("")
        with pytest.raises(RenderError, match=r"spec\.selector.*field is immutable"):
            upgrade(helm, chart=chart, fullnameOverride="ring", nameOverride="relay")


def cores(text: str) -> float:
    return float(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)


def gib(text: str) -> float:
    return float(text[:-2]) / {"Mi": 1024, "Gi": 1}[text[-2:]]
