// Every way in which a held request can end, with a real server.
import assert from "node:assert/strict";
import { createServer, ServerResponse } from "node:http";
import http2 from "node:http2";
import net from "node:net";
import { test } from "node:test";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import express from "express";
import Fastify from "fastify";
import { Client, header, holdOf } from "sluicegate";
import { rateLimit as forExpress } from "sluicegate/express";
import { rateLimit as forFastify } from "sluicegate/fastify";
import { rateLimit as forFetch } from "sluicegate/fetch";
import { listen, RELAXED_MS, Server, sleep, until } from "./harness.mjs";

const RULES = `
[[rule]]
name = "in-flight"
algorithm = "concurrency"
amount = 10
ttl = "30s"

[[rule]]
name = "tokens"
unit = "tokens"
algorithm = "fixed-window"
amount = 1000
window = "1h"
`;
const COST = { requests: 1, tokens: 500 };

async function start(t) {
  const environment = { SLUICEGATE_STORE_DEADLINE: "5s" };
  const server = await Server.start(t, { config: RULES, environment });
  const client = new Client({ url: server.url, deadlineMs: RELAXED_MS });
  client.url = server.url;
  t.after(() => client.close());
  return client;
}

/** Returns the free slots and the remaining tokens. */
async function remaining(client) {
  const { applies } = await client.explain({ labels: {}, cost: { requests: 0, tokens: 0 } });
  return applies.map(({ state }) => state.remaining);
}

async function untilRemaining(client, slots, tokens) {
  let found;
  await until(`${slots} slots are free`, async () => {
    found = await remaining(client);
    return found[0] === slots;
  });
  assert.deepEqual(found, [slots, tokens]);
}

const settings = (client) => ({ client, labels: { a: header("x-a") }, cost: COST, hold: true });

const never = new Promise(() => {});

for (const [name, startApp] of [
  [
    "express",
    (t, client, handler) => {
      const app = express();
      app.get("/", forExpress(settings(client)), (request, response) => void handler(request, response));
      return listen(t, createServer(app));
    },
  ],
  [
    "fastify",
    async (t, client, handler) => {
      const app = Fastify({ forceCloseConnections: true });
      t.after(() => app.close());
      await app.register(forFastify, settings(client));
      app.get("/", (request, reply) => void handler(request, reply.raw));
      return app.listen({ port: 0, host: "127.0.0.1" });
    },
  ],
]) {
  test(`${name}: pipelined requests end with their connection`, async (t) => {
    const client = await start(t);
    let handled = 0;
    const url = await startApp(t, client, () => {
      handled += 1;
      return never;
    });
    const socket = net.connect(new URL(url).port, "127.0.0.1");
    socket.write("GET / HTTP/1.1\r\nhost: a\r\n\r\n".repeat(2));
    await until("both requests are handled", () => handled === 2);
    assert.equal((await remaining(client))[0], 8);
    socket.destroy();
    await untilRemaining(client, 10, 0);
  });

  test(`${name}: the application may set the actual cost when its client disconnects`, async (t) => {
    const client = await start(t);
    let isHandled = false;
    const url = await startApp(t, client, (request, response) => {
      response.on("close", () => {
        holdOf(request).actualCost = { tokens: 3 };
      });
      isHandled = true;
    });
    const socket = net.connect(new URL(url).port, "127.0.0.1");
    socket.write("GET / HTTP/1.1\r\nhost: a\r\n\r\n");
    await until("the request is handled", () => isHandled);
    socket.destroy();
    await untilRemaining(client, 10, 997);
  });
}

test("fastify: an HTTP/2 client that disconnects during the check frees its slot", async (t) => {
  const client = await start(t);
  const app = Fastify({ http2: true });
  t.after(() => app.close());
  let isChecking = false;
  let proceed;
  const isGone = new Promise((resolve) => {
    proceed = resolve;
  });
  await app.register(forFastify, {
    ...settings(client),
    cost: async () => {
      isChecking = true;
      await isGone;
      return COST;
    },
  });
  app.get("/", async () => "hello");
  const url = await app.listen({ port: 0, host: "127.0.0.1" });
  const session = http2.connect(url);
  session.on("error", () => {});
  session
    .request({ ":path": "/" })
    .on("error", () => {})
    .end();
  await until("the check starts", () => isChecking);
  session.destroy();
  await sleep(100);
  proceed();
  await sleep(300);
  await untilRemaining(client, 10, 500);
});

test("express: a response without a connection ends with that of its request", async (t) => {
  // as express-ws does for a WebSocket
  const client = await start(t);
  const app = express();
  let isHandled = false;
  app.use(forExpress(settings(client)));
  app.get("/", () => {
    isHandled = true;
  });
  const server = createServer();
  server.on("upgrade", (request, upgraded) => {
    upgraded.on("error", () => {}).on("end", () => upgraded.end());
    upgraded.resume();
    app.handle(request, new ServerResponse(request), () => {});
  });
  const url = await listen(t, server);
  const socket = net.connect(new URL(url).port, "127.0.0.1");
  socket.write("GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n");
  await until("the request is handled", () => isHandled);
  assert.equal((await remaining(client))[0], 9);
  socket.destroy();
  await untilRemaining(client, 10, 500);
});

const get = (handler, init = {}) => handler(new Request("http://localhost/", init));

