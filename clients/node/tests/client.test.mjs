// Every operation and every kind of error, with a real server.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import path from "node:path";
import { test } from "node:test";
import {
  AuthenticationError,
  Client,
  ConfigurationError,
  InvalidRequestError,
  localBucket,
  SluicegateError,
  TlsError,
  UnavailableError,
  UnknownRuleError,
} from "sluicegate";
import { freePort, RELAXED_MS, Server, temporaryDirectory } from "./harness.mjs";

const RULES = `
[defaults]
on_store_failure = "local"

[[rule]]
name = "per-user"
when = { route = "api" }
per = ["user"]
algorithm = "sliding-log"
amount = 5
window = "1h"

[[rule]]
name = "tokens"
when = { route = "chat" }
per = ["user"]
algorithm = "sliding-log"
amount = 1000
window = "1h"
unit = "tokens"

[[rule]]
name = "total"
when = { route = "api" }
algorithm = "fixed-window"
amount = 1000
window = "30d"
`;
const LIMIT = { algorithm: "sliding-log", amount: 3, window: "1h" };

async function start(t, options = {}) {
  const server = await Server.start(t, { config: RULES });
  const client = new Client({ url: server.url, deadlineMs: RELAXED_MS, ...options });
  t.after(() => client.close());
  return client;
}

test("labels: check, peek, charge, refund, reset and explain", async (t) => {
  const client = await start(t);
  const request = { labels: { route: "api", user: "alice" } };
  const first = await client.check(request);
  assert.equal(first.allowed, true);
  assert.equal(first.rule, "per-user");
  assert.equal(first.limit, 5);
  assert.equal(first.remaining, 4);
  assert.equal(first.retryAfterMs, null);
  assert.ok(first.resetAfterMs > 3_500_000 && first.resetAfterMs <= 3_600_000);
  assert.equal(first.never, false);
  assert.equal(first.degraded, false);
  assert.equal(first.source, "memory");
  assert.ok(Number.isSafeInteger(first.atUs));
  assert.deepEqual(first.headers, {});
  assert.equal(first.error, null);
  assert.deepEqual(
    first.tiers.map(({ rule, unit, shadow, remaining }) => ({ rule, unit, shadow, remaining })),
    [
      { rule: "per-user", unit: "requests", shadow: false, remaining: 4 },
      { rule: "total", unit: "requests", shadow: false, remaining: 999 },
    ],
  );

  assert.equal((await client.peek(request)).remaining, 4);
  assert.equal((await client.charge({ ...request, cost: 3 })).remaining, 1);
  assert.equal((await client.charge({ ...request, cost: 1, rules: ["total"] })).rule, "total");
  assert.equal((await client.peek(request)).remaining, 1);
  const denied = await client.check({ ...request, cost: 2 });
  assert.equal(denied.allowed, false);
  assert.ok(denied.retryAfterMs > 0);
  const never = await client.check({ ...request, cost: 6 });
  assert.deepEqual([never.allowed, never.never, never.retryAfterMs], [false, true, null]);

  // reverts exactly the first charge
  assert.equal((await client.refund({ ...request, atUs: first.atUs })).remaining, 2);
  assert.equal((await client.refund({ ...request, atUs: first.atUs })).remaining, 2);

  const explained = await client.explain(request);
  assert.equal(explained.decision.remaining, 2);
  assert.equal(explained.applies[0].rule, "per-user");
  assert.equal(explained.applies[0].state.used, 3);
  assert.equal(typeof explained.applies[0].state.resetAfterMs, "number");
  assert.deepEqual(
    explained.others.map(({ rule }) => rule),
    ["tokens"],
  );
  assert.equal(explained.moreOthers, 0);

  const reset = await client.reset(request);
  assert.deepEqual(reset, { reset: 1, counters: [{ rule: "per-user", key: "per-user:alice" }], kept: ["total"] });
  assert.equal((await client.peek(request)).remaining, 5);
  assert.equal((await client.reset({ ...request, all: true })).reset, 1);
});

test("key and limit: check, peek, charge, refund, reset and explain", async (t) => {
  const client = await start(t);
  const request = { key: "user:42", limit: LIMIT };
  const first = await client.check(request);
  assert.deepEqual([first.allowed, first.rule, first.limit, first.remaining], [true, null, 3, 2]);
  assert.equal((await client.charge({ ...request, cost: 2 })).remaining, 0);
  assert.equal((await client.peek(request)).allowed, false);
  assert.equal((await client.refund({ ...request, cost: 1, atUs: first.atUs })).remaining, 1);
  assert.equal((await client.explain(request)).applies[0].limit.amount, 3);
  assert.equal((await client.reset(request)).reset, 1);
  assert.equal((await client.peek(request)).remaining, 3);
});

