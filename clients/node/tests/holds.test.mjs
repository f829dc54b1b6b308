// Holds of the client and of the middleware, with a real server.
import assert from "node:assert/strict";
import { createServer, get as httpGet } from "node:http";
import { test } from "node:test";
import express from "express";
import Fastify from "fastify";
import { Client, ConfigurationError, HoldConflictError, header, holdOf, InvalidRequestError } from "sluicegate";
import { rateLimit as forExpress } from "sluicegate/express";
import { rateLimit as forFastify } from "sluicegate/fastify";
import { rateLimit as forFetch } from "sluicegate/fetch";
import { FRAMEWORKS, serveFetch } from "./frameworks.mjs";
import { listen, RELAXED_MS, Server, sleep, startRedis, until } from "./harness.mjs";

const RULES = `
[defaults]
on_store_failure = "local"

[[rule]]
name = "in-flight"
per = ["tenant"]
algorithm = "concurrency"
amount = 2
ttl = "30s"

[[rule]]
name = "tokens"
per = ["tenant"]
unit = "tokens"
algorithm = "fixed-window"
amount = 1000
window = "1h"

[[rule]]
name = "requests"
per = ["tenant"]
algorithm = "sliding-log"
amount = 20
window = "1h"
`;
const LABELS = { tenant: "acme" };
const COST = { requests: 1, tokens: 500 };
const REQUEST = { labels: LABELS, cost: COST };

async function start(t, { store = "memory:", ...options } = {}) {
  // on a busy machine the store may answer after the default of 50 ms
  const environment = { SLUICEGATE_STORE_DEADLINE: "5s" };
  const server = await Server.start(t, { config: RULES, args: ["--store", store], environment });
  const client = new Client({ url: server.url, deadlineMs: RELAXED_MS, ...options });
  t.after(() => client.close());
  return client;
}

/** Returns the remaining units of each rule. */
async function remaining(client, labels = LABELS) {
  const { applies } = await client.explain({ labels, cost: { requests: 0, tokens: 0 } });
  return Object.fromEntries(applies.map(({ rule, state }) => [rule, state.remaining]));
}

const tierOf = ({ tiers }, name) => tiers.find(({ rule }) => rule === name);

for (const store of ["memory", "redis"]) {
  test(`${store}: a hold charges its estimate until it is settled`, async (t) => {
    const client = await start(t, store === "redis" ? { store: await startRedis(t) } : {});
    const hold = await client.hold(REQUEST, { ttlMs: 10_000 });
    assert.deepEqual([hold.allowed, hold.isRepeated], [true, false]);
    assert.deepEqual(await remaining(client), { "in-flight": 1, tokens: 500, requests: 19 });
    const renewed = await client.renew({ token: hold.token, ttlMs: 60_000 });
    assert.equal(renewed.outcome, "renewed");
    assert.ok(renewed.tiers[0].expiresAtUs > hold.expiresAtUs + 40_000_000);
    const settlement = await hold.settle({ tokens: 120 });
    assert.equal(settlement.outcome, "settled");
    assert.deepEqual([tierOf(settlement, "tokens").charged, tierOf(settlement, "tokens").remaining], [120, 880]);
    assert.deepEqual(await remaining(client), { "in-flight": 2, tokens: 880, requests: 19 });
    assert.equal((await client.settle({ token: hold.token, cost: { tokens: 900 } })).outcome, "already");

    await client.withHold(REQUEST, (released) => released.release());
    assert.deepEqual(await remaining(client), { "in-flight": 2, tokens: 880, requests: 19 });
    await client.withHold(REQUEST, (used) => {
      used.actualCost = { tokens: 7 };
    });
    assert.equal((await remaining(client)).tokens, 873);
  });

  test(`${store}: at most the amount is in flight, and the same id gets the first response`, async (t) => {
    const client = await start(t, store === "redis" ? { store: await startRedis(t) } : {});
    const [first, second] = [await client.hold(REQUEST, { id: "a" }), await client.hold({ labels: LABELS })];
    const denied = await client.hold({ labels: LABELS });
    assert.deepEqual([first.allowed, second.allowed, denied.allowed], [true, true, false]);
    assert.deepEqual([denied.decision.rule, denied.token], ["in-flight", null]);
    const again = await client.hold(REQUEST, { id: "a" });
    assert.deepEqual([again.isRepeated, again.expiresAtUs], [true, first.expiresAtUs]);
    await assert.rejects(client.hold({ labels: LABELS, cost: 2 }, { id: "a" }), HoldConflictError);
    assert.equal((await client.release({ labels: LABELS, id: "a" })).outcome, "released");
    assert.equal((await client.hold({ labels: LABELS })).allowed, true);
    assert.equal((await client.release({ labels: LABELS, id: "never" })).outcome, "unknown");

    const limit = { algorithm: "concurrency", amount: 1 };
    await client.withHold({ key: "k", limit }, async (hold) => {
      assert.equal(hold.allowed, true);
      assert.equal((await client.hold({ key: "k", limit })).allowed, false);
    });
    assert.equal((await client.hold({ key: "k", limit })).allowed, true);
  });
}

