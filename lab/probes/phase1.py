"""Does phase 1 measure credit? A gradient that never saw a reward, and what exposes it.

    python -m lab phase1 --model runs/none-grpo-s0/checkpoints/step_000100

Phase 1 is what an earlier experiment did first. It took the answers of a trained model, and for
each answer the gradient of the cross-entropy with respect to the embeddings of its tokens,
g_j = d loss / d embedding_j. The size of g_j was taken for the credit of token j. For each position
it computed t = mean / (std / sqrt n) over the answers. A token with abs(t) < 1.5 was called filler,
and one with abs(t) > 3 reasoning. Phase 2 is its second attempt: the contribution A log p of each
token in a training. Both are measured here, and compared with

    random text     answers of the same lengths with tokens drawn evenly: there is no credit in them
    untrained       the same answers by a model with fresh weights; and random text by it
    loss terms      how many terms of the loss reach a token, from its position alone
    abs(A) s        the size of GRPO's gradient at the logits

The earlier experiment did not record from which number it computed the t of phase 1. So there are
two here: one of the size of g, which is never negative, and one of the mean of g over its
dimensions, which has a sign. Early and late mean the first and the last fifth of an answer. Filler
and reasoning are told apart by the earlier experiment's regular expressions. "At like positions"
means that both classes are averaged with the same weight for each fifth of the answer. The last
token of an answer predicts nothing and is left out. If phase 1 measured credit, its pattern would
vanish in the controls.

Phase 2 is measured on the credit files of the run that the checkpoint lies in, on all its steps;
for another model, on the same answers as phase 1.
"""
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from lab.analysis.statistics import Estimate, jackknife, within
from lab.analysis.tables import WITH_INTERVAL, Row, Table, by_row
from lab.analysis.token_table import TokenTable, joined_tables, read_tokens, table_of_frames
from lab.engine.errors import UserError
from lab.engine.forward import lay_out, log_probs_of_each, micro_batches
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import KINDS, WORD
from grpo import gradient_size, grpo
from lab.harness.flags import Flag
from lab.harness.read_record import credit_steps
from lab.harness.screen import show_status
from lab.probes.common import (MODEL_FLAGS, Findings, policy_from_flags, run_of,
                               sample_batch)
from lab.probes.notes_sums import CLASSES, FILLER, REASONING, class_codes, t_values
from lab.engine.model import Qwen2

FLAGS = {
    **MODEL_FLAGS,
    "questions": Flag(25, "number of problems", least=2, most=10_000),
    "answers": Flag(4, "answers to each problem", least=2, most=1000)}
FIFTHS = 5
PHASE_1, PHASE_2 = "phase 1", "phase 2"
RANDOM_TEXT, UNTRAINED, UNTRAINED_RANDOM, LOSS_TERMS, GRADIENT = CONTROLS = (
    "random text", "untrained", "untrained, random text", "loss terms", "abs(A) s")
PUBLISHED = {  # what the earlier experiment found in phase 1 and phase 2
    "t of the size above 3": ("0.83", "-"), "t of the size below 1.5": ("0.019", "-"),
    "abs(t) above 3": ("-", "0.20"), "abs(t) below 1.5": ("-", "0.39"),
    "mean abs(t)": ("-", "1.92"), "early over late": ("4", "1.6"),
    "filler over reasoning": ("1.75", "1.31"),
    "the same at like positions": ("-", "1.24")}  # from its table of five bins
TokensByName = Mapping[str, TokenTable]  # phase 1, phase 2 and the controls, by name


