// The same application in each framework: `GET /` responds with the remaining quota that the handler sees.
import { createServer } from "node:http";
import { Readable } from "node:stream";
import express from "express";
import express4 from "express4";
import Fastify from "fastify";
import { Hono } from "hono";
import { decisionOf, holdOf } from "sluicegate";
import { rateLimit as forExpress } from "sluicegate/express";
import { rateLimit as forFastify } from "sluicegate/fastify";
import { rateLimit as forFetch } from "sluicegate/fetch";
import { listen } from "./harness.mjs";

/** Returns the remaining quota. `/?tokens=120` sets the actual cost of the hold. */
function remainingOf(request) {
  const tokens = new URL(request.url, "http://localhost").searchParams.get("tokens");
  if (tokens !== null) holdOf(request).actualCost = { tokens: Number(tokens) };
  return String(decisionOf(request)?.remaining);
}

/** The status of the response: `/?status=401`. */
const statusOf = (url) => Number(new URL(url, "http://localhost").searchParams.get("status") ?? 200);

function startExpress(framework) {
  return async (t, ...limiters) => {
    const app = framework();
    // errors are not written to standard error
    app.set("env", "test");
    const handlers = limiters.map((options) => forExpress(options));
    app.get("/", ...handlers, (request, response) => response.status(statusOf(request.url)).send(remainingOf(request)));
    return listen(t, createServer(app));
  };
}

async function startFastify(t, ...limiters) {
  const app = Fastify({ forceCloseConnections: true });
  t.after(() => app.close());
  for (const options of limiters) await app.register(forFastify, options);
  app.get("/", async (request, reply) => reply.code(statusOf(request.url)).send(remainingOf(request)));
  return app.listen({ port: 0, host: "127.0.0.1" });
}

/** Serves a fetch handler with node:http. The second argument of the handler is the address of the peer. */
export function serveFetch(t, handler) {
  const server = createServer(async (incoming, outgoing) => {
    const url = `http://${incoming.headers.host}${incoming.url}`;
    const request = new Request(url, { method: incoming.method, headers: incoming.headers });
    const response = await handler(request, incoming.socket.remoteAddress).catch(
      () => new Response("", { status: 500 }),
    );
    outgoing.writeHead(response.status, Object.fromEntries(response.headers));
    if (response.body === null) outgoing.end();
    else Readable.fromWeb(response.body).pipe(outgoing);
  });
  return listen(t, server);
}

const wrap = (limiters, handler) => limiters.reduceRight((inner, options) => forFetch(options, inner), handler);

function startFetch(t, ...limiters) {
  const handler = (request) => new Response(remainingOf(request), { status: statusOf(request.url) });
  return serveFetch(t, wrap(limiters, handler));
}

function startHono(t, ...limiters) {
  const app = new Hono();
  app.get("/", (context) => context.text(remainingOf(context.req.raw), statusOf(context.req.url)));
  return serveFetch(
    t,
    wrap(limiters, (request) => app.fetch(request)),
  );
}

/** How to start the application, and how each framework sends a custom denial. */
export const FRAMEWORKS = [
  {
    name: "express 5",
    start: startExpress(express),
    onDenied: (_, response, decision) => response.status(420).json({ wait: decision.retryAfterMs }),
  },
  {
    name: "express 4",
    start: startExpress(express4),
    onDenied: (_, response, decision) => response.status(420).json({ wait: decision.retryAfterMs }),
  },
  {
    name: "fastify 5",
    start: startFastify,
    onDenied: (_, reply, decision) => {
      reply.code(420);
      return { wait: decision.retryAfterMs };
    },
  },
  {
    name: "fetch",
    start: startFetch,
    onDenied: (_, decision) => Response.json({ wait: decision.retryAfterMs }, { status: 420 }),
    peer: (_, address) => address,
  },
  {
    name: "hono",
    start: startHono,
    onDenied: (_, decision) => Response.json({ wait: decision.retryAfterMs }, { status: 420 }),
    peer: (_, address) => address,
  },
];
