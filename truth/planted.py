"""A task whose credit is known: a few positions of the answer decide the reward, all others are noise.

An answer is `length` symbols long. At each of a few key positions, spread evenly over it, one symbol is right; the reward
is the share of keys that are right. What stands between them does not matter at all.

    length 12, keys at 2, 6, 10, right d a a:   "bb d cab b dca a b"   reward 2/3

The policy is a small Qwen2 of our own code, trained by the same functions as any other. It is told where the keys are (a
cue at the position that predicts them), so that finding the place is not what is learned, and it does not see the symbols
it wrote in between. So what follows depends on the keys alone: every value is a short sum, the credit of every token is
exact, and all symbols up to the next key can be drawn at once. All weights are shared: what an update does for the noise
positions, it does to the keys as well.
"""
import itertools
import random
from dataclasses import replace

import torch
from tokenizers import Tokenizer, models

from countdown_task import OTHER, THINK, WORD
from grpo import grpo
from engine.lab import Lab, derived_seed
from qwen2_model import ModelConfig, Qwen2
from engine.forward import Forward
from engine.rollouts import Rollouts
from engine.sampler import Distribution, Generation
from engine.settings import Settings

SYMBOLS, PROMPT = "abcd", [0]
SMALL = ModelConfig(vocab_size=len(SYMBOLS), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=2, head_dim=16)


class PlantedLab(Lab):
    """What a run works with, for this task."""

    def plant(self, length: int, keys: int) -> "PlantedLab":
        draw = random.Random(f"planted {self.settings.seed}")
        self.length, self.keys = length, [(2 * j + 1) * length // (2 * keys) for j in range(keys)]
        self.right = [draw.randrange(len(SYMBOLS)) for _ in self.keys]
        return self

    def reward_of(self, problem, ids) -> float:
        return sum(ids[t] == right for t, right in zip(self.keys, self.right) if t < len(ids)) / len(self.keys)


def planted_lab(seed: int, length: int, keys: int = 3, config: ModelConfig = SMALL, **settings) -> PlantedLab:
    """A fresh policy and its task; the same seed gives the same of both at any length."""
    given = dict(max_new_tokens=length, learning_rate=3e-3, questions=8, answers=8, micro_batch=64, max_grad_norm=0.0, seed=seed)
    s = Settings(model="planted", **{**given, **settings})
    config = replace(config, vocab_size=len(SYMBOLS), tie_word_embeddings=False, eos_token_id=(), pad_token_id=None, bos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed("planted", seed))
        model = Qwen2(config)
        cues = 0.02 * torch.randn(keys + 1, config.hidden_size)  # as large as fresh embeddings; the last is for what is no key
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token=SYMBOLS[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.learning_rate, weight_decay=0.0)
    lab = PlantedLab(s, None, model, tokenizer, optimizer, None).plant(length, keys)
    add_cues(model, cues, lab.keys, length)
    return lab


def add_cues(model: Qwen2, cues: torch.Tensor, keys: list[int], length: int) -> None:
    """Token t stands at position 1 + t, after the prompt, and is predicted at position t: there the cue is added. What was
    written between the keys is not let through."""
    cue, seen, at = cues[-1].repeat(length + 1, 1), torch.zeros(length + 1, 1), {}
    seen[0] = 1
    for j, t in enumerate(keys):
        cue[t], seen[1 + t] = cues[j], 1

    def note_positions(decoder, inputs):
        ids, positions = (*inputs, None)[:2]
        positions = torch.arange(ids.shape[-1]) if positions is None else positions
        at["positions"] = positions.clamp(max=length)  # rows that are done may stay in a batch a little longer

    model.model.register_forward_pre_hook(note_positions)
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output * seen[at["positions"]] + cue[at["positions"]])