for (const [name, startApp] of [
  [
    "express",
    async (t, client, handler) => {
      const app = express();
      app.get("/", forExpress(settings(client)), (request, response) => handler(request, response));
      const server = createServer(app);
      return [await listen(t, server), () => new Promise((resolve) => server.close(resolve))];
    },
  ],
  [
    "fastify",
    async (_, client, handler) => {
      const app = Fastify();
      await app.register(forFastify, settings(client));
      app.get("/", (request, reply) => handler(request, reply.raw));
      return [await app.listen({ port: 0, host: "127.0.0.1" }), () => app.close()];
    },
  ],
]) {
  test(`${name}: the last holds are settled when the server and the client are closed`, async (t) => {
    const observer = await start(t);
    const client = new Client({ url: observer.url, deadlineMs: RELAXED_MS });
    const [url, close] = await startApp(t, client, (request, response) => {
      holdOf(request).actualCost = { tokens: 5 };
      setTimeout(() => response.end("hello"), 100);
    });
    const responses = Array.from({ length: 2 }, () => fetch(url, { headers: { connection: "close" } }));
    await until("both requests are held", async () => (await remaining(observer))[0] === 8);
    await close();
    await client.close();
    assert.deepEqual(await remaining(observer), [10, 990]);
    for (const response of await Promise.all(responses)) assert.equal(await response.text(), "hello");
  });
}

test("express: holds are settled when the server destroys its connections and the client is closed", async (t) => {
  const observer = await start(t);
  const client = new Client({ url: observer.url, deadlineMs: RELAXED_MS });
  const app = express();
  app.get("/", forExpress({ ...settings(client), cost: { requests: 1, tokens: 5 } }), () => {});
  const server = createServer(app);
  const url = await listen(t, server);
  for (let n = 0; n < 8; n += 1) fetch(url).catch(() => {});
  await until("all requests are held", async () => (await remaining(observer))[0] === 2);
  await new Promise((resolve) => {
    server.close(resolve);
    server.closeAllConnections();
  });
  await client.close();
  assert.deepEqual(await remaining(observer), [10, 960]);
});

test("fetch: the body of a response to HEAD is not read", async (t) => {
  const client = await start(t);
  const handler = forFetch(settings(client), () => new Response("the body that GET has"));
  // as Hono and Next.js do
  const head = new Response(null, await get(handler, { method: "HEAD" }));
  assert.equal(head.status, 200);
  await untilRemaining(client, 10, 500);
});

test("fetch: a client that disconnects before the body is read frees its slot", async (t) => {
  const client = await start(t);
  const handler = forFetch(settings(client), () => new Response("never read"));
  const controller = new AbortController();
  await get(handler, { signal: controller.signal });
  controller.abort();
  await untilRemaining(client, 10, 500);
});

test("fetch: a stream may set the actual cost when it is cancelled", async (t) => {
  const client = await start(t);
  const encoder = new TextEncoder();
  for (const [tokens, isGenerator] of [
    [997, false],
    [994, true],
  ]) {
    const handler = forFetch(settings(client), (request) => {
      async function* words() {
        try {
          for (;;) yield encoder.encode("word");
        } finally {
          await sleep(10);
          holdOf(request).actualCost = { tokens: 3 };
        }
      }
      const stream = new ReadableStream({
        pull: (controller) => controller.enqueue(encoder.encode("word")),
        cancel: () => {
          holdOf(request).actualCost = { tokens: 3 };
        },
      });
      return new Response(isGenerator ? ReadableStream.from(words()) : stream);
    });
    const response = await get(handler);
    const reader = response.body.getReader();
    await reader.read();
    await reader.cancel();
    await untilRemaining(client, 10, tokens);
  }
});

test("fetch: a stream whose cancellation never ends frees its slot", async (t) => {
  const client = await start(t);
  const handler = forFetch(settings(client), () => new Response(new ReadableStream({ cancel: () => never })));
  const response = await get(handler);
  void response.body.cancel();
  await untilRemaining(client, 10, 500);
});

/** Collects garbage until a condition holds. */
async function untilCollected(description, condition) {
  setFlagsFromString("--expose-gc");
  const collect = runInNewContext("gc");
  await until(description, async () => {
    collect();
    return condition();
  });
}

test("fetch: a body that is discarded without reading it frees its slot", async (t) => {
  const client = await start(t);
  const source = {};
  const silent = new ReadableStream({ start: (controller) => Object.assign(source, { controller }) });
  for (const body of ["discarded", silent]) {
    const handler = forFetch(settings(client), () => new Response(body));
    // as the middleware etag of Hono does
    await (async () => new Response(null, { status: 304, headers: (await get(handler)).headers }))();
    await untilCollected("the slot is free", async () => (await remaining(client))[0] === 10);
  }
  source.controller.close();
});

test("a hold of which the application has no reference is not renewed", async (t) => {
  const client = await start(t);
  async function* abandoned() {
    const hold = await client.hold({ labels: {} }, { ttlMs: 1000 });
    // as `await using` does
    const dispose = hold[Symbol.asyncDispose];
    try {
      yield "a word";
    } finally {
      await dispose();
    }
  }
  await (async () => (await abandoned().next()).value)();
  await untilCollected("the hold expires", async () => {
    const hold = await client.hold({ labels: {}, cost: 10 });
    await hold.release();
    return hold.allowed;
  });
});
