"""A training with DPO (Direct Preference Optimization, 2305.18290) in one file: the model learns
from pairs of answers to a problem, of which one is better than the other.

    python examples/dpo.py                              # models/tiny: a minute on one core
    python examples/dpo.py --pairs runs/dpo-s0/pairs.jsonl --out runs/offline    # those of a file
    python analyze.py runs/dpo-s0                       # what it leaves is a run as train.py's are

The loss, in the notation of the paper. y_w is the better answer to a prompt and y_l the worse one,
pi is the model, and ref is the model before the training, which stays as it is.

    loss = - mean over pairs of  log sigmoid( r(y_w) - r(y_l) )
    r(y) = beta (log pi(y) - log ref(y)),  where log pi(y) is the sum over the tokens of y

Where it comes from. Reinforcement learning from preferences has two stages: it fits a reward r to
the preferences, and then looks for the pi with the largest  E[r(y)] - beta KL(pi || ref).  DPO
makes one stage of the two:

    1. E[r(y)] - beta KL(pi || ref) is the mean of  r(y) - beta (log pi(y) - log ref(y))  over
       answers y of pi. With p(y) = ref(y) exp(r(y) / beta) / Z, where Z makes the sum of p over
       all answers 1, it is  beta log Z - beta KL(pi || p).  A KL is at least 0, and it is 0 only
       if both are equal. So the best pi is p.
    2. Solved for the reward, the best pi says what it was optimised for:
       r(y) = beta (log pi(y) - log ref(y)) + beta log Z.
    3. In the model of Bradley and Terry (1952) y_w is preferred to y_l with the probability
       sigmoid(r(y_w) - r(y_l)). Both answer the same prompt, so beta log Z cancels.
    4. So the probability of the preferences follows from pi alone. The loss is minus its
       logarithm, and no reward has to be fitted.

Its derivative by log pi(y_w) is  -beta sigmoid(r(y_l) - r(y_w)) / pairs,  and by log pi(y_l) the
same with a plus. It is beta / 2 / pairs at first, where both r are 0, and it fades as the model
comes to tell the pair apart. The policy loss of GRPO has the derivative -A / N by the log-prob of
a token, if its weight is 1. So DPO gives each token of a pair the advantage

    A = +- N beta sigmoid(r(y_l) - r(y_w)) / pairs,  with N tokens in the batch,

with a plus in the better answer and a minus in the worse one. So a step of DPO is a step of GRPO
with this advantage, and the program is train.py's with another one: `DPO` below is its run, and all
flags of train.py are flags here, too.

Read train.py first. What DPO leaves out of its step: all answers of a group but two; how much
better the better one is; and what a group with equal rewards could say, which is nothing in both.
What it adds: a second model in memory. Like GRPO it has no credit for single tokens.
"""
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it can be started from any folder

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from countdown_task import Problem, is_held_out
from grpo import Metrics, Rollouts, advantage, frozen_log_probs, sample, to_every_token
from qwen2_model import UserError, load_model, spelling
from run import append, digest_of, find, read_lines, read_settings, say
from train import Training, carry_out

# where train.py has other defaults; what is typed comes before them
DEFAULTS = "--advantage dpo --steps 30 --questions 16 --answers 8 --eval_every 30 --eval_tasks 500"
EXPECTED = 'expected {"problem": "3 5 7 make 15", "chosen": "...", "rejected": "..."}'


@advantage
def dpo(rollouts: Rollouts, *, beta: float = 0.1, pairs: str = "") -> Tensor:
    """Pairs of answers (DPO). With a smaller `beta` the model may move further from the reference.
    `pairs` is a file with a line of JSON for each pair; without it they are sampled."""
    raise NotImplementedError  # it needs a second model, so `DPO.advantages` takes its place


class Pair(NamedTuple):
    """A pair of a file, as tokens."""
    problem: Problem
    answers: list[list[int]]  # the better one, the worse one


