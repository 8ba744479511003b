"""The settings of an earlier experiment and of GRPO-Zero, whose files are YAML: --config FILE.yaml.

    training:
      max_gen_len: 512    # is called max_new_tokens here

Of YAML only what these files use is read: sections with lines `name: value` below them, and
comments. Anything else is refused with its line, and so is a setting without a name here.
docs/from_the_earlier_code.md has the names side by side.
"""
import re
from pathlib import Path

from engine.errors import UserError
from harness.files import is_there, lines_in, parse_json

NAMES = {  # there -> here; None for what changes nothing here: folders, a limit never applied
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
    "training.memory_efficient_adamw": "offload_optimizer",
    "training.betas": None, "training.max_prompt_len": None, "training.ckpt_dir": None,
    "training.log_dir": None, "training.credit_log_dir": None,
    "training.credit_save_interval": None}
LINE = re.compile(r"""( *)(\w+):(?: +([\w./-]+|"[^"]*"|\[[^]]*]))?(?: +#.*)?""")


def is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def read_earlier_settings(path: Path) -> dict:
    """Their values under the names they have here, and the prompt that went without saying."""
    values = read_sections(path)
    unknown = [name for name in values if name not in NAMES]
    if unknown:
        raise UserError(f"{path} has settings that are unknown here: {', '.join(unknown)}")
    if values.get("training.betas", [0.9, 0.999]) != [0.9, 0.999]:
        raise UserError(f"{path}: training.betas should be [0.9, 0.999], there is no flag for it")
    settings = {NAMES[name]: value for name, value in values.items() if NAMES[name]}
    if "data" in settings:  # a folder of parquet files there, a file of JSON lines beside it here
        folder = str(settings["data"]).removesuffix(".jsonl").rstrip("/")
        settings["data"] = f"{folder}.jsonl"
    if "answers" in settings:
        settings["answers"] = answers_to_each(path, settings)
    return {"prompt": "original", **settings}


def answers_to_each(path: Path, settings: dict) -> int:
    answers, questions = settings["answers"], settings.get("questions")
    is_right = type(answers) is int and type(questions) is int and questions > 0
    if not is_right or answers % questions:
        raise UserError(f"{path}: training.batch_size {answers} should be a multiple of "
                        f"num_questions_per_batch {questions}")
    return answers // questions


def read_sections(path: Path) -> dict:
    """The values of a file by "section.name"."""
    if not is_there(path):
        raise UserError(f"{path} does not exist")
    values, section = {}, ""
    for number, line in enumerate(lines_in(path), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = LINE.fullmatch(line.rstrip())
        indent, name, value = match.groups() if match else ("", "", "")
        if match and not indent and not value:
            section = name
        elif section and indent and value and f"{section}.{name}" not in values:
            values[f"{section}.{name}"] = value_of(value)
        else:
            raise UserError(f"{path}, line {number}: expected `section:`, or below it "
                            f"`  name: value`, each name once, got {line[:80]!r}")
    return values


def value_of(text: str):
    """What JSON knows is the same in YAML: a number, true, false, "a text", a list. And a text
    without quotes."""
    try:
        return parse_json(text)
    except ValueError:
        return text
