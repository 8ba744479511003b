"""The line of a step in metrics.jsonl.

METRICS is the one list of what a line holds. To add a metric, give it a name and a sentence there,
and compute it where its numbers are known (`means_of` in train.py, `update` in grpo.py).
"""
from lab.engine.methods import Method, metrics_of
from lab.engine.errors import UserError
from lab.harness.record import PART, Json

# Every line has all of these names. An undefined number is null: in a step without an update these
# are most numbers of the update. Further names are the parts of the reward (reward_format, ...) and
# what a weighting or an advantage measures of itself.
METRICS = {
    "step": "number of the step, from 1",
    "reward": "mean reward of the answers",
    "success": "share of right answers; null where rewards are neither 0 nor 1, and the task does "
               "not say which answers are right",
    "tokens": "number of sampled tokens",
    "length": "mean number of tokens of an answer",
    "finished": "share of answers that ended before the limit",
    "groups_without_spread": "share of problems whose answers all got the same reward",
    "entropy": "mean over the tokens of -sum p log p, at temperature 1 over the whole vocabulary",
    "collision": "mean over the tokens of sum p^2, of the same distribution",
    "weight_factor": "c, by which the weights were multiplied (`--rescale`)",
    "weight_max": "the largest weight after that",
    "weight_note": "a sentence if the weights could not be rescaled",
    "extra_tokens": "sampled tokens that are not in the batch: those of the weighting, the "
                    "advantage and `--dynamic_sampling`",
    "extra_answers": "sampled answers that are not in the batch, of the same three",
    "N": "number of tokens that the loss divides by",
    "trained_tokens": "tokens of the answers that have a gradient",
    "learning_rate": "learning rate of the step",
    "loss": "loss of the whole batch, before the update",
    "gradient_norm": "norm of the gradient before clipping",
    "gradient_norm_last": "the same in the last pass over the batch, with `--epochs`",
    "sampler_gap": "mean absolute difference of log-probs between training and sampling, at "
                   "temperature 1",
    "ratio_mean": "mean over the trained tokens of the ratio of new to old probability in the "
                  "last pass, with `--epochs` or `--parts`",
    "clipped_share": "share of trained tokens that are clipped in the last pass, with `--epochs` "
                     "or `--parts`",
    "kl": "mean estimate over the trained tokens of the KL to the initial model, with `--kl`",
    "skipped": "why the model was not updated, or null",
    "rollout_seconds": "seconds of sampling and scoring",
    "credit_seconds": "seconds of computing advantages and weights",
    "update_seconds": "seconds of the update, with the measurement of the change",
    "record_seconds": "seconds of writing the credit file",
    "seconds": "seconds of the step",
    "processor_seconds": "the same of the processor's time, over all threads",
    "rollout_tokens_per_second": "sampled tokens in a second of rollout_seconds",
    "peak_memory_bytes": "most memory so far, of the GPU or of the process",
}
# if the weighting and the advantage both have one of these, the line has the sum
SAMPLED = ("extra_tokens", "extra_answers")


def with_all_metrics(line: Json, advantage_method: Method, weighting: Method) -> Json:
    """The line of a step as the loop made it, which has what the weighting measured of itself, with
    METRICS and what the advantage measured of itself."""
    credit = metrics_of(advantage_method)
    line, extra = dict(line), {}
    for name in SAMPLED:
        sampled_by = credit.pop(name, 0), line.pop(name, 0)
        extra[name] = sum(count or 0 for count in sampled_by)  # None if a method was not called
    of_loop = {*METRICS, *(name for name in line if name.startswith(PART))} - {*SAMPLED}
    for name in of_loop & (credit | metrics_of(weighting)).keys():
        raise UserError(f"a weighting or an advantage has a metric {name}, but metrics.jsonl has "
                        "one of this name already: give it another name")
    return dict.fromkeys(METRICS) | line | credit | extra
