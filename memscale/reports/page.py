"""Writes HTML pages from templates, each as one self-contained file without network, fonts or libraries.

This file loads no PyTorch: the server draws its charts by the same templates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memscale.core import ConfigError, format_bytes, format_flops, format_seconds
from memscale.reports.drawing import css_class, percent

if TYPE_CHECKING:
    from jinja2 import Environment

#: The folder of the templates, the style sheet (``page.css``) and the script (``page.js``) of every page.
TEMPLATES = Path(__file__).with_name("templates")

#: The suffixes of pages.
PAGES = (".html", ".htm")


@functools.cache
def environment() -> Environment:
    """Returns the environment of the templates. Every value is escaped; an undefined name is an error.

    Templates format numbers by the filters ``bytes``, ``seconds``, ``flops`` and ``percent``.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"bytes": format_bytes, "seconds": format_seconds, "flops": format_flops}
    found.filters |= {"percent": percent, "css_class": css_class}
    return found


def checked_target(path: str | PathLike[str], caller: str, suffixes: Sequence[str], remedy: str) -> Path:
    """Returns `path`, the file of a picture or a page, after checking it.

    Raises:
        ConfigError: the suffix is another, or the folder does not exist.
    """
    target = Path(path)
    if target.suffix.lower() not in suffixes:
        named = suffixes[0] if ".html" in suffixes else " or ".join(suffixes)
        raise ConfigError(f"{caller}(path) must end in {named}, got {str(path)!r}; {remedy}")
    if not target.parent.is_dir():
        raise ConfigError(f"{caller}(path) must be in a folder that exists, got {str(path)!r}; make the folder first")
    return target


def write_page(target: Path, template: str, **values: Any) -> None:
    """Writes a page from a template and its values."""
    target.write_text(environment().get_template(template).render(values), encoding="utf-8")
