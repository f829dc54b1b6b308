// Holds while the server loses connections, is late or is unavailable.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";
import { Client, HoldConflictError, InvalidRequestError, localBucket } from "sluicegate";
import ts from "typescript";
import { freePort, listen, RELAXED_MS, runProgram, sleep, until } from "./harness.mjs";

const LABELS = { labels: { tenant: "acme" } };
const DECIDED = {
  ...{ allowed: true, rule: null, limit: 9, remaining: 8, retry_after_ms: null, reset_after_ms: 1 },
  ...{ never: false, degraded: false, source: "memory", at_us: 1, tiers: [] },
};
const OUTCOMES = { settle: "settled", release: "released", renew: "renewed" };

/**
 * Starts a fake server. `lost`, `failed` and `silent` return whether the request with a number gets a closed connection, a 503, or no
 * response. The rules in `gone` have no hold any more when it is renewed.
 */
async function fakeServer(t, { decision = DECIDED, ttlMs = 60_000, repeated = false, gone = [], ...settings } = {}) {
  const { lost = () => false, failed = () => false, silent = () => false } = settings;
  const seen = { calls: [], bodies: [] };
  const server = createServer(async (request, response) => {
    let text = "";
    for await (const bytes of request) text += bytes;
    const body = JSON.parse(text);
    const path = request.url.replace("/v1/", "");
    const number = seen.calls.push([path, body.cost]);
    seen.bodies.push(body);
    if (lost(number)) return request.socket.destroy();
    if (silent(number)) return undefined;
    response.statusCode = failed(number) ? 503 : 200;
    const answer = failed(number) ? { status: 503, detail: "store" } : answerTo(path, body);
    const json = JSON.stringify(answer);
    return response.setHeader("content-length", json.length).end(json);
  });
  function answerTo(path, { id, ttl_ms = ttlMs }) {
    if (path === "check") return decision;
    if (path !== "hold") {
      const outcome = OUTCOMES[path];
      const tier = { rule: "tokens", unit: "tokens", outcome, charged: 5, remaining: 3, expires_at_us: 7 };
      if (path !== "renew" || gone.length === 0) return { outcome, tiers: [tier] };
      const lost = { ...tier, outcome: "unknown", charged: null, remaining: null, expires_at_us: null };
      return {
        outcome: "unknown",
        tiers: gone.map((rule) => ({ ...lost, rule })).concat(gone.includes("tokens") ? [] : tier),
      };
    }
    const admitted = { token: "t0ken", expires_at_us: 1 + ttl_ms * 1000 };
    return { ...decision, id, repeated, ...(decision.allowed ? admitted : {}) };
  }
  seen.url = await listen(t, server);
  seen.paths = () => seen.calls.map(([path]) => path);
  return seen;
}

function startClient(t, { url }, options = {}) {
  const client = new Client({ url, deadlineMs: RELAXED_MS, onError: () => {}, ...options });
  t.after(() => client.close());
  return client;
}

test("withHold settles what the application settled, and returns its result", async (t) => {
  const server = await fakeServer(t);
  const client = startClient(t, server);
  const request = { ...LABELS, cost: { tokens: 500 } };
  const result = await client.withHold(request, { ttlMs: 1500 }, async (hold) => {
    assert.deepEqual([hold.allowed, hold.token, hold.isRepeated, hold.expiresAtUs], [true, "t0ken", false, 1_500_001]);
    const { outcome, tiers } = await hold.settle({ tokens: 120 });
    assert.deepEqual([outcome, tiers[0].charged, tiers[0].expiresAtUs], ["settled", 5, 7]);
    return hold.id;
  });
  assert.deepEqual(server.calls, [
    ["hold", { tokens: 500 }],
    ["settle", { tokens: 120 }],
  ]);
  const [held, settled] = server.bodies;
  assert.deepEqual([held.ttl_ms, held.id, held.id.length], [1500, result, 36]);
  assert.equal(settled.token, "t0ken");
});

test("the end of withHold settles the estimate, an exception releases, and an abort settles the estimate", async (t) => {
  const server = await fakeServer(t);
  const client = startClient(t, server);
  const request = { ...LABELS, cost: 9 };
  assert.equal(await client.withHold(request, () => 7), 7);
  await assert.rejects(
    client.withHold(request, () => Promise.reject(new Error("failed"))),
    /failed/,
  );
  const abort = () => AbortSignal.abort().throwIfAborted();
  await assert.rejects(client.withHold(request, abort), { name: "AbortError" });
  assert.deepEqual(server.calls.slice(1), [
    ["settle", 9],
    ["hold", 9],
    ["release", undefined],
    ["hold", 9],
    ["settle", 9],
  ]);
});

