// Parts without I/O: the response parser, local buckets, the circuit breaker, addresses, durations and the queue of settlements.
import assert from "node:assert/strict";
import { test } from "node:test";
import { CircuitBreaker } from "../dist/esm/circuit-breaker.js";
import { ClientAddress } from "../dist/esm/client-address.js";
import { parseDuration } from "../dist/esm/duration.js";
import { consoleReporter } from "../dist/esm/error-reporter.js";
import { InvalidRequestError, SluicegateError, UnavailableError } from "../dist/esm/errors.js";
import { ProtocolError, ResponseParser } from "../dist/esm/http1.js";
import { localBucket } from "../dist/esm/local-bucket.js";
import { Queue } from "../dist/esm/queue.js";
import { SettlementQueue } from "../dist/esm/settlement-queue.js";
import { until } from "./harness.mjs";

test("a response is the same however it is split", () => {
  const responses = [
    ["HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nh\u00e9llo!", true],
    [
      "HTTP/1.1 200 OK\r\nconnection: keep-alive, Close\r\nTRANSFER-ENCODING: Chunked\r\n\r\n3;a=b\r\nh\u00e9\r\n4\r\nllo!\r\n0\r\nt: x\r\n\r\n",
      false,
    ],
    ["HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\nh\u00e9llo!", true],
  ];
  for (const [text, keepAlive] of responses) {
    const bytes = Buffer.from(text);
    for (let first = 0; first <= bytes.length; first += 1) {
      for (let second = first; second <= bytes.length; second += 1) {
        const parser = new ResponseParser(100);
        const results = [bytes.subarray(0, first), bytes.subarray(first, second), bytes.subarray(second)]
          .filter((part) => part.length > 0)
          .map((part) => parser.push(part));
        assert.deepEqual(results.at(-1), { status: 200, body: "h\u00e9llo!", keepAlive });
        assert.ok(results.slice(0, -1).every((result) => result === null));
      }
    }
  }
});

test("a response without a body is complete after its head", () => {
  const parser = new ResponseParser(10);
  assert.deepEqual(parser.push(Buffer.from("HTTP/1.1 204 No Content\r\n\r\n")), {
    status: 204,
    body: "",
    keepAlive: true,
  });
});

test("invalid responses are rejected", () => {
  for (const text of [
    "HTTP/2 200\r\n\r\n",
    "HTTP/1.1 600 X\r\n\r\n",
    "HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    "HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n",
    "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n",
    "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\n123456\r\n6\r\n123456\r\n",
    `HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;${"x".repeat(2000)}`,
  ]) {
    assert.throws(() => new ResponseParser(10).push(Buffer.from(text)), ProtocolError, text);
  }
});

test("a local bucket admits its amount, and refills", () => {
  const bucket = localBucket({ amount: 10, window: "1s", burst: 5 });
  const request = { key: "a", limit: { amount: 1, window: "1s" } };
  const check = (nowMs, cost = 1) => bucket.decide("check", { ...request, cost }, nowMs);
  for (const remaining of [4, 3, 2, 1, 0]) {
    const decision = check(1000);
    assert.deepEqual([decision.allowed, decision.limit, decision.remaining], [true, 5, remaining]);
  }
  const denied = check(1000);
  assert.deepEqual([denied.allowed, denied.remaining, denied.retryAfterMs, denied.resetAfterMs], [false, 0, 100, 500]);
  assert.equal(check(1099).allowed, false);
  // a wait of the reported length suffices, and denials charge nothing
  assert.equal(check(1100).allowed, true);
  assert.equal(check(1100).allowed, false);
  assert.deepEqual([check(1300, 6).never, check(1300, 6).retryAfterMs], [true, null]);
  assert.equal(bucket.decide("peek", request, 1200).allowed, true);
  assert.equal(check(1200).allowed, true);
  assert.equal(check(1200).allowed, false);
  // idle time grants at most the burst
  assert.deepEqual([check(60_000, 5).allowed, check(60_000).allowed], [true, false]);
});

test("a local bucket counts by the selected labels and unit", () => {
  const bucket = localBucket({ amount: 1, window: "1h", per: ["ip"], unit: "tokens" });
  const check = (labels, cost) => bucket.decide("check", { labels, cost }, 0).allowed;
  assert.equal(check({ ip: "a", path: "/1" }, { tokens: 1 }), true);
  assert.equal(check({ ip: "a", path: "/2" }, { tokens: 1 }), false);
  assert.equal(check({ ip: "a" }, { requests: 5 }), true);
  assert.equal(check({ ip: "b" }, { tokens: 1 }), true);
  const all = localBucket({ amount: 1, window: "1h" });
  const both = (labels) => all.decide("check", { labels }, 0).allowed;
  assert.deepEqual([both({ a: "1", b: "2" }), both({ b: "2", a: "1" }), both({ a: "1" })], [true, false, true]);
});