@np.errstate(invalid="ignore", divide="ignore")  # of few answers some shares are of nothing: NaN
def measure(args: SimpleNamespace, folder: Path) -> Findings:
    policy = policy_from_flags(args)
    show_status("answers")
    rollouts = sample_batch(policy, args.questions, args.answers)
    show_status("phase 1")
    found = {PHASE_1: phase_one(policy, rollouts)}
    if not len(found[PHASE_1]):
        raise UserError("every answer has a single token, and the last token of an answer predicts "
                        "nothing: phase 1 needs longer answers")
    show_status("random text")
    text = random_text(policy, rollouts)
    found[RANDOM_TEXT] = phase_one(policy, text)
    show_status("an untrained model")
    forget(policy.model, derived_seed("untrained", args.seed))
    found[UNTRAINED] = phase_one(policy, rollouts)
    found[UNTRAINED_RANDOM] = phase_one(policy, text)

    positions = torch.arange(rollouts.mask.shape[1], device=rollouts.mask.device)
    found[LOSS_TERMS] = sizes_of(policy, rollouts, rollouts.length[:, None] - 1 - positions)
    s = gradient_size(rollouts.log_prob.double(), rollouts.collision.double())
    found[GRADIENT] = sizes_of(policy, rollouts, rollouts.advantage * s)
    run = run_of(policy.folder)
    if run and credit_steps(run):
        found[PHASE_2] = phase_two(run, policy)
        source = f"the credit files of {run}"
    else:
        found[PHASE_2] = sizes_of(policy, rollouts, rollouts.advantage * rollouts.log_prob)
        source = "the same answers"

    with_shuffled_rewards = gradient_of_shuffled_rewards(policy, rollouts)
    intro = [f"{policy.folder} gave {args.answers} answers to each of {args.questions} problems, "
             f"with {len(found[PHASE_1]):,} tokens in all. Phase 2 is measured on {source}.",
             "Phase 1 is the size of each token's gradient at its embedding, and phase 2 is A log "
             "p. The other columns are controls, explained by python -m lab phase1 --help."]
    return Findings("Phase 1: a gradient that never saw a reward", intro,
                    [phases_table(found), flaws_table(found, with_shuffled_rewards)])


def phase_one(policy: Policy, rollouts: Rollouts) -> TokenTable:
    """The gradient of each answer's mean cross-entropy at its tokens' embeddings: the mean over its
    dimensions, and its norm."""
    size, signed = torch.zeros(2, *rollouts.mask.shape, device=rollouts.mask.device)
    seen: dict[str, torch.Tensor] = {}
    hook = policy.model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: seen.update(embeddings=output))
    for rows in micro_batches(rollouts, rollouts.rows, policy.settings.micro_batch):
        log_prob = log_probs_of_each(policy.model, rollouts, rows)
        loss = -(log_prob.sum(1) / rollouts.length[rows]).sum()
        gradient, = torch.autograd.grad(loss, seen["embeddings"])
        _, _, predicts = lay_out(rollouts, rows)
        g = gradient.float()[predicts.roll(-1, 1)]  # token t stands where t + 1 is predicted
        size[rows], signed[rows] = g.norm(dim=-1), g.mean(-1)
    hook.remove()
    return sizes_of(policy, rollouts, signed, size)


def sizes_of(policy: Policy, rollouts: Rollouts, signed: torch.Tensor,
             size: torch.Tensor | None = None) -> TokenTable:
    """A number (B, T) of each token with its sign, and its size: abs if no other is given. Without
    the last token of each answer."""
    size = signed.abs() if size is None else size
    tokens = table_of_frames(rollouts.mask, rollouts.group, {
        "token_id": rollouts.ids, "kind": rollouts.kind, "signed": signed.double(),
        "size": size.double()})
    tokens = tokens.where(tokens["position"] < tokens["length"] - 1)
    return with_classes(tokens, policy)


def with_classes(tokens: TokenTable, policy: Policy) -> TokenTable:
    return tokens.having({"class": class_codes(policy.tokenizer, tokens["token_id"])})


