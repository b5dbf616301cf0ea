"""The gRPC API: the same completion core as HTTP, with the same limits and messages."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import MappingProxyType
from typing import TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.core.sampling_params import SamplingFields
from baton.core.structured_output import StructuredOutput
from baton.net.addresses import counted_peer
from baton.net.rpc_status import end_with
from baton.request.prompts import check_count, check_ids
from baton.request.sampling import Run, resolve, runs_of
from baton.request.truncation import truncation_of
from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import ApiError, as_api_error, invalid, shown
from baton.router.api.grpc.errors import Ending
from baton.router.api.grpc.front import connection_options, text_of
from baton.router.api.grpc.sampling import sampling_fields
from baton.router.api.http.preparing.prepare import reading_of
from baton.router.api.job import Job, Usage
from baton.router.api.job_builder import Requester, build_job
from baton.router.api.prepared import PreparedJob, Telling
from baton.router.api.priority import MAX_TIMEOUT_S
from baton.router.api.prompts import Echo, PromptReader
from baton.router.api.reading import Reading
from baton.router.api.relay import SlowClientError
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.dispatch.types import ModelInfo
from baton.router.security.client import Client
from baton.text.choice import Delta
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name

HEALTH_POLL_SECONDS = 0.5
"""The time between two looks at the health for a watcher, in seconds."""

ECHOED_AT_ONCE = 1024
"""The number of tokens that are decoded for an echo in one turn of the event loop."""

RUNS_AT_ONCE = 32
"""The number of runs of tokens that are made of bad words in one turn of the event loop: of the longest words
it takes some 5 ms."""

_Context: TypeAlias = "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]"

_REASONS = MappingProxyType({"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH})


def server_options(settings: ApiSettings) -> list[tuple[str, int]]:
    """Return options for ``grpc.aio.server`` that bound a message as HTTP bounds a body, and connections."""
    return [("grpc.max_receive_message_length", settings.max_body_bytes), *connection_options()]


def add_services(
    server: grpc.aio.Server, *services: CompletionService, stopping: asyncio.Event | None = None
) -> None:
    """Serve inference with one core for each model, health and reflection on ``server``. Once ``stopping`` is
    set, health says so, and the calls that watch it end: a stop waits for open calls."""
    catalogue = Catalogue(services)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceApi(catalogue), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(catalogue, stopping), server)
    names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)


class InferenceApi(inference_pb2_grpc.InferenceServicer):
    """``baton.v1.Inference``. A call's cancellation or deadline cancels its request on the workers."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._reading = reading_of(catalogue)

    # The answer goes out by ``context.write``, not from a generator: a cancelled call then unwinds this very
    # coroutine, which closes the ring's request at once.
    async def Generate(  # type: ignore[override]  # noqa: N802 - the contract's name
        self, request: pb.GenerateRequest, context: _Context
    ) -> None:
        """Complete one prompt. Ends with the status that fits the error."""
        started = time.perf_counter()
        request_id = f"grpc-{uuid.uuid4().hex}"
        status, ending = 499, None
        audit = self._catalogue.audit
        record = None
        if audit is not None:
            address = counted_peer(context.peer())
            record = audit.begin(request_id, endpoint=f"{SERVICE_NAME}/Generate", address=address)
        try:
            client = self._client(context)
            if record is not None:
                record.client = client
            if audit is not None:
                audit.check()
            self._catalogue.check_room(client)
            place, model = self._catalogue.menu(client).choose(request.model or None)
            requester = Requester(
                request_id=request_id,
                endpoint=f"{SERVICE_NAME}/Generate",
                started=started,
                client=client,
                origin=self._catalogue.traces.origin(
                    None, text_of(context.invocation_metadata()).get("traceparent")
                ),
                record=record,
                timeout_s=_timeout(context.time_remaining()),
            )
            service = self._catalogue.services[place]
            call = _Call(service, self._reading)
            prepared = await call.prepared(request, place, model, client)
            await call.answer(await build_job(service, prepared, requester), context)
            status = 200
        except Exception as error:  # noqa: BLE001 - `as_api_error` logs unexpected errors
            ending = Ending.of(as_api_error(error, request_id))
            status = ending.status
        finally:
            self._catalogue.metrics.requests.labels(f"{SERVICE_NAME}/Generate", str(status)).inc()
            if audit is not None and record is not None:
                record.status = status
                audit.end(record)
        if ending is not None:
            ending.end(context)

    async def ListModels(  # noqa: N802 - the contract's name
        self, request: pb.ListModelsRequest, context: _Context
    ) -> pb.ListModelsResponse:
        """Return the names of the served models that the client may ask, once a worker has said what it
        serves."""
        try:
            client = self._client(context)
        except ApiError as error:
            Ending.of(error).end(context)
            return pb.ListModelsResponse()
        names = [
            name
            for service in self._catalogue.services
            if (model := service.ring.model) is not None and service.serves(client)
            for name in service.names or (model.name,)
        ]
        return pb.ListModelsResponse(models=names)

    def _client(self, context: _Context) -> Client:
        """Return the client that calls, by the metadata ``authorization`` or ``x-api-key``."""
        metadata = text_of(context.invocation_metadata())
        return self._catalogue.authentication.client(metadata.get("authorization"), metadata.get("x-api-key"))