test("a full table of local buckets grants nothing to new keys", () => {
  const bucket = localBucket({ amount: 1, window: "1s", maxKeys: 100 });
  const check = (key, nowMs) => bucket.decide("check", { key }, nowMs).allowed;
  for (let n = 0; n < 100; n += 1) assert.equal(check(`k${n}`, 0), true);
  // new keys share one bucket, and exhausted keys stay exhausted
  const admitted = Array.from({ length: 10_000 }, (_, n) => check(`flood${n}`, 1)).filter(Boolean).length;
  assert.equal(admitted, 1);
  assert.equal(check("k0", 2), false);
  assert.ok(bucket.size <= 101);
  // full buckets are evicted
  assert.equal(check("new", 5000), true);
  assert.equal(check("new", 5000), false);
  assert.ok(bucket.size <= 101);
});

test("the circuit breaker opens after repeated failures, and admits one probe at a time", () => {
  const breaker = new CircuitBreaker();
  const error = new Error("down");
  for (let n = 0; n < 4; n += 1) breaker.failed(breaker.admit(0), error, 0);
  breaker.succeeded();
  for (let n = 0; n < 5; n += 1) {
    assert.equal(breaker.admit(0), "normal");
    breaker.failed("normal", error, 0);
  }
  assert.equal(breaker.admit(0), "rejected");
  let nowMs = 0;
  const waits = [];
  for (let n = 0; n < 30; n += 1) {
    const startedMs = nowMs;
    while (breaker.admit(nowMs) === "rejected") nowMs += 1;
    waits.push(nowMs - startedMs);
    // others are rejected while the probe is in progress, and late failures change nothing
    assert.equal(breaker.admit(nowMs), "rejected");
    breaker.failed("normal", error, nowMs);
    breaker.failed("probe", error, nowMs);
  }
  assert.ok(waits[0] >= 50 && waits[0] <= 101, String(waits[0]));
  assert.ok(Math.max(...waits) <= 1001 && Math.min(...waits.slice(5)) >= 500, waits.join());
  while (breaker.admit(nowMs) === "rejected") nowMs += 1;
  breaker.cancelled("probe");
  assert.equal(breaker.admit(nowMs), "probe");
  breaker.succeeded();
  assert.deepEqual([breaker.admit(nowMs), breaker.admit(nowMs)], ["normal", "normal"]);
});

test("the client's address is found from right to left over trusted proxies", () => {
  const client = new ClientAddress({ trustedProxies: ["10.0.0.0/8", "192.0.2.1", "2001:db8:ffff::/48"] });
  for (const [peer, forwardedFor, expected] of [
    ["198.51.100.4", "203.0.113.9", "198.51.100.4"],
    ["10.0.0.1", undefined, "10.0.0.1"],
    ["10.0.0.1", "203.0.113.9", "203.0.113.9"],
    ["::ffff:10.0.0.1", "203.0.113.9", "203.0.113.9"],
    ["10.0.0.1", "1.2.3.4, 203.0.113.9, 10.1.2.3", "203.0.113.9"],
    ["10.0.0.1", "1.2.3.4,203.0.113.9 ,\t192.0.2.1", "203.0.113.9"],
    ["10.0.0.1", "203.0.113.9:8080", "203.0.113.9"],
    ["10.0.0.1", "[2001:db8::1:2]:443", "2001:db8::"],
    ["10.0.0.1", "2001:DB8:0:1:2::77", "2001:db8:0:1::"],
    ["10.0.0.1", "::ffff:203.0.113.9", "203.0.113.9"],
    ["10.0.0.1", "::ffff:cb00:7109", "203.0.113.9"],
    ["10.0.0.1", "1.2.3.4, garbage", "10.0.0.1"],
    ["10.0.0.1", "1.2.3.4, unknown, 10.0.0.2", "10.0.0.2"],
    ["10.0.0.1", "", "10.0.0.1"],
    ["10.0.0.1", " \t, \t ", "10.0.0.1"],
    ["10.0.0.1", "\t 203.0.113.9 \t", "203.0.113.9"],
    ["10.0.0.1", "203.0.113.9\u000b", "10.0.0.1"],
    ["10.0.0.1", "\u00a0203.0.113.9", "10.0.0.1"],
    ["10.0.0.1", "203.0.113.9\r", "10.0.0.1"],
    ["10.0.0.1", "10.0.0.2, 10.0.0.3", "10.0.0.2"],
    ["2001:db8:ffff::1", "203.0.113.9", "203.0.113.9"],
    ["fe80::1%eth0", undefined, "fe80::"],
    ["/run/app.sock", "203.0.113.9", null],
  ]) {
    assert.equal(client.of(peer, forwardedFor), expected, `${peer} ${forwardedFor}`);
  }
  const loop = Array.from({ length: 40 }, () => "10.0.0.9").join(",");
  assert.equal(client.of("10.0.0.1", `1.2.3.4,${loop}`), "10.0.0.9");
  const whole = new ClientAddress({ ipv6Prefix: 128 });
  assert.equal(whole.of("2001:db8:0:0:0:0:2:1"), "2001:db8::2:1");
  assert.equal(new ClientAddress({ ipv6Prefix: 56 }).of("2001:db8:1:2ff::1"), "2001:db8:1:200::");
});

