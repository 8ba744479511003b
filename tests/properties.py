"""Property tests: hypothesis draws the examples, and every run draws the same ones.

A test that takes its examples from here says what holds for all of them. When it fails, it prints
an example that fails, made smaller where that takes no minutes.
"""
import random
from itertools import cycle

import hypothesis
from hypothesis import given
from hypothesis import strategies as draw
from hypothesis.internal.conjecture import providers

from countdown_task import KINDS, SECTIONS

__all__ = ["cuts", "draw", "few", "given"]

GENERATE, SHRINK = hypothesis.Phase.generate, hypothesis.Phase.shrink
hypothesis.settings.register_profile("lab", derandomize=True, deadline=None, database=None,
                                     max_examples=100, phases=(GENERATE, SHRINK))
hypothesis.settings.load_profile("lab")
few = hypothesis.settings(max_examples=25, phases=[GENERATE])  # an example takes milliseconds

# One number in twenty would be a constant of the project's files that are imported so far. Which
# they are depends on the tests that ran before, and a folder .hypothesis would be left behind.
if not hasattr(providers, "_get_local_constants"):
    raise ImportError("another hypothesis: see where it reads the constants of local files")
providers._get_local_constants = providers.Constants


def cuts(text: bytes, choose, whole=()) -> list[bytes]:
    """The text in pieces, cut between any two bytes. `choose` is the draw of draw.data().

    Nothing is cut within the (start, end) of `whole`, and there is a cut at their ends."""
    lengths = choose(draw.lists(draw.integers(1, 9), min_size=1, max_size=9))
    places = {0, len(text), *(place for ends in whole for place in ends)}
    place = 0
    for length in cycle(lengths):
        place += length
        if place >= len(text):
            break
        if not any(start < place < end for start, end in whole):
            places.add(place)
    borders = sorted(places)
    return [text[start:end] for start, end in zip(borders, borders[1:])]


# an answer in parts: their kinds, and which section follows a tag
PARTS_OF_AN_ANSWER = {"so": "word", " try": "word", "é.": "word", "<": "word", ">\n": "word",
                      "|": "word", " ": "space", "\n": "space", "3": "number", " 15": "number",
                      "+": "operator", " *": "operator", "-": "operator", "/": "operator",
                      "(": "bracket", " =": "bracket", ")": "bracket"}
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
ENDS = ("<|im_end|>", "<|endoftext|>")


@draw.composite
def answers_in_parts(choose):
    """Text and tags in any order, the usual order among them."""
    texts = draw.lists(draw.sampled_from([*PARTS_OF_AN_ANSWER]), max_size=4)
    parts = choose(texts)
    for tag in choose(draw.one_of(draw.just(TAGS[1:]), draw.permutations(TAGS),
                                  draw.lists(draw.sampled_from(TAGS), max_size=6))):
        parts += [tag, *choose(texts)]
    return parts + choose(draw.lists(draw.sampled_from(ENDS), max_size=2))


AFTER = {("think", "</think>"): "between", ("think", "<answer>"): "answer",
         ("between", "<answer>"): "answer", ("answer", "</answer>"): "after"}


def any_strings():
    """3,000 texts of tags, numbers and odd characters, and four that are huge."""
    rng = random.Random(1)
    parts = ["<think>", "</think>", "\n", "<answer>", "</answer>", "<|im_end|>", "3", "+", "(", ")",
             " 3 * 5 = 15", "\ud83d", "<", ">", "é", "\x00", "9" * 300, "-" * 300]
    for _ in range(3000):
        yield "".join(rng.choices(parts, k=rng.randint(0, 12)))
    yield from ("<answer>" * 100_000, "3 + 3 = " * 100_000, " " * 1_000_000,
                "<think>" * 50_000 + "</answer>" * 50_000)


def in_words(labels):
    """Such as "think word" for each token."""
    return [f"{SECTIONS[section]} {KINDS[kind]}" for section, kind in zip(*labels, strict=True)]
