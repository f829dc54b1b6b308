"""A FastAPI app with one endpoint, limited per API key by the contestant that CONTESTANT names.

The limit is never reached. REDIS is the port of Redis, SLUICEGATE the address of the server.
"""

import os
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request

LIMIT = 1_000_000_000
REDIS = f"redis://127.0.0.1:{os.environ['REDIS']}"


def api_key(request: Request) -> str:
    return request.headers["x-api-key"]


def unlimited(app: FastAPI) -> None:
    @app.get("/")
    async def endpoint():
        return {"status": "ready"}


def sluicegate(app: FastAPI) -> None:
    from sluicegate import header
    from sluicegate.fastapi import RateLimiter

    limiter = RateLimiter(os.environ["SLUICEGATE"])

    @app.get("/")
    @limiter.limit(f"{LIMIT}/minute", key=header("x-api-key"))
    async def endpoint():
        return {"status": "ready"}


def slowapi(app: FastAPI) -> None:
    from slowapi import Limiter

    app.state.limiter = limiter = Limiter(key_func=api_key, storage_uri=REDIS)

    @app.get("/")
    @limiter.limit(f"{LIMIT}/minute")
    async def endpoint(request: Request):
        return {"status": "ready"}


def limits(app: FastAPI) -> None:
    from fastapi import HTTPException
    from limits import RateLimitItemPerMinute
    from limits.aio.storage import RedisStorage
    from limits.aio.strategies import FixedWindowRateLimiter

    limiter = FixedWindowRateLimiter(RedisStorage(f"async+{REDIS}", implementation="redispy"))
    item = RateLimitItemPerMinute(LIMIT)

    async def limited(request: Request) -> None:
        if not await limiter.hit(item, api_key(request)):
            raise HTTPException(429)

    @app.get("/", dependencies=[Depends(limited)])
    async def endpoint():
        return {"status": "ready"}


def fastapi_limiter(app: FastAPI) -> None:
    from fastapi_limiter.depends import RateLimiter

    async def identifier(request: Request) -> str:
        return api_key(request)

    @app.get("/", dependencies=[Depends(RateLimiter(times=LIMIT, minutes=1, identifier=identifier))])
    async def endpoint():
        return {"status": "ready"}


@asynccontextmanager
async def lifespan(_: FastAPI):
    if os.environ["CONTESTANT"] == "fastapi-limiter":
        import redis.asyncio
        from fastapi_limiter import FastAPILimiter

        await FastAPILimiter.init(redis.asyncio.from_url(REDIS))
    yield


app = FastAPI(lifespan=lifespan)
CONTESTANTS = {
    "no limiter": unlimited,
    "sluicegate": sluicegate,
    "slowapi": slowapi,
    "limits": limits,
    "fastapi-limiter": fastapi_limiter,
}
CONTESTANTS[os.environ["CONTESTANT"]](app)
