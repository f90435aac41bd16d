"""A progress bar on a terminal; elsewhere a log line at the end and now and then before."""

import logging
import sys
import time

log = logging.getLogger(__name__)

_QUIET_S = 5.0


class Bar:
    """Shows how far one phase of the start is."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._terminal = sys.stderr.isatty()
        self._logged_s = time.monotonic()

    def show(self, done: int, total: int, text: str) -> None:
        """Shows `done` of `total`, and a text that says more."""
        share = done / max(total, 1)
        if self._terminal:
            filled = int(share * 24)
            line = f"{self._title} [{'#' * filled}{'.' * (24 - filled)}] {text}"
            sys.stderr.write(f"\r\x1b[2K{line}" + ("\n" if done >= total else ""))
            sys.stderr.flush()
        elif done >= total or time.monotonic() - self._logged_s > _QUIET_S:
            self._logged_s = time.monotonic()
            log.info("%s %d %%: %s", self._title, round(share * 100), text)
