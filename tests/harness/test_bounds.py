"""The bounds of flags, in every program."""
from conftest import ROOT, assert_bounded
from countdown_task import Task
from harness.flags import Flag, fields_as_flags
from harness.settings import OPTIONS, choice_flags, make_settings
from tools import largest_last, preview, warmup

UNBOUNDED = {"preview step"}  # a step that the run has


def flags_of_all() -> dict[str, Flag]:
    """Every flag of the lab's programs, by program and name."""
    groups = {"settings": OPTIONS, "task": fields_as_flags(Task), "choices": choice_flags(),
              "largest_last": fields_as_flags(largest_last.Task), "warmup": warmup.FLAGS,
              "preview": preview.FLAGS}
    return {f"{group} {name}": flag for group, flags in groups.items()
            for name, flag in flags.items() if f"{group} {name}" not in UNBOUNDED}


def test_every_number_has_bounds_and_its_defaults_lie_within():
    assert_bounded(flags_of_all())


def test_what_a_large_run_would_use_is_allowed():
    """A 7B model, thousand-token answers, an unbounded ratio, an evaluation of thousands."""
    make_settings({
        "model": str(ROOT / "models/tiny"), "questions": 1024, "answers": 64, "epochs": 4,
        "max_new_tokens": 32_768, "temperature": 0.6, "learning_rate": 1e-7, "kl": 0.04,
        "clip_high": 100.0, "max_grad_norm": 1e6, "weight_decay": 0.1, "eval_tasks": 50_000,
        "steps": 10_000, "seed": 20_261_121, "micro_batch": 512})
