"""Small models and run folders that the tests share; nothing here is downloaded."""
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
# Before torch is imported, and for the programs that a test starts: threads of several processes on
# the same cores wait for one another, and a test takes ten times as long.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
INSTALL = "to run it: pip install -r tests/requirements.txt"  # why a test is skipped


def one_of(count, cases):
    """One of so many cases of a long table; the others are slow tests, which .ci/run runs."""
    found = []
    for number, case in enumerate(cases):
        given = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*given, marks=[pytest.mark.slow] if number % count else []))
    return found


def project_files(pattern, root=ROOT):
    """The files that match and that git keeps; all that match where there is no checkout. What a
    user has laid beside them is not the project's."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True
                            ).stdout if shutil.which("git") else ""
    kept = {root / name for name in listed.split("\0") if name}
    return sorted(path for path in root.glob(pattern) if path in kept or not kept)


SLOW = {"test_trl_trainer.py", "test_docs.py", "test_idea.py", "test_course.py"}


def pytest_collection_modifyitems(items):
    """Slow files first: with several processes the last tests should be short, so that none waits
    for another, and what the tests of a file share is made by one of them."""
    items.sort(key=lambda item: item.path.name not in SLOW)

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from countdown_task import TAGS, Problem
from lab.engine.methods import ADVANTAGES, MITIGATIONS, make
from lab.engine.model_folder import write_model_folder
import lab.credit.weightings  # noqa: F401  fills the lists of choices
from grpo import grpo
from lab.harness.build import load_policy
from lab.engine.model import ModelConfig, Qwen2
from lab.harness import made_of
from lab.harness.flags import check_value, flags_of
from lab.engine.errors import UserError
from lab.engine.policy import Forward
from lab.engine.rollouts import Rollouts, score_answers
from lab.engine.sampler import generate
from lab.harness.settings import make_settings
from lab.engine.tokens import ANSWER, NUMBER, byte_alphabet, encode_prompt
from lab.tools.demonstrations import make_tokenizer

# The tests are of the project's own methods. What a user has added to them is tested for what it
# returns (test_every_method.py), and is in no other test's way.
LISTED = set(re.findall(r"^\| `(\w+)` \|",
                        (ROOT / "docs/reference/methods.md").read_text("utf-8"), re.M))
OWN = [(choices, name, known.pop(name)) for choices in (MITIGATIONS, ADVANTAGES)
       for known in choices.data.maps  # the lab's, and the book's
       for name in known.keys() - LISTED
       if getattr(known[name], "__module__", "credit") in ("mitigations", "grpo", "credit")]

if torch.backends.cpu.get_cpu_capability() != "AVX512":
    # Attention in bfloat16 takes oneDNN's matrix products where the CPU has AMX, and fails unless
    # torch's own kernels use AVX512. ATEN_CPU_CAPABILITY lowers only torch's: lower oneDNN's, too.
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"

imports_of = made_of.imports_of
known_imports = functools.cache(lambda path, *places: [*imports_of(path)])
# Every run asks what the project's files import, and no test changes these.
made_of.imports_of = lambda path: (known_imports(path, os.getcwd(), *sys.path)
                                   if ROOT in path.parents else imports_of(path))

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]


def hand_made(mask, **known):
    """A batch with the given (B, T) tensors; what is not given is there, and dull."""
    mask = torch.as_tensor(mask)
    B, T = mask.shape
    zeros, code = torch.zeros(B, T), torch.zeros(B, T, dtype=torch.uint8)
    group = known.get("group", torch.zeros(B, dtype=torch.long))
    questions, reward = int(group.max()) + 1, torch.zeros(B)
    scores = dict.fromkeys(("reward", "format", "answer", "reasoning"), reward)
    dull = dict(problems=[None] * questions, prompt_ids=[[5]] * questions, answers=[""] * B,
                texts=[["x"] * int(n) for n in mask.sum(1)], group=group,
                ids=torch.ones(B, T, dtype=torch.long), finished=torch.ones(B, dtype=torch.bool),
                log_prob=zeros - 1.0, entropy=zeros + 1.0, collision=zeros + 0.5, section=code,
                kind=code, advantage=zeros, step=1, scores=scores,
                generator=torch.Generator().manual_seed(0))
    return Rollouts(mask=mask, **{**dull, **known})


def one_row(**known):
    """A batch of one answer: what it is given are lists of numbers, one for each token."""
    tokens = len(next(iter(known.values())))
    return hand_made([[True] * tokens],
                     **{name: torch.tensor([values]) for name, values in known.items()})


def looking(rollouts, **seen):
    """The batch with these hidden states or this attention to look at."""
    return dataclasses.replace(rollouts, forward=SimpleNamespace(look=lambda *_, **__: seen))


def fill_beyond_the_mask(rollouts):
    """With numbers that would be noticed."""
    for name, value in dict(log_prob=-9.0, entropy=50.0, collision=0.7, advantage=4.0, ids=7,
                            section=ANSWER, kind=NUMBER).items():
        getattr(rollouts, name).masked_fill_(~rollouts.mask, value)


def make_weighting(name, flags, policy):
    """The weighting with these flags, the others at their defaults."""
    function = MITIGATIONS[name]
    defaults = {flag: meta.default for flag, meta in flags_of(function).items()}
    return make(function, defaults | flags, policy)


def refusal(function, *arguments) -> str:
    """What is said to who asks for it: one line, however long what was given is."""
    with pytest.raises(UserError) as error:
        function(*arguments)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    return str(error.value)


class StateIdea:
    """An idea with a state."""

    def __init__(self, policy, *, speed: float = 0.5):
        self.mean, self.speed, self.metrics = torch.zeros(1), speed, {}

    def __call__(self, rollouts, policy):
        self.mean = self.mean + self.speed * (rollouts.entropy.mean() - self.mean)
        return 1 + (rollouts.entropy - self.mean).abs()

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, tensors):
        self.mean = tensors["mean"]


def put_in(monkeypatch, function, name):
    """Make it a choice of --mitigation for the time of a test."""
    function.__name__ = name
    monkeypatch.setitem(MITIGATIONS, name, function)


def assert_bounded(flags):
    """Every number among these flags, by program and name, has bounds, and its defaults lie
    within."""
    for name, flag in flags.items():
        if flag.type not in (int, float):
            continue
        largest = 10 ** 18 if flag.type is int else 1e30
        for value in (largest, -largest, float("inf"), float("nan")):
            with pytest.raises(UserError, match="should be"):
                check_value(name, value, flag)
        for value in (flag.default, getattr(flag, "quick", None)):
            check_value(name, value, dataclasses.replace(flag, default=None, kind=flag.type))


def copied(model):
    copy = Qwen2(model.config)
    copy.load_state_dict(model.state_dict())
    return copy


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture
def rollouts(small_model):
    """Two questions, three answers each, of different lengths; rewards spread in the first group
    only."""
    g = generate(small_model, PROMPTS, answers=3, max_new_tokens=14, seed=2,
                 stop_ids=(2, 4, 9, 17, 30, 31, 33))
    reward = torch.tensor([1.1, 0.1, 0.06, 0.1, 0.1, 0.1])
    assert len(set(g.mask.sum(1).tolist())) > 2
    known = {name: value for name, value in vars(g).items() if name not in ("tokens", "mask")}
    scores = dict.fromkeys(("reward", "format", "reasoning"), reward)
    batch = hand_made(g.mask, ids=g.tokens, prompt_ids=PROMPTS, group=torch.arange(6) // 3, **known,
                      scores=scores | {"answer": (reward > 1).float()}, section=g.mask.byte(),
                      kind=g.mask.byte(), forward=Forward(small_model, 4))
    return dataclasses.replace(batch, advantage=grpo(batch))


# two questions, three answers each: right, wrong, without an answer; one token, no tags, right
SPOKEN = [
    " 3 + 5 = 8, 8 + 7 = 15 hit.</think>\n<answer> ( 3 + 5 ) + 7</answer><|im_end|>",
    " first 3 * 5 = 15, 15 - 7 = 8 wrong.</think>\n<answer> ( 3 * 5 ) - 7</answer><|im_end|>",
    " first 3 * 5 = 15, 15 - 7 = 8 wrong. now second 3 + 7 = 10", "<|im_end|>",
    " hmm. stop here.<|im_end|>",
    " hmm. 4 * 2 = 8, 8 - 6 = 2 hit.</think>\n<answer> ( 4 * 2 ) - 6</answer><|im_end|>"]
ASKED = [Problem((3, 5, 7), 15), Problem((2, 4, 6), 2)]


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """The shipped model, ready to be asked by a weighting."""
    return load_policy(make_settings({"model": str(ROOT / "models/tiny"), "max_new_tokens": 60,
                                      "questions": 2, "answers": 3, "threads": 1}))


def spoken(policy, texts=SPOKEN, problems=ASKED, micro_batch=64, **known):
    """These texts as if the model had sampled them, with its own numbers at every token."""
    ids = [policy.tokenizer.encode(text).ids for text in texts]
    T = max(map(len, ids))
    mask = torch.tensor([[True] * len(row) + [False] * (T - len(row)) for row in ids])
    group = torch.arange(len(ids)) // (len(ids) // len(problems))
    prompts = [encode_prompt(policy.tokenizer, policy.task.prompt_for(problem), "")
               for problem in problems]
    log_prob, entropy, collision = torch.zeros(3, *mask.shape)
    for b, row in enumerate(ids):
        prompt, n = prompts[group[b]], len(row)
        with torch.no_grad():
            logits = policy.model(torch.tensor([prompt + row]))[0, len(prompt) - 1:-1]
        log_probs = logits.log_softmax(-1)
        log_prob[b, :n] = log_probs[range(n), row]
        entropy[b, :n] = -(log_probs.exp() * log_probs).sum(-1)
        collision[b, :n] = log_probs.exp().square().sum(-1)
    padded = torch.tensor([row + [0] * (T - len(row)) for row in ids])
    sampled = Rollouts(problems, prompts, group, padded, mask, torch.ones_like(mask[:, 0]),
                       log_prob, entropy, collision)
    batch = score_answers(sampled, policy.tokenizer, policy.task)
    usual = dict(advantage=grpo(batch), step=20, generator=torch.Generator().manual_seed(3),
                 forward=Forward(policy.model, micro_batch))
    return dataclasses.replace(batch, **{**usual, **known})


def credit_columns(lengths, group, **known):
    """The columns of a credit file, dull where nothing is given: every token ' 1', p = 0.5 of two,
    advantage 1, weight 1."""
    n, answers, groups = sum(lengths), len(lengths), max(group) + 1
    nothing = np.zeros(answers)
    dull = dict(token_id=np.zeros(n), log_prob=np.full(n, np.log(0.5)),
                entropy=np.full(n, np.log(2)), collision=np.full(n, 0.5), weight=np.ones(n),
                advantage=np.ones(n), section=np.zeros(n), kind=np.zeros(n),
                episode_start=np.cumsum([0, *lengths[:-1]]), group=group,
                finished=np.ones(answers), reward=nothing, reward_format=nothing,
                reward_answer=nothing, reward_reasoning=nothing,
                prompt_ids=np.zeros(2 * groups), prompt_start=2 * np.arange(groups))
    types = dict(token_id=np.int32, section=np.uint8, kind=np.uint8, episode_start=np.int32,
                 group=np.int32, finished=bool, prompt_ids=np.int32, prompt_start=np.int32)
    return {name: np.asarray(value).astype(types.get(name, np.float32))
            for name, value in {**dull, **known}.items()}


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def cut(path, count):
    """Keep so many lines of a file, the first."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))


