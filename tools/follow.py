"""Follow one token: how it came by its credit, a line of arithmetic for each stage.

    python -m tools.follow runs/none-grpo-s0 --step 1 --answer 5 --token 22
    python -m tools.follow runs/none-grpo-s0 --step 1 --answer 5    the answer, shaded
    python -m tools.follow runs/none-grpo-s0 --step 1               its answers, problem by problem

With --moved the change of one token in the step is taken apart, by who pushed it
(tools/helpers/moved.py).

The numbers are those of the credit file, and behind each line stands the function that computes it.
Answers and tokens are counted from 0, as there and on the page of analyze.py. What else could have
stood in the token's place is told by the model that sampled it, if that was kept. Nothing is
written.
"""
if not __package__:
    raise SystemExit("start it with: python -m tools.follow")
import textwrap
from pathlib import Path

import numpy as np
import torch

import mitigations  # noqa: F401  fills the lists of choices
from analysis.account import place, settings_of, stages, told
from analysis.answers import answer_of, groups_in_order, metrics_by_step, own_step
from analysis.runs import existing, read_run
from analysis.tables import Table, by_row
from analysis.tally import read_tokens
from engine.errors import UserError
from engine.tokens import KINDS, SECTIONS, load_tokenizer, token_bytes
from harness.record import checkpoint_folders, find_folder, read_credit
from harness.screen import BOLD, has_colour, put, run_as_program, styled, visible
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from qwen2_model import Qwen2
from tools.helpers.moved import who_moved
from tools.helpers.terminal import check_place, legend, one_line, shaded
from train import drop_unfinished

FLAGS = {
    "step": Flag(None, "by default the last", kind=int),
    "answer": Flag(None, "which answer of the step", kind=int),
    "token": Flag(None, "which token of the answer", kind=int),
    "moved": Flag(False, "who moved it: some passes over the batch by the model that sampled it"),
    "show": Flag(2, "problems to show, those with different rewards first", least=1)}
SHADES = ((0.05, ""), (0.2, "48;5;195;38;5;0"), (0.4, "48;5;153;38;5;0"), (0.7, "48;5;75;38;5;16"),
          (float("inf"), "48;5;26;38;5;231"))
WIDTH = 70          # of a line of arithmetic
MOST = 8            # tokens that get a line
SAME_MODEL = 0.1    # log-probs that differ by more are not of one model


def main(argv: list[str]) -> None:
    parser = make_parser("python -m tools.follow RUN [--step N] [--answer N] [--token N]", __doc__,
                         FLAGS)
    parser.add_argument("run", metavar="RUN", nargs="?", default=None,
                        help="a run folder, by default the newest in runs/")
    flags = with_defaults(parser.read(argv), FLAGS)
    run = read_run(existing(flags.run))
    folder, steps = run["folder"], run["steps"]
    if not steps:
        raise UserError(f"{folder} has no credit files yet")
    step = steps[-1] if flags.step is None else flags.step
    check_place("step", step, steps, folder)
    tokens, tokenizer = read_tokens(folder, step), load_tokenizer(folder)
    own = own_step(tokens, step)
    of_trainer = f" ({own} of the trainer)" if own != step else ""
    title = (f"{folder}, step {step}{of_trainer}: {len(tokens['group'])} answers to "
             f"{len(tokens['prompt_start'])} problems, {len(tokens['token_id'])} tokens")
    if flags.answer is None:
        if flags.token is not None:
            raise UserError(f"--token {flags.token} is of which answer? Say --answer, too")
        print(title)
        return show_problems(tokens, tokenizer, step, flags.show)
    check_place("answer", flags.answer, range(len(tokens["group"])), f"step {step}")
    line = metrics_by_step(folder).get(step, {})
    answer = answer_of(tokens, tokenizer, run["config"], line, step, flags.answer)
    if flags.token is not None:
        check_place("token", flags.token, range(len(answer["texts"])), f"answer {flags.answer}")
    print(f"{title}\nanswer {flags.answer} to {one_line(answer['prompt'])}")
    if flags.token is None:
        return show_answer(answer)
    show_token(answer, flags.token)
    for label, text, where in told(stages(run["config"]), answer, flags.token):
        print_stage(label, text, where)
        if label == "chance":
            others = likeliest(run, tokens, tokenizer, answer, flags.token)
            print_stage("others", others, place(Qwen2.logits))
    if flags.moved:
        show_who_moved(run, tokens, tokenizer, step, flags.answer, flags.token)


def begin_and_end(texts: list[str]) -> str:
    text = " ".join("".join(texts).split())
    return text if len(text) <= 60 else f"{text[:30]} ... {text[-30:]}"


def show_problems(tokens: dict, tokenizer, step: int, most: int) -> None:
    """Of each problem the answers, with what the comparison made of their rewards."""
    groups = groups_in_order(tokens)
    for members in groups[:most]:
        answers = [answer_of(tokens, tokenizer, {}, {}, step, b) for b in members.tolist()]
        print(f"\n{one_line(answers[0]['prompt'])}\nanswer  reward  advantage  tokens")
        for answer in answers:
            advantage = answer["values"]["advantage"]
            span = " to ".join(f"{value:+.2f}" for value in sorted({min(advantage),
                                                                    max(advantage)}))
            reward = "-" if answer["reward"] is None else f"{answer['reward']:.2f}"
            print(f"{answer['episode']:6} {reward:>7} {span:>10} {len(advantage):7}  "
                  f"{begin_and_end(answer['texts'])}")
    if len(groups) > most:
        print(f"\n--show {len(groups)} shows all {len(groups)} problems")


