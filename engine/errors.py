"""What a user can get wrong, one class per place. Every message names the value, what is allowed and the remedy."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "PalimpsestError",
    "RankError",
    "RequestError",
    "TraceError",
    "WindowError",
]


class PalimpsestError(Exception):
    """Base class of every error that a user of the library can cause."""


class ConfigError(PalimpsestError, ValueError):
    """A configuration value is unknown, out of range or contradicts another one."""


class CheckpointError(PalimpsestError):
    """A model's files are missing, damaged or describe something that this library does not run."""


class RequestError(PalimpsestError, ValueError):
    """A request can never be served as it was asked: too long, ill-formed, or in the wrong state."""


class WindowError(RequestError):
    """A prompt, or a prompt with its response, is longer than the model's window or the KV pool."""


class TraceError(PalimpsestError):
    """A trace cannot be resumed: it is damaged or belongs to another document, question, model or configuration."""


class RankError(PalimpsestError):
    """Another process of the same run has failed or was killed, so this one cannot go on."""