def write_log(folder, steps, config=(), metrics=(), evaluations=()):
    """A run folder with these credit files (columns by step), settings and lines. A setting that is
    None is not on record."""
    (folder / "credit").mkdir(parents=True)
    shutil.copy(ROOT / "models/tiny/tokenizer.json", folder)
    usual = {"mitigation": "none", "advantage": "grpo", "seed": 0, "steps": len(steps),
             "model": "models/tiny", "task": "countdown_task"}
    known = {name: value for name, value in (usual | dict(config)).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(known))
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "evaluations.jsonl", evaluations)
    for step, columns in steps.items():
        np.savez_compressed(folder / f"credit/step_{step:06d}.npz", **columns)
    return folder


def evaluation(step, answer, mode="sampled"):
    return {"step": step, "mode": mode, "success": sum(answer) / len(answer), "success_low": 0.0,
            "success_high": 1.0, "answer": answer, "format_mean": 0.5, "finished_mean": 0.75,
            "length_mean": 12.0, "shown": []}


@pytest.fixture
def undrawn(monkeypatch):
    """Every picture is saved as a single pixel, for tests of what stands around pictures. To draw
    them takes most of an analysis."""
    def save(figure, path, **_):
        imsave(path, np.zeros((1, 1, 3)), format="png")

    from matplotlib.image import imsave  # most tests need no matplotlib
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)


