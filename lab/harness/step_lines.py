"""The line of a step in metrics.jsonl.

metrics.json beside this file is the one list of what a line holds. To add a metric, give it a name
and a sentence there, and compute it where its numbers are known (`means_of` in train.py, `summary`
in lab/engine/update.py).
"""
from pathlib import Path

from lab.engine.methods import Method, metrics_of
from lab.engine.errors import UserError, read_json
from lab.harness.record import PART, Json

# Every line has all of these names. An undefined number is null: in a step without an update these
# are most numbers of the update. Further names are the parts of the reward (reward_format, ...) and
# what a weighting or an advantage measures of itself.
METRICS: dict[str, str] = read_json(Path(__file__).with_name("metrics.json"))
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