@torch.no_grad()
def draw_answers(lab: PlantedLab, count: int, seed: int) -> Generation:
    """The same distribution as generate(), with one pass of the model for each stretch up to the next key."""
    uniform = torch.rand(count, lab.length, generator=torch.Generator().manual_seed(seed))
    g, start, rows = Generation.empty(count, lab.length, "cpu"), 0, torch.arange(count)
    for end in (*(t + 1 for t in lab.keys), lab.length):
        ids = torch.cat([torch.tensor(PROMPT).expand(count, 1), g.tokens[:, :-1]], 1)
        logits = lab.model(ids[:, :end])  # (B, end, V)
        for t in range(start, end):
            drawn = Distribution(logits[:, t])
            token = drawn.pick(uniform[:, t])
            g.record(rows, torch.ones(count, dtype=torch.bool), t, token, drawn, stop=torch.empty(0, dtype=torch.long))
        start = end
    return g


def sample_planted(lab: PlantedLab, step: int, questions: int | None = None, answers: int | None = None) -> Rollouts:
    """A batch with the advantages of plain GRPO, and the true credit of every token. All questions are the same one."""
    s = lab.settings
    Q, G = questions or s.questions, answers or s.answers
    g = draw_answers(lab, Q * G, derived_seed("planted", s.seed, step))
    rows, section = g.tokens.tolist(), torch.full(g.mask.shape, OTHER, dtype=torch.uint8)
    section[:, lab.keys] = THINK
    reward = torch.tensor([lab.reward_of(None, row) for row in rows])
    texts = [[SYMBOLS[i] for i in row] for row in rows]
    known = {name: getattr(g, name) for name in ("mask", "log_prob", "entropy", "collision")}
    rollouts = Rollouts(problems=[None] * Q, prompt_ids=[PROMPT] * Q, responses=["".join(row) for row in texts], texts=texts, step=step,
                        group=torch.arange(Q * G) // G, ids=g.tokens, finished=torch.ones(Q * G, dtype=torch.bool), section=section,
                        kind=torch.full(g.mask.shape, WORD, dtype=torch.uint8), forward=Forward(lab.model, s.micro_batch),
                        scores=dict.fromkeys(("reward", "format", "answer", "reasoning"), reward),
                        generator=torch.Generator().manual_seed(derived_seed("planted credit", s.seed, step)), **known)
    return replace(rollouts, advantage=grpo(rollouts), true_credit=exact_credit(lab, rollouts))


def true_rewards(lab: PlantedLab, rollouts: Rollouts) -> torch.Tensor:
    """(B, T): what each token adds to the reward."""
    hit = rollouts.ids[:, lab.keys] == torch.tensor(lab.right)
    return torch.zeros_like(rollouts.log_prob).index_add(1, torch.tensor(lab.keys), hit / len(lab.keys))


@torch.no_grad()
def worths(lab: PlantedLab) -> dict[tuple[int, ...], float]:
    """What an answer with these first keys is worth: V of every prefix, by its keys alone."""
    V, keys = range(len(SYMBOLS)), lab.keys
    paths = list(itertools.product(V, repeat=len(keys) - 1))
    ids = torch.zeros(len(paths), keys[-1] + 1, dtype=torch.long)
    ids[:, 0], ids[:, [1 + t for t in keys[:-1]]] = PROMPT[0], torch.tensor(paths).view(len(paths), -1)
    probability = lab.model.logits(lab.model.model(ids)[:, keys]).double().softmax(-1).tolist()  # (paths, keys, V)
    worth = {path: sum(a == b for a, b in zip(path, lab.right)) / len(keys) for path in itertools.product(V, repeat=len(keys))}
    for j in range(len(keys) - 1, -1, -1):
        for i, path in enumerate(paths):
            if not any(path[j:]):  # one of those that begin alike
                worth[path[:j]] = sum(p * worth[(*path[:j], v)] for v, p in enumerate(probability[i][j]))
    return worth


def exact_credit(lab: PlantedLab, rollouts: Rollouts) -> torch.Tensor:
    """(B, T): V after the token minus V before, which is 0 between the keys."""
    worth, credit = worths(lab), torch.zeros_like(rollouts.log_prob)
    for b, row in enumerate(rollouts.ids[:, lab.keys].tolist()):
        credit[b, lab.keys] = torch.tensor([worth[tuple(row[:j + 1])] - worth[tuple(row[:j])] for j in range(len(row))])
    return credit
