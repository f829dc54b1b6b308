from __future__ import annotations

import json
from typing import Annotated

from app_settings import CLIENTS, RELIABLE
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from sluicegate import AsyncClient, Decision, client_ip, header, route
from sluicegate.asgi import RateLimitMiddleware
from sluicegate.fastapi import RateLimited, RateLimiter

app = FastAPI()
limiter = RateLimiter(AsyncClient(**RELIABLE))


@app.get("/health")
async def health():
    return "ok"


@app.get("/key")
@limiter.limit(api_key=header("x-api-key"))
async def per_key():
    return {"ok": True}


@app.get("/inline")
@limiter.limit("3/hour", key=header("x-api-key"))
def inline():
    return {"ok": True}


@app.get("/items/{item}")
@limiter.limit("2/hour")
@limiter.limit("100/hour", scope="all-items", key="shared")
async def item(item: int, request: Request, q: str = "none"):
    return PlainTextResponse(f"{item} {q} {request.url.path}")


@app.get("/dependency/{name}")
async def dependency(
    name: str,
    decision: Annotated[Decision, Depends(limiter.dependency(route="login", ip=lambda request: name_of(request)))],
):
    return {"remaining": decision.remaining}


def name_of(request: Request):
    return request.path_params["name"]


@app.get("/missing")
@limiter.limit("50/hour", skip=lambda request: "admin" in request.headers)
async def missing():
    raise HTTPException(404, headers={"x-own": "1"})


@app.get("/cost")
@limiter.limit("10/hour", cost=lambda request: int(request.query_params["units"]), key=header("x-api-key"))
async def cost():
    return JSONResponse({"ok": True})


@app.get("/broken")
@limiter.limit(lambda request: "often")
async def broken():
    return "ok"


@app.get("/typed")
@limiter.limit(route=route, user=lambda request: json.loads(request.query_params["user"]))
async def typed():
    return "ok"


for name, settings in CLIENTS.items():

    @app.get(f"/{name}")
    @RateLimiter(AsyncClient(**settings)).limit(api_key=header("x-api-key"))
    async def with_client():
        return {"ok": True}


custom = FastAPI()


@custom.exception_handler(RateLimited)
async def denied(request: Request, error: RateLimited):
    return JSONResponse({"wait": error.decision.retry_after}, error.status_code, error.headers)


@custom.get("/")
@limiter.limit("1/hour", scope="custom")
async def custom_index():
    return "ok"


app.mount("/custom", custom)

inner = FastAPI()


@inner.get("/")
async def index(request: Request):
    return {"remaining": request.scope["sluicegate.decision"].remaining}


behind_middleware = RateLimitMiddleware(
    inner,
    AsyncClient(**RELIABLE),
    labels={"route": "login", "ip": client_ip.behind("127.0.0.1"), "api_key": header("x-api-key")},
    skip=lambda request: request.path.endswith("/skipped"),
)
app.mount("/middleware", behind_middleware)
app.mount(
    "/plain",
    RateLimitMiddleware(
        inner,
        AsyncClient(**RELIABLE),
        limit="1/hour",
        key=header("x-api-key"),
        denied=lambda request, decision: PlainTextResponse("slow down", 418),
    ),
)
