"""The `tpu-vl` command: serve a model, see the demo, run the accuracy gate."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tpu_vl.errors import TpuVlError
from tpu_vl.flags import AccuracyFlags, DemoFlags, ServeFlags, add_flags, join_dotted, read_flags

_COMMANDS = {
    "serve": (ServeFlags, "serve a model over HTTP"),
    "demo": (DemoFlags, "serve the bundled model and ask it about a picture and a video"),
    "accuracy": (AccuracyFlags, "measure answers through the API against marks"),
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands, from the flags table."""
    parser = argparse.ArgumentParser(
        prog="tpu-vl", description="Serve Qwen vision-language models on TPUs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (flags, text) in _COMMANDS.items():
        add_flags(commands.add_parser(name, help=text, description=text), flags)
    return parser


def serve(flags: ServeFlags) -> int:
    """`tpu-vl serve`: plans, prints the limits, then serves until it is told to end."""
    # Imported here, so that --help and a wrong flag do not wait for jax.
    from tpu_vl import launch
    from tpu_vl.server.serve import run_server

    plan = launch.make_plan(flags)
    config = launch.server_config(flags, plan)
    for line in launch.describe(plan):
        logging.info("%s", line)
    if config.notice is not None:
        logging.warning("%s", config.notice)
    logging.info("listening on http://%s:%d", config.host, config.port)
    run_server(config, lambda state: launch.load(flags, plan, state))
    return 0


def demo(flags: DemoFlags) -> int:
    """`tpu-vl demo`: exit code 0 only if the bundled model's answers are the right ones."""
    from tpu_vl.demo.ask import ask
    from tpu_vl.spawn import running_server

    with running_server([], port=flags.port) as base_url:
        return ask(base_url)


def accuracy(flags: AccuracyFlags) -> int:
    """`tpu-vl accuracy`: exit code 0 only above every mark, without a failed or empty answer."""
    from tpu_vl.accuracy import run
    from tpu_vl.spawn import running_server

    results: dict[str, object] = {}
    failures: list[str] = []
    dtypes = ["served"] if flags.base_url else flags.dtypes.split(",")
    for dtype in dtypes:
        if flags.base_url:
            scores = _evaluate(flags, flags.base_url)
        else:
            with running_server(["--dtype", dtype]) as base_url:
                scores = _evaluate(flags, base_url)
        found = run.verdict(scores, run.read_marks(flags.suite, dtype))
        results[dtype] = {"scores": scores.to_json(), "failures": found}
        failures += [f"{dtype}: {line}" for line in found]
    text = json.dumps(results, indent=1)
    print(text)
    if flags.output is not None:
        Path(flags.output).write_text(text + "\n", encoding="utf-8")
    for line in failures:
        logging.error("%s", line)
    return 1 if failures else 0


def _evaluate(flags: AccuracyFlags, base_url: str):
    from tpu_vl.accuracy import run

    return run.evaluate(
        base_url, flags.suite, num_samples=flags.num_samples, concurrency=flags.concurrency
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; an error that the operator can mend is one line and exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    # They log every address that they read, media of clients among them.
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        parsed = make_parser().parse_args(
            join_dotted(sys.argv[1:] if arguments is None else arguments)
        )
        if parsed.command == "serve":
            flags = read_flags(ServeFlags, parsed, os.environ)
            logging.getLogger().setLevel(flags.log_level.upper())
            return serve(flags)
        if parsed.command == "demo":
            return demo(read_flags(DemoFlags, parsed, os.environ))
        return accuracy(read_flags(AccuracyFlags, parsed, os.environ))
    except TpuVlError as error:
        logging.error("%s", error.message)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
