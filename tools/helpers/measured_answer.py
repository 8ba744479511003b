"""Measure what a record lacks of one training answer, and keep it with the run.

Of each of its tokens: the credit, and the likeliest other tokens at its place. analyze.py shows it
on the page of the run, and tools.follow in the account of a token.
analysis/measured.py has the file.
"""
from tokenizers import Tokenizer

from analysis.measured import Measured, file_of, keep, kept_answers
from analysis.runs import Run
from analysis.tokens import StepRecord
from harness.screen import say
from tools.helpers.credit_of_token import measure_all
from tools.helpers.others import likeliest_others


def measure_and_keep(run: Run, model: str, record: StepRecord, tokenizer: Tokenizer, b: int,
                     continuations: int) -> None:
    """Measure answer b of a step, unless that was done with as many continuations. `model` is the
    folder of the model that sampled the step."""
    folder, step = run["folder"], record.step
    tokens = record.tokens_of(b)["token_id"].tolist()
    kept = kept_answers(folder).get((step, b))
    if kept and kept["token_id"] == tokens and kept["continuations"] >= continuations:
        say(f"measured before, with {kept['continuations']:,} continuations for each value, and "
            f"kept in {file_of(folder, step, b)}")
        return
    others = likeliest_others(run, model, record, tokenizer, b, range(len(tokens)))
    credits = measure_all(folder, model, step, b, continuations)
    measured: Measured = {
        "step": step, "answer": b, "continuations": continuations, "token_id": tokens,
        "credit": [credit.after - credit.before for credit in credits],
        "low": [credit.interval[0] for credit in credits],
        "high": [credit.interval[1] for credit in credits],
        "credit in words": [credit.in_words() for credit in credits],
        "others": others}
    keep(folder, measured)
    say(f"measured, and kept in {file_of(folder, step, b)}")
