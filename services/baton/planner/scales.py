"""The scale subresource of the two Deployments, through the official client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from baton.planner.measured import ServingRole
from baton.router.discovery.api_server import ApiServerError, MakeConfiguration

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from kubernetes.aio.client import ApiClient

MAX_BYTES = 1 << 20
TIMEOUT_S = 10.0
UNAUTHORIZED = 401


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""


class _Spec(msgspec.Struct, frozen=True):
    replicas: int = 0


class _Scale(msgspec.Struct, frozen=True):
    metadata: _Metadata
    spec: _Spec = _Spec()


@dataclass(frozen=True, slots=True)
class Scale:
    """The replicas that a Deployment asks for, and the resource version that they were read in."""

    replicas: int
    version: str


class Scales:
    """The scales of the Deployments. A 401 makes the credentials be read anew. Errors of connecting are
    raised as the client raises them; ApiServerError for a bad answer; TimeoutError."""

    def __init__(
        self, connect: MakeConfiguration, namespace: str, deployments: dict[ServingRole, str]
    ) -> None:
        self._connect, self._namespace, self._deployments = connect, namespace, deployments
        self._client: ApiClient | None = None

    async def read(self, role: ServingRole) -> Scale:
        from kubernetes.aio.client import AppsV1Api

        async with asyncio.timeout(TIMEOUT_S):
            api = AppsV1Api(await self._connected())
            response = await api.read_namespaced_deployment_scale_without_preload_content(
                self._deployments[role], self._namespace
            )
            return await self._scale(response)

    async def write(self, role: ServingRole, replicas: int, version: str) -> Scale:
        """Ask for ``replicas``. ApiServerError with 409 if the scale has changed since ``version``."""
        from kubernetes.aio.client import AppsV1Api

        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        async with asyncio.timeout(TIMEOUT_S):
            api = AppsV1Api(await self._connected())
            response = await api.patch_namespaced_deployment_scale_without_preload_content(
                self._deployments[role],
                self._namespace,
                body,
                field_manager="baton-planner",
                _content_type="application/merge-patch+json",
            )
            return await self._scale(response)

    async def _connected(self) -> ApiClient:
        from kubernetes.aio.client import ApiClient
        from kubernetes.aio.config import ConfigException

        if self._client is None:
            try:
                configuration = await self._connect()
            except (ConfigException, ValueError, TypeError) as error:
                raise ApiServerError(UNAUTHORIZED, f"and no other credentials: {error}") from error
            self._client = ApiClient(configuration)
        return self._client

    async def _scale(self, response: ClientResponse) -> Scale:
        try:
            body = bytearray()
            async for data in response.content.iter_any():
                body += data
                if len(body) > MAX_BYTES:
                    raise ApiServerError(response.status, f"an answer of more than {MAX_BYTES} bytes")
        finally:
            response.release()
        if response.status != 200:
            if response.status == UNAUTHORIZED:
                await self.close()
            raise ApiServerError(response.status, response.reason or "")
        try:
            scale = msgspec.json.decode(bytes(body), type=_Scale)
        except msgspec.MsgspecError as error:
            raise ApiServerError(200, f"no Scale: {error}") from error
        return Scale(scale.spec.replicas, scale.metadata.resource_version)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
