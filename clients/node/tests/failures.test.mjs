// A server that is down, late, restarted or broken. Times are asserted with slack, because the machine may be busy.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { test } from "node:test";
import { AuthenticationError, Client, localBucket, UnavailableError } from "sluicegate";
import { freePort, listenTcp, RELAXED_MS, runProgram, Server, sleep, until } from "./harness.mjs";

const DEADLINE_MS = 100;
const SLACK_MS = 500;
/** The longest time until decisions are normal after the server is back: 2 s, and slack. */
const RECOVERY_MS = 4000;
const REQUEST = { key: "user:42", limit: { algorithm: "sliding-log", amount: 1000, window: "1h" } };

const DECISION = JSON.stringify({
  ...{ allowed: true, rule: null, limit: 9, remaining: 8, retry_after_ms: null, reset_after_ms: 1 },
  ...{ never: false, degraded: false, source: "memory", at_us: 1, tiers: [] },
});
const OK = `HTTP/1.1 200 OK\r\ncontent-length: ${DECISION.length}\r\n\r\n${DECISION}`;

/** Returns the response to a batch. */
function okToAll(checks) {
  const body = `{"results":[${checks.map(() => DECISION).join(",")}]}`;
  return `HTTP/1.1 200 OK\r\ncontent-length: ${body.length}\r\n\r\n${body}`;
}

/** Starts a fake server that calls `respond(socket, number, ok)` for each complete request. `ok` is a response that allows it. */
async function fakeServer(t, respond) {
  const seen = { requests: 0, connections: 0, open: 0, mostOpen: 0, bodies: [] };
  seen.url = await listenTcp(t, (socket) => {
    seen.connections += 1;
    seen.onConnection?.(socket);
    seen.open += 1;
    seen.mostOpen = Math.max(seen.mostOpen, seen.open);
    socket.on("close", () => {
      seen.open -= 1;
    });
    let text = "";
    socket.on("data", (bytes) => {
      text += bytes;
      for (;;) {
        const end = text.indexOf("\r\n\r\n");
        const length = Number(/content-length: (\d+)/.exec(text.slice(0, end))?.[1]);
        if (end < 0 || text.length < end + 4 + length) return;
        const body = JSON.parse(text.slice(end + 4, end + 4 + length));
        seen.bodies.push(body);
        text = text.slice(end + 4 + length);
        seen.requests += 1;
        respond(socket, seen.requests, body.checks === undefined ? OK : okToAll(body.checks));
      }
    });
  });
  return seen;
}

function silentClient(t, settings) {
  const client = new Client({ deadlineMs: DEADLINE_MS, onError: () => {}, ...settings });
  t.after(() => client.close());
  return client;
}

async function timed(call) {
  const startedMs = performance.now();
  const result = await call();
  return { result, elapsedMs: performance.now() - startedMs };
}

for (const [situation, fail, recover] of [
  ["killed", (server) => server.kill(), (server) => server.restart()],
  ["stopped", (server) => server.pause(), (server) => server.resume()],
]) {
  test(`a server that is ${situation}: each policy decides within the deadline, and normal decisions resume`, async (t) => {
    const server = await Server.start(t);
    const policies = { open: "open", closed: "closed", fallback: localBucket({ amount: 3, window: "1h" }) };
    const clients = Object.entries(policies).map(([source, onFailure]) => ({
      source,
      client: silentClient(t, { url: server.url, onFailure }),
    }));
    for (const { client } of clients)
      assert.equal((await client.check(REQUEST, { deadlineMs: RELAXED_MS })).source, "memory");

    await fail(server);
    for (const { source, client } of clients) {
      const decisions = [];
      for (let call = 0; call < 20; call += 1) {
        const { result, elapsedMs } = await timed(() => client.check(REQUEST));
        assert.ok(elapsedMs < DEADLINE_MS + SLACK_MS, `${source}: ${elapsedMs} ms`);
        assert.deepEqual([result.source, result.degraded], [source, true]);
        assert.ok(result.error instanceof UnavailableError);
        decisions.push(result.allowed);
      }
      const allowed = { open: 20, closed: 0, fallback: 3 }[source];
      assert.equal(decisions.filter(Boolean).length, allowed, source);
      const peeked = await client.peek(REQUEST);
      assert.deepEqual([peeked.allowed, peeked.source], [source === "open", source]);
      const many = await client.checkMany([REQUEST, REQUEST]);
      assert.deepEqual(
        many.map((decision) => decision.source),
        [source, source],
      );
    }

    await recover(server);
    const backMs = performance.now();
    await until("normal decisions", async () => {
      const decisions = await Promise.all(clients.map(({ client }) => client.check(REQUEST)));
      return decisions.every((decision) => !decision.degraded);
    });
    const recoveryMs = performance.now() - backMs;
    assert.ok(recoveryMs < RECOVERY_MS, `${recoveryMs} ms`);
  });
}