test("an abort of another kind, by the signal of the hold, settles the estimate", async (t) => {
  const server = await fakeServer(t);
  const client = startClient(t, server);
  const request = { ...LABELS, cost: 9 };
  const gone = new Error("the client has disconnected");
  for (const thrown of [gone, new TypeError("terminated")]) {
    const controller = new AbortController();
    const use = () => {
      controller.abort(gone);
      throw thrown;
    };
    await assert.rejects(client.withHold(request, { signal: controller.signal }, use), thrown);
  }
  await assert.rejects(
    client.withHold(request, { signal: new AbortController().signal }, () => Promise.reject(gone)),
    gone,
  );
  const ends = server.calls.filter(([path]) => path !== "hold");
  assert.deepEqual(ends, [
    ["settle", 9],
    ["settle", 9],
    ["release", undefined],
  ]);
});

test("the actual cost is settled also after an exception", async (t) => {
  const server = await fakeServer(t);
  const client = startClient(t, server);
  const use = (hold) => {
    for (let tokens = 1; tokens <= 4; tokens++) hold.actualCost = { tokens };
    throw new Error("failed");
  };
  await assert.rejects(client.withHold(LABELS, use), /failed/);
  assert.deepEqual(server.calls[1], ["settle", { tokens: 4 }]);
  const hold = await client.hold(LABELS);
  assert.throws(() => {
    hold.actualCost = { tokens: 0.5 };
  }, InvalidRequestError);
});

test("the estimate is that of the time when the hold was made", async (t) => {
  const server = await fakeServer(t);
  const client = startClient(t, server);
  const cost = { tokens: 500 };
  await client.withHold({ ...LABELS, cost }, () => {
    cost.tokens = 900;
  });
  assert.deepEqual(server.calls[1], ["settle", { tokens: 500 }]);
});

test("a settlement with an invalid cost keeps the estimate", async (t) => {
  const server = await fakeServer(t);
  const client = startClient(t, server);
  const use = (hold) => hold.settle({ tokens: -1 });
  await assert.rejects(client.withHold({ ...LABELS, cost: 9 }, use), /cost.tokens is -1/);
  assert.deepEqual(server.calls[1], ["settle", 9]);
});

test("a settlement that fails does not stop the renewals", async (t) => {
  const server = await fakeServer(t, { ttlMs: 150 });
  const client = startClient(t, server);
  await client.withHold(LABELS, async (hold) => {
    await assert.rejects(hold.settle({ tokens: -1 }), InvalidRequestError);
    await until("two renewals", () => server.calls.length >= 3);
  });
  assert.deepEqual(new Set(server.paths().slice(1, -1)), new Set(["renew"]));
});

test("the end of an await using block settles", async (t) => {
  const server = await fakeServer(t);
  const client = startClient(t, server);
  // as `await using hold = await client.hold(…)` does, which not every version of Node can parse
  const hold = await client.hold({ ...LABELS, cost: 9 });
  await hold[Symbol.asyncDispose]();
  const settled = await client.hold(LABELS);
  const dispose = settled[Symbol.asyncDispose];
  await settled.settle(2);
  await dispose();
  assert.deepEqual(server.calls, [
    ["hold", 9],
    ["settle", 9],
    ["hold", undefined],
    ["settle", 2],
  ]);
});

test("nothing is settled for a denied hold, or if no rule matches", async (t) => {
  for (const decision of [
    { ...DECIDED, allowed: false, retry_after_ms: 1000 },
    { ...DECIDED, source: "unmatched" },
  ]) {
    const server = await fakeServer(t, { decision });
    const client = startClient(t, server);
    await client.withHold(LABELS, async (hold) => {
      assert.equal(hold.allowed, decision.allowed);
      assert.equal((await hold.renew()).outcome, "renewed");
      assert.equal((await hold.release()).outcome, "released");
    });
    assert.deepEqual(server.paths(), ["hold"]);
  }
});

