// Scopes, routes and hooks of Fastify.
import assert from "node:assert/strict";
import { test } from "node:test";
import Fastify from "fastify";
import { Client, decisionOf, header } from "sluicegate";
import { rateLimit, rateLimitHook } from "sluicegate/fastify";
import { RELAXED_MS, Server } from "./harness.mjs";

const RULES = `
[defaults]
on_store_failure = "local"
algorithm = "sliding-log"
window = "1h"

[[rule]]
name = "all"
per = ["user"]
amount = 100

[[rule]]
name = "login"
when = { route = "login" }
per = ["user"]
amount = 2
`;
const LIMIT = { algorithm: "sliding-log", amount: 1, window: "1h" };

async function start(t) {
  const server = await Server.start(t, { config: RULES });
  const client = new Client({ url: server.url, deadlineMs: RELAXED_MS });
  const app = Fastify();
  t.after(() => app.close());
  const get = (url, user = "alice") => app.inject({ url, headers: { user } });
  return { client, app, get };
}

test("a route changes, extends or disables the limit of the plugin", async (t) => {
  const { client, app, get } = await start(t);
  // declared before the plugin is loaded
  app.get("/early", async () => "early");
  await app.register(rateLimit, { client, labels: { user: header("user") } });
  app.get("/", async (request) => decisionOf(request).rule);
  app.get(
    "/login",
    { config: { rateLimit: { labels: { route: "login" } } } },
    async (request) => decisionOf(request).rule,
  );
  app.get("/cheap", { config: { rateLimit: { cost: 0 } } }, async () => "cheap");
  app.get("/free", { config: { rateLimit: false } }, async () => "free");
  const own = { name: "own", key: () => "one", limit: LIMIT };
  app.get("/own", { config: { rateLimit: own } }, async () => "own");

  assert.equal((await get("/")).body, "all");
  assert.match((await get("/early")).headers.ratelimit, /^"all";r=98/);
  // the route's label is added to that of the plugin
  assert.deepEqual([(await get("/login")).body, (await get("/login")).body], ["login", "login"]);
  const denied = await get("/login");
  assert.equal(denied.statusCode, 429);
  assert.match(denied.headers["content-type"], /^application\/problem\+json/);
  assert.equal((await get("/login", "bob")).statusCode, 200);
  assert.match((await get("/cheap")).headers.ratelimit, /^"all";r=96/);
  const free = await get("/free");
  assert.deepEqual([free.statusCode, free.headers.ratelimit], [200, undefined]);
  assert.deepEqual([(await get("/own")).statusCode, (await get("/own")).statusCode], [200, 429]);
  // unknown routes are limited too
  const unknown = await get("/unknown");
  assert.equal(unknown.statusCode, 404);
  assert.match(unknown.headers.ratelimit, /^"all";r=95/);
});

test("the plugin applies to the scope that registers it", async (t) => {
  const { client, app, get } = await start(t);
  await app.register(async (scope) => {
    await scope.register(rateLimit, { client, name: "inner", key: () => "one", limit: LIMIT });
    scope.get("/limited", async () => "limited");
    await scope.register(async (inner) => inner.get("/below", async () => "below"));
  });
  app.get("/outside", async () => "outside");
  assert.equal((await get("/limited")).statusCode, 200);
  assert.equal((await get("/below")).statusCode, 429);
  for (let n = 0; n < 3; n += 1) assert.equal((await get("/outside")).statusCode, 200);
});

test("global: false limits only routes with a configuration", async (t) => {
  const { client, app, get } = await start(t);
  await app.register(rateLimit, { client, name: "api", key: header("user"), limit: LIMIT, global: false });
  app.get("/", async () => "open");
  app.get("/limited", { config: { rateLimit: {} } }, async () => "limited");
  for (let n = 0; n < 3; n += 1) assert.equal((await get("/")).statusCode, 200);
  assert.deepEqual([(await get("/limited")).statusCode, (await get("/limited")).statusCode], [200, 429]);
});

