"""Claims: their rules, their figures again from the tokens one by one, and what a run lacks."""
import json
import re
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import credit_columns, refusal, write_log
from known_runs import ids_of, make, write_run
from logs import random_log
from runs import edit_config
from stored import arms_of

import lab.run as lab_run
from lab.__main__ import main
from lab.analysis.run_folders import Run
from lab.analysis.statistics import Estimate
from lab.analysis.tables import shown
from lab.engine.errors import PROJECT
from lab.probes import claims
from lab.probes.claim_rules import (ARITHMETIC, CANNOT, CLAIMS, HOLDS, LATER, NOT, NOT_SEEN, NOTES,
                                    ONE_READING, REAL, REAL_SHORT, THRESHOLDS, TINY, CannotBeSeen,
                                    Evidence, Found, above, below, correlation, decided,
                                    mean_difference, mean_ratio, stored, stored_gain,
                                    stored_results, together)
from lab.probes.claims_of_rank import hoyer, weight_of_problem
from lab.probes.claims_of_tokens import best_blind_answer, by_rule, rule_of

BY_NAME = {claim.name: claim for claim in CLAIMS}
STEP = {"success": 0.5, "length": 9.0, "gradient_norm": 0.2}


def found_in(folder, name, *others):
    return claims.judged(BY_NAME[name], Evidence([Run(run) for run in (folder, *others)]))


def test_every_claim_has_a_sentence_a_note_and_a_page_that_exists():
    assert {claim.note for claim in CLAIMS} == set(NOTES) and len(BY_NAME) == len(CLAIMS) >= 63
    for claim in CLAIMS:
        assert claim.sentence[0].isupper() and claim.why.endswith((".", ")")) and claim.more
        for word in re.findall(r"[\w/.]+\.(?:md|txt|py|json)\b", f"{claim.more} {claim.why}"):
            assert (PROJECT / word).exists(), word
    for claim in CLAIMS:
        for command in re.findall(r"lab (\w+)", claim.more):
            assert command in ("notes", "decided", "exact", "experiment")
    assert all(reason for _, reason in THRESHOLDS.values())


def test_of_a_run_whose_groups_had_equal_rewards_it_is_said_what_cannot_be_seen(tmp_path):
    columns = credit_columns([2, 3], [0, 1], advantage=np.zeros(5))
    folder = write_log(tmp_path / "run", {1: columns}, {}, [{"step": 1, **STEP}])
    found = found_in(folder, "contribution_is_the_gradient")
    assert (found.verdict, found.figure) == (CANNOT, "no token of this run has an advantage")


# ------------------------------------------------------------------- rules


@pytest.mark.parametrize("low, high, verdict", [
    (1.1, 2, HOLDS), (0.5, 0.9, NOT), (0.9, 2, NOT_SEEN)])
def test_a_verdict_is_by_the_whole_interval(low, high, verdict):
    x = Estimate((low + high) / 2, low, high)
    assert above(1)(x) == verdict
    assert below(-1)(Estimate(-x.value, -high, -low)) == verdict
    with pytest.raises(CannotBeSeen, match="too few"):
        above(1)(Estimate(2.0))


def test_what_holds_by_one_measure_alone_holds_in_one_reading():
    assert together([NOT, NOT, NOT_SEEN]) == NOT and together([NOT, NOT_SEEN]) == NOT_SEEN
    assert together([NOT, NOT_SEEN, NOT_SEEN]) == NOT_SEEN
    assert together([HOLDS, NOT, NOT]) == ONE_READING and together([HOLDS] * 3) == HOLDS
    more, less = Estimate(2, 1.5, 2.5), Estimate(0.5, 0.4, 0.6)
    both = decided(above(1), {"by a": more, "by b": less}, ".1f", of_all=(3, "d"))
    assert both.verdict == ONE_READING and both.by_interval
    assert both.figure == "2.0 (1.5 to 2.5) by a; 0.5 (0.4 to 0.6) by b; 3 of all"


