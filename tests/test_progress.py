"""The progress bar: a line that is drawn over on a terminal, few log lines elsewhere."""

import io
import logging

import pytest

from tpu_vl import progress


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        """Says so."""
        return True


def test_on_a_terminal_one_line_is_drawn_over(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    bar = progress.Bar("programs")
    bar.show(1, 2, "text/4 compiled in 1.0 s, about 1 s left")
    bar.show(2, 2, "text/8 compiled in 1.0 s, about 0 s left")
    first, second = terminal.getvalue().split("\r\x1b[2K")[1:]
    assert first == f"programs [{'#' * 12}{'.' * 12}] text/4 compiled in 1.0 s, about 1 s left"
    assert second == f"programs [{'#' * 24}] text/8 compiled in 1.0 s, about 0 s left\n"


def test_elsewhere_the_end_and_now_and_then_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    bar = progress.Bar("weights")
    with caplog.at_level(logging.INFO):
        for step in range(1, 101):
            now_s = step * 0.1
            bar.show(step, 100, f"{step} MB")
    assert caplog.messages == ["weights 51 %: 51 MB", "weights 100 %: 100 MB"]
