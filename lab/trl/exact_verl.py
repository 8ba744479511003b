"""What do verl's advantages and losses do on average? Its functions, without the actor's loop.

    pip download verl==0.9.1 --no-deps && unzip -q verl-0.9.1-*.whl -d verl_files
    python -m lab.trl.exact_verl verl_files

verl is not installed. Three of its files are loaded beside empty modules for the rest. A batch has
one group of eight answers in a world of lab/trl/exact_trl.py, and one update is made. Not verl's
own are mini-batches, the KL, rollout weights, and that the reward stands at the last token.
"""
import importlib.util
import sys
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from lab.exact import compared
from lab.trl.exact_trl import KINDS, groups_of, log_probs
from lab.worlds import Numbers, World, worlds_of

SIZE, SEEDS, PLAIN = 8, 2, ("grpo", False, "seq-mean-token-sum")
EMPTY = {  # what the three files import from elsewhere
    "omegaconf": ["DictConfig"], "tensordict": ["TensorDict"], "verl": [], "verl.trainer": [],
    "verl.trainer.config": ["AlgoConfig"], "verl.workers": [], "verl.utils": [],
    "verl.workers.config": ["ActorConfig"], "verl.utils.import_utils": ["deprecated"],
    "verl.utils.device": ["get_device_name", "get_torch_device"]}
ROWS = [(name, by_std, mode) for name, by_std, mode in (
    ("grpo", True, "token-mean"), ("grpo", False, "token-mean"), PLAIN,
    ("grpo", True, "seq-mean-token-sum-norm"), ("grpo", False, "seq-mean-token-sum-norm"),
    ("grpo", True, "seq-mean-token-mean"), ("rloo", False, "token-mean"),
    ("rloo", False, "seq-mean-token-sum"), ("opo", False, "seq-mean-token-sum"),
    ("reinforce_plus_plus", False, "token-mean"), ("gpg", False, "token-mean"))]


def core_algos(folder: Path) -> Any:
    for name, values in EMPTY.items():
        sys.modules[name] = empty = ModuleType(name)
        empty.__dict__.update(dict.fromkeys(values, type(name, (), {})))
    sys.modules["verl.utils.import_utils"].deprecated = (  # type: ignore[attr-defined]
        lambda *_: lambda function: function)
    sys.modules["verl.utils.device"].get_device_name = lambda: "cpu"  # type: ignore[attr-defined]
    groupwise = loaded(folder, "verl.utils.groupwise")
    vars(sys.modules["verl.utils"]).update(as_torch_index=groupwise.as_torch_index,
                                           group_mean_std=groupwise.group_mean_std)
    vars(sys.modules["verl.utils"])["torch_functional"] = loaded(
        folder, "verl.utils.torch_functional")
    return loaded(folder, "verl.trainer.ppo.core_algos")


def loaded(folder: Path, name: str) -> Any:
    spec: Any = importlib.util.spec_from_file_location(
        name, folder / f"{name.replace('.', '/')}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def update(verl: Any, world: World, rows: Numbers, setting: tuple[str, bool, str]) -> torch.Tensor:
    """(P,): the gradient of minus the loss of one group."""
    name, by_std, mode = setting
    batch = world.rollouts.of_rows(torch.tensor(rows))
    mask, config = batch.mask.double(), Settings(norm_adv_by_std_in_grpo=by_std)
    advantages, _ = verl.get_adv_estimator_fn(name)(
        token_level_rewards=batch.paid.double(), response_mask=mask, config=config,
        index=np.array(["a problem"] * len(rows), dtype=object),
        **({"norm_adv_by_std_in_grpo": by_std} if name == "grpo" else {}))
    logits = world.logits.detach().requires_grad_()
    log_prob = log_probs(world, logits)[[*rows]]
    loss, _ = verl.compute_policy_loss_vanilla(
        log_prob.detach(), log_prob, advantages, mask, mode, config)
    return -torch.autograd.grad(loss, logits)[0].flatten()


class Settings(SimpleNamespace):
    """verl's defaults, as far as the functions ask."""
    clip_ratio = clip_ratio_low = clip_ratio_high = 0.2
    gamma, f_norm, global_batch_info = 1.0, 1.0, dict[str, Any]()

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def main(folder: Path) -> None:
    [about] = folder.glob("verl-*.dist-info")
    print(f"{about.stem}, numbers over {' '.join(map(str, PLAIN))}\n"
          f"{'':52s} cosine, median, length, noise, largest", flush=True)
    verl, worlds = core_algos(folder), worlds_of({"loss_norm": "constant"}, SEEDS, KINDS)
    plain = dict[World, float]()
    for setting in sorted(ROWS, key=lambda one: one != PLAIN):
        means = []
        for world in worlds:
            groups = groups_of(world, SIZE, world.log_prob.detach())
            found = torch.stack([update(verl, world, rows, setting) for rows in groups])
            mean = compared(world, {(rows,): chance for rows, chance in groups.items()}, found)
            noise = plain.setdefault(world, mean.noise)
            means.append(mean._replace(noise=mean.noise / noise))
        cosines, lengths = [one.cosine for one in means], [one.length for one in means]
        noises = [one.noise for one in means]
        print(f"{' '.join(map(str, setting)):52s} {min(cosines):.4f} {median(cosines):.4f} "
              f"{min(lengths):.4f} to {max(lengths):.4f} {median(noises):.2f} {max(noises):.2f}",
              flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
