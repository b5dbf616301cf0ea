"""What Redis, and what lies between, can do to a router: no request fails or waits, each cause has its name
in the metrics, the log has a line for each change, and limits are shared again as soon as that can be."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions
from prometheus_client import CollectorRegistry

from baton.process.options import ConfigError
from baton.router.shared import failures
from baton.router.shared.failures import StoreError, store_error
from baton.router.shared.limits import Limits, Tenant
from baton.router.shared.redis_client import ResolvedNames
from baton.router.shared.redis_store import RedisStore, connect
from baton.router.shared.state import SharedState
from baton.telemetry.shared import SharedStateMetrics
from baton.telemetry.supervision import Supervision
from baton.telemetry.tasks import TaskMetrics
from tests.support.certificates import Authority
from tests.support.local_worker import until
from tests.support.redis_server import RedisServer, needs_redis

TIMEOUT_S = 0.03
MAX_DELAY_S = 0.05
TOGETHER_S = 5.0
"""After Redis is well again limits must be shared within this."""
TENANT = Tenant("t", Limits(requests_per_minute=100_000))


class Asking:
    """One router that is asked all the time."""

    def __init__(self, url: str, password_file: Path | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.registry = CollectorRegistry()
        file = None if password_file is None else str(password_file)
        self.store = RedisStore(connect(url, file, timeout_s), timeout_s)
        metrics = SharedStateMetrics(self.registry)
        self.state = SharedState(self.store, metrics, tasks=Supervision(TaskMetrics(self.registry)))
        self.delays: list[float] = []
        self.failed = 0

    @property
    def up(self) -> bool:
        return self.metric("baton_shared_state_up") == 1

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    @property
    def beats(self) -> float:
        """That Redis has answered."""
        return self.metric("baton_shared_state_calls_total", call="beat", result="ok")

    def told(self, word: str) -> float:
        """Calls that failed for this cause."""
        calls = ("admit", "beat", "settle")
        return sum(self.metric("baton_shared_state_calls_total", call=call, result=word) for call in calls)

    async def ask(self) -> None:
        while True:
            began = time.perf_counter()
            try:
                _, lease = await self.state.admit(TENANT, 1)
            except Exception:  # noqa: BLE001 - that is what must not be
                self.failed += 1
            else:
                assert lease is not None
                self.state.settle(lease, 1)
            self.delays.append(time.perf_counter() - began)
            await asyncio.sleep(0.003)


@asynccontextmanager
async def asking(url: str, password_file: Path | None = None) -> AsyncIterator[Asking]:
    router = Asking(url, password_file)
    router.state.start()
    load = asyncio.create_task(router.ask())
    yield router
    load.cancel()
    await asyncio.wait({load})
    await router.state.close()
    assert not router.failed
    # The process itself may be kept from running, and then sees no timeout.
    late = sum(delay > MAX_DELAY_S for delay in router.delays)
    assert late <= max(3, len(router.delays) // 100)


async def together_within(router: Asking, seconds: float = TOGETHER_S) -> None:
    """Until limits are shared: Redis has answered since."""
    began, before = time.monotonic(), router.beats
    await until(lambda: router.up and router.beats > before)
    assert time.monotonic() - began < seconds


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.new(tmp_path_factory.mktemp("redis-tls"))


# --- failing over


@needs_redis
async def test_after_a_failover_the_name_is_asked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = RedisServer(tmp_path)
    new = RedisServer(tmp_path, host="127.0.0.2", port=old.port)
    leads_to = [old.host]

    async def ask(host: str, port: int) -> list[str]:
        return list(leads_to)

    monkeypatch.setattr(ResolvedNames, "_ask", staticmethod(ask))
    old.start()
    new.start()
    try:
        new.follow(old)
        async with asking(f"redis://redis.test:{old.port}/0") as router:
            await together_within(router)
            await asyncio.to_thread(new.follow, None)
            await asyncio.to_thread(old.follow, new)
            await until(lambda: not router.up)
            await asyncio.sleep(0.3)  # some tries, all in vain
            leads_to[:] = [new.host]
            await together_within(router)
            assert router.told("readonly") >= 2
            before = new.client().hlen("{baton:tenant:t}:requests")
            await asyncio.sleep(0.5)
            assert new.client().hlen("{baton:tenant:t}:requests") > before, "the new primary counts"
        told = [each.message for each in caplog.records if each.name.endswith("shared.state")]
        first = [text for text in told if "still given up" not in text][:2]
        assert [text.partition(" (")[0] for text in first] == [
            "Redis is given up for now",
            "Redis answers again: limits are shared",
        ]
    finally:
        old.kill()
        new.kill()


@needs_redis
async def test_what_is_under_way_at_a_failover_leaves_its_connection_too(server: RedisServer) -> None:
    store = RedisStore(connect(server.url, None, 1.0), 1.0)
    pool = store._pool
    await store.beat("r", b"{}", 1000)
    [idle] = pool._available_connections
    used = await pool.get_connection()
    assert used is idle
    await store.leave()
    assert used.is_connected, "its call goes on"
    await pool.release(used)
    assert not used.is_connected
    await store.beat("r", b"{}", 1000)
    await store.close()


# --- who we are, and whom we ask


@needs_redis
async def test_a_user_with_the_rights_that_the_docs_name_is_enough(
    server: RedisServer, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("one\n")
    server.add_user("ba@on", "one")
    url = server.url.replace("//", "//ba%40on@")
    async with asking(url, secret) as router:
        await together_within(router)
        assert not sum(map(router.told, failures.WORDS - {"timeout"})), "but for a busy machine"


@needs_redis
async def test_a_password_that_is_changed_is_taken_up(
    server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("one")
    server.set_password("one")
    async with asking(server.url, secret) as router:
        await together_within(router)
        await asyncio.to_thread(server.set_password, "two")
        await asyncio.to_thread(server.drop_clients)
        await until(lambda: router.told("credentials") > 0)
        assert not router.up
        secret.write_text("two\n")
        await together_within(router)
    assert "one" not in caplog.text and "backward compatibility" not in caplog.text


@needs_redis
@pytest.mark.parametrize("content", [b"\xff\xfe pass", None, b"x" * 100_000])
async def test_a_password_file_that_cannot_be_used_fails_no_request(
    server: RedisServer, tmp_path: Path, content: bytes | None
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"good")
    server.set_password("good")
    async with asking(server.url, secret) as router:
        await together_within(router)
        secret.unlink() if content is None else secret.write_bytes(content)
        await asyncio.to_thread(server.drop_clients)
        await until(lambda: router.told("credentials") > 0)
        assert not router.up
        secret.write_bytes(b"good")
        await together_within(router)


@needs_redis
async def test_a_right_that_is_taken_away_is_told(server: RedisServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("one")
    server.add_user("baton", "one")
    async with asking(server.url.replace("//", "//baton@"), secret) as router:
        await together_within(router)
        server.add_user("baton", "one", "-evalsha")
        await until(lambda: router.told("permission") > 0)
        await asyncio.to_thread(server.add_user, "baton", "one")
        await together_within(router)


@needs_redis
async def test_tls_with_an_authority_of_ones_own(tmp_path: Path, authority: Authority) -> None:
    server = RedisServer(tmp_path, tls=authority)
    server.start()
    try:
        async with asking(server.url) as router:
            await together_within(router)
            await until(
                lambda: router.metric("baton_shared_state_calls_total", call="admit", result="ok") > 9
            )
            server.kill()
            await until(lambda: not router.up)
            server.start()
            await together_within(router)
    finally:
        server.kill()


@needs_redis
async def test_a_certificate_that_is_not_trusted_is_told(tmp_path: Path, authority: Authority) -> None:
    stranger = Authority.new(tmp_path / "stranger")
    server = RedisServer(tmp_path, tls=authority)
    server.start()
    try:
        url = server.url.replace(str(authority.pair.certificate), str(stranger.pair.certificate))
        async with asking(url) as router:
            await until(lambda: router.told("tls") > 0)
            stranger.pair.certificate.write_bytes(authority.pair.certificate.read_bytes())
            await together_within(router)
    finally:
        server.kill()


async def test_the_settings_of_tls_are_made_once_for_all_connections(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    create = ssl.create_default_context

    def counting() -> ssl.SSLContext:
        nonlocal made
        made += 1
        return create()

    monkeypatch.setattr("redis.asyncio.connection.ssl.create_default_context", counting)
    url = f"rediss://127.0.0.1:1/0?ssl_ca_certs={authority.pair.certificate}"
    pool = RedisStore(connect(url, None, TIMEOUT_S), TIMEOUT_S)._pool
    for _ in range(3):
        connection = pool.make_connection()  # type: ignore[no-untyped-call]
        assert connection._connection_arguments()["server_hostname"] == "127.0.0.1"
    assert made == 1
    os.utime(authority.pair.certificate, (1, 1))
    connection._connection_arguments()
    assert made == 2, "the file is another"


@pytest.mark.parametrize("option", ["no_such=1", "ssl_cert_reqs=maybe", "socket_timeout=soon"])
def test_an_option_of_the_url_that_cannot_be_used_ends_the_start(option: str) -> None:
    with pytest.raises(ConfigError, match="redis-url") as refused:
        connect(f"rediss://:secret@127.0.0.1:1/0?{option}", None, TIMEOUT_S)
    assert "secret" not in str(refused.value)


# --- the way


async def test_a_name_that_leads_nowhere_is_told_and_leaves_no_error_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    async with asking("redis://no-such-host.invalid:6379/0") as router:
        await until(lambda: router.told("lookup") > 1)
    assert not unhandled and "never retrieved" not in caplog.text
    given_up = [each for each in caplog.records if "given up" in each.message]
    assert 1 <= len(given_up) <= 2, "once, and once more if the first tries were over before the lookup"


async def test_a_lookup_that_takes_longer_than_a_dial_serves_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = 0

    async def slowly(host: str, port: int) -> list[str]:
        nonlocal begun
        begun += 1
        await asyncio.sleep(0.1)
        return ["127.0.0.9"]

    monkeypatch.setattr(ResolvedNames, "_ask", staticmethod(slowly))
    names = ResolvedNames()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await names.addresses("redis.test", 1)
    await asyncio.sleep(0.1)
    async with asyncio.timeout(0.02):
        assert await names.addresses("redis.test", 1) == ["127.0.0.9"]
    assert begun == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await names.addresses("redis.test", 1)
    assert begun == 2, "and no longer than that"


async def test_a_lookup_that_fails_when_nobody_waits_any_more_is_no_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def in_vain(host: str, port: int) -> list[str]:
        await asyncio.sleep(0.05)
        raise socket.gaierror(-2, "Name or service not known")

    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    monkeypatch.setattr(ResolvedNames, "_ask", staticmethod(in_vain))
    names = ResolvedNames()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await names.addresses("redis.test", 1)
    await asyncio.sleep(0.1)
    del names
    gc.collect()
    assert not unhandled


@needs_redis
async def test_a_dial_that_takes_longer_than_a_call_serves_the_next(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with TLS on a busy machine: limits are shared all the same, and nothing is dialled in vain."""
    dials, connect_ = 0, asyncio.open_connection

    async def slowly(**arguments: Any) -> Any:
        nonlocal dials
        dials += 1
        await asyncio.sleep(0.1)
        return await connect_(**arguments)

    monkeypatch.setattr("baton.router.shared.redis_client.asyncio.open_connection", slowly)
    store = RedisStore(connect(server.url, None, TIMEOUT_S), TIMEOUT_S)
    for _ in range(2):
        with pytest.raises(StoreError, match="no answer"):
            await store.beat("r", b"{}", 1000)
        await store.leave()
    await asyncio.sleep(0.1)
    assert (await store.beat("r", b"{}", 1000)).words == {"r": b"{}"}
    assert dials == 1
    await store.close()


