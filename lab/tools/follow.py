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
"term" has the token's term of the loss. The line "gradient" has two
numbers: the gradient's size at the logits, by which tokens are compared here and on the page, and
what is left of it in the loss, which divides by N. docs/reference/symbols.md says what A, c, w, m,
N and s are. Nothing is written.
"""
import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.analysis.account import Value, stages, with_numbers
from lab.analysis.answers import ShownAnswer, answer_of, groups_in_order, metrics_by_step
from lab.analysis.run_folders import (Run, check_exists, existing, read_credit, read_tokenizer,
                                      task_of)
from lab.analysis.tables import Table, by_row
from lab.analysis.token_table import StepRecord, read_step
from lab.credit.monte_carlo import continuation_rewards
from lab.engine.errors import UserError
from lab.engine.policy import Policy, derived_seed, encode_prompts
from lab.engine.rollouts import Rollouts, double
from lab.engine.tokens import KINDS, SECTIONS
from lab.harness.flags import Flag, read
from lab.harness.screen import BOLD, has_colour, printable, put, show_status, styled
from lab.analysis.shading import legend, one_line, shaded

# with fewer than ten continuations an interval is nearly as wide as the range of rewards
FEWEST_CONTINUATIONS, MOST_CONTINUATIONS = 10, 1_000_000
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
Z = 1.96            # a normal 95% interval is so many standard errors to each side
HARDLY = 0.005      # a push that is smaller would be rounded to 0.00


def main(argv: list[str]) -> None:
    usage = "python -m lab follow RUN [--step N] [--answer N] [--token N [--credit K]]"
    flags = read(argv, usage, __doc__, FLAGS,
                 {"[RUN]": "a run folder. By default it is the newest in runs/"})
    run = Run(existing(flags.run))
    folder, steps = run.folder, run.steps
    if not steps:
        raise UserError(f"{folder} has no credit files yet")
    step = steps[-1] if flags.step is None else flags.step
    check_exists("step", step, steps, folder)
    record, tokenizer = read_step(folder, step), read_tokenizer(folder)
    answers = len(record.answers["group"])
    title = (f"{folder}, step {step}: {answers} answers to {len(record.prompts)} problems, "
             f"{len(record.tokens)} tokens")
    if flags.credit:
        refuse_unfit_for_credit(run, record)
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
    follow_token(run, record, answer, flags)


def follow_token(run: Run, record: StepRecord, answer: ShownAnswer, flags: SimpleNamespace
                 ) -> None:
    """Print what is known of a token, in short first."""
    t, credit = flags.token, None
    if flags.credit:
        credit = measure_credit(run, record.step, flags.answer, t, flags.credit)
        add_in_words(answer, "credit in words", t, credit.in_words())
    print(f"\n{textwrap.fill(in_short(answer, t, credit), 100)}")
    show_token(answer, t)
    print_account(run, answer, t)


def refuse_unfit_for_credit(run: Run, record: StepRecord) -> None:
    """Refuse --credit where the task or the model of the step is not known, or where an environment
    replies."""
    step = record.step
    if not record.written["own"].all():
        raise UserError("--credit is measured in answers of one turn alone, and in these an "
                        "environment replies (docs/reference/turns.md)")
    if not task_of(run.config):
        raise UserError(f"--credit: the task of {run.folder} is not there, which would score "
                        "the continuations")
    if step not in run.sampled:
        raise UserError(f"--credit needs the model that sampled step {step}, and it was not kept. "
                        f"{where_kept(run.sampled)}")


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


# ------------------------------------------------------------------- beyond the record
#
# What the model that sampled a token says about it: its credit.


def where_kept(steps: Iterable[int]) -> str:
    """A sentence that names the steps for which the model that sampled them was kept."""
    names = [str(step) for step in sorted(steps)]
    if not names:
        return "It was kept for no step"
    return f"It was kept for --step {' or '.join(names)}"


@dataclass
class CreditOfToken:
    before: float  # V before the token
    after: float   # V after it
    interval: tuple[float, float]  # the 95% interval of the credit
    k: int         # continuations for each of the two

    def in_words(self) -> str:
        credit, (low, high) = self.after - self.before, self.interval
        return (f"V after - V before = {self.after:.4f} - {self.before:.4f} = {credit:+.3f} (95% "
                f"interval {low:+.3f} to {high:+.3f}). Each V is the mean "
                f"reward of {self.k:,} continuations by the model that sampled the answer")


def measure_credit(run: Run, step: int, b: int, t: int, k: int) -> CreditOfToken:
    """The credit of token t of answer b."""
    policy, rollouts = replayed_step(run, step, derived_seed("credit of a token", step, b, t))
    problem, ids = int(rollouts.group[b]), rollouts.ids[b].tolist()
    prefixes = [(problem, tuple(ids[:length])) for length in (t, t + 1)]
    rewards, _ = continuation_rewards(
        policy, rollouts, prefixes, k,
        lambda share: show_status(f"sampling continuations: {share:.0%}"))
    show_status("")
    before, after = double(rewards)  # (k,) each
    is_last = t == int(rollouts.length[b]) - 1
    return CreditOfToken(before.mean().item(), after.mean().item(),
                         credit_interval(before, after, is_last, rollouts.reward), k)


def replayed_step(run: Run, step: int, seed: int) -> tuple[Policy, Rollouts]:
    """The policy that sampled a step, and the step's answers with their problems, so that they can
    be continued and scored. `seed` is that of the continuations."""
    policy = run.policy(step - 1, device="cpu")
    s = policy.settings
    problems = policy.task.training_problems(s.seed, step, s.questions)
    generator = torch.Generator().manual_seed(seed)
    rollouts = read_credit(run.folder, step, read_tokenizer(run.folder), problems,
                           generator=generator)
    refuse_other_problems(run.folder, rollouts, policy)
    return policy, rollouts


def refuse_other_problems(run: Path, rollouts: Rollouts, policy: Policy) -> None:
    """Refuse recorded answers to other problems than those that stand beside them: the task may
    have changed, and --dynamic_sampling has drawn problems of its own."""
    prompts = encode_prompts(policy.tokenizer, policy.task, rollouts.problems)
    if rollouts.prompt_ids != prompts:
        raise UserError(f"the prompts of step {rollouts.step} in {run} are not those that its "
                        "settings make now, so its answers cannot be scored again")


def credit_interval(before: Tensor, after: Tensor, is_last: bool,
                    recorded: Tensor) -> tuple[float, float]:
    """The 95% interval of the difference of two expected rewards, from samples of both (k,).

    A rare reward may be missing from both. Then the usual interval, which follows from their
    variance alone, has no width. So it is that of Agresti and Caffo (2000): each sample gets two
    rewards more, the lowest and the highest one that may come; for 0 and 1 one failure and one
    success. After an answer's last token V is its reward, which has no error; then the other sample
    gets two of each, as in Agresti and Coull (1998).

    It needs the lowest and the highest reward that may come. These are taken from the samples and
    from the rewards on record, and they are at least as far apart as 0 and 1, the usual rewards of
    a wrong and a right answer."""
    recorded = double(recorded[recorded.isfinite()])  # some may not be known
    seen = torch.cat([before, after, recorded])
    ends = torch.tensor([min(0.0, seen.min().item()), max(1.0, seen.max().item())],
                        dtype=torch.float64)
    samples = [torch.cat([before, ends]), torch.cat([after, ends])]
    if is_last:
        samples = [torch.cat([before, ends, ends]), after[:1]]
    middle = samples[1].mean() - samples[0].mean()
    variance = sum(sample.var(correction=0).item() / len(sample) for sample in samples)
    half = Z * variance ** 0.5
    return middle.item() - half, middle.item() + half


def in_short(answer: ShownAnswer, t: int, credit: CreditOfToken | None) -> str:
    """What happened to token t: its push, its change and its credit together. `credit` is None if
    it was not measured.

    A push up was deserved if the token raised the expected reward, which is a credit above 0, and a
    push down if the token lowered it. Whether the credit is above or below 0 is said only if its
    whole 95% interval is."""
    push = answer["values"]["push"][t]
    token = f"the {KINDS[answer['kind'][t]]} {answer['texts'][t]!r}"
    if push is None:  # where sum p^2 is not on record
        return f"In short: how {token} was pushed is not known from this record."
    direction = ""  # of the push
    if not answer["account"]["dropped"] and abs(push) >= HARDLY:
        direction = "up" if push > 0 else "down"
    known = (f"In short: {token} {about_push(answer, t, direction)}"
             f"{about_change(answer, t, direction)}")
    return f"{known} {about_credit(credit, direction)}" if credit else known


def about_push(answer: ShownAnswer, t: int, direction: str) -> str:
    if answer["account"]["dropped"]:
        return "was not pushed, because the step left its answer out"
    for factor in ("advantage", "weight"):
        if not answer["values"][factor][t]:
            return f"was not pushed, because its {factor} is 0"
    push = answer["values"]["push"][t]
    if not direction:
        return f"was hardly pushed ({push:+.2g})"
    return f"was pushed {direction} ({push:+.2f})"


def about_change(answer: ShownAnswer, t: int, direction: str) -> str:
    """The end of a sentence about a push."""
    values = answer["values"]
    if answer["account"]["dropped"]:
        return "."
    change = values["change"][t] if "change" in values else None
    if change is None:
        return ". How its probability then changed was not measured."
    log_prob = values["log-prob"][t]
    before, after = f"{math.exp(log_prob):.4g}", f"{math.exp(log_prob + change):.4g}"
    if before == after:
        return f", and the step left its probability at {before}."
    moved = "rose" if change > 0 else "fell"
    joined = "but" if (direction, moved) in (("up", "fell"), ("down", "rose")) else "and"
    return f", {joined} in the step its probability {moved} from {before} to {after}."


def about_credit(credit: CreditOfToken, direction: str) -> str:
    low, high = credit.interval
    interval = f"{low:+.3f} to {high:+.3f}"
    if low <= 0 <= high:
        question = f"the push {direction} was deserved" if direction else "it deserved a push"
        said = (f"The 95% interval of its credit includes 0 ({interval}), so it is open whether "
                f"{question}.")
        if 4 * credit.k > MOST_CONTINUATIONS:
            return said
        return f"{said} With --credit {4 * credit.k} the interval would be half as wide."
    effect, deserved = ("raised", "up") if low > 0 else ("lowered", "down")
    if direction:
        was = "was" if direction == deserved else "was not"
        judgement = f"the push {direction} {was} deserved"
    else:
        judgement = f"a push {deserved} would have been deserved"
    return (f"The token {effect} the expected reward: the whole 95% interval of its credit is "
            f"{'above' if low > 0 else 'below'} 0 ({interval}). So {judgement}.")
