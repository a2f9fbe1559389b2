"""Prompts of mixed lengths: things to copy, open questions, very short and very long ones."""

from __future__ import annotations

_FUNCTIONS = [
    """\
def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)
""",
    """\
def clamp(value, low, high):
    if value < low:
        return low
    if value > high:
        return high
    return value
""",
    """\
def count_words(text):
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return counts
""",
    """\
def is_palindrome(text):
    left = 0
    right = len(text) - 1
    while left < right:
        if text[left] != text[right]:
            return False
        left = left + 1
        right = right - 1
    return True
""",
    """\
def transpose(rows):
    result = []
    for column in range(len(rows[0])):
        result.append([row[column] for row in rows])
    return result
""",
    """\
def read_numbers(path):
    numbers = []
    with open(path) as lines:
        for line in lines:
            numbers.append(float(line))
    return numbers
""",
]

NOTES = {
    "harbour": "The harbour office opens at eight. Ships that arrive before noon are unloaded on "
    "the same day. Ships that arrive after noon are unloaded on the next day. The crane on the "
    "north quay lifts forty tonnes, the crane on the south quay lifts twenty-five tonnes.",
    "garden": "The garden has four beds. The first bed holds beans and peas. The second bed holds "
    "carrots and onions. The third bed holds pumpkins. The fourth bed rests for a year and is "
    "covered with straw. Beds are watered in the evening, never at noon.",
    "library": "The library lends books for three weeks and films for one week. A book can be "
    "renewed twice, a film cannot be renewed. Whoever returns a book late pays ten cents a day. "
    "Whoever loses a book pays its price and two euros for the work.",
    "train": "The morning train leaves Arden at 6:40, stops in Birk at 7:05 and in Colm at 7:31, "
    "and reaches Dunmore at 8:02. The evening train leaves Dunmore at 17:20, stops in Colm at "
    "17:50 and in Birk at 18:16, and reaches Arden at 18:41.",
}

_QUESTIONS = (
    "Why is the sky blue?",
    "Name three uses of a paper clip.",
    "Write a short letter to a neighbour who plays the drums at night.",
    "How does a bicycle stay upright?",
    "Tell a story about a lighthouse keeper in two sentences.",
    "What should one pack for a week in the mountains?",
)


def chat(text: str) -> str:
    """A user's message in the form that SmolLM2 was trained on."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


EDITS = [chat(f"Repeat this function, with a docstring added:\n\n{code}") for code in _FUNCTIONS]
COPIES = [chat(f"Repeat this text word by word:\n\n{note}") for note in NOTES.values()]
EXTRACTS = [chat(f"{note}\n\nWhich times or numbers are in this text?") for note in NOTES.values()]
OPEN = [chat(question) for question in _QUESTIONS]
PLAIN = ["The", "def fibonacci(n):\n", "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", "Once upon a time"]
LONG = [
    chat("\n\n".join([*NOTES.values(), *_FUNCTIONS]) + "\n\nRepeat the first function."),
    chat("\n\n".join(list(NOTES.values()) * 3) + "\n\nWhen does the harbour office open?"),
]

ALL: list[str] = [*EDITS, *COPIES, *EXTRACTS, *OPEN, *PLAIN, *LONG]
"""26 prompts, from one token to about a thousand."""


SAMPLED: list[str] = [*EDITS, *COPIES, *EXTRACTS]
"""Those of which sampling, too, copies something."""

GREEDY = {"temperature": 0.0, "max_tokens": 48}
"""Sampling parameters under which two runs must agree token by token."""


def arrivals(count: int) -> list[int]:
    """The engine step before which each prompt is added: some at once, the others one by one."""
    return [0 if place % 3 == 0 else 4 * place for place in range(count)]
