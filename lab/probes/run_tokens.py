"""All tokens of a run in one table in memory, and the cells into which the notes cut them.

    tokens = RunTokens(run)
    tokens["log_prob"]                            # (n,) of all tokens of all steps
    tokens.mean("class", "abs contribution")      # (3,) of filler, reasoning and structure

A token takes about 150 bytes. The contribution A w log p is what the notes took for a token's
gradient. The size of the gradient at the logits is abs(A) w s. With `is_plain` both are those of
plain GRPO on the same tokens: w = 1, and A is the z-score of the answer's reward, with whatever
weighting or advantage the run trained.
"""
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from grpo import group_z_score
from lab.analysis.run_folders import Run, read_tokenizer
from lab.analysis.statistics import Floats
from lab.analysis.token_table import StepRecord, TokenTable, joined_tables, read_step
from lab.engine.errors import UserError
from lab.harness.record import credit_path
from lab.harness.screen import show_status

UNITS = ("contribution", "gradient")  # A w log p, A w s
COLUMNS = ("problem", "answer", "position", "length", "token_id", "kind", "section", "log_prob",
           "entropy", "collision", "advantage", "weight", "s", "gradient", "abs gradient", "push")
# the classes of the earlier experiment (github.com/Ja-Crispy/GRPO-Zero)
CLASSES = FILLER, REASONING, STRUCTURE = "filler", "reasoning", "structure"
SPELLED = ("equals", "plus", "minus", "times", "divided")


class RunTokens:
    def __init__(self, run: Run, is_plain: bool = False):
        self.run, self.tokenizer, self.is_plain = run, read_tokenizer(run.folder), is_plain
        self.steps = run.steps
        if not self.steps:
            raise UserError(f"{run.folder} has no credit files, which hold its tokens")
        self.table = joined_tables([self.of_step(number) for number in range(len(self.steps))])
        show_status("")
        self.longest = int(self["length"].max())
        self.ids, of_token = np.unique(self["token_id"], return_inverse=True)
        of_class = class_codes(self.tokenizer, self.ids)[of_token]
        self.cells = {"all": np.zeros_like(of_class), "sign": 1 + self["sign"], "class": of_class,
                      "bin": self.bins(10), "class by fifth": 5 * of_class + self.bins(5),
                      "class by step": 3 * self["step"] + of_class, "token": of_token}
        self.count = {"all": 1, "sign": 3, "class": 3, "bin": 10, "class by fifth": 15,
                      "class by step": 3 * len(self.steps), "token": len(self.ids)}

    def __getitem__(self, column: str) -> np.ndarray:
        return self.table[column]

    def of_step(self, number: int) -> TokenTable:
        """The tokens of a step, all with the same columns: the change is measured at some steps
        only, and elsewhere it is nan."""
        folder, step = self.run.folder, self.steps[number]
        show_status(f"{folder.name}: step {step}")
        record = read_step(folder, step)
        tokens = record.tokens
        refuse_unknown_tokens(folder, step, tokens, self.tokenizer)
        if self.is_plain:
            tokens = of_plain_grpo(tokens, record, has_advantages_of_grpo(self.run))
        contribution = tokens["advantage"] * tokens["weight"] * tokens["log_prob"]
        has_change, unknown = "change" in tokens, np.full(len(record.answers["group"]), np.nan)
        kept = {name: tokens[name] for name in COLUMNS}
        return TokenTable({
            **kept,
            "change": tokens["change"] if has_change else np.full(len(tokens), np.nan),
            "contribution": contribution,
            "abs contribution": np.abs(contribution),
            "sign": signs_of_rewards(record)[tokens["answer"]],
            "right": record.answers.get("reward_answer", unknown)[tokens["answer"]],
            "step": np.full(len(tokens), number),
            "tokens": np.ones(len(tokens))})

    def bins(self, count: int) -> np.ndarray:
        """(n,) the published bin of each token. Unlike in TokenTable.part_of_answer, the last bin
        ends at the largest t / length of the run, and a token on an edge belongs to the bin before
        it."""
        edges = np.linspace(0, (self.longest - 1) / self.longest, count + 1)[1:-1]
        return np.asarray(np.searchsorted(edges, self["position"] / self["length"]))

    def total(self, partition: str, measure: str = "tokens") -> Floats:
        return np.bincount(self.cells[partition], self[measure], self.count[partition])

    def mean(self, partition: str, measure: str) -> Floats:
        return self.total(partition, measure) / self.total(partition)

    def sizes(self, partition: str) -> list[Floats]:
        """The mean size of each cell in both UNITS."""
        return [self.mean(partition, f"abs {unit}") for unit in UNITS]

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The notes' other definition of early and late: the tokens (n,) below the 20% quantile of
        all positions, and those above the 80% quantile."""
        low, high = np.quantile(self["position"], (0.2, 0.8))
        return self["position"] < low, self["position"] > high


def has_advantages_of_grpo(run: Run) -> bool:
    config = run.config
    is_shuffled = str(config.get("placebo")).startswith("advantages")
    return config.get("advantage", "grpo") == "grpo" and not is_shuffled


def of_plain_grpo(tokens: TokenTable, record: StepRecord, has_advantages: bool) -> TokenTable:
    """The sizes that these tokens would have with the weight 1 and the z-score of the answer's
    reward. Their push and their change stay those of the step that was made."""
    advantage = tokens["advantage"]
    if not has_advantages:
        advantage = np.nan_to_num(z_scores(record.answers))[tokens["answer"]]
    gradient = advantage * tokens["s"]
    return tokens.having({"weight": np.ones(len(tokens)), "advantage": advantage,
                          "gradient": gradient, "abs gradient": np.abs(gradient)})


def refuse_unknown_tokens(folder: Path, step: int, tokens: TokenTable, tokenizer: Tokenizer
                          ) -> None:
    """A model can have more tokens than its tokenizer, since embeddings are padded."""
    highest = int(tokens["token_id"].max(initial=0))
    if highest >= 2 * tokenizer.get_vocab_size() + 4096:
        raise UserError(f"{credit_path(folder, step)} is damaged: it has a token {highest}, which "
                        "the run's tokenizer does not know")


def signs_of_rewards(record: StepRecord) -> np.ndarray:
    """(answers,) the sign of the normalised reward: 1, or -1 where it is 0 or less, as the earlier
    experiment counted it; 0 where it is not known."""
    z = z_scores(record.answers)
    return np.where(np.isnan(z), 0, np.where(z > 0, 1, -1))


def z_scores(answers: Mapping[str, np.ndarray]) -> Floats:
    """(answers,) GRPO's advantage of each answer; nan if the reward is not known."""
    reward, group = answers["reward"], answers["group"]
    z: Floats = group_z_score(torch.from_numpy(reward), torch.from_numpy(group)).double().numpy()
    return z


