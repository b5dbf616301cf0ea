"""Lists and watches of EndpointSlices through the official client, whose asyncio flavour needs no thread.

The client provides credentials, TLS and the API's methods. Bodies are decoded here: the client's model
objects cost a millisecond for every few endpoints, on the loop that streams tokens. The client is imported
only if this discovery is chosen: it takes 0.4 s and 30 MB.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baton.process.options import StartError

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from kubernetes.aio.client import ApiClient, Configuration

MAX_BODY_BYTES = 64 << 20
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ApiServerError(Exception):
    """An answer that cannot be used. ``status`` is the status of HTTP, or of the Status in a watch; 200 for a
    list or an event that is too long, and for a watch that ended early."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}".strip())
        self.status = status


class MakeConfiguration(Protocol):
    """Makes the configuration of a client, with credentials read anew."""

    async def __call__(self) -> Configuration: ...


async def in_cluster() -> Configuration:
    """Return the configuration of this pod's service account. The client reads its token again every minute,
    as kubelet renews it."""
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import load_incluster_config

    configuration = Configuration()
    load_incluster_config(configuration)
    return configuration


def from_kubeconfig(path: str | None, context: str | None) -> MakeConfiguration:
    """Return a function that reads the credentials of a kubeconfig file: $KUBECONFIG or ~/.kube/config if
    ``path`` is None."""

    async def connect() -> Configuration:
        from kubernetes.aio.client import Configuration
        from kubernetes.aio.config import load_kube_config

        configuration = Configuration()
        await load_kube_config(path, context, configuration, persist_config=False)
        return configuration

    return connect


async def checked(kubeconfig: str | None, context: str | None) -> MakeConfiguration:
    """Return the credentials to use: a pod's service account in a pod, if no file or context is named, and
    the kubeconfig otherwise.

    Raises StartError, with one line for a person, when the client is not installed or there are no usable
    credentials.
    """
    try:
        from kubernetes.aio.config import ConfigException
    except ImportError:
        raise StartError(
            "--discovery kubernetes needs the Kubernetes client: pip install 'baton[kubernetes]'"
        ) from None
    named = kubeconfig is not None or context is not None
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and not named
    connect: MakeConfiguration = in_cluster if in_pod else from_kubeconfig(kubeconfig, context)
    try:
        await connect()
    except (ConfigException, OSError, ValueError, TypeError) as error:
        where = "of this pod's service account" if in_pod else "of a kubeconfig"
        raise StartError(f"--discovery kubernetes: no credentials {where}: {error}") from error
    return connect


def own_namespace() -> str | None:
    """Return the namespace of the pod this process runs in, or None."""
    try:
        return (_SERVICE_ACCOUNT / "namespace").read_text().strip() or None
    except OSError:
        return None


class ApiServer:
    """A client of one API server. After a 401 its credentials are read anew."""

    def __init__(self, connect: MakeConfiguration, namespace: str, selector: str) -> None:
        self._connect = connect
        self._namespace = namespace
        self._selector = selector
        self._client: ApiClient | None = None

    async def list(self, timeout_s: float) -> bytes:
        """Return the body of a list of all slices: a consistent read, never from a cache that lags.

        Raises ApiServerError, TimeoutError, and the client's errors when there is no connection.
        """
        async with asyncio.timeout(timeout_s), self._get() as response:
            return await _read(response)

    @asynccontextmanager
    async def watch(
        self, version: str, seconds: float, timeout_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Watch the changes since ``version``, a line each, for ``seconds``. The head of the answer must come
        within ``timeout_s`` seconds."""
        async with asyncio.timeout(timeout_s) as head:
            async with self._get(version, max(1, round(seconds))) as response:
                head.reschedule(None)
                yield _lines(response)

    @asynccontextmanager
    async def _get(
        self, version: str | None = None, seconds: int | None = None
    ) -> AsyncIterator[ClientResponse]:
        from kubernetes.aio.client import ApiClient, DiscoveryV1Api

        if self._client is None:
            self._client = ApiClient(await self._connect())
        api = DiscoveryV1Api(self._client)
        response = await api.list_namespaced_endpoint_slice_without_preload_content(
            self._namespace,
            label_selector=self._selector,
            watch=None if version is None else True,
            resource_version=version,
            allow_watch_bookmarks=None if version is None else True,
            timeout_seconds=seconds,
        )
        try:
            if response.status != 200:
                if response.status == 401:
                    await self.close()
                raise ApiServerError(response.status, response.reason or "")
            yield response
        finally:
            response.release() if response.content.at_eof() else response.close()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


async def _read(response: ClientResponse) -> bytes:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > MAX_BODY_BYTES:
            raise ApiServerError(200, f"a list of more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _lines(response: ClientResponse) -> AsyncIterator[bytes]:
    """Yield lines of up to ``MAX_BODY_BYTES``: the client's own reader has a lower limit."""
    rest = b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line:
                yield line
        if len(rest) > MAX_BODY_BYTES:
            raise ApiServerError(200, f"an event of more than {MAX_BODY_BYTES} bytes")