test("durations have the format of the server", () => {
  const table = {
    "250ms": 250,
    "30s": 30_000,
    "5m": 300_000,
    "1h30m": 5_400_000,
    "7d": 604_800_000,
    "1m500ms": 60_500,
  };
  for (const [text, ms] of Object.entries(table)) assert.equal(parseDuration(text), ms, text);
  for (const text of ["", "0s", "1w", "1.5s", "-1s", "s", "30", "1s1h", " 1s", 60, undefined]) {
    assert.equal(parseDuration(text), null, String(text));
  }
});

test("the console reporter has a bound, also for different messages", (t) => {
  const lines = t.mock.method(console, "error", () => {});
  let nowMs = 0;
  t.mock.method(performance, "now", () => nowMs);
  const reporter = consoleReporter();
  const report = (n) => reporter(new SluicegateError("unavailable", `message ${n}`));
  report(0);
  report(0);
  assert.equal(lines.mock.callCount(), 1);
  nowMs = 59_999;
  for (let n = 0; n < 200; n += 1) report(n);
  assert.equal(lines.mock.callCount(), 100);
  nowMs = 60_000;
  report(0);
  report(0);
  report(199);
  assert.equal(lines.mock.callCount(), 101);
});

test("a queue is first in, first out, and any item can be removed", () => {
  const queue = new Queue();
  const drain = () => Array.from({ length: queue.size }, () => queue.shift());
  for (const removed of [[], ["a"], ["b"], ["d"], ["a", "b"], ["c", "d"], ["b", "c"], ["a", "b", "c", "d"], ["x"]]) {
    for (const item of ["a", "b", "c", "d", "b"]) queue.add(item);
    for (const item of removed) queue.delete(item);
    const rest = ["a", "b", "c", "d"].filter((item) => !removed.includes(item));
    assert.equal(queue.size, rest.length);
    // also after items were removed, new ones are last
    queue.add("e");
    assert.deepEqual(drain(), [...rest, "e"]);
    assert.deepEqual([queue.shift(), queue.size], [undefined, 0]);
  }
});

test("a long queue is emptied in linear time", () => {
  const count = 300_000;
  const queue = new Queue();
  for (let item = 1; item <= count; item += 1) queue.add(item);
  const startedMs = performance.now();
  for (let item = 1; item <= count; item += 2) {
    assert.equal(queue.shift(), item);
    queue.delete(item + 1);
  }
  const elapsedMs = performance.now() - startedMs;
  assert.ok(elapsedMs < 3000, `${elapsedMs} ms`);
});

/** Returns a queue, whose calls fail with the errors that `next` returns, and a record of what it did. */
function settlementQueue(bounds, next) {
  const seen = { sent: [], dropped: [] };
  const sender = {
    async send(adjustment) {
      seen.sent.push(adjustment);
      const error = next(seen.sent.length, adjustment);
      if (error !== undefined) throw error;
    },
    dropped: (error) => seen.dropped.push(error.message),
  };
  return { queue: new SettlementQueue(sender, bounds), seen };
}

const DOWN = new UnavailableError("no response", { mayHaveRun: false });

test("settlements are sent in order, and one that the server rejects is dropped", async () => {
  const errors = [DOWN, DOWN, undefined, new InvalidRequestError("invalid token")];
  const { queue, seen } = settlementQueue({ maxQueued: 10, maxAgeMs: 60_000 }, (count) => errors[count - 1]);
  for (const adjustment of ["a", "b", "c"]) assert.equal(queue.add(adjustment), true);
  await until("all are sent", () => seen.sent.length === 5);
  assert.deepEqual([seen.sent, seen.dropped], [["a", "a", "a", "b", "c"], ["invalid token"]]);
  assert.equal(queue.add("d"), true);
  assert.equal(seen.sent.at(-1), "d");
});

test("a settlement to which the server answers with an error does not block others", async () => {
  const { queue, seen } = settlementQueue({ maxQueued: 10, maxAgeMs: 60_000 }, (_, adjustment) =>
    adjustment === "a" ? new UnavailableError("503", { mayHaveRun: true, hasResponse: true }) : undefined,
  );
  for (const adjustment of ["a", "b", "c"]) queue.add(adjustment);
  await until("the others are sent", () => seen.sent.length >= 4);
  assert.deepEqual(seen.sent.slice(0, 4), ["a", "b", "c", "a"]);
  assert.deepEqual(seen.dropped, []);
});

test("a queue of settlements is bounded in number and time", async () => {
  const { queue, seen } = settlementQueue({ maxQueued: 2, maxAgeMs: 60_000 }, () => DOWN);
  // the first one is being sent
  assert.deepEqual(
    ["a", "b", "c", "d"].map((adjustment) => queue.add(adjustment)),
    [true, true, true, false],
  );
  assert.deepEqual(seen.sent, ["a"]);

  const old = settlementQueue({ maxQueued: 2, maxAgeMs: 100 }, () => DOWN);
  old.queue.add("a");
  await until("it is dropped", () => old.seen.dropped.length === 1);
  assert.ok(old.seen.sent.length > 1);
});
