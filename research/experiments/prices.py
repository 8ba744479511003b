"""The arms of `price`: each method for the same time of one core, with what suits it.

An arm is named by its method and its cell, such as measured2-4x8-5e-4: 4 problems with 8 answers
each, and a learning rate. How many steps it has follows from the time there is and from the seconds
that an answer takes, sampled, credited and trained on.
"""
MEASURED = "--advantage measured --measured_k 2"

SECONDS = 45  # of a run; the seconds of an answer are rough, the report goes by the measured ones
FEW, SOME, MANY = (("2x4", "4x4", "4x8"), ("4x4", "4x8", "8x8"), ("4x8", "8x8", "16x8"))
RATES = ("1.2e-4", "2.5e-4", "5e-4")
METHODS = {  # flags, seconds of one core that an answer takes, and batches
    "none": ("", 0.0075, MANY),
    "rloo": ("--advantage rloo", 0.0075, MANY),
    "gae": ("--advantage gae", 0.009, MANY),
    "belief": ("--advantage belief", 0.016, MANY),
    "hindsight": ("--advantage hindsight", 0.014, MANY),
    "vine": ("--advantage vine", 0.02, SOME),
    "measured1": ("--advantage measured --measured_k 1", 0.032, SOME),
    "measured2": (MEASURED, 0.06, SOME),
    "measured8": ("--advantage measured --measured_k 8", 0.24, FEW),
    "oracle": ("--mitigation oracle", 0.2, FEW)}
CHOSEN = {  # of each method the cell that was highest in `price_choice` after the same time
    "none": "16x8-2.5e-4", "rloo": "8x8-2.5e-4", "gae": "8x8-2.5e-4", "belief": "4x8-2.5e-4",
    "hindsight": "16x8-2.5e-4", "vine": "4x8-2.5e-4", "measured1": "4x8-2.5e-4",
    "measured2": "4x4-2.5e-4", "measured8": "4x4-2.5e-4", "oracle": "2x4-2.5e-4"}
TALK, TALK_SECONDS = "models/talk", 90  # made as docs/results.md says; seconds of a run
TALKING = {"none": 0.027, "gae": 0.028, "hindsight": 0.047, "vine": 0.069, "measured1": 0.49}


def choices() -> dict[str, str]:
    """Of each method the middle batch with each learning rate, and the middle rate with each
    batch."""
    arms = {}
    for method, (_, each, batches) in METHODS.items():
        cells = [f"{batches[1]}-{rate}" for rate in RATES]
        cells += [f"{batch}-{RATES[1]}" for batch in batches]
        for cell in cells:
            arms |= arm_of(method, cell, SECONDS / each, 2)
    return arms


def chosen() -> dict[str, str]:
    arms = {}
    for method, cell in CHOSEN.items():
        arms |= arm_of(method, cell, SECONDS / METHODS[method][1], 4)
    return arms


def chosen_for_talk() -> dict[str, str]:
    """With the cells that suit the shipped model."""
    arms = {}
    for method, cell in CHOSEN.items():
        if method in TALKING:
            arms |= arm_of(method, cell, TALK_SECONDS / TALKING[method], 4)
    return arms


def arm_of(method: str, cell: str, answers_in_all: float, evaluations: int) -> dict[str, str]:
    """Name and flags; evaluated so many times after the start."""
    batch, _, learning_rate = cell.partition("-")
    questions, answers = map(int, batch.split("x"))
    every = max(1, round(answers_in_all / (questions * answers) / evaluations))
    flags = (f"{METHODS[method][0]} --questions {questions} --answers {answers} "
             f"--learning_rate {learning_rate} --steps {every * evaluations} --eval_every {every}")
    return {f"{method}-{cell}": flags.strip()}
