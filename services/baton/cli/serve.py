"""``baton serve``: a ring for one model, with the options of ``vllm serve``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import Parameter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from baton.cli.completion import model_names
from baton.cli.derived import Given, OptionsOf, takes
from baton.cli.ring_options import WORKER_TLS, WORKERS, RingOptions, planned
from baton.cli.vllm.table import OPTIONS
from baton.cli.vllm.translating import translate
from baton.process.common_options import MODEL, SECURITY
from baton.process.options import ConfigError
from baton.router.config import RouterConfig

if TYPE_CHECKING:
    from typer._click.core import Context

VLLM_PANEL = "As vLLM spells it"
TEMPLATE = "chat_template.jinja"

_ROUTER = OptionsOf(
    RouterConfig,
    without=(
        *(
            "workers",
            "model",
            "served_model_name",
            "models",
            "cluster_key",
            "cluster_key_previous",
            *WORKER_TLS,
        ),
        *("discovery", "discovery_max_staleness", "kubernetes_namespace", "kubernetes_selector"),
        *("kubernetes_port", "kubeconfig", "kubernetes_context"),
        *("ssl_ca_certs", "ssl_client_auth", "drain_timeout", "log_level"),
    ),
)
"""What the router of a ring on one machine can be told."""


class ServeCommand(TyperCommand):
    """A command that reads the options of ``vllm serve`` besides its own, and says what is different."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse what the options of vLLM among ``args`` have become. Raises ConfigError for those that are
        refused."""
        if not ctx.resilient_parsing:  # not while a shell completes what is half typed
            translation = translate(args)
            args = translation.argv
            for option in translation.different:
                print(f"note: {option.name}: {option.why}", file=sys.stderr)
        return super().parse_args(ctx, args)


class VllmSpellings:
    """Options of ``vllm serve`` that are taken under another name, for help, completion and suggestions. They
    are never parsed: each has become one of Baton's before."""

    def parameters(self) -> Iterator[Parameter]:
        """A parameter of the command for each."""
        for option in OPTIONS:
            if option.verdict == "refused" or option.baton.split(" ")[0] == option.name:
                continue
            text = f"{option.baton}. {option.why}" if option.baton else option.why
            info = typer.Option(*option.names, help=text.strip(), rich_help_panel=VLLM_PANEL)
            kind, default = (bool, False) if option.arity == "none" else (str | None, None)
            yield Parameter(
                "vllm_" + option.name.lstrip("-").replace("-", "_"),
                Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, info],
            )


@takes(
    "model",
    OptionsOf(RouterConfig, only=("served_model_name",)),
    "revision",
    "chat_template",
    replace(WORKERS, panel=MODEL),
    _ROUTER,
    "api_key",
    WORKERS,
    OptionsOf(RingOptions),
    VllmSpellings(),
)
def serve(
    given: Given,
    model: Annotated[
        str,
        typer.Argument(
            help="'demo' (the small model that comes with Baton), a Hugging Face model directory, or a hub "
            "id.",
            autocompletion=model_names,
        ),
    ],
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a model of the hub.", rich_help_panel=MODEL),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            help="Chat template (Jinja) instead of the model's: a file, or the text itself.",
            metavar="FILE|TEXT",
            rich_help_panel=MODEL,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="VLLM_API_KEY",
            show_default=False,
            help="Let only those in who send this key; give it once for each. --api-keys has tenants.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
) -> int:
    """Serve one model on this machine: what `baton up` does, with vLLM's options.

    Starts a prefill worker, a decode worker and a router, or what --prefill, --decode and --both say. Options
    of `vllm serve` that mean the same are taken, also by another name; those that do not are refused by name.
    docs/from-vllm.md has all of them.
    """
    from baton.cli.fetching import with_files
    from baton.cli.up import UpOptions
    from baton.cli.up import up as run_up

    if api_key and given.values["api_keys"] is not None:
        raise ConfigError("api_key", "cannot be given together with --api-keys")
    options = RingOptions(**given.fields(RingOptions))
    given = with_files(given, model, revision)
    with ExitStack() as held:
        if api_key:
            given = Given({**given.values, "api_keys": held.enter_context(_keys_file(api_key))})
        ring = planned(given)
        if chat_template is not None:
            view = held.enter_context(_with_template(ring.router.model, chat_template))
            names = ring.router.model_names
            ring = replace(ring, router=replace(ring.router, model=view, served_model_name=names))
        return run_up(ring, UpOptions(log_level=options.shown_level))


@contextmanager
def _keys_file(keys: Sequence[str]) -> Iterator[str]:
    """A file of --api-keys with the digests of ``keys``, which no process list shows, while the ring runs."""
    from baton.router.security.keys import KeysError, file_of

    with TemporaryDirectory(prefix="baton-keys-") as folder:
        path = Path(folder) / "keys.json"
        try:
            path.write_bytes(file_of(keys, "serve"))
        except KeysError as error:
            raise ConfigError("api_key", str(error)) from None
        yield str(path)


@contextmanager
def _with_template(model: str, template: str) -> Iterator[str]:
    """A directory with the files of ``model`` that a router reads, and another chat template."""
    from baton.hub import TEXT_FILES, resolve_model

    source = resolve_model(model)
    with TemporaryDirectory(prefix="baton-model-") as folder:
        files = {file for pattern in TEXT_FILES for file in source.glob(pattern) if file.name != TEMPLATE}
        for file in files:
            (Path(folder) / file.name).symlink_to(file.resolve())
        (Path(folder) / TEMPLATE).write_text(_template_text(template), encoding="utf-8")
        yield folder


def _template_text(template: str) -> str:
    """The template in a file, or ``template`` itself, which as vLLM has it shows by its braces."""
    if "{" in template or "\n" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("chat_template", f"cannot read {template}: {error}") from None
