"""The arms of `price`: each method for the same time of one core, with what suits it.

An arm is named by its method and its cell, such as measured2-4x4-2.5e-4: 4 problems with 4 answers
each, and a learning rate. How many steps it has follows from the time there is and from the seconds
that an answer takes, sampled, credited and trained on. They are rough: a report goes by what the
runs took.
"""
MEASURED = "--advantage measured --measured_k 2"

METHODS = {  # flags, seconds of one core that an answer takes, and the cell that suits it: of five
    # the one that was highest after the same time (research/results/price_choice.json)
    "none": ("", 0.0075, "16x8-2.5e-4"),
    "rloo": ("--advantage rloo", 0.0075, "8x8-2.5e-4"),
    "gae": ("--advantage gae", 0.009, "8x8-2.5e-4"),
    "belief": ("--advantage belief", 0.016, "4x8-2.5e-4"),
    "hindsight": ("--advantage hindsight", 0.014, "16x8-2.5e-4"),
    "vine": ("--advantage vine", 0.02, "4x8-2.5e-4"),
    "measured1": ("--advantage measured --measured_k 1", 0.032, "4x8-2.5e-4"),
    "measured2": (MEASURED, 0.06, "4x4-2.5e-4"),
    "measured8": ("--advantage measured --measured_k 8", 0.24, "4x4-2.5e-4"),
    "oracle": ("--mitigation oracle", 0.2, "2x4-2.5e-4")}
TALK = "models/talk"  # made as docs/results.md says, with the cells that suit the shipped model
TALKING = {"none": 0.027, "gae": 0.028, "hindsight": 0.047, "vine": 0.069, "measured1": 0.49}
EVALUATIONS = 4  # after the start


def at_equal_time(seconds: float, of_an_answer: dict[str, float]) -> dict[str, str]:
    """Name and flags of each arm."""
    arms = {}
    for method, each in of_an_answer.items():
        flags, _, cell = METHODS[method]
        batch, _, learning_rate = cell.partition("-")
        questions, answers = map(int, batch.split("x"))
        every = max(1, round(seconds / each / (questions * answers) / EVALUATIONS))
        arms[f"{method}-{cell}"] = (
            f"{flags} --questions {questions} --answers {answers} --learning_rate {learning_rate} "
            f"--steps {every * EVALUATIONS} --eval_every {every}").strip()
    return arms


def chosen() -> dict[str, str]:
    return at_equal_time(45, {method: each for method, (_, each, _) in METHODS.items()})


def chosen_for_talk() -> dict[str, str]:
    return at_equal_time(90, TALKING)
