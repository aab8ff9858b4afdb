"""`python -m qattn` and the console script, which need the extra `cli`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line."""
    try:
        from qattn.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"The qattn command needs {error.name}. Install it with `pip install 'qattn-diffusion[cli]'`.")
    app(prog_name="qattn")


if __name__ == "__main__":
    main()
