"""The bundled model: a small checkpoint that sees synthetic media, and the script that made it."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
MEDIA = Path(__file__).parent / "media"

NOTICE = (
    "This bundled model is a toy that looks at synthetic pictures and clips only: shapes (circle, "
    "square, triangle, star, cross) and their colours (red, green, blue, yellow, purple, orange), "
    "how many there are and how two of them lie, numbers of one or two digits, two pictures "
    "compared, and which way a shape moves and which colours it takes. Serve a real one: "
    "tpu-vl serve --model Qwen/Qwen3-VL-8B-Instruct -tp 4"
)