def phase_two(run: Path, policy: Policy) -> TokenTable:
    """A log p of all tokens of a run, from its credit files. Each step has its own problems."""
    steps = []
    for step in credit_steps(run):
        tokens = read_tokens(run, step)
        contribution = tokens["advantage"] * tokens["log_prob"]
        kept = ("problem", "answer", "position", "length", "token_id")
        columns = {name: tokens[name] for name in kept}
        columns |= {"signed": contribution, "size": np.abs(contribution)}
        steps.append(TokenTable(columns))
    return with_classes(joined_tables(steps), policy)


def gradient_of_shuffled_rewards(policy: Policy, rollouts: Rollouts) -> TokenTable:
    """abs(A) s with the advantages that GRPO makes of rewards shuffled over all answers."""
    order = torch.randperm(len(rollouts.reward), generator=rollouts.generator)
    scores = {name: value[order.to(value.device)] for name, value in rollouts.scores.items()}
    advantage = grpo(replace(rollouts, scores=scores))
    s = gradient_size(rollouts.log_prob, rollouts.collision)
    return sizes_of(policy, rollouts, advantage * s)


def forget(model: Qwen2, seed: int) -> None:
    """Draw the weights of a model anew, in place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.draw_parameters()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.endswith("bias"):
            torch.nn.init.ones_(parameter)


def random_text(policy: Policy, rollouts: Rollouts) -> Rollouts:
    """Answers of the same lengths to the same problems, their tokens drawn evenly."""
    ids = torch.randint(policy.tokenizer.get_vocab_size(), rollouts.ids.shape,
                        generator=rollouts.generator)
    return replace(rollouts, ids=ids.to(rollouts.ids.device) * rollouts.mask)


def t_by_position(tokens: TokenTable, column: str = "signed") -> np.ndarray:
    """abs(t) of each position that several answers have."""
    number, position = tokens[column], tokens["position"]
    n = np.bincount(position)
    total, square = np.bincount(position, number), np.bincount(position, number ** 2)
    several = n > 1
    return np.abs(t_values(n[several].astype(float), total[several], square[several]))


def mean_of(values: np.ndarray) -> np.float64:
    """The mean, or NaN where there is none, as in a fifth of very short answers."""
    return values.mean() if len(values) else np.float64(math.nan)


def is_of_class(tokens: TokenTable, name: str) -> np.ndarray:
    return np.asarray(tokens["class"] == CLASSES.index(name))


def class_ratio(tokens: TokenTable) -> float:
    """The mean size of filler over that of reasoning."""
    size = tokens["size"]
    filler = mean_of(size[is_of_class(tokens, FILLER)])
    reasoning = mean_of(size[is_of_class(tokens, REASONING)])
    return float(filler / reasoning)


def ratio_at_like_positions(tokens: TokenTable) -> float:
    """The same, with every fifth of the answers counted the same for both classes."""
    fifth = tokens.part_of_answer(FIFTHS)
    is_filler, is_reasoning = is_of_class(tokens, FILLER), is_of_class(tokens, REASONING)
    filler, reasoning = 0.0, 0.0
    for number in range(FIFTHS):
        filler += mean_of(tokens["size"][is_filler & (fifth == number)])
        reasoning += mean_of(tokens["size"][is_reasoning & (fifth == number)])
    return float(filler / reasoning)


def mean_by_fifth(tokens: TokenTable) -> list[np.float64]:
    fifth = tokens.part_of_answer(FIFTHS)
    return [mean_of(tokens["size"][fifth == number]) for number in range(FIFTHS)]


def first_over_last_fifth(tokens: TokenTable) -> float:
    means = mean_by_fifth(tokens)
    return float(means[0] / means[-1])


STATISTICS = {
    "t of the size above 3": lambda tokens: mean_of(t_by_position(tokens, "size") > 3),
    "t of the size below 1.5": lambda tokens: mean_of(t_by_position(tokens, "size") < 1.5),
    "abs(t) above 3": lambda tokens: mean_of(t_by_position(tokens) > 3),
    "abs(t) below 1.5": lambda tokens: mean_of(t_by_position(tokens) < 1.5),
    "mean abs(t)": lambda tokens: mean_of(t_by_position(tokens)),
    "early over late": first_over_last_fifth,
    "filler over reasoning": class_ratio,
    "the same at like positions": ratio_at_like_positions}
SHARES = ("t of the size above 3", "t of the size below 1.5", "abs(t) above 3", "abs(t) below 1.5")
RATIOS_OF_SIZES = ("early over late", "filler over reasoning", "the same at like positions")


def phases_table(found: TokensByName) -> Table:
    rows: list[Row] = []
    phase_1, phase_2 = found[PHASE_1], found[PHASE_2]
    for name, statistic in STATISTICS.items():
        published_1, published_2 = PUBLISHED[name]
        # of a whole training, phase 2, the problems are too many to leave out one by one
        estimated = jackknife_of_log if name in RATIOS_OF_SIZES else jackknife
        of_phase_1 = estimated(lambda kept: statistic(phase_1.where(kept)), phase_1["problem"])
        if name in SHARES:
            of_phase_1 = within(of_phase_1, 0, 1)
        of_controls = [float(statistic(found[control])) for control in CONTROLS]
        rows.append([name, published_1, of_phase_1, published_2, float(statistic(phase_2)),
                     *of_controls])
    formats = {"measure": "", "notes 1": "", PHASE_1: ".3g", "notes 2": "",
               PHASE_2: ".3g", **dict.fromkeys(CONTROLS, ".3g")}
    return Table("phases", "Phase 1, phase 2, and controls in which there is no credit",
                 by_row(formats, rows), "",
                 ["Each position has a t, which is computed over the answers. A row with t has the "
                  "share of the positions of which its name is true, or the mean over positions. "
                  "Early over late and filler over reasoning are ratios of mean sizes. The "
                  "interval is over problems (jackknife), and that of a ratio is computed for its "
                  "logarithm"],
                 {"notes 1": "phase 1, published", "notes 2": "phase 2, published",
                  PHASE_1: f"{PHASE_1}{WITH_INTERVAL}"})


def jackknife_of_log(statistic: Callable[[np.ndarray], float], problem: np.ndarray) -> Estimate:
    """The estimate of a positive statistic, such as a ratio of sizes. Its interval is computed for
    its logarithm, so all of it is above 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = jackknife(lambda kept: float(np.log(statistic(kept))), problem)
        value, low, high = np.exp([found.value, *found.interval]).tolist()
    return Estimate(value, low, high)


