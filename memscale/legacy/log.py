"""What `wrap` says, to the logger and to the file that the config names."""

from __future__ import annotations

import logging
from datetime import datetime

from memscale.config import Config

LOG = logging.getLogger("memscale")


def say(config: Config, message: str, level: int = logging.INFO) -> None:
    """One log record, and the same text in ``config.log_file``."""
    if not config.enable_logging:
        return
    LOG.log(level, message)
    if config.log_file is not None:
        # Opened for each message: nothing stays open when a wrapped model is dropped, copied or pickled.
        try:
            with open(config.log_file, "a", encoding="utf-8") as file:
                file.write(f"{datetime.now().isoformat(timespec='seconds')} {message}\n")
        except OSError as error:
            LOG.warning("log_file %s cannot be written any more: %s", config.log_file, error)
