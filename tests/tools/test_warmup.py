"""The teacher, and the model that ships."""
import hashlib
import json
import random
import re

import pytest
import torch

import train
from tools import warmup
from conftest import ROOT
from countdown_task import Problem, held_out, score
from engine.tokens import encode_prompt, load_tokenizer
from qwen2_model import Qwen2
from engine.rollouts import sample_answers, score_answers
from tools.warmup import candidates, demonstration, make_tokenizer, orthogonal

TINY = ROOT / "models" / "tiny"


def demonstrations(count, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        problem = warmup.TASK.make_problem(rng, lambda p: not held_out(p))
        yield problem, "".join(text for text, _ in demonstration(problem, rng))


def test_demonstrations_are_well_formed_right_and_honest():
    claims = solved = 0
    for problem, text in demonstrations(300):
        result = score(text, problem.numbers, problem.target)
        claim = any(hit.split("{")[0] in text for hit in warmup.HIT)
        assert result["format"] == 1 and result["reasoning"] == 1 and result["answer"] == claim
        claims, solved = claims + claim, solved + result["answer"]
    assert 0.3 < solved / 300 < 0.6 and claims == solved


def test_one_token_a_word_and_every_demonstration_can_be_spelled():
    tokenizer, longest = make_tokenizer(), 0
    for problem, text in demonstrations(300):
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
        longest = max(longest, len(encoded.ids))
        numbers = [int(token) for token in encoded.tokens if token.strip().isdigit()]
        assert numbers == [int(digits) for digits in re.findall("[0-9]+", text)]
        assert encode_prompt(tokenizer, warmup.TASK.prompt_for(problem), "")
    assert longest <= warmup.RECIPE["max_new_tokens"]


def test_the_loss_weights_fall_on_results_verdicts_and_answers():
    """Weight 4 on two results a try, 6 on its verdict, 2 on its count and on the answer."""
    pieces = demonstration(Problem((3, 5, 7), 22), random.Random(1))
    by_weight = {weight: [text for text, w in pieces if w == weight] for weight in (4, 6, 2)}
    tries = len(by_weight[6])
    assert tries >= 1 and len(by_weight[4]) == 2 * tries and all(text.strip().isdigit() for text in by_weight[4])
    assert by_weight[2][:-1] == warmup.ORDINALS[:tries] and by_weight[2][-1].endswith("</answer><|im_end|>")


def test_candidates_of_two_numbers_by_hand():
    found = {c.expression: c.value for c in candidates((2, 6))}
    assert found == {"6 + 2": 8, "6 * 2": 12, "6 - 2": 4, "6 / 2": 3}


def test_the_teacher_does_not_look_at_the_solution():
    """How likely it tries an expression first depends on the distance to the target alone, not on hitting it:
    at 10 + distance, a hit is twice as likely as a miss by 10."""
    rng, first = random.Random(0), []
    problem = Problem((2, 6), 12)  # values 8, 12, 4, 3: weights 1/14, 1/10, 1/18, 1/19
    for _ in range(20_000):
        first.append(warmup.order_of_tries(problem, rng)[0].value)
    weights = {8: 1 / 14, 12: 1 / 10, 4: 1 / 18, 3: 1 / 19}
    for value, weight in weights.items():
        assert first.count(value) / 20_000 == pytest.approx(weight / sum(weights.values()), abs=0.015)


def test_muons_update_is_nearly_orthogonal():
    torch.manual_seed(0)
    for shape in ((8, 8), (24, 8), (8, 24)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.5 and values.max() < 1.3


def test_the_shipped_model_is_the_one_its_readme_describes():
    checksum = hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest()
    assert checksum in (TINY / "README.md").read_text()
    assert json.loads((TINY / "recipe.json").read_text()) == warmup.RECIPE
    tokenizer = load_tokenizer(TINY)
    assert tokenizer.to_str() == make_tokenizer().to_str()
    assert sum(p.stat().st_size for p in TINY.iterdir()) < 5_000_000


def test_transformers_reads_the_shipped_folder_the_same_way():
    transformers = pytest.importorskip("transformers")
    problem, text = next(demonstrations(1))
    ours = load_tokenizer(TINY)
    ids = encode_prompt(ours, warmup.TASK.prompt_for(problem), "") + ours.encode(text).ids
    theirs = transformers.AutoTokenizer.from_pretrained(TINY)
    assert theirs(ours.decode(ids, skip_special_tokens=False)).input_ids == ids and theirs.eos_token_id == 2
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(TINY)(torch.tensor([ids])).logits
        torch.testing.assert_close(Qwen2.from_pretrained(TINY)(torch.tensor([ids])), logits, atol=1e-4, rtol=0)


def test_the_shipped_model_starts_where_there_is_something_to_learn():
    """Held-out success between 15% and 40%, with format and arithmetic in place."""
    settings = train.make_settings({"model": str(TINY)})
    model, tokenizer, task = Qwen2.from_pretrained(TINY), load_tokenizer(TINY), warmup.TASK
    rollouts = sample_answers(model, tokenizer, task, task.held_out_problems(400), 1,
                              max_new_tokens=settings.max_new_tokens, seed=1)
    rollouts = score_answers(rollouts, tokenizer, task)
    mean = {name: values.mean().item() for name, values in rollouts.scores.items()}
    assert 0.15 < mean["answer"] < 0.40 and mean["format"] > 0.97 and mean["reasoning"] > 0.9
    assert rollouts.finished.float().mean() > 0.97
