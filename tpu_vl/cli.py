"""The `tpu-vl` command: each sub-command reads its flags and calls what does the work."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tpu_vl.errors import ConfigError, TpuVlError
from tpu_vl.flags import (
    COMMANDS,
    AccuracyFlags,
    DemoFlags,
    PlanFlags,
    PrecompileFlags,
    ServeFlags,
    add_flags,
    join_dotted,
    read_flags,
)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands, from the flags table."""
    parser = argparse.ArgumentParser(
        prog="tpu-vl", description="Serve Qwen vision-language models on TPUs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (flags, text) in COMMANDS.items():
        add_flags(commands.add_parser(name, help=text, description=text), flags)
    return parser


def serve(flags: ServeFlags) -> int:
    """`tpu-vl serve`: plans, prints the limits, then serves until it is told to end."""
    # Imported here, so that --help and a wrong flag do not wait for jax.
    from tpu_vl import launch, prepare, remedies
    from tpu_vl.server.serve import run_server

    if flags.precompile_only and (flags.require_executables or flags.executables_digest):
        raise ConfigError(
            "--precompile-only writes the programs that --require-executables and "
            "--executables-digest read: give it without them"
        )
    plan = launch.make_plan(flags)
    for line in launch.describe(plan):
        logging.info("%s", line)
    outlook = remedies.check_fit(plan, flags, request_patches=plan.limits.max_request_patches)
    if outlook is not None:
        logging.info("%s", outlook.table())
    if flags.precompile_only:
        print(json.dumps(prepare.precompile(plan, flags.executables)))
        return 0
    config = launch.server_config(flags, plan)
    if config.notice is not None:
        logging.warning("%s", config.notice)
    # Before the port is open: a server that must not compile is refused, and says why, at once.
    store = prepare.open_store(plan, flags)
    run_server(
        config,
        lambda state: launch.load(flags, plan, store, state),
        drain_s=flags.shutdown_timeout_s,
    )
    return 0


def precompile(flags: PrecompileFlags) -> int:
    """`tpu-vl precompile`: compiles for described TPUs; prints key and digest as JSON."""
    from tpu_vl import prepare, remedies, sized
    from tpu_vl.checkpoint import open_checkpoint
    from tpu_vl.mesh import make_mesh
    from tpu_vl.precompile import targets

    if flags.target is None:
        raise ConfigError(
            "--target says which TPUs to compile for, such as v6e:2x2; for the devices of this "
            "machine use tpu-vl serve --precompile-only"
        )
    target = targets.parse_target(flags.target)
    mesh = make_mesh(flags.tensor_parallel_size, targets.describe_devices(target))
    checkpoint = open_checkpoint(
        flags.model,
        revision=flags.revision,
        download_dir=flags.download_dir,
        configs_only=True,
    )
    model = sized.size_model(flags, checkpoint, mesh)
    logging.info("compiling for %s", target)
    for line in sized.describe_sizes(model):
        logging.info("%s", line)
    remedies.check_fit(model, flags, target)
    print(json.dumps(prepare.precompile(model, flags.out)))
    return 0


def plan(flags: PlanFlags) -> int:
    """`tpu-vl plan`: prints the plan; exit code 0 only if the model fits."""
    from tpu_vl import planning, remedies
    from tpu_vl.checkpoint import open_checkpoint
    from tpu_vl.precompile import targets

    if flags.target is None:
        raise ConfigError("--target says which TPUs to plan for, such as v6e:2x2")
    target = targets.parse_target(flags.target)
    checkpoint = open_checkpoint(
        flags.model,
        revision=flags.revision,
        download_dir=flags.download_dir,
        configs_only=True,
    )
    made = planning.formula_plan(flags, checkpoint, target)
    if made.fits and not flags.fast:
        made = planning.compiled_plan(made, flags, checkpoint, target)
    print(json.dumps(made.to_json()) if flags.json else made.table())
    if made.fits:
        return 0
    found = remedies.remedies(flags, checkpoint, target)
    print(remedies.remedies_text(found), file=sys.stderr if flags.json else sys.stdout)
    return 1


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
        if parsed.command == "precompile":
            return precompile(read_flags(PrecompileFlags, parsed, os.environ))
        if parsed.command == "plan":
            return plan(read_flags(PlanFlags, parsed, os.environ))
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
