"""What redis-py makes of the server. PYTHONPATH=.servers/redis-py python3 redis_py.py PORT"""

import sys

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

for protocol in (2, 3):
    client = redis.Redis(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        username="app",
        password="s3cret",
        protocol=protocol,
        client_name=f"python-{protocol}",
        decode_responses=True,
    )
    assert client.ping() is True
    assert client.echo("hi") == "hi"
    assert client.client_getname() == f"python-{protocol}"
    assert client.info("clients")["maxclients"] > 0

    key = f"python:{protocol}"
    assert client.execute_command("CL.THROTTLE", key, 1, 1, 3600) == [0, 2, 1, -1, 3600]

    login = ("route", "login", "ip", key)
    allowed, limit, remaining, retry, reset, rule, degraded, at = client.execute_command("SG.CHECK", 1, *login)
    assert (allowed, limit, remaining, retry, rule, degraded) == (1, 5, 4, -1, "login-per-ip", 0)
    assert 0 < reset <= 60_000 and at > 1_700_000_000_000_000
    assert client.execute_command("SG.PEEK", "route", "other") == [1, -1, -1, -1, -1, None, 0, -1]

    pipeline = client.pipeline(transaction=False)
    for _ in range(6):
        pipeline.execute_command("SG.CHECK", 1, *login)
    assert [reply[0] for reply in pipeline.execute()] == [1, 1, 1, 1, 0, 0]
    assert client.execute_command("SG.RESET", *login)[0] == 1

    pipeline = client.pipeline(transaction=False)
    pipeline.execute_command("SG.HOLD", key, 30_000, "requests=3", *login)
    pipeline.execute_command("SG.SETTLE", key, "requests=1", *login)
    pipeline.execute_command("SG.SETTLE", key, "requests=1", *login)
    pipeline.execute_command("SG.PEEK", *login)
    held, settled, again, peeked = pipeline.execute()
    assert (held[:3], held[5], held[8] - held[7]) == ([1, 5, 2], "login-per-ip", 30_000_000), held
    assert (settled, again, peeked[2]) == ("settled", "already", 4), (settled, again, peeked)

    try:
        client.execute_command("SG.CHECK", "-1", *login)
        raise AssertionError("a negative cost was taken")
    except redis.ResponseError as error:
        assert str(error).startswith("cost '-1' is not a whole number"), error
    try:
        client.get("key")
        raise AssertionError("there are no keys to get")
    except redis.ResponseError as error:
        assert "unknown command" in str(error), error

try:
    once = Retry(NoBackoff(), 0)
    redis.Redis(host="127.0.0.1", port=int(sys.argv[1]), username="app", password="wrong", retry=once).ping()
    raise AssertionError("a wrong password was taken")
except redis.AuthenticationError:
    pass

print("ok")
