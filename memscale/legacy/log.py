"""The messages of `wrap`: to the logger, to stdout, and to the file in the config."""

from __future__ import annotations

import logging
import sys
from datetime import datetime

from memscale.config import Config
from memscale.core import wrapped
from memscale.observability import rank

LOG = logging.getLogger("memscale")


class _Unheard(logging.NullHandler):
    """The default handler of a library's logger: prints warnings to stderr if no other handler receives them."""

    def handle(self, record: logging.LogRecord) -> bool:
        heard = logging.root.handlers or len(LOG.handlers) > 1
        if not heard and record.levelno >= logging.WARNING:
            print(f"{record.name}: {record.getMessage()}", file=sys.stderr)
        return True


if not LOG.handlers:
    LOG.addHandler(_Unheard())


def announce(config: Config, text: str) -> None:
    """Prints a line to stdout, wrapped at 80 columns, in the first process of a run only."""
    if config.enable_logging and rank() == 0:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(wrapped(f"memscale: {text}").encode(encoding, "replace").decode(encoding))


def say(config: Config, message: str, level: int = logging.INFO) -> None:
    """Logs a message, and appends it to ``config.log_file``.

    All processes of a run have the same messages, so on ranks above 0 those below a warning are logged at level DEBUG
    and stay out of the file.
    """
    if not config.enable_logging:
        return
    if level < logging.WARNING and rank() != 0:
        LOG.debug(message)
        return
    LOG.log(level, message)
    if config.log_file is not None:
        # Opened for each message, so that a wrapped model holds no open file when it is dropped, copied or pickled.
        try:
            with open(config.log_file, "a", encoding="utf-8") as file:
                file.write(f"{datetime.now().isoformat(timespec='seconds')} {message}\n")
        except OSError as error:
            LOG.warning("log_file %s cannot be written any more: %s", config.log_file, error)
