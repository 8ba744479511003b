"""The settings of an earlier experiment and of GRPO-Zero, whose files are YAML: --config FILE.yaml.

    training:
      max_gen_len: 512    # is called max_new_tokens here

Of YAML only what these files use is read: sections with lines `name: value` below them, comments,
numbers, true and false, texts, lists in brackets. Anything else is refused with its line, and so is
a setting without a name here. docs/from_the_earlier_code.md has the names side by side.
"""
import re
from pathlib import Path

from engine.errors import UserError
from harness.files import parse_json, reading

NAMES = {  # there -> here
    "model.pretrained_model_path": "model", "model.device": "device", "model.dtype": "dtype",
    "data.path": "data", "data.test_size": "eval_tasks",
    "training.random_seed": "seed", "training.max_steps": "steps",
    "training.num_questions_per_batch": "questions",
    "training.batch_size": "answers",  # of all questions there, of each here
    "training.max_gen_len": "max_new_tokens", "training.micro_batch_size": "micro_batch",
    "training.max_grad_norm": "max_grad_norm", "training.learning_rate": "learning_rate",
    "training.weight_decay": "weight_decay", "training.eval_interval": "eval_every",
    "training.ckpt_save_interval": "checkpoint_every",
    "training.skip_unfinished_episodes": "drop_unfinished",
    "training.memory_efficient_adamw": "offload_optimizer"}
CHANGE_NOTHING = (  # folders, which --out names here, and a limit that was never applied
    "training.max_prompt_len", "training.ckpt_dir", "training.log_dir", "training.credit_log_dir",
    "training.credit_save_interval")
BETAS = "training.betas"
LINE = re.compile("( *)([A-Za-z_][A-Za-z0-9_]*):(?: +([^# ].*?))?(?: +#.*)?")
BARE_TEXT = re.compile(r"[A-Za-z_./][\w./-]*")
LONGEST = 100_000  # characters of a file


def is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def read_earlier_settings(path: Path) -> dict:
    """Their values under the names they have here, and the prompt that went without saying."""
    values = read_yaml(path)
    unknown = [name for name in values if name not in (*NAMES, *CHANGE_NOTHING, BETAS)]
    if unknown:
        raise UserError(f"{path} has settings that are unknown here: {', '.join(unknown)}")
    if values.get(BETAS, [0.9, 0.999]) != [0.9, 0.999]:
        raise UserError(f"{path}: {BETAS} should be [0.9, 0.999], there is no flag for it")
    settings = {NAMES[name]: value for name, value in values.items() if name in NAMES}
    if "data" in settings:
        settings["data"] = problems_file(str(settings["data"]))
    if "answers" in settings:
        settings["answers"] = answers_to_each(path, settings)
    return {"prompt": "original", **settings}


def problems_file(folder: str) -> str:
    """Their problems are parquet files in a folder, ours JSON lines: in a file beside it."""
    return folder if folder.endswith(".jsonl") else f"{folder.rstrip('/')}.jsonl"


def answers_to_each(path: Path, settings: dict) -> int:
    answers, questions = settings["answers"], settings.get("questions")
    is_right = type(answers) is int and type(questions) is int and questions > 0
    if not is_right or answers % questions:
        raise UserError(f"{path}: training.batch_size {answers} should be a multiple of "
                        f"num_questions_per_batch {questions}")
    return answers // questions


def read_yaml(path: Path) -> dict:
    """The values of a file by "section.name"."""
    try:
        with reading(path) as file:
            text = file.read(LONGEST + 1)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    if len(text) > LONGEST:
        raise UserError(f"{path} is longer than {LONGEST} characters: it holds no settings")
    return parse_lines(text.splitlines(), path)


def parse_lines(lines: list[str], path: Path) -> dict:
    values, section = {}, None
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = LINE.fullmatch(line.rstrip())
        indent, name, value = match.groups() if match else ("", "", "")
        if match and not indent and value is None:
            section = name
        elif indent and value and section and f"{section}.{name}" not in values:
            values[f"{section}.{name}"] = parse_value(value, f"{path}, line {number}")
        else:
            raise UserError(f"{path}, line {number}: expected `section:`, or below it "
                            f"`  name: value`, each name once, got {line[:80]!r}")
    return values


def parse_value(text: str, where: str):
    """What JSON knows is the same in YAML: a number, true, false, "a text", a list. And a text
    without quotes."""
    try:
        value = parse_json(text)
    except ValueError:
        value = text if BARE_TEXT.fullmatch(text) else None
    if not isinstance(value, bool | int | float | str | list):
        raise UserError(f"{where}: expected a number, true, false, a text or a list of numbers, "
                        f"got {text[:80]!r}")
    return value
