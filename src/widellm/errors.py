"""Errors that a user can cause. Each message is one line: what was given, what was expected, what to do."""

from __future__ import annotations


class WidellmError(ValueError):
    """Base of all errors that a user can cause; the command line prints its message and exits with code 2."""


class ConfigError(WidellmError):
    """A setting is outside what is possible for the model (a group size that does not divide, a budget of 0)."""


class UnsupportedModelError(WidellmError):
    """The model's family is not known, or a module that the family's description names is missing."""


class CheckpointError(WidellmError):
    """A saved model is truncated, tampered with, from a newer version, or belongs to another base model."""


class TextError(WidellmError):
    """A text source is empty, binary, too short, or cannot be read."""


class BackendError(WidellmError):
    """A kernel backend was asked for by name and cannot run here; the message lists those that can."""


class MissingDependencyError(WidellmError):
    """An optional package is needed for what was asked; the message says which extra installs it."""
