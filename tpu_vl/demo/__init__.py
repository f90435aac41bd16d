"""The bundled model: a small checkpoint that knows shapes only, and the script that made it."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
MEDIA = Path(__file__).parent / "media"

NOTICE = (
    "This bundled model is a toy: it knows only which shape (circle, square, triangle, star, "
    "cross) and which colour (red, green, blue, yellow, purple, orange) a synthetic picture shows, "
    "and which way a shape moves in a short synthetic video. Serve a real one: "
    "tpu-vl serve --model Qwen/Qwen3-VL-8B-Instruct -tp 4"
)
