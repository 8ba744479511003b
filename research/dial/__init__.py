"""One world with dials: how much of an answer decides, and what credit by token is worth there."""