test("costs in units, unmatched requests and absent labels", async (t) => {
  const client = await start(t);
  const chat = await client.check({ labels: { route: "chat", user: "a" }, cost: { requests: 1, tokens: 850 } });
  assert.deepEqual([chat.rule, chat.remaining, chat.tiers[0].unit], ["tokens", 150, "tokens"]);
  const absent = await client.check({ labels: { route: "chat", user: undefined, plan: null } });
  assert.deepEqual([absent.allowed, absent.source, absent.rule, absent.atUs], [true, "unmatched", null, null]);
  assert.equal((await client.check({ labels: { route: "api", user: 7 } })).remaining, 4);
  assert.equal((await client.check({ labels: { route: "api", user: "7" } })).remaining, 3);
});

test("headers are returned if they are requested", async (t) => {
  const client = await start(t);
  const request = { labels: { route: "api", user: "alice" }, cost: 5 };
  const allowed = await client.check(request, { headers: true });
  assert.equal(allowed.headers["ratelimit-policy"], '"per-user";q=5;w=3600, "total";q=1000;w=2592000');
  assert.match(allowed.headers.ratelimit, /^"per-user";r=0;t=3600, /);
  assert.equal(allowed.headers["retry-after"], undefined);
  const denied = await client.peek(request, { headers: true });
  assert.equal(denied.headers["retry-after"], String(Math.ceil(denied.retryAfterMs / 1000)));
  const [one] = await client.checkMany([request], { headers: true });
  assert.equal(one.headers["retry-after"], String(Math.ceil(one.retryAfterMs / 1000)));
});

test("checkMany decides up to 1000 requests in order", async (t) => {
  const client = await start(t);
  const requests = Array.from({ length: 1000 }, (_, n) =>
    n % 2 === 0 ? { labels: { route: "api", user: `u${n % 10}` } } : { key: `k${n % 10}`, limit: LIMIT },
  );
  const results = await client.checkMany(requests);
  assert.equal(results.length, 1000);
  const allowed = (from, to) => results.filter((result, n) => n % 2 === from && result.allowed === to).length;
  // five users with 5 each, and five keys with 3 each
  assert.deepEqual([allowed(0, true), allowed(1, true)], [25, 15]);
  assert.deepEqual(
    results.slice(0, 2).map(({ rule }) => rule),
    ["per-user", null],
  );
  assert.deepEqual(await client.checkMany([]), []);
  await assert.rejects(client.checkMany([...requests, requests[0]]), InvalidRequestError);
  await assert.rejects(client.checkMany([requests[0], { labels: { "": "x" } }]), /checks\[1\].*empty name/);
});

test("a key can have a calendar window and a lease", async (t) => {
  const client = await start(t);
  const limit = {
    amount: 2,
    window: "1 month",
    algorithm: "fixed-window",
    zone: "Europe/Berlin",
    anchor: 15,
    lease: 1,
  };
  const decisions = [];
  for (let n = 0; n < 3; n++) decisions.push((await client.check({ key: "monthly", limit })).allowed);
  assert.deepEqual(decisions, [true, true, false]);
  await assert.rejects(client.check({ key: "monthly", limit: { ...limit, zone: "Mars/Olympus" } }), /zone/);
  await assert.rejects(client.check({ key: "monthly", limit: { amount: 2, window: "1 month" } }), /fixed-window/);
});

test("checks that start together have their own decisions, headers and errors", async (t) => {
  const client = await start(t);
  const check = (n) => client.check({ key: `k${n}`, limit: { ...LIMIT, amount: n } }, { headers: n === 7 });
  const numbers = Array.from({ length: 20 }, (_, n) => n + 1);
  const decisions = await Promise.all(numbers.map(check));
  assert.deepEqual(
    decisions.map(({ limit }) => limit),
    numbers,
  );
  const withHeaders = numbers.filter((_, index) => Object.keys(decisions[index].headers).length > 0);
  assert.deepEqual(withHeaders, [7]);

  // the server rejects the whole batch because of one check
  const invalid = { key: "a", limit: { amount: 0, window: "1m" } };
  const requests = [...numbers.map((n) => ({ key: `k${n}`, limit: { ...LIMIT, amount: n + 1 } })), invalid];
  const results = await Promise.allSettled(requests.map((request) => client.check(request)));
  assert.match(results.pop().reason.message, /^limit: amount 0 is out of range/);
  // the other checks are charged once
  assert.deepEqual(
    results.map(({ value }) => value.remaining),
    numbers.map((n) => n - 1),
  );
});

