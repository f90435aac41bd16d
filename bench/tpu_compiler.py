"""Runs Python in a process of its own that has the TPU compiler but no TPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tpu_vl.precompile.targets import describe_devices, parse_target

ROOT = Path(__file__).resolve().parents[1]
# The smallest slice of each chip that there is.
TOPOLOGIES = {"v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}


def device(topology: str) -> Any:
    """The first described, absent device of a slice; only in a process that `run` started."""
    return describe_devices(parse_target(topology))[0]


def run(source: str, *args: str, flags: str = "", timeout_s: float = 240) -> str:
    """Runs Python source in a process of its own and returns its output.

    Args:
        source: the program.
        args: its sys.argv[1:].
        flags: LIBTPU_INIT_ARGS.
        timeout_s: its limit.

    Raises:
        RuntimeError: the program failed; the message is what it wrote.
    """
    settings = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "LIBTPU_INIT_ARGS": flags,
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", source, *args],
        env=os.environ | settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{done.stdout}\n{done.stderr}")
    return done.stdout