test("a hold outlives its time to live while its block runs, and expires without one", async (t) => {
  const client = await start(t);
  const abandoned = await client.hold(REQUEST, { ttlMs: 100 });
  // a renewal has a second until it is late, for a busy machine
  await client.withHold({ labels: LABELS }, { ttlMs: 3000 }, async () => {
    await sleep(3500);
    // the next hold reclaims the expired one
    const others = [await client.hold({ labels: LABELS }), await client.hold({ labels: LABELS })];
    assert.deepEqual(
      others.map(({ allowed }) => allowed),
      [true, false],
    );
  });
  const late = await abandoned.settle({ tokens: 100 });
  assert.deepEqual([tierOf(late, "tokens").outcome, tierOf(late, "tokens").charged], ["late", 100]);
});

test("a check that needs a hold, and an unknown token, are errors", async (t) => {
  const client = await start(t);
  await assert.rejects(client.check({ labels: LABELS }), (error) => {
    assert.ok(error instanceof InvalidRequestError);
    assert.equal(error.code, "needs_hold");
    return true;
  });
  const key = { key: "k", limit: { algorithm: "concurrency", amount: 1 } };
  await assert.rejects(client.check(key), { code: "needs_hold" });
  await assert.rejects(client.settle({ token: "none", cost: 1 }), { code: "invalid_request" });
});

const OPTIONS = { labels: { tenant: header("x-tenant") }, cost: COST };
const TENANT = { headers: { "x-tenant": "acme" } };

for (const { name, start: startApp } of FRAMEWORKS) {
  test(`${name}: without holds the policy decides, and the error names the fix`, async (t) => {
    const errors = [];
    const client = await start(t, { onError: (error) => errors.push(error) });
    const url = await startApp(t, { client, ...OPTIONS });
    assert.equal((await fetch(url, TENANT)).status, 200);
    assert.match(errors[0].message, /"in-flight" counts requests in flight.*set hold: true/);
    assert.ok(errors[0] instanceof ConfigurationError);
  });

  test(`${name}: a request is held until its response has ended`, async (t) => {
    const client = await start(t);
    const url = await startApp(t, { client, ...OPTIONS, hold: true });
    const response = await fetch(`${url}/?tokens=120`, TENANT);
    assert.deepEqual([response.status, await response.text()], [200, "1"]);
    assert.match(response.headers.get("ratelimit"), /"in-flight";r=1/);
    await until("the hold is settled", async () => (await remaining(client)).tokens === 880);
    assert.equal((await fetch(url, TENANT)).status, 200);
    const settled = { "in-flight": 2, tokens: 380, requests: 18 };
    await until("the estimate is settled", async () => (await remaining(client))["in-flight"] === 2);
    assert.deepEqual(await remaining(client), settled);
    const denied = await fetch(url, TENANT);
    assert.deepEqual([denied.status, (await denied.json())["violated-policies"]], [429, ["tokens"]]);
    assert.deepEqual(await remaining(client), settled);
  });

  test(`${name}: a held request is refunded without the scope adjust`, async (t) => {
    const client = await start(t);
    const refundWhen = (_, { statusCode, status, raw }) => (raw?.statusCode ?? statusCode ?? status) === 401;
    const url = await startApp(t, { client, ...OPTIONS, hold: true, refundWhen });
    assert.equal((await fetch(`${url}/?status=401`, TENANT)).status, 401);
    await until("it is refunded", async () => (await remaining(client)).requests === 20);
    assert.equal((await fetch(url, TENANT)).status, 200);
    await until("it is settled", async () => (await remaining(client))["in-flight"] === 2);
    assert.deepEqual(await remaining(client), { "in-flight": 2, tokens: 500, requests: 19 });
  });

  test(`${name}: a misconfiguration never fails a held request`, async (t) => {
    const errors = [];
    const client = await start(t, { onError: (error) => errors.push(error) });
    const limit = () => ({ amount: 1, window: "1x" });
    const url = await startApp(t, { client, name: "a", key: () => "b", limit, hold: true });
    assert.equal((await fetch(`${url}/?tokens=120`)).status, 400);
    const late = new Client({ url: "http://127.0.0.1:1", onError: () => {} });
    const other = await startApp(t, { client: late, labels: LABELS, hold: true });
    assert.equal((await fetch(`${other}/?tokens=120`)).status, 200);
  });
}

