"""Configurations refuse what cannot work, by the name of the option, and survive a trip through argv."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli import main, ring
from baton.cli.up import url_of
from baton.core.role import Role
from baton.nodes.config import NodeConfig
from baton.planner.config import PlannerConfig
from baton.process.options import (
    ConfigError,
    StartError,
    join_address,
    loopback_beside,
    parse_address,
    parse_size,
    served_name,
)
from baton.process.ready import RouterReady
from baton.router.config import RouterConfig
from baton.worker.config import WorkerConfig
from tests.support.certificates import Authority


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", 1 << 30),
        ("2GiB", 2 << 30),
        ("2g", 2 << 30),
        ("512MB", 512_000_000),
        (" 1.5 KiB ", 1536),
        ("7b", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 Q", "1e9", "2GiBs"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@given(
    st.sampled_from(["127.0.0.1", "worker-0.svc", "::1", "fd00::7", "::ffff:10.0.0.7", "fe80::1%eth0"]),
    st.integers(1, 65535),
)
def test_addresses_survive_the_round_trip(host: str, port: int) -> None:
    assert parse_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text", ["host", ":80", "host:", "host:0", "host:65536", "host:x", "host:²", "[::1]"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        parse_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "::1:80",
        "[::1:80",
        "::1]:80",
        "[]:80",
        "[10.0.0.7]:80",
        "[host]:80",
        "[fe80::1%]:80",
        "[[::1]]:80",
        "a:b:80",
    ],
)
def test_brackets_are_for_ipv6_and_ipv6_has_brackets(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an address; an IPv6 address.* \[fd00::7\]:9000"):
        parse_address(text)


@pytest.mark.parametrize(
    "host", ["[::1]", "::1]", "127.0.0.1:9000", "host:80", "http://host", "fe80::1%", ":"]
)
def test_a_host_is_given_without_port_and_brackets(host: str) -> None:
    node: dict[str, Any] = {"leader_address": "leader", "nodes": 2, "node_index": 1, "cluster_key": "k"}
    planner: dict[str, Any] = {
        "prometheus_url": "http://p:9090",
        "ttft_target_ms": 1,
        "itl_target_ms": 1,
        "gpu_budget": 2,
    }
    for option, make in (
        ("host", lambda: WorkerConfig(role="both", host=host)),
        ("advertise", lambda: WorkerConfig(role="both", advertise=host)),
        ("host", lambda: RouterConfig(workers=("w:1",), host=host)),
        ("host", lambda: NodeConfig(**node, host=host)),
        ("advertise", lambda: NodeConfig(**node, advertise=host)),
        ("leader_address", lambda: NodeConfig(**{**node, "leader_address": host})),
        ("host", lambda: PlannerConfig(**planner, host=host)),
    ):
        with pytest.raises(
            ConfigError, match=f"--{option.replace('_', '-')}: must be a host alone, such as"
        ) as said:
            make()
        assert repr(host) in str(said.value)


@pytest.mark.parametrize("host", ["::1", "::", "fe80::1%eth0", "worker-0.svc", "10.0.0.7"])
def test_a_host_of_either_family_or_a_name(host: str) -> None:
    WorkerConfig(role="both", host=host, advertise=host, cluster_key="k" * 16)
    RouterConfig(workers=(join_address(host, 9000),), host=host, cluster_key="k" * 16)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("role", "reader"),
        ("model", ""),
        ("dtype", "int8"),
        ("quantization", "int4"),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("load_format", "pickle"),
        ("connector", "pigeon"),
        ("log_level", "loud"),
        ("port", -1),
        ("port", 65536),
        ("metrics_port", -2),
        ("data_port", -1),
        ("block_size", 0),
        ("num_blocks", 0),
        ("kv_cache_memory", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("prefill_chunk", 0),
        ("mixed_prefill_tokens", 0),
        ("max_model_len", 0),
        ("threads", 0),
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", 129),
        ("pipeline_parallel_size", 0),
        ("scheduling_policy", "lifo"),
        ("priority_aging", -1),
        ("host_kv_memory", -1),
        ("speculative_method", "oracle"),
        ("speculative_model", "some/model"),
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", 17),
        ("speculative_ngram_min", 0),
        ("speculative_ngram_min", 5),
        ("speculative_ngram_max", 17),
    ],
)
def test_a_worker_refuses_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="^--" + option.replace("_", "-")) as refusal:
        WorkerConfig(**{"role": "both", option: value})
    assert refusal.value.option == option


def test_a_pool_is_sized_one_way() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        WorkerConfig(role="both", num_blocks=8, kv_cache_memory=1024)


def test_a_host_tier_needs_prefix_caching() -> None:
    with pytest.raises(ConfigError, match=r"--host-kv-memory.*--no-prefix-caching"):
        WorkerConfig(role="both", host_kv_memory=1024, prefix_caching=False)


def test_checksums_cannot_be_of_kv_that_is_converted() -> None:
    with pytest.raises(ConfigError, match=r"--verify-handoff: .* --kv-convert allow"):
        WorkerConfig(role="decode", verify_handoff=True, kv_convert="allow")
    with pytest.raises(ConfigError, match=r"--kv-convert.*none, allow"):
        WorkerConfig(role="decode", kv_convert="fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "given", "value"),
    [
        ("worker", "workers", ()),
        ("worker", "workers", ("nowhere",)),
        ("worker", "workers", ("a:1", "a:1")),
        ("model", "model", ""),
        ("port", "port", 70000),
        ("grpc_port", "grpc_port", -2),
        ("grpc_port", "grpc_port", 8000),
        ("max_body_bytes", "max_body_bytes", 0),
        ("max_n", "max_n", 0),
        ("max_n", "max_n", 129),
        ("max_stop_strings", "max_stop_strings", -1),
        ("trace_requests", "trace_requests", -1),
        ("trace_sample", "trace_sample", 1.5),
        ("otlp_endpoint", "otlp_endpoint", "otel:4317"),
        ("otlp_endpoint", "otlp_endpoint", "http://otel:4318/v1/traces"),
        ("trace_memory", "trace_memory", -1),
        ("log_level", "log_level", "loud"),
    ],
)
def test_a_router_refuses_by_name(option: str, given: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        RouterConfig(**{"workers": ("a:1",), "cluster_key": HUSH, given: value})
    assert refusal.value.option == option


HUSH, HUSH_BEFORE = "hush, a key of tests", "hush, the key of tests before"
BOTH_KEYS: dict[str, Any] = {"cluster_key": HUSH, "cluster_key_previous": HUSH_BEFORE}


def test_the_cluster_keys_are_in_no_repr() -> None:
    for config in (WorkerConfig(role="both", **BOTH_KEYS), RouterConfig(workers=("a:1",), **BOTH_KEYS)):
        assert HUSH not in repr(config) and HUSH_BEFORE not in repr(config)
        assert HUSH not in repr(config.cluster_keys) and HUSH_BEFORE not in repr(config.cluster_keys)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"cluster_key": HUSH, "cluster_key_previous": "fifteen bytes.."}, "must have at least 16 bytes"),
        ({"cluster_key_previous": HUSH_BEFORE}, "needs a --cluster-key, which replaces it"),
    ],
)
def test_a_key_before_that_cannot_be(keys: dict[str, Any], says: str) -> None:
    for make in (lambda: WorkerConfig(role="both", **keys), lambda: RouterConfig(**ROUTER, **keys)):
        with pytest.raises(ConfigError, match=f"--cluster-key-previous: {says}"):
            make()


ROUTER: dict[str, Any] = {"workers": ("127.0.0.1:1", "[::1]:1", "localhost:1")}
SHORT = ("", "fifteen bytes..")


@pytest.mark.parametrize("key", SHORT)
@pytest.mark.parametrize(
    ("make", "fields", "words"),
    [
        (WorkerConfig, {"role": "both", "host": "0.0.0.0"}, "--host 0.0.0.0"),
        (WorkerConfig, {"role": "both", "host": "::"}, "--host ::"),
        (WorkerConfig, {"role": "both", "host": "10.0.0.7"}, "--host 10.0.0.7"),
        (WorkerConfig, {"role": "both", "host": "::ffff:10.0.0.7"}, "--host ::ffff:10.0.0.7"),
        (WorkerConfig, {"role": "both", "host": "127.0.0.1.nip.io"}, "--host 127.0.0.1.nip.io"),
        (WorkerConfig, {"role": "both", "advertise": "10.0.0.7"}, "--advertise 10.0.0.7"),
        (RouterConfig, {**ROUTER, "host": "0.0.0.0"}, "--host 0.0.0.0"),
        (RouterConfig, {"workers": ("127.0.0.1:1", "10.0.0.7:9")}, "--worker 10.0.0.7:9"),
        (RouterConfig, {"discovery": "kubernetes"}, "--discovery kubernetes"),
    ],
)
def test_without_a_cluster_key_nothing_but_this_machine_is_served(
    make: Any, fields: dict[str, Any], words: str, key: str
) -> None:
    """One line, which names the option, the variable and how to make a key."""
    with pytest.raises(ConfigError) as refusal:
        make(**fields, cluster_key=key)
    assert refusal.value.option == "cluster_key"
    assert f"must have at least 16 bytes with {words}: " in str(refusal.value)
    assert "openssl rand -hex 32" in str(refusal.value) and "BATON_CLUSTER_KEY" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    make(**fields, cluster_key="sixteen bytes...")


@pytest.mark.parametrize("key", SHORT)
@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1"])
def test_on_this_machine_alone_a_cluster_key_can_be_left_out(host: str, key: str) -> None:
    WorkerConfig(role="both", host=host, cluster_key=key)
    RouterConfig(**ROUTER, host=host, cluster_key=key)


def test_a_served_name_can_be_told_to_routers() -> None:
    WorkerConfig(role="both", served_model_name="Qwen/Qwen3 32B (größer)")
    for name in ("m" * 129, "a\nb"):
        with pytest.raises(
            ConfigError, match="--served-model-name: must be at most 128 printable characters"
        ):
            WorkerConfig(role="both", served_model_name=name)


def test_the_served_name(tmp_path: Path) -> None:
    assert served_name("demo", None) == "demo"
    assert served_name("org/model", None) == "org/model"
    assert served_name(str(tmp_path), None) == tmp_path.name
    assert served_name(str(tmp_path), "chosen") == "chosen"


def parsed(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> Any:
    """The configuration that the command line makes of ``argv``."""
    seen: list[Any] = []
    monkeypatch.setattr(main, "_run_worker", seen.append)
    monkeypatch.setattr(main, "_run_router", seen.append)
    monkeypatch.setattr(main, "_tie_to", lambda _parent: None)
    main.commands(argv, standalone_mode=False)
    return seen[0]


WORKER_TLS = ("worker_tls_certfile", "worker_tls_keyfile", "worker_tls_ca_certs", "worker_tls_server_name")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Certificate, key and authority."""
    authority = Authority.new(tmp_path_factory.mktemp("tls"))
    pair = authority.sign("service")
    return str(pair.certificate), str(pair.key), str(authority.pair.certificate)


