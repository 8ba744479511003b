"""Synthetic tasks in which it is known how much of an answer decides, and what credit by token is
worth there. The probes dial and card use them; models of language are not here."""
