"""What does a GRPO loss optimise? Its formula is read off its gradient (see __main__.py)."""
from .search import Found, find_formula

__all__ = ["Found", "find_formula"]
