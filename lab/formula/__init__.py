"""What does a GRPO loss optimise? Its formula is read off its gradient (see __main__.py).

    from lab.formula import check      # or grpo_formula, where it is installed by pip
    from my_trainer import loss

    def test_my_loss():
        check(loss, "z n-1 1e-4, token, clip 0.2 0.28")
"""
from .adapters import by_group, log_probs, of_log_probs, of_trl, of_verl
from .calling import LossFailed
from .report import NotPassed, Verdict, check, judge
from .search import Found, differences, find_formula

__all__ = ["Found", "LossFailed", "NotPassed", "Verdict", "by_group", "check", "differences",
           "find_formula", "judge", "log_probs", "of_log_probs", "of_trl", "of_verl"]