test("the circuit breaker spends the deadline on few calls, and probes", async (t) => {
  let isHanging = true;
  const server = await fakeServer(t, (socket, _, ok) => isHanging || socket.write(ok));
  const client = silentClient(t, { url: server.url });
  const codes = [];
  const { elapsedMs } = await timed(async () => {
    for (let call = 0; call < 200; call += 1) codes.push((await client.check(REQUEST)).error.code);
  });
  assert.deepEqual(codes.slice(0, 5), Array(5).fill("deadline"));
  assert.ok(codes.filter((code) => code === "circuit_open").length > 180, codes.join());
  assert.ok(server.requests < 12, `${server.requests} requests`);
  assert.ok(elapsedMs < 12 * DEADLINE_MS + SLACK_MS, `${elapsedMs} ms`);

  // while a probe waits, other calls do not
  await until("a probe", async () => {
    const before = server.requests;
    const calls = await Promise.all(Array.from({ length: 20 }, () => client.check(REQUEST)));
    assert.ok(server.requests - before <= 1);
    return calls.some(({ error }) => error.code === "deadline");
  });
  isHanging = false;
  await until("normal decisions", async () => !(await client.check(REQUEST)).degraded);
  const after = await Promise.all(Array.from({ length: 20 }, () => client.check(REQUEST)));
  assert.ok(after.every((decision) => !decision.degraded));
});

test("calls without a policy are sent while the circuit breaker is open, and close it", async (t) => {
  let isHanging = true;
  const server = await fakeServer(t, (socket) => isHanging || socket.write(OK));
  const client = silentClient(t, { url: server.url, deadlineMs: 20 });
  await Promise.all(Array.from({ length: 10 }, () => client.check(REQUEST)));
  assert.equal((await client.check(REQUEST)).error.code, "circuit_open");
  await assert.rejects(client.charge(REQUEST), { code: "deadline", mayHaveRun: true });
  isHanging = false;
  assert.equal((await client.charge(REQUEST, { deadlineMs: RELAXED_MS })).remaining, 8);
  assert.equal((await client.check(REQUEST, { deadlineMs: RELAXED_MS })).degraded, false);
});

test("idle connections to a server that is gone do not delay the recovery", async (t) => {
  const gone = new Set();
  const server = await fakeServer(t, (socket) => gone.has(socket) || setTimeout(() => socket.write(OK), 20));
  const sockets = new Set();
  server.onConnection = (socket) => sockets.add(socket);
  const client = silentClient(t, { url: server.url, deadlineMs: RELAXED_MS });
  await Promise.all(Array.from({ length: 40 }, () => client.peek(REQUEST)));
  assert.ok(sockets.size > 30);
  for (const socket of sockets) gone.add(socket);
  const startedMs = performance.now();
  await until("normal decisions", async () => !(await client.check(REQUEST, { deadlineMs: DEADLINE_MS })).degraded);
  const recoveryMs = performance.now() - startedMs;
  assert.ok(recoveryMs < RECOVERY_MS, `${recoveryMs} ms`);
});

for (const [how, end] of [
  ["closes the connection", (socket) => socket.destroy()],
  ["resets the connection", (socket) => socket.resetAndDestroy()],
]) {
  test(`a request is not sent again if the server reads it and ${how}`, async (t) => {
    const server = await fakeServer(t, (socket, number) => (number === 1 ? socket.write(OK) : end(socket)));
    const client = silentClient(t, { url: server.url, deadlineMs: RELAXED_MS });
    assert.equal((await client.check(REQUEST)).degraded, false);
    const lost = await client.check(REQUEST);
    assert.deepEqual([lost.source, lost.error.code, lost.error.mayHaveRun], ["open", "unavailable", true]);
    await sleep(50);
    assert.equal(server.requests, 2);
  });
}

