"""The page at /ui: static files. They hold no data, so they are open; what the page shows comes from guarded routes.

A browser cannot send a key when it opens a page. The page asks for one when a data route answers 401 and sends it then.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, RedirectResponse, Response

from crosspool.server.errors import APIError, ErrorBody

DIRECTORY = Path(__file__).parent / "ui"
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FILES = {path.relative_to(DIRECTORY).as_posix(): path for path in DIRECTORY.rglob("*") if path.suffix in MEDIA_TYPES}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asks again each time; unchanged files are a 304
}

router = APIRouter(tags=["page"])


@router.get("/", include_in_schema=False)
async def root(request: Request) -> Response:
    return RedirectResponse(f"{request.scope.get('root_path', '')}/ui/")


@router.get("/docs", include_in_schema=False)
async def routes_page(request: Request) -> Response:
    return RedirectResponse(f"{request.scope.get('root_path', '')}/ui/routes.html")


@router.get("/ui", include_in_schema=False)
async def page_without_slash(request: Request) -> Response:
    """Relative addresses in the page need the slash."""
    return RedirectResponse(f"{request.scope.get('root_path', '')}/ui/")


@router.get(
    "/ui/{name:path}",
    summary="The live page",
    response_class=FileResponse,
    responses={
        200: {"content": {kind: {"schema": {"type": "string"}} for kind in MEDIA_TYPES.values()}},
        404: {"model": ErrorBody, "description": "no such file"},
    },
)
async def page(name: str) -> Response:
    path = FILES.get(name or "index.html")
    if path is None:
        raise APIError(404, "the page has no such file; open /ui/", code="not_found")
    return FileResponse(path, media_type=MEDIA_TYPES[path.suffix], headers=HEADERS)
