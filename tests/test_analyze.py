"""What analyze.py says of run folders, against numbers put there by hand."""
import json

import pytest

import analyze
from qwen2_model import UserError


def write_run(folder, start, end, config="{}"):
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "success": 0.1 * i, "entropy": 0.5 * i, "gradient_norm": None if i == 1 else 3.0}) + "\n" for i in (1, 2)))
    lines = [{"step": s, "mode": mode, "success": sum(a) / len(a), "success_low": 0.0, "success_high": 1.0, "answer": a,
              "format_mean": 0.5, "finished_mean": 0.75, "length_mean": 12.0}
             for s, a in ((0, start), (2, end)) for mode in ("sampled", "greedy")]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_gain_is_paired_by_problem(tmp_path, capsys):
    """Gains 1 0 0 0 1 0 0 0: mean 0.25, sample std sqrt(1.5/7) = 0.4629, half width 1.96 * 0.4629 / sqrt 8 = 0.3208."""
    run = write_run(tmp_path / "r", [0, 1, 0, 1, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0, 0, 0])
    analyze.main([str(run)])
    printed = capsys.readouterr().out
    assert "| r | sampled | 8 | 25.0% | 50.0% | +25.0% | -7.1% to +57.1% | 0.50 | 75.0% | 12 | 0.750 to 0.750 | 3.000 to 3.000 |" in printed
    assert (run / "learning_curve.png").stat().st_size > 5000


def test_several_runs_share_a_picture(tmp_path, capsys):
    runs = [str(write_run(tmp_path / name, [0, 1], end)) for name, end in (("a", [1, 1]), ("b", [0, 1]))]
    analyze.main([*runs, "--output_dir", str(tmp_path / "pictures")])
    printed = capsys.readouterr().out
    assert "| mean of 2 runs | sampled | | 50.0% | 75.0% | +25.0% | runs from +0.0% to +50.0% | 0.50 | 75.0% | 12 |" in printed
    assert printed.count("| sampled |") == 3 and (tmp_path / "pictures/learning_curve.png").exists()


def test_means_are_over_the_seeds_of_an_arm_not_over_arms(tmp_path, capsys):
    runs = [str(write_run(tmp_path / f"{name}-grpo-s{seed}", [0, 1], end, json.dumps({"mitigation": name, "seed": seed})))
            for name, ends in (("none", ([1, 1], [0, 1])), ("random", ([0, 0], [0, 0]))) for seed, end in enumerate(ends)]
    analyze.main([*runs, "--output_dir", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| mean of 2 runs of none-grpo | sampled | | 50.0% | 75.0% |" in printed
    assert "| mean of 2 runs of random-grpo | sampled | | 50.0% | 0.0% |" in printed


def test_a_run_still_going_can_be_read_and_a_broken_file_is_named(tmp_path):
    run = write_run(tmp_path / "r", [0, 1], [1, 1])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "suc')
    analyze.main([str(run)])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('\n{"step": 4, "success": 0.5}\n')
    with pytest.raises(UserError, match="metrics.jsonl, line 3"):
        analyze.main([str(run)])
    with pytest.raises(UserError, match="not a run folder"):
        analyze.main([str(tmp_path)])
