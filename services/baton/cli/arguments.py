"""Options that several commands have and no configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.process.common_options import PROCESS

ExitWithParent = Annotated[
    int | None,
    typer.Option(
        metavar="PID",
        help="End when the process that started this one, PID, has ended.",
        rich_help_panel=PROCESS,
    ),
]
Url = Annotated[str, typer.Option(help="Address of the ring's HTTP API.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="OPENAI_API_KEY",
        show_default=False,
        help="The key that the ring knows, if it wants one. Better given in the environment.",
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat/--completion", help="Ask through the model's chat template, or let it continue the text."
    ),
]
DEVICES = """auto, cpu, cuda or cuda:N; several, as in cuda:0,cuda:1, are dealt out to the workers, to each \
as many as it has processes."""
