"""A game in words for a real model: find a number from 1 to 20 in five tries.

    python -m lab train --task examples.higher_lower --model models/Qwen2.5-Coder-0.5B-Instruct \\
        --config lab/recipes/laptop.json --lora 1 --advantage without_luck

After a guess the environment says whether the number is higher or lower. The number is in the
problem and not in the prompt, so all games begin alike, and to win is partly luck. This is a whole
task: `problems`, `reply`, `reward` and `show` (docs/reference/turns.md).
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python -m lab train --task examples.higher_lower "
                     "--model FOLDER")
import re

Game = dict[str, str | int]
HIGHEST, TRIES = 20, 5
ASKED = ("<|im_start|>user\nI have chosen a number from 1 to 20. Guess it in five tries. Write the "
         "number only. After each guess I say whether my number is higher or lower.<|im_end|>\n"
         "<|im_start|>assistant\n")
SAID = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

problems: list[Game] = [{"prompt": ASKED, "number": 1 + game % HIGHEST, "game": game}
                        for game in range(2000)]


def show(problem: Game) -> str:
    return f"the number {problem['number']} in game {problem['game']}"


def guess_in(turn: str) -> int | None:
    """The number that is a whole turn, or None, which loses the game."""
    found = re.fullmatch(r"\s*(\d{1,2})\.?\s*", turn)
    return int(found[1]) if found else None


def reply(problem: Game, turns: list[str]) -> str | None:
    guess, number = guess_in(turns[-1]), int(problem["number"])
    if guess is None or guess == number or len(turns) == TRIES:
        return None
    return SAID.format("higher" if number > guess else "lower")


def reward(problem: Game, turns: list[str]) -> float:
    return float(guess_in(turns[-1]) == problem["number"])
