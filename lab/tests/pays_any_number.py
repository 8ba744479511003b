"""A reward that never reaches 1: by the length of the text."""


def reward(problem, text):
    return 0.5 - 0.01 * len(text)
