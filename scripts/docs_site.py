"""A hook of mkdocs: what keeps one set of pages right both in the repository and as a site.

Links that leave docs/ lead to the repository (`JAXSGL_REPOSITORY`, an address, or else to their bare path in code), and
headings get the names that GitHub gives them, which is how pages link to each other's parts.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def github_name(heading: str, separator: str = "-") -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    """Has headings named as GitHub names them."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = github_name
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links that leave docs/, or lead to what the site leaves out."""
    folder = posixpath.dirname(page.file.src_uri)
    repository = os.environ.get("JAXSGL_REPOSITORY", "").rstrip("/")

    def turned(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        path = target.partition("#")[0]
        if not path or "://" in target or target.startswith("mailto:"):
            return link[0]
        place = posixpath.normpath(posixpath.join("docs", folder, path))
        inside = place.startswith("docs/") and files.get_file_from_path(place.removeprefix("docs/")) is not None
        if inside:
            return link[0]
        return f"{mark}[{text}]({repository}/blob/main/{place})" if repository else f"{text} (`{place}`)"

    return _LINK.sub(turned, markdown)
