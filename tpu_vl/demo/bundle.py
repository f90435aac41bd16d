"""Writes the pictures and the clip that the demo asks about: `python -m tpu_vl.demo.bundle`."""

import json

from tpu_vl.demo import MEDIA, samples
from tpu_vl.demo.encode import image_bytes, video_bytes

# File, kind and number of the held-out sample, tasks that are asked. The picture's file is small,
# since README's curl sends it as an argument.
BUNDLED = (
    ("picture.png", "two", 1_000_007, ("describe", "relation")),
    ("number.png", "number", 1_000_006, ("number",)),
    ("clip.mp4", "turn", 1_000_006, ("direction", "order")),
)


def write() -> None:
    """Replaces the bundled media and their questions and answers."""
    answers = []
    for file, kind, index, tasks in BUNDLED:
        sample = samples.sample("heldout", kind, index)
        frames = sample.media[0]
        is_clip = sample.is_clip
        data = video_bytes(frames, sample.rate) if is_clip else image_bytes(frames[0], "png")
        (MEDIA / file).write_bytes(data)
        for task in tasks:
            ask = sample.ask(task)
            answers.append({"file": file, "question": ask.text(0), "answer": ask.answer})
    (MEDIA / "answers.json").write_text(json.dumps(answers, indent=2) + "\n")


if __name__ == "__main__":
    write()
