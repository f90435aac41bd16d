"""Errors to the OpenAI error object: what the client may know, and nothing else."""

import json
import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from tpu_vl.errors import OverloadedError, RequestError, TpuVlError

logger = logging.getLogger("tpu_vl.server")

_KINDS = {401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error"}


def error_object(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error; texts of unforeseen ones stay in the log."""
    if isinstance(error, TpuVlError):
        if not isinstance(error, RequestError | OverloadedError):
            logger.error("%s: %s", type(error).__name__, error.message)
        return error.status, _body(error.message, error.type, error.param, error.code)
    if isinstance(error, HTTPException):
        kind = _KINDS.get(error.status_code, "invalid_request_error")
        return error.status_code, _body(str(error.detail), kind, None, None)
    logger.error("unforeseen error", exc_info=error)
    return 500, _body("internal error; the server's log has the details", "internal_error")


def error_response(error: Exception) -> JSONResponse:
    """The response of an error, with Retry-After where trying again is sensible."""
    status, body = error_object(error)
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(error.retry_after_s)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, status_code=status, headers=headers)


def error_event(error: Exception) -> str:
    """The server-sent event of an error after the stream has begun."""
    return f"event: error\ndata: {json.dumps(error_object(error)[1])}\n\n"


def _body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
