"""The page at `/`: static files, no build step, nothing from elsewhere. `routes()` serves them with Starlette.

index.html and page.css are what is seen; page.js starts it; api.js speaks to the server, run.js keeps the numbers of
one answer, view.js draws tokens and charts, chat.js and race.js are the two halves. Text that a model or a server wrote
reaches the document as text nodes only.
"""

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Nothing but our own files and our own server; no inline script or style, so that injected markup could do nothing.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
FILES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(("page.js", "api.js", "run.js", "view.js", "chat.js", "race.js"), "text/javascript"),
}


def paths() -> frozenset[str]:
    """What is served, all of it without an API key: the page asks for one and sends it with its requests."""
    return frozenset({"/"} | {f"/page/{name}" for name in FILES if name != "index.html"})


def routes() -> list[Route]:
    """GET and HEAD of `paths()`."""
    return [Route(path, _answer) for path in sorted(paths())]


async def _answer(request: Request) -> Response:
    name = request.url.path.rsplit("/", 1)[1] or "index.html"
    body = (resources.files(__name__) / name).read_bytes()
    return Response(body, media_type=FILES[name], headers=HEADERS)