def test_worker_options_survive_the_command_line(
    monkeypatch: pytest.MonkeyPatch, files: tuple[str, str, str]
) -> None:
    # Every field differs from its default, so that a field without an option is noticed.
    monkeypatch.setenv("BATON_CLUSTER_KEY", HUSH)
    monkeypatch.setenv("BATON_CLUSTER_KEY_PREVIOUS", HUSH_BEFORE)
    config = WorkerConfig(
        role="prefill",
        **BOTH_KEYS,
        model="some/model",
        served_model_name="name",
        dtype="bfloat16",
        quantization="int8",
        kv_cache_dtype="fp8",
        kv_revision="v1",
        device="cuda:1",
        load_format="dummy",
        host="0.0.0.0",
        advertise="10.0.0.1",
        port=1,
        metrics_port=-1,
        vllm_metric_names=True,
        connector="tcp",
        require_rdma=True,
        verify_handoff=True,
        handoff_patience=9.5,
        drain_timeout=8,
        data_port=2,
        block_size=32,
        kv_cache_memory=1 << 30,
        max_num_seqs=3,
        max_num_batched_tokens=4,
        prefill_chunk=5,
        mixed_prefill_tokens=2,
        chunked_prefill=False,
        prefix_caching=False,
        enforce_eager=True,
        max_graph_tokens=64,
        async_scheduling="off",
        gpu_memory_utilization=0.5,
        scheduling_policy="priority",
        priority_aging=2.5,
        max_model_len=6,
        speculative_method="draft",
        speculative_model="small/model",
        num_speculative_tokens=9,
        speculative_ngram_min=3,
        speculative_ngram_max=5,
        node_port=9,
        join_timeout=7.5,
        threads=7,
        log_level="debug",
        **dict(zip(WORKER_TLS, (*files, "name"), strict=True)),  # type: ignore[arg-type]
    )
    same = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) == f.default}
    split = {"tensor_parallel_size", "pipeline_parallel_size", "nodes"}
    assert same == {"num_blocks", "host_kv_memory", "kv_convert"} | split
    assert parsed(monkeypatch, ["prefill", *ring.arguments(config)]) == config
    other = WorkerConfig(role="decode", num_blocks=9, host_kv_memory=1 << 20, kv_convert="allow", **BOTH_KEYS)
    assert parsed(monkeypatch, ["decode", *ring.arguments(other)]) == other
    ranks = WorkerConfig(role="both", tensor_parallel_size=4, pipeline_parallel_size=2, **BOTH_KEYS)
    assert parsed(monkeypatch, ["both", *ring.arguments(ranks)]) == ranks
    nodes = WorkerConfig(role="both", tensor_parallel_size=4, nodes=2, **BOTH_KEYS)
    assert parsed(monkeypatch, ["both", *ring.arguments(nodes)]) == nodes