test("a connection that the server closed while it was idle is replaced", async (t) => {
  const server = await fakeServer(t, (socket) => {
    socket.write(OK);
    setTimeout(() => socket.end(), 20);
  });
  const client = silentClient(t, { url: server.url, deadlineMs: RELAXED_MS });
  for (let call = 1; call <= 5; call += 1) {
    assert.equal((await client.check(REQUEST)).degraded, false);
    await sleep(60);
  }
  assert.deepEqual([server.requests, server.connections], [5, 5]);
});

// A fresh connection is written to at once: the write fails, which proves that the server did not get the request.
for (const [how, end, blockedMs] of [
  ["closed, after a long time", "end", 900],
  ["reset, after a short time", "resetAndDestroy", 300],
]) {
  test(`a connection that was ${how}, while the event loop was blocked is replaced`, async (t) => {
    // the server is another process, so that it runs while this one is blocked; it reports its number of requests
    const program = `
      import net from "node:net";
      let requests = 0;
      const server = net.createServer((socket) => {
        socket.on("error", () => {});
        socket.on("data", () => {
          const body = JSON.stringify({ ...${DECISION}, remaining: ++requests });
          socket.write("HTTP/1.1 200 OK\\r\\ncontent-length: " + body.length + "\\r\\n\\r\\n" + body);
          setTimeout(() => socket.${end}(), 50);
        });
      }).listen(0, "127.0.0.1", () => console.log(server.address().port));`;
    const args = ["--input-type=module", "-e", program];
    const child = spawn(process.execPath, args, { stdio: ["ignore", "pipe", "inherit"] });
    t.after(() => child.kill("SIGKILL"));
    const [port] = await once(child.stdout, "data");
    const client = silentClient(t, { url: `http://127.0.0.1:${Number(port)}`, deadlineMs: RELAXED_MS });
    for (let round = 1; round <= 3; round += 1) {
      const decision = await client.check(REQUEST);
      assert.deepEqual([decision.degraded, decision.remaining], [false, round], String(decision.error));
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, blockedMs);
    }
  });
}

test("a response that arrived while the event loop was blocked is not late", async (t) => {
  const server = await Server.start(t);
  const client = silentClient(t, { url: server.url });
  await client.check(REQUEST, { deadlineMs: RELAXED_MS });
  const pending = client.check(REQUEST);
  // the request is written, and the deadline passes before the event loop reads the response
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, DEADLINE_MS + 200);
  assert.equal((await pending).degraded, false);
});

test("thousands of calls whose deadline passed while the event loop was blocked fail", async (t) => {
  const server = await Server.start(t);
  const client = silentClient(t, { url: server.url, maxConnections: 1 });
  await client.check(REQUEST, { deadlineMs: RELAXED_MS });
  const pending = Promise.all(Array.from({ length: 9000 }, () => client.check(REQUEST)));
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, DEADLINE_MS + 200);
  const [first, ...others] = await pending;
  assert.equal(first.degraded, false);
  assert.ok(others.every(({ error }) => error?.code === "deadline"));
  // the server was not the reason
  assert.equal((await client.check(REQUEST, { deadlineMs: RELAXED_MS })).degraded, false);
});

