"""The earlier experiment's tables: every number again from the tokens one by one, and small ones by
hand."""
import statistics
from pathlib import Path

import numpy as np
import pytest
from conftest import credit_columns, refusal, write_log
from known_runs import by_name, ids_of, make, rows_in, titles_in
from logs import plain_rows, random_log

from lab.__main__ import main
from lab.analysis.run_folders import Run
from lab.probes import notes
from lab.probes.run_tokens import RunTokens, class_of, t_of_positions

UNITS = {"contribution": "old", "gradient": "new"}


def notes_of(folder):
    return RunTokens(Run(folder))


def with_the_notes_columns(rows):
    longest = max(row["length"] for row in rows)
    top = (longest - 1) / longest
    for row in rows:
        row["contribution"] = row["advantage"] * row["weight"] * row["log_prob"]
        row["class"] = class_of(row["text"])
        at = row["position"] / row["length"]
        for name, count in (("bin", 10), ("fifth", 5)):  # (low, high] of each; the first has low
            row[name] = next(b for b in range(count) if at <= top * (b + 1) / count + 1e-12)
    return rows


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A run with weights and tokens of every class: its tokens and tables."""
    folder, files = random_log(tmp_path_factory.mktemp("logs") / "run", groups=6, longest=12)
    ids = [ids_of(text)[0] for text in (" 7", " +", " and", "\n", ".", ">")]
    for step, columns in files.items():
        columns["token_id"] = np.random.default_rng(step).choice(ids, len(columns["token_id"]))
        columns["token_id"] = columns["token_id"].astype(np.int32)
        np.savez_compressed(folder / f"credit/step_{step:06d}.npz", **columns)
    rows = with_the_notes_columns(plain_rows(folder, files))
    found = notes_of(folder)
    return rows, found, by_name(notes.notes_tables(found))


def sizes(rows, name):
    return [abs(row[name]) for row in rows]


def mean(values):
    return statistics.fmean(values) if len(values) else None


def close(values):
    return pytest.approx(values, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("text, name", [
    ("<think>", "structure"), (" </answer>\n", "structure"), ("<", "filler"), ("think", "filler"),
    (" 12", "reasoning"), ("*(", "reasoning"), ("x2", "reasoning"), (" plus", "reasoning"),
    ("plus that", "filler"), (" ", "filler"), (".", "filler"), ("-/=", "reasoning"),
    ("Times", "filler"), ("2 + 3", "reasoning"), ("<think>a", "filler")])
def test_classes_by_the_notes_regular_expressions(text, name):
    assert class_of(text) == name


def test_contribution(log):
    rows, _, tables = log
    for unit, column in UNITS.items():
        values = [row[unit] for row in rows]
        expected = [mean(values), statistics.stdev(values), mean(sizes(rows, unit)), min(values),
                    max(values)]
        assert [row[column] for row in tables["notes contribution"]] == close(expected)


def test_by_the_sign_of_the_normalised_reward(log):
    rows, _, tables = log
    # the log's advantage is its z-score
    parts = {"normalised reward <= 0": [r for r in rows if r["advantage"] <= 0],
             "normalised reward > 0": [r for r in rows if r["advantage"] > 0]}
    assert [row[""] for row in tables["notes sign"]] == list(parts)
    for found in tables["notes sign"]:
        part = parts[found[""]]
        assert [found[name] for name in ("tokens", "old", "size", "new size")] == close([
            len(part), mean([r["contribution"] for r in part]), mean(sizes(part, "contribution")),
            mean(sizes(part, "gradient"))])


def t_by_position(rows, unit):
    found = []
    for place in range(max(row["length"] for row in rows)):
        values = np.array([row[unit] for row in rows if row["position"] == place])
        if len(values) > 1:
            spread = values.std(ddof=1)
            found.append(abs(values.mean() / spread * len(values) ** 0.5) if spread > 1e-9 else 0.0)
    return np.array(found)


def test_t_of_positions(log):
    rows, _, tables = log
    for unit, column in UNITS.items():
        t = t_by_position(rows, unit)
        assert [row[column] for row in tables["notes t"]] == close(
            [(t > 3).mean(), (t < 1.5).mean(), t.mean()])


def test_t_by_hand():
    """Position 0: 1 and 3, so the mean is 2, its standard error sqrt 2 / sqrt 2 = 1, and t is 2. At
    position 1 there is one answer and no t; at 2 there is no spread, so t is 0. Ten of 0.1 have no
    spread either, though by rounding the variance of their sums is not 0."""
    position = np.array([0, 0, 1, 2, 2, *[3] * 10])
    values = np.array([1.0, 3, 7, 2, 2, *[0.1] * 10])
    assert t_of_positions(position, values) == close([2, 0, 0])


def test_bins_of_position(log):
    rows, _, tables = log
    for b, found in enumerate(tables["notes bins"]):
        part = [row for row in rows if row["bin"] == b]
        values = [row["contribution"] for row in part]
        names = ("tokens", "old", "sd", "size", "lp", "new size")
        assert [found[name] for name in names] == close([
            len(part), mean(values), statistics.stdev(values), mean(sizes(part, "contribution")),
            mean([row["log_prob"] for row in part]), mean(sizes(part, "gradient"))])


def test_bins_are_closed_on_the_right(tmp_path):
    """One answer of 11 tokens: t / 11 up to 10/11, so edges are k/11: 0 and 1 share the first bin,
    each other place is the last of its own."""
    found = notes_of(write_log(tmp_path / "run", {1: credit_columns([11], [0])}))
    assert found.total("bin", "tokens").tolist() == [2, *[1] * 9]


def test_early_over_late(log):
    rows, _, tables = log
    places = [row["position"] for row in rows]
    low, high = np.quantile(places, [0.2, 0.8])
    for unit, column in UNITS.items():
        first, last = (mean(sizes([r for r in rows if r["bin"] == b], unit)) for b in (0, 9))
        early = mean(sizes([r for r in rows if r["position"] < low], unit))
        late = mean(sizes([r for r in rows if r["position"] > high], unit))
        assert [row[column] for row in tables["notes early"]] == close(
            [first / last, early / late])


def test_classes(log):
    rows, _, tables = log
    assert [row["class"] for row in tables["notes classes"]] == ["filler"] * 4 + ["reasoning"] * 4
    for found in tables["notes classes"]:
        part = [row for row in rows if row["class"] == found["class"]]
        expected = {"share of the tokens": [len(part) / len(rows)] * 2,
                    "mean log p; mean s": [mean([row[name] for row in part])
                                           for name in ("log_prob", "s")],
                    "mean": [mean([row[unit] for row in part]) for unit in UNITS],
                    "mean absolute": [mean(sizes(part, unit)) for unit in UNITS]}
        assert [found["old"], found["new"]] == close(expected[found[""]])


def test_classes_by_position(log):
    rows, found, tables = log
    for line in tables["notes classes by position"]:
        fifth = int(line["part"].split("-")[0]) // 20
        part = [r for r in rows if (r["fifth"], r["class"]) == (fifth, line["class"])]
        assert [line[name] for name in ("tokens", "lp", "size", "new size")] == close([
            len(part), mean([row["log_prob"] for row in part]),
            mean(sizes(part, "contribution")), mean(sizes(part, "gradient"))])
    ahead = [sum(mean_at(rows, f, "filler", unit) > mean_at(rows, f, "reasoning", unit)
                 for f in range(5)) for unit in UNITS]
    with np.errstate(invalid="ignore"):
        said, _ = notes.classes_by_fifth(found).notes
    assert f"in {ahead[0]} of 5 bins, and measured by A w s in {ahead[1]}." in said


def mean_at(rows, fifth, name, unit):
    return mean(sizes([r for r in rows if (r["fifth"], r["class"]) == (fifth, name)], unit))


def test_top_tokens(log):
    rows, _, tables = log
    for found in tables["notes top tokens"]:
        part = [row for row in rows if repr(row["text"]) == found["token"]]
        of_class = [row for row in rows if row["class"] == found["class"]]
        assert part[0]["class"] == found["class"]
        assert [found[name] for name in ("tokens", "share", "size", "new size")] == close([
            len(part), len(part) / len(of_class), mean(sizes(part, "contribution")),
            mean(sizes(part, "gradient"))])
        assert found["theirs"] == ("yes" if found["token"] == "'>'" else "")
    counts = [row["tokens"] for row in tables["notes top tokens"] if row["class"] == "filler"]
    assert counts == sorted(counts, reverse=True) and len(counts) == 4


def test_the_unit_says_whether_a_weight_is_in_it(tmp_path):
    plain, weighted = (write_log(tmp_path / f"{w}", {1: credit_columns([2], [0], weight=[w, w])})
                       for w in (1, 0.5))
    assert notes.headings(notes_of(plain))["old"] == "A log p"
    assert notes.headings(notes_of(weighted))["old"] == "A w log p"
    assert notes_of(weighted).mean("all", "contribution") == close([0.5 * np.log(0.5)])


def test_beside_a_discounted_run_stand_the_figures_of_theirs_alone(tmp_path):
    """The notes published sizes of their run with weight 0.75, but neither its log p nor its t."""
    config = {"mitigation": "outcome_conditional", "think_discount": 0.75}
    folder, _ = random_log(tmp_path / "run", **config)
    tables = by_name(notes.notes_tables(notes_of(folder)))
    sizes_of = {row["class"]: row["theirs"] for row in tables["notes classes"]
                if row[""] == "mean absolute"}
    assert sizes_of == {"filler": 0.348, "reasoning": 0.247}
    early = [row["theirs"] for row in tables["notes early"]]
    assert early == [None, pytest.approx(1 / 3)]
    others = [row["theirs"] for name in ("contribution", "sign", "t")
              for row in tables[f"notes {name}"]]
    others += [row["notes' size"] for row in tables["notes bins"]]
    others += [row["notes' lp"] for row in tables["notes classes by position"]]
    assert set(others) == {None}
    [summary] = tables["notes summary"]
    assert (summary["their end"], summary["theirs"]) == (0.12, pytest.approx(0.348 / 0.247))


def test_pictures_show_what_the_tables_say(log, tmp_path, monkeypatch):
    rows, found, tables = log
    kept = []
    monkeypatch.setattr(notes, "save", lambda figure, *_: kept.append(figure))
    notes.draw_notes(found, tmp_path)
    bars, histogram, cloud, classes, _ = kept[0].axes
    whole = mean(sizes(rows, "contribution"))
    assert [bar.get_height() for bar in bars.patches[:10]] == close(
        [row["size"] / whole for row in tables["notes bins"]])
    values = np.clip([row["contribution"] for row in rows], -5, 5)
    assert histogram.patches[0].get_data().values.tolist() == (
        np.histogram(values, np.linspace(-5, 5, 101))[0].tolist())
    assert np.nansum(cloud.collections[0].get_array()) == len(rows)
    for line, name in zip(classes.lines, ("filler", "reasoning")):  # three steps, so three blocks
        assert line.get_ydata().tolist() == close([mean(sizes(
            [r for r in rows if (r["step"], r["class"]) == (step, name)], "contribution"))
            for step in (1, 2, 3)])
    notes.plt.close(kept[0])


def test_a_token_that_no_tokenizer_knows_is_refused(tmp_path):
    columns = credit_columns([3], [0], token_id=np.array([1, 2, 10 ** 6], np.int32))
    said = refusal(notes_of, write_log(tmp_path / "run", {1: columns}))
    assert "step_000001.npz is damaged: it has a token 1000000, which" in said


def test_a_run_without_credit_files_is_refused_in_a_sentence(tmp_path):
    said = refusal(main, ["notes", str(write_log(tmp_path / "without", {}))])
    assert "has no credit files, which hold its tokens" in said


def test_the_summary_by_hand(tmp_path, capsys):
    """Filler ' and' with A log p -2 and 3 tokens, reasoning ' 7' with -1 and 1 token. The notes'
    plain run had 15% and a ratio of 1.31; of a weighting that they did not try nothing is known."""
    filler, reasoning = (ids_of(text)[0] for text in (" and", " 7"))
    columns = credit_columns([4], [0], token_id=[filler] * 3 + [reasoning],
                             log_prob=[-2, -2, -2, -1], collision=np.full(4, 0.5),
                             section=[1, 1, 1, 2])
    lines = [{"step": step, "gradient_norm": 1.0 + 2 * (step % 2), "success": step / 10}
             for step in range(1, 11)]
    runs = [write_log(tmp_path / name, {1: columns}, {"mitigation": name}, lines)
            for name in ("none", "random")]
    plain, random = rows_in(notes.summary([notes_of(run) for run in runs]))
    s = [(1.5 - 2 * np.exp(log_prob)) ** 0.5 for log_prob in (-2, -1)]
    metrics, _ = rows_in(notes.four_metrics(
        {run.name: [notes.metrics_of(notes_of(run))] for run in runs}))
    assert metrics["curve"] == "15% 35% 55% 75% 95%" and metrics["end"] is None
    assert (metrics["norm"], metrics["sd"]) == (2, 1)
    notes.print_metrics({"both": dict(enumerate(map(Run, runs)))})
    assert "| both | 15% 35% 55% 75% 95% |" in " ".join(capsys.readouterr().out.split())
    assert metrics["answer"] == pytest.approx(s[1] / (3 * s[0] + s[1]))
    assert (plain["filler"], plain["reasoning"], plain["ratio"], plain["new"]) == (
        *map(pytest.approx, (2, 1, 2, s[0] / s[1])),)
    assert (plain["their end"], plain["theirs"]) == (0.15, pytest.approx(0.333 / 0.254))
    assert (random["their end"], random["theirs"]) == (None, None)


def test_the_change_is_measured_at_some_steps_only(tmp_path):
    """Whichever step comes first: where it was not measured it is not known."""
    with_change, without = (credit_columns([2], [0], **more) for more in (
        {"change": [0.5, -0.5]}, {}))
    for number, files in enumerate(({1: with_change, 2: without}, {1: without, 2: with_change})):
        change = notes_of(write_log(tmp_path / f"{number}", files))["change"]
        assert np.nansum(np.abs(change)) == 1 and np.isnan(change).sum() == 2


def test_the_command_prints_the_tables_and_draws_the_pictures(tmp_path, capsys):
    folder, _ = random_log(tmp_path / "run")
    main(["notes", str(folder)])
    printed = capsys.readouterr().out
    tables = notes.notes_tables(notes_of(folder))
    assert titles_in(printed) == [table.title for table in tables]
    assert {table.name for table in tables} == {f"notes {name}" for name in (
        "contribution", "sign", "t", "bins", "early", "classes", "classes by position",
        "top tokens", "summary", "metrics")}
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 100
    assert (folder / "analysis/notes.png").exists()
    folders = make(tmp_path, {"a": (0.5, {}), "b": (0.2, {"mitigation": "random"})}, seeds=1)
    main(["notes", *map(str, folders)])
    printed = capsys.readouterr().out
    assert titles_in(printed) == [table.title for table in tables[-2:]]
    assert all(Path(folder).name in printed for folder in folders)