test("each call of a hold is sent again after a lost connection, unlike a check", async (t) => {
  const server = await fakeServer(t, { lost: (number) => number % 2 === 1 });
  const client = startClient(t, server);
  const hold = await client.hold(LABELS, { id: "request-1" });
  assert.equal(hold.token, "t0ken");
  assert.equal((await hold.renew(30_000)).outcome, "renewed");
  assert.equal((await hold.settle(2)).outcome, "settled");
  assert.equal((await client.release({ ...LABELS, id: "request-1" })).outcome, "released");
  assert.deepEqual(
    server.paths(),
    ["hold", "renew", "settle", "release"].flatMap((path) => [path, path]),
  );
  const [first, second] = server.bodies;
  assert.equal(first.id, second.id);
  assert.ok(second.deadline_ms <= first.deadline_ms);
  assert.equal((await client.check(LABELS)).source, "open");
  assert.equal(server.calls.length, 9);
});

test("a hold is sent only twice, and then the policy decides", async (t) => {
  const server = await fakeServer(t, { lost: (number) => number <= 2 });
  const client = startClient(t, server);
  const hold = await client.hold(LABELS);
  assert.deepEqual([hold.allowed, hold.decision.source, hold.token], [true, "open", null]);
  // the server may have admitted it
  assert.equal((await hold.settle(2)).outcome, "settled");
  assert.deepEqual(server.paths(), ["hold", "hold", "settle"]);
  assert.deepEqual([server.bodies[2].labels, server.bodies[2].id], [LABELS.labels, hold.id]);
});

test("a hold that the server may have made is renewed", async (t) => {
  const server = await fakeServer(t, { lost: (number) => number <= 2 });
  const client = startClient(t, server);
  await client.withHold(LABELS, (hold) => {
    assert.deepEqual([hold.allowed, hold.token], [true, null]);
    return until("a renewal", () => server.calls.length >= 3);
  });
  assert.deepEqual(server.paths(), ["hold", "hold", "renew", "settle"]);
  assert.deepEqual([server.bodies[2].id, server.bodies[2].ttl_ms], [server.bodies[0].id, 60_000]);
});

test("a hold that the policy denies is released", async (t) => {
  const server = await fakeServer(t, { lost: (number) => number <= 2 });
  const client = startClient(t, server, { onFailure: "closed" });
  const hold = await client.hold(LABELS);
  assert.deepEqual([hold.allowed, hold.decision.source], [false, "closed"]);
  await until("the hold is released", () => server.calls.length === 3);
  assert.deepEqual([server.paths()[2], server.bodies[2].id], ["release", hold.id]);
});

test("a hold that may be repeated is not released", async (t) => {
  const server = await fakeServer(t, { lost: (number) => number <= 2 });
  const client = startClient(t, server, { onFailure: "closed" });
  assert.equal((await client.hold(LABELS, { id: "request-2" })).allowed, false);
  const hold = await client.hold(LABELS, { id: "request-2" });
  assert.equal(hold.allowed, true);
  await hold.settle(1);
  assert.deepEqual(server.paths(), ["hold", "hold", "hold", "settle"]);
});

test("a hold whose server stops may have been made", async (t) => {
  const server = createServer((request) => {
    server.close();
    request.socket.destroy();
  });
  const client = startClient(t, { url: await listen(t, server) });
  const hold = await client.hold(LABELS);
  assert.equal(hold.decision.source, "open");
  // the first request may have arrived, although the second was not sent
  assert.equal((await hold.settle(1)).outcome, "queued");
});

test("a hold that was not sent is not settled", async (t) => {
  const url = `http://127.0.0.1:${await freePort()}`;
  const client = startClient(t, { url }, { onFailure: localBucket({ amount: 1, window: "1h" }) });
  const limit = { algorithm: "concurrency", amount: 3 };
  const hold = await client.hold({ key: "k", limit });
  assert.deepEqual([hold.allowed, hold.decision.source], [true, "fallback"]);
  assert.equal((await hold.settle(1)).outcome, "settled");
  assert.equal((await client.hold({ key: "k", limit })).allowed, false);
});

test("a settlement is repeated in the background", async (t) => {
  const server = await fakeServer(t, { failed: (number) => number > 1 && number < 5 });
  const client = startClient(t, server);
  const outcome = await client.withHold(LABELS, async (hold) => (await hold.settle(7)).outcome);
  assert.equal(outcome, "queued");
  await until("the settlement is delivered", () => server.calls.length === 5);
  assert.deepEqual(server.calls.slice(1), Array(4).fill(["settle", 7]));
});