test("the hook can run after authentication", async (t) => {
  const { client, app, get } = await start(t);
  app.decorateRequest("account", null);
  app.addHook("preValidation", async (request) => {
    request.account = `account of ${request.headers.user}`;
  });
  await app.register(rateLimit, {
    client,
    name: "a",
    key: (request) => request.account,
    limit: LIMIT,
    hook: "preHandler",
  });
  app.get("/", async () => "hello");
  assert.deepEqual([(await get("/")).statusCode, (await get("/")).statusCode], [200, 429]);
  assert.equal((await get("/", "bob")).statusCode, 200);
});

test("a hook limits one route", async (t) => {
  const { client, app, get } = await start(t);
  const onRequest = rateLimitHook({ client, name: "one", key: () => "one", limit: LIMIT });
  app.get("/", { onRequest }, async () => "hello");
  assert.deepEqual([(await get("/")).statusCode, (await get("/")).statusCode], [200, 429]);
});

test("an error thrown by onDenied reaches the error handler with the headers", async (t) => {
  const { client, app, get } = await start(t);
  const onDenied = (_request, _reply, decision) => {
    throw Object.assign(new Error(`wait ${decision.retryAfterMs}`), { statusCode: 429 });
  };
  app.setErrorHandler((error, _request, reply) => reply.code(error.statusCode).send({ custom: error.message }));
  await app.register(rateLimit, { client, name: "one", key: () => "one", limit: LIMIT, onDenied });
  app.get("/", async () => "hello");
  await get("/");
  const denied = await get("/");
  assert.equal(denied.statusCode, 429);
  assert.match(denied.json().custom, /^wait \d+$/);
  assert.ok(Number(denied.headers["retry-after"]) > 3000);
});

test("invalid options of a route before the plugin are reported, and the limit of the plugin applies", async (t) => {
  const { client, app, get } = await start(t);
  app.get("/flag", { config: { rateLimit: true } }, async () => "flag");
  app.get("/limit", { config: { rateLimit: { limit: "nonsense" } } }, async () => "limit");
  const errors = [];
  const onError = (error) => errors.push(error.message);
  await app.register(rateLimit, { client, name: "all", key: header("user"), limit: LIMIT, onError });
  assert.deepEqual([(await get("/flag")).statusCode, (await get("/flag")).statusCode], [200, 429]);
  assert.deepEqual([(await get("/limit", "b")).statusCode, (await get("/limit", "b")).statusCode], [200, 429]);
  assert.equal(errors.length, 2, errors.join("\n"));
  assert.match(errors[0], /config.rateLimit of the route \/flag is invalid .*use an object, or false/);
  assert.match(errors[1], /config.rateLimit of the route \/limit is invalid .*limit is "nonsense"/);
});

for (const [onFailure, status] of [
  ["open", 200],
  ["closed", 503],
]) {
  test(`invalid options of a route before a plugin without a limit: the policy ${onFailure} decides`, async (t) => {
    const { client, app, get } = await start(t);
    app.get("/", { config: { rateLimit: true } }, async () => "");
    const errors = [];
    const onError = (error) => errors.push(error.message);
    await app.register(rateLimit, { client, global: false, onFailure, onError });
    for (let n = 1; n <= 2; n += 1) {
      assert.equal((await get("/")).statusCode, status);
      assert.equal(errors.length, n);
    }
    assert.match(errors[0], /config.rateLimit of the route \/ is invalid/);
  });
}

test("invalid options of a route fail the start of the application", async (t) => {
  const { client, app } = await start(t);
  await app.register(rateLimit, { client, labels: {} });
  assert.throws(
    () => app.get("/", { config: { rateLimit: true } }, async () => ""),
    /config.rateLimit of a route is invalid/,
  );
  const limit = { amount: 1, window: "soon" };
  const config = { rateLimit: { name: "a", key: () => "a", limit } };
  assert.throws(() => app.get("/", { config }, async () => ""), /"soon" is not a duration/);
});