test("an in-flight limit needs holds", () => {
  const client = new Client();
  const limit = { algorithm: "concurrency", amount: 1 };
  const settings = { client, name: "a", key: () => "b", limit };
  assert.throws(() => forExpress(settings), /set hold: true/);
  forExpress({ ...settings, hold: true });
  assert.throws(
    () => forExpress({ ...settings, limit: { ...limit, window: "1m" }, hold: true }),
    /concurrency has no window/,
  );
  assert.throws(() => forExpress({ ...settings, limit: { amount: 1 } }), /token-bucket needs a window/);
});

/** Streams words to a response, and records each as a token. `use` receives the hold after the first word. */
async function* words(hold, started) {
  for (let tokens = 1; ; tokens++) {
    hold.actualCost = { tokens };
    yield `word ${tokens}\n`;
    started.resolve(hold);
    await started.next;
    if (tokens === 3) return;
  }
}

function started() {
  const signal = {};
  signal.first = new Promise((resolve) => {
    signal.resolve = resolve;
  });
  signal.next = new Promise((resolve) => {
    signal.go = resolve;
  });
  return signal;
}

const STREAMS = {
  express: (t, client, signal) => {
    const app = express();
    app.get("/", forExpress({ client, ...OPTIONS, hold: true }), async (request, response) => {
      for await (const word of words(holdOf(request), signal)) response.write(word);
      response.end();
    });
    return listen(t, createServer(app));
  },
  fastify: async (t, client, signal) => {
    const app = Fastify({ forceCloseConnections: true });
    t.after(() => app.close());
    await app.register(forFastify, { client, ...OPTIONS, hold: true });
    app.get("/", async (request, reply) => {
      reply.hijack();
      for await (const word of words(holdOf(request), signal)) reply.raw.write(word);
      reply.raw.end();
    });
    return app.listen({ port: 0, host: "127.0.0.1" });
  },
  fetch: (t, client, signal) => {
    const handler = (request) => {
      const source = words(holdOf(request), signal);
      const encoder = new TextEncoder();
      const body = new ReadableStream({
        async pull(controller) {
          const { done, value } = await source.next();
          if (done) controller.close();
          else controller.enqueue(encoder.encode(value));
        },
      });
      return new Response(body);
    };
    return serveFetch(t, forFetch({ client, ...OPTIONS, hold: true }, handler));
  },
};

for (const [name, startApp] of Object.entries(STREAMS)) {
  test(`${name}: a stream is held until it has ended`, async (t) => {
    const client = await start(t);
    const signal = started();
    const url = await startApp(t, client, signal);
    const response = await fetch(url, TENANT);
    await signal.first;
    assert.deepEqual(await remaining(client), { "in-flight": 1, tokens: 500, requests: 19 });
    signal.go();
    assert.equal(await response.text(), "word 1\nword 2\nword 3\n");
    await until("the hold is settled", async () => (await remaining(client))["in-flight"] === 2);
    assert.deepEqual(await remaining(client), { "in-flight": 2, tokens: 997, requests: 19 });
  });

  test(`${name}: a stream is settled when its client disconnects`, async (t) => {
    const client = await start(t);
    const signal = started();
    const url = await startApp(t, client, signal);
    const request = httpGet(url, TENANT);
    request.on("error", () => {});
    request.on("response", (response) => response.on("error", () => {}));
    await signal.first;
    request.destroy();
    // a fetch handler detects the disconnection with the next chunk
    if (name === "fetch") signal.go();
    await until("the hold is settled", async () => (await remaining(client))["in-flight"] === 2);
    assert.ok((await remaining(client)).tokens >= 997);
    signal.go();
  });
}

test("a fetch handler that fails settles the estimate", async (t) => {
  const client = await start(t);
  const handler = forFetch({ client, ...OPTIONS, hold: true }, () => {
    throw new Error("failed");
  });
  await assert.rejects(handler(new Request("http://localhost/", TENANT)), /failed/);
  assert.deepEqual(await remaining(client), { "in-flight": 2, tokens: 500, requests: 19 });
});
