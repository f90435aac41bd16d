"""transformers' torch model gives the bundled checkpoint's answers, from the pixels."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from tests.demo.test_training import processed
from tpu_vl.accuracy.suite import BUNDLED_TASKS, bundled_asks
from tpu_vl.demo import CHECKPOINT, batches, objective, talks, train
from tpu_vl.models import qwen3_vl
from tpu_vl.weights.load import load_params

# Questions per task. The whole comparison: pytest tests/demo/test_reference.py -m ''
FEW, MANY = 1, 15
MAX_NEW_TOKENS = 24


@pytest.fixture(scope="module")
def torch_model():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    loaded = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        str(CHECKPOINT), dtype=torch.float32
    )
    return loaded.eval()


@pytest.fixture(scope="module")
def processor():
    pytest.importorskip("torchvision")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoProcessor.from_pretrained(str(CHECKPOINT))


def torch_answer(model, processor, sample, asks, index):
    """The greedy answer to the last question, with the right answers before it."""
    import torch

    turns = [(ask.text(index), ask.answer) for ask in asks]
    inputs = processed(processor, sample, None, turns)
    ids = inputs["input_ids"][0].tolist()
    opening = processor.tokenizer.encode("<|im_start|>assistant\n")
    last = max(i for i in range(len(ids)) if ids[i : i + len(opening)] == opening)
    length = last + len(opening)
    tensors = {name: torch.as_tensor(value) for name, value in inputs.items()}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if name in tensors:
            tensors[name] = tensors[name][:, :length]
    out = model.generate(**tensors, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    return processor.decode(out[0, length:], skip_special_tokens=True)


class JaxModel:
    """The same checkpoint through the family's own tower and layers, in float32."""

    def __init__(self) -> None:
        self.maker = talks.TalkMaker(CHECKPOINT)
        cfg = train.parsed_config(CHECKPOINT)
        backend = objective.training_backend()
        params = load_params(CHECKPOINT, qwen3_vl.FAMILY, cfg, backend.mesh, "float32")

        def next_ids(row: Any) -> Any:
            return objective.answer_logits(params, row, cfg, backend)[0].argmax(axis=-1)

        self.next_ids = jax.jit(next_ids)

    def says(self, sample, asks, index, answer) -> bool:
        """Whether greedy decoding gives the answer: its every token is the most likely one."""
        turns = [(ask.text(index), ask.answer) for ask in asks[:-1]]
        turns.append((asks[-1].text(index), answer))
        batch = batches.empty(1)
        batches.put(batch, 0, batches.Fill(), self.maker.assemble(sample, None, [tuple(turns)]), 0)
        row = jax.tree.map(lambda a: a[0], batch)
        # The answer and its end are the last targets.
        count = len(self.maker.tokenizer.encode(answer, add_special_tokens=False).ids) + 1
        targets = row.targets_GA[row.targets_GA >= 0]
        found = np.asarray(self.next_ids(row))[: len(targets)]
        return found[-count:].tolist() == targets[-count:].tolist()


@pytest.fixture(scope="module")
def jax_model():
    return JaxModel()


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_both_models_give_the_same_answers(torch_model, processor, jax_model, count):
    different = []
    for task in BUNDLED_TASKS:
        for index in range(count):
            sample, asks = bundled_asks(task, index)
            answer = torch_answer(torch_model, processor, sample, asks, index)
            if not jax_model.says(sample, asks, index, answer):
                different.append((task, index, answer))
    assert not different


def test_answers_depend_on_the_picture(torch_model, processor):
    """Blank media must not be answered like real ones: the words come from the pixels."""
    right = 0
    for index in range(6):
        sample, asks = bundled_asks("describe", index)
        size = sample.media[0][0].size
        blank = replace(sample, media=((Image.new("RGB", size, (128, 128, 128)),),))
        right += torch_answer(torch_model, processor, blank, asks, index) == asks[-1].answer
    assert right <= 2