const chunk = (text) => `${text.length.toString(16)}\r\n${text}\r\n`;
const VALID = [
  [
    "a chunked response",
    `HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n${chunk(DECISION.slice(0, 9))}${chunk(DECISION.slice(9))}0\r\n\r\n`,
    1,
  ],
  ["an interim response", `HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n${OK}`, 1],
  ["an announced close", OK.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n"), 2],
  ["HTTP/1.0", OK.replace("HTTP/1.1", "HTTP/1.0"), 2],
];

for (const [name, response, connections] of VALID) {
  test(`valid: ${name}`, async (t) => {
    const server = await fakeServer(t, (socket) => socket.write(response));
    const client = silentClient(t, { url: server.url, deadlineMs: RELAXED_MS });
    for (let call = 0; call < 2; call += 1) assert.equal((await client.check(REQUEST)).remaining, 8);
    assert.equal(server.connections, connections);
  });
}

const head = (status, ...headers) => `HTTP/1.1 ${status}\r\n${headers.map((line) => `${line}\r\n`).join("")}\r\n`;
const BROKEN = [
  ["another protocol", "SSH-2.0-OpenSSH_9\r\n\r\n", /not an HTTP/],
  ["no length", `${head("200 OK")}{}`, /neither Content-Length/],
  ["a huge length", head("200 OK", "content-length: 999999999"), /more than 262144 bytes/],
  ["two lengths", head("200 OK", "content-length: 2", "content-length: 3"), /invalid Content-Length/],
  ["length and chunks", head("200 OK", "content-length: 2", "transfer-encoding: chunked"), /Transfer-Encoding/],
  ["an invalid chunk", `${head("200 OK", "transfer-encoding: chunked")}zz\r\n`, /invalid chunk size/],
  ["endless headers", `HTTP/1.1 200 OK\r\n${"a: b\r\n".repeat(5000)}`, /more than 16384 bytes/],
  [
    "endless chunks",
    head("200 OK", "transfer-encoding: chunked") + chunk("x".repeat(60_000)).repeat(8),
    /more than 262144 bytes/,
  ],
  ["endless interim responses", head("103 Early Hints", "a: b").repeat(2000), /more than 16384 bytes/],
  ["bytes after the response", `${OK}x`, /bytes after the end/],
  ["text instead of JSON", `${head("200 OK", "content-length: 2")}hi`, /not a response of sluicegate/],
  ["other JSON", `${head("200 OK", "content-length: 2")}{}`, /not a response of sluicegate/],
  ["null", `${head("200 OK", "content-length: 4")}null`, /not a response of sluicegate/],
  ["an error of a proxy", `${head("502 Bad Gateway", "content-length: 2")}no`, /status 502/],
  ["another service", `${head("404 Not Found", "content-length: 2")}no`, /status 404.*check the client's url/],
];

for (const [name, response, message] of BROKEN) {
  test(`broken: ${name}`, async (t) => {
    const server = await fakeServer(t, (socket) => socket.write(response));
    const client = silentClient(t, { url: server.url, deadlineMs: RELAXED_MS });
    const { result, elapsedMs } = await timed(() => client.check(REQUEST));
    assert.deepEqual([result.source, result.degraded], ["open", true]);
    assert.match(result.error.message, message);
    assert.ok(elapsedMs < RELAXED_MS / 2, `${elapsedMs} ms`);
    await sleep(20);
    assert.equal(server.requests, 1);
  });
}

test("a response that arrives byte by byte does not extend the deadline", async (t) => {
  const server = await fakeServer(t, (socket) => {
    let sent = 0;
    const timer = setInterval(() => socket.write(OK[sent++] ?? ""), 20);
    socket.on("close", () => clearInterval(timer));
  });
  const { result, elapsedMs } = await timed(() => silentClient(t, { url: server.url }).check(REQUEST));
  assert.equal(result.error.code, "deadline");
  assert.ok(elapsedMs < DEADLINE_MS + SLACK_MS, `${elapsedMs} ms`);
  await until("the connection is closed", () => server.open === 0);
});

test("the server gets a shorter deadline than the caller", async (t) => {
  const server = await fakeServer(t, (socket) => socket.write(OK));
  const client = silentClient(t, { url: server.url, deadlineMs: 2000 });
  await client.check(REQUEST);
  await client.check(REQUEST, { deadlineMs: 1000 });
  const [first, second] = server.bodies.map((body) => body.deadline_ms);
  assert.ok(first <= 1990 && first > 1000, String(first));
  assert.ok(second <= 990 && second > 500, String(second));
});

test("connections are bounded, and calls wait for one", async (t) => {
  const server = await fakeServer(t, (socket) => setTimeout(() => socket.write(OK), 2));
  const client = silentClient(t, { url: server.url, maxConnections: 4, deadlineMs: RELAXED_MS });
  const decisions = await Promise.all(Array.from({ length: 300 }, () => client.peek(REQUEST)));
  assert.ok(decisions.every((decision) => !decision.degraded));
  assert.equal(server.mostOpen, 4);
});

test("the queue for connections is bounded", async (t) => {
  const server = await fakeServer(t, () => {});
  const client = silentClient(t, { url: server.url, maxConnections: 1, deadlineMs: 1000 });
  const decisions = await Promise.all(Array.from({ length: 10_100 }, () => client.peek(REQUEST)));
  const overload = decisions.filter(({ error }) => error.code === "overload");
  assert.ok(overload.length >= 99 && overload.length <= 100, String(overload.length));
  assert.match(overload[0].error.message, /raise maxConnections/);
});

test("calls that wait for a connection do not open the circuit breaker of a server that responds", async (t) => {
  const server = await fakeServer(t, (socket) => setTimeout(() => socket.write(OK), 50));
  const client = silentClient(t, { url: server.url, maxConnections: 8, deadlineMs: 500 });
  await client.check(REQUEST, { deadlineMs: RELAXED_MS });
  // several rounds of responses fit into the deadline, and the last requests are sent shortly before it
  const burst = await Promise.all(Array.from({ length: 300 }, () => client.peek(REQUEST)));
  const late = burst.filter(({ degraded }) => degraded);
  assert.ok(late.length > 100, String(late.length));
  for (const { error } of late) assert.deepEqual([error.code, error.isLocal], ["deadline", true]);
  assert.match(late[0].error.message, /waited for a connection: raise maxConnections/);
  assert.equal((await client.check(REQUEST, { deadlineMs: RELAXED_MS })).degraded, false);
});

test("calls that find a full queue do not open the circuit breaker", async (t) => {
  const server = await fakeServer(t, () => {});
  const client = silentClient(t, { url: server.url, maxConnections: 1, deadlineMs: RELAXED_MS });
  const waiting = Array.from({ length: 10_000 }, () => client.peek(REQUEST));
  const codes = [];
  for (let call = 0; call < 20; call += 1) codes.push((await client.peek(REQUEST)).error.code);
  assert.deepEqual(codes, Array(20).fill("overload"));
  client.close();
  await Promise.all(waiting);
});

test("calls that wait for a server that does not respond open the circuit breaker", async (t) => {
  const server = await fakeServer(t, () => {});
  const client = silentClient(t, { url: server.url, maxConnections: 1 });
  await Promise.all(Array.from({ length: 10 }, () => client.check(REQUEST)));
  assert.equal((await client.check(REQUEST)).error.code, "circuit_open");
});

test("a call can be cancelled", async (t) => {
  const server = await fakeServer(t, (socket, number) => number <= 10 || socket.write(OK));
  const client = silentClient(t, { url: server.url, deadlineMs: RELAXED_MS });
  for (let call = 0; call < 10; call += 1) {
    const controller = new AbortController();
    const pending = client.check(REQUEST, { signal: controller.signal });
    await until("the request arrives", () => server.requests === call + 1);
    controller.abort(new Error("no longer needed"));
    await assert.rejects(pending, /no longer needed/);
  }
  await assert.rejects(client.check(REQUEST, { signal: AbortSignal.abort() }), { name: "AbortError" });
  // cancelled calls are no failures of the server
  assert.equal((await client.check(REQUEST)).degraded, false);
  await until("other connections are closed", () => server.open === 1);
});

test("close ends calls in progress and connections", async (t) => {
  const server = await fakeServer(t, () => {});
  const client = silentClient(t, { url: server.url, maxConnections: 1, deadlineMs: RELAXED_MS });
  const calls = [client.charge(REQUEST), client.charge(REQUEST)];
  await until("the request arrives", () => server.requests === 1);
  const { elapsedMs } = await timed(() => {
    client.close();
    return Promise.all(calls.map((call) => assert.rejects(call, UnavailableError)));
  });
  assert.ok(elapsedMs < RELAXED_MS / 2);
  await assert.rejects(client.check(REQUEST), { code: "closed" });
  await until("the connection is closed", () => server.open === 0);
});

test("hidden errors are reported, each message at most once a minute", async (t) => {
  const url = `http://127.0.0.1:${await freePort()}`;
  const lines = t.mock.method(console, "error", () => {});
  const client = new Client({ url });
  for (let call = 0; call < 4; call += 1) await client.check(REQUEST);
  const messages = lines.mock.calls.map(({ arguments: [line] }) => line);
  assert.equal(messages.length, 1, messages.join("\n"));
  assert.match(messages[0], /^sluicegate: no response from .*ECONNREFUSED/);

  const errors = [];
  const handled = new Client({ url, onError: (error) => errors.push(error.code) });
  for (let call = 0; call < 4; call += 1) await handled.check(REQUEST);
  assert.deepEqual(errors, Array(4).fill("unavailable"));
  const failing = new Client({
    url,
    onError() {
      throw new Error("broken handler");
    },
  });
  assert.equal((await failing.check(REQUEST)).source, "open");
});

test("headers that a response cannot have are dropped", async (t) => {
  const headers = { "retry-after": "5", "x-bad": "a\r\nb", "x bad": "a", "x-number": 5, ratelimit: '"a";r=1' };
  const body = JSON.stringify({ ...JSON.parse(DECISION), headers });
  const server = await fakeServer(t, (socket) =>
    socket.write(`${head("200 OK", `content-length: ${body.length}`)}${body}`),
  );
  const client = silentClient(t, { url: server.url, deadlineMs: RELAXED_MS });
  const decision = await client.check(REQUEST, { headers: true });
  assert.deepEqual(decision.headers, { "retry-after": "5", ratelimit: '"a";r=1' });
});

test("an authentication error does not open the circuit breaker", async (t) => {
  const body = JSON.stringify({ status: 403, detail: "unknown token" });
  const server = await fakeServer(t, (socket) =>
    socket.write(`${head("403 Forbidden", `content-length: ${body.length}`)}${body}`),
  );
  const client = silentClient(t, { url: server.url, deadlineMs: RELAXED_MS });
  for (let call = 0; call < 20; call += 1) await assert.rejects(client.check(REQUEST), AuthenticationError);
});

for (const [situation, pause] of [
  ["that answers", false],
  ["that does not answer", true],
]) {
  test(`a script with one check ends by itself, with a server ${situation}`, async (t) => {
    const server = await Server.start(t);
    if (pause) await server.pause();
    const script = `
      import { Client } from "sluicegate";
      const client = new Client({ url: ${JSON.stringify(server.url)}, deadlineMs: ${pause ? 100 : 5000}, onError() {} });
      console.log((await client.check(${JSON.stringify(REQUEST)})).source);`;
    const { result, elapsedMs } = await timed(() =>
      runProgram(process.execPath, ["--unhandled-rejections=strict", "--input-type=module", "-e", script], {
        cwd: new URL("..", import.meta.url),
      }),
    );
    assert.deepEqual([result.code, result.output], [0, pause ? "open\n" : "memory\n"]);
    // the idle connection would stay open for 10 s
    assert.ok(elapsedMs < RELAXED_MS, `${elapsedMs} ms`);
  });
}

test("checks that start together share calls of at most 100 checks, and the first is sent at once", async (t) => {
  const server = await fakeServer(t, (socket, _, ok) => socket.write(ok));
  const client = silentClient(t, { url: server.url, deadlineMs: RELAXED_MS });
  const decisions = await Promise.all(Array.from({ length: 251 }, () => client.check(REQUEST)));
  assert.ok(decisions.every((decision) => !decision.degraded));
  const sizes = server.bodies.map(({ checks }) => checks?.length ?? 1);
  assert.deepEqual(
    sizes.sort((a, b) => a - b),
    [1, 50, 100, 100],
  );
  await client.check(REQUEST);
  assert.equal(server.bodies.at(-1).checks, undefined);
});

test("checks with another deadline, large checks and checks with a signal are not part of a batch", async (t) => {
  const server = await fakeServer(t, (socket, _, ok) => socket.write(ok));
  const client = silentClient(t, { url: server.url, deadlineMs: RELAXED_MS });
  const large = { labels: Object.fromEntries(Array.from({ length: 5 }, (_, n) => [`l${n}`, "x".repeat(1000)])) };
  await Promise.all([
    client.check(REQUEST),
    client.check(REQUEST),
    client.check(large),
    client.check(REQUEST, { signal: new AbortController().signal }),
    client.check(REQUEST),
    client.check(REQUEST, { deadlineMs: RELAXED_MS / 2 }),
  ]);
  const sizes = server.bodies.map(({ checks }) => checks?.length ?? 1);
  assert.deepEqual(
    sizes.sort((a, b) => a - b),
    [1, 1, 1, 1, 2],
  );
  assert.ok(server.bodies.some(({ deadline_ms }) => deadline_ms <= RELAXED_MS / 2));
});

test("each check of a batch that fails counts for the circuit breaker", async (t) => {
  const server = await fakeServer(t, () => {});
  const client = silentClient(t, { url: server.url });
  const decisions = await Promise.all(Array.from({ length: 6 }, () => client.check(REQUEST)));
  assert.ok(decisions.every(({ source, error }) => source === "open" && error.code === "deadline"));
  assert.equal((await client.check(REQUEST)).error.code, "circuit_open");
});