def test_intervals_leave_out_one_problem_after_the_other():
    """Against the plain jackknife: 4 problems have 3 degrees of freedom, and t is 3.182."""
    rng = np.random.default_rng(0)
    problem, x, y = np.repeat([3, 5, 8, 9], 5), rng.random(20), rng.random(20)
    mine = rng.random(20) < 0.5
    for found, statistic, is_log in (
            (mean_ratio(problem, x, mine, ~mine), lambda k: np.log(
                x[k & mine].mean() / x[k & ~mine].mean()), True),
            (mean_difference(problem, x, mine, ~mine), lambda k: (
                x[k & mine].mean() - x[k & ~mine].mean()), False),
            (correlation(problem, x, y), lambda k: np.corrcoef(x[k], y[k])[0, 1], False)):
        without = [statistic(problem != number) for number in (3, 5, 8, 9)]
        half = 3.182446 * (3 / 4 * np.square(np.subtract(without, np.mean(without))).sum()) ** 0.5
        ends = np.array([0, -half, half]) + statistic(np.ones(20, bool))
        expected = np.exp(ends) if is_log else ends
        assert [found.value, found.low, found.high] == pytest.approx(expected, rel=1e-3)


def test_the_command_says_what_chance_alone_would_give():
    """Of 40 claims that go by an interval, one holds by chance: 2.5%. Stored ones do not count."""
    live, kept = BY_NAME["early_over_late"], BY_NAME["rloo"]
    found = {number: Found(HOLDS, {}, by_interval=True) for number in range(40)}
    found = {type("Claim", (), {"is_stored": False})(): one for one in found.values()}
    found[kept] = Found(HOLDS, {}, by_interval=True)
    found[live] = Found(ARITHMETIC, {})
    *counts, chance = claims.summary(found)
    assert "40 claims go by intervals" in chance and "about 1.0 would" in chance
    assert counts == ["41 claims are judged on this run: 40 holds, 1 by arithmetic.",
                      "1 claims are judged on stored experiments: 1 holds."]


# ------------------------------------------------------------------- stored experiments


@pytest.mark.parametrize("board, over", [
    (TINY, "none"), (LATER, "none"), (REAL, "none"), (REAL_SHORT, "none"), ("lora_48", "all")])
def test_a_stored_gain_is_that_which_its_experiment_printed(board, over):
    """By programs that are gone, from the numbers of each seed."""
    printed = (PROJECT / f"lab/results/{board}.txt").read_text("utf-8")
    arms = {*arms_of(board)} - {over}
    assert len(arms) > 1
    for arm in arms:
        assert f" {shown(stored_gain(board, arm, over), 'points')} |" in printed, arm


def test_other_stored_numbers_are_what_their_experiments_printed():
    """Each number of claims.json stands in the output of its command, rounded."""
    for experiment, known in stored_results("claims").items():
        if experiment == "dpo":
            continue
        path = {"filler_and_form": "real/filler_and_form"}.get(experiment, experiment)
        printed = (PROJECT / f"lab/results/{path}.txt").read_text("utf-8")
        words = " ".join(printed.split())
        for name, numbers in known["values"].items():
            if experiment == "filler_and_form":
                arm, _, seed = name.rpartition("-s")
                assert re.search(rf"{seed} {arm} {' '.join(f'{x:.2f}' for x in numbers)} ", words)
                continue
            if experiment == "turns/flaky":
                assert all(f"{x:.3f}" in words for x in numbers)
                continue
            is_signed = "index" in name or experiment == "change"
            spec = "+.2f" if is_signed else ".2f" if "perfect" in name else ".1%"
            if experiment in ("board/evaluations", "inverse"):
                spec = "points"
            if max(map(abs, numbers)) > 1e-9:
                assert shown(stored(experiment, name), spec) in words, name


def test_the_claim_on_filler_and_format_by_hand():
    found = claims.judged(BY_NAME["filler_and_format"], Evidence([None]))
    runs = stored_results("claims")["filler_and_form"]["values"]
    gains = [statistics.mean(runs[f"without words-s{seed}"][5:]) - statistics.mean(
        runs[f"plain-s{seed}"][5:]) for seed in range(3)]
    half = 4.302653 * statistics.stdev(gains) / 3 ** 0.5
    mean = statistics.mean(gains)
    assert found.figure.startswith(f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})")
    assert found.verdict == NOT_SEEN


