"""``python -m baton``: the same as the ``baton`` command."""

from baton.cli.main import app

app()