def flaws_table(found: TokensByName, with_shuffled_rewards: TokenTable) -> Table:
    phase_1, gradient = found[PHASE_1], found[GRADIENT]
    changed = np.abs(with_shuffled_rewards["signed"] - gradient["signed"]).sum()
    size, without_gradient = phase_1["size"], gradient["size"] == 0
    filler = phase_1["kind"][is_of_class(phase_1, FILLER)]
    rows = [
        ["the wrong gradient: how much of GRPO's gradient changes with shuffled rewards (of phase "
         "1: 0)",
         float(changed / gradient["size"].sum())],
        ["position: early over late for an untrained model and random text, without any credit",
         first_over_last_fifth(found[UNTRAINED_RANDOM])],
        ["t: share of positions above 3, for the size, which is never negative",
         float(STATISTICS["t of the size above 3"](phase_1))],
        ["the same for the number with a sign", float(STATISTICS["abs(t) above 3"](phase_1))],
        ["after the fact: share of the sizes in answers from which nothing is learned (A = 0)",
         size[without_gradient].sum() / size.sum()],
        ["crude classes: share of filler that is not a word but a tag, a space or an end",
         mean_of(filler != WORD)]]
    return Table("flaws", "The five flaws, each with the number that shows it",
                 by_row({"flaw": "", "found": ".3g"}, rows), "",
                 ["A size is that of phase 1. The kinds of token are: " + ", ".join(KINDS)])