def test_every_stored_claim_is_judged_without_a_token(tmp_path):
    """Only the runs' weightings are asked, for the pair beside the verdict."""
    run = write_log(tmp_path / "run", {}, {"eval_every": 0}, [{"step": 1, **STEP}])
    for claim in CLAIMS:
        if claim.is_stored:
            found = claims.judged(claim, Evidence([Run(run)]))
            assert found.figure and "no credit files" not in found.figure


# ------------------------------------------------------------------- figures of a run


def test_filler_and_reasoning_by_hand(tmp_path):
    """Filler ' and' with log p -2 and reasoning ' 7' with -1, in two problems: 2 and 1."""
    filler, reasoning = (ids_of(text)[0] for text in (" and", " 7"))
    columns = credit_columns([4, 4], [0, 1], token_id=[filler, filler, filler, reasoning] * 2,
                             log_prob=[-2, -2, -2, -1] * 2, collision=np.full(8, 0.5))
    run = write_log(tmp_path / "run", {1: columns})
    s = [(1.5 - 2 * np.exp(log_prob)) ** 0.5 for log_prob in (-2, -1)]
    found = found_in(run, "filler_over_reasoning")
    of_s = f"{s[0] / s[1]:.2f}"
    assert found.figure == (f"2.00 (2.00 to 2.00) by A log p; {of_s} ({of_s} to {of_s}) by the "
                            "gradient; 2.000 of filler; 1.000 of reasoning; 75% of the tokens are "
                            "filler")
    assert found.verdict == HOLDS
    assert found_in(run, "sureness_explains_it").figure.startswith("1.00 ")
    assert found_in(run, "one_advantage").verdict == ARITHMETIC
    assert found_in(run, "less_sure_of_filler").figure.startswith("-1.000")
    # places 1/8, 3/8 and 5/8 are filler's: a half earlier than 7/8
    assert found_in(run, "filler_comes_early").figure.startswith("-0.500")
    # means of A log p of -2 and -1: neither is positive, and the smaller over the larger is 2
    assert found_in(run, "does_not_wash_out").verdict == ONE_READING
    kinds = {1: {**columns, "kind": np.array([0, 1, 1, 2] * 2, np.uint8)}}
    of_words = found_in(write_log(tmp_path / "kinds", kinds), "filler_comes_early").figure
    assert of_words.endswith("-0.750 (-0.750 to -0.750) of words")


def test_the_rarer_outcome_by_hand(tmp_path):
    """One of four right: sqrt 3 against 1 / sqrt 3, so 3 times as large, in two problems."""
    z = [3 ** 0.5, *[-(3 ** -0.5)] * 3]
    columns = credit_columns([1] * 8, np.repeat([0, 1], 4), advantage=np.array(z * 2))
    found = found_in(write_log(tmp_path / "run", {1: columns}), "rarer_outcome")
    assert found.figure == "3.0 (3.0 to 3.0) times as large"


def test_hoyers_sparsity_and_the_weight_of_a_problem_by_hand():
    """c(p, G) is 2.57 and 1.86 at G = 8. Of two answers that differ the z-scores are 1 and -1: a
    right one has 1 with probability 1 - p, a wrong one -1 with p, so c is 1 - p + p = 1."""
    assert hoyer(torch.tensor([0.0, 0.0, -2.0, 0.0])) == pytest.approx(1)
    assert hoyer(torch.full((9,), -0.5)) == pytest.approx(0)
    two = (2 ** 0.5 - 7 / 5) / (2 ** 0.5 - 1)
    assert hoyer(torch.tensor([3.0, -4.0])) == pytest.approx(two)
    assert np.isnan(hoyer(torch.zeros(3)))
    assert [round(weight_of_problem(p, 8), 2) for p in (0.02, 0.5)] == [2.57, 1.86]
    assert weight_of_problem(0.3, 2) == pytest.approx(1)


