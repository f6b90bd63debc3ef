"""JSON documents with a header that names their kind and version; reading anything else raises one clear error."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from memscale.core.errors import MemscaleError


@dataclass(frozen=True)
class Document:
    """A kind of JSON document.

    >>> from memscale.core.errors import ConfigError
    >>> kind = Document("recipe", version=2, writer="Recipe.to_json()", error=ConfigError)
    >>> kind.write({"eggs": 3})
    '{"memscale_recipe": 2, "eggs": 3}'
    >>> kind.read(kind.write({"eggs": 3}))
    {'eggs': 3}

    Args:
        name: the name of the document in messages and in its header.
        version: the version that is written, and the only one that can be read.
        writer: the function that writes the document, for messages.
        error: the error class for a text that is no such document.
    """

    name: str
    version: int
    writer: str
    error: type[MemscaleError]

    def write(self, fields: Mapping[str, Any], *, indent: int | None = None) -> str:
        """Returns the document with these fields, as JSON text."""
        return json.dumps({f"memscale_{self.name}": self.version, **fields}, indent=indent)

    def read(self, text: str) -> dict[str, Any]:
        """Returns the fields of a document that `write` wrote, without the header.

        Raises:
            MemscaleError: of class `error`, if the text is not JSON, or no document of this kind and version.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError) as error:
            wrong = f"the {self.name} is not JSON, or was cut off: {error}; write it with {self.writer}"
            if isinstance(text, (str, os.PathLike)) and os.path.isfile(text):
                wrong = f"the {self.name} is given as text, and {str(text)!r} is a file; pass its read_text()"
            raise self.error(wrong) from error
        version = data.pop(f"memscale_{self.name}", None) if isinstance(data, dict) else None
        if version is None:
            raise self.error(f"the text is no {self.name} of memscale; write one with {self.writer}")
        if version != self.version:
            raise self.error(
                f"the {self.name} has schema version {version!r}, and this version of memscale reads version "
                f"{self.version}; write it again with {self.writer} of this version"
            )
        found: dict[str, Any] = data
        return found

    @contextmanager
    def parts(self) -> Iterator[None]:
        """A context for reading the fields: turns errors about missing, unknown or wrong fields into `error`."""
        try:
            yield
        except MemscaleError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.error(
                f"the {self.name} has missing or unknown parts: {type(error).__name__}: {error}; write it again with "
                f"{self.writer} of this version"
            ) from error