test("a settlement is queued without a call while the circuit breaker is open", async (t) => {
  let isLost = false;
  const server = await fakeServer(t, { lost: () => isLost });
  const client = startClient(t, server);
  const hold = await client.hold(LABELS);
  isLost = true;
  while ((await client.check(LABELS)).error?.code !== "circuit_open");
  const sent = server.calls.length;
  const outcome = hold.settle(1);
  assert.equal(server.calls.length, sent);
  isLost = false;
  assert.equal((await outcome).outcome, "queued");
  await until("the settlement is delivered", () => server.paths().includes("settle"));
  // which closes the circuit breaker
  assert.equal((await client.check(LABELS)).source, "memory");
});

test("an actual cost that cannot be queued is settled by the end of the block", async (t) => {
  let isLost = false;
  const server = await fakeServer(t, { lost: () => isLost });
  const client = startClient(t, server);
  await client.withHold({ ...LABELS, cost: 500 }, async (hold) => {
    isLost = true;
    while ((await client.check(LABELS)).error?.code !== "circuit_open");
    const others = Array.from({ length: 10_010 }, () => client.settle({ token: "other", cost: 1 }));
    assert.equal((await Promise.allSettled(others)).at(-1).status, "rejected");
    await assert.rejects(hold.settle(120), { name: "UnavailableError" });
    isLost = false;
    await until("the server responds", async () => (await client.check(LABELS)).source === "memory");
  });
  await until("the hold is settled", () => server.calls.some(([, cost]) => cost === 120));
  assert.ok(!server.calls.some(([path, cost]) => path === "settle" && cost === 500));
});

test("closing the client waits for settlements, also for those in the background", async (t) => {
  const server = await fakeServer(t, { failed: (number) => number === 2 });
  const client = startClient(t, server);
  assert.equal((await (await client.hold(LABELS)).settle(1)).outcome, "queued");
  const hold = await client.hold(LABELS);
  void hold.settle(7);
  const closed = client.close();
  // later calls fail at once
  await assert.rejects(client.check(LABELS), { code: "closed" });
  await assert.rejects(client.hold(LABELS), { code: "closed" });
  assert.equal(client.close(), closed);
  await closed;
  const settled = server.calls.filter(([path]) => path === "settle").map(([, cost]) => cost);
  assert.deepEqual(settled.sort(), [1, 1, 7]);
  await assert.rejects(client.settle({ token: "t", cost: 1 }), { code: "closed" });
});

test("closing the client takes at most its deadline", async (t) => {
  const server = await fakeServer(t, { silent: (number) => number > 1 });
  const reported = [];
  const client = startClient(t, server, { deadlineMs: 300, onError: (error) => reported.push(error.message) });
  const hold = await client.hold(LABELS, { deadlineMs: RELAXED_MS });
  const settled = hold.settle(1, { deadlineMs: RELAXED_MS });
  const startedMs = performance.now();
  await client.close();
  assert.ok(performance.now() - startedMs < 2000);
  assert.equal((await settled).outcome, "queued");
  await until("the settlement is dropped", () => reported.some((text) => /the hold was not settled/.test(text)));
});

test("a settlement that is dropped is reported", async (t) => {
  const reported = [];
  const server = await fakeServer(t, { failed: (number) => number > 1 });
  const client = startClient(t, server, { onError: (error) => reported.push(error) });
  const hold = await client.hold(LABELS);
  assert.equal((await hold.settle(1)).outcome, "queued");
  client.close();
  await until("the settlement is dropped", () =>
    reported.some((error) => /the hold was not settled/.test(error.message)),
  );
});

test("a renewal that fails is an error", async (t) => {
  const server = await fakeServer(t, { failed: (number) => number > 1 });
  const client = startClient(t, server);
  await assert.rejects(
    client.renew({ token: "t0ken", ttlMs: 5 }).then(() => client.renew({ token: "t", ttlMs: 5 })),
    {
      code: "unavailable",
    },
  );
});

test("many holds that the server rejects with 503 do not open the circuit breaker", async (t) => {
  const server = await fakeServer(t, { failed: () => true });
  const client = startClient(t, server);
  for (let n = 0; n < 10; n++) assert.equal((await client.hold(LABELS)).decision.source, "open");
  assert.equal(server.paths().filter((path) => path === "hold").length, 10);
});