@pytest.fixture(scope="session")
def small_model():
    """A model with untidy weights: biases and norms away from their defaults, logits far from
    uniform."""
    torch.manual_seed(0)
    model = Qwen2(ModelConfig(vocab_size=50, head_dim=16, tie_word_embeddings=True,
                              eos_token_id=(2,), **SMALL))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


@pytest.fixture(scope="session")
def learner(tmp_path_factory):
    """A folder with an untrained model and the tiny model's tokenizer, quick enough to train in a
    test. Its tags are whole tokens: random answers meet one now and then, so rewards differ."""
    folder = tmp_path_factory.mktemp("learner")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=tokenizer.get_vocab_size(), head_dim=16,
                         tie_word_embeddings=True, eos_token_id=(2,), max_position_embeddings=1024,
                         **SMALL)
    write_model_folder(Qwen2(config), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    recipe = dict(prompt="short", numbers="3", max_number=15, max_target=99, max_result=150,
                  threads=1, learning_rate=1e-3, questions=4, answers=4, max_new_tokens=40,
                  micro_batch=8, steps=6, eval_tasks=24, eval_every=3, checkpoint_every=2)
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return folder


@pytest.fixture(scope="session")
def whole(learner, tmp_path_factory):
    """A run that was never stopped; what it printed lies beside it."""
    from runs import WHOLE, run  # most tests need no run
    folder = tmp_path_factory.mktemp("whole") / "run"
    printed = run("--model", learner, "--out", folder, *WHOLE).stdout
    (folder.parent / "printed").write_text(printed)
    return folder


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """A run that the tools read: its weights differ between tokens, its answers in length, and
    those that were cut off are dropped."""
    import lab.run as train  # most tests need no run
    from runs import SHORT
    folder = tmp_path_factory.mktemp("recorded") / "run"
    train.train_beyond([*SHORT, "--max_new_tokens", "40", "--mitigation", "outcome_conditional",
                "--loss_norm", "sequence", "--drop_unfinished",
                "--out", str(folder)])
    (folder / "checkpoints/step_backup").mkdir()  # a name that people gave
    return folder


@pytest.fixture(scope="session")
def bare_model(tmp_path_factory):
    """A folder without a recipe.json, whose tokenizer can spell everything, byte by byte."""
    folder = tmp_path_factory.mktemp("bare")
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(byte_alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True)
                                  for name in ("<|im_start|>", "<|im_end|>")])
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=tokenizer.get_vocab_size(), hidden_size=32,
                         intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=16, tie_word_embeddings=True)
    write_model_folder(Qwen2(config), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def stopped(whole, tmp_path):
    """The run `whole` as a kill after the fifth of its six steps leaves it."""
    folder = shutil.copytree(whole, tmp_path / "stopped")
    shutil.rmtree(folder / "checkpoints/step_000006")
    cut(folder / "metrics.jsonl", 5)
    cut(folder / "evaluations.jsonl", 4)
    return folder
