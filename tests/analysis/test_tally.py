"""Every table against its definition, in plain loops; sizes, classes, bins and t by hand."""
import statistics

import numpy as np
import pytest
from conftest import ROOT, credit_columns, write_log
from logs import by_name, ids_of, random_log, tables_of, tallied

import analyze
from analysis.earlier import PUBLISHED, PUBLISHED_DISCOUNTED
from analysis.tally import CLASSES, UNITS, cut_edges
from analysis.why import forks
from engine.tokens import KINDS, SECTIONS, load_tokenizer, naive_class
from harness.metrics import wilson_interval


def bin_of(row, rows, bins):
    """pandas.cut of relative positions: bins of equal width, closed on the right. On an edge the
    last bit decides, so the edges are made as pandas makes them."""
    edges = np.linspace(0, max(r["position"] / r["length"] for r in rows), bins + 1)[1:]
    return next(b for b, edge in enumerate(edges) if row["position"] / row["length"] <= edge)


def mean_of(rows, name):
    return statistics.fmean(r[name] for r in rows) if rows else None


def early_over_late(rows):
    """The mean gradient of the first fifth over that of the last."""
    early = mean_of([r for r in rows if r["middle"] < 0.2], "abs gradient")
    return early / mean_of([r for r in rows if r["middle"] >= 0.8], "abs gradient")