test("a conflict is an error", async (t) => {
  const server = createServer((_, response) => {
    response.writeHead(409).end('{"status":409,"detail":"id a belongs to another hold"}');
  });
  const client = startClient(t, { url: await listen(t, server) });
  await assert.rejects(client.hold(LABELS, { id: "a" }), (error) => {
    assert.ok(error instanceof HoldConflictError && error instanceof InvalidRequestError);
    assert.deepEqual([error.code, error.message], ["hold_conflict", "id a belongs to another hold"]);
    return true;
  });
});

test("invalid holds are not sent", async (t) => {
  const server = await fakeServer(t);
  const client = startClient(t, server);
  for (const [options, message] of [
    [{ id: "" }, /id has 0 bytes: use 1 to 128/],
    [{ id: "ü".repeat(65) }, /130 bytes/],
    [{ id: 5 }, /id is 5: pass a string/],
    [{ ttlMs: 0 }, /ttlMs 0 is out of range: use 1 to 86400000/],
    [{ ttlMs: "1m" }, /ttlMs "1m"/],
  ]) {
    await assert.rejects(client.hold(LABELS, options), message);
  }
  for (const reference of [{}, LABELS, { id: "a" }, { token: "t", id: "a" }, { token: 5 }, null]) {
    await assert.rejects(client.release(reference), InvalidRequestError);
  }
  await assert.rejects(client.settle({ token: "t" }), /cost is of type undefined/);
  assert.deepEqual(server.calls, []);
});

test("a hold is named by its token, or by its key and id", async (t) => {
  const server = await fakeServer(t);
  const client = startClient(t, server);
  const limit = { algorithm: "concurrency", amount: 3, max_excess: 2, on_expiry: "release" };
  assert.equal((await client.settle({ key: "k", limit, id: "a", cost: 2 })).outcome, "settled");
  assert.equal((await client.renew({ token: "t0ken", ttlMs: 1.5 })).outcome, "renewed");
  const [settled, renewed] = server.bodies;
  assert.deepEqual([settled.key, settled.limit, settled.cost], ["k", limit, 2]);
  assert.deepEqual([renewed.token, renewed.ttl_ms], ["t0ken", 2]);
});

test("a hold is renewed while its block runs, and not after", async (t) => {
  const server = await fakeServer(t, { ttlMs: 150 });
  const client = startClient(t, server);
  await client.withHold(LABELS, () => until("two renewals", () => server.calls.length >= 3));
  const hold = await client.hold(LABELS);
  const dispose = hold[Symbol.asyncDispose];
  const held = server.calls.length;
  await until("a renewal", () => server.calls.length > held);
  await dispose();
  const sent = server.calls.length;
  await sleep(200);
  assert.equal(server.calls.length, sent);
  assert.deepEqual([...new Set(server.paths())].sort(), ["hold", "renew", "settle"]);
  assert.deepEqual(
    new Set(server.bodies.filter((_, n) => server.paths()[n] === "renew").map((body) => body.ttl_ms)),
    new Set([150]),
  );
});

test("a failed renewal is repeated before the hold expires", async (t) => {
  const server = await fakeServer(t, { failed: (number) => number === 2 || number === 3 });
  const client = startClient(t, server);
  await client.withHold(LABELS, { ttlMs: 1500 }, () => until("a renewal", () => server.calls.length >= 4));
  assert.deepEqual(server.paths(), ["hold", "renew", "renew", "renew", "settle"]);
});

test("a hold is renewed while any of its counters is", async (t) => {
  const server = await fakeServer(t, { ttlMs: 150, gone: ["requests"] });
  const client = startClient(t, server);
  await client.withHold(LABELS, () => until("two renewals", () => server.calls.length >= 3));
  assert.deepEqual(server.paths().slice(0, 3), ["hold", "renew", "renew"]);
});

test("a hold without a counter is not renewed again", async (t) => {
  const server = await fakeServer(t, { ttlMs: 100, gone: ["tokens"] });
  const client = startClient(t, server);
  await client.withHold(LABELS, () => sleep(400));
  assert.deepEqual(server.paths(), ["hold", "renew", "settle"]);
});

