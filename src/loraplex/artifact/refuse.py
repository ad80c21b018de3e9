"""Short names for the refusals of this package, so that each check reads as one sentence."""

from __future__ import annotations

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.limits import MAX_ERROR_PARAM_CHARS


def malformed(message: str) -> CallerError:
    """The weight file breaks the safetensors format."""
    return CallerError(ErrorCode.ADAPTER_FILE_MALFORMED, message)


def pickled(message: str) -> CallerError:
    """The weight file is a pickle, which runs code when it is read."""
    return CallerError(ErrorCode.ADAPTER_FILE_PICKLE, message)


def missing_source(message: str) -> CallerError:
    """The adapter folder or one of its files is not there."""
    return CallerError(ErrorCode.ADAPTER_SOURCE_MISSING, message)


def bad_config(field: str, message: str) -> CallerError:
    """A field of adapter_config.json is missing, of the wrong type or out of range."""
    return CallerError(ErrorCode.ADAPTER_CONFIG_INVALID, message, param=field[:MAX_ERROR_PARAM_CHARS])


def unsupported(field: str, message: str) -> CallerError:
    """A feature that would change the function is not implemented."""
    return CallerError(ErrorCode.ADAPTER_UNSUPPORTED, message, param=field[:MAX_ERROR_PARAM_CHARS])


def unmatched(tensor: str, message: str) -> CallerError:
    """A tensor of the file has no place in the base."""
    return CallerError(ErrorCode.ADAPTER_TENSOR_UNMATCHED, message, param=tensor[:MAX_ERROR_PARAM_CHARS])


def missing_tensor(tensor: str, message: str) -> CallerError:
    """A target of the configuration lacks a tensor."""
    return CallerError(ErrorCode.ADAPTER_TENSOR_MISSING, message, param=tensor[:MAX_ERROR_PARAM_CHARS])


def bad_shape(tensor: str, message: str) -> CallerError:
    """A tensor's shape disagrees with the base module."""
    return CallerError(ErrorCode.ADAPTER_SHAPE_MISMATCH, message, param=tensor[:MAX_ERROR_PARAM_CHARS])


def bad_rank(tensor: str, message: str) -> CallerError:
    """A tensor's rank disagrees with the configuration."""
    return CallerError(ErrorCode.ADAPTER_RANK_MISMATCH, message, param=tensor[:MAX_ERROR_PARAM_CHARS])


def rank_limit(field: str, message: str) -> CallerError:
    """A rank is outside of what is supported."""
    return CallerError(ErrorCode.ADAPTER_RANK_LIMIT, message, param=field[:MAX_ERROR_PARAM_CHARS])


def wrong_base(tensor: str, message: str) -> CallerError:
    """The adapter as a whole was made for another base."""
    return CallerError(ErrorCode.ADAPTER_BASE_MISMATCH, message, param=tensor[:MAX_ERROR_PARAM_CHARS])


def bad_dtype(tensor: str, message: str) -> CallerError:
    """A tensor's element type is not served."""
    return CallerError(ErrorCode.ADAPTER_DTYPE_UNSUPPORTED, message, param=tensor[:MAX_ERROR_PARAM_CHARS])


def not_finite(tensor: str, message: str) -> CallerError:
    """A tensor holds NaN or infinity."""
    return CallerError(ErrorCode.ADAPTER_NOT_FINITE, message, param=tensor[:MAX_ERROR_PARAM_CHARS])


def too_large(message: str) -> CallerError:
    """The adapter exceeds a size limit."""
    return CallerError(ErrorCode.ADAPTER_TOO_LARGE, message)
