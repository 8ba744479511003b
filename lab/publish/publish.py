"""Publish a result, and update the pages that show it.

    python -m lab publish                        # write all marked numbers again
    python -m lab publish results/exact-s0       # publish what an experiment or a probe wrote
    python -m lab publish results/signal-s0 --name signal_mine
    python -m lab publish --check                # change nothing, say what is not up to date

FOLDER's numbers become lab/results/NAME.json and replace those that were there. Then the
numbers that come from results are written into the pages (README, docs/, lab/ and lab/trl/). A
result is not published if the pages need numbers that it does not have, and the result of another
experiment is not replaced. `python -m lab show NAME` prints one.
"""
from pathlib import Path

from lab.engine.errors import UserError, read_json
from lab.harness.record import replace_text
from lab.harness.screen import say
from lab.harness.flags import Flag, read
from lab.publish.pages import check_marks, filled_pages
from lab.publish.results import RESULTS, Results, result_of, write_result

FLAGS = {
    "name": Flag(None, "name of the result. By default it is that of the experiment or the probe"),
    "check": Flag(False, "write nothing, and print which pages are not up to date")}


def main(argv: list[str]) -> None:
    flags = read(argv, "python -m lab publish [FOLDER] [flags]", __doc__, FLAGS, {
        "[FOLDER]": "results/exact-s0, or another folder that an experiment or a probe has "
                    "written"})
    folder = flags.folder
    if flags.check:
        if folder or flags.name:
            raise UserError(f"--check publishes nothing: leave out {folder or '--name'} or --check")
        check_all()
        return
    if folder:
        say(f"published: {publish(Path(folder), flags.name)}")
    elif flags.name:
        raise UserError("--name needs a folder, whose numbers are published under this name")
    results = Results()  # as they are now
    for page, text in filled_pages(results).items():
        replace_text(page, text)
        say(f"written: {page.name}")


def check_all() -> None:
    """End in an error if a page is older than the results."""
    outdated = [page.name for page in filled_pages(Results())]
    if outdated:
        raise UserError(f"not up to date: {', '.join(outdated)}. python -m lab publish writes "
                        "them again")
    say("all pages are up to date")


def publish(folder: Path, name: str | None = None) -> Path:
    """Write the folder's numbers into lab/results, in the place of those of the same
    experiment before. Where a page marks a number that the new result lacks, the old one stays."""
    if name is not None and not name.isidentifier():
        raise UserError(f"--name {name:.80} should be letters, digits and _")
    result = result_of(folder)
    measured = result["measured"]
    if not (isinstance(measured, str) and measured.isidentifier()):
        raise UserError(f"{folder / 'numbers.json'}: \"measured\" is {measured!r:.80}, and should "
                        "be the name of an experiment or a probe")
    path = RESULTS / f"{name or measured}.json"
    before = path.read_text(encoding="utf-8") if path.exists() else None
    if before is not None:
        refuse_another(path, result)
    write_result(path, result)
    try:
        check_marks(path.stem)
    except UserError as error:
        if before is None:
            path.unlink()
        else:
            replace_text(path, before)
        raise UserError(f"{error}. So {folder} was not published; change the page first, or "
                        "publish it under another --name") from None
    return path


def refuse_another(path: Path, result: dict) -> None:
    """End in an error if the published result is of another experiment or probe."""
    measured = read_json(path).get("measured")  # one that was damaged may be replaced
    if measured != result["measured"]:
        raise UserError(f"{path} was measured by {measured}, not by {result['measured']}: publish "
                        "under another --name")
