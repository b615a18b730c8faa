"""Errors as clients expect them: OpenAI's `{"error": {message, type, param, code}}`, nested, with a string code, and
Anthropic's shape on its routes.

Every refusal of the server is an `APIError`; errors of the engine and of the frameworks are turned into one here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse
from starlette.types import Scope

from crosspool.errors import (
    CapacityError,
    ConstraintError,
    ContextLengthError,
    CrossPoolError,
    DeadlineExceededError,
    ModelRemovedError,
    QueueFullError,
    ShuttingDownError,
    UnknownModelError,
    WorkerLostError,
)
from crosspool.server.context import route_path
from crosspool.server.field_names import in_words_of

MAX_REPORTED = 10  # validation errors in one message
MAX_ECHO = 200  # characters of the client's own words in one of them

SUBJECT = re.compile(r"^(Value error, |Input |String |List |Dictionary )")
"""How pydantic's messages begin; the field's name takes its place."""

BRANCHES = ("str", "int", "float", "bool")
"""Names that pydantic gives the plain types of a union."""

MESSAGES_PATH = "/v1/messages"
"""Where Anthropic's API begins."""

_MESSAGE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorDetail(BaseModel):
    """What went wrong, in words and in a code that programs can tell apart."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class APIError(Exception):
    """A request that ends with `status`; `param` is the field to blame.

    is_verbatim: it names fields as they were sent, so that they are not put in the words of the route's API.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        is_verbatim: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = encodable(message)
        self.code = code
        self.param = encodable(param) if param is not None else None
        self.headers = dict(headers or {})
        self.is_verbatim = is_verbatim

    def body(self) -> dict[str, Any]:
        detail = {"message": self.message, "type": error_type(self.status), "param": self.param, "code": self.code}
        return {"error": detail}

    def message_body(self) -> dict[str, Any]:
        """The same in Anthropic's shape."""
        kind = _MESSAGE_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class ContextRefusal(APIError):
    """A prompt and its answer would be longer than the context, which is known before the engine is asked."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(400, message, code="context_length_exceeded", param=param)


def error_response(error: APIError, scope: Scope) -> JSONResponse:
    """The answer to a refused request, in the shape and the words of the API that its path belongs to."""
    path = route_path(scope)
    body = error.body()
    if path.startswith(MESSAGES_PATH):
        body = {**error.message_body(), "request_id": scope["state"]["request_id"]}
    told: dict[str, str | None] = body["error"]
    if not error.is_verbatim:
        told |= {name: in_words_of(path, text) for name in ("message", "param") if (text := told.get(name)) is not None}
    return JSONResponse(body, error.status, error.headers)


def error_type(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    if status >= 500:
        return "server_error"
    return "invalid_request_error"


def bad_request(
    message: str, *, param: str | None = None, code: str = "invalid_value", is_verbatim: bool = False
) -> APIError:
    return APIError(400, message, code=code, param=param, is_verbatim=is_verbatim)


def from_engine(error: CrossPoolError) -> APIError:
    """The answer to a request that the engine refused or could not finish."""
    match error:
        case QueueFullError():
            seconds = max(1, round(error.retry_after_s))
            return APIError(429, str(error), code="queue_full", headers={"Retry-After": str(seconds)})
        case ContextLengthError():
            return APIError(400, str(error), code="context_length_exceeded", param="max_tokens")
        case CapacityError():
            return APIError(400, str(error), code="kv_pool_capacity_exceeded", param="max_tokens")
        case ConstraintError():
            return APIError(400, str(error), code="invalid_grammar")
        case DeadlineExceededError():
            return APIError(408, str(error), code="deadline_exceeded")
        case UnknownModelError():  # the server knows the name, so the engine has not got it ready
            return APIError(503, str(error), code="model_not_ready", param="model", headers={"Retry-After": "2"})
        case ShuttingDownError():
            return APIError(503, str(error), code="shutting_down", headers={"Retry-After": "5"})
        case ModelRemovedError():  # it may come again, as another version
            return APIError(503, str(error), code="model_removed", param="model", headers={"Retry-After": "5"})
        case WorkerLostError():
            return APIError(503, str(error), code="worker_lost", headers={"Retry-After": "5"})
        case _:
            return APIError(500, str(error), code="engine_error")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """One 400 for pydantic's list of errors: field and limit of each, capped in number and length."""
    lines = [_describe(item) for item in errors[:MAX_REPORTED]]
    if len(errors) > MAX_REPORTED:
        lines.append(f"and {len(errors) - MAX_REPORTED} more")
    first = errors[0]
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    if first["type"] == "json_invalid":
        code = "invalid_json"
    return bad_request("; ".join(lines), param=_field(first), code=code)


def shorten(text: str, limit: int = MAX_ECHO) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def encodable(text: str) -> str:
    """`text` with lone surrogates replaced, so that it can be sent."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _describe(item: Mapping[str, Any]) -> str:
    field = _field(item)
    if item["type"] == "json_invalid":
        reason, place = shorten(str(item.get("ctx", {}).get("error", ""))), item["loc"][-1]
        return f"the body is not valid JSON: {reason}" + (f" (character {place})" if isinstance(place, int) else "")
    if item["type"] == "missing":
        return f"{field or 'the body'} is missing"
    message = shorten(SUBJECT.sub("", str(item["msg"])))
    if field is None and item["type"] in ("model_attributes_type", "dict_type"):
        return "the body must be a JSON object, sent with Content-Type: application/json"
    value = item.get("input")
    echo = f" (got {shorten(repr(value), 60)})" if isinstance(value, int | float | str) else ""
    return f"{field}: {message}{echo}" if field else message


def _field(item: Mapping[str, Any]) -> str | None:
    """`messages.0.content` from pydantic's location, without the body and the names of union branches."""
    if item["type"] == "json_invalid":
        return None
    loc = [part for part in item["loc"] if part != "body" and part not in BRANCHES] or [
        item.get("ctx", {}).get("field", "")
    ]
    parts = [str(part) for part in loc if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", str(part))]
    return ".".join(parts) or None
