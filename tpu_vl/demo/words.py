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

# Of the first named shape seen from the second: (columns, rows).
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}

COUNTS = ("one", "two", "three", "four")

# Of two pictures.
PLACES = ("first", "second")

# Words in braces are filled in from the sample.
QUESTIONS = {
    "shape": (
        "What shape is this?",
        "Which shape is it?",
        "What shape is shown?",
        "What shape do you see?",
        "Which shape is in the picture?",
        "What is the shape in this image?",
        "Name the shape.",
    ),
    "colour": (
        "What colour is it?",
        "What color is it?",
        "Which colour does it have?",
        "Which color is shown?",
        "What colour do you see?",
        "What color is this?",
        "Name the colour.",
    ),
    "shape_of": (
        "What shape is {colour}?",
        "Which shape is {colour}?",
        "What is the {colour} shape?",
        "Name the {colour} shape.",
    ),
    "colour_of": (
        "What colour is the {shape}?",
        "What color is the {shape}?",
        "Which colour does the {shape} have?",
        "Name the colour of the {shape}.",
    ),
    "count": (
        "How many shapes are there?",
        "How many shapes do you see?",
        "How many shapes are in the picture?",
        "Count the shapes.",
    ),
    "relation": (
        "Where is the {first} relative to the {second}?",
        "Where is the {first}, seen from the {second}?",
        "Is the {first} left of, right of, above or below the {second}?",
        "Where does the {first} lie from the {second}?",
    ),
    "describe": (
        "What is in the picture?",
        "What is in this image?",
        "Describe the picture.",
        "Describe this image.",
        "What do you see?",
        "Describe the picture in one sentence.",
    ),
    "digit": (
        "Which digit is this?",
        "What digit is shown?",
        "What digit do you see?",
        "Read the digit.",
    ),
    "number": (
        "Which number is this?",
        "What number is shown?",
        "What number do you see?",
        "Read the number.",
    ),
    "larger": (
        "Which is larger?",
        "Which shape is larger?",
        "In which picture is the shape larger?",
        "Which image shows the larger shape?",
    ),
    "same": (
        "Same colour?",
        "Same color?",
        "Are both shapes of the same colour?",
        "Do both pictures show the same color?",
    ),
    "which": (
        "Which picture shows the {thing}?",
        "Which image shows the {thing}?",
        "In which picture is the {thing}?",
        "Where do you see the {thing}?",
    ),
    "direction": (
        "Which way does it move?",
        "Which way does the shape move?",
        "In which direction does the shape move?",
        "What direction is it moving in?",
        "Where is the shape going?",
        "Which way is it going?",
        "Name the direction.",
    ),
    "order": (
        "Which colours does it have, in order?",
        "Which colors do you see, in order of time?",
        "Name the colours in order.",
        "What colours does the shape take, one after the other?",
    ),
    "when": (
        "When does it turn {colour}?",
        "At what time does it turn {colour}?",
        "When does the shape turn {colour}?",
        "How many seconds until it is {colour}?",
    ),
}

SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You answer in fixed words.")


def named(colour: str, shape: str) -> str:
    """A shape with its colour and article: "an orange star"."""
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}"


def sentence(text: str) -> str:
    """The text as a sentence: a capital first, a full stop last."""
    return f"{text[0].upper()}{text[1:]}."
