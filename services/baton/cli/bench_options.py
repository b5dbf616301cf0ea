"""The options of ``baton bench``, declared once for all its commands that take them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WORKLOAD = "Workload"
_OFFER = "How it is offered"
_SERVER = "Server"
_RESULT = "Result"
_SEARCH = "Search"

Workload = Annotated[
    str,
    typer.Option(
        help="random, shared-prefix, sharegpt (lengths as chats have them, or those of --dataset), mooncake "
        "or burstgpt (traces from --dataset).",
        rich_help_panel=_WORKLOAD,
    ),
]
Dataset = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="ShareGPT's JSON, Mooncake's JSON lines or BurstGPT's CSV.",
        rich_help_panel=_WORKLOAD,
    ),
]
NumPrompts = Annotated[int, typer.Option(help="How many requests.", rich_help_panel=_WORKLOAD)]
InputLen = Annotated[
    int,
    typer.Option(help="Prompt tokens; with shared-prefix: after the prefix.", rich_help_panel=_WORKLOAD),
]
OutputLen = Annotated[int, typer.Option(help="Tokens of each answer.", rich_help_panel=_WORKLOAD)]
RangeRatio = Annotated[
    float,
    typer.Option(
        help="Lengths are drawn evenly from len*(1-R) to len*(1+R); 0 to 1.", rich_help_panel=_WORKLOAD
    ),
]
PrefixLen = Annotated[
    int, typer.Option(help="With shared-prefix: tokens of a prefix.", rich_help_panel=_WORKLOAD)
]
NumPrefixes = Annotated[
    int, typer.Option(help="With shared-prefix: how many there are.", rich_help_panel=_WORKLOAD)
]
WorkloadSeed = Annotated[
    int,
    typer.Option(
        "--seed",
        help="Draws prompts, lengths and times. Take another for each run against one server: its prefix "
        "cache knows the prompts of the last.",
        rich_help_panel=_WORKLOAD,
    ),
]

RequestRate = Annotated[
    float | None,
    typer.Option(
        help="Requests/s in the mean, or inf. Default: a trace's own times, otherwise all at once.",
        rich_help_panel=_OFFER,
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        help="Shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier, more steadier.",
        rich_help_panel=_OFFER,
    ),
]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(help="Keep so many requests open instead.", rich_help_panel=_OFFER),
]
Speedup = Annotated[float, typer.Option(help="A trace's times are divided by this.", rich_help_panel=_OFFER)]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GOALS",
        help="Count requests that meet all of these, as 'ttft:500 tpot:50', in milliseconds; names: ttft, "
        "tpot, itl (99 % of a request's), e2e.",
        rich_help_panel=_OFFER,
    ),
]
Timeout = Annotated[float, typer.Option(help="Seconds until a request is given up.", rich_help_panel=_OFFER)]

Url = Annotated[str, typer.Option(help="Address of an OpenAI-compatible server.", rich_help_panel=_SERVER)]
ServedModel = Annotated[
    str | None,
    typer.Option("--model", help="Default: the first that the server names.", rich_help_panel=_SERVER),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        help="Model directory or hub id whose vocabulary prompts are made of. Default: --model.",
        rich_help_panel=_SERVER,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="OPENAI_API_KEY",
        show_default=False,
        help="Sent as a bearer token. Better given in the environment.",
        rich_help_panel=_SERVER,
    ),
]
Prompts = Annotated[
    str,
    typer.Option(help="ids, text, or auto: token ids where the server takes them.", rich_help_panel=_SERVER),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(help="Have the server go on to the full length of each answer.", rich_help_panel=_SERVER),
]
Temperature = Annotated[float, typer.Option(help="Of the sampling.", rich_help_panel=_SERVER)]

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write all figures, settings and times.", rich_help_panel=_RESULT
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the result; .svg or .png.", rich_help_panel=_RESULT),
]

BatchSize = Annotated[int, typer.Option(help="Prompts in the batch.", rich_help_panel=_WORKLOAD)]
Warmups = Annotated[int, typer.Option(help="Batches before the first that counts.", rich_help_panel=_OFFER)]
Repeats = Annotated[int, typer.Option(help="Batches that count.", rich_help_panel=_OFFER)]

Minutes = Annotated[float, typer.Option(help="When the search has to be over.", rich_help_panel=_SEARCH)]
Attainment = Annotated[
    float,
    typer.Option(help="Share of the requests that must meet the goals.", rich_help_panel=_SEARCH),
]
Splits = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Workers by role, as 1p1d,2p1d,2b. Default: those that use all cores or devices, and the "
        "smallest.",
        rich_help_panel=_SEARCH,
    ),
]
NumSeqsList = Annotated[
    str, typer.Option("--max-num-seqs", metavar="LIST", help="Values to try.", rich_help_panel=_SEARCH)
]
BudgetList = Annotated[
    str,
    typer.Option("--max-num-batched-tokens", metavar="LIST", help="Values to try.", rich_help_panel=_SEARCH),
]
ChunkList = Annotated[
    str, typer.Option("--prefill-chunk", metavar="LIST", help="Values to try.", rich_help_panel=_SEARCH)
]
Cores = Annotated[
    int | None,
    typer.Option(help="CPU cores to share out to workers. Default: all.", rich_help_panel=_SEARCH),
]
