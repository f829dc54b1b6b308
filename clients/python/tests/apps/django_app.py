import os

import django
from app_settings import CLIENTS, RELIABLE
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse, JsonResponse
from django.urls import path

from sluicegate import client_ip, header

settings.configure(
    SECRET_KEY="tests",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    MIDDLEWARE=["sluicegate.django.RateLimitMiddleware"],
    # Django has one client, so that each policy needs its own application.
    SLUICEGATE={
        **CLIENTS.get(os.environ.get("DJANGO_CLIENT", ""), RELIABLE),
        "labels": lambda request: {"api_key": request.headers.get("x-middleware-key")},
        "skip": lambda request: "x-middleware-key" not in request.headers,
    },
)
django.setup()

from sluicegate.django import exempt, ratelimit  # noqa: E402


@exempt
def health(request):
    return HttpResponse("ok")


@ratelimit(api_key=header("x-api-key"))
def per_key(request):
    return JsonResponse({"ok": True})


@ratelimit("3/hour", key=header("x-api-key"))
async def inline(request):
    return JsonResponse({"ok": True})


@ratelimit("1/hour", block=False)
def soft(request):
    return JsonResponse({"allowed": request.sluicegate.allowed})


def is_admin(request):
    return "x-admin" in request.headers


@ratelimit("1/hour", key=header("x-api-key"), block=False, skip=is_admin)
def soft_key(request):
    return JsonResponse({"allowed": request.sluicegate.allowed})


@ratelimit("1/hour", key=header("x-api-key"), block=False, skip=is_admin)
async def soft_key_async(request):
    return JsonResponse({"allowed": request.sluicegate.allowed})


@ratelimit("1/hour", key=header("x-api-key"), scope="outer", block=False)
@ratelimit("9/hour", key=header("x-api-key"), scope="inner", block=False)
def soft_twice(request):
    return JsonResponse({"allowed": request.sluicegate.allowed})


@ratelimit(route="login", ip=client_ip.behind("127.0.0.1"))
def forwarded(request):
    return JsonResponse({"remaining": request.sluicegate.remaining})


def plain(request):
    return HttpResponse("ok")


urlpatterns = [
    path("health", health),
    path("key", per_key),
    path("inline", inline),
    path("soft", soft),
    path("soft-key", soft_key),
    path("soft-key-async", soft_key_async),
    path("soft-twice", soft_twice),
    path("forwarded", forwarded),
    path("plain", plain),
    *(path(name, per_key) for name in CLIENTS),
]

application = get_wsgi_application()
asgi = get_asgi_application()
