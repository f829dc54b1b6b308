// An application under load while the server is stopped or killed.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";
import express from "express";
import { Client, header } from "sluicegate";
import { rateLimit } from "sluicegate/express";
import { listen, Server, sleep } from "./harness.mjs";

const DEADLINE_MS = 100;
const SLACK_MS = 500;
/** 2 s, and slack for a busy machine. */
const RECOVERY_MS = 4000;
const OUTAGE_MS = 2000;
const CALLERS = 8;

for (const [situation, fail, recover] of [
  ["stopped", (server) => server.pause(), (server) => server.resume()],
  ["killed", (server) => server.kill(), (server) => server.restart()],
]) {
  for (const [onFailure, status] of [
    ["open", 200],
    ["closed", 503],
  ]) {
    test(`server ${situation}, policy ${onFailure}: no 500, no late response, and limits again afterwards`, async (t) => {
      const server = await Server.start(t);
      const client = new Client({ url: server.url, deadlineMs: DEADLINE_MS, onFailure, onError: () => {} });
      const app = express();
      const limit = { amount: 1_000_000, window: "1h" };
      app.use(rateLimit({ client, name: "all", key: header("x-api-key"), limit }));
      app.get("/", (_, response) => response.send("hello"));
      const url = await listen(t, createServer(app));
      const get = async () => {
        const startedMs = performance.now();
        const response = await fetch(url);
        await response.text();
        return {
          status: response.status,
          ms: performance.now() - startedMs,
          isLimited: response.headers.has("ratelimit"),
        };
      };
      /** Sends requests until a time or a condition, and returns the responses. */
      const load = async (durationMs, isEnough = () => false) => {
        const responses = [];
        const endMs = performance.now() + durationMs;
        const call = async () => {
          while (performance.now() < endMs && !responses.some(isEnough)) {
            responses.push(await get());
            await sleep(10);
          }
        };
        await Promise.all(Array.from({ length: CALLERS }, call));
        return responses;
      };
      const isNormal = (response) => response.status === 200 && response.isLimited;

      assert.ok((await load(RECOVERY_MS, isNormal)).some(isNormal));
      await fail(server);
      const during = await load(OUTAGE_MS);
      assert.deepEqual([...new Set(during.map((response) => response.status))], [status]);
      assert.ok(during.length > 100, `${during.length} responses`);
      const slowestMs = Math.max(...during.map(({ ms }) => ms));
      assert.ok(slowestMs < DEADLINE_MS + SLACK_MS, `${slowestMs} ms`);

      await recover(server);
      const startedMs = performance.now();
      const after = await load(RECOVERY_MS, isNormal);
      assert.ok(after.some(isNormal), `not within ${RECOVERY_MS} ms`);
      assert.ok(after.every((response) => response.status === 200 || response.status === status));
      t.diagnostic(
        `slowest response ${slowestMs.toFixed(0)} ms, recovery ${(performance.now() - startedMs).toFixed(0)} ms`,
      );
    });
  }
}
