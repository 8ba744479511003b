"""Follow one token through a step: a line of arithmetic for each stage that leads to its gradient.

    python -m lab follow runs/none-grpo-s0 --step 1 --answer 5 --token 22
    python -m lab follow runs/none-grpo-s0 --step 1 --answer 5
    python -m lab follow runs/none-grpo-s0 --step 1

Without --token the whole answer is shown, shaded by the size of each token's gradient. Without
--answer the answers of the step are listed, problem by problem.

With --credit 1000 the token's credit is measured: how much it changed the expected reward. For
this the model that sampled the answer continues it 1,000 times from before the token, and 1,000
times from after it. The first sentences, *In short*, then join push, change and credit: whether the
token was pushed up or down, what became of its probability, and whether the push was deserved.

The numbers come from the credit file, and each line ends with the function that computes it.
Answers and tokens are counted from 0, as in the file and on the page of `lab page`. The line
"others" has the likeliest other tokens at this position. They come from the model that sampled the
step, if it was kept. The line "term" has the token's term of the loss. The line "gradient" has two
numbers: the gradient's size at the logits, by which tokens are compared here and on the page, and
what is left of it in the loss, which divides by N. docs/reference/symbols.md says what A, c, w, m,
N and s are. Nothing is written.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python -m lab follow")
import textwrap
from types import SimpleNamespace

import numpy as np
from tokenizers import Tokenizer

from lab.analysis.account import Value, stages, with_numbers
from lab.analysis.answers import ShownAnswer, answer_of, groups_in_order, metrics_by_step
from lab.analysis.run_folders import (Run, existing, read_run, read_tokenizer, sampling_models,
                                      task_of)
from lab.analysis.tables import Table, by_row
from lab.analysis.token_table import StepRecord, read_step
from lab.engine.errors import UserError
from lab.engine.tokens import KINDS, SECTIONS
from lab.harness.screen import (BOLD, has_colour, put, say, styled)
from lab.harness.flags import Flag, read
from lab.tools.helpers.terminal import legend, one_line, shaded
from lab.tools.helpers.token import (FEWEST_CONTINUATIONS, MOST_CONTINUATIONS, check_exists,
                                     in_short, likeliest_others, measure_credit, where_kept)
from run import printable

SHOWN = 2           # problems, without --answer
FLAGS = {
    "step": Flag(None, "which step. By default it is the last", kind=int),
    "answer": Flag(None, "which answer of the step", kind=int),
    "token": Flag(None, "which token of the answer", kind=int,
                  requires=(lambda values: values.answer is not None, "--answer")),
    "credit": Flag(None, "also measure the token's credit: sample so many continuations of the "
                         "answer before the token, as many after it, and compare their rewards",
                   kind=int, least=FEWEST_CONTINUATIONS, most=MOST_CONTINUATIONS,
                   requires=(lambda values: values.token is not None, "--token")),
    "show": Flag(None, f"number of problems to show. By default it is {SHOWN}. Those whose answers "
                       "differ in reward come first", kind=int, least=1,
                 requires=(lambda values: values.answer is None, "several answers"))}
SHADES = ((0.05, ""), (0.2, "48;5;195;38;5;0"), (0.4, "48;5;153;38;5;0"), (0.7, "48;5;75;38;5;16"),
          (float("inf"), "48;5;26;38;5;231"))
WIDTH = 70          # of a line of arithmetic
MOST = 8            # tokens that get a line


def main(argv: list[str]) -> None:
    usage = "python -m lab follow RUN [--step N] [--answer N] [--token N [--credit K]]"
    flags = read(argv, usage, __doc__, FLAGS,
                 {"[RUN]": "a run folder. By default it is the newest in runs/"})
    run = read_run(existing(flags.run))
    folder, steps = run.folder, run.steps
    if not steps:
        raise UserError(f"{folder} has no credit files yet")
    step = steps[-1] if flags.step is None else flags.step
    check_exists("step", step, steps, folder)
    record, tokenizer = read_step(folder, step), read_tokenizer(folder)
    answers = len(record.answers["group"])
    title = (f"{folder}, step {step}: {answers} answers to {len(record.prompts)} problems, "
             f"{len(record.tokens)} tokens")
    models = sampling_models(folder, str(run.config.get("model", "")))
    if flags.credit:
        refuse_unfit_for_credit(run, record, models)
    if flags.answer is None:
        print(title)
        return show_problems(record, tokenizer, flags.show or SHOWN)
    check_exists("answer", flags.answer, range(answers), f"step {step}")
    line = metrics_by_step(run).get(step, {})
    answer = answer_of(record, tokenizer, run.config, line, flags.answer)
    if flags.token is not None:
        check_exists("token", flags.token, range(len(answer["texts"])), f"answer {flags.answer}")
        if not answer.get("own", [True] * len(answer["texts"]))[flags.token]:
            raise UserError(f"token {flags.token} of answer {flags.answer} was written by the "
                            "environment: it has no advantage, and no step pushes it")
    print(f"{title}\nanswer {flags.answer} to {one_line(answer['prompt'])}")
    if flags.token is None:
        return show_answer(answer)
    follow_token(run, models.get(step), record, tokenizer, answer, flags)
    if not flags.credit and task_of(run.config) and "own" not in answer:
        say_what_else(step, models)


def follow_token(run: Run, model: str | None, record: StepRecord, tokenizer: Tokenizer,
                 answer: ShownAnswer, flags: SimpleNamespace) -> None:
    """Print what is known of a token, in short first. `model` is the folder of the model that
    sampled it, if it was kept."""
    t, credit = flags.token, None
    others = likeliest_others(run, model, record, tokenizer, flags.answer, t)
    add_in_words(answer, "others", t, others)
    if flags.credit and model:
        credit = measure_credit(run.folder, model, record.step, flags.answer, t, flags.credit)
        add_in_words(answer, "credit in words", t, credit.in_words())
    print(f"\n{textwrap.fill(in_short(answer, t, credit), 100)}")
    show_token(answer, t)
    print_account(run, answer, t)


def refuse_unfit_for_credit(run: Run, record: StepRecord, models: dict[int, str]) -> None:
    """Refuse --credit where the task or the model of the step is not known, or where an environment
    replies."""
    step = record.step
    if not record.written["own"].all():
        raise UserError("--credit is measured in answers of one turn alone, and in these an "
                        "environment replies (docs/reference/turns.md)")
    if not task_of(run.config):
        raise UserError(f"--credit: the task of {run.folder} is not there, which would score "
                        "the continuations")
    if step not in models:
        raise UserError(f"--credit needs the model that sampled step {step}, and it was not kept. "
                        f"{where_kept(models)}")


def say_what_else(step: int, models: dict[int, str]) -> None:
    """Name the flag that shows more of a token."""
    say("\nHow much did it change the expected reward? --credit 1000 measures that.")
    if step not in models:
        say("It needs the model that sampled the step, and here it was not kept.\n"
            f"{where_kept(models)}.")


def begin_and_end(texts: list[str]) -> str:
    text = " ".join("".join(texts).split())
    return text if len(text) <= 60 else f"{text[:30]} ... {text[-30:]}"


def show_problems(record: StepRecord, tokenizer: Tokenizer, most: int) -> None:
    """Print the answers to each problem, with their rewards and the advantages that follow."""
    groups = groups_in_order(record.answers["group"], record.answers["reward"])
    for members in groups[:most]:
        answers = [answer_of(record, tokenizer, {}, {}, b) for b in members.tolist()]
        print(f"\n{one_line(answers[0]['prompt'])}\nanswer  reward  advantage  tokens")
        for answer in answers:
            advantage = [value for value in answer["values"]["advantage"] if value is not None]
            ends = sorted({min(advantage), max(advantage)})
            span = " to ".join(f"{value:+.2f}" for value in ends)
            reward = "-" if answer["reward"] is None else f"{answer['reward']:.2f}"
            print(f"{answer['episode']:6} {reward:>7} {span:>10} {len(advantage):7}  "
                  f"{begin_and_end(answer['texts'])}")
    if len(groups) > most:
        print(f"\n--show {len(groups)} shows all {len(groups)} problems")


def show_answer(answer: ShownAnswer) -> None:
    """Print the answer shaded, and a line for each of the tokens with the largest gradients."""
    known, texts = answer["values"] | answer["account"], answer["texts"]
    sizes = [size or 0 for size in known["gradient size"]]
    largest = max(sizes) or 1
    colours = legend(SHADES) or "in brackets after each token that has at least 5%"
    put("\nthe gradient's size at the logits, as a share of the largest in this answer: "
        f"{colours}\n")
    own = answer.get("own", [True] * len(texts))
    put(shaded(texts, [size / largest if drew else None for size, drew in zip(sizes, own)], SHADES,
               lambda share: f"[{share:.0%}]" if share >= SHADES[0][0] else ""))
    columns = ("p", "entropy", "advantage", "weight", "gradient size")
    largest_first = np.argsort(sizes)[::-1][:MOST].tolist()
    rows = [[t, repr(texts[t]), KINDS[answer["kind"][t]], *(known[name][t] for name in columns)]
            for t in largest_first if sizes[t]]
    if not rows:
        return print("\nNo token of this answer has a gradient.")
    formats = {"token": "d", "text": "", "kind": "", **dict.fromkeys(columns, ".4g")}
    print(f"\n{Table('largest', '', by_row(formats, rows)).to_text()}")


def show_token(answer: ShownAnswer, t: int) -> None:
    texts = list(map(printable, answer["texts"]))
    marked = styled(texts[t], BOLD) if has_colour() else f"[{texts[t]}]"
    put(f"\n{''.join(texts[:t])}{marked}{''.join(texts[t + 1:])}\n")
    print(f"token {t}, {answer['texts'][t]!r}, of the kind {KINDS[answer['kind'][t]]}, in the "
          f"section {SECTIONS[answer['section'][t]]}\n")


def add_in_words(answer: ShownAnswer, name: str, t: int, words: str) -> None:
    """Add something to the account that is known of token t alone."""
    known: list[Value] = [None] * len(answer["texts"])
    known[t] = words
    answer["account"][name] = known


def print_account(run: Run, answer: ShownAnswer, t: int) -> None:
    """Print the stages of token t, from its reward to its change."""
    for label, text, function in with_numbers(stages(run.config), answer, t):
        print_stage(label, text, function)
    if "change" not in answer["values"]:
        print_stage("change", "not measured in this step; --change_every says in which it is", "")
    elif answer["account"]["dropped"]:
        print_stage("change", "not measured, because the step left this answer out", "")


def print_stage(label: str, text: str, function: str) -> None:
    first, *others = textwrap.wrap(printable(text), WIDTH, break_long_words=False,
                                   break_on_hyphens=False)
    print(f"{label:10} {first:{WIDTH}} {function}".rstrip())
    for line in others:
        print(f"{'':10} {line}")
