// An Express app with one endpoint, limited per API key by the contestant that CONTESTANT names. The limit is never reached.
// REDIS is the port of Redis, SLUICEGATE the address of the server, PORT the port of this app.

import express from "express";

const LIMIT = 1_000_000_000;
const { CONTESTANT, PORT, REDIS, SLUICEGATE } = process.env;
const redis = async () => new (await import("ioredis")).Redis({ port: Number(REDIS) });

const contestants = {
  "no limiter": () => (_request, _response, next) => next(),

  sluicegate: async () => {
    const { Client, header } = await import("../../clients/node/dist/esm/index.js");
    const { rateLimit } = await import("../../clients/node/dist/esm/express.js");
    const limit = { amount: LIMIT, window: "1m" };
    return rateLimit({ client: new Client(SLUICEGATE), name: "api", key: header("x-api-key"), limit });
  },

  "express-rate-limit": async () => {
    const { rateLimit } = await import("express-rate-limit");
    const { RedisStore } = await import("rate-limit-redis");
    const client = await redis();
    const store = new RedisStore({ sendCommand: (command, ...args) => client.call(command, ...args) });
    const keyGenerator = (request) => request.get("x-api-key");
    return rateLimit({ windowMs: 60_000, limit: LIMIT, standardHeaders: "draft-8", keyGenerator, store });
  },

  "rate-limiter-flexible": async () => {
    const { RateLimiterRedis } = await import("rate-limiter-flexible");
    const limiter = new RateLimiterRedis({ storeClient: await redis(), points: LIMIT, duration: 60 });
    return (request, response, next) =>
      limiter.consume(request.get("x-api-key")).then(() => next(), () => response.sendStatus(429));
  },
};

const app = express();
app.get("/", await contestants[CONTESTANT](), (_request, response) => response.json({ status: "ready" }));
app.listen(Number(PORT), "127.0.0.1");
