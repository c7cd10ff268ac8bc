"""Log lines of a server: one JSON object a line with the request's id, or text for people."""

from __future__ import annotations

import logging
import sys

import msgspec

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, logger, message, and what was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=repr).decode()


class TextLines(logging.Formatter):
    """A record for people: time, level, message, and the request's id."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback if there is one."""
        text = super().format(record)
        request = getattr(record, "request", None)
        return f"{text} [{request}]" if request else text


def _is_news(record: logging.LogRecord) -> bool:
    """uvicorn takes a WebSocket that was refused with a whole response for one that the application forgot."""
    return "without completing handshake" not in record.getMessage()


def set_up(level: str, as_json: bool) -> None:
    """Log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else TextLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("uvicorn.error", "asyncio", "websockets"):
        logging.getLogger(noisy).setLevel("WARNING")
    logging.getLogger("uvicorn.error").addFilter(_is_news)
