"""Lines that must not be wrong, and for each the test that notices. Run by hand, it takes minutes:

    python tests/mutations.py            all of them
    python tests/mutations.py grpo.py    those of one file

Each is broken in a copy of the project, where the test has to fail. It passes there unbroken.
"""
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MUTATIONS = [  # file, the line as it is, as it is broken, the test that fails then
    ("grpo.py", "return -(objective * mask).sum() / total", "return -objective.sum() / total",
     "test_grpo.py::test_every_loss_against_autograd_of_its_formula"),
    ("grpo.py", "torch.minimum(ratio * advantage, clipped * advantage)",
     "torch.maximum(ratio * advantage, clipped * advantage)",
     "test_grpo.py::test_every_loss_against_autograd_of_its_formula"),
    ("grpo.py", "ratio.clamp(1 - clip[0], 1 + clip[1])", "ratio.clamp(1 - clip[1], 1 + clip[0])",
     "test_grpo.py::test_every_loss_against_autograd_of_its_formula"),
    ("grpo.py", "weight * length_scale ", "weight * torch.ones_like(length_scale) ",
     "test_grpo.py::test_every_loss_against_autograd_of_its_formula"),
    ("grpo.py", "value.double() - group_mean(value, group)\n    return torch.where(difference",
     "value.double() - value.double().mean()\n    return torch.where(difference",
     "test_grpo.py::test_advantages_by_hand_in_two_interleaved_groups"),
    ("grpo.py", "difference / (std + epsilon)", "difference / (std + 0.01)",
     "test_grpo.py::test_advantages_by_hand_in_two_interleaved_groups"),
    ("grpo.py", "* size / (size - 1)", "* size / size",
     "test_grpo.py::test_advantages_by_hand_in_two_interleaved_groups"),
    ("grpo.py", "d.exp() - d - 1 if", "d.exp() - 1 if",
     "test_grpo.py::test_every_loss_against_autograd_of_its_formula"),
    ("grpo.py", "N = int(mask.sum())", "N = int(mask[rows].sum())",
     "test_grpo.py::test_every_loss_against_autograd_of_its_formula"),
    ("grpo.py", "optimizer.zero_grad()", "pass",
     "test_grpo.py::test_every_loss_against_autograd_of_its_formula"),
    ("grpo.py", "2 * rest.square()", "3 * rest.square()",
     "test_mitigations.py::test_the_gradient_size_is_that_of_autograd_also_where_p_is_nearly_one"),
    ("grpo.py", "clip_and_step(optimizer, s.max_grad_norm)", "clip_and_step(optimizer, 0.0)",
     "test_grpo.py::test_every_loss_against_autograd_of_its_formula"),
    ("engine/optimizer.py", "limit = max_grad_norm or float(\"inf\")", "limit = float(\"inf\")",
     "engine/test_optimizer.py::test_a_long_gradient_is_cut_to_the_limit_and_keeps_its_direction"),
    ("engine/optimizer.py", "BETAS, EPSILON = (0.9, 0.999)", "BETAS, EPSILON = (0.9, 0.99)",
     "engine/test_optimizer.py::test_a_step_is_that_of_torch"),
    ("engine/choices.py", "if len(where) > 1:", "if len(where) > 2:",
     "harness/test_settings.py::test_a_method_takes_no_other_methods_name"),
    ("engine/forward.py", "predicts[:, 1:1 + shared.answers.shape[1]] = shared.answers",
     "predicts[:, 1:1 + shared.answers.shape[1]] = shared.answers - 1",
     "test_grpo.py::test_every_loss_against_autograd_of_its_formula"),
    ("engine/packing.py", ".triu_(start + 1)", ".triu_(start + 2)",
     "engine/test_packing.py::test_who_sees_whom_is_what_the_docstring_draws"),
    ("engine/sampler.py", "stopped_before = is_stop.cumsum(1) > is_stop.long()",
     "stopped_before = is_stop.cumsum(1) > 0",
     "engine/test_sampler.py::test_the_example_of_the_docstring"),
    ("engine/sampler.py", "height, right=True)", "height)",
     "engine/test_sampler.py::test_no_random_number_draws_a_token_without_probability"),
    ("engine/sampler.py", "torch.stack(distribution.facts", "torch.stack(allowed.facts",
     "engine/test_sampler.py::test_sampling_follows_the_distribution"),
    ("engine/sampler.py", "rows.position += 1", "rows.position += 2",
     "engine/test_sampler.py::test_greedy_equals_the_slow_loop"),
    ("engine/sampler.py", "written=t - 1)\n            window = 0", "written=t - 1)",
     "../benchmarks/tests/test_two_devices.py::test_what_is_sampled_is_that_of_the_cpu"),
    ("engine/sampler.py", "generator=chance).to(model.device)",
     "generator=chance, device=model.device)",
     "../benchmarks/tests/test_two_devices.py::test_what_is_sampled_is_that_of_the_cpu"),
    ("engine/sampler.py", "correction=PART - 1)", "correction=0)",
     "engine/test_sampler.py::test_the_distribution_by_float64"),
    ("engine/cache.py", "self.columns += self.G", "self.columns = self.columns + self.G",
     "../benchmarks/tests/test_two_devices.py::test_what_is_sampled_is_that_of_the_cpu"),
    ("engine/packing.py", "return x.pin_memory().to(device, non_blocking=True)", "return x",
     "../benchmarks/tests/test_two_devices.py::test_a_step_is_that_of_the_cpu"),
    ("engine/cache.py", "in_prompt = torch.arange(P, device=seen.device) < seen",
     "in_prompt = torch.arange(P, device=seen.device) <= seen",
     "engine/test_sampler.py::test_an_answer_from_a_place_is_that_to_the_cut_prompt"),
    ("engine/rollouts.py", "group=part.group - problems.start, ", "",
     "engine/test_processes.py::test_a_run_of_two_ranks_leaves_the_folder_of_one"),
    ("engine/processes.py", "n * (rank() + 1) // count())", "n * (rank() + 1) // count() - 1)",
     "engine/test_processes.py::test_shares_are_whole_and_apart"),
    ("qwen2_model.py", "torch.addcmul(x * cos, swapped, sin, out=out)",
     "torch.addcmul(x * cos, swapped, cos, out=out)",
     "test_qwen2_model.py::test_logits_agree_with_transformers"),
    ("mitigations.py", "place + len(tag))) + 1", "place + len(tag)))",
     "test_mitigations.py::test_outcome_conditional_by_hand"),
    ("mitigations.py", "return epsilon / (rollouts.log_prob.abs() + epsilon).square()",
     "return epsilon / (rollouts.log_prob.abs() + epsilon)",
     "test_mitigations.py::test_weights_by_hand"),
    ("mitigations.py", "(entropy >= threshold)", "(entropy > threshold)",
     "test_mitigations.py::test_weights_by_hand"),
    ("mitigations.py", "weight = weight * c\n", "pass\n",
     "test_rescaling.py::test_rescaling_by_hand"),
    ("credit/critic.py", "delta = rewards[:, t] + gamma * next_value - value[:, t]",
     "delta = rewards[:, t] + next_value - value[:, t]",
     "credit/test_critic.py::test_gae_against_a_double_loop"),
    ("credit/measured.py", "worth = worth - credit[:, t]", "worth = worth + credit[:, t]",
     "credit/test_measured.py::test_oracle_by_hand"),
    ("mitigations.py", "rows = (group == number).nonzero().squeeze(1)",
     "rows = (group >= 0).nonzero().squeeze(1)",
     "test_rescaling.py::test_the_placebo_of_the_advantages_stays_within_the_group"),
    ("credit/preferences.py", "torch.stack([size, -size], 1)", "torch.stack([size, size], 1)",
     "test_grpo.py::test_dpo_against_autograd_of_its_formula"),
    ("countdown_task.py", "\"big\") % 5 == 0", "\"big\") % 5 == 1",
     "test_countdown_task.py::test_which_fifth_is_held_out"),
    ("countdown_task.py", "b != 0 and a == b * c", "b != 0 and a // b == c",
     "test_countdown_task.py::test_reasoning_is_the_share_of_right_steps_with_available_numbers"),
    ("countdown_task.py", "return value_of(tree.body) == target", "return True",
     "test_countdown_task.py::test_the_expression_reader"),
    ("countdown_task.py", "ANSWER if answer_from <= start < answer_to",
     "ANSWER if answer_from < start < answer_to",
     "test_countdown_task.py::test_sections_and_kinds"),
    ("train.py", "derived_seed(\"train\", s.seed, step)", "derived_seed(\"train\", s.seed)",
     "test_train.py::test_every_step_and_every_seed_samples_anew_and_every_evaluation_alike"),
    ("train.py", "derived_seed(\"credit\", s.seed, step)", "derived_seed(\"credit\", s.seed)",
     "test_train.py::test_the_random_numbers_of_credit_are_new_in_every_step"),
    ("train.py", "mask=rollouts.mask & rollouts.finished[:, None]", "mask=rollouts.mask",
     "test_arms.py::test_unfinished_answers_are_on_record_with_weight_0"),
    ("harness/resume.py", "known > step:\n                credit_path",
     "known > step + 1:\n                credit_path",
     "engine/test_processes.py::test_what_is_past_the_checkpoint_is_forgotten_of_all_ranks"),
    ("harness/resume.py", "if line[\"step\"] <= step]", "if line[\"step\"] <= step + 1]",
     "engine/test_processes.py::test_what_is_past_the_checkpoint_is_forgotten_of_all_ranks"),
    ("harness/run_folder.py", "old_state in states[:-keep]", "old_state in states[:-1]",
     "test_train.py::test_what_a_run_leaves_behind"),
    ("harness/run.py", "range(self.done + 1, self.settings.steps + 1)",
     "range(self.done, self.settings.steps + 1)",
     "test_train.py::test_names_that_people_gave_are_left_alone"),
    ("harness/credit_file.py", "return np.cumsum([0, *sizes[:-1]])", "return np.cumsum(sizes)",
     "test_grpo.py::test_what_was_written_can_be_read_again"),
    ("harness/run_folder.py", "load_optimizer_tensors(self.optimizer, self.parameters, tensors)",
     "pass",
     "test_train.py::test_names_that_people_gave_are_left_alone"),
    ("harness/resume.py", "if sha256_of(checkpoint / name) != sha256:", "if False:",
     "test_going_on.py::test_a_finished_run_that_was_damaged_is_told_how_to_get_it_back"),
    ("harness/flags.py", "(\"at least\", self.least, operator.ge)",
     "(\"at least\", self.least, operator.gt)",
     "harness/test_flags.py::test_the_limits_themselves_are_allowed"),
    ("analysis/statistics.py", "* np.sqrt(groups / (groups - 1))", "* 1.0",
     "analysis/test_statistics.py::test_the_interval_of_a_ratio_is_wider_for_few_groups_by_hand"),
    ("harness/metrics.py", "half = z * math.sqrt(p * (1 - p)", "half = z * math.sqrt(p * (1 + p)",
     "analysis/test_statistics.py::test_the_interval_of_a_share_by_hand"),
    ("analysis/statistics.py", "scaled = (count - np.arange(count))",
     "scaled = (count + np.arange(count))",
     "analysis/test_statistics.py::test_holm_by_hand"),
    ("analysis/tally.py", "5 * (2 * position + 1) // length[answer]",
     "10 * position // length[answer]", "analysis/test_tally.py::test_ten_position_bins"),
    ("analysis/tally.py", "slope - their_slope", "slope",
     "analysis/test_effects.py::test_intervals_are_those_of_groups_that_are_drawn_again"),
]


def notices(folder: Path, test: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
               f"tests/{test}"]
    return subprocess.run(command, cwd=folder, capture_output=True).returncode == 1


def try_all(wanted: list[str]) -> int:
    """How many were noticed by nobody."""
    missed = 0
    with tempfile.TemporaryDirectory() as found:
        folder = Path(found) / "copy"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", "runs", ".venv"))
        for name, line, broken, test in MUTATIONS:
            if wanted and name not in wanted:
                continue
            path, text = folder / name, (ROOT / name).read_text()
            if text.count(line) != 1:
                outcome = f"stands there {text.count(line)} times"
            else:
                path.write_text(text.replace(line, broken))
                outcome = "noticed" if notices(folder, test) else "MISSED"
                path.write_text(text)
            missed += outcome != "noticed"
            print(f"{outcome:8s} {name}: {line.splitlines()[0]}  ({test})", flush=True)
    return missed


if __name__ == "__main__":
    raise SystemExit(try_all(sys.argv[1:]))
