"""The page /docs: the routes of /openapi.json with the fields of their bodies. It needs nothing
from another host, and has no script."""

from collections.abc import Iterator, Mapping
from html import escape

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_STYLE = """:root{color-scheme:light dark}body{font:16px/1.5 system-ui;max-width:60rem;margin:auto;
padding:1rem}table{border-collapse:collapse}td{padding:.1rem 1.5rem .1rem 0;vertical-align:top}
h2{font:1.1rem monospace;margin-top:2.5rem}code{font-size:.9rem}"""

Schema = Mapping[str, object]


def add_reference(app: FastAPI) -> None:
    """Add the page to an application whose other routes were added."""

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        headers = {"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"}
        return HTMLResponse("".join(_page(app.openapi())), headers=headers)


def _page(api: Schema) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><meta charset="utf-8"><title>moectl: routes</title>'
    yield '<meta name="viewport" content="width=device-width">'
    yield f"<style>{_STYLE}</style><h1>Routes of this server</h1>"
    yield '<p>The same as JSON: <a href="openapi.json">openapi.json</a>.</p>'
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            yield f"<h2>{method.upper()} {escape(path)}</h2>"
            yield f"<p>{escape(route.get('description', route['summary']))}</p>"
            content = route.get("requestBody", {}).get("content", {})
            if schema := content.get("application/json", {}).get("schema"):
                yield from _fields(schema)


def _fields(schema: Schema) -> Iterator[str]:
    """Yield a table of the fields of a body, and those of the bodies within it."""
    for name, within in {"": schema, **schema.get("$defs", {})}.items():
        if name:
            yield f"<p><code>{escape(name)}</code></p>"
        yield "<table>"
        for field, about in within.get("properties", {}).items():
            is_needed = field in within.get("required", ())
            said = "needed" if is_needed else _default(about)
            yield f"<tr><td><code>{escape(field)}</code><td>{escape(_kind(about))}<td>{said}"
        yield "</table>"


def _kind(about: Schema) -> str:
    if "anyOf" in about:
        return " or ".join(kind for one in about["anyOf"] if (kind := _kind(one)) != "null")
    if "$ref" in about:
        return about["$ref"].rpartition("/")[2]
    if "items" in about:
        return f"list of {_kind(about['items'])}"
    return str(about.get("type", about.get("enum", about.get("const", "any"))))


def _default(about: Schema) -> str:
    default = about.get("default")
    return "" if default is None else f"by default <code>{escape(str(default))}</code>"
