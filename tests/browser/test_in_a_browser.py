"""The pages as a reader has them: opened from a file in headless Chromium, with mouse, touch and
keys."""
import json
import re
import shutil

import numpy as np
import pytest
from conftest import INSTALL, ROOT, credit_columns, evaluation, write_log
from tokenizers import AddedToken, Tokenizer

import analyze
from analysis.account import with_numbers
from analysis.measured import keep
from logs import answers_of

playwright = pytest.importorskip("playwright.sync_api", reason=INSTALL)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="to run it, install Chromium: apt-get install chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 800}

# What a model could write to end the script, to run one, to colour a terminal, or to turn text.
HOSTILE = ["</script>", "<script>window.hacked = 1</script>", "\u202e",
           '<img src="x" onerror="window.hacked = 1">', "\x1b[31m", "<!--", "&amp;", "end"]
RIGHT_TO_LEFT = HOSTILE.index("\u202e")
NAME = '<img src="x" onerror="window.hacked = 1"></script>'
LONG = 99 * "x"  # a word without an end
CHANGES = {1: np.arange(16) / 100, 4: np.append(np.full(15, 0.001), 0.9)}
STEPS, EVALUATED = 4, (0, 2, 4)


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """Four steps of two answers, the first of which solved its problem; a change was measured in
    the first and the last step. All that a model, a problem or a flag can write is hostile."""
    tokenizer = Tokenizer.from_file(str(ROOT / "models/tiny/tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in HOSTILE])
    ids = [tokenizer.token_to_id(text) for text in HOSTILE]
    lines = []
    for step in EVALUATED:
        shown = {"problem": "".join(HOSTILE) + LONG, "text": "".join(HOSTILE), "texts": HOSTILE,
                 "answer": int(step > 0), "log_prob": (-np.arange(8) / 8).tolist()}
        lines.append({**evaluation(step, [0, step > 0]), "shown": [shown]})
    files = {}
    for step in range(1, STEPS + 1):
        more = {"change": CHANGES[step]} if step in CHANGES else {}
        files[step] = credit_columns(
            [8, 8], [0, 0], token_id=[*ids, *ids], advantage=[1] * 8 + [-1] * 8,
            kind=[0, 2] * 8, section=[0, 1, 2, 2] * 4, reward=[1.1, 0.1], reward_answer=[1, 0],
            prompt_ids=ids, prompt_start=[0], **more)
    metrics = [{"step": step, "success": 0.5, "N": 16, "weight_factor": 1.0,
                "gradient_norm": 0.1} for step in files]
    folder = write_log(tmp_path_factory.mktemp("hostile") / "a&b", files,
                       {"mitigation": NAME, "model": NAME + LONG}, metrics, lines)
    tokenizer.save(str(folder / "tokenizer.json"))
    keep(folder, {"step": 4, "answer": 1, "continuations": 10, "token_id": ids,
                  "credit": [0.0] * 5 + [0.09, 0.11, -0.5], "low": [-0.1] * 8, "high": [0.1] * 8,
                  "credit in words": [f"a credit, {text}" for text in HOSTILE],
                  "others": HOSTILE})
    analyze.main([str(folder)])
    return folder


@pytest.fixture(scope="module")
def run_page(hostile_run):
    return hostile_run / "analysis/report.html"


@pytest.fixture(scope="module")
def comparison_page(hostile_run):
    other = shutil.copytree(hostile_run, hostile_run.parent / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "mitigation": "none"}))
    folder = hostile_run.parent / "comparison"
    analyze.main([str(hostile_run), str(other), "--output_dir", str(folder)])
    return folder / "report.html"


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Opens a file. No page may print an error, or ask for anything but itself."""
    said, asked, contexts = [], [], []

    def visit(path, address="", screen=WIDE, **options):
        contexts.append(chromium.new_context(viewport=screen, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{path.as_uri()}{address}")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not said
    assert all(url.startswith(("file:", "data:image/png")) for url in asked)


def training(page, side=0):
    """The box of the training answer on the left (0, solved) or right (1, not solved)."""
    return page.locator("#panes .tokens").nth(side)


def chosen(box):
    """The number of the chosen token, or None."""
    return box.evaluate("box => [...box.children].findIndex(s => s.matches('.chosen'))")


def account_of(page, side=0):
    """Label -> line, and the caption."""
    table = page.locator("#panes .account").nth(side)
    rows = [cells.split("\t", 1) for cells in table.locator("tr").all_inner_texts()]
    return {label: line.split("\n")[0] for label, line in rows}, table.locator("caption")


def test_the_slider_goes_through_the_steps_and_each_pane_says_what_it_shows(run_page, visit):
    page = visit(run_page)
    step, said, nearest = (page.locator(f"#{name}") for name in ("step", "held-out", "nearest"))
    title = page.locator("#answers-title")
    assert step.inner_text() == "step 0 of 4"
    assert said.inner_text() == ("Before training, 0.0% of the held-out problems were solved "
                                 "(sampled answers).")
    assert nearest.inner_text() == ""
    assert title.inner_text() == "Training answers of step 1, token by token"
    assert page.locator("#held-out-answers .tokens").count() == 1
    start = page.locator("#mark").bounding_box()["x"]

    page.locator("#stop").focus()
    page.keyboard.press("ArrowRight")
    assert step.inner_text() == page.locator("#stop").get_attribute("aria-valuetext") == (
        "step 1 of 4")
    assert nearest.inner_text() == "There was no evaluation at step 1, so this is the nearest one."
    assert page.locator("#panes .position").first.inner_text().startswith(
        "Step 1, answer 0 (1 of 1 here): ")
    one_step = page.locator("#mark").bounding_box()["x"] - start

    page.keyboard.press("End")
    assert step.inner_text() == "step 4 of 4" and nearest.inner_text() == ""
    assert said.inner_text().startswith("After step 4, 50.0% of the held-out problems")
    assert title.inner_text() == "Training answers of step 4, token by token"
    before, after = page.locator("#held-out-answers .one").all_inner_texts()
    assert before.startswith("before training: wrong") and after.startswith("after step 4: right")
    assert page.locator("#mark").bounding_box()["x"] - start == pytest.approx(4 * one_step, abs=1)
    assert one_step > 10


def test_no_heading_is_hidden_below_the_slider(run_page, visit):
    for screen in (WIDE, NARROW):
        page = visit(run_page, "#step=4", screen)
        page.evaluate("document.body.style.paddingBottom = '2000px'")  # room to scroll
        page.evaluate("location.hash = 'answers-title'")
        page.wait_for_function("scrollY > 0")
        slider = page.locator("#slide").bounding_box()
        assert slider["y"] == 0  # it stays at the top
        assert page.locator("#answers-title").bounding_box()["y"] >= slider["height"]
        assert page.locator("#step").inner_text() == "step 4 of 4"  # no address of a step


def test_a_click_on_a_token_shows_its_account(run_page, visit):
    """Rewards 1.1 and 0.1: mean 0.6, deviation 0.5. p = 1/2 of two, so s = 0.7071; the term of the
    loss is -1 x 1 x 1 x -0.6931 / 16 = 0.0433. The push is -1 x 1 x 0.5."""
    page = visit(run_page)
    training(page).locator("span").nth(3).click()
    account, caption = account_of(page)
    assert account["group"] == "their mean is 0.6, and their standard deviation 0.5"
    assert account["s"].endswith("= 0.7071") and "/ 16 = 0.0433. " in account["term"]
    assert account["change"] == (
        "the step changed its log p by 0.03, so that p = 0.5152 after it")
    assert caption.inner_text() == (f"Step 1, answer 0, token 3, {json.dumps(HOSTILE[3])}: number "
                                    "token, section answer, gradient size 0.7071")
    page.locator("#push").click()
    assert account_of(page)[0] == {}  # the answer is shaded anew, and no token of it is chosen
    training(page, 1).locator("span").nth(1).click()
    account, caption = account_of(page, 1)
    assert caption.inner_text().endswith("push -0.5") and "of the 2 answers" in account["rewards"]


@pytest.mark.parametrize("forward, back", [("ArrowDown", "ArrowUp"), ("ArrowRight", "ArrowLeft")])
def test_the_arrow_keys_go_through_the_tokens_of_a_training_answer(run_page, visit, forward, back):
    page = visit(run_page)
    box = training(page)
    box.focus()
    for key, t in ((forward, 0), (forward, 1), (forward, 2), (back, 1), (back, 0), (back, 0)):
        page.keyboard.press(key)
        assert chosen(box) == t
        assert f", token {t}, " in account_of(page)[1].inner_text()
    for _ in range(10):
        page.keyboard.press(forward)
    assert chosen(box) == 7


def test_a_probability_is_shown_on_hover_touch_and_keys(run_page, visit):
    """p = exp(-t/8): 0.61 of token 4, 0.54 of token 5."""
    page = visit(run_page, "#step=4", has_touch=True, screen=NARROW)
    for side in (0, 1):
        box = page.locator("#held-out-answers .tokens").nth(side)
        said = page.locator("#held-out-answers .chance").nth(side)
        assert box.locator("span").nth(5).get_attribute("title") == "p = 0.54"
        box.locator("span").nth(4).tap()
        assert said.inner_text() == f"token 4, {json.dumps(HOSTILE[4])}: p = 0.61"
        box.focus()
        page.keyboard.press("ArrowRight")
        assert said.inner_text() == f"token 5, {json.dumps(HOSTILE[5])}: p = 0.54"
        assert chosen(box) == 5


def alpha(box, t):
    colour = box.locator("span").nth(t).evaluate("s => getComputedStyle(s).backgroundColor")
    return float(re.fullmatch(r"rgba\(\d+, \d+, \d+, ([\d.]+)\)", colour)[1])


def test_a_change_is_shaded_by_its_step(run_page, visit):
    """Step 1 has changes 0, 0.01, ... 0.15; step 4 has 15 of 0.001 and one of 0.9. 95% of 16 tokens
    are 16, so the full colour is that of the largest."""
    page = visit(run_page)
    page.locator("#change").click()
    assert page.locator("#change").get_attribute("aria-pressed") == "true"
    assert page.locator("#quantity").input_value() == "change"
    assert page.locator("#most").inner_text() == "0.150 or more"
    assert page.locator("#scale").inner_text() == (
        "The scale is that of step 1: the full colour stands for 0.150.")
    assert alpha(training(page), 7) == pytest.approx(0.8 * (0.07 / 0.15) ** 0.5, abs=2e-3)
    assert alpha(training(page, 1), 7) == pytest.approx(0.8, abs=2e-3)
    page.locator("#stop").focus()
    page.keyboard.press("End")
    assert page.locator("#most").inner_text() == "0.900 or more"
    assert alpha(training(page), 7) == pytest.approx(0.8 * (0.001 / 0.9) ** 0.5, abs=2e-3)


@pytest.mark.usefixtures("undrawn")
def test_one_large_change_does_not_hide_the_others(tmp_path, visit):
    """Of 20 tokens 19 changed by 0.01 and one by 2: the full colour stands for 0.01."""
    columns = credit_columns([20], [0], change=[*[0.01] * 19, -2], reward=[1.1], reward_answer=[1])
    analyze.main([str(write_log(tmp_path / "run", {1: columns}))])
    page = visit(tmp_path / "run/analysis/report.html")
    page.locator("#change").click()
    assert page.locator("#least").inner_text() == "-0.0100 or less"
    assert page.locator("#scale").inner_text() == (
        "The scale is that of step 1: the full colour stands for 0.0100, and for the 1 of 20 "
        "tokens that have more (at most 2.00).")
    assert [alpha(training(page), t) for t in (0, 19)] == pytest.approx([0.8, 0.8], abs=2e-3)


@pytest.mark.usefixtures("undrawn")
def test_more_answers_than_one_are_behind_the_buttons(tmp_path, visit):
    columns = credit_columns([1, 2, 3], [0, 0, 0], reward=[1.1, 0.1, 1.1], reward_answer=[1, 0, 1])
    analyze.main([str(write_log(tmp_path / "run", {1: columns}))])
    page = visit(tmp_path / "run/analysis/report.html")
    headings = page.locator("#panes h3").all_inner_texts()
    assert headings == ["Answers that solved their problem", "Answers that did not"]
    place, following = page.locator("#panes .position"), page.locator("#panes .next")
    assert place.nth(0).inner_text() == (
        "Step 1, answer 0 (1 of 2 here): reward 1.1, solved. The 3 answers to this problem have a "
        "mean reward of 0.77.")
    assert following.nth(1).is_disabled()
    following.nth(0).click()
    assert place.nth(0).inner_text().startswith("Step 1, answer 2 (2 of 2 here)")
    assert training(page).locator("span").count() == 3 and following.nth(0).is_disabled()
    page.locator("#panes .previous").nth(0).click()
    assert training(page).locator("span").count() == 1
    # or they are chosen by their numbers, which are those of tools.follow
    number = page.locator("#panes .number").nth(0)
    assert number.locator("option").all_inner_texts() == ["0", "2"]
    number.select_option("2")
    assert place.nth(0).inner_text().startswith("Step 1, answer 2 (2 of 2 here)")
    page.locator("#panes .previous").nth(0).click()
    assert number.input_value() == "0"


def test_the_run_is_played(run_page, visit):
    """From the step that is shown to the last. Then the button starts from the beginning, and the
    slider stops it."""
    page = visit(run_page, "#step=2")
    page.clock.install()  # the page's time stands still until it is told
    button, slider, step = (page.locator(f"#{name}") for name in ("play", "stop", "step"))
    button.click()
    assert button.inner_text() == "pause" and step.inner_text() == "step 2 of 4"
    page.clock.run_for(1000)
    assert step.inner_text() == "step 4 of 4" and button.inner_text() == "play"
    button.click()
    page.clock.run_for(1000)
    assert step.inner_text() == "step 1 of 4"
    slider.focus()
    page.keyboard.press("Home")
    assert button.inner_text() == "play" and slider.input_value() == "0"


def test_the_measured_answer_is_a_button_away(run_page, visit):
    """Its credit was measured, that of no other answer."""
    page = visit(run_page)
    assert page.locator("#known").inner_text() == ""
    page.locator("#credit").click()
    known = page.locator("#known")
    assert known.inner_text().replace("\n", " ") == (
        "The credit was measured for step 4, answer 1")
    assert training(page, 1).locator("span").nth(7).evaluate(
        "s => getComputedStyle(s).backgroundColor") == "rgba(0, 0, 0, 0)"
    known.locator("button").click()
    assert page.locator("#step").inner_text() == "step 4 of 4"
    assert alpha(training(page, 1), 7) == pytest.approx(0.8, abs=2e-3)
    # an interval reaches 0.1 to each side
    assert training(page, 1).locator("span").nth(5).evaluate(
        "s => getComputedStyle(s).backgroundColor") == "rgba(0, 0, 0, 0)"
    assert alpha(training(page, 1), 6) == pytest.approx(0.8 * (0.11 / 0.5) ** 0.5, abs=2e-3)
    page.keyboard.press("ArrowRight")  # the answer has the focus
    account, caption = account_of(page, 1)
    assert caption.text_content().endswith("section other, credit 0")
    assert account["credit"] == f"a credit, {HOSTILE[0]}"
    assert account["others"] == HOSTILE[0]
    assert training(page, 1).locator("span").nth(7).get_attribute("title") == "credit -0.5"


def test_an_address_opens_a_token_or_a_step(run_page, visit):
    page = visit(run_page, "#step=4&answer=1&token=7")
    assert chosen(training(page, 1)) == 7 and page.locator("#step").inner_text() == "step 4 of 4"
    account, caption = account_of(page, 1)
    assert caption.text_content().startswith("Step 4, answer 1, token 7, ")
    page.evaluate("location.hash = 'step=1'")
    page.wait_for_function("document.getElementById('step').textContent === 'step 1 of 4'")
    assert page.locator("#stop").input_value() == "1"


@pytest.mark.parametrize("which", ["run_page", "comparison_page"])
def test_nothing_is_scrolled_sideways_on_a_narrow_screen(which, request, visit):
    page = visit(request.getfixturevalue(which), screen=NARROW)
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    if which == "run_page":
        page.locator("#stop").focus()
        page.keyboard.press("End")
        training(page).locator("span").nth(3).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


@pytest.mark.parametrize("which", ["run_page", "comparison_page"])
def test_what_a_model_wrote_is_text_and_nothing_else(which, request, visit):
    page = visit(request.getfixturevalue(which), "#step=4")
    assert page.evaluate("window.hacked") is None
    assert page.locator("script").count() == 2  # the data and the page's own
    assert page.locator("img:not([src^='data:image/png;base64,'])").count() == 0
    assert NAME in page.locator("body").inner_text()
    if which == "run_page":
        boxes = [*page.locator("#held-out-answers .tokens").all(), training(page),
                 training(page, 1)]
        assert [box.locator("span").all_text_contents() for box in boxes] == [HOSTILE] * 4
        assert page.locator("#held-out-answers .problem").text_content() == "".join(HOSTILE) + LONG
        assert page.locator("#panes .prompt").first.text_content() == "".join(HOSTILE)
        assert page.locator(".tokens span *, .problem *, .prompt *").count() == 0
        training(page).locator("span").nth(1).click()
        assert json.dumps(HOSTILE[1]) in account_of(page)[1].text_content()


def test_no_token_turns_the_text_after_it(run_page, visit):
    """The tokens behind it stand in their order, line by line."""
    for screen in (WIDE, NARROW):
        spans = training(visit(run_page, screen=screen)).locator("span")
        places = [spans.nth(t).evaluate("span => [span.getClientRects()[0].y, "
                                        "span.getClientRects()[0].x]")
                  for t in range(RIGHT_TO_LEFT + 2, len(HOSTILE))]
        assert places == sorted(places)


@pytest.mark.usefixtures("undrawn")
def test_the_page_puts_the_same_numbers_in_as_the_command_does(recorded, tmp_path, visit):
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    analyze.main([str(recorded), "--output_dir", str(tmp_path)])
    page = visit(tmp_path / "report.html")
    answers = page.evaluate("answers")
    assert answers[0]["stages"] and len({answer["step"] for answer in answers}) > 1
    of_page = page.evaluate("""answers.map(answer => answer.texts.map((_, t) =>
        STAGES.map(stage => withNumbers(stage[1], answer, t)).filter(text => text !== null)))""")
    ours = answers_of(recorded)
    assert len(ours) == len(answers)
    for answer, rows in zip(ours, of_page):
        for t, texts in enumerate(rows):
            expected = [text for _, text, _ in with_numbers(ours[0]["stages"], answer, t)]
            assert [re.sub(number, "#", text) for text in texts] == [
                re.sub(number, "#", text) for text in expected]
            assert [float(n) for text in texts for n in re.findall(number, text)] == pytest.approx(
                [float(n) for text in expected for n in re.findall(number, text)], rel=2e-3)
