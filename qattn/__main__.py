"""Entry point of `python -m qattn` and of the console script, which need the extra `cli`."""

import gc
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    gc.freeze()  # otherwise the collector scans all of PyTorch's objects, which takes half a second
    try:
        from qattn.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"The qattn command needs {error.name}. Install it with `pip install 'qattn-diffusion[cli]'`.")
    app(prog_name="qattn")


if __name__ == "__main__":
    main()