@needs_redis
async def test_what_was_dialled_and_not_taken_is_closed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_ = asyncio.open_connection

    async def slowly(**arguments: Any) -> Any:
        await asyncio.sleep(0.05)
        return await connect_(**arguments)

    monkeypatch.setattr("baton.router.shared.redis_client.asyncio.open_connection", slowly)
    monkeypatch.setattr("baton.router.shared.redis_client.FRESH_S", 0.1)
    store = RedisStore(connect(server.url, None, TIMEOUT_S), TIMEOUT_S)

    admin = server.client()

    def clients() -> int:
        """Connections to Redis but for this one's."""
        return len(admin.client_list())

    gc.collect()  # the connections of those that started the server
    before = await asyncio.to_thread(clients)
    for _ in range(2):
        with pytest.raises(StoreError, match="no answer"):
            await store.beat("r", b"{}", 1000)
        await asyncio.sleep(0.3)
    assert await asyncio.to_thread(clients) - before == 1, "the first one was too old for the second try"
    await store.close()
    await asyncio.sleep(0.1)
    assert await asyncio.to_thread(clients) == before


@needs_redis
async def test_all_addresses_of_a_name_are_tried(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(host: str, port: int) -> list[str]:
        return ["127.0.0.77", server.host]

    monkeypatch.setattr(ResolvedNames, "_ask", staticmethod(ask))
    async with asking(server.url.replace(server.host, "redis.test")) as router:
        await together_within(router)


@needs_redis
async def test_redis_that_is_slow_holds_up_nobody(server: RedisServer) -> None:
    async with asking(server.url) as router:
        await together_within(router)
        server.pause(1)
        await until(lambda: router.told("timeout") >= 3 and not router.up)
        await together_within(router)


@needs_redis
async def test_a_call_from_before_does_not_end_the_outage(server: RedisServer) -> None:
    router = Asking(server.url)
    store = router.store
    await router.state._failed(store, "beat", StoreError("full", "no room"))
    router.state._worked("admit", 1)
    assert not router.up and router.state.local
    router.state._worked("beat", 1)
    assert router.up and not router.state.local
    await store.close()


# --- whatever else


async def test_an_answer_that_makes_no_sense_fails_no_request(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with asking(server.url) as router:
        await together_within(router)
        call = RedisStore._call

        async def nonsense(self: RedisStore, *about: object) -> object:
            return [b"what", None]

        monkeypatch.setattr(RedisStore, "_call", nonsense)
        await until(lambda: router.told("unexpected") > 1)
        monkeypatch.setattr(RedisStore, "_call", call)
        await together_within(router)
    assert caplog.text.count("the error in full") == 1


ERRORS = [
    (redis.exceptions.ReadOnlyError("You can't write against a read only replica."), "readonly"),
    (redis.exceptions.MasterDownError("Link with MASTER is down"), "readonly"),
    (redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "loading"),
    (redis.exceptions.ClusterDownError("CLUSTERDOWN The cluster is down"), "cluster"),
    (redis.exceptions.AuthenticationError("Authentication required."), "credentials"),
    (redis.exceptions.NoPermissionError("this user has no permissions"), "permission"),
    (redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'"), "full"),
    (
        redis.exceptions.ResponseError("Error running script: @user_script: 1: -READONLY You can't"),
        "readonly",
    ),
    (redis.exceptions.ResponseError("Error running script: @user_script: 1: -OOM command"), "full"),
    (redis.exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"), "refused"),
    (redis.exceptions.TimeoutError("Timeout reading from socket"), "timeout"),
    (TimeoutError(), "timeout"),
    (ConnectionResetError("reset"), "connection"),
    (redis.exceptions.ConnectionError("Connection closed by server."), "connection"),
    (socket.gaierror(-2, "Name or service not known"), "lookup"),
    (ssl.SSLCertVerificationError("self-signed certificate"), "tls"),
    (redis.exceptions.ConnectionError("Error 1 connecting to h:1. [SSL: WRONG_VERSION_NUMBER]"), "tls"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "unexpected"),
    (ValueError("x" * 1000), "unexpected"),
]


@pytest.mark.parametrize(("error", "word"), ERRORS, ids=lambda each: getattr(each, "args", each))
def test_each_error_has_its_cause(error: Exception, word: str) -> None:
    found = store_error(error)
    assert found.word == word and word in failures.WORDS
    assert 0 < len(str(found)) <= failures.MAX_MESSAGE and "\n" not in str(found)


def test_the_system_s_error_below_the_client_s_counts() -> None:
    try:
        try:
            raise socket.gaierror(-2, "Name or service not known")
        except OSError as error:
            raise redis.exceptions.ConnectionError(error) from None
    except redis.exceptions.ConnectionError as error:
        suppressed = error
    assert store_error(suppressed).word == "connection", "what was suppressed on purpose does not count"
    suppressed.__suppress_context__ = False
    assert store_error(suppressed).word == "lookup"


@pytest.mark.parametrize("loop", ["beat", "settle"])
@needs_redis
async def test_the_loops_go_on_after_what_they_do_not_expect(
    server: RedisServer, loop: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fails = True
    name = {"beat": "_beat", "settle": "_settle"}[loop]
    whole: Callable[..., object] = getattr(SharedState, name)

    async def failing(self: SharedState, *about: object, **more: object) -> None:
        if fails:
            raise RuntimeError("nobody expects this")
        await whole(self, *about, **more)  # type: ignore[misc]

    monkeypatch.setattr(SharedState, name, failing)
    async with asking(server.url) as router:
        task = f"shared state {loop}"
        await until(lambda: router.metric("baton_task_failures_total", task=task) > 0)
        assert f"{task} met an error" in caplog.text and "nobody expects this" in caplog.text
        fails = False
        ok = {"call": loop, "result": "ok"}
        await until(lambda: router.metric("baton_shared_state_calls_total", **ok) > 0)
