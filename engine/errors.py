"""The errors that people see as a sentence instead of a traceback."""


class UserError(ValueError):
    """Something about a file, a flag or a folder that the user can put right."""


class NotFinite(UserError):
    """The run stops at the first such number: it would spread to every parameter."""


class BadCredit(NotFinite):
    """It is a weight or an advantage."""
