"""Markdown files of the repository as pages of the site, so that nothing is said twice, and code that pages link to."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

PAGES = {
    "README.md": "index.md",
    "examples/paper/README.md": "paper.md",
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
_CODE = re.compile(r"\]\(\.\./([\w/]+\.py)\)")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages, with links to what the site has; of other links the text is left."""
    root = Path(config.config_file_path).parent
    for path, page in PAGES.items():

        def link(match: re.Match[str], path: str = path) -> str:
            text, target, anchor = match.groups(default="")
            name = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if name not in PAGES and not name.startswith("docs/"):
                return text
            page = re.sub(r"(notebooks/\w+)\.py$", r"\1.md", PAGES.get(name, name.removeprefix("docs/")))
            return f"[{text}]({page}{anchor})"

        text = (root / path).read_text(encoding="utf-8")
        text = re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)", link, text)
        files.append(File.generated(config, page, content=text))
    gallery = (Path(config.docs_dir) / "gallery.md").read_text(encoding="utf-8")
    for path in sorted(set(_CODE.findall(gallery))):
        code = (root / path).read_text(encoding="utf-8").rstrip()
        text = f"---\nhide: [toc]\nsearch: {{ exclude: true }}\n---\n\n# {path}\n\n```python\n{code}\n```\n"
        files.append(File.generated(config, f"code/{path}.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to code lead to its pages."""
    return _CODE.sub(r"](code/\1.md)", markdown)
