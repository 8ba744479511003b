"""Run folders with any numbers, and with given ones; the tokens of a log as plain rows."""
import numpy as np

import analyze
from conftest import credit_columns, evaluation, write_log
from qwen2_model import load_tokenizer


def random_log(folder, steps=3, groups=3, answers=4, longest=9, seed=0, **config):
    """Any tokens, any numbers: what the definitions are checked on."""
    rng, files, G = np.random.default_rng(seed), {}, groups * answers
    for step in range(1, steps + 1):
        lengths = rng.integers(1, longest + 1, G).tolist()
        group = np.repeat(np.arange(groups), answers)
        n, reward = sum(lengths), rng.choice([0.0, 0.1, 1.1], G)
        reward[group == 0] = 0.1  # one group without spread
        z = [(r - r.mean()) / (r.std() + 1e-4) if r.std() > 1e-8 else 0 * r
             for r in reward.reshape(groups, answers)]
        p = rng.uniform(0.01, 0.99, n)
        files[step] = credit_columns(
            lengths, group, token_id=rng.integers(0, 200, n), log_prob=np.log(p),
            collision=p**2 + (1 - p) ** 2 / 2, entropy=rng.uniform(0, 2, n),
            weight=rng.gamma(1, 1, n),
            advantage=np.repeat(np.concatenate(z), lengths), section=rng.integers(0, 3, n),
            kind=rng.integers(0, 7, n), reward=reward, reward_answer=reward > 1)
    return write_log(folder, files, config), files


def plain_rows(folder, files):
    """The same log as a list of dictionaries, one a token, with its sizes."""
    tokenizer, rows = load_tokenizer(folder), []
    for step, c in files.items():
        ends = [*c["episode_start"][1:].tolist(), len(c["token_id"])]
        for b, (start, end) in enumerate(zip(c["episode_start"].tolist(), ends)):
            for i in range(start, end):
                token = int(c["token_id"][i])
                row = {name: float(c[name][i]) for name in ("log_prob", "advantage", "weight",
                                                            "entropy", "collision")}
                row |= {"step": step, "episode": (step, b), "group": (step, int(c["group"][b])),
                        "position": i - start, "length": end - start,
                        "kind": int(c["kind"][i]), "section": int(c["section"][i]),
                        "id": token, "text": tokenizer.decode([token], skip_special_tokens=False)}
                row["s"] = (1 - 2 * np.exp(row["log_prob"]) + row["collision"]) ** 0.5
                row["gradient"] = row["advantage"] * row["weight"] * row["s"]
                row["push"] = row["gradient"] * row["s"]
                row |= {f"abs {name}": abs(row[name]) for name in ("advantage", "gradient")}
                rows.append({**row, "middle": (row["position"] + 0.5) / row["length"]})
    return rows


def written(folder, seed, ends, trained, kind=analyze.Run, **config):
    """A run of these settings, as it is read: right answers of the evaluations after the steps 0, 2
    and 3, and success of the steps."""
    evaluations = [evaluation(step, answer) for step, answer in zip((0, 2, 3), ends)]
    metrics = [{"step": step, "success": one} for step, one in enumerate(trained, 1)]
    return kind(write_log(folder, {}, {"seed": seed, **config}, metrics, evaluations))
