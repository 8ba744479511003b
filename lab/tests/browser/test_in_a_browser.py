"""The pages as a reader has them: opened from a file in headless Chromium, with mouse, touch and
keys."""
import json
import re
import shutil

import numpy as np
import pytest
from conftest import INSTALL, ROOT, credit_columns, evaluation, write_log
from tokenizers import AddedToken, Tokenizer

import lab.tools.page as analyze
from lab.analysis.account import with_numbers
from lab.analysis.answers import answers_of
from lab.analysis.run_folders import Run

playwright = pytest.importorskip("playwright.sync_api", reason=INSTALL)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    CHROMIUM is None, reason="to run it, install Chromium: apt-get install chromium")]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]

# What a model could write to end the script, to run one, to colour a terminal, or to turn text.
HOSTILE = ["</script>", "<script>window.hacked = 1</script>", "\u202e",
           '<img src="x" onerror="window.hacked = 1">', "\x1b[31m", "<!--", "&amp;", "end"]
NAME = '<img src="x" onerror="window.hacked = 1"></script>'


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """Four steps of two answers, the first of which solved its problem. All that a model, a problem
    or a flag can write is hostile."""
    tokenizer = Tokenizer.from_file(str(ROOT / "models/tiny/tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in HOSTILE])
    ids = [tokenizer.token_to_id(text) for text in HOSTILE]
    lines = []
    for step in (0, 2, 4):
        shown = {"problem": "".join(HOSTILE), "text": "".join(HOSTILE), "texts": HOSTILE,
                 "answer": int(step > 0), "log_prob": (-np.arange(8) / 8).tolist()}
        lines.append({**evaluation(step, [0, step > 0]), "shown": [shown]})
    columns = credit_columns(
        [8, 8], [0, 0], token_id=[*ids, *ids], advantage=[1] * 8 + [-1] * 8, kind=[0, 2] * 8,
        section=[0, 1, 2, 2] * 4, reward=[1.1, 0.1], reward_answer=[1, 0], prompt_ids=ids,
        prompt_start=[0], change=np.arange(16) / 100, true_credit=np.arange(16) / 10)
    files = dict.fromkeys((1, 2, 3, 4), columns)
    metrics = [{"step": step, "success": 0.5, "N": 16, "weight_factor": 1.0,
                "gradient_norm": 0.1} for step in files]
    folder = write_log(tmp_path_factory.mktemp("hostile") / "a&b", files,
                       {"mitigation": NAME, "model": NAME}, metrics, lines)
    tokenizer.save(str(folder / "tokenizer.json"))
    analyze.main([str(folder)])
    return folder


@pytest.fixture(scope="module")
def run_page(hostile_run):
    return hostile_run / "analysis/page.html"


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

    def visit(path, address=""):
        contexts.append(chromium.new_context())
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


def account_of(page, side=0):
    """Label -> line, and the caption."""
    table = page.locator("#panes .account").nth(side)
    rows = [cells.split("\t", 1) for cells in table.locator("tr").all_inner_texts()]
    return {label: line.split("\n")[0] for label, line in rows}, table.locator("caption")


def test_the_page_opens_and_the_slider_goes_through_the_steps(run_page, visit):
    """Each pane says what it shows; there was no evaluation at step 1."""
    page = visit(run_page)
    step, said, title = (page.locator(f"#{name}") for name in ("step", "held-out", "answers-title"))
    assert step.inner_text() == "step 0 of 4"
    assert said.inner_text() == ("Before training, 0.0% of the held-out problems were solved "
                                 "(sampled answers).")
    assert title.inner_text() == "Training answers of step 1, token by token"
    page.locator("#stop").focus()
    page.keyboard.press("ArrowRight")
    assert step.inner_text() == "step 1 of 4"
    assert page.locator("#nearest").inner_text() == (
        "There was no evaluation at step 1, so this is the nearest one.")
    page.keyboard.press("End")
    assert step.inner_text() == "step 4 of 4"
    assert said.inner_text().startswith("After step 4, 50.0% of the held-out problems")
    assert title.inner_text() == "Training answers of step 4, token by token"
    before, after = page.locator("#held-out-answers .one").all_inner_texts()
    assert before.startswith("before training: wrong") and after.startswith("after step 4: right")


def test_a_click_on_a_token_or_an_address_shows_its_account(run_page, visit):
    """Rewards 1.1 and 0.1: mean 0.6, deviation 0.5. p = 1/2 of two, so s = 0.7071; the term of the
    loss is -1 x 1 x 1 x -0.6931 / 16 = 0.0433. Of the changes, 0 to 0.15, that of token 7 is 0.07,
    and the largest has the full colour."""
    page = visit(run_page)
    training(page).locator("span").nth(3).click()
    account, caption = account_of(page)
    assert account["group"] == "their mean is 0.6, and their standard deviation 0.5"
    assert account["s"].endswith("= 0.7071") and "/ 16 = 0.0433. " in account["term"]
    assert account["change"] == (
        "the step changed its log p by 0.03, so that p = 0.5152 after it")
    assert caption.inner_text() == (f"Step 1, answer 0, token 3, {json.dumps(HOSTILE[3])}: number "
                                    "token, section answer, gradient size 0.7071")
    page.locator("#change").click()
    assert account_of(page)[0] == {}  # the answer is shaded anew, and no token of it is chosen
    colour = training(page).locator("span").nth(7).evaluate(
        "span => getComputedStyle(span).backgroundColor")
    alpha = re.fullmatch(r"rgba\(\d+, \d+, \d+, ([\d.]+)\)", colour)[1]
    assert float(alpha) == pytest.approx(0.8 * (0.07 / 0.15) ** 0.5, abs=2e-3)
    page = visit(run_page, "#step=4&answer=1&token=6")
    training(page, 1).press("ArrowRight")  # goes on from the token
    assert account_of(page, 1)[1].text_content().startswith("Step 4, answer 1, token 7, ")
    page.evaluate("location.hash = 'step=1'")
    page.wait_for_function("document.getElementById('step').textContent === 'step 1 of 4'")


def test_what_a_model_wrote_is_text_and_nothing_else(run_page, visit):
    page = visit(run_page, "#step=4")
    assert page.evaluate("window.hacked") is None
    assert page.locator("script").count() == 2  # the data and the page's own
    assert page.locator("img:not([src^='data:image/png;base64,'])").count() == 0
    assert NAME in page.locator("body").inner_text()
    boxes = [*page.locator("#held-out-answers .tokens").all(), training(page),
             training(page, 1)]
    assert [box.locator("span").all_text_contents() for box in boxes] == [HOSTILE] * 4
    assert page.locator("#held-out-answers .problem").text_content() == "".join(HOSTILE)
    assert page.locator("#panes .prompt").first.text_content() == "".join(HOSTILE)
    assert page.locator(".tokens span *, .problem *, .prompt *").count() == 0
    training(page).locator("span").nth(1).click()
    assert json.dumps(HOSTILE[1]) in account_of(page)[1].text_content()


def test_the_page_puts_the_same_numbers_in_as_the_command_does(recorded, tmp_path, visit):
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    analyze.main([str(recorded), "--output_dir", str(tmp_path)])
    page = visit(tmp_path / "page.html")
    answers = page.evaluate("answers")
    assert answers[0]["stages"] and len({answer["step"] for answer in answers}) > 1
    of_page = page.evaluate("""answers.map(answer => answer.texts.map((_, t) =>
        STAGES.map(stage => withNumbers(stage[1], answer, t)).filter(text => text !== null)))""")
    ours = answers_of(Run(recorded))
    assert len(ours) == len(answers)
    for answer, rows in zip(ours, of_page):
        for t, texts in enumerate(rows):
            expected = [text for _, text, _ in with_numbers(ours[0]["stages"], answer, t)]
            assert [re.sub(number, "#", text) for text in texts] == [
                re.sub(number, "#", text) for text in expected]
            assert [float(n) for text in texts for n in re.findall(number, text)] == pytest.approx(
                [float(n) for text in expected for n in re.findall(number, text)], rel=2e-3)
