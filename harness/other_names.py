"""Names that are no flags here, and what is said about them: settings that were retired, and names
that other trainers use. It is imported when a config.json is read, or such a name is typed."""
from engine.choices import METHODS
from harness.flags import Flag, Values, flags_of

OTHER_NAMES = {  # that other trainers use
    "lr": "--learning_rate", "batch_size": "--questions times --answers", "n": "--answers",
    "group_size": "--answers", "num_generations": "--answers", "max_steps": "--steps",
    "num_steps": "--steps", "max_tokens": "--max_new_tokens", "beta": "--kl", "output_dir": "--out",
    "max_completion_length": "--max_new_tokens", "gradient_checkpointing": "--checkpointing",
    "wandb": "--track wandb", "report_to": "--track",
    "strength": "the flag of a function with an argument of this name: def my_idea(rollouts, *, "
                "strength: Positive = 1.0)"}

# The settings that this version no longer has, with the defaults that they had, by a commit in
# which they still stood. The config.json of an older run may name them: it is read all the same, a
# sentence is said about those that were not at their defaults, and analyze.py compares runs by them
# as before. docs/CHANGELOG.md says what has become of those of 427ce844.
LAST_STOOD_IN = {
    "f19f84f4": {
        "offload_optimizer": Flag(False, compared="aside"),
        "shard": Flag(False, compared="aside"),
        "loss_temperature": Flag(1.0),
        "loss_top_k": Flag(0),
        "entropy_target": Flag(0.0),
        "top_k": Flag(0, compared="setting"),
        "eval_answers": Flag(1, compared="aside"),
        "eval_temperature": Flag(1.0, compared="setting"),
        "eval_modes": Flag("both", compared="aside"),
        "sample_every": Flag(10, compared="aside"),
        "save_model": Flag(False, compared="aside"),
        "rollouts": Flag("own"),
        "rollouts_every": Flag(1),
        "rollouts_timeout": Flag(600.0, compared="aside")},
    "427ce844": {
        "covariance_low": Flag(1.0),
        "covariance_high": Flag(5.0),
        "critic_layers": Flag(0),
        "hint_limit": Flag(2.0),
        "importance_lr": Flag(1e-3),
        "lambda_init": Flag(0.0),
        "placebo_std": Flag(1.0),
        "positive_weight": Flag(0.1),
        "tail_damping": Flag(0.9),
        "trunk_lr": Flag(1e-3)}}
RETIRED = {name: flag for flags in LAST_STOOD_IN.values() for name, flag in flags.items()}


def about_unknown(name: str, chosen: Values) -> str:
    """A sentence about a flag of another method, one that is retired, or one of another trainer; an
    empty one if it is none of them."""
    for axis, choices in METHODS.items():
        found = [owner for owner in choices if name in flags_of(choices[owner])]
        if found:
            return f"--{name} belongs to {' and '.join(found)}, but --{axis} is {chosen[axis]}"
    if name in RETIRED:
        return (f"--{name} is retired: it last stood in commit {last_stood_in(name)}, and "
                "docs/CHANGELOG.md says what has become of it")
    other = OTHER_NAMES.get(name)
    return f"unknown argument --{name}: here it is {other}" if other else ""


def about_retired(values: Values) -> str:
    """A sentence about the settings of a file that are no settings any more, if they were not at
    their defaults; an empty one if there are none. A user's own method may have one of the names.
    """
    own = flags_of_methods(values)
    usual = {name: flag.default for name, flag in RETIRED.items() if name not in own}
    # the loss now has the temperature of the sampling, whose default is 1
    usual["loss_temperature"] = values.get("temperature", 1.0)
    found = [name for name in usual if values.get(name, usual[name]) != usual[name]]
    if not found:
        return ""
    told = ", ".join(f"{name} {values[name]}" for name in found)
    commits = " and ".join(dict.fromkeys(map(last_stood_in, found)))
    return f"{told}: retired since this run was made, and without effect now (last in {commits})"


def last_stood_in(retired: str) -> str:
    """The commit in which a retired setting last stood."""
    return next(commit for commit, flags in LAST_STOOD_IN.items() if retired in flags)


def flags_of_methods(values: Values) -> dict[str, Flag]:
    """The flags of the weighting and the advantage that a file names, if they exist here."""
    flags: dict[str, Flag] = {}
    for axis, choices in METHODS.items():
        name = str(values.get(axis))  # the defaults have no flags
        if name in choices:
            flags |= flags_of(choices[name])
    return flags