test("a hold with an unknown time to live is renewed by the default", async (t) => {
  // as a server answers whose rule decided by the policy "local"
  const server = await fakeServer(t, { decision: { ...DECIDED, at_us: null, source: "fallback" } });
  const client = startClient(t, server);
  await client.withHold(LABELS, () => until("a renewal", () => server.calls.length >= 2));
  const hold = await client.hold(LABELS);
  assert.equal((await hold.renew()).outcome, "renewed");
  assert.deepEqual(server.paths(), ["hold", "renew", "settle", "hold", "renew"]);
  assert.deepEqual([server.bodies[1].ttl_ms, server.bodies[4].ttl_ms], [60_000, 60_000]);
});

test("a hold that existed already is renewed at once", async (t) => {
  // the time of the first answer, and the expiry after many renewals
  const server = await fakeServer(t, { repeated: true, ttlMs: 3_600_000 });
  const client = startClient(t, server);
  await client.withHold(LABELS, { id: "again" }, (hold) => {
    assert.ok(hold.isRepeated);
    return until("a renewal", () => server.calls.length >= 2);
  });
  assert.deepEqual(server.paths(), ["hold", "renew", "settle"]);
  assert.equal(server.bodies[1].ttl_ms, 60_000);
});

test("a hold or a settlement that is aborted is ended in the background", async (t) => {
  let isSilent = true;
  const server = await fakeServer(t, { silent: (number) => isSilent && number !== 3 });
  const client = startClient(t, server);
  const controller = new AbortController();
  const held = client.hold(LABELS, { signal: controller.signal });
  await until("the hold arrives", () => server.calls.length === 1);
  isSilent = false;
  controller.abort();
  await assert.rejects(held, { name: "AbortError" });
  await until("the hold is released", () => server.calls.length === 2);
  assert.deepEqual([server.paths()[1], server.bodies[1].id], ["release", server.bodies[0].id]);

  const other = new AbortController();
  const used = client.withHold(LABELS, async (hold) => {
    isSilent = true;
    const settled = hold.settle(7, { signal: other.signal });
    await until("the settlement arrives", () => server.calls.length === 4);
    isSilent = false;
    other.abort(new Error("gone"));
    await settled;
  });
  await assert.rejects(used, /gone/);
  await until("the settlement is repeated", () => server.calls.length >= 6);
  assert.deepEqual(new Set(server.calls.slice(3).map(([path, cost]) => `${path} ${cost}`)), new Set(["settle 7"]));
});

test("a late hold is decided within its deadline", async (t) => {
  const server = await fakeServer(t, { silent: () => true });
  const client = startClient(t, server, { deadlineMs: 100 });
  const startedMs = performance.now();
  assert.equal((await client.hold(LABELS)).decision.error.code, "deadline");
  assert.ok(performance.now() - startedMs < 600);
});

test("queued settlements and renewals do not keep the process running", async (t) => {
  const server = createServer((_, response) => response.writeHead(503).end('{"status":503,"detail":"store"}'));
  const url = await listen(t, server);
  const program = `
    import { Client } from "sluicegate";
    const client = new Client({ url: ${JSON.stringify(url)}, deadlineMs: 5000, onError: () => {} });
    (await client.hold({ labels: {} }, { ttlMs: 3_600_000 })).keepAlive();
    console.log((await client.settle({ token: "t", cost: 1 })).outcome);`;
  const { code, output } = await runProgram(process.execPath, ["--input-type=module", "-e", program], {
    cwd: new URL("..", import.meta.url).pathname,
  });
  assert.deepEqual([code, output], [0, "queued\n"]);
});

test("await using renews and settles, as compiled by TypeScript", async (t) => {
  const source = `async function run(client, request, use) {
    await using hold = await client.hold(request);
    return await use(hold);
  }`;
  const { outputText } = ts.transpileModule(source, { compilerOptions: { target: ts.ScriptTarget.ES2022 } });
  const run = new Function(`${outputText}; return run;`)();
  const server = await fakeServer(t, { ttlMs: 150 });
  const client = startClient(t, server);
  const request = { ...LABELS, cost: 9 };
  await run(client, request, () => until("a renewal", () => server.paths().includes("renew")));
  await assert.rejects(
    run(client, request, () => Promise.reject(new Error("failed"))),
    /failed/,
  );
  const ends = server.calls.filter(([path]) => path !== "hold" && path !== "renew");
  assert.deepEqual(ends, Array(2).fill(["settle", 9]));
});
