"""``baton keys``: making API keys."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.process.options import UserError

keys = typer.Typer(name="keys", no_args_is_help=True, help="Make API keys for --api-keys.")


@keys.callback()
def group() -> None:
    """Make API keys for --api-keys."""


@keys.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whom the key stands for: limits and caches are a tenant's.")],
    name: Annotated[str | None, typer.Option(help="What logs call the key. Default: made up.")] = None,
) -> None:
    """Print a new key, which is kept nowhere, and the line that makes it known.

    The key goes to whoever is to use it, the line into the file of --api-keys, under `keys:`.
    """
    import secrets

    from baton.router.security.keys import KeysError, entry_line, new_key

    key = new_key()
    try:
        line = entry_line(key, name or f"{tenant[:32]}-{secrets.token_hex(4)}", tenant)
    except KeysError as error:
        raise UserError(str(error)) from None
    print(f"key:  {key}\nline: {line}")