@pytest.mark.parametrize("after, verdict", [(45.0, ONE_READING), (20.0, HOLDS), (60.0, NOT)])
def test_answers_are_concise_if_they_lose_half_of_their_tokens(tmp_path, after, verdict):
    lengths = [50, 51, *[40] * 6, after, after + 1]
    lines = [{"step": step, **STEP, "length": length} for step, length in enumerate(lengths, 1)]
    run = write_log(tmp_path / "run", {1: credit_columns([1], [0])}, {}, lines)
    assert found_in(run, "concise").verdict == verdict


def test_a_run_and_its_weights_give_the_verdicts_of_the_run_without_them(tmp_path):
    """Rows about a weighting aside, which say which one they look at."""
    (weighted, files), plain = random_log(tmp_path / "a", mitigation="random"), tmp_path / "b"
    write_log(plain, {step: {**columns, "weight": np.ones_like(columns["weight"])}
                      for step, columns in files.items()})
    for name in ("filler_over_reasoning", "discount_moves_gradient", "inverse_equalises",
                 "hard_mask_explodes", "answer_deserves_more", "filler_is_wasted"):
        assert found_in(weighted, name).figure == found_in(plain, name).figure


# ------------------------------------------------------------------- what a run lacks


def test_what_a_run_lacks_is_said(tmp_path):
    folder, _ = random_log(tmp_path / "run")
    for name, reason in (("phase_1_ignores_rewards", "this run has no checkpoint"),
                         ("discount_and_filler", "--mitigation outcome_conditional"),
                         ("gains_grow_with_size", "8 to 32 billion"),
                         ("becomes_sparser", "no beginning and no end"),
                         ("concise", "no beginning and no end"),
                         ("only_log_prob", "did not measure the change")):
        found = found_in(folder, name)
        assert found.verdict == CANNOT and reason in found.figure
    without = write_log(tmp_path / "without", {})
    assert found_in(without, "early_over_late").figure.startswith("this run has no credit files")


def test_a_second_run_is_where_the_claims_about_its_weighting_look(tmp_path):
    """Over the steps that both have, and only if they differ in nothing else."""
    plain, other = (write_run(tmp_path / name, success, steps=steps, **config)
                    for name, success, steps, config in (
                        ("a", 0.5, 8, {}), ("b", 0.2, 10, dict(
                            mitigation="outcome_conditional", think_discount=0.75))))
    lines = [[json.loads(line)["success"] for line in (run / "metrics.jsonl").open()][:8]
             for run in (plain, other)]
    gain = statistics.mean(lines[1]) - statistics.mean(lines[0])
    alone, pair = (found_in(plain, "discount_hurts", *more).figure for more in ((), (other,)))
    assert pair == f"{alone}; {100 * gain:+.1f} points in this pair, 8 steps"
    assert "0.75 weight on the thinking" in found_in(plain, "discount_and_filler", other).figure
    unlike = write_run(tmp_path / "c", 0.2, mitigation="outcome_conditional", learning_rate=1.0)
    assert found_in(plain, "discount_hurts", unlike).figure == alone
    found = found_in(plain, "steadier_norm", unlike)
    assert found.verdict == CANNOT and "differ in learning_rate" in found.figure


def test_norms_of_two_runs_are_compared_by_intervals_over_the_same_steps(tmp_path):
    """Norms 2, 4, 2, 4 with the weighting, 5, 7, 5, 7 without; the fifth step has no partner. So it
    is 3 smaller, and its deviation over its mean is 1/3 over 1/6. Success is smaller in one
    pair, and larger in the other."""
    def run(name, norms, success, mitigation="inverse_logprob"):
        lines = [{"step": step, "success": success, "length": 9.0, "gradient_norm": norm}
                 for step, norm in enumerate(norms, 1)]
        return write_log(tmp_path / name, {}, {"mitigation": mitigation}, lines)
    plain = run("plain", [5, 7, 5, 7, 100], 0.3, "none")
    for name, success, verdict in (("worse", 0.2, HOLDS), ("better", 0.4, ONE_READING)):
        other = run(name, [2, 4, 2, 4], success)
        found = found_in(plain, "small_norm_breaks", other)
        assert found.verdict == verdict and found.figure.startswith("-3.000 (-3.000 to -3.000)")
    assert found_in(plain, "small_norm_breaks", run("untold", [2] * 4, None)).verdict == CANNOT
    assert found_in(plain, "steadier_norm", other).figure.startswith("2.00 (")