const INVALID = [
  ["no request", undefined, /not an object/],
  ["an empty request", {}, /either labels, or key and limit/],
  ["labels and key", { labels: {}, key: "a", limit: LIMIT }, /either labels, or key and limit/],
  ["a key without limit", { key: "a" }, /key has no limit/],
  ["an empty key", { key: "", limit: LIMIT }, /key is empty/],
  ["a key that is a number", { key: 5, limit: LIMIT }, /key is 5: pass a string/],
  ["a long key", { key: "x".repeat(1025), limit: LIMIT }, /1025 bytes: use at most 1024/],
  ["labels that are an array", { labels: [] }, /labels is an array/],
  ["a label that is an array", { labels: { a: ["x"] } }, /label a is an array/],
  ["a label without a name", { labels: { "": "x" } }, /empty name/],
  ["a long label", { labels: { route: "ü".repeat(600) } }, /1200 bytes: use at most 1024/],
  ["half a surrogate pair", { labels: { route: "\ud800" } }, /surrogate|escape/],
  [
    "too many bytes",
    { labels: Object.fromEntries(Array.from({ length: 70 }, (_, n) => [`l${n}`, "x".repeat(1000)])) },
    /at most 65536/,
  ],
  ["a fractional cost", { labels: {}, cost: 1.5 }, /cost is 1.5: pass a whole number/],
  ["a negative cost", { labels: {}, cost: -1 }, /cost is -1/],
  ["NaN as cost", { labels: {}, cost: Number.NaN }, /cost is NaN/],
  ["a cost beyond 2^53", { labels: {}, cost: 2 ** 53 }, /cost is 9007199254740992/],
  ["a cost that is text", { labels: {}, cost: "1" }, /cost is "1"/],
  ["null as cost", { labels: {}, cost: null }, /cost is null/],
  ["a fractional cost of a unit", { labels: {}, cost: { tokens: 0.5 } }, /cost.tokens is 0.5/],
  ["units for a key", { key: "a", limit: LIMIT, cost: { tokens: 1 } }, /cost of a key has no units/],
  ["an amount of zero", { key: "a", limit: { amount: 0, window: "1m" } }, /amount 0 is out of range/],
  ["an unknown window", { key: "a", limit: { amount: 1, window: "1w" } }, /"1w" is not a duration/],
  ["a window that is a number", { key: "a", limit: { amount: 1, window: 60 } }, /window/],
  ["an unknown algorithm", { key: "a", limit: { amount: 1, window: "1m", algorithm: "magic" } }, /magic/],
];

test("invalid requests are rejected with a message that names the fix", async (t) => {
  const client = await start(t);
  for (const [name, request, message] of INVALID) {
    for (const call of ["check", "peek", "charge", "refund", "explain"]) {
      await assert.rejects(client[call](request), (error) => {
        assert.ok(error instanceof InvalidRequestError, `${name}: ${error}`);
        assert.equal(error.code, "invalid_request", name);
        assert.match(error.message, message, name);
        return true;
      });
    }
  }
  await assert.rejects(client.refund({ labels: {}, atUs: -1 }), /atUs is -1/);
  // the client and its circuit breaker still work
  assert.equal((await client.check({ labels: { route: "api", user: "a" } })).remaining, 4);
});

test("an unknown rule is named", async (t) => {
  const client = await start(t);
  const request = { labels: { route: "api", user: "a" }, rules: ["nope"] };
  for (const call of ["charge", "refund", "reset"]) {
    await assert.rejects(client[call](request), (error) => {
      assert.ok(error instanceof UnknownRuleError && error instanceof InvalidRequestError);
      assert.equal(error.code, "unknown_rule");
      assert.match(error.message, /there is no rule "nope": use per-user/);
      return true;
    });
  }
});

test("invalid settings are rejected", () => {
  const table = [
    [{ url: "127.0.0.1:8080" }, /protocol|invalid/],
    [{ url: "redis://127.0.0.1" }, /use http: or https:/],
    [{ url: "http://user:secret@127.0.0.1" }, /use the setting token/],
    [{ deadlineMs: 0 }, /deadlineMs 0 is out of range/],
    [{ deadlineMs: Number.NaN }, /deadlineMs NaN/],
    [{ maxConnections: 0 }, /maxConnections 0/],
    [{ onFailure: "maybe" }, /onFailure is invalid/],
    [{ token: "a\r\nb" }, /token has characters/],
    [{ ca: "pem" }, /ca need TLS/],
    [{ url: "https://127.0.0.1", cert: "no certificate" }, /ca, cert or key is invalid/],
    [{ url: "https://127.0.0.1", key: "no key" }, /ca, cert or key is invalid/],
  ];
  for (const [settings, message] of table) {
    assert.throws(
      () => new Client(settings),
      (error) => error instanceof ConfigurationError && message.test(error.message),
      JSON.stringify(settings),
    );
  }
  for (const bucket of [
    { amount: 0, window: "1m" },
    { amount: 1, window: "1x" },
    { amount: 1, window: "1m", maxKeys: 0 },
  ]) {
    assert.throws(() => localBucket(bucket), ConfigurationError);
  }
});

