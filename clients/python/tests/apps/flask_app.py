import flask
from app_settings import CLIENTS, RELIABLE

from sluicegate import Client, client_ip, header
from sluicegate.flask import RateLimiter
from sluicegate.wsgi import RateLimitMiddleware

app = flask.Flask(__name__)
limiter = RateLimiter(Client(**RELIABLE))


@app.get("/health")
@limiter.exempt
def health():
    return "ok"


@app.get("/key")
@limiter.limit(api_key=header("x-api-key"))
def per_key():
    return {"ok": True}


@app.get("/inline")
@limiter.limit("3/hour", key=header("x-api-key"))
async def inline():
    return {"ok": True}


@app.get("/custom")
@RateLimiter(limiter.client, denied=lambda request, decision: ("slow down", 418)).limit("1/hour")
def custom():
    return "ok"


def with_client():
    return {"ok": True}


for name, settings in CLIENTS.items():
    limit = RateLimiter(Client(**settings)).limit(api_key=header("x-api-key"))
    app.add_url_rule(f"/{name}", name, limit(with_client))


section = flask.Blueprint("section", __name__, url_prefix="/section")
limiter.limit_app(section, labels=lambda request: {"route": "login", "ip": request.args.get("user")})


@section.get("/")
def index():
    return {"remaining": flask.g.sluicegate_decision.remaining}


@section.get("/exempt")
@limiter.exempt
def exempt():
    return "ok"


app.register_blueprint(section)


def hello(environ, start_response):
    start_response("200 OK", [("content-type", "text/plain")])
    return [str(environ["sluicegate.decision"].remaining).encode()]


wsgi = RateLimitMiddleware(
    hello,
    limiter.client,
    labels={"route": "login", "ip": client_ip.behind("127.0.0.1"), "api_key": header("x-api-key")},
)


class Mounted:
    """Serves the plain WSGI application below /wsgi."""

    def __call__(self, environ, start_response):
        selected = wsgi if environ["PATH_INFO"].startswith("/wsgi") else app
        return selected(environ, start_response)


application = Mounted()
