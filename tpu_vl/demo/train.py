"""Makes the bundled checkpoint: `python -m tpu_vl.demo.train --out DIR`.

The same arguments give the same samples, batches and updates. The run saves its whole state and
goes on from there with `--resume`; `log.jsonl` beside it holds a line every few steps.
"""

import argparse
import functools
import json
import multiprocessing
import os
import time
from pathlib import Path
from queue import Full
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_vl.demo import batches, configs, objective, optimizer, samples, start, talks, tokenizer
from tpu_vl.models import qwen3_vl
from tpu_vl.weights.load import save_params

SEED = 20
NUM_STEPS = 14_000
NUM_ROWS = 8
PEAK_RATE = 1.2e-3
SAVE_EVERY = 200
LOG_EVERY = 50
QUEUED_BATCHES = 24
NUM_SHOWN_BATCHES = 24
_PUT_TIMEOUT_S = 10.0
COUNTED = (*samples.KINDS, *(f"cell_{name}" for name in talks.CELL_LABELS))
"""What a log line gives the share of right answers of: tokens by kind, cells by label."""

# The worker's products are small: threads would only take cores from the training step.
_WORKER_ENVIRONMENT = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def produce(queue: Any, folder: Path, first_step: int, num_steps: int) -> None:
    """Fills the queue with the batches from `first_step` on, in its own process."""
    maker = talks.TalkMaker(folder)
    trainer = multiprocessing.parent_process()
    for step in range(first_step, num_steps):
        batch = batches.make_batch(maker, SEED, NUM_ROWS, step)
        while not _put(queue, batch):
            if trainer is None or not trainer.is_alive():
                return  # a trainer that was killed takes nothing any more


def _put(queue: Any, batch: batches.Batch) -> bool:
    """Whether the queue took the batch in time."""
    try:
        queue.put(batch, timeout=_PUT_TIMEOUT_S)
    except Full:
        return False
    return True


def save_state(path: Path, params: Any, state: optimizer.AdamState) -> None:
    """Writes all leaves to one file, replacing the former whole."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((params, state))]
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, *leaves)
    os.replace(partial, path)


def load_state(path: Path, like: Any) -> Any:
    """Reads what `save_state` wrote into the structure of `like`."""
    with np.load(path) as file:
        leaves = [jnp.asarray(file[f"arr_{i}"]) for i in range(len(file.files))]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def train(out: Path, *, num_steps: int, resume: bool) -> None:
    """Trains from the start, or from the state in `out`, and writes the checkpoint there.

    Args:
        out: folder of the checkpoint, of the run's state, `state.npz`, and its log.
        num_steps: length of the schedule.
        resume: go on from `state.npz`.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_files(out)
    cfg = parsed_config(out)
    backend = objective.training_backend()
    maker = talks.TalkMaker(out)
    shown = [batches.make_batch(maker, SEED, NUM_ROWS, step) for step in range(NUM_SHOWN_BATCHES)]
    params = start.initial_params(cfg, backend, SEED, shown)
    probes = objective.initial_probes(cfg.text.width, jax.random.key(SEED))
    learnt = (params, probes)
    state = optimizer.start(learnt)
    if resume:
        learnt, state = load_state(out / "state.npz", (learnt, state))

    def loss(learnt: Any, batch: batches.Batch) -> Any:
        params, probes = learnt
        return objective.loss(params, probes, batch, cfg=cfg, backend=backend)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(learnt: Any, state: optimizer.AdamState, batch: batches.Batch) -> Any:
        (value, counts), gradients = jax.value_and_grad(loss, has_aux=True)(learnt, batch)
        learnt, state = optimizer.update(
            learnt, gradients, state, peak=PEAK_RATE, num_steps=num_steps
        )
        return learnt, state, value, counts

    queue, worker = _start_worker(out, int(state.step), num_steps)
    log = _Log(out / "log.jsonl", int(state.step))
    try:
        while (done := int(state.step)) < num_steps:
            learnt, state, value, counts = step(learnt, state, queue.get())
            log.add(done + 1, value, counts)
            if (done + 1) % SAVE_EVERY == 0 or done + 1 == num_steps:
                save_state(out / "state.npz", learnt, state)
                export(out, learnt[0], cfg)
    finally:
        worker.terminate()


def write_files(out: Path) -> None:
    """Writes the checkpoint's files but for its weights."""
    bpe = tokenizer.build()
    tokenizer.save(bpe, out)
    configs.save(bpe, out)
    template = Path(__file__).with_name("checkpoint") / "chat_template.jinja"
    (out / template.name).write_text(template.read_text())


def parsed_config(folder: Path) -> qwen3_vl.Qwen3VLConfig:
    """The model's config, as a server reads it."""
    config, preprocessor = (
        json.loads((folder / name).read_text())
        for name in ("config.json", "preprocessor_config.json")
    )
    return qwen3_vl.parse_config(config, preprocessor=preprocessor)


def _start_worker(out: Path, first_step: int, num_steps: int) -> tuple[Any, Any]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(QUEUED_BATCHES)
    arguments = (queue, out, first_step, num_steps)
    worker = context.Process(target=produce, args=arguments, daemon=True)
    before = {name: os.environ.get(name) for name in _WORKER_ENVIRONMENT}
    os.environ.update(dict.fromkeys(_WORKER_ENVIRONMENT, "1"))
    try:
        worker.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return queue, worker


class _Log:
    """Writes the mean loss and the share of right answers since the last line.

    Args:
        path: of the file; lines of later steps than the run goes on from are dropped.
        first_step: steps done.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= first_step]
        path.write_text("".join(f"{line}\n" for line in kept))
        self.started_s, self.first_step = time.monotonic(), first_step
        self._clear()

    def _clear(self) -> None:
        self.losses: list[float] = []
        self.counts = np.zeros((2, len(COUNTED)), np.int64)

    def add(self, step: int, value: jax.Array, counts: jax.Array) -> None:
        self.losses.append(float(value))
        self.counts += np.asarray(counts)
        if step % LOG_EVERY == 0:
            shares = self.counts[0] / np.maximum(self.counts[1], 1)
            rate = (step - self.first_step) / (time.monotonic() - self.started_s)
            line: dict[str, float] = {"step": step, "loss": round(float(np.mean(self.losses)), 4)}
            line |= {name: round(float(s), 4) for name, s in zip(COUNTED, shares, strict=True)}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{json.dumps(line)}  {rate:.2f} steps/s", flush=True)
            self._clear()


def export(out: Path, params: Any, cfg: qwen3_vl.Qwen3VLConfig) -> None:
    """Writes the parameters in bfloat16, under their published names, to model.safetensors."""
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    save_params(out, half, qwen3_vl.FAMILY, cfg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="length of the schedule")
    parser.add_argument("--resume", action="store_true", help="go on from state.npz in --out")
    args = parser.parse_args()
    train(args.out, num_steps=args.steps, resume=args.resume)


if __name__ == "__main__":
    main()
