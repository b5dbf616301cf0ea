"""The Helm chart: what it renders, what it refuses, and that its objects fit together."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer.main
import yaml

import baton
from baton.cli.main import commands
from baton.process.options import flag
from baton.worker.drain import LIVE_SERVICE
from tests.support.chart import (
    CHART,
    EXAMPLES,
    MONITORING,
    ROOT,
    VERSIONS,
    Object,
    RenderError,
    helm,
    lint,
    loose_ends,
    of_kind,
    pods_of,
    problems,
    read,
    render,
)
from tests.support.chart_values import REFUSED, VALUE_SETS, Values
from tests.support.deep import all_deep_but
from tests.support.release import merged

MONITORS = ("PodMonitor", "ServiceMonitor")


@functools.cache
def rendered(name: str) -> list[Object]:
    """A value set, with everything that a cluster may know."""
    return render(VALUE_SETS[name], apis=[MONITORING])


def deployment(objects: list[Object], component: str) -> Object:
    return of_kind(objects, "Deployment")[f"test-baton-{component}"]


def container(objects: list[Object], component: str) -> Object:
    first: Object = deployment(objects, component)["spec"]["template"]["spec"]["containers"][0]
    return first


def arguments(objects: list[Object], component: str) -> list[str]:
    found: list[str] = container(objects, component)["args"]
    return found


def option(objects: list[Object], component: str, name: str) -> str:
    args = arguments(objects, component)
    return args[args.index(name) + 1]


class TestRendering:
    @pytest.mark.parametrize("example", all_deep_but(2, EXAMPLES), ids=lambda path: path.stem)
    def test_an_example_is_right_for_every_version(self, example: Path) -> None:
        lint(example)
        objects = render(files=[example], apis=[MONITORING])
        assert problems(objects) == []
        assert loose_ends(objects) == []

    @pytest.mark.parametrize("name", all_deep_but(8, VALUE_SETS))
    def test_a_value_set_is_right_for_the_oldest_and_the_newest(self, name: str) -> None:
        objects = rendered(name)
        assert problems(objects, (VERSIONS[0], VERSIONS[-1])) == []
        assert loose_ends(objects) == []

    @pytest.mark.parametrize("name", all_deep_but(20, REFUSED))
    def test_a_wrong_value_is_refused(self, name: str) -> None:
        values, what = REFUSED[name]
        with pytest.raises(RenderError) as error:
            render(values)
        assert what in str(error.value)

    def test_older_clusters_are_refused(self) -> None:
        with pytest.raises(RenderError, match=r"chart requires kubeVersion: >=1\.28"):
            render(version="1.27")

    def test_the_application_has_the_version_of_the_program(self) -> None:
        assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == baton.__version__

    def test_what_is_empty_may_be_null(self) -> None:
        """Maps and lists whose keys are the user's: null is how Helm takes a default away."""
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        emptied = [f"{path}=null" for path in _user_maps(values)]
        emptied += [f"{component}.strategy=null" for component in ("router", "prefill", "decode")]
        assert {"prefill.resources=null", "workers.options=null", "commonAnnotations=null"} < set(emptied)
        planner = {"enabled": True, "gpuBudget": 8}
        objects = render({"planner": planner, "redis": {"mode": "bundled"}}, given=emptied, apis=[MONITORING])
        assert problems(objects, (VERSIONS[0], VERSIONS[-1])) == []
        assert loose_ends(objects) == []

    def test_notes_name_the_model_as_routers_serve_it(self, tmp_path: Path) -> None:
        chart = tmp_path / "baton"
        shutil.copytree(CHART, chart)
        (chart / "templates" / "NOTES.txt").rename(chart / "notes.txt")  # of those only a release has any
        (chart / "templates" / "notes.yaml").write_text(
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\ndata:\n"
            '  text: |\n    {{- tpl (.Files.Get "notes.txt") . | nindent 4 }}\n'
        )

        def notes(name: str) -> str:
            told: str = of_kind(render(VALUE_SETS[name], chart=chart), "ConfigMap")["notes"]["data"]["text"]
            return told

        for name, model in (("host path", "llama"), ("hub id", "qwen"), ("download", "Qwen/Qwen3-8B")):
            assert f"Baton serves {model} with" in notes(name) and f'"model": "{model}"' in notes(name)
        assert "https://llm.example/v1\n" in notes("ingress") and "https://b.example/v1\n" in notes("ingress")

    def test_the_schema_is_in_the_package(self) -> None:
        """Helm enforces none that .helmignore leaves out."""
        assert "values.schema.json" not in (CHART / ".helmignore").read_text()

    def test_the_schema_and_the_values_have_the_same_keys(self) -> None:
        """What the schema allows is in values.yaml, where it is explained; nothing else is."""
        schema = json.loads((CHART / "values.schema.json").read_text())
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        assert list(_differences(schema, schema, values)) == ["global"]


def _differences(root: Object, schema: Object, values: Object, path: str = "") -> Iterator[str]:
    """Keys that are on one side only; of maps whose keys are the user's, none."""
    schema = root["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    known = schema.get("properties")
    if known is None or path.endswith((".options", "esources", ".readiness", ".liveness", ".inline")):
        return
    for key in {*known, *values}:
        where = f"{path}.{key}" if path else key
        if key not in known or key not in values:
            yield where
        elif isinstance(values[key], dict):
            yield from _differences(root, known[key], values[key], where)


USERS = re.compile(
    r".*([aA]nnotations|[lL]abels|esources|nodeSelector|affinity|[sS]ecurityContext|behavior|options|inline"
    r"|readiness|liveness)"
)


def _user_maps(values: Object, path: str = "") -> Iterator[str]:
    """Lists, and maps whose keys are the user's."""
    for key, value in values.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, list) or (isinstance(value, dict) and USERS.fullmatch(where)):
            yield where
        elif isinstance(value, dict):
            yield from _user_maps(value, where)


