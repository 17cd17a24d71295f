"""Errors as RFC 9457 problem documents, each with a code and, where a field is at fault, its name."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from redis import RedisError
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from brim.core.attributes import reason_of, shorten
from brim.core.model import Reason

MEDIA_TYPE = "application/problem+json"


class FieldProblem(BaseModel):
    """One field of a request that is wrong."""

    field: str = Field(description="its path in the request, such as body.demand.vram_mib")
    reason: str


class Problem(BaseModel):
    """What went wrong (RFC 9457)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:brim:problem:invalid",
                    "title": "Bad Request",
                    "status": 400,
                    "detail": "body.priority: Input should be less than or equal to 9",
                    "code": "invalid",
                    "errors": [{"field": "body.priority", "reason": "Input should be less than or equal to 9"}],
                }
            ]
        }
    )

    type: str = Field(description="urn:brim:problem:<code>")
    title: str
    status: int
    detail: str = Field(description="for a person")
    code: str = Field(description="stable, for programs")
    errors: list[FieldProblem] = []


class Refused(HTTPException):
    """A request that is answered with a problem document."""

    def __init__(
        self,
        status: int,
        reason: Reason,
        fields: Sequence[FieldProblem] = (),
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, reason.message, headers)
        self.problem = problem(status, reason, fields)


def problem(status: int, reason: Reason, fields: Sequence[FieldProblem] = ()) -> Problem:
    """The document of a refusal."""
    return Problem(
        type=f"urn:brim:problem:{reason.code}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=reason.message,
        code=reason.code,
        errors=list(fields),
    )


def response(document: Problem, headers: dict[str, str] | None = None) -> JSONResponse:
    """The document as an answer."""
    return JSONResponse(document.model_dump(), document.status, headers, MEDIA_TYPE)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Problem answers for an operation's OpenAPI entry; those that any operation may give included."""
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: schema}}
        for status in sorted({*statuses, 400, 401, 403, 408, 413, 422, 429, 503})
    }


def install(app: FastAPI) -> None:
    """Every error of the app becomes a problem document."""
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(RedisError, _away)


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, Refused):
        return response(error.problem, dict(error.headers or {}))
    status, headers = error.status_code, dict(error.headers or {})
    methods = _methods(request)
    if status in (404, 405) and methods and request.method not in methods:
        status, headers["Allow"] = 405, ", ".join(methods)
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "refused")
    detail = {404: "there is nothing at this address", 405: "this address does not take this method"}
    reason = Reason(code, detail.get(status, str(error.detail)))
    return response(problem(status, reason), headers)


def _methods(request: Request) -> list[str]:
    """What an address takes by the OpenAPI document, whichever route was asked; nothing if it is no operation's."""
    for path, operations in request.app.openapi()["paths"].items():
        if compile_path(path)[0].match(request.scope["path"]):
            return sorted(method.upper() for method in operations)
    return []


def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    fields = [
        FieldProblem(field=shorten(".".join(map(str, item["loc"]))), reason=shorten_long(reason_of(item)))
        for item in error.errors()
    ]
    return response(problem(400, Reason("invalid", f"{fields[0].field}: {fields[0].reason}"), fields))


def _away(_: Request, error: Exception) -> JSONResponse:
    return response(problem(503, Reason("redis_away", f"Redis does not answer: {error}")), {"Retry-After": "2"})


def shorten_long(text: str) -> str:
    """A reason, cut to what an answer can bear."""
    return text if len(text) <= 300 else text[:299] + "…"
