"""How other trainers write the answers of a run: each line or row becomes a line of ours.

    TRL        completions/*.parquet               texts, a column for each reward, advantages
    verl       rollout_data_dir/*.jsonl            texts, score
    prime-rl   token_exports/step_N/rank_R.jsonl   tokens of prompt and answer, numbers of each
    NeMo-RL    train_data_stepN.jsonl              tokens of prompt and answer, numbers of each
    AReaL      rollout/VERSION/TASK.jsonl          texts, reward

bridges/your_own_run.md says what becomes of their fields. A file is read line by line.
"""
import math
import re
from collections.abc import Iterator
from pathlib import Path

from engine.errors import UserError, is_file
from engine.tokens import CHATML, SECTIONS
from harness.credit_file import LARGEST, column_of
from harness.files import lines_in, parse_object
from harness.flags import shortened

PER_TOKEN = ("log_prob", "entropy", "collision", "weight", "advantage", "ratio")


def is_number(value, low: float = -LARGEST, high: float = LARGEST) -> bool:
    return type(value) in (int, float) and low <= value <= high  # not so for NaN


def are_numbers(name: str):
    """A test of one number for an answer, or one for each token, in the range of a column."""
    low, high = column_of(name)[2:4]
    return lambda value: all(is_number(x, low, high)
                             for x in (value if isinstance(value, list) else [value]))


def are_ids(value) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2 ** 24 for i in value)


def is_text(value) -> bool:
    """A text, or messages. One that thinks or calls tools may have no content."""
    return isinstance(value, str) or isinstance(value, list) and value != [] and all(
        isinstance(m, dict) and isinstance(m.get("role"), str)
        and isinstance(m.get("content"), str | None) and are_calls(m.get("tool_calls"))
        for m in value)


def are_calls(value) -> bool:
    return value is None or isinstance(value, list) and all(isinstance(c, dict) for c in value)


TEXT, IDS = ("a text or a list of messages", is_text), ("a list of token numbers", are_ids)
YES_OR_NO = ("true or false", lambda value: type(value) is bool)
FIELDS = {  # of a line: what it has to be, in words, and a test; null is as if it were not there
    "step": ("a whole number", lambda value: type(value) is int and 0 <= value < 2 ** 30),
    "group": ("a whole number or a text", lambda value: type(value) in (int, str)),
    "prompt": TEXT, "completion": TEXT, "prompt_ids": IDS, "token_ids": IDS,
    "reward": ("a number", is_number),
    "finished": YES_OR_NO, "solved": YES_OR_NO,
    "sections": (f"a list of {', '.join(SECTIONS)}", lambda value: isinstance(value, list)
                 and all(name in SECTIONS for name in value)),
    **{name: ("a number, or one for each token, that this column can hold", are_numbers(name))
       for name in PER_TOKEN}}


def from_trl(line: dict, where: str) -> dict:
    """Four columns are its own. Each other one of numbers is a reward function's, also if that is
    called reward, weight or group; None and nan are 0, as they are there."""
    own = {name: line.get(name) for name in ("step", "prompt", "completion", "advantage")}
    others = [value for name, value in line.items() if name not in own]
    return {**own, "reward": sum(filter(is_number, others)) if others else None}


def from_verl(line: dict, where: str) -> dict:
    """It leaves special tokens out. Those of ChatML are put back where a line names a role. Its uid
    says which problem, then which of its answers: ID_2_0. Its acc may be a score."""
    prompt, acc = line["input"], line.get("acc")
    if isinstance(prompt, str) and re.match("(system|user)\n(?!\n)", prompt):
        begin, end = CHATML
        prompt = re.sub("(^|\n)(system|user|assistant)\n", lambda role: (
            f"{role[1] and end}{role[1]}{begin}{role[2]}\n"), prompt)
    uid = line.get("uid")
    return {"step": line.get("step"), "prompt": prompt, "completion": line["output"],
            "reward": line["score"], "solved": bool(acc) if acc in (0, 1) else None,
            "group": re.sub("(_[0-9]+){2}$", "", uid) if isinstance(uid, str) else uid}


def trained_part(line: dict, mask, where: str):
    """Where prompt and answer are one sequence, the answer goes from the first token that was
    trained on to the last. Returns the prompt, and what takes that part of a field."""
    ids = line["token_ids"]
    are_lists = (are_ids(ids) and isinstance(mask, list) and len(mask) == len(ids)
                 and all(kept in (0, 1) for kept in mask))
    trained = [t for t, kept in enumerate(mask) if kept] if are_lists else []
    if not trained:
        raise UserError(f"{where}: its token_ids should be {IDS[0]}, and its loss mask as many yes "
                        "and no, with a token that was trained on")
    first, end = trained[0], trained[-1] + 1

    def part(name: str, default=None):
        """prime-rl writes null for what it has not, and for a number that is not finite."""
        values = line.get(name)
        if values in (None, [None] * len(ids)):
            return default
        if not isinstance(values, list) or len(values) != len(ids):
            raise UserError(f"{where}: its {name} should be a list of {len(ids)}, as its token_ids")
        values = values[first:end]
        return None if default is None and None in values else values

    return ids[:first], part


def from_prime_rl(line: dict, where: str) -> dict:
    """What was not trained on between the answer's tokens, what a tool said, has weight 0."""
    prompt, part = trained_part(line, line["loss_mask"], where)
    ids, mask = part("token_ids"), part("loss_mask")
    n = len(ids)
    factors = zip(part("rl_weights", [1.0] * n), mask, part("is_masked", [False] * n))
    return {"step": line.get("export_step", line.get("step")), "reward": part("rewards", [None])[0],
            "prompt_ids": prompt, "token_ids": ids,
            "weight": [weight if kept and not dropped else 0 for weight, kept, dropped in factors],
            "advantage": part("advantages"), "log_prob": part("inference_logprobs"),
            "entropy": part("entropy"), "ratio": part("importance_ratio")}


