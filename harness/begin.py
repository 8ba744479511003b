"""From a command line to a run: a new one, or one that is there already (harness/resume.py)."""
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from engine.finite import BrokenModel, NotFinite, NotFiniteCredit
from harness.command_line import read_flags
from harness.files import is_there
from harness.run import Run
from harness.settings import make_settings


@contextmanager
def open_run(argv: list[str]) -> Iterator[Run]:
    """The run that a command line asks for. What ends it is one sentence where the user can do
    something about it; a first step that failed leaves nothing in the way of the next attempt."""
    given = read_flags(argv)
    may_continue = given.pop("continue", False)
    if "resume" in given:
        from harness.resume import resumed
        run = resumed(Path(given.pop("resume")), given)
    else:
        run = new_or_continued(given, may_continue)
    is_new = run.folder is None
    with run.cleanup:
        try:
            yield run
        except Exception as error:
            if isinstance(error, NotFinite) and run.folder:
                error = UserError(where_to_look(error, run))
            if is_new and run.folder:
                run.folder.remove_unless_begun()
            raise error


def new_or_continued(given: dict, may_continue: bool) -> Run:
    settings = make_settings(given)
    if not is_there(settings.folder):
        return Run(settings)
    from harness.resume import continued
    return continued(settings, given, may_continue)


def where_to_look(error: NotFinite, run: Run) -> str:
    """The error, how far the run came, which flags to look at, and what is left."""
    s, steps = run.settings, run.folder.last_step()
    if steps == 0 and isinstance(error, BrokenModel):
        return f"{error}, in the first step. Is {run.policy.folder} a sound model?"
    own = s.flags_for(ADVANTAGES[s.advantage]) | s.flags_for(MITIGATIONS[s.mitigation])
    is_own = isinstance(error, NotFiniteCredit)  # of finite numbers: no rate is too large
    values = own if is_own else {"learning_rate": s.learning_rate, **own}
    flags = ", ".join(["its line and what it divides by"] * is_own + [
        f"--{name} {value:g}" for name, value in values.items() if isinstance(value, float)])
    checkpoints = run.folder.checkpoints()
    way_on = (f"the last good checkpoint is {checkpoints[-1]}, --model can begin a new run there"
              if checkpoints else "there is no checkpoint from before")
    return (f"{error}, in step {run.step}. The last step on record is {steps}. Look at {flags}; "
            f"{way_on}")