def test_router_options_survive_the_command_line(
    monkeypatch: pytest.MonkeyPatch, files: tuple[str, str, str]
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_KEY", HUSH)
    monkeypatch.setenv("BATON_CLUSTER_KEY_PREVIOUS", HUSH_BEFORE)
    config = RouterConfig(
        workers=("a:1", "[::1]:2"),
        discovery_max_staleness=7.0,
        redis_url="redis://r:1/2",
        redis_password_file="/p",
        redis_timeout_ms=9.0,
        limit_requests_per_minute=1,
        limit_tokens_per_minute=2,
        limit_concurrent_requests=3,
        limit_tokens_per_day=4,
        model="some/model",
        served_model_name=("name", "alias"),
        host="0.0.0.0",
        port=1,
        grpc_port=-1,
        processes=2,
        allowed_origins=("https://a", "https://b"),
        allow_credentials=True,
        allowed_methods=("GET",),
        allowed_headers=("x-a", "x-b"),
        **BOTH_KEYS,
        max_body_bytes=2048,
        max_n=2,
        max_stop_strings=0,
        max_attempts=2,
        queue_timeout=0.5,
        tool_call_parser="hermes",
        reasoning_parser="none",
        generation_config="none",
        disaggregation="never",
        ui=False,
        trace_requests=7,
        otlp_endpoint="http://otel:4317",
        trace_sample=0.25,
        trace_memory=1 << 20,
        itl_target_ms=12.5,
        no_prefill="queue",
        no_decode="fail",
        drain_timeout=30,
        slo_ttft=0.5,
        slo_itl=0.05,
        vllm_metric_names=True,
        log_level="error",
        api_keys="/k",
        ssl_certfile=files[0],
        ssl_keyfile=files[1],
        ssl_ca_certs=files[2],
        ssl_client_auth="required",
        audit_log="-",
        audit_log_required=True,
        log_prompts=True,
        max_inflight=5,
        queue_size=6,
        queue_tokens=7,
        max_queue_wait=8.0,
        max_stream_backlog=1 << 20 | 1,
        slow_client_timeout=9.0,
        **dict(zip(WORKER_TLS, (*files, "name"), strict=True)),
    )
    found = RouterConfig(
        discovery="kubernetes",
        kubernetes_namespace="n",
        kubernetes_selector="a=b",
        kubernetes_port="p",
        kubeconfig="/k",
        kubernetes_context="c",
        **BOTH_KEYS,
    )
    several = RouterConfig(models="/m.yaml", **BOTH_KEYS)
    same = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) == f.default]
    assert all(
        getattr(other, name) != getattr(config, name)
        for name in same
        for other in [several if name == "models" else found]
    ), "each differs in one of them"
    for each in (config, found, several):
        arguments = ring.arguments(each)
        assert HUSH not in " ".join(arguments)
        assert parsed(monkeypatch, ["router", *arguments]) == each


