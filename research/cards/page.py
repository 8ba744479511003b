"""The cards of all methods, sorted, as a page; and each card's quick rows, computed again.

    python -m research cards                          # write the table into research/cards.md
    python -m research cards --add cards/my_idea      # first take this card, of tools.idea --card

A card that is taken has been measured by `python -m tools.idea NAME --card`. What is quick of it,
the rows of the task whose answers are all listed, is computed again, and a card that does not fit
its function is refused. What was measured is kept. The rows of published experiments and the words
are not, because they follow from results that may grow: the table reads them there.
"""
import json
from pathlib import Path

import numpy as np

from analysis.statistics import Estimate
from analysis.tables import Row, Table, by_row, shown
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import PROJECT, UserError, read_json
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from harness.record import replace_text
from research.boards.later import rank_with_interval
from research.cards.measure import in_the_enumerated_task
from research.cards.published import estimate_of, published_rows

ENTRIES = PROJECT / "research/cards/entries"
PAGE = PROJECT / "research/cards.md"
MARKS = {"cards": ("<!-- cards -->", "<!-- end of cards -->"),  # where the page has its tables
         "ranks": ("<!-- ranks -->", "<!-- end of ranks -->")}
QUICK = ("bias", "direction", "noise")
KEPT = ("method", "name", "flags", "model", "made_of", "day", "git_commit", "versions")
HOLDS = 1e-3  # of a number: another machine's rounding, not another function
FLAGS = {"add": Flag(None, "a folder that `python -m tools.idea NAME --card` has written", kind=str,
                     metavar="FOLDER")}


def main(argv: list[str]) -> None:
    parser = make_parser("python -m research cards [flags]", __doc__, FLAGS)
    flags = with_defaults(parser.read(argv), FLAGS)
    if flags.add:
        add(Path(flags.add))
    cards = all_cards()
    text = PAGE.read_text(encoding="utf-8")
    replace_text(PAGE, with_tables(text, cards))
    print(f"{len(cards)} cards are on {PAGE.relative_to(PROJECT)}")


def add(folder: Path) -> None:
    card = read_json(folder / "card.json")
    if wrong := what_does_not_fit(card):
        raise UserError(f"{folder}: {wrong}. `python -m tools.idea {card['method']} --card` makes "
                        "the card again")
    ENTRIES.mkdir(exist_ok=True)
    kept = {key: card[key] for key in KEPT}
    published = published_rows(card["name"], card["flags"])
    kept["rows"] = {key: row for key, row in card["rows"].items() if key not in published}
    text = json.dumps(kept, indent=1, allow_nan=False)
    replace_text(ENTRIES / f"{card['name']}.json", f"{text}\n")


def all_cards() -> list[dict]:
    """The cards: those that have been trained, the largest gain first, and then the others, the
    least noise of the untrained model first."""
    cards = [read_json(path) for path in sorted(ENTRIES.glob("*.json"))]
    return sorted(cards, key=place, reverse=True)


def place(card: dict) -> tuple[bool, float]:
    gain = gain_of(card)
    value = own_of(card, "batch_start") if gain is None else gain
    is_known = value is not None and value.value == value.value
    return gain is not None, value.value if value is not None and is_known else 0.0


def gain_of(card: dict) -> Estimate | None:
    """The gain in training on the leaderboard, or else in the runs of tools.idea."""
    published = published_rows(card["name"], card["flags"]).get("board")
    own = published["own"] if published else own_of(card, "training")
    return own if isinstance(own, Estimate) else None


def cost_of(card: dict) -> object:
    """The cost of a step in the leaderboard's runs, or else in the tries of the card."""
    published = published_rows(card["name"], card["flags"])
    return published.get("board_cost", card["rows"]["cost"])["own"]


def own_of(card: dict, key: str) -> Estimate | None:
    stored = card["rows"].get(key, {}).get("own")
    return estimate_of(stored) if isinstance(stored, dict) else None


def what_does_not_fit(card: dict) -> str:
    """What of the card's quick rows its function does not give; empty if all of them fit."""
    if card["name"] not in {**MITIGATIONS, **ADVANTAGES}:
        return f"there is no weighting or advantage {card['name']}"
    now = in_the_enumerated_task(card["name"], card["flags"])
    for key in QUICK:
        stored, own = own_of(card, key), now[key].get("own")
        if not isinstance(own, Estimate):
            if stored is not None:
                return f"{key} is {stored.value:.4f} on the card, and now there is none"
        elif stored is None or abs(stored.value - own.value) > HOLDS * max(1, abs(own.value)):
            said = "missing" if stored is None else f"{stored.value:.4f}"
            return f"{key} is {said} on the card, and the function gives {own.value:.4f}"
    return ""


def cards_table(cards: list[dict]) -> Table:
    rows = []
    for card in cards:
        row = [f"[`{card['method']}`](cards/entries/{card['name']}.json)",
               shown(gain_of(card), "points")]
        for key, spec in (("direction", ".3f"), ("noise", ".2f")):
            value = own_of(card, key)
            row.append("n/a" if value is None else shown(value.value, spec))
        row += [shown(own_of(card, key), ".2f") for key in ("batch_start", "batch_half")]
        row += [shown(own_of(card, "many"), "points"), shown(cost_of(card), ".1f")]
        rows.append(row)
    headings = {"method": "method", "gain": "gain in training (95% interval)",
                "direction": "cosine", "noise": "noise",
                "start": "untrained, as a batch times (95% interval)",
                "half": "half trained (95% interval)",
                "many": "gain where 42 of 128 decide (95% interval)", "cost": "cost"}
    return Table("cards", "", by_row(dict.fromkeys(headings, ""), rows), headings=headings)


def ranks_table(cards: list[dict]) -> Table:
    """How well each column of the page orders the methods by their gain in training, with three
    digits: beyond these a cosine of 1 differs by rounding alone."""
    columns = {"cosine": "direction", "noise": "noise", "untrained": "batch_start",
               "half trained": "batch_half", "gain where 42 of 128 decide": "many",
               "untrained: cosine with plain GRPO's gradient": "cosine_start"}
    rows: list[Row] = []
    for label, key in columns.items():
        known, gains = [], []
        for card in cards:
            value, gain = own_of(card, key), gain_of(card)
            if value is not None and gain is not None and value.value == value.value:
                known.append(round(value.value, 3))
                gains.append(gain.value)
        if len(known) > 2:
            rank = rank_with_interval(np.array(known), np.array(gains))
            rows.append([label, len(known), rank])
    formats = {"column": "", "methods": "d", "rank": "+.2f"}
    return Table("ranks", "", by_row(formats, rows),
                 headings={"rank": "rank correlation with the gain in training (95% interval)"})


def with_tables(text: str, cards: list[dict]) -> str:
    """The page with the tables of these cards between their marks."""
    for name, table in (("cards", cards_table(cards)), ("ranks", ranks_table(cards))):
        begin, end = MARKS[name]
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table.to_text(limit=10_000)}\n{end}{after}"
    return text
