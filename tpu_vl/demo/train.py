"""Makes the bundled checkpoint: `python -m tpu_vl.demo.train --out DIR`.

The same arguments give the same samples, batches and updates. The run saves its whole state and
goes on from there with `--resume`.
"""

import argparse
import functools
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_vl.demo import batches, configs, objective, optimizer, start, tokenizer
from tpu_vl.models import qwen3_vl
from tpu_vl.weights.load import save_params

SEED = 20
NUM_STEPS = 4000
NUM_ROWS = 8
NUM_PAIRS = 24_000
PEAK_RATE = 1e-3
SAVE_EVERY = 200
LOG_EVERY = 50
QUEUED_BATCHES = 16
NUM_SHOWN_BATCHES = 24


def produce(queue: Any, folder: Path, first_step: int) -> None:
    """Fills the queue with the batches from `first_step` on, in its own process."""
    maker = batches.TalkMaker(folder)
    pool = batches.TalkPool(maker, "train", NUM_PAIRS, SEED)
    step = first_step
    while True:
        queue.put(batches.make_batch(pool, NUM_ROWS, step))
        step += 1


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
        out: folder of the checkpoint and, in `state.npz`, of the run's state.
        num_steps: length of the schedule.
        resume: go on from `state.npz`.
    """
    out.mkdir(parents=True, exist_ok=True)
    bpe = tokenizer.build()
    tokenizer.save(bpe, out)
    configs.save(bpe, out)
    template = Path(__file__).with_name("checkpoint") / "chat_template.jinja"
    (out / template.name).write_text(template.read_text())
    preprocessor = json.loads((out / "preprocessor_config.json").read_text())
    cfg = qwen3_vl.parse_config(configs.model_config(bpe), preprocessor=preprocessor)
    backend = objective.training_backend()
    pool = batches.TalkPool(batches.TalkMaker(out), "train", NUM_PAIRS, SEED)
    shown = [batches.make_batch(pool, NUM_ROWS, step) for step in range(NUM_SHOWN_BATCHES)]
    params = start.initial_params(cfg, backend, SEED, shown)
    state = optimizer.start(params)
    if resume:
        params, state = load_state(out / "state.npz", (params, state))

    answers = objective.answer_ids(bpe.get_vocab())
    loss = functools.partial(objective.loss, answers=answers, cfg=cfg, backend=backend)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: optimizer.AdamState, batch: batches.Batch) -> Any:
        (value, counts), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
        params, state = optimizer.update(
            params, gradients, state, peak=PEAK_RATE, num_steps=num_steps
        )
        return params, state, value, counts

    context = multiprocessing.get_context("spawn")
    queue = context.Queue(QUEUED_BATCHES)
    worker = context.Process(target=produce, args=(queue, out, int(state.step)), daemon=True)
    worker.start()
    log = _Log(int(state.step))
    try:
        while (done := int(state.step)) < num_steps:
            params, state, value, counts = step(params, state, queue.get())
            log.add(done + 1, value, counts)
            if (done + 1) % SAVE_EVERY == 0 or done + 1 == num_steps:
                save_state(out / "state.npz", params, state)
    finally:
        worker.terminate()
    export(out, params, cfg)


class _Log:
    """Prints the mean loss and the share of right answer words since the last line."""

    def __init__(self, first_step: int) -> None:
        self.started_s = time.monotonic()
        self.first_step = first_step
        self._clear()

    def _clear(self) -> None:
        self.losses: list[float] = []
        self.counts = np.zeros((2, len(objective.TASKS)), np.int64)

    def add(self, step: int, value: jax.Array, counts: jax.Array) -> None:
        self.losses.append(float(value))
        self.counts += np.asarray(counts)
        if step % LOG_EVERY == 0:
            shares = self.counts[0] / np.maximum(self.counts[1], 1)
            tasks = "  ".join(
                f"{task} {share:.3f}" for task, share in zip(objective.TASKS, shares, strict=True)
            )
            rate = (step - self.first_step) / (time.monotonic() - self.started_s)
            loss = np.mean(self.losses)
            print(f"step {step}  loss {loss:.4f}  {tasks}  {rate:.2f} steps/s", flush=True)
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
