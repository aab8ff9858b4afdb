"""The READMEs as pages of the site, so that nothing has to be said twice."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = {"README.md": "readme.md", "examples/paper/README.md": "paper.md"}


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds the pages. Images lie beside them; other files of the repository are not there, so links to them go."""
    for path, page in PAGES.items():
        text = (Path(config.config_file_path).parent / path).read_text(encoding="utf-8")
        text = text.replace("](docs/images/", "](images/")
        text = re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"\1", text)
        files.append(File.generated(config, page, content=text))
    return files
