"""The README as a page of the site, so that nothing has to be said twice."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds the page. Images lie beside it; other files of the repository are not on the site, so links to them go."""
    text = (Path(config.config_file_path).parent / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/images/", "](images/")
    text = re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"\1", text)
    files.append(File.generated(config, "readme.md", content=text))
    return files