class TestOptions:
    """The schema knows the options that the programs have."""

    COMMANDS = typer.main.get_command(commands)

    SET_BY_VALUES: ClassVar[dict[str, set[str]]] = {
        "router": {
            "workers", "discovery", "kubernetes_namespace", "kubernetes_selector", "kubeconfig",
            "kubernetes_context", "redis_url", "redis_password_file", "api_keys", "ssl_certfile",
            "ssl_keyfile", "ssl_ca_certs", "ssl_client_auth", "worker_tls_certfile", "worker_tls_keyfile",
            "worker_tls_ca_certs", "worker_tls_server_name", "model", "served_model_name", "models", "host",
            "port", "grpc_port", "cluster_key", "cluster_key_previous",
            "drain_timeout", "exit_with_parent",
        },
        "decode": {
            "model", "served_model_name", "host", "port", "metrics_port", "cluster_key",
            "cluster_key_previous",
            "worker_tls_certfile", "worker_tls_keyfile", "worker_tls_ca_certs", "worker_tls_server_name",
            "tensor_parallel_size", "pipeline_parallel_size", "nodes", "node_port", "join_timeout",
            "drain_timeout", "exit_with_parent",
        },
        "planner": {
            "prometheus_url", "ttft_target_ms", "itl_target_ms", "gpu_budget", "prefill_gpus", "decode_gpus",
            "prefill_deployment", "decode_deployment", "dry_run", "kubernetes_namespace",
            "kubernetes_selector", "kubeconfig", "kubernetes_context", "cluster_key", "cluster_key_previous",
            "host", "metrics_port",
            "worker_tls_certfile", "worker_tls_keyfile", "worker_tls_ca_certs", "worker_tls_server_name",
        },
    }  # fmt: skip

    @pytest.mark.parametrize(
        ("command", "definition"),
        [("router", "routerOptions"), ("decode", "workerOptions"), ("planner", "plannerOptions")],
    )
    def test_are_those_of_the_program(self, command: str, definition: str) -> None:
        known = json.loads((CHART / "values.schema.json").read_text())["$defs"][definition]["properties"]
        params = {str(param.name) for param in self._command(command).params} - self.SET_BY_VALUES[command]
        params.discard("help")
        assert {flag(_snake(name)) for name in known} == {flag(name) for name in params}

    def _command(self, name: str) -> Any:
        return self.COMMANDS.commands[name]  # type: ignore[attr-defined]

    @pytest.mark.parametrize("name", all_deep_but(20, VALUE_SETS))
    def test_are_understood_by_the_program(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for variable, value in (
            ("LEADER_ADDRESS", "a-0.a-0.serving"),
            ("GROUP_SIZE", "2"),
            ("WORKER_INDEX", "1"),
        ):
            monkeypatch.setenv(f"LWS_{variable}", value)  # as the controller does
        for pod in pods_of(rendered(name)).values():
            for each in pod["spec"]["containers"]:
                if "baton" in each.get("command", []):
                    command, *args = (_expanded(arg) for arg in each["args"])
                    self._command(command).make_context(command, args).close()

    @pytest.mark.parametrize("name", VALUE_SETS)
    def test_process_1_hears_signals(self, name: str) -> None:
        """It is the init of the images: as their ENTRYPOINT has it, where a command replaces that."""
        for image in ("router", "worker"):
            text = (ROOT / f"docker/{image}.Dockerfile").read_text()
            assert 'ENTRYPOINT ["tini", "--", "baton"]' in text and re.search(r"install.* tini", text)
        for pod in pods_of(rendered(name)).values():
            for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
                if "baton" in each["image"]:
                    assert each["command"][:2] == ["tini", "--"], each["name"]

    def test_of_a_role_go_before_those_of_all(self) -> None:
        objects = rendered("worker options")
        assert "--no-prefix-caching" in arguments(objects, "decode")
        assert "--prefix-caching" in arguments(objects, "prefill")
        assert option(objects, "decode", "--kv-cache-memory") == "34359738368"
        assert {"name": "OMP_NUM_THREADS", "value": "4"} in container(objects, "decode")["env"]

    def test_of_simulated_workers_are_those_of_their_program(self) -> None:
        schema = json.loads((CHART / "values.schema.json").read_text())
        params = {flag(str(param.name)) for param in self._command("worker-sim").params}
        both = {n for n in schema["$defs"]["workerOptions"]["properties"] if flag(_snake(n)) in params}
        with pytest.raises(RenderError, match="a simulated worker has no such option; it has") as error:
            render(REFUSED["an option that simulated workers lack"][0])
        told = str(error.value).partition("it has ")[2].splitlines()[0]
        assert set(told.split(", ")) == both

    def test_that_are_false_and_have_no_opposite_are_left_out(self) -> None:
        args = arguments(rendered("router options"), "router")
        assert "--no-allow-credentials" in args
        assert not [arg for arg in args if "log-prompts" in arg]
        assert args.count("--allowed-origins") == 2
        assert option(rendered("router options"), "router", "--queue-tokens") == "8000000"


def _snake(name: str) -> str:
    return re.sub(r"([A-Z])", lambda match: "_" + match[1].lower(), name)


def _expanded(argument: str) -> str:
    """As the kubelet does."""
    return argument.replace("$(POD_IP)", "10.0.0.1").replace("$(POD_NAMESPACE)", "serving")


class TestLifecycle:
    @pytest.mark.parametrize("component", ["router", "prefill", "decode"])
    @pytest.mark.parametrize("name", ["defaults", "long drain", "long start"])
    def test_the_grace_is_what_hook_and_drain_take(self, name: str, component: str) -> None:
        objects = rendered(name)
        given = VALUE_SETS[name].get(component, {})
        pre_stop = given.get("preStopSeconds", 10 if component == "router" else 2)
        drain = given.get("drainTimeoutSeconds", 120 if component == "router" else 300)
        spec = deployment(objects, component)["spec"]["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] == pre_stop + drain + 10
        assert option(objects, component, "--drain-timeout") == str(drain)
        hook = container(objects, component).get("lifecycle")
        wanted = {"preStop": {"exec": {"command": ["sleep", str(pre_stop)]}}}
        assert hook == (wanted if pre_stop else None)

    def test_the_startup_budget_is_what_the_probe_allows(self) -> None:
        objects = rendered("long start")
        probe = container(objects, "decode")["startupProbe"]
        assert probe["failureThreshold"] * probe["periodSeconds"] == 7205  # of 7203
        assert deployment(objects, "decode")["spec"]["progressDeadlineSeconds"] > 7203

    def test_liveness_asks_the_process_itself_and_nobody_else(self) -> None:
        objects = rendered("defaults")
        assert container(objects, "router")["livenessProbe"]["httpGet"]["path"] == "/version"
        assert container(objects, "router")["readinessProbe"]["httpGet"]["path"] == "/health"
        assert container(objects, "decode")["livenessProbe"]["grpc"] == {
            "port": 9000,
            "service": LIVE_SERVICE,
        }
        assert container(objects, "decode")["readinessProbe"]["grpc"]["service"] == "baton.v1.Worker"

    def test_what_has_no_certificate_to_show_only_connects(self) -> None:
        assert container(rendered("mTLS"), "decode")["readinessProbe"]["tcpSocket"] == {"port": "grpc"}
        router = container(rendered("clients' certificates"), "router")
        assert router["readinessProbe"]["tcpSocket"] == {"port": "http"}
        assert container(rendered("client TLS"), "router")["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"

    def test_what_is_recreated_has_no_rolling_update(self) -> None:
        """Kubernetes refuses both together, which its schemas do not say."""
        for component in ("router", "prefill", "decode"):
            strategy = deployment(rendered("recreate"), component)["spec"]["strategy"]
            assert strategy == {"type": "Recreate"}
            assert deployment(rendered("defaults"), component)["spec"]["strategy"] == {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            }

    def test_what_an_autoscaler_decides_is_not_rendered(self) -> None:
        for component in ("router", "prefill", "decode"):
            assert "replicas" not in deployment(rendered("KEDA"), component)["spec"]
        for component in ("prefill", "decode"):
            assert "replicas" not in deployment(rendered("HPA"), component)["spec"]
            assert deployment(rendered("defaults"), component)["spec"]["replicas"] == 1

    def test_what_workers_are_scaled_by(self) -> None:
        scaled = of_kind(rendered("KEDA"), "ScaledObject")
        [prefill], [decode] = (
            scaled[f"test-baton-{role}"]["spec"]["triggers"] for role in ("prefill", "decode")
        )
        one = 'namespace="serving",app_kubernetes_io_instance="test"'
        backlog = f'sum(baton_prefill_backlog_seconds{{{one},role="prefill"}}) or vector(0)'
        assert prefill["metadata"]["query"] == backlog
        assert prefill["metadata"]["threshold"] == "1.5"
        usage = f'sum(baton_kv_usage_ratio{{{one},role="decode"}}) or vector(0)'
        assert decode["metadata"]["query"] == usage
        assert decode["metadata"]["threshold"] == "0.8"
        [metric] = of_kind(rendered("HPA"), "HorizontalPodAutoscaler")["test-baton-decode"]["spec"]["metrics"]
        assert metric["external"]["target"]["averageValue"] == "800m"
        labels = {"role": "decode", "app_kubernetes_io_instance": "test"}
        assert metric["external"]["metric"]["selector"]["matchLabels"] == labels

    def test_the_planner_has_the_pods_and_the_means_to_scale_them(self) -> None:
        objects = rendered("planner")
        for component in ("prefill", "decode"):
            assert "replicas" not in deployment(objects, component)["spec"]
            assert option(objects, "planner", f"--{component}-deployment") == f"test-baton-{component}"
            assert option(objects, "planner", f"--{component}-gpus") == "2"
        assert option(objects, "planner", "--gpu-budget") == "16"
        assert "--no-switching" in arguments(objects, "planner")
        series = option(objects, "planner", "--prometheus-selector")
        assert series == 'namespace="serving",app_kubernetes_io_instance="test"'
        assert deployment(objects, "planner")["spec"]["strategy"] == {"type": "Recreate"}
        role = of_kind(objects, "Role")["test-baton-planner"]
        assert role["rules"][1:] == [
            {
                "apiGroups": ["apps"],
                "resources": ["deployments/scale"],
                "resourceNames": ["test-baton-prefill", "test-baton-decode"],
                "verbs": ["get", "patch"],
            }
        ]
        assert role["rules"][0]["verbs"] == ["list", "watch"]
        assert "test-baton-planner" in of_kind(objects, "PodMonitor")
        policies = of_kind(objects, "NetworkPolicy")
        [*_, outside] = policies["test-baton-planner"]["spec"]["egress"]
        assert {"port": 9090} in outside["ports"]
        callers = policies["test-baton-workers"]["spec"]["ingress"][0]["from"]
        of = [each["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for each in callers]
        assert of == ["router", "planner"]

    def test_the_planner_has_what_its_way_to_prometheus_needs(self) -> None:
        values = VALUE_SETS["planner with an authority"]["planner"]
        spec = deployment(rendered("planner with an authority"), "planner")["spec"]["template"]["spec"]
        [planner] = spec["containers"]
        assert planner["env"][-1:] == values["extraEnv"]
        assert planner["envFrom"] == values["envFrom"]
        assert planner["volumeMounts"][-1:] == values["extraVolumeMounts"]
        assert spec["volumes"][-1:] == values["extraVolumes"]

    def test_a_planner_that_does_nothing_may_do_nothing(self) -> None:
        objects = rendered("planner beside autoscalers")
        assert "--dry-run" in arguments(objects, "planner")
        assert of_kind(objects, "Role")["test-baton-planner"]["rules"][1]["verbs"] == ["get"]
        assert option(objects, "planner", "--prometheus-url") == "https://prom"


class TestSecurity:
    @pytest.mark.parametrize("name", [name for name in VALUE_SETS if name != "extras"])
    def test_no_container_is_root_or_may_become_it(self, name: str) -> None:
        for pod in pods_of(rendered(name)).values():
            spec = pod["spec"]
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
            assert spec["enableServiceLinks"] is False
            for each in [*spec["containers"], *spec.get("initContainers", [])]:
                context = each["securityContext"]
                assert context["allowPrivilegeEscalation"] is False
                assert context["readOnlyRootFilesystem"] is True
                assert context["capabilities"]["drop"] == ["ALL"]
                assert set(context["capabilities"].get("add", [])) <= {"IPC_LOCK"}

    def test_the_router_may_list_and_watch_endpoint_slices_and_nothing_else(self) -> None:
        [role] = of_kind(rendered("defaults"), "Role").values()
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
        ]
        assert not of_kind(rendered("defaults"), "ClusterRole")
        for name, pod in pods_of(rendered("bundled Redis")).items():
            assert pod["spec"]["automountServiceAccountToken"] is (name == "test-baton-router")
        assert not of_kind(rendered("static discovery"), "Role")

    def test_no_secret_is_in_an_argument(self) -> None:
        objects = rendered("external Redis with a password")
        secrets = {name: each for each in container(objects, "router")["env"] if (name := each["name"])}
        reference = {"secretKeyRef": {"name": "redis", "key": "secret"}}
        assert secrets["BATON_REDIS_PASSWORD"]["valueFrom"] == reference
        assert "secretKeyRef" in secrets["BATON_CLUSTER_KEY"]["valueFrom"]
        assert "--cluster-key" not in arguments(objects, "router")

    def test_a_token_for_the_hub_is_with_whoever_fetches(self) -> None:
        spec = deployment(rendered("download with a token"), "decode")["spec"]["template"]["spec"]
        [fetch], [worker] = spec["initContainers"], spec["containers"]
        assert "HF_TOKEN" in {each["name"] for each in fetch["env"]}
        assert "HF_TOKEN" not in {each["name"] for each in worker["env"]}
        place = fetch["args"][fetch["args"].index("--local-dir") + 1]
        assert worker["args"][worker["args"].index("--model") + 1] == place
        assert "HF_TOKEN" in {each["name"] for each in container(rendered("hub id"), "decode")["env"]}

    def test_the_doctor_examines_what_workers_have(self) -> None:
        def pods(values: Values) -> dict[str, Object]:
            every = pods_of(render(values)).items()
            return {name: one["spec"] for name, one in every if "-doctor-" in name}

        gpu = {"gpu": {"enabled": True}, "rdma": {"enabled": True, "resource": "rdma/ib"}}
        values = {"prefill": gpu, "decode": {"shm": {"sizeLimit": "2Gi"}}}
        found = pods(values)
        assert set(found) == {"test-baton-doctor-prefill", "test-baton-doctor-decode"}
        for role in ("prefill", "decode"):
            worker = deployment(render(values), role)["spec"]["template"]["spec"]
            doctor = found[f"test-baton-doctor-{role}"]
            for key in ("image", "volumeMounts"):
                assert doctor["containers"][0][key] == worker["containers"][0][key]
            assert doctor["volumes"] == worker["volumes"]
            assert doctor.get("tolerations") == worker.get("tolerations")
        [prefill] = found["test-baton-doctor-prefill"]["containers"]
        assert prefill["args"][-4:] == ["--device", "cpu", "--router", "http://test-baton:80"]
        assert not prefill["resources"]["limits"]
        with_devices = pods({**values, "test": {"doctor": {"devices": True}}})
        [prefill] = with_devices["test-baton-doctor-prefill"]["containers"]
        assert {"cuda", "--require-rdma", "--model"} <= set(prefill["args"])
        assert prefill["resources"]["limits"] == {"nvidia.com/gpu": 1, "rdma/ib": 1}
        for one in (*found.values(), with_devices["test-baton-doctor-decode"]):
            args = one["containers"][0]["args"]
            assert "--model" not in args, "weights that the worker beside it holds are not asked for again"
        assert not pods({"test": {"doctor": {"enabled": False}}})
        assert not pods({"workers": {"simulated": {"enabled": True}}})

    def test_the_cluster_key_is_long_and_drawn_anew(self) -> None:
        keys = {
            of_kind(render(), "Secret")["test-baton-cluster-key"]["data"]["cluster-key"] for _ in range(2)
        }
        assert len(keys) == 2
        assert min(map(len, keys)) >= 64
        assert "test-baton-cluster-key" not in of_kind(rendered("cluster key"), "Secret")

    def test_network_policies_let_through_what_must(self) -> None:
        policies = of_kind(rendered("network policies with all"), "NetworkPolicy")
        router, workers = policies["test-baton-router"]["spec"], policies["test-baton-workers"]["spec"]
        clients, prometheus = router["ingress"]
        assert {port["port"] for port in clients["ports"]} == {"http", "grpc"}
        assert {"namespaceSelector": {}} not in clients["from"]
        assert prometheus == {"ports": [{"port": "http"}], "from": [{"namespaceSelector": {}}]}
        by_router, by_workers, metrics = workers["ingress"]
        assert by_router["ports"] == [{"port": "grpc"}]
        assert {"ipBlock": {"cidr": "10.0.0.0/16"}} in by_router["from"]
        assert "ports" not in by_workers, "UCX, NCCL and gloo choose their ports"
        assert metrics["ports"] == [{"port": "metrics"}]
        open_to_all = of_kind(rendered("network policies"), "NetworkPolicy")["test-baton-router"]["spec"]
        assert "from" not in open_to_all["ingress"][0]
        assert open_to_all["policyTypes"] == ["Ingress"]

    def test_an_account_of_the_users_is_that_of_all_pods(self) -> None:
        """Workers have it too, as weights may be fetched with its rights; no pod of theirs gets its token."""
        mine = {"create": False, "name": "mine"}
        objects = render({"serviceAccount": mine, "redis": {"mode": "bundled"}})
        pods = {name: pod["spec"] for name, pod in pods_of(objects).items()}
        assert {spec["serviceAccountName"] for spec in pods.values()} == {"mine"}
        with_token = {name for name, spec in pods.items() if spec["automountServiceAccountToken"]}
        assert with_token == {"test-baton-router"}
        objects = render({"serviceAccount": {"create": False}})
        assert {pod["spec"]["serviceAccountName"] for pod in pods_of(objects).values()} == {"default"}

    def test_egress_leads_to_the_redis_that_there_is(self) -> None:
        [*_, redis, _] = of_kind(rendered("egress to an external Redis"), "NetworkPolicy")[
            "test-baton-router"
        ]["spec"]["egress"]
        assert redis == {"ports": [{"port": 7000}]}

    @pytest.mark.parametrize(
        ("name", "port"),
        [("egress to a collector", 4317), ("egress to a collector at gRPC's own port", 443)],
    )
    def test_egress_of_routers_leads_to_the_collector(self, name: str, port: int) -> None:
        policies = of_kind(rendered(name), "NetworkPolicy")
        assert {"ports": [{"port": port}]} in policies["test-baton-router"]["spec"]["egress"]
        assert {"ports": [{"port": port}]} not in policies["test-baton-workers"]["spec"]["egress"]

    def test_egress_leads_to_workers_that_are_named(self) -> None:
        policies = of_kind(rendered("egress to workers by name and address"), "NetworkPolicy")
        named = [
            {"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]},
            {"to": [{"ipBlock": {"cidr": "fd00::5/128"}}]},
            {"ports": [{"port": 9007}]},
        ]
        for component in ("router", "workers"):
            assert policies[f"test-baton-{component}"]["spec"]["egress"][-3:] == named

    def test_the_values_for_a_quota_of_cpu_limits_leave_nobody_without_one(self) -> None:
        text = (ROOT / "docs/install.md").read_text()
        [values] = re.findall(r"quota on `limits\.cpu`.*?```yaml\n(.*?)```", text, re.DOTALL)
        more = {
            "redis": {"mode": "bundled"},
            "both": {"enabled": True},
            "planner": {"enabled": True, "gpuBudget": 2},
            "model": {"name": "org/model", "download": {"enabled": True}},
        }
        pods = pods_of(render(merged(more, yaml.safe_load(values))))
        assert len(pods) == 10
        for name, pod in pods.items():
            for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
                assert each["resources"]["limits"]["cpu"], f"{name}: {each['name']}"

    def test_a_scraper_shows_its_certificate_where_it_must(self) -> None:
        def of(name: str, kind: str) -> Object:
            [spec] = [one["spec"] for one in of_kind(rendered(name), kind).values() if "router" in str(one)]
            [endpoint] = spec.get("endpoints") or spec["podMetricsEndpoints"]
            tls: Object = endpoint["tlsConfig"]
            return tls

        def key(name: str) -> Object:
            return {"name": "prometheus-tls", "key": name}

        assert of("clients' certificates", "PodMonitor") == {
            "insecureSkipVerify": True,
            "cert": {"secret": key("tls.crt")},
            "keySecret": key("tls.key"),
        }
        assert of("clients' certificates, both looked at", "ServiceMonitor") == {
            "ca": {"secret": key("ca.crt")},
            "serverName": "llm.example",
            "cert": {"secret": key("cert")},
            "keySecret": key("key"),
        }


class TestWorkers:
    def test_services_have_the_labels_that_routers_look_for(self) -> None:
        objects = rendered("all roles")
        selector = option(objects, "router", "--kubernetes-selector")
        assert selector == "baton.dev/role,app.kubernetes.io/instance=test"
        for role in ("prefill", "decode", "both"):
            service = of_kind(objects, "Service")[f"test-baton-{role}"]
            assert service["metadata"]["labels"]["baton.dev/role"] == role
            assert service["metadata"]["labels"]["app.kubernetes.io/instance"] == "test"
            assert service["spec"]["clusterIP"] == "None"
            assert [port["name"] for port in service["spec"]["ports"]] == ["grpc"]

    def test_two_releases_do_not_select_each_others_pods(self) -> None:
        one, other = render(release="one"), render(release="other")
        assert loose_ends([*one, *other]) == []
        selectors = [
            frozenset(each["spec"]["selector"]["matchLabels"].items())
            for each in (*one, *other)
            if each["kind"] == "Deployment"
        ]
        assert len(set(selectors)) == len(selectors) == 6

    def test_devices_are_those_of_all_processes(self) -> None:
        objects = rendered("tensor parallel")
        assert container(objects, "decode")["resources"]["limits"] == {"nvidia.com/gpu": 8}
        spec = deployment(objects, "decode")["spec"]["template"]["spec"]
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
        assert container(objects, "decode")["image"].endswith("baton-worker:0.1.0-cuda")
        assert container(rendered("defaults"), "decode")["image"].endswith("baton-worker:0.1.0-cpu")
        assert option(objects, "decode", "--tensor-parallel-size") == "4"

    def test_images_are_those_that_values_name(self) -> None:
        objects = rendered("image tags")
        images = [
            container(objects, name)["image"].partition("/")[2] for name in ("router", "prefill", "decode")
        ]
        assert images == [
            f"baton-serving/baton-{each}" for each in ("router:1.2.3", "worker:1.2.3-cpu", "worker:1.2.4")
        ]
        digest = container(rendered("image by digest"), "router")["image"]
        assert digest == "baton-router@sha256:" + "0" * 64
        assert container(rendered("simulated"), "decode")["image"].endswith("/baton-router:0.1.0")

    @pytest.mark.parametrize("component", ["router", "prefill", "decode"])
    def test_what_fetches_a_model_has_the_way_out_that_values_give(self, component: str) -> None:
        values = VALUE_SETS["download through a proxy"][component]
        [fetch] = deployment(rendered("download through a proxy"), component)["spec"]["template"]["spec"][
            "initContainers"
        ]
        assert fetch["env"][-1:] == values["extraEnv"]
        assert fetch["envFrom"] == values["envFrom"]
        assert fetch["volumeMounts"][-1:] == values["extraVolumeMounts"]

    def test_rdma_brings_its_resource_and_may_pin_memory(self) -> None:
        worker = container(rendered("RDMA"), "prefill")
        assert worker["resources"]["limits"]["rdma/ib"] == 2
        assert worker["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}

    def test_the_roles_differ_in_nothing_but_their_values(self) -> None:
        objects = rendered("all roles")
        texts = {
            role: json.dumps(deployment(objects, role)).replace(f"-{role}", "-R").replace(f'"{role}"', '"R"')
            for role in ("prefill", "decode", "both")
        }
        assert len(set(texts.values())) == 1


class TestSeveralNodes:
    """A role whose workers are groups of pods."""

    @staticmethod
    def pod(name: str, part: str, role: str = "decode") -> Object:
        objects = rendered(name)
        assert f"test-baton-{role}" not in of_kind(objects, "Deployment")
        found: Object = of_kind(objects, "LeaderWorkerSet")[f"test-baton-{role}"]
        template: Object = found["spec"]["leaderWorkerTemplate"][f"{part}Template"]
        return template

    def test_a_worker_is_a_group_that_is_made_anew_as_a_whole(self) -> None:
        objects = rendered("one role on several nodes")
        assert "test-baton-prefill" in of_kind(objects, "Deployment"), "the other role is as it was"
        spec = of_kind(objects, "LeaderWorkerSet")["test-baton-decode"]["spec"]
        assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 4)
        assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
        assert spec["startupPolicy"] == "LeaderCreated", "the leader is ready when its nodes have joined"
        assert spec["networkConfig"] == {"subdomainPolicy": "UniquePerReplica"}
        rollout = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert rollout == {"maxSurge": 0, "maxUnavailable": "50%"}

    def test_each_pod_has_its_share_of_the_devices(self) -> None:
        for part in ("leader", "worker"):
            [worker] = self.pod("several nodes", part)["spec"]["containers"]
            assert worker["resources"]["limits"] == {"nvidia.com/gpu": 8}
            [worker] = self.pod("one role on several nodes", part)["spec"]["containers"]
            assert worker["resources"]["limits"] == {"nvidia.com/gpu": 4}

    def test_leader_and_nodes_meet(self) -> None:
        [leader] = self.pod("several nodes", "leader")["spec"]["containers"]
        [node] = self.pod("several nodes", "worker")["spec"]["containers"]
        args = leader["args"]
        assert (args[0], args[args.index("--nodes") + 1]) == ("decode", "2")
        assert node["args"][0] == "node"
        for option in ("--node-port", "--join-timeout"):
            told = [each["args"][each["args"].index(option) + 1] for each in (leader, node)]
            assert told[0] == told[1]
        key = [next(v for v in each["env"] if v["name"] == "BATON_CLUSTER_KEY") for each in (leader, node)]
        assert key[0] == key[1]

    def test_only_leaders_are_what_routers_and_monitors_find(self) -> None:
        objects = rendered("several nodes")
        leader, node = (self.pod("several nodes", part) for part in ("leader", "worker"))
        selectors = [
            of_kind(objects, "Service")["test-baton-decode"]["spec"]["selector"],
            of_kind(objects, "PodMonitor")["test-baton-decode"]["spec"]["selector"]["matchLabels"],
            of_kind(objects, "PodDisruptionBudget")["test-baton-decode"]["spec"]["selector"]["matchLabels"],
        ]
        for selector in selectors:
            assert selector.items() <= leader["metadata"]["labels"].items()
            assert not selector.items() <= node["metadata"]["labels"].items()
        assert "prometheus.io/scrape" in leader["metadata"]["annotations"]
        assert "annotations" not in node["metadata"], "there is nothing to scrape"

    def test_nodes_outlive_the_drain_of_their_leader(self) -> None:
        leader, node = (self.pod("several nodes", part)["spec"] for part in ("leader", "worker"))
        assert node["terminationGracePeriodSeconds"] >= leader["terminationGracePeriodSeconds"]
        assert "lifecycle" not in node["containers"][0]

    @pytest.mark.parametrize("name", ["several nodes", "several nodes with mTLS and a download"])
    def test_a_node_is_asked_whether_it_lives_and_whether_its_worker_is_ready(self, name: str) -> None:
        [node] = self.pod(name, "worker")["spec"]["containers"]
        probes = {each: node[f"{each}Probe"]["httpGet"] for each in ("startup", "readiness", "liveness")}
        alive, ready = {"port": "health", "path": "/livez"}, {"port": "health", "path": "/readyz"}
        assert probes == {"startup": alive, "readiness": ready, "liveness": alive}

    def test_pods_of_a_group_may_talk_and_strangers_may_not(self) -> None:
        objects = rendered("several nodes")
        policy = of_kind(objects, "NetworkPolicy")["test-baton-workers"]["spec"]
        [expression] = policy["podSelector"]["matchExpressions"]
        assert {"prefill-node", "decode-node", "decode"} <= set(expression["values"])
        [among] = [rule for rule in policy["ingress"] if "ports" not in rule]
        assert among["from"] == [{"podSelector": policy["podSelector"]}]
        asked = [rule["from"] for rule in policy["ingress"] if rule.get("ports") == [{"port": "health"}]]
        assert asked == [[{"ipBlock": {"cidr": "10.0.0.0/16"}}]]

    def test_budgets_count_workers(self) -> None:
        budgets = of_kind(rendered("one role on several nodes"), "PodDisruptionBudget")
        assert budgets["test-baton-decode"]["spec"]["minAvailable"] == 2
        assert budgets["test-baton-decode-node"]["spec"]["minAvailable"] == 2 * 3
        assert "test-baton-prefill-node" not in budgets
        budgets = of_kind(rendered("several nodes and KEDA"), "PodDisruptionBudget")
        assert budgets["test-baton-decode-node"]["spec"]["maxUnavailable"] == "25%"

    def test_budgets_count_workers_however_their_number_is_given(self) -> None:
        objects = render(VALUE_SETS["one role on several nodes"], given=["decode.pdb.minAvailable=1"])
        budgets = of_kind(objects, "PodDisruptionBudget")
        assert budgets["test-baton-decode-node"]["spec"]["minAvailable"] == 1 * 3
        objects = render(VALUE_SETS["one role on several nodes"], given=["decode.pdb.minAvailable=50%"])
        budgets = of_kind(objects, "PodDisruptionBudget")
        assert budgets["test-baton-decode-node"]["spec"]["minAvailable"] == "50%"

    def test_labels_that_kubernetes_makes_of_names_fit(self) -> None:
        """``controller-revision-hash``: the thousandth group's StatefulSet, and ten characters."""
        for name in of_kind(rendered("several nodes and a name of just that length"), "LeaderWorkerSet"):
            assert len(f"{name}-999-{'f' * 10}") in (62, 63), "prefill's is the longer one"

    @pytest.mark.parametrize(
        ("name", "kind"),
        [("several nodes and KEDA", "ScaledObject"), ("several nodes and HPA", "HorizontalPodAutoscaler")],
    )
    def test_what_is_scaled_is_the_set(self, name: str, kind: str) -> None:
        for scaler in (of_kind(rendered(name), kind)[f"test-baton-{role}"] for role in ("prefill", "decode")):
            target = scaler["spec"]["scaleTargetRef"]
            assert target["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
            assert target["kind"] == "LeaderWorkerSet"
        sets = of_kind(rendered(name), "LeaderWorkerSet").values()
        assert not any("replicas" in each["spec"] for each in sets)

    def test_an_update_that_could_never_begin_is_found(self) -> None:
        one = json.loads(
            json.dumps(of_kind(rendered("several nodes"), "LeaderWorkerSet")["test-baton-decode"])
        )
        one["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] = {"maxSurge": 0, "maxUnavailable": 0}
        one["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["prots"] = []
        found = "\n".join(problems([one], VERSIONS[:1]))
        assert "should not be valid" in found
        assert "prots" in found


class TestMetrics:
    def test_monitors_come_where_the_cluster_knows_them(self) -> None:
        assert not of_kind(render(), "PodMonitor")
        assert set(of_kind(render(apis=[MONITORING]), "PodMonitor")) == {
            "test-baton-router", "test-baton-prefill", "test-baton-decode",
        }  # fmt: skip
        assert len(of_kind(render(VALUE_SETS["monitors always"]), "PodMonitor")) == 3
        assert not of_kind(rendered("monitors never"), "PodMonitor")

    @pytest.mark.parametrize("name", ["monitors always", "service monitor"])
    def test_monitors_keep_the_label_that_the_operator_gives_to_targets(self, name: str) -> None:
        """tests/e2e/test_observed.py shows that Prometheus does with it what it should."""
        own = [
            {"sourceLabels": ["exported_endpoint"], "regex": "(.+)", "targetLabel": "endpoint"},
            {"action": "labeldrop", "regex": "exported_endpoint"},
        ]
        given = VALUE_SETS[name]["metrics"]["podMonitor"].get("metricRelabelings", [])
        monitors = [one for kind in MONITORS for one in of_kind(rendered(name), kind).values()]
        for spec in (monitor["spec"] for monitor in monitors):
            [endpoint] = spec.get("endpoints") or spec["podMetricsEndpoints"]
            assert endpoint["metricRelabelings"] == own + given
        assert len(monitors) == 3

    @pytest.mark.parametrize(
        ("name", "timeout"),
        [("defaults", None), ("monitors that look often", None), ("monitors that give up", "4999ms")],
    )
    def test_a_scrape_may_not_take_longer_than_the_interval(self, name: str, timeout: str | None) -> None:
        """The operator refuses a monitor that lets it; without a timeout it has none to compare."""
        for monitor in of_kind(rendered(name), "PodMonitor").values():
            [endpoint] = monitor["spec"]["podMetricsEndpoints"]
            assert endpoint.get("scrapeTimeout") == timeout

    @pytest.fixture
    def chart(self, tmp_path: Path) -> Path:
        """With files of rules and dashboards, whatever there are besides."""
        chart = tmp_path / "baton"
        shutil.copytree(CHART, chart)
        for folder in ("rules", "dashboards"):
            (chart / folder).mkdir(exist_ok=True)
        rule = {"alert": "Down", "expr": "up == 0", "annotations": {"summary": "{{ $labels.pod }} is down"}}
        (chart / "rules/one.yaml").write_text(json.dumps({"groups": [{"name": "one", "rules": [rule]}]}))
        (chart / "dashboards/one.json").write_text('{"title": "One", "expr": "{{role}}"}\n')
        return chart

    def test_rules_are_the_files(self, chart: Path) -> None:
        [rule] = of_kind(render(chart=chart, apis=[MONITORING]), "PrometheusRule").values()
        assert problems([rule], VERSIONS[:1]) == []
        [group] = [group for group in rule["spec"]["groups"] if group["name"] == "one"]
        assert group["rules"][0]["annotations"]["summary"] == "{{ $labels.pod }} is down"
        assert not of_kind(render(chart=chart), "PrometheusRule")

    def test_runbooks_are_where_the_documentation_is_served(self) -> None:
        def runbooks(values: dict[str, Any]) -> set[str]:
            [rule] = of_kind(render(values, apis=[MONITORING]), "PrometheusRule").values()
            rules = [one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]
            return {one["annotations"]["runbook_url"] for one in rules}

        assert "docs/runbooks/capacity.md#batonkvfull" in runbooks({})
        served = runbooks({"metrics": {"prometheusRule": {"runbookUrl": "https://docs.example/baton/"}}})
        assert "https://docs.example/baton/runbooks/capacity.html#batonkvfull" in served
        assert {url.partition("/runbooks/")[0] for url in served} == {"https://docs.example/baton"}

    def test_rules_look_at_series_of_their_release_alone(self) -> None:
        one = 'namespace="serving",app_kubernetes_io_instance="test"'
        [rule] = of_kind(rendered("monitors always"), "PrometheusRule").values()
        rules = [rule for group in rule["spec"]["groups"] for rule in group["rules"]]
        assert len(rules) > 30
        for each in rules:
            names = re.findall(r"\bbaton[_:][a-zA-Z0-9_:]+", each["expr"])
            assert names and each["expr"].count(one) == len(names), each["expr"]
            assert each["labels"]["app_kubernetes_io_instance"] == "test"
        assert {rule["labels"]["severity"] for rule in rules if "alert" in rule} == {"critical", "warning"}
        for monitor in of_kind(rendered("monitors always"), "PodMonitor").values():
            assert monitor["spec"]["podTargetLabels"] == ["app.kubernetes.io/instance"]

    def test_dashboards_are_the_files(self, chart: Path) -> None:
        values = {"metrics": {"dashboards": {"enabled": True, "namespace": "monitoring"}}}
        found = of_kind(render(values, chart=chart), "ConfigMap")["test-baton-dashboard-one"]
        assert json.loads(found["data"]["one.json"]) == {"title": "One", "expr": "{{role}}"}
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert found["metadata"]["namespace"] == "monitoring"
        assert not of_kind(render(chart=chart), "ConfigMap")


def test_a_problem_is_found() -> None:
    """The checks themselves: what they are given here is wrong."""
    objects: list[Object] = json.loads(json.dumps(rendered("all roles")))
    service = of_kind(objects, "Service")["test-baton-decode"]
    service["spec"]["selector"]["app.kubernetes.io/component"] = "decoder"
    worker = container(objects, "decode")
    worker["readinessProbe"]["grcp"] = {}
    worker["volumeMounts"].append({"name": "nowhere", "mountPath": "/nowhere"})
    of_kind(objects, "PodMonitor")["test-baton-decode"]["spec"]["podMetricsEndpoints"][0]["port"] = "metric"
    assert any("grcp" in problem for problem in problems(objects, VERSIONS[:1]))
    ends = "\n".join(loose_ends(objects))
    assert "Service/test-baton-decode selects nothing" in ends
    assert "mounts nowhere" in ends
    assert "PodMonitor/test-baton-decode names port metric" in ends
    unknown: Values = {"apiVersion": "example.org/v1", "kind": "Thing", "metadata": {"name": "a"}}
    assert "no schema for example.org/v1 Thing" in problems([unknown])[0]


def _secrets(objects: list[Object]) -> Iterator[tuple[str, str]]:
    """Names of Secrets that pods do not start without, with a key of each; a file's is that of API keys."""
    for pod in pods_of(objects).values():
        spec = pod["spec"]
        for each in [*spec["containers"], *spec.get("initContainers", [])]:
            for variable in each.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference and not reference.get("optional"):
                    yield reference["name"], reference["key"]
        for volume in spec["volumes"]:
            if "secret" in volume:
                yield volume["secret"]["secretName"], "keys.yaml"


class TestWithoutHelm:
    """``k8s/``: what the chart renders for those who do not use Helm."""

    FOLDER = CHART.parents[1] / "k8s"

    def test_is_what_the_chart_renders_now(self, tmp_path: Path) -> None:
        subprocess.run(
            [self.FOLDER.parent / "scripts/k8s", tmp_path],
            check=True,
            env={**os.environ, "PATH": f"{helm().parent}:{os.environ['PATH']}"},
        )
        written = {
            path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()
        }
        assert len(written) >= 11
        stale = [str(path) for path, text in written.items() if _text(self.FOLDER / path) != text]
        assert stale == [], "run scripts/k8s"

    def test_the_overlays_name_the_images_of_their_bases(self) -> None:
        """They are in nobody's registry but the user's."""
        overlays = list((self.FOLDER / "overlays").glob("*/kustomization.yaml"))
        assert len(overlays) == 2
        for file in overlays:
            overlay = yaml.safe_load(file.read_text())
            [base] = [file.parent / path for path in overlay["resources"] if "base" in path]
            containers = [
                container
                for pod in pods_of(read(base / "baton.yaml")).values()
                for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
            ]
            images = {container["image"].rpartition(":")[0] for container in containers}
            ours = {image for image in images if "baton-" in image}
            assert {image["name"] for image in overlay["images"]} == ours
            for image in overlay["images"]:
                assert image["newName"] == f"registry.example/{image['name'].rpartition('/')[2]}"

    def test_the_secrets_to_make_are_those_that_pods_ask_for(self) -> None:
        asked: dict[tuple[str, str], set[str]] = {}
        for file in (self.FOLDER / "base").glob("*/baton.yaml"):
            objects = read(file)
            made = {one["spec"]["secretName"] for one in of_kind(objects, "Certificate").values()}
            for name, key in _secrets(objects):
                if name not in made:
                    asked.setdefault((name, key), set()).add(file.parent.name)
        everywhere = ", ".join(folder.name for folder in (self.FOLDER / "base").iterdir())
        told = {}
        for line in (self.FOLDER / "README.md").read_text().splitlines():
            if made_by := re.search(r"create secret generic (\S+) --from-\w+=([\w.-]+)", line):
                _, _, folders = line.partition("  # ")
                told[made_by[1], made_by[2]] = set((folders or everywhere).split(", "))
        assert told == asked

    def test_of_the_trial_is_right_for_every_version(self) -> None:
        """The others are renderings of the examples."""
        monitoring = self.FOLDER / "monitoring"
        objects = [*read(monitoring / "prometheus.yaml"), *read(monitoring / "grafana.yaml")]
        assert len(objects) == 9
        assert problems(objects, (VERSIONS[0], VERSIONS[-1])) == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
class TestPrometheus:
    """What Prometheus is told, by its own tool."""

    def test_understands_its_configuration(self, tmp_path: Path) -> None:
        file = CHART.parents[1] / "k8s/monitoring/prometheus.yaml"
        [config] = of_kind(read(file), "ConfigMap").values()
        document = yaml.safe_load(config["data"]["prometheus.yml"])
        for scrape in document["scrape_configs"]:
            del scrape["kubernetes_sd_configs"]  # which Debian's build does not know
        self._check(tmp_path, json.dumps(document), "config", "--syntax-only")

    def test_understands_what_workers_are_scaled_by(self, tmp_path: Path) -> None:
        triggers = [
            trigger
            for scaled in of_kind(rendered("KEDA"), "ScaledObject").values()
            for trigger in scaled["spec"]["triggers"]
        ]
        rules = [{"record": "a:b", "expr": trigger["metadata"]["query"]} for trigger in triggers]
        assert len(rules) == 2
        self._check(tmp_path, json.dumps({"groups": [{"name": "a", "rules": rules}]}), "rules")

    def test_releases_beside_each_other_record_and_fire_each_for_itself(self, tmp_path: Path) -> None:
        values = VALUE_SETS["monitors always"]
        files = []
        for release in ("one", "other"):
            [rule] = of_kind(render(values, release=release), "PrometheusRule").values()
            files.append(tmp_path / f"{release}.yaml")
            files[-1].write_text(json.dumps(rule["spec"]))

        def choices(release: str, reason: str, values: str) -> Object:
            labels = f'namespace="serving", app_kubernetes_io_instance="{release}", model="m"'
            series = f'baton_choices_total{{{labels}, instance="{release}", finish_reason="{reason}"}}'
            return {"series": series, "values": values}

        def of(release: str, **labels: str) -> str:
            both = {"app_kubernetes_io_instance": release, "model": "m", "namespace": "serving", **labels}
            return "{" + ", ".join(f'{name}="{value}"' for name, value in both.items()) + "}"

        failed = "baton:choices_failed:ratio_5m"
        firing = 'count by (app_kubernetes_io_instance) (ALERTS{alertname="BatonAnswersFail"})'
        case = {
            "interval": "1m",
            "input_series": [
                choices("one", "length", "0+600x30"),
                choices("one", "error", "0+200x30"),
                choices("other", "length", "0+600x30"),
            ],
            "promql_expr_test": [
                {
                    "expr": failed,
                    "eval_time": "20m",
                    "exp_samples": [
                        {"labels": failed + of("one"), "value": 0.25},
                        {"labels": failed + of("other"), "value": 0},
                    ],
                },
                {
                    "expr": firing,
                    "eval_time": "20m",
                    "exp_samples": [{"labels": '{app_kubernetes_io_instance="one"}', "value": 1}],
                },
            ],
        }
        document = {"rule_files": list(map(str, files)), "evaluation_interval": "1m", "tests": [case]}
        file = tmp_path / "tests.yaml"
        file.write_text(json.dumps(document))
        done = subprocess.run(
            ["promtool", "test", "rules", file], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _check(self, folder: Path, text: str, *what: str) -> None:
        file = folder / "file.yaml"
        file.write_text(text)
        done = subprocess.run(["promtool", "check", *what, file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None
