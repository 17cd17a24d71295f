"""The monitor's web application: the page, the HTTP API, health and metrics in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from celery import Celery
from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from pydantic.json_schema import models_json_schema

import brim
from brim.settings import Settings
from brim.store import Store
from brim_services.metrics import ClusterMetrics

from . import problems
from .access import Gate
from .api import Operations, router
from .feed import Feed
from .problems import Problem
from .schemas import Change, Health

PAGE = Path(__file__).parent / "page"
DESCRIPTION = """\
A GPU-memory-aware scheduler for Celery. Errors are problem documents (RFC 9457) whose `code` is stable and whose
`errors` name the fields. Where the monitor has tokens, send one as `Authorization: Bearer …`; without any it
serves this machine only."""


def build(store: Store, settings: Settings, celery_app: Celery) -> FastAPI:
    """The application; the feed runs while the application does."""
    figures = ClusterMetrics()
    feed = Feed(store, settings, figures.observe)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        feed.start()
        yield
        feed.stop()

    app = FastAPI(
        title="brim",
        version=brim.__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.feed = feed
    app.add_middleware(Gate, settings=settings.monitor)
    problems.install(app)
    app.include_router(router(Operations(store, settings, celery_app, feed)))

    @app.get("/healthz", tags=["health"], summary="Is this process alive?")
    def alive() -> Health:
        """It answers, so it is."""
        return Health(status="alive")

    @app.get("/readyz", tags=["health"], summary="Can it do its work?", responses=problems.documented())
    def ready() -> Health:
        """Whether Redis answers."""
        store.server_ms()
        return Health(status="ready")

    @app.get(
        "/metrics",
        tags=["health"],
        summary="Prometheus metrics",
        response_class=Response,
        responses=problems.documented() | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    def show_metrics() -> Response:
        """The cluster's and this process's metrics."""
        if not feed.watchers:  # then the feed's own picture is up to some seconds old
            figures.observe(feed.look(), ())
        return Response(generate_latest(figures.registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    app.mount("/", StaticFiles(directory=PAGE, html=True), name="page")
    _document(app)
    return app


def _document(app: FastAPI) -> None:
    """The OpenAPI document, with the problem document among its schemas instead of FastAPI's own error."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schemas = document["components"]["schemas"]
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
            _, more = models_json_schema(
                [(Problem, "serialization"), (Change, "serialization")], ref_template="#/components/schemas/{model}"
            )
            schemas |= more["$defs"]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