def test_a_stored_number_of_tiny_stands_beside_a_run_of_tiny_alone(tmp_path):
    names = "answer_deserves_more", "filler_is_wasted"
    _, files = random_log(tmp_path / "a")
    for number, (config, is_like) in enumerate((
            ({}, True), ({"task": "examples.guess"}, False), ({"model": "models/guesser"}, False),
            ({"advantage": "without_luck"}, False), ({"placebo": "advantages"}, False))):
        run = write_log(tmp_path / f"{number}", files, config)
        for name in names:
            found = found_in(run, name)
            assert (found.verdict != CANNOT) == is_like
            assert is_like or "is of Countdown, models/tiny" in found.figure


def test_sizes_are_those_of_grpos_advantages_whatever_a_run_trained_with(tmp_path):
    """Rewards 1 and 0: z-scores of about +1 and -1, where the run has 5 and 7."""
    columns = credit_columns([1, 1], [0, 0], advantage=[5, 7], reward=[1, 0])
    run = Run(write_log(tmp_path / "run", {1: columns}, {"advantage": "without_luck"}))
    seen = Evidence([run])
    assert seen["advantage"] == pytest.approx([0.9998, -0.9998], abs=1e-4)
    assert seen["abs contribution"] == pytest.approx([np.log(2)] * 2, abs=1e-3)
    assert "with GRPO's advantages" in " ".join(claims.of_run(run))
    usual = write_log(tmp_path / "usual", {1: columns})
    assert Evidence([Run(usual)])["advantage"].tolist() == [5, 7]


def test_the_share_of_groups_that_compare_right_with_wrong_by_hand(tmp_path):
    """Three of four groups have both: 75% (t is 3.182, the deviation 0.5)."""
    columns = credit_columns([1] * 8, np.repeat(range(4), 2), reward_answer=[1, 0] * 3 + [1, 1])
    found = found_in(write_log(tmp_path / "run", {1: columns}), "strong_for_binary")
    assert found.figure.startswith("75.0% (0.0% to 100.0%)") and found.verdict == NOT_SEEN


def test_a_lower_temperature_and_what_a_learned_importance_explains_by_hand(tmp_path):
    """Entropies 0, 0, 0, 0 and log 4: at 1 the last has 4/8 of the weight, at 0.5 it has 16/20.
    A network with the loss 0.9 explains a tenth of z-scores whose mean square is 1."""
    columns = credit_columns([5, 5], [0, 1], entropy=([0] * 4 + [np.log(4)]) * 2)
    found = found_in(write_log(tmp_path / "run", {1: columns}), "lower_temperature")
    assert [x.value for x in found.numbers.values()] == pytest.approx([1 / 3, 0.5, 0.8])
    steps = {step: credit_columns([1, 1], [0, 0], reward=[1, 0]) for step in (1, 2, 3)}
    for loss, verdict in ((0.9, HOLDS), (0.1, NOT)):
        lines = [{"step": step, **STEP, "importance_loss": loss} for step in steps]
        run = write_log(tmp_path / f"{loss}", steps, {"mitigation": "learned_importance"}, lines)
        found = found_in(run, "chicken_and_egg")
        assert found.verdict == verdict and found.figure.startswith(f"{1 - loss:.2f} (")
    edit_config(run, advantage="dr_grpo")  # whose numbers are smaller, and so is the loss
    assert found_in(run, "chicken_and_egg").verdict == CANNOT


