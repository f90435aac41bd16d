"""One tree of errors: each carries the HTTP status and the OpenAI error fields it becomes."""


class TpuVlError(Exception):
    """Base of every error that the project raises on purpose.

    Args:
        message: what is wrong, the value, the limit and what to change; safe to show a client.
        param: the request field at fault, as a path such as `messages.[0].content.[1]`.
    """

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(TpuVlError):
    """A flag, a checkpoint or a machine does not fit: the start fails with the remedy."""

    code = "config_error"


class CheckpointError(ConfigError):
    """A checkpoint's files and the model's tree do not match, named key by key."""

    code = "checkpoint_error"


class MissingProgramError(TpuVlError):
    """The request path asked for a program that is not in the compiled table: a defect."""

    code = "missing_program"


class IntegrityError(TpuVlError):
    """Host bookkeeping contradicts itself: a defect, found by `check_integrity`."""

    code = "integrity_error"


class RequestError(TpuVlError):
    """The client sent something that cannot be served; the message says what to change."""

    status = 400
    type = "invalid_request_error"


class MediaError(RequestError):
    """An image or a video that cannot be fetched, decoded or accepted."""

    code = "invalid_media"


class MediaTooLargeError(MediaError):
    """Media over a limit of bytes, pixels or frames."""

    code = "media_too_large"


class ContextLengthError(RequestError):
    """The prompt and the answer asked for do not fit `--max-model-len`."""

    code = "context_length_exceeded"


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PayloadTooLargeError(RequestError):
    """The request body is over `--max-request-mb`."""

    status = 413
    code = "request_too_large"


class OverloadedError(TpuVlError):
    """The server cannot take the request now; it can be sent again.

    Args:
        retry_after_s: seconds after which trying again is sensible, at least 1.
    """

    status = 503
    type = "server_overloaded"
    code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class NotReadyError(OverloadedError):
    """The server is still loading weights or compiling programs."""

    type = "server_not_ready"
    code = "not_ready"


class EngineDeadError(TpuVlError):
    """The engine loop has ended; the process must be restarted."""

    status = 500
    code = "engine_dead"
