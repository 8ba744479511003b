"""The game of examples/guess.py as a task whose problems are rows of a data set."""
from examples import guess

GAME = guess.Task()
problems = [{"prompt": GAME.prompt_for(guess.Game(1, "")), "secret": 1 + i % 7, "name": str(i)}
            for i in range(500)]


def game_of(row):
    return guess.Game(int(row["secret"]), row["name"])


def show(row):
    return GAME.show(game_of(row))


def reply(row, turns):
    return GAME.reply(game_of(row), turns)


def reward(row, turns):
    return GAME.score(game_of(row), turns)["reward"]
