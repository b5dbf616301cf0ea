"""The options of an engine, which a worker has too. Imports no torch: a bad option is refused at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

from baton.engine.defaults import CPU, CUDA, LARGE_BYTES, LARGE_CUDA, LARGEST_GRAPH, StepSizes
from baton.models.config import DTYPES, KVCacheDtype, LoadFormat
from baton.models.quantization.registry import Quantization
from baton.process.common_options import MEMORY, MODEL, PARALLELISM, SPECULATION
from baton.process.fields import Option
from baton.process.options import ConfigError
from baton.speculation.config import MAX_NGRAM, MAX_TOKENS, Method

MAX_RANKS = 128
AsyncScheduling = Literal["auto", "on", "off"]
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def check_device(option: str, device: str) -> None:
    """Raise ConfigError unless ``device`` is written as a device is."""
    if not _DEVICE.fullmatch(device):
        raise ConfigError(option, f"must be auto, cpu, cuda or cuda:N, not {device!r}")


def _by_device(size: str) -> str:
    """The sentence of help on the default of one of ``StepSizes``."""
    return f"Default: {getattr(CPU.sizes, size)} on a CPU, {getattr(CUDA.sizes, size)} on CUDA."


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What to load and how much to run at once. None means "decide from the model or the machine"."""

    dtype: Annotated[
        str,
        Option(
            "float32, bfloat16, float16, or auto: the type the weights were saved in, but float32 on a CPU "
            "that is slow with it.",
            MODEL,
            choices=("auto", *DTYPES),
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Option(
            "auto: weights as the checkpoint has them. int8 and fp8 keep a plain checkpoint's weights of "
            "matmuls in half the memory, so that answers come faster and a little different; none refuses "
            "a quantized checkpoint. The same on all workers of a ring.",
            MODEL,
        ),
    ] = "auto"
    device: Annotated[
        str,
        Option(
            "auto (CUDA where there is one), cpu, cuda or cuda:N. The processes of a split model take N and "
            "those that follow.",
            MODEL,
            check=check_device,
        ),
    ] = "auto"
    load_format: Annotated[
        LoadFormat,
        Option(
            "auto, or dummy: random weights of the model's shape, to measure without a download.",
            MODEL,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Option(
            "Longest prompt plus answer, in tokens. Default: what the model was made for.",
            MODEL,
            least=1,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Option(
            "auto: KV blocks hold numbers of the model's type. fp8: they hold FP8 (e4m3), so that twice as "
            "many tokens fit and half as many bytes travel; answers differ a little. fp8-dynamic: by scales "
            "of each block and head, which are found as tokens come; on a CPU. Of models that keep K and V; "
            "the same on all workers of a ring.",
            MEMORY,
        ),
    ] = "auto"
    block_size: Annotated[
        int | None,
        Option(f"Tokens per KV block. {_by_device('block_size')}", MEMORY, least=1, most=1024),
    ] = None
    num_blocks: Annotated[
        int | None, Option("KV blocks per worker. Default: what the memory holds.", MEMORY, least=1)
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Option(
            f"Most requests running at once on a worker. {_by_device('max_num_seqs')[:-1]}, "
            f"{LARGE_CUDA.sizes.max_num_seqs} if that has {LARGE_BYTES >> 30} GiB.",
            MEMORY,
            least=1,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Option(f"Most tokens computed in one step. {_by_device('max_num_batched_tokens')}", MEMORY, least=1),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        Option(
            "Most prompt tokens of one request in one step; smaller disturbs running answers less. "
            + _by_device("prefill_chunk"),
            MEMORY,
            least=1,
        ),
    ] = None
    mixed_prefill_tokens: Annotated[
        int | None,
        Option(
            "Most prompt tokens of a step that decodes as well: running answers wait for them. Default: for "
            f"a decode worker {CPU.decode_mixed_tokens} on a CPU and {CUDA.decode_mixed_tokens} on CUDA, for "
            f"the others no limit of its own on a CPU and {CUDA.mixed_tokens} on CUDA.",
            MEMORY,
            least=1,
        ),
    ] = None
    chunked_prefill: Annotated[
        bool, Option("Compute long prompts in chunks, between the steps of running answers.", MEMORY)
    ] = True
    """Off: a whole prompt in one step, even above ``max_num_batched_tokens``."""
    prefix_caching: Annotated[bool, Option("Keep KV blocks for prompts that begin alike.", MEMORY)] = True
    enforce_eager: Annotated[
        bool,
        Option("On CUDA, launch each kernel of a step by itself instead of replaying graphs.", MEMORY),
    ] = False
    max_graph_tokens: Annotated[
        int,
        Option(
            "On CUDA, most tokens of a step with prompts whose layers, but for their attention, are replayed "
            "as graphs; 0: none.",
            MEMORY,
            least=0,
            most=LARGEST_GRAPH,
        ),
    ] = LARGEST_GRAPH
    async_scheduling: Annotated[
        AsyncScheduling,
        Option(
            "on: launch each step before the tokens of the one before have reached the host, so that a "
            "device never waits for it. auto: on CUDA, in one process and without speculation.",
            MEMORY,
        ),
    ] = "auto"
    speculative_method: Annotated[
        Method,
        Option(
            "Who guesses tokens ahead, for one step to settle several: none, ngram (what followed the last "
            "tokens before), draft (a small model), medusa or eagle. Answers stay the same. Prefill workers "
            "take no notice.",
            SPECULATION,
        ),
    ] = "none"
    speculative_model: Annotated[
        str | None,
        Option(
            "With draft, medusa or eagle: the directory, or hub id, of what they load. Default: the "
            "directory of the method's name inside the model's own, as the demo model has them.",
            SPECULATION,
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int, Option("Most guesses per answer and step, 1 to 16.", SPECULATION, least=1, most=MAX_TOKENS)
    ] = 4
    speculative_ngram_min: Annotated[
        int, Option("With ngram: fewest last tokens to look for.", SPECULATION, least=1, most=MAX_NGRAM)
    ] = 2
    speculative_ngram_max: Annotated[
        int, Option("With ngram: most last tokens to look for.", SPECULATION, least=1, most=MAX_NGRAM)
    ] = 4
    tensor_parallel_size: Annotated[
        int,
        Option(
            "Processes, each with a device of its own, that share every layer's heads and rows.",
            PARALLELISM,
            least=1,
            most=MAX_RANKS,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Option(
            "Stages that the layers are dealt out to, one after the other, each of as many processes.",
            PARALLELISM,
            least=1,
            most=MAX_RANKS,
        ),
    ] = 1

    def sizes_with(self, defaults: StepSizes) -> StepSizes:
        """The sizes that are given, and those of ``defaults`` that are not. ValueError if they do not go
        together."""
        given = {field.name: getattr(self, field.name) for field in fields(StepSizes)}
        return replace(defaults, **{name: size for name, size in given.items() if size is not None})

    @property
    def world(self) -> int:
        """Processes that the model is split over, each a rank."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
