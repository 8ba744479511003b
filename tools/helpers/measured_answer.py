"""Measure what a record lacks of one training answer, and keep it with the run.

Of each of its tokens: the credit, the likeliest other tokens at its place, and what moved it.
`python analyze.py RUN --credit STEP:ANSWER` shows it on the page of the run, and tools.follow in
the account of a token. analysis/measured.py has the file.
"""
import re

from analysis.measured import Measured, file_of, keep, kept_answers
from analysis.runs import Run, is_foreign
from analysis.tokens import read_step
from engine.errors import UserError
from engine.tokens import load_tokenizer
from harness.read_record import sampling_models
from harness.screen import say, show_status
from tools.helpers.credit_of_token import measure_all
from tools.helpers.moved_answer import moved_in_words, trained_batch
from tools.helpers.others import likeliest_others
from tools.helpers.same_model import where_kept
from tools.helpers.terminal import check_exists


def measure_and_keep(run: Run, wanted: str, continuations: int) -> None:
    """Measure the answer STEP:ANSWER, unless that was done with as many continuations."""
    step, b = step_and_answer(wanted)
    folder = run["folder"]
    check_exists("step", step, run["steps"], folder)
    record = read_step(folder, step)
    check_exists("answer", b, range(len(record.answers["group"])), f"step {step}")
    tokens = record.tokens_of(b)["token_id"].tolist()
    kept = kept_answers(folder).get((step, b))
    if kept and kept["token_id"] == tokens and kept["continuations"] >= continuations:
        return
    if is_foreign(run["config"]):
        raise UserError(f"--credit: {folder} is a run of another program, and how that samples "
                        "and takes a step is not on record")
    models = sampling_models(folder, str(run["config"].get("model", "")))
    if step not in models:
        raise UserError(f"--credit needs the model that sampled step {step}, and it was not kept. "
                        f"{where_kept(models)}")
    tokenizer = load_tokenizer(folder)
    show_status("what moved the answer's tokens")
    batch = trained_batch(run, models[step], record, tokenizer)
    moved = moved_in_words(batch, b, len(tokens))
    others = likeliest_others(run, models[step], record, tokenizer, b, range(len(tokens)))
    credits = measure_all(folder, models[step], step, b, continuations)
    measured: Measured = {
        "step": step, "answer": b, "continuations": continuations, "token_id": tokens,
        "credit": [credit.after - credit.before for credit in credits],
        "low": [credit.interval[0] for credit in credits],
        "high": [credit.interval[1] for credit in credits],
        "credit in words": [credit.in_words() for credit in credits],
        "others": others, "moved": moved}
    keep(folder, measured)
    say(f"measured, and kept in {file_of(folder, step, b)}")


def step_and_answer(wanted: str) -> tuple[int, int]:
    """1:5 is answer 5 of step 1."""
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", wanted)
    if not found:
        raise UserError(f"--credit {wanted:.80} should be STEP:ANSWER, as 1:5 for answer 5 of step "
                        "1. Answers are counted from 0, as on the page and in tools.follow")
    return int(found[1]), int(found[2])