class _Call:
    """One call for a model."""

    def __init__(self, service: CompletionService, reading: Reading) -> None:
        self._service = service
        self._reading = reading

    async def prepared(
        self, request: pb.GenerateRequest, place: int, model: ModelInfo, client: Client
    ) -> PreparedJob:
        """Return what ``request`` asks of ``model``, which has this ``place`` in the menu."""
        structured = StructuredOutput.from_proto(request.params.structured_output)
        if structured is not None:
            await self._service.grammars.check("structured_output", structured, client.tenant)
        asked = request.params
        fields = sampling_fields(asked)
        prompt = await self._prompt(request, model, client, fields)
        self._check_lists(asked, model)
        params = resolve(
            fields,
            model,
            self._service.settings,
            self._service.tokenizer,
            prompt_tokens=len(prompt),
            default_max_tokens=None,
            logprobs=asked.logprobs if asked.HasField("logprobs") else None,
            bad_word_ids=self._bad_word_ids(asked, model),
            word_runs=await self._word_runs(asked, model),
            structured_output=structured,
            defaults=self._service.settings.defaults,
        )
        return PreparedJob(
            model=place,
            prompts=[prompt],
            params=params,
            n=1,
            priority=request.priority or None,
            cache_salt=None,
            seeded=asked.HasField("seed"),
            skip_special_tokens=True,
            echoes=[await self._echo(request, prompt)] if request.echo else [],
            prompt_logprobs=None,
            tokens_as_ids=False,
            grammars=[],  # checked above, before the prompt is read
            open_ended=not asked.max_tokens,
            prompt_param=request.WhichOneof("prompt") or "prompt",
            telling=Telling(stream=True),
        )

    def _check_lists(self, params: pb.SamplingParams, model: ModelInfo) -> None:
        """Raise RequestError for a list of ids that is too long, before it becomes a Python list."""
        settings = self._service.settings
        for name, given, most in (
            ("stop_token_ids", len(params.stop_token_ids), settings.max_stop_token_ids),
            ("allowed_token_ids", len(params.allowed_token_ids), model.vocab_size),
        ):
            if given > most:
                raise invalid(name, f"{name} has {given} ids; at most {most} are allowed.")

    def _bad_word_ids(self, params: pb.SamplingParams, model: ModelInfo) -> list[tuple[int, ...]]:
        most, given = self._service.settings.max_bad_words, len(params.bad_word_ids)
        if given > most:
            raise invalid("bad_word_ids", f"bad_word_ids has {given} runs; at most {most} are allowed.")
        longest = self._service.settings.max_bad_word_chars
        for index, run in enumerate(params.bad_word_ids):
            if not run.ids:
                raise invalid("bad_word_ids", f"bad_word_ids[{index}] is empty; it must hold a token id.")
            if len(run.ids) > longest:
                raise invalid(
                    "bad_word_ids",
                    f"bad_word_ids[{index}] has {len(run.ids)} token ids; at most {longest} are allowed.",
                )
            check_ids(run.ids, model.vocab_size, f"bad_word_ids[{index}]")
        return [tuple(run.ids) for run in params.bad_word_ids]

    async def _word_runs(self, params: pb.SamplingParams, model: ModelInfo) -> list[Run]:
        """Return the runs of the bad words, made in many turns of the event loop."""
        service, runs = self._service, list[Run]()
        for run in runs_of(list(params.bad_words), service.tokenizer, model.vocab_size, service.settings):
            runs.append(run)
            if not len(runs) % RUNS_AT_ONCE:
                await asyncio.sleep(0)
        return runs

    async def _echo(self, request: pb.GenerateRequest, prompt: list[int]) -> Echo:
        """Return a text as it was given; token ids, and a prompt that may have been cut, by their text."""
        if request.HasField("text") and not request.params.HasField("truncate_prompt_tokens"):
            return Echo(request.text)
        stream = self._service.tokenizer.detokenizer(skip_special_tokens=True)
        pieces: list[str] = []
        for start in range(0, len(prompt), ECHOED_AT_ONCE):
            pieces.append(stream.push(prompt[start : start + ECHOED_AT_ONCE]))
            await asyncio.sleep(0)
        return Echo("".join(pieces) + stream.finish())

    async def _prompt(
        self, request: pb.GenerateRequest, model: ModelInfo, client: Client, fields: SamplingFields
    ) -> list[int]:
        truncation = truncation_of(fields, model)
        kind = request.WhichOneof("prompt")
        if kind == "text":
            return await self._reading.text(request.text, request.model or None, client, truncation)
        if kind == "token_ids":
            ids = request.token_ids.ids
            if truncation is None:
                check_count(len(ids), model, "token_ids")  # before the ids are copied
            return PromptReader(self._service.tokenizer).from_ids(list(ids), model, "token_ids", truncation)
        raise invalid("prompt", "Give either text or token_ids.", "missing_required_parameter")

    async def answer(self, job: Job, context: _Context) -> None:
        scope = self._service.scope(job)
        deltas = self._service.run(job, scope)
        told = False

        async def write(responses: list[pb.GenerateResponse]) -> None:
            nonlocal told
            if not told and scope.headers:
                await context.send_initial_metadata(tuple(scope.headers.items()))
            told = True
            for response in responses:
                await context.write(response)

        try:
            async with aclosing(_responses(job, deltas)) as responses:
                await self._service.relay(_size).run(responses, write)
        except SlowClientError as error:
            self._service.cut_off(job, error)
            # A status would have to wait behind the message that the client does not take: the call is
            # dropped instead.
            raise asyncio.CancelledError from None
        finally:
            await deltas.aclose()


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # no types there
    """``grpc.health.v1.Health``, from the rings at the moment of asking: one that is ready is enough."""

    def __init__(self, catalogue: Catalogue, stopping: asyncio.Event | None = None) -> None:
        self._rings = [service.ring for service in catalogue.services]
        self._stopping = stopping or asyncio.Event()

    async def Check(  # noqa: N802 - the contract's name
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """Return whether a request sent now could be answered."""
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            end_with(
                context,
                grpc.StatusCode.NOT_FOUND,
                f"There is no service {shown(request.service)}.",
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802 - the contract's name
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> None:
        """Write the health now, and again whenever it changes, until the router stops."""
        told = None
        while True:
            stopping = self._stopping.is_set()
            status = self._status(request.service)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            if stopping:
                return
            await asyncio.sleep(HEALTH_POLL_SECONDS)

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in ("", SERVICE_NAME):
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if not self._stopping.is_set() and any(ring.model is not None and ring.ready for ring in self._rings):
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING


def _timeout(remaining_s: float | None) -> float | None:
    """Return the timeout for a call's deadline, in seconds. No deadline is refused: one beyond the longest
    timeout counts as none."""
    if remaining_s is None or remaining_s > MAX_TIMEOUT_S:
        return None
    return max(remaining_s, 1e-3)


def _size(response: pb.GenerateResponse) -> int:
    return response.ByteSize()


async def _responses(
    job: Job, deltas: AsyncGenerator[tuple[int, Delta]]
) -> AsyncGenerator[pb.GenerateResponse]:
    usage = Usage.of(job)
    async for index, delta in deltas:
        usage.add(job, index, delta)
        yield _response(job.request_id, delta, usage)


def _response(request_id: str, delta: Delta, usage: Usage) -> pb.GenerateResponse:
    response = pb.GenerateResponse(request_id=request_id, text=delta.text, token_ids=delta.token_ids)
    if delta.details is not None:
        details = delta.details
        if details.logprobs is not None:
            response.logprobs.CopyFrom(details.logprobs.to_proto())
        if details.prompt_logprobs is not None:
            response.prompt_logprobs.CopyFrom(details.prompt_logprobs.to_proto())
    if delta.finish_reason is not None:
        response.finish_reason = _REASONS[delta.finish_reason]
        response.usage.prompt_tokens = usage.prompt_tokens
        response.usage.completion_tokens = usage.completion_tokens
        response.usage.cached_tokens = usage.cached_tokens
    return response
