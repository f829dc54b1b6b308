import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";
import express from "express";
import express4 from "express4";
import { Client, header } from "sluicegate";
import { rateLimit } from "sluicegate/express";
import { listen, RELAXED_MS, Server } from "./harness.mjs";

for (const [version, framework] of [
  ["express 5", express],
  ["express 4", express4],
]) {
  test(`${version}: an endpoint is limited per API key, with headers`, async (t) => {
    const server = await Server.start(t);
    const client = new Client({ url: server.url, deadlineMs: RELAXED_MS });
    const app = framework();
    const limit = { amount: 2, window: "1h", algorithm: "sliding-log" };
    app.get("/api", rateLimit({ client, name: "api", key: header("x-api-key"), limit }), (_, response) => {
      response.send("hello");
    });
    const url = await listen(t, createServer(app));
    const get = (key) => fetch(`${url}/api`, { headers: { "x-api-key": key } });

    for (const remaining of [1, 0]) {
      const response = await get("alice");
      assert.equal(response.status, 200);
      assert.equal(await response.text(), "hello");
      assert.equal(response.headers.get("ratelimit-policy"), '"default";q=2;w=3600');
      assert.match(response.headers.get("ratelimit"), new RegExp(`^"default";r=${remaining};t=\\d+$`));
      assert.equal(response.headers.get("retry-after"), null);
    }
    const denied = await get("alice");
    assert.equal(denied.status, 429);
    assert.equal(denied.headers.get("content-type"), "application/problem+json");
    assert.equal(denied.headers.get("cache-control"), "no-store");
    const seconds = Number(denied.headers.get("retry-after"));
    assert.ok(seconds > 3500 && seconds <= 3600, String(seconds));
    assert.match(denied.headers.get("ratelimit"), /^"default";r=0;t=\d+$/);
    const body = await denied.json();
    assert.equal(body.title, "Quota Exceeded");
    assert.equal(body.status, 429);
    assert.equal(Math.ceil(body.retry_after_ms / 1000), seconds);
    assert.equal((await get("bob")).status, 200);
  });
}