def plain_rows(folder, files):
    """The same log as a list of dictionaries, one a token, as the earlier experiment kept it."""
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
                        "id": token, "text": tokenizer.decode([token], skip_special_tokens=False),
                        "contribution": row["advantage"] * row["log_prob"]}
                rows.append(row)
    return rows


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The tokens of a run, by `plain_rows`, each with its sizes; its tally and its tables."""
    folder, files = random_log(tmp_path_factory.mktemp("logs") / "run")
    rows = plain_rows(folder, files)
    for r in rows:
        s = (1 - 2 * np.exp(r["log_prob"]) + r["collision"]) ** 0.5  # norm(onehot - p)
        r["gradient"] = r["advantage"] * r["weight"] * s
        r["s"] = s
        for name in ("advantage", *UNITS):
            r[f"abs {name}"] = abs(r[name])
        r["class"], r["middle"] = naive_class(r["text"]), (r["position"] + 0.5) / r["length"]
    run = {"folder": folder, "config": {"mitigation": "none", "steps": 3},
           "metrics": [{"step": 2, "gradient_norm": 0.5}], "evaluations": []}
    tally = tallied(folder)
    return rows, tally, by_name(sum(analyze.run_chapters(run, tally).values(), []))


def test_contribution_statistics(log):
    rows, _, tables = log
    for column, unit in zip(("A lp", "A w s"), UNITS):
        values = [r[unit] for r in rows]
        assert [row[column] for row in tables["contribution"]] == pytest.approx(
            [statistics.fmean(values), statistics.stdev(values),
             statistics.fmean(map(abs, values)), min(values), max(values)], rel=1e-5)


def test_ten_position_bins(log):
    rows, _, tables = log
    for b, (old, new) in enumerate(zip(tables["position"], tables["gradient by position"])):
        part = [r for r in rows if bin_of(r, rows, 10) == b]
        rest = [r for r in rows if bin_of(r, rows, 10) != b]
        assert old["tokens"] == len(part)
        if len(part) > 1:
            found = [old[name] for name in ("A lp", "abs(A lp)", "log p", "spread")]
            assert found == pytest.approx(
                [mean_of(part, name) for name in ("contribution", "abs contribution", "log_prob")]
                + [statistics.stdev(r["contribution"] for r in part)])
            size = mean_of(part, "abs gradient")
            assert [new[name] for name in ("entropy", "abs(A) w s", "over rest")] == pytest.approx(
                [mean_of(part, "entropy"), size, size / mean_of(rest, "abs gradient")],
                rel=1e-5)


def test_the_first_fifth_over_the_last(log):
    rows, tally, _ = log
    finding = analyze.position_gradients(tally).finding
    assert f"gets {early_over_late(rows):.2f} times the gradient of the last" in finding


def test_classes_and_classes_by_fifth(log):
    rows, _, tables = log
    for found in tables["classes"]:
        name, made_by = found["class"].rstrip(")").split(" (")
        if made_by == "regex":
            part = [r for r in rows if r["class"] == name]
            assert (found["tokens"], found["of all"]) == (len(part), len(part) / len(rows))
            names = {"log p": "log_prob", "A lp": "contribution", "abs(A lp)": "abs contribution",
                     "abs(A) w s": "abs gradient", "abs(A)": "abs advantage", "s": "s"}
            for key, measure in names.items():
                expected = mean_of(part, measure) if part else None
                assert found[key] == (expected and pytest.approx(expected, rel=1e-5))
    seen = 0
    for found in tables["class by position"]:
        part = [r for r in rows if r["class"] == found["class"]
                and bin_of(r, rows, 5) == int(found["part"].split("-")[0]) // 20]
        assert found["tokens"] == len(part)
        assert found["abs(A lp)"] == pytest.approx(mean_of(part, "abs contribution"))
        seen += len(part)
    assert seen == len(rows)
    filler, reasoning = ([r for r in rows if r["class"] == name] for name in CLASSES[:2])
    for found, unit in zip(tables["filler over reasoning"][1:], UNITS):
        expected = mean_of(filler, f"abs {unit}") / mean_of(reasoning, f"abs {unit}")
        assert found["crude"] == pytest.approx(expected, rel=1e-5)


def test_shares_of_the_gradient(log):
    rows, _, tables = log
    total = mean_of(rows, "abs gradient") * len(rows)
    for key, names in (("kind", KINDS), ("section", SECTIONS)):
        for found in tables[f"gradient by {key}"]:
            part = [r for r in rows if names[r[key]] == found[key]]
            size = mean_of(part, "abs gradient")
            expected = {"gradient": size * len(part) / total, "abs(A) w s": size,
                        "tokens": len(part) / len(rows), "s": mean_of(part, "s"),
                        "abs(A)": mean_of(part, "abs advantage")}
            assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_forking_and_following_tokens(tmp_path):
    """Three tokens, ten times each, one of them only nine times."""
    def each(values):
        return np.repeat(values, [10, 10, 10, 9])

    ids = [ids_of(text)[0] for text in (" and", " 7", "\n", " +")]
    columns = credit_columns([39], [0], token_id=each(ids), entropy=each([0.5, 2.0, 0.1, 9.0]),
                             weight=np.full(39, 3.0), kind=each([0, 2, 1, 3]))
    rows = forks(tallied(write_log(tmp_path / "run", {1: columns}))).to_json()["rows"]
    assert [(row[""], row["token"]) for row in rows] == [
        *(("forking", text) for text in ("' 7'", "' and'", "'\\n'")),
        *(("following", text) for text in ("'\\n'", "' and'", "' 7'"))]
    assert (rows[0]["entropy"], rows[0]["count"], rows[0]["kind"]) == (2.0, 10, "number")
    assert rows[0]["abs(A) w s"] == pytest.approx(3 * 0.5 ** 0.5)


def test_growth_over_training(log):
    rows, _, tables = log  # three steps, so each row is one
    for step, found in enumerate(tables["growth"], 1):
        part = [r for r in rows if r["step"] == step]
        answers = {r["episode"]: r["group"][1] for r in part}
        expected = {"length": len(part) / len(answers), "entropy": mean_of(part, "entropy"),
                    "flat": sum(group == 0 for group in answers.values()) / len(answers),
                    "new": mean_of(part, "abs gradient"), "e/l": early_over_late(part)}
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)
        assert (found["steps"], found["norm"]) == (str(step), 0.5 if step == 2 else None)


def test_a_run_with_the_published_discount_has_its_published_figures_beside_it(tmp_path):
    """Of 0.75 the earlier experiment published the five bins, of other discounts it did not."""
    for discount, known in ((0.5, PUBLISHED), (0.75, PUBLISHED | PUBLISHED_DISCOUNTED)):
        folder, _ = random_log(tmp_path / str(discount), mitigation="outcome_conditional",
                               think_discount=discount)
        tables = tables_of(folder)
        for name in ("filler", "reasoning"):
            assert [row["pub.*"] for row in tables["class by position"]
                    if row["class"] == name] == list(known[f"{name} by fifth"])
        assert tables["filler over reasoning"][0]["crude"] == known["filler over reasoning"]
        sizes = {row["class"]: row["abs(A lp)"] for row in tables["classes"]}
        assert sizes["filler (pub.*)"] == known["classes"]["filler"][-1]


def test_the_page_for_those_who_come_from_it_has_what_follows_from_its_figures():
    """Intervals of 19, 15 and 0 of 128; ratios of the published sizes, as they are and with each
    fifth weighing the same."""
    page = (ROOT / "research/published_mistake.md").read_text()
    for right, published in ((19, "15%"), (15, "12%"), (0, "0% at step 60")):
        low, high = wilson_interval(right, 128)
        assert f"| {published} | {low:.1%} to {high:.1%} |" in page
    for figures in (PUBLISHED, PUBLISHED | PUBLISHED_DISCOUNTED):
        filler, reasoning = (size for *_, size in figures["classes"].values())
        like = np.mean(figures["filler by fifth"]) / np.mean(figures["reasoning by fifth"])
        crude = filler / reasoning
        assert f"| {filler}, {reasoning} | {crude:.2f} | {like:.2f} |" in page


@pytest.mark.parametrize("name, texts", [
    ("structure", ("<think>", " </answer> ")),
    ("filler", ("</", "think", ">\n", "Times", "", ",", "<think>a", "[")),
    ("reasoning", (" 12", "x2", "+", " =", "()", " times", "2 + 3"))])
def test_the_earlier_classes(name, texts):
    assert {naive_class(text) for text in texts} == {name}


def test_bins_are_those_of_pandas_cut():
    """pandas.cut([0, 0.25, 0.5, 0.75], 3, retbins=True) has the edges -0.00075, 0.25, 0.5, 0.75."""
    assert cut_edges(4, 3) == pytest.approx([-0.00075, 0.25, 0.5, 0.75])
    assert (np.searchsorted(cut_edges(4, 3), [0, 0.25, 0.26, 0.75]) - 1).tolist() == [0, 0, 1, 2]
    assert (np.searchsorted(cut_edges(1, 10), [0.0]) - 1 < 10).all()
