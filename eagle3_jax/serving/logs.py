"""Structured logs: one JSON object a line, with the facts of an event under their own names.

log.info("request finished", extra={"facts": {"request_id": "r1", "tokens": 12}})
{"time": "2025-01-31T12:00:00.000+00:00", "level": "info", "event": "request finished", "request_id": "r1", ...}
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO


class JsonLines(logging.Formatter):
    """Facts that are None are left out; a traceback goes under "traceback"."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= {key: value for key, value in getattr(record, "facts", {}).items() if value is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_json(stream: TextIO = sys.stderr, level: int = logging.INFO) -> None:
    """Sends what `eagle3_jax.serving` logs to `stream` in this form, and nowhere else."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("eagle3_jax.serving")
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel(level)
