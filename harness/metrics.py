"""A step's line of metrics.jsonl: numbers of the batch, of credit and update, of time."""
from engine.rollouts import Rollouts
from harness.checked import joined, metrics_of
from harness.clock import Clock


def step_metrics(clock: Clock, rollouts: Rollouts, update: dict, advantage, weights: dict,
                 s) -> dict:
    """`update` are the metrics of the update, `weights` those of the weights; an advantage has its
    own. None of them may take the name of another."""
    batch = batch_metrics(rollouts)
    credit = credit_metrics(metrics_of(advantage, f"the advantage {s.advantage}"), weights)
    speed = clock.metrics(batch["tokens"], update["trained_tokens"], rollouts.mask.device)
    return joined({"step": clock.step}, credit, batch, update, speed)


def batch_metrics(rollouts: Rollouts) -> dict:
    """Means over answers, and of entropy and collision over tokens."""
    mean = {name: value.mean().item() for name, value in rollouts.scores.items()}
    reward = rollouts.reward.view(len(rollouts.prompt_ids), -1)  # (problems, answers)
    without_spread = (reward == reward[:, :1]).all(1)
    tokens = rollouts.mask.sum().item()
    return {"reward": mean["reward"], "reward_format": mean["format"],
            "reward_answer": mean["answer"], "reward_reasoning": mean["reasoning"],
            "success": mean["answer"], "tokens": tokens, "length": tokens / len(rollouts.texts),
            "finished": rollouts.finished.float().mean().item(),
            "groups_without_spread": without_spread.float().mean().item(),
            "entropy": rollouts.entropy.sum().item() / tokens,
            "collision": rollouts.collision.sum().item() / tokens}


def credit_metrics(advantage: dict, weights: dict) -> dict:
    """Both together; tokens that they sampled for themselves are added up."""
    extra = 0
    for metrics in (advantage, weights):
        extra += metrics.pop("extra_tokens", 0)
    return joined(weights, advantage, {"extra_tokens": extra})
