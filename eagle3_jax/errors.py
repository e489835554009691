"""Errors a user can cause. The command line prints them as one line and exits with status 2."""


class UserError(Exception):
    """Bad input: the message says what is wrong, where, and what to do, in one line."""
