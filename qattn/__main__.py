"""`python -m qattn` and the console script, which need the extra `cli`."""

import gc
import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line."""
    gc.freeze()  # what PyTorch has loaded stays, and looking through it for garbage takes half a second
    try:
        from qattn.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"The qattn command needs {error.name}. Install it with `pip install 'qattn-diffusion[cli]'`.")
    app(prog_name="qattn")


if __name__ == "__main__":
    main()