def test_the_roles_of_a_ring() -> None:
    assert ring.roles_wanted(None, None, 0) == ["prefill", "decode"]
    assert ring.roles_wanted(None, None, 2) == ["both", "both"]
    assert ring.roles_wanted(2, None, 0) == ["prefill", "prefill", "decode"]
    assert ring.roles_wanted(1, None, 1) == ["prefill", "both"]
    for wanted in ((0, None, 0), (1, 0, 0), (-1, 1, 0), (1, 1, 100)):
        with pytest.raises(ConfigError):
            ring.roles_wanted(*wanted)


def test_a_planned_ring_has_distinct_addresses_and_one_key() -> None:
    planned = ring.plan(
        WorkerConfig(role="both"),
        ["prefill", "decode", "decode"],
        ["cuda:0", "cuda:1"],
        {"port": 0, "grpc_port": 0},
    )
    assert list(planned.workers) == ["prefill", "decode-0", "decode-1"]
    workers = list(planned.workers.values())
    assert [worker.device for worker in workers] == ["cuda:0", "cuda:1", "cuda:0"]
    ports = [port for worker in workers for port in (worker.port, worker.metrics_port)]
    ports += [planned.router.port, planned.router.grpc_port]
    assert len(set(ports)) == 8
    assert planned.router.workers == tuple(f"127.0.0.1:{worker.port}" for worker in workers)
    assert {worker.cluster_key for worker in workers} == {planned.router.cluster_key}
    assert len(planned.router.cluster_key) == 64
    assert all(planned.router.cluster_key not in part for spec in planned.specs() for part in spec.argv)


