"""transformers' torch model gives the right answers on the bundled checkpoint."""

import numpy as np
import pytest

from tpu_vl.demo import CHECKPOINT, samples, words

NUM_PER_TASK = 8
# At most one of the 24 may be wrong: the model is promised to be right 95 times in 100.
MAX_WRONG = 1


@pytest.fixture(scope="module")
def model():
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


def ask(model, processor, sample, task, phrasing):
    kind = "image" if sample.direction is None else "video"
    content = [{"type": kind}, {"type": "text", "text": words.QUESTIONS[task][phrasing]}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    if kind == "image":
        inputs = processor(text=[prompt], images=[sample.frames[0]], return_tensors="pt")
    else:
        frames = np.stack([np.asarray(f) for f in sample.frames]).transpose(0, 3, 1, 2)
        metadata = {
            "fps": sample.rate,
            "total_num_frames": len(frames),
            "frames_indices": list(range(len(frames))),
        }
        inputs = processor(
            text=[prompt],
            videos=[frames],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_tensors="pt",
        )
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_right_answers(model, processor):
    wrong = []
    for index in range(NUM_PER_TASK):
        image, video = samples.image("heldout", index), samples.video("heldout", index)
        for task, sample in (("shape", image), ("colour", image), ("direction", video)):
            got = ask(model, processor, sample, task, index % len(words.QUESTIONS[task]))
            if got != sample.answer(task):
                wrong.append((task, index, sample.answer(task), got))
    assert len(wrong) <= MAX_WRONG, wrong


def test_answers_depend_on_the_picture(model, processor):
    """Blank media must not be answered like real ones: the words come from the pixels."""
    from dataclasses import replace

    from PIL import Image

    asked = [samples.image("heldout", i) for i in range(NUM_PER_TASK)]
    blank = [
        replace(s, frames=(Image.new("RGB", s.frames[0].size, (128, 128, 128)),)) for s in asked
    ]
    got = [ask(model, processor, s, "both", 0) for s in blank]
    right = sum(g == s.answer("both") for g, s in zip(got, asked, strict=True))
    assert right <= NUM_PER_TASK // 2