def from_nemo_rl(line: dict, where: str) -> dict:
    """Each field is a list of one. The step stands in the file's name alone, and sequences are
    padded. Log-probs of the trainer that are 0 throughout were not computed."""
    line = {name: value[0] if isinstance(value, list) and len(value) == 1 else value
            for name, value in line.items()}
    prompt, part = trained_part(line, line["token_loss_mask"], where)
    sampled, trainers = (part(name) or [] for name in ("generation_logprobs", "prev_logprobs"))
    scale = line.get("sample_loss_mask")
    step = re.search("train_data_step([0-9]+)[.]jsonl", where)
    has_ratio = sampled and any(trainers) and all(map(is_number, sampled + trainers))
    return {"step": int(step[1]) if step else line.get("step"), "prompt_ids": prompt,
            "token_ids": part("token_ids"), "log_prob": sampled or None,
            "reward": line.get("filtered_rewards", line.get("rewards")),
            "advantage": part("advantages"),
            "weight": [(1 if scale is None else scale) if kept else 0
                       for kept in part("token_loss_mask")],
            "ratio": [math.exp(min(new - old, 80)) for new, old in zip(trainers, sampled)]
            if has_ratio else None}


def from_areal(line: dict, where: str) -> dict:
    """Its step is the version of the newest weights that sampled a token of the task, from 0 on. A
    task is a problem, and its answers are a group."""
    return {"step": line["tail_version"], "group": line["task_id"], "prompt": line["prompt"],
            "completion": line["completion"], "reward": line["reward"]}


def checked(line: dict, where: str) -> dict:
    """A line without the fields that are null."""
    line = {name: value for name, value in line.items() if value is not None}
    for name, value in line.items():
        words, test = FIELDS.get(name, ("anything", lambda value: True))
        if not test(value):
            raise UserError(f"{where}: its {name} should be {words}, not {shortened(repr(value))}")
    if "step" not in line or line.keys().isdisjoint(("reward", "advantage")):
        lacks = "reward and no advantage" if "step" in line else "step"
        raise UserError(f"{where} has no {lacks}")
    return line


OURS = "JSON lines", lambda line, where: line
FORMATS = (  # name, the fields that tell it, and what makes a line of ours of one
    ("prime-rl", {"token_ids", "loss_mask"}, from_prime_rl),
    ("NeMo-RL", {"token_ids", "token_loss_mask"}, from_nemo_rl),
    ("verl", {"input", "output", "score"}, from_verl),
    ("AReaL", {"task_id", "tail_version", "prompt", "completion", "reward"}, from_areal),
    ("TRL", {"prompt", "completion", "advantage"}, from_trl),
    *((OURS[0], {field}, OURS[1]) for field in ("reward", "advantage")))


def lines_of(files: list[Path]) -> Iterator[tuple[str, str, dict, float]]:
    """Where a line stands, who wrote it, and what it says in our own fields; one at a time. And how
    much of the files is read."""
    sizes = [path.stat().st_size if is_file(path) else 0 for path in files]
    read, total = 0, max(1, sum(sizes))
    for path, size in zip(files, sizes):
        before = read
        if not is_file(path):
            raise UserError(f"cannot read {path}: there is no such file")
        if sum(map(path.samefile, filter(is_file, files))) > 1:
            raise UserError(f"{path} is named twice: its answers would count twice")
        rows = enumerate(read_table(path) if path.suffix == ".parquet" else lines_in(path), 1)
        for number, row in rows:
            where = f"{path}, line {number}"
            if isinstance(row, str) and number == 1:
                row = row.removeprefix("\ufeff")  # some editors begin a file with it
            if isinstance(row, str) and not row.strip():
                continue
            line = parse_object(row, where) if isinstance(row, str) else row
            read += len(row) if isinstance(row, str) else 0
            fitting = [entry for entry in FORMATS if entry[1] <= line.keys()]
            if not fitting:
                raise UserError(f"{where} is no answer: it has neither a reward nor an advantage, "
                                f"but {shortened(', '.join(line))}")
            name, _, translate = fitting[0]
            if name == "TRL" and "reward" in line and ".parquet" not in path.suffixes:
                name, translate = OURS  # only of a table is it known that TRL wrote it
            yield where, name, checked(translate(line, where), where), min(read / total, 1.0)
        read = before + size


def read_table(path: Path) -> Iterator[dict]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path}: parquet needs pyarrow (pip install pyarrow), or JSON lines "
                        "instead: pandas.read_parquet(FILE).to_json(FILE + '.jsonl', "
                        "orient='records', lines=True)") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64):
            used = [i for i, kind in enumerate(batch.schema.types) if has_json(pyarrow.types, kind)]
            yield from batch.select(used).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"cannot read {path} as parquet: {str(error).splitlines()[0]}") from None


def has_json(types, kind) -> bool:
    """Whether JSON has what a column holds, as all that is read here: of times, say, which Python
    may not even be able to hold, nothing is asked. `types` is pyarrow.types."""
    if types.is_dictionary(kind):
        return has_json(types, kind.value_type)
    nested = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_struct)
    if any(is_kind(kind) for is_kind in nested):
        return all(has_json(types, kind.field(i).type) for i in range(kind.num_fields))
    plain = (types.is_integer, types.is_floating, types.is_boolean, types.is_null,
             types.is_string, types.is_large_string, types.is_string_view)
    return any(is_kind(kind) for is_kind in plain)
