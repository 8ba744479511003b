"""GRPO-Zero's rollout or update on the work of `benchmarks.speed`, which starts this file.

    python benchmarks/grpo_zero.py FOLDER CASE      FOLDER: a checkout of policy-gradient/GRPO-Zero

CASE is JSON: what, prompts, answers, new_tokens, stop_ids, micro_batch, dtype, threads and the
model's config. The last line printed is JSON: tokens and seconds. This file imports nothing of the
project, since GRPO-Zero has modules of the same names.
"""
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import torch
import torch.utils.checkpoint  # GRPO-Zero needs it and does not import it

sys.path.insert(0, sys.argv[1])
import grpo  # noqa: E402
from data_types import Episode, MiniBatch  # noqa: E402
from optimizer import MemoryEfficientAdamW  # noqa: E402
from qwen2_model import Qwen2Config, Transformer  # noqa: E402

CPU = torch.device("cpu")


def make_model(case: SimpleNamespace) -> Transformer:
    """Random weights: they do not change how long it takes."""
    torch.manual_seed(0)
    known = Qwen2Config.__dataclass_fields__
    config = Qwen2Config(**{key: value for key, value in case.config.items() if key in known})
    model = Transformer(config, CPU)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def rollout_of(case: SimpleNamespace, model: Transformer) -> Callable:
    """No text is read, and a stop token ends a row if the case has some."""
    end, pad = (case.stop_ids[0], 0) if case.stop_ids else (None, -1)
    stop_ids = torch.tensor(case.stop_ids)
    tokenizer = SimpleNamespace(eos_token="", eos_token_id=end, pad_token_id=pad,
                                detokenize=lambda ids: "")
    count = len(case.prompts)
    batch = MiniBatch(prefix=[""] * count, prefix_tokens=[[]] * count,
                      prefix_token_ids=case.prompts, numbers=[[]] * count, target=[0] * count)
    draw = torch.multinomial

    def multinomial(probs, num_samples):
        """GRPO-Zero knows one stop token: let it stand for all of them. Nobody draws the pad."""
        tokens = draw(probs, num_samples)
        if end is None:
            return tokens
        return tokens.clamp(min=1).masked_fill(torch.isin(tokens, stop_ids), end)

    def work():
        torch.multinomial = multinomial
        episodes = grpo.rollout(model, batch, tokenizer, case.new_tokens, case.answers,
                                lambda **_: {"reward": 0.0, "reward_info": {}}, CPU,
                                getattr(torch, case.dtype))
        torch.multinomial = draw
        # where prompts differ in length, it makes more tokens of the short ones than asked for
        return sum(min(len(e.generated_token_ids), case.new_tokens) for e in episodes), episodes
    return work


def update_of(case: SimpleNamespace, model: Transformer, episodes: list | None = None) -> Callable:
    """On random answers, or on these."""
    optimizer = MemoryEfficientAdamW(model.parameters(), lr=1e-12, betas=(0.9, 0.999),
                                     weight_decay=0.0, enabled=False)
    if episodes is None:
        ids = torch.randint(3, case.config["vocab_size"],
                            (len(case.prompts) * case.answers, case.new_tokens)).tolist()
        episodes = [Episode("", "", case.prompts[row // case.answers], [], answer, True, 0.0, {})
                    for row, answer in enumerate(ids)]
    for row, episode in enumerate(episodes):
        episode.prefix, episode.reward = str(row // case.answers), float(row % 2)

    def work():
        grpo.update_policy(model, optimizer, episodes, case.micro_batch, 0, 1.0, CPU,
                           getattr(torch, case.dtype))
        return len(episodes) * case.new_tokens, None
    return work


def step_of(case: SimpleNamespace, model: Transformer) -> Callable:
    rollout = rollout_of(case, model)

    def work():
        tokens, episodes = rollout()
        update_of(case, model, [Episode(**{**vars(episode), "generated_token_ids":
                                           episode.generated_token_ids[:case.new_tokens]})
                                for episode in episodes])()
        return tokens, None
    return work


def main() -> None:
    case = SimpleNamespace(**json.loads(sys.argv[2]))
    torch.set_num_threads(case.threads or torch.get_num_threads())
    works = {"rollout": rollout_of, "ragged rollout": rollout_of, "update": update_of,
             "step": step_of}
    work = works[case.what](case, make_model(case))
    clock = time.process_time if case.threads == 1 else time.perf_counter
    work()
    seconds = []
    while not seconds or sum(seconds) < 1 and len(seconds) < 9:
        start = clock()
        tokens, _ = work()
        seconds.append(clock() - start)
    print()
    print(json.dumps({"tokens": tokens, "seconds": median(seconds)}))


if __name__ == "__main__":
    main()
