"""Notebooks of docs/notebooks as pages of the site: executed when it is built, with their outputs.

A notebook is a Python file with cells between `# %%`, which Jupyter opens by Jupytext. Its page offers it as .ipynb.
"""

import base64
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from traitlets.config import Config

_SECONDS = 600  # that a cell may take; two quiet cores took 4 to 9 s for each notebook, busy ones up to 160
_log = logging.getLogger("mkdocs.hooks.executed")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add a page, its pictures and the notebook for each file; an error in a cell ends the build."""
    root = Path(config.docs_dir)
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # else the debugger of the kernel prints a warning
    for source in sorted((root / "notebooks").glob("*.py")):
        notebook, start = jupytext.read(source), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:  # for what cells write
            sockets = {"transport": "ipc", "ip": f"{folder}/kernel"}  # files, which others cannot listen to
            options = {"timeout": _SECONDS, "coalesce_streams": True, "resources": {"metadata": {"path": folder}}}
            NotebookClient(notebook, config=Config({"KernelManager": sockets}), **options).execute()
        seconds = time.perf_counter() - start
        _log.info(f"notebook {source.stem}: {seconds:.0f} s")
        text, pictures = page(notebook, source.stem)
        link = f"[This notebook]({source.stem}.ipynb), with its outputs, which took {seconds:.0f} s."
        files.append(File.generated(config, f"notebooks/{source.stem}.md", content=f"{text}\n\n{link}\n"))
        files.append(File.generated(config, f"notebooks/{source.stem}.ipynb", content=nbformat.writes(notebook)))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def page(notebook: Any, stem: str) -> tuple[str, dict[str, bytes]]:
    """Return an executed notebook in Markdown, and its pictures by name."""
    parts, pictures = [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![{cell.metadata['alt']}]({name})")
            elif "text/html" in data:
                parts.append(data["text/html"])
            else:
                parts.append(f"```text\n{output.get('text', data.get('text/plain', '')).rstrip()}\n```")
    return "\n\n".join(parts), pictures