test("a wrong token is an authentication error", async (t) => {
  const tokens = ["check", 'check", "adjust", "admin'].map(
    (may, n) => `[[server.token]]\nname = "t${n}"\nenv = "TOKEN_${n}"\nmay = ["${may}"]\n`,
  );
  const environment = { TOKEN_0: "secret-of-the-application", TOKEN_1: "secret-of-the-operator" };
  const server = await Server.start(t, { config: tokens.join("") + RULES, environment });
  const client = (token) => new Client({ url: server.url, deadlineMs: RELAXED_MS, ...token });
  const request = { labels: { route: "api", user: "a" } };

  const rejected = (status, message) => (error) => {
    assert.ok(error instanceof AuthenticationError, String(error));
    assert.deepEqual([error.code, error.status], ["authentication", status]);
    assert.match(error.message, message);
    assert.match(error.message, /check the setting token/);
    return true;
  };
  await assert.rejects(client({}).check(request), rejected(401, /missing token/));
  await assert.rejects(client({ token: "wrong" }).check(request), rejected(403, /unknown token/));
  await assert.rejects(client({ token: "wrong" }).checkMany([request]), rejected(403, /unknown token/));
  const application = client({ token: environment.TOKEN_0 });
  assert.equal((await application.check(request)).remaining, 4);
  await assert.rejects(application.charge(request), rejected(403, /lacks the scope "adjust"/));
  await assert.rejects(application.reset(request), rejected(403, /lacks the scope "admin"/));
  assert.equal((await client({ token: environment.TOKEN_1 }).charge(request)).remaining, 3);
});

test("calls without a failure policy report that there is no server", async () => {
  const url = `http://127.0.0.1:${await freePort()}`;
  const client = new Client({ url, deadlineMs: RELAXED_MS });
  for (const call of ["charge", "refund", "reset", "explain"]) {
    await assert.rejects(client[call]({ key: "a", limit: LIMIT }), (error) => {
      assert.ok(error instanceof UnavailableError && error instanceof SluicegateError);
      assert.equal(error.code, "unavailable");
      assert.equal(error.mayHaveRun, false);
      assert.match(error.message, /ECONNREFUSED.*check that the server runs/);
      return true;
    });
  }
});

/** Creates an authority, a server certificate for 127.0.0.1 and a client certificate. */
function certificates(directory) {
  const openssl = (...args) => execFileSync("openssl", args, { cwd: directory, stdio: "pipe" });
  const key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"];
  openssl("req", "-x509", ...key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority");
  for (const name of ["server", "client"]) {
    const extensions = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"];
    const signer = ["-CA", "ca.pem", "-CAkey", "ca.key"];
    openssl(
      "req",
      "-x509",
      ...signer,
      ...key,
      ...extensions,
      "-keyout",
      `${name}.key`,
      "-out",
      `${name}.pem`,
      "-subj",
      `/CN=${name}`,
    );
  }
  return (name) => readFileSync(path.join(directory, name));
}

test("https with a private authority and a client certificate", async (t) => {
  const directory = temporaryDirectory(t);
  const file = certificates(directory);
  const at = (name) => JSON.stringify(path.join(directory, name));
  const tls = `[server.tls]\ncert = ${at("server.pem")}\nkey = ${at("server.key")}\nclient_ca = ${at("ca.pem")}\n`;
  const server = await Server.start(t, { config: tls + RULES });
  const request = { key: "a", limit: LIMIT };
  const client = (settings) => new Client({ url: server.url, deadlineMs: RELAXED_MS, onError: () => {}, ...settings });

  const identity = { cert: file("client.pem"), key: file("client.key") };
  const trusted = client({ ca: file("ca.pem"), ...identity });
  for (const remaining of [2, 1, 0]) assert.equal((await trusted.check(request)).remaining, remaining);

  const unverified = client(identity);
  await assert.rejects(unverified.charge(request), (error) => {
    assert.ok(error instanceof TlsError && error instanceof UnavailableError);
    assert.match(error.message, /TLS with https:.*check the settings ca, cert and key/);
    assert.equal(error.mayHaveRun, false);
    return true;
  });
  const decision = await unverified.check(request);
  assert.deepEqual([decision.source, decision.degraded, decision.error.code], ["open", true, "tls"]);
  await assert.rejects(client({ ca: file("ca.pem") }).charge(request), TlsError);
  await assert.rejects(
    client({ ca: file("ca.pem"), ...identity, servername: "example.org" }).charge(request),
    TlsError,
  );
});
