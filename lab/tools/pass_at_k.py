"""Does a run solve problems that it could not solve before, or the same ones more often?

    python -m lab pass_at_k runs/none-grpo-s0 --answers 32

The models from before the training and after it try each held-out problem several times. pass@k is
the probability that at least one of k tries is right, averaged over the problems: with one try it
says what a model usually does, and with many what it can do at all. Where training only makes right
answers more frequent, the trained model is ahead with one try, and no longer with many.

If c of the n tries at a problem were right, then C(n - c, k) / C(n, k) of all choices of k tries
have no right one. One minus this is an unbiased estimate of the problem's pass@k (Chen et al.,
arXiv 2107.03374). The intervals are over the problems, and the difference is taken problem by
problem. Both models answer with the same random numbers; --seed gives others. Nothing is written.
"""
from math import comb

from lab.analysis.statistics import mean_over, within
from lab.analysis.tables import Row, Table, by_row
from lab.engine.policy import Policy, derived_seed
from lab.harness.flags import Flag, read
from lab.harness.record import find_folder
from lab.harness.screen import show_status
from lab.tools.sample import policies_of, settings_of

FLAGS = {
    "answers": Flag(32, "answers to each problem, and the largest k", least=2, most=10_000),
    "problems": Flag(250, "number of held-out problems", least=2, most=1_000_000),
    "seed": Flag(0, "seed of the sampling", least=0),
    "task": Flag(None, "the task whose problems are asked. By default it is that of the run, or of "
                       "the recipe.json of the model"),
    "device": Flag("cpu", "device to compute on: cpu, cuda or cuda:N")}


def main(argv: list[str]) -> None:
    flags = read(argv, "python -m lab pass_at_k RUN [flags]", __doc__, FLAGS,
                 {"RUN": "a run folder, or the folder of a model"})
    folder = find_folder(flags.run)
    policies = policies_of(folder, settings_of(folder, flags.task, flags.device))
    right = {title: right_tries(policy, flags.problems, flags.answers, flags.seed, title)
             for title, policy in policies.items()}
    problems = len(next(iter(right.values())))
    print(f"{folder}: {flags.answers} tries at each of {problems} held-out problems\n")
    print(pass_at_k_table(right, flags.answers).to_text())
    for title, counts in right.items():
        print(f"\n{title}: {counts.count(0)} problems were solved by none of {flags.answers} tries")


def right_tries(policy: Policy, count: int, tries: int, seed: int, title: str) -> list[int]:
    """How many tries at each held-out problem were right."""
    problems, s = policy.task.held_out_problems(count), policy.settings
    at_once = max(1, s.questions * s.answers // tries)  # as many answers as in a training step
    found: list[int] = []
    for first in range(0, len(problems), at_once):
        show_status(f"{title}: {first} of {len(problems)} problems")
        part = problems[first:first + at_once]
        batch = policy.ask(part, tries, derived_seed("pass at k", seed, first))
        right = (batch.scores["answer"] > 0).view(len(part), tries)
        found += right.sum(1).tolist()
    show_status("")
    return found


def pass_at_k(right: int, tries: int, k: int) -> float:
    """The share of all choices of k of the tries that have a right one."""
    return 1 - comb(tries - right, k) / comb(tries, k)


def pass_at_k_table(right: dict[str, list[int]], tries: int) -> Table:
    """A row for each k: 1, 2, 4, ... and the number of tries."""
    doubled = [2 ** power for power in range(tries.bit_length()) if 2 ** power < tries]
    formats = {"tries, k": "d", **dict.fromkeys(right, ".1%")}
    rows: list[Row] = []
    for k in [*doubled, tries]:
        by_model = [[pass_at_k(one, tries, k) for one in counts] for counts in right.values()]
        rows.append([k, *(within(mean_over(values), 0, 1) for values in by_model)])
        if len(by_model) == 2:
            before, after = by_model
            formats["difference"] = "points"
            rows[-1].append(mean_over([b - a for a, b in zip(before, after)]))
    return Table("pass_at_k", "", by_row(formats, rows),
                 headings={name: f"{name} (95% interval)" for name in right}
                 | {"difference": "difference, points (95% interval)"})