def show_answer(answer: dict) -> None:
    """The answer shaded, and a line for each of the tokens that got most."""
    known, texts = answer["values"] | answer["account"], answer["texts"]
    sizes = [size or 0 for size in known["gradient size"]]
    largest = max(sizes) or 1
    put(f"\ngradient, of this answer's largest: {legend(SHADES) or 'behind a token, from 5%'}\n")
    put(shaded(texts, [size / largest for size in sizes], SHADES,
               lambda share: f"[{share:.0%}]" if share >= SHADES[0][0] else ""))
    columns = ("p", "entropy", "advantage", "weight", "gradient size")
    rows = [[t, repr(texts[t]), KINDS[answer["kind"][t]], *(known[name][t] for name in columns)]
            for t in np.argsort(sizes)[::-1][:MOST].tolist() if sizes[t]]
    formats = {"token": "d", "text": "", "kind": "", **dict.fromkeys(columns, ".4g")}
    print(f"\n{Table('most', '', by_row(formats, rows)).to_text()}" if rows else
          "\nno token of it has a gradient")


def show_token(answer: dict, t: int) -> None:
    texts = list(map(visible, answer["texts"]))
    marked = styled(texts[t], BOLD) if has_colour() else f"[{texts[t]}]"
    put(f"\n{''.join(texts[:t])}{marked}{''.join(texts[t + 1:])}\n")
    print(f"token {t}, {answer['texts'][t]!r}: {KINDS[answer['kind'][t]]} in "
          f"{SECTIONS[answer['section'][t]]}\n")


def print_stage(label: str, text: str, where: str) -> None:
    first, *others = textwrap.wrap(visible(text), WIDTH, break_long_words=False,
                                   break_on_hyphens=False)
    print(f"{label:10} {first:{WIDTH}} {where}".rstrip())
    for line in others:
        print(f"{'':10} {line}")


def sampled_by(run: dict, step: int) -> str | Path:
    """The folder of the model that sampled a step: that of the weights after the step before."""
    models = {0: run["config"]["model"], **checkpoint_folders(run["folder"])}
    if step - 1 not in models:
        raise UserError(f"the model after step {step - 1}, which sampled it, was not kept")
    return models[step - 1]


@torch.no_grad()
def likeliest(run: dict, tokens: dict, tokenizer, answer: dict, t: int) -> str:
    """What else could have stood there, by the model that sampled it."""
    try:
        name = sampled_by(run, answer["step"])
        folder = find_folder(str(name))
        model = Qwen2.from_pretrained(folder, "cpu")
    except UserError as error:
        return f"not known: {error}"
    temperature = run["config"].get("columns_temperature", 1)  # of what is on record
    if temperature is None:
        return "not known: nor is the temperature of what is on record"
    at = tokens["episode_start"][answer["episode"]] + t
    prompt = np.split(tokens["prompt_ids"], tokens["prompt_start"][1:])[answer["group"]]
    before = np.concatenate([prompt, tokens["token_id"][at - t:at]])
    states = model.model(torch.from_numpy(before)[None].long())[:, -1]
    p = (model.logits(states)[0].float() / temperature).softmax(-1)
    chosen = int(tokens["token_id"][at])
    if abs(p[chosen].log() - tokens["log_prob"][at]) > SAME_MODEL:
        return f"not known: for {folder} p is {p[chosen]:.4g}, so another model sampled it"
    others = [token for token in p.topk(5).indices.tolist() if token != chosen][:4]
    pieces = [piece.decode(errors="replace") for piece in token_bytes(tokenizer, others)]
    return ", ".join(f"{text!r} {p[token]:.2g}" for text, token in zip(pieces, others)
                     ) + f" ({name})"


def show_who_moved(run: dict, tokens: dict, tokenizer, step: int, b: int, t: int) -> None:
    folder, s = find_folder(str(sampled_by(run, step))), settings_of(run["config"])
    rollouts = read_credit(run["folder"], step, tokenizer)
    mask, weight = rollouts.mask, torch.zeros_like(rollouts.advantage)
    weight = weight.masked_scatter(mask, torch.from_numpy(tokens["weight"]).float())
    if s.drop_unfinished:
        rollouts = drop_unfinished(rollouts)
    if not (rollouts.advantage * weight).any() or not rollouts.mask[b, t]:
        return print("\nmoved: the step was skipped, or this answer was dropped from it")
    trainer = folder / "trainer" / "state.safetensors" if step > 1 else None
    print(f"\n{who_moved(folder, trainer, rollouts, weight, s, b, t).to_text()}")
    if "change" in tokens:
        print(f"on record: {tokens['change'][tokens['episode_start'][b] + t]:+.5f}")


if __name__ == "__main__":
    run_as_program("follow", main)
