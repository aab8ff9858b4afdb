"""Markdown files of the repository as pages of the site, so that nothing is said twice."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = {
    "README.md": "index.md",
    "examples/paper/README.md": "paper.md",
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages, with links to what the site has; of other links the text is left."""
    root = Path(config.config_file_path).parent
    for path, page in PAGES.items():

        def link(match: re.Match[str], path: str = path) -> str:
            text, target, anchor = match.groups(default="")
            name = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if name not in PAGES and not name.startswith("docs/"):
                return text
            return f"[{text}]({PAGES.get(name, name.removeprefix('docs/'))}{anchor})"

        text = (root / path).read_text(encoding="utf-8")
        text = re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)", link, text)
        files.append(File.generated(config, page, content=text))
    return files
