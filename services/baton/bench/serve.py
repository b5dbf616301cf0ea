"""``baton bench serve``: one measurement of a running server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton import hub
from baton.bench.arrivals import send_times
from baton.bench.config import ServeConfig, parse_url
from baton.bench.exchange import Prepared, RequestSender
from baton.bench.http import HttpClient
from baton.bench.load_generator import closed_loop, open_loop
from baton.bench.record import RequestRecord
from baton.bench.summary import Summary, summarise
from baton.bench.target import PromptForm, RequestFormat, ServedModel, find_form, find_model
from baton.bench.workload.choice import make_items
from baton.bench.workload.items import Item, fit
from baton.bench.workload.vocabulary import Vocabulary
from baton.process.options import ConfigError, ModelError
from baton.text.errors import TokenizerError
from baton.text.tokenizer import Tokenizer

_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ServeResult:
    """The figures of one run, and its conditions."""

    served: ServedModel
    request: RequestFormat
    left_out: int
    """Requests of the workload that do not fit the model's context."""
    summary: Summary
    records: Sequence[RequestRecord]


async def measure(config: ServeConfig, say: Callable[[str], None] = lambda line: None) -> ServeResult:
    """Make the workload, offer it, and return the figures. Raises UserError when the run cannot begin."""
    client = HttpClient(parse_url("url", config.url), config.api_key)
    try:
        served = await find_model(client, config.model)
        tokenizer = load_tokenizer(config.tokenizer or config.model or served.name)
        vocabulary = Vocabulary(tokenizer)
        fitted = fit(make_items(config.workload, tokenizer), served.context)
        request = await find_request(client, config, served, vocabulary)
        # Bodies are encoded before the clock starts, so that encoding them makes no request late.
        prepared = prepare(fitted.items, request, vocabulary, config.workload.seed)
        say(f"{len(prepared)} requests to {served.name} on {config.url}, prompts as {request.prompts}")
        records = await _offer(config, RequestSender(client, config.timeout), fitted.items, prepared)
    finally:
        client.close()
    return ServeResult(served, request, fitted.left_out, summarise(records, config.goals), records)


async def find_request(
    client: HttpClient, config: ServeConfig, served: ServedModel, vocabulary: Vocabulary
) -> RequestFormat:
    """Find how the server takes requests. The server has answered one request then, which warms it up a
    little."""
    probe = Item(vocabulary.probe(_PROBE_TOKENS), _PROBE_TOKENS, 2)
    form: PromptForm | None = None
    if config.prompts == "ids":
        form = "ids"
    elif config.prompts == "text":
        form = "text"
    return await find_form(
        client,
        served.name,
        vocabulary.ids(probe),
        vocabulary.text(probe),
        prompts=form,
        ignore_eos=config.ignore_eos,
        temperature=config.temperature,
    )


def prepare(
    items: Sequence[Item], request: RequestFormat, vocabulary: Vocabulary, seed: int
) -> list[Prepared]:
    """Encode the bodies of all requests."""
    write = vocabulary.ids if request.prompts == "ids" else vocabulary.text
    return [
        Prepared(request.body(write(item), item.output_tokens, seed + index), item.prompt_tokens)
        for index, item in enumerate(items)
    ]


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of a model. Raises ConfigError that names the option."""
    try:
        return Tokenizer.from_dir(hub.resolve_model(name, weights=False))
    except (ModelError, TokenizerError) as error:
        raise ConfigError("tokenizer", f"{error}; give a model directory or a hub id") from None


async def _offer(
    config: ServeConfig, exchange: RequestSender, items: Sequence[Item], prepared: Sequence[Prepared]
) -> list[RequestRecord]:
    if config.max_concurrency is not None:
        return await closed_loop(exchange, prepared, config.max_concurrency)
    if config.keeps_times:
        times = [(item.at or 0.0) / config.speedup for item in items]
        order = sorted(range(len(times)), key=times.__getitem__)
        prepared, times = [prepared[i] for i in order], [times[i] for i in order]
    else:
        rate = math.inf if config.request_rate is None else config.request_rate
        times = send_times(len(items), rate, config.burstiness, config.workload.seed)
    return await open_loop(exchange, prepared, times)


def serve(config: ServeConfig, say: Callable[[str], None]) -> ServeResult:
    """Run `measure` in an event loop of its own."""
    return asyncio.run(measure(config, say))
