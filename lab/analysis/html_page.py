"""The HTML page of a run: one file that needs no other.

Its parts are beside this file: page.html, page.css, and for answers token by token viewer.html and
page.js. What a model wrote gets into the page escaped, or as JSON that no script reads as code. The
functions below return pieces of a page's body, and write_page puts them together.
"""
import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from analyze import Table
from lab.analysis.answers import MEANING, ShownAnswer
from lab.engine.tokens import KINDS, SECTIONS, TAG
from lab.harness.record import Json, replace_text

HERE = Path(__file__).resolve().parent
Picture = tuple[Path, str]  # and its caption


def write_page(path: Path, title: str, body: list[str], answers: Sequence[ShownAnswer] = (),
               evaluations: Sequence[Json] = ()) -> None:
    """Write one file, whole or not at all; the page loads nothing from outside. If the body has a
    viewer, it shows the `answers` of training, and the answers of the `evaluations`."""
    script = part("page.js") if answers or evaluations else ""
    known = {"answers": answers, "evaluations": evaluations, "TAG": TAG, "SECTIONS": SECTIONS,
             "KINDS": KINDS, "MEANING": MEANING}
    data = json.dumps(known, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")  # so that no text can end the script
    page = Template(part("page.html")).substitute(
        title=escape(title), style=part("page.css"), body="\n".join(body), data=data, script=script)
    # a lone half of a character, as a folder's name can have it, is no text: ? stands for it
    replace_text(path, page.encode(errors="replace").decode())


def part(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def viewer(curve: str = "") -> str:
    """A slider through the run, and answers token by token; `curve` is shown above the slider."""
    return Template(part("viewer.html")).substitute(curve=curve)


def paragraphs(texts: list[str], kind: str = "") -> str:
    start = f"<p class={kind}>" if kind else "<p>"
    return "".join([f"{start}{escape(text)}</p>" for text in texts])


def folded(title: str, body: list[str]) -> str:
    """A section that opens on a click or a key."""
    return f"<details><summary><h2>{escape(title)}</h2></summary>{''.join(body)}</details>"


def section_of(table: Table) -> str:
    """A table of analyze.py. Its first column is text, and its numbers stand on the right."""
    title, headings, rows = table
    head, body = "", ""
    for number, text in enumerate(headings):
        head += f"<th scope=col{' class=n' if number else ''}>{escape(text)}</th>"
    for first, *cells in rows:  # the first cell says what the row is about
        body += f"<tr><th scope=row>{escape(first)}</th>"
        body += "".join(f"<td class=n>{escape(cell)}</td>" for cell in cells) + "</tr>"
    return (f'<section aria-label="{escape(title)}"><h3>{escape(title)}</h3>'
            f'<div class=wide role=region tabindex=0 aria-label="{escape(title)}"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>")


def figure_of(path: Path, caption: str) -> str:
    """A picture inside the page. A screen reader reads its caption once, as the text that stands
    for the picture."""
    data, text = base64.b64encode(path.read_bytes()).decode(), escape(caption)
    return (f'<figure><div class=drawn><img alt="{text}" src="data:image/png;base64,{data}"></div>'
            f"<figcaption aria-hidden=true>{text}</figcaption></figure>")
