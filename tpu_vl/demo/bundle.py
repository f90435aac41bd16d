"""Writes the picture and the clip that the demo asks about: `python -m tpu_vl.demo.bundle`."""

import json

from tpu_vl.demo import MEDIA, samples
from tpu_vl.demo.encode import image_bytes, video_bytes

IMAGE_INDEX = 100_006
VIDEO_INDEX = 100_004


def write() -> None:
    """Replaces the bundled media and their questions and answers."""
    image, video = samples.image("heldout", IMAGE_INDEX), samples.video("heldout", VIDEO_INDEX)
    (MEDIA / "picture.png").write_bytes(image_bytes(image.frames[0], "png"))
    (MEDIA / "clip.mp4").write_bytes(video_bytes(video))
    asked = [
        ("picture.png", "What is in the picture?", image.answer("both")),
        ("clip.mp4", "Which way does it move?", video.answer("direction")),
    ]
    answers = [{"file": f, "question": q, "answer": a} for f, q, a in asked]
    (MEDIA / "answers.json").write_text(json.dumps(answers, indent=2) + "\n")


if __name__ == "__main__":
    write()