def test_a_verdict_that_turned_with_the_seed_holds_in_one_reading():
    for name, is_like, verdict in (("rank_by_token", True, ONE_READING),
                                   ("rank_by_token", False, NOT), ("rank_2", True, NOT)):
        claim = SimpleNamespace(name=name, look=lambda _: Found(NOT, {}))
        seen = SimpleNamespace(is_like_stored=lambda is_like=is_like: is_like)
        assert claims.judged(claim, seen).verdict == verdict
    assert set(claims.TURNED) <= set(BY_NAME)


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path):
    without_lines, _ = random_log(tmp_path / "run")
    damaged = write_log(tmp_path / "damaged", {1: credit_columns([2], [0])}, {},
                        [{"step": 1, **STEP}])
    (damaged / "credit/step_000001.npz").write_bytes(b"PK")
    for folder, said in ((without_lines, "has no steps, so"), (damaged, "cannot be read")):
        assert said in refusal(main, ["claims", str(folder), "--only", "early"]), said


def test_the_command_prints_every_claim_with_its_verdict(whole, capsys):
    """On a run with its checkpoints, of a model that knows nothing."""
    run = str(whole)
    main(["claims", run, "--problems", "3"])
    printed = capsys.readouterr().out
    for claim in CLAIMS:
        assert f"- {claim.name}. " in printed
    assert max(len(line) for line in printed.splitlines() if run not in line) <= 100
    assert "uncorrected for their number" in " ".join(printed.split())
    assert "\n| early over late " in printed and "\n| PPO, fallback " in printed
    main(["claims", run, "--only", "one_advantage, sparser", "--problems", "3"])
    assert re.findall(r"^- (\w+)\. ", capsys.readouterr().out, flags=re.M) == [
        "one_advantage", "becomes_sparser"]
    assert "no claim has such a name" in refusal(main, ["claims", run, "--only", "luck"])


def test_a_rule_answers_another_problem_without_looking_at_it():
    rule = rule_of("10 * ( 8 - 2 )", "10 8 2 make 60")
    assert by_rule(rule, "4 5 6 make 9") == "4 * ( 5 - 6 )"
    assert by_rule(rule_of("7", "1 2 make 3"), "4 5 make 9") == "7"  # of no problem: it stays
    assert by_rule(rule, "4 5") == "4 * ( 5 -  )"  # it has no third number


def test_the_best_blind_answer_of_a_run_is_asked_on_held_out_problems(recorded):
    """It is one expression of the run's last step, for all of 200 problems."""
    assert 0 < best_blind_answer(Evidence([Run(recorded)])) < 0.3


def test_rows_about_a_model_are_printed_of_a_run_with_lora(learner, tmp_path, capsys):
    """Whose parameters are frozen while it trains."""
    run = tmp_path / "run"
    lab_run.train_beyond(["--model", str(learner), "--lora", "1", "--steps", "1", "--answers", "8",
                          "--max_new_tokens", "32", "--eval_every", "0", "--threads", "1",
                          "--out", str(run)])
    main(["claims", str(run), "--problems", "3", "--only", "high_t,rank_2,mean_is_best,critic_is"])
    printed = capsys.readouterr().out
    assert "trained only LoRA's additions" in " ".join(printed.split())
    for name in ("high_t_by_construction", "rank_2", "mean_is_best", "critic_is_noisier"):
        assert f"- {name}. " in printed


def test_a_row_is_printed_when_it_is_found(tmp_path, monkeypatch, capsys):
    def stopped_at_the_second(claim, evidence, judged=claims.judged):
        if claim.name != "one_advantage":
            raise KeyboardInterrupt
        return judged(claim, evidence)
    monkeypatch.setattr(claims, "judged", stopped_at_the_second)
    run = write_log(tmp_path / "run", {1: credit_columns([2], [0])}, {}, [{"step": 1, **STEP}])
    with pytest.raises(KeyboardInterrupt):
        claims.main([str(run), "--only", "one_advantage,only_log"])
    assert "- one_advantage. " in capsys.readouterr().out


def test_a_run_with_one_answer_and_one_kind_of_token_ends_no_claim_in_an_error(tmp_path, capsys):
    run, = make(tmp_path, {"a": (0.5, {})}, seeds=1)
    main(["claims", run])
    printed = capsys.readouterr().out
    assert "all of one class" in printed and "nan" not in printed
