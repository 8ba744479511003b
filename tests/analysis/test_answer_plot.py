"""The picture of one answer: which one is chosen, and how its tokens are laid out in rows."""

import warnings

import matplotlib.image
import numpy as np
import pytest
from conftest import credit_columns, write_log
from logs import ids_of, tallied

from analysis.answer_plot import COLUMNS, choose_answer, draw_answer, lay_out, printable, wrapped
from analysis.sizes import lay_flat


def chosen(lengths, group, reward, answer):
    tokens = lay_flat(credit_columns(lengths, group, reward=reward, reward_answer=answer))
    return choose_answer(tokens)


def test_a_solved_answer_from_a_group_with_spread_of_median_length():
    group = [0, 0, 0, 0, 1, 1, 1, 1]
    reward = [1, 1, 1, 1, 1, 1, 1, 0]
    assert chosen([1, 2, 3, 4, 9, 7, 8, 5], group, reward, reward) == 6
    assert chosen([1, 2, 3, 4, 8, 8, 8, 5], group, reward, reward) == 5  # equally long: by order


def test_without_a_solved_one_from_a_group_with_spread_otherwise_any():
    group, nothing = [0, 0, 1, 1], [0, 0, 0, 0]
    assert chosen([4, 4, 3, 5], group, [0.1, 0.1, 0.1, 0], nothing) == 2
    assert chosen([4, 6, 3, 5], group, nothing, nothing) == 0
    assert chosen([4, 6, 3, 5], group, [1, 1, 1, 1], [1, 1, 1, 1]) == 0


def test_rows_break_between_tokens_and_after_a_line_break():
    sixty = "x" * 60
    assert lay_out([sixty, "yes", "a\nb"], [1.0, 2.0, 3.0]) == [
        [(0, sixty, 1.0), (60, "yes", 2.0), (63, "a\u21b5", 3.0)],
        [(0, "b", 3.0)],
    ]
    assert lay_out([sixty, sixty], [1.0, 2.0]) == [[(0, sixty, 1.0)], [(0, sixty, 2.0)]]
    rows = lay_out(["y" * (2 * COLUMNS + 1)], [0.5])
    assert [len(row[0][1]) for row in rows] == [COLUMNS, COLUMNS, 1]


def test_what_the_font_lacks_is_a_square():
    assert printable("a\n\u6570") == "a\n\u25a1"
    assert wrapped("\nab\n\ncd\n") == ["ab", "", "cd"]


def test_the_picture_is_900_pixels_wide_and_its_caption_says_what_it_shows(tmp_path):
    """Two answers: the solved one has p = 0.5 of two, so s is sqrt(0.5). Dollars are no formula."""
    ids = ids_of(" and 7\n + 5")
    columns = credit_columns(
        [len(ids)] * 2,
        [0, 0],
        token_id=ids * 2,
        reward=[1.1, 0.0],
        reward_answer=[1, 0],
        prompt_ids=ids_of("3 4"),
        prompt_start=[0],
    )
    tally = tallied(write_log(tmp_path / "run", {1: columns, 7: columns}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path, caption = draw_answer(tally, tmp_path)
    assert path == tmp_path / "answer.png" and "A solved answer of step 7" in caption
    assert "(problem 0, answer 0)" in caption and "abs(A) s" in caption
    picture = matplotlib.image.imread(path)
    assert picture.shape[1] == 900
    draw_answer(tally, tmp_path)
    assert np.array_equal(picture, matplotlib.image.imread(path))


@pytest.mark.parametrize("rows, cut", [(30, False), (60, True)])
def test_a_long_answer_is_cut_and_the_caption_says_so(tmp_path, rows, cut):
    ids = ids_of("\n") * rows
    columns = credit_columns([rows], [0], token_id=ids)
    _, caption = draw_answer(tallied(write_log(tmp_path / "run", {1: columns})), tmp_path)
    assert caption.startswith("An answer of step 1") and ("only the beginning" in caption) == cut