def class_of(text: str) -> str:
    """The class of a token, by the published regular expressions. A piece of a tag that the
    tokenizer cuts is filler."""
    text = text.strip()
    if text in ("<think>", "</think>", "<answer>", "</answer>"):
        return STRUCTURE
    is_reasoning = re.fullmatch(r"[0-9+\-*/()=]+", text) or re.search("[0-9]", text)
    return REASONING if is_reasoning or text in SPELLED else FILLER


def class_codes(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """(n,) the number of each token's class in CLASSES."""
    distinct, which = np.unique(ids, return_inverse=True)
    codes = []
    for token in distinct.tolist():
        text = tokenizer.decode([token], skip_special_tokens=False)
        codes.append(CLASSES.index(class_of(text)))
    return np.array(codes)[which]


def t_of_positions(position: np.ndarray, values: np.ndarray) -> Floats:
    """(positions,) the t of each position that several answers have: the mean over its tokens,
    divided by the standard error of this mean. It is 0 where all values are equal."""
    n = np.bincount(position).astype(float)
    several = n > 1
    n, total, square = (np.bincount(position, column)[several] for column in (
        np.ones_like(values), values, values ** 2))
    mean = total / n
    variance = (square / n - mean ** 2) * n / (n - 1)
    has_spread = variance > 1e-14 * square / n  # less is rounding
    return np.where(has_spread, mean / np.sqrt(np.where(has_spread, variance, 1) / n), 0)


def t_numbers(position: np.ndarray, values: np.ndarray) -> list[float]:
    """Of the positions the share with abs(t) above 3, the share below 1.5, and the mean of abs(t);
    nan if there is none."""
    t = np.abs(t_of_positions(position, values))
    return [float(np.mean(t > 3)), float(np.mean(t < 1.5)), float(t.mean())] if len(t) else (
        [np.nan] * 3)
