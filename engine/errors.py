"""The one error that people see as a sentence instead of a traceback."""


class UserError(ValueError):
    """Something at the edges (a file, a flag, a folder) that the user can put right."""


class OwnCodeError(UserError):
    """In code that somebody wrote for the lab. One process of several may meet it alone."""
