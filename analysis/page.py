"""The HTML page of a run or a probe: one file that needs no other.

Its parts stand beside this file: page.html, page.css, and for answers token by token viewer.html
and page.js. What a model wrote gets into the page escaped, or as JSON that no script reads as
code.
"""
import base64
import json
import re
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from analysis.sizes import lay_flat
from analysis.tables import Table
from countdown_task import KINDS, SECTIONS, TAG
from engine.credit_file import read_columns
from engine.errors import UserError
from engine.files import writing
from engine.tokens import token_bytes

HERE = Path(__file__).resolve().parent
PER_PAGE = 60_000  # tokens that the viewer shows


def write_page(path: Path, title: str, intro: list[str], short: list[str], tables: list[Table],
               pictures: list[tuple[Path, str]], places: dict[str, tuple],
               episodes: list[dict]) -> None:
    """Write one file; nothing in it is fetched. `places` says which pictures, by name, stand below
    which table; the others come at the end."""
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(text)}</p>" for text in intro)]
    if short:
        items = "".join(f"<li>{escape(text)}</li>" for text in short)
        body.append(f"<h2>In short</h2><ul>{items}</ul>")
    body.append(links(tables, bool(episodes)))
    left = list(pictures)
    for table in tables:
        wanted = places.get(table.name, ())
        below = [picture for name in wanted for picture in left if picture[0].stem == name]
        left = [picture for picture in left if picture not in below]
        body.append(section_of(table) + "".join(figure_of(*picture) for picture in below)
                    + "</section>")
    body += [figure_of(*picture) for picture in left]
    if episodes:
        body.append(part("viewer.html"))
    page = Template(part("page.html")).substitute(
        title=escape(title), style=part("page.css"), body="\n".join(body), data=as_data(episodes),
        script=constants() + part("page.js") if episodes else "")
    with writing(path):
        path.write_text(page, encoding="utf-8")


def part(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def constants() -> str:
    """What page.js knows of the task."""
    return (f"const SECTIONS = {json.dumps(SECTIONS)}, KINDS = {json.dumps(KINDS)}, "
            f"TAG = {TAG};\n")


def as_data(episodes: list[dict]) -> str:
    text = json.dumps(episodes, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")  # so that no text can end the script


def links(tables: list[Table], with_answers: bool) -> str:
    targets = [(anchor(table.name), table.title) for table in tables]
    if with_answers:
        targets.append(("answers", "Answers, token by token"))
    return f"<nav>{''.join(f'<a href=#{name}>{escape(text)}</a>' for name, text in targets)}</nav>"


def anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def section_of(table: Table) -> str:
    """A table with its heading, finding and notes; the section is left open for pictures."""
    rows = "".join(table_row(table, cells, "td") for cells in table.cells())
    head = table_row(table, table.columns, "th")
    notes = "".join(f"<p class=note>{escape(note)}</p>" for note in table.notes)
    return (f"<section id={anchor(table.name)}><h2>{escape(table.title)}</h2>"
            f"<p class=finding>{escape(table.finding)}</p><div class=wide><table>"
            f"<thead>{head}</thead><tbody>{rows}</tbody></table></div>{notes}")


def table_row(table: Table, cells, tag: str) -> str:
    row = []
    for cell, is_text in zip(cells, table.texts()):
        side = "" if is_text else " class=n"
        row.append(f"<{tag}{side}>{escape(cell)}</{tag}>")
    return f"<tr>{''.join(row)}</tr>"


def figure_of(path: Path, caption: str) -> str:
    data, text = base64.b64encode(path.read_bytes()).decode(), escape(caption)
    return (f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
            f"<figcaption>{text}</figcaption></figure>")


def steps_to_show(run: dict, wanted: list[int]) -> list[int]:
    """The steps whose answers the page shows."""
    steps = run["steps"]
    for step in wanted:
        if step not in steps:
            there = "no credit files"
            if steps:
                there = f"credit files of {len(steps)} steps, {steps[0]} to {steps[-1]}"
            raise UserError(f"--steps {step}: {run['folder']} has {there}")
    if wanted or not steps:
        return list(dict.fromkeys(wanted))
    places = {round(place) for place in np.linspace(0, len(steps) - 1, 8)}
    return [steps[place] for place in sorted(places)]


def episodes_of(run: Path, tokenizer, steps: list[int], most_tokens: int = PER_PAGE) -> list[dict]:
    """What the viewer shows: of each step whole groups, those with different rewards first, as many
    as fit."""
    episodes = []
    for step in steps:
        tokens = lay_flat(read_columns(run, step))
        room = most_tokens // len(steps)
        for number, members in enumerate(groups_by_spread(tokens)):
            size = int(tokens["length"][members].sum())
            if size > room and number:  # the first group is shown, however long
                break
            room -= size
            episodes += [episode(tokens, tokenizer, step, int(b)) for b in members]
    return episodes


def groups_by_spread(tokens: dict) -> list[np.ndarray]:
    """The answers of each group; groups whose rewards differ come first."""
    groups = [np.flatnonzero(tokens["group"] == g) for g in np.unique(tokens["group"])]
    return sorted(groups, key=lambda members: np.ptp(tokens["reward"][members]) == 0)


def episode(tokens: dict, tokenizer, step: int, b: int) -> dict:
    """One answer: its texts, labels and numbers token by token."""
    start, group = int(tokens["episode_start"][b]), int(tokens["group"][b])
    of_answer = slice(start, start + int(tokens["length"][b]))
    prompt = np.split(tokens["prompt_ids"], tokens["prompt_start"][1:])[group]
    pieces = token_bytes(tokenizer, tokens["token_id"][of_answer].tolist())
    return {"step": step, "episode": b, "group": group, "reward": rounded(tokens["reward"][b]),
            "answer": rounded(tokens["reward_answer"][b]), "finished": bool(tokens["finished"][b]),
            "prompt": b"".join(token_bytes(tokenizer, prompt.tolist())).decode(errors="replace"),
            "texts": [piece.decode(errors="replace") for piece in pieces],
            "section": tokens["section"][of_answer].tolist(),
            "kind": tokens["kind"][of_answer].tolist(),
            "values": shown_values(tokens, of_answer)}


def shown_values(tokens: dict, of_answer: slice) -> dict[str, list[float | None]]:
    """What a token can be shaded by. The true credit is there where it was measured."""
    def column(name: str) -> np.ndarray:
        return tokens[name][of_answer]

    advantage, weight, log_prob = column("advantage"), column("weight"), column("log_prob")
    values = {"advantage": advantage, "weight": weight,
              "contribution": advantage * weight * log_prob,
              "gradient size": np.abs(advantage) * weight * column("s"),
              "entropy": column("entropy"), "log-prob": log_prob}
    for name in ("true_credit", "true_credit_se"):
        if name in tokens:
            values[name.replace("_", " ")] = column(name).astype(float)
    return {name: list(map(rounded, numbers)) for name, numbers in values.items()}


def rounded(value) -> float | None:
    """Four digits are enough for the eye and keep the page small."""
    return float(f"{value:.4g}") if np.isfinite(value) else None