class DPO(Training):
    """A run of train.py whose advantages come from pairs.

    Online, each step samples answers to new problems and compares the best with the worst of each
    group, so the pairs are of the model as it is now. Offline, they are some of those of a file,
    which existed before, as in the paper: nothing is sampled."""

    def make_parts(self) -> None:
        s = self.settings
        self.beta, self.file = s.keywords["beta"], s.keywords["pairs"]
        if self.beta <= 0:  # then no pair would have a gradient
            raise UserError(f"--beta {self.beta}: should be above 0")
        if self.file and not Path(self.file).is_file():  # /dev/zero never ends
            raise UserError(f"there is no file {self.file}")
        super().make_parts()
        self.before = load_model(find(s.model)).requires_grad_(False)
        lines = (Path(self.file).read_bytes().splitlines() or [b""]) if self.file else []
        self.given = [self.read_pair(line, f"{self.file}, line {number}")
                      for number, line in enumerate(lines, 1)]
        self.has_format = not self.given  # nothing is said of the form of a file's answers

    def sample(self, problems: Sequence[Problem], answers: int, generator: torch.Generator,
               greedy: bool | None = None) -> Rollouts:
        s, is_training = self.settings, greedy is None
        if not (self.given and is_training):
            return sample(self, problems, answers, generator, bool(greedy))
        rng = random.Random(f"pairs {s.seed} {self.step}")
        return self.batch_of(rng.sample(self.given, min(s.questions, len(self.given))))

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """(B, T): the advantage at the top of this file; 0 in answers that are in no pair."""
        better, worse = best_and_worst(rollouts).unbind(1)                           # (pairs,)
        log_pi, log_ref = (frozen_log_probs(self, model, rollouts)
                           for model in (self.model, self.before))                   # (B, T)
        r = self.beta * (log_pi - log_ref).sum(1)                                    # (B,)
        margin, pairs = r[better] - r[worse], len(better)
        size = int(rollouts.mask.sum()) * self.beta * torch.sigmoid(-margin) / max(pairs, 1)
        advantage = torch.zeros_like(r)
        advantage[better], advantage[worse] = size, -size
        self.told: Metrics = {"pairs": pairs}
        if pairs:
            self.told["loss"] = -F.logsigmoid(margin).mean().item()
            self.told["pairs_in_order"] = (margin > 0).float().mean().item()
        return to_every_token(advantage, rollouts)

    def update(self, rollouts: Rollouts, weight: Tensor, is_measured: bool = False
               ) -> tuple[Metrics, dict[str, Tensor]]:
        metrics, columns = super().update(rollouts, weight, is_measured)
        return metrics | self.told, columns

    def record(self, rollouts: Rollouts, weight: Tensor, columns: dict[str, Tensor]) -> None:
        """Write the step's credit file, and its pairs. The prompt is for other programs: TRL's
        DPOTrainer trains on prompt, chosen and rejected."""
        super().record(rollouts, weight, columns)
        for better, worse in [] if self.given else best_and_worst(rollouts).tolist():
            problem = rollouts.problems[int(rollouts.group[better])]
            append(self.folder / "pairs.jsonl", {
                "step": self.step, "problem": self.task.show(problem),
                "prompt": self.task.prompt_for(problem), "chosen": rollouts.answers[better],
                "rejected": rollouts.answers[worse]})

    def log(self, line: dict[str, Any]) -> None:
        super().log(line)
        if line["pairs"]:
            say(f"          {line['pairs']} pairs, {line['pairs_in_order']:.0%} of them in order, "
                f"loss {line['loss']:.4f}")

    def begin(self) -> None:
        super().begin()
        file = self.folder / "pairs.jsonl"  # of a run that was stopped
        kept = [line for line in read_lines(file) if line["step"] <= self.done]
        file.unlink(missing_ok=True)
        for line in kept:
            append(file, line)

    def write_state(self, path: Path, step: int) -> None:
        super().write_state(path, step)
        if self.file:
            (path / "pairs").write_text(digest_of(Path(self.file).read_bytes()))

    def read_state(self, checkpoint: Path) -> dict[str, Tensor]:
        known = checkpoint / "trainer" / "pairs"
        if self.file and known.read_text() != digest_of(Path(self.file).read_bytes()):
            raise UserError(f"{checkpoint}: the file of pairs has changed since this checkpoint "
                            "was made, so the run cannot go on from it")
        return super().read_state(checkpoint)

    def last_checkpoint(self) -> str:
        return super().last_checkpoint().replace("train.py", "examples/dpo.py")

    def read_pair(self, line: bytes, where: str) -> Pair:
        """The pair in a line of a file, if the model may be trained on it. `where` names the line.
        """
        try:
            written = json.loads(line)
            first, *others, target = map(int, written["problem"].replace("make", " ").split())
            texts = ["" + written[key] for key in ("chosen", "rejected")]  # a text and nothing else
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{where}: {EXPECTED}, got {line[:80]!r}") from None
        problem, limit = Problem((first, *others), target), self.settings.max_new_tokens
        text = self.task.prompt_for(problem)
        self.encode(text)
        if is_held_out(problem):
            raise UserError(f"{where}: {written['problem']} is a held-out problem, and what is "
                            "evaluated may not be trained on")
        if written.get("prompt", text) != text:
            raise UserError(f"{where}: its prompt is not the one of {written['problem']}, so its "
                            "answers may be to another problem")
        answers = [self.tokenizer.encode(one, add_special_tokens=False).ids for one in texts]
        for one, ids in zip(texts, answers):
            spelt = self.tokenizer.decode(ids, skip_special_tokens=False)
            if not ids or spelt != one or len(ids) > limit:
                raise UserError(f"{where}: the answer {one[:80]!r} has {len(ids)} tokens, of at "
                                f"most {limit} (--max_new_tokens), which spell {spelt[:80]!r}")
        return Pair(problem, answers)

    def batch_of(self, pairs: list[Pair]) -> Rollouts:
        """The pairs as a batch, in which each is a group: its better answer, with the reward 1, and
        its worse one. The entropy of its tokens is not known."""
        answers = [ids for pair in pairs for ids in pair.answers]
        length = torch.tensor([len(ids) for ids in answers])                         # (B,)
        mask = torch.arange(int(length.max())) < length[:, None]                     # (B, T)
        ids = torch.zeros(mask.shape, dtype=torch.long)
        ids[mask] = torch.tensor(sum(answers, []))
        section, kind = torch.zeros(2, *mask.shape, dtype=torch.uint8)
        texts = [[spelling(self.tokenizer, token) for token in answer] for answer in answers]
        for row, of_answer in enumerate(texts):
            codes = torch.tensor(self.task.label(of_answer), dtype=torch.uint8)
            section[row, :len(of_answer)], kind[row, :len(of_answer)] = codes
        unknown = torch.full(mask.shape, float("nan"))
        problems = [pair.problem for pair in pairs]
        rollouts = Rollouts(
            problems, [self.encode(self.task.prompt_for(problem)) for problem in problems],
            torch.arange(len(answers)) // 2, ids, mask,
            finished=torch.tensor([answer[-1] in self.stop for answer in answers]),
            log_prob=unknown, entropy=unknown, collision=unknown, texts=texts,
            answers=["".join(of_answer) for of_answer in texts], section=section, kind=kind,
            scores={"reward": torch.tensor([1.0, 0.0]).repeat(len(pairs))})
        return replace(rollouts, log_prob=frozen_log_probs(self, self.model, rollouts))


def best_and_worst(rollouts: Rollouts) -> Tensor:
    """(pairs, 2) rows: the first best and first worst answer of each group whose rewards differ."""
    pairs = []
    for group in range(len(rollouts.prompt_ids)):
        rows = (rollouts.group == group).nonzero()[:, 0]
        reward = rollouts.reward[rows]
        if reward.max() > reward.min():
            pairs.append([int(rows[reward.argmax()]), int(rows[reward.argmin()])])
    return torch.tensor(pairs, dtype=torch.long).view(-1, 2)


def main(argv: list[str]) -> None:
    if not any(word.startswith("--resume") for word in argv):
        argv = [*DEFAULTS.split(), *argv]
    settings, is_resumed = read_settings(argv)
    if settings.advantage != "dpo":
        raise UserError(f"the advantage {settings.advantage} is one of train.py, and here is dpo")
    settings.out = settings.out or f"runs/dpo-s{settings.seed}"
    carry_out(DPO(settings, is_resumed))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, OSError, SafetensorError) as error:
        sys.exit(f"dpo.py: {error}")