def test_ranks_get_devices_and_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_cores", lambda: 24)
    worker = WorkerConfig(role="both", tensor_parallel_size=2, pipeline_parallel_size=2)

    def planned(*devices: str) -> list[tuple[str, int | None]]:
        workers = ring.plan(worker, ["both", "both"], devices, {"port": 0, "grpc_port": 0}).workers.values()
        return [(one.device, one.threads) for one in workers]

    assert planned(*(f"cuda:{number}" for number in range(8))) == [("cuda:0", 3), ("cuda:4", 3)]
    assert planned("cuda:4") == [("cuda:4", 3), ("cuda:4", 3)]
    for wrong in (
        ["cuda:0", "cuda:1"],
        ["cuda:0", "cuda:1", "cuda:2", "cuda:4"],
        ["cuda:0", "cuda:1", "cuda:2", "cpu"],
    ):
        with pytest.raises(
            ConfigError, match=rf"^--device: must be cuda:N, .* 4, .*, not {','.join(wrong)}$"
        ):
            planned(*wrong)
    one_line = ring.plan(worker, ["both"], ["cpu"], {"port": 0, "grpc_port": 0}).describe()
    assert one_line.endswith("6 CPU thread(s) per process, 4 processes per worker")


def test_roles_may_be_split_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_cores", lambda: 12)
    worker = WorkerConfig(role="both", tensor_parallel_size=2)
    own: dict[Role, WorkerConfig] = {
        "prefill": ring.with_ranks(worker, "prefill", 1, None),
        "decode": ring.with_ranks(worker, "decode", None, 2),
    }

    def planned(*devices: str) -> ring.RingPlan:
        roles: list[Role] = ["prefill", "prefill", "decode", "both"]
        return ring.plan(worker, roles, devices, {"port": 0, "grpc_port": 0}, own)

    found = planned(*(f"cuda:{number}" for number in range(8)))
    sizes = [(one.tensor_parallel_size, one.pipeline_parallel_size) for one in found.workers.values()]
    assert sizes == [(1, 1), (1, 1), (2, 2), (2, 1)]
    assert [one.device for one in found.workers.values()] == ["cuda:0", "cuda:1", "cuda:2", "cuda:6"]
    assert [one.threads for one in found.workers.values()] == [1] * 4
    assert "--pipeline-parallel-size" in found.specs()[2].argv
    assert found.describe().endswith(
        "per process, 1 per prefill worker, 4 per decode worker, 2 per both worker"
    )
    # Behind the last comes the first.
    assert [
        one.device
        for one in planned("cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4", "cuda:5").workers.values()
    ] == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    with pytest.raises(ConfigError, match=r"^--device: must be cuda:N, .* groups of 4, "):
        planned("cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4")
    with pytest.raises(ConfigError, match=r"^--decode-tensor-parallel-size: must be at least 1, not 0"):
        ring.with_ranks(worker, "decode", 0, None)


def test_what_drafts_from_hidden_states_needs_one_process() -> None:
    with pytest.raises(ConfigError, match=r"^--tensor-parallel-size: must be 1 .* eagle"):
        WorkerConfig(role="both", tensor_parallel_size=2, speculative_method="eagle")


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"^--port: cannot listen on 127.0.0.1:{port}: "):
            ring.plan(WorkerConfig(role="both"), ["both"], ["cpu"], {"port": port})


@pytest.mark.parametrize(
    ("said", "url"),
    [
        ("0.0.0.0:80", "http://127.0.0.1:80"),
        ("[::]:80", "http://[::1]:80"),
        ("[::1]:80", "http://[::1]:80"),
        ("10.0.0.7:80", "http://10.0.0.7:80"),
    ],
)
def test_where_a_ring_is_asked(said: str, url: str) -> None:
    assert url_of(RouterReady(said, None)) == url


@pytest.mark.parametrize(
    ("host", "inside"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "::1")]
)
def test_workers_of_a_ring_are_on_the_loopback_of_its_family(host: str, inside: str) -> None:
    assert loopback_beside(host) == inside
