"""How long a server takes from its start to the first answer: without kept programs, then with.

python bench/start.py --max-num-seqs 8        flags of `tpu-vl serve` after the script's name
python bench/start.py --json                  one JSON object instead of the table

Both starts run in processes of their own, one after the other, on one folder of executables that
is empty at first. The mark: the second takes at most 0.35 of the first.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from tpu_vl.errors import ConfigError
from tpu_vl.spawn import running_server

MARK = 0.35
_COUNTS = re.compile(r"(\d+) programs ready, (\d+) of them compiled now")


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start.

    Args:
        ready_s: from the start of the process until /health is 200.
        answer_s: until the first answer was there.
        programs: in all.
        compiled: of them, not found in the store.
        answer: its text.
    """

    ready_s: float
    answer_s: float
    programs: int
    compiled: int
    answer: str


def measure(arguments: Sequence[str], folder: Path) -> Start:
    """Starts a server on a folder of executables and asks it once.

    Args:
        arguments: flags of `tpu-vl serve`.
        folder: of executables; also holds the log.
    """
    log = folder / "log"
    begun = time.monotonic()
    flags = [*arguments, "--executables", str(folder)]
    try:
        with log.open("w") as file, running_server(flags, ready_timeout_s=7200, log=file) as url:
            ready_s = time.monotonic() - begun
            answer = _ask(url)
            answer_s = time.monotonic() - begun
    except ConfigError:
        sys.stderr.write(log.read_text())
        raise
    counts = _COUNTS.search(log.read_text())
    if counts is None:
        raise RuntimeError(f"the log does not say what was compiled:\n{log.read_text()}")
    return Start(
        ready_s=ready_s,
        answer_s=answer_s,
        programs=int(counts[1]),
        compiled=int(counts[2]),
        answer=answer,
    )


def _ask(base_url: str) -> str:
    body = {
        "messages": [{"role": "user", "content": "Which way does it move?"}],
        "temperature": 0,
        "max_tokens": 8,
    }
    answer = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=600)
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


def main() -> int:
    """Prints both starts; 1 where the second compiled, answered otherwise or missed the mark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        first, second = (measure(arguments, Path(name)) for _ in range(2))
    ratio = second.answer_s / first.answer_s
    if options.json:
        starts = {"first": asdict(first), "second": asdict(second)}
        print(json.dumps({**starts, "ratio": ratio, "mark": MARK}, indent=1))
    else:
        print("start  | programs | compiled | ready s | first answer s")
        for title, start in (("first", first), ("second", second)):
            print(
                f"{title:6} | {start.programs:8} | {start.compiled:8} | {start.ready_s:7.1f} | "
                f"{start.answer_s:14.1f}"
            )
        print(f"second / first: {ratio:.2f} (mark: at most {MARK})")
    right = second.compiled == 0 and second.answer == first.answer
    return 0 if right and ratio <= MARK else 1


if __name__ == "__main__":
    raise SystemExit(main())
