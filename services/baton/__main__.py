"""The ``baton`` command, also as ``python -m baton``: the process hears signals before anything slow is
imported."""

from baton.process.init import leave_process_one


def main() -> None:
    """Run the command line."""
    leave_process_one()
    try:
        from baton.cli.main import app
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    app()


if __name__ == "__main__":
    main()
