"""The fixed words of the bundled model: what it is asked and the only answers it gives."""

SHAPES = ("circle", "square", "triangle", "star", "cross")

COLOURS = {
    "red": (214, 32, 32),
    "green": (28, 158, 44),
    "blue": (36, 68, 220),
    "yellow": (240, 214, 20),
    "purple": (138, 32, 170),
    "orange": (244, 130, 16),
}

# (columns, rows) per step of time; rows grow downwards.
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

QUESTIONS = {
    "shape": (
        "What shape is this?",
        "Which shape is it?",
        "What shape is shown?",
        "What shape do you see?",
        "Which shape is in the picture?",
        "What is the shape in this image?",
        "Name the shape.",
        "Which shape can you see here? Answer in one word.",
    ),
    "colour": (
        "What colour is it?",
        "What color is it?",
        "Which colour does the shape have?",
        "Which color does the shape have?",
        "What is the colour of the shape?",
        "What color is the shape?",
        "Name the colour.",
        "What colour do you see? Answer in one word.",
    ),
    "both": (
        "What is in the picture?",
        "What is in this image?",
        "Describe the picture.",
        "Describe this image.",
        "What do you see?",
    ),
    "direction": (
        "Which way does it move?",
        "Which way does the shape move?",
        "In which direction does the shape move?",
        "What direction is it moving in?",
        "Where is the shape going?",
        "Which way is it going?",
        "Name the direction.",
        "Which way does the shape in the video move? Answer in one word.",
    ),
}

SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You answer in fixed words.")


def answer(task: str, *, shape: str, colour: str, direction: str | None = None) -> str:
    """The right answer to a task about a sample.

    Args:
        task: a key of `QUESTIONS`.
        shape, colour: of the drawn shape.
        direction: of its movement; None for a still picture.

    Raises:
        ValueError: a still picture was asked for a direction; ask `shape`, `colour` or `both`.
    """
    if task == "direction":
        if direction is None:
            raise ValueError("a still picture has no direction; ask for shape, colour or both")
        return direction
    article = "an" if colour[0] in "aeiou" else "a"
    return {"shape": shape, "colour": colour, "both": f"{article} {colour} {shape}"}[task]
