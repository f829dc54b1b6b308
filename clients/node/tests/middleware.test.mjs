// The behaviour that all frameworks share, with a real server.
import assert from "node:assert/strict";
import { EventEmitter, once } from "node:events";
import { get as httpGet } from "node:http";
import { createRequire } from "node:module";
import { test } from "node:test";
import { AuthenticationError, Client, ConfigurationError, clientIp, header, localBucket } from "sluicegate";
import { rateLimit } from "sluicegate/express";
import { FRAMEWORKS } from "./frameworks.mjs";
import { freePort, RELAXED_MS, Server, sleep, until } from "./harness.mjs";

const RULES = `
[defaults]
on_store_failure = "local"

[[rule]]
name = "per-ip"
when = { route = "api" }
per = ["ip"]
algorithm = "sliding-log"
amount = 3
window = "1h"

[[rule]]
name = "per-key"
per = ["api_key"]
algorithm = "sliding-log"
amount = 2
window = "1h"
`;
const LIMIT = { algorithm: "sliding-log", amount: 2, window: "1h" };

async function startClient(t, options = {}) {
  const server = await Server.start(t, { config: RULES });
  const client = new Client({ url: server.url, deadlineMs: RELAXED_MS, ...options });
  t.after(() => client.close());
  return client;
}

async function deadClient(options) {
  return new Client({ url: `http://127.0.0.1:${await freePort()}`, onError: () => {}, ...options });
}

/** Sends a request, and returns status, headers and body. */
async function get(url, headers = {}) {
  const response = await fetch(url, { headers });
  return { status: response.status, headers: response.headers, body: await response.text() };
}

/** Sends a request with repeated headers, and returns its status and body. */
async function getRepeated(url, headers) {
  const request = httpGet(url, { headers: ["host", "127.0.0.1", ...headers] });
  const [response] = await once(request, "response");
  return [response.statusCode, (await response.toArray()).join("")];
}

for (const { name, start, onDenied, peer } of FRAMEWORKS) {
  const ip = (options = {}) => clientIp({ ...(peer && { peer }), ...options });

  test(`${name}: an endpoint is limited per API key, with headers`, async (t) => {
    const client = await startClient(t);
    const url = await start(t, { client, name: "api", key: header("X-API-Key"), limit: LIMIT });
    for (const remaining of [1, 0]) {
      const { status, headers, body } = await get(url, { "x-api-key": "alice" });
      assert.deepEqual([status, body], [200, String(remaining)]);
      assert.equal(headers.get("ratelimit-policy"), '"api";q=2;w=3600');
      assert.match(headers.get("ratelimit"), new RegExp(`^"api";r=${remaining};t=\\d+$`));
      assert.equal(headers.get("retry-after"), null);
    }
    const denied = await get(url, { "x-api-key": "alice" });
    assert.equal(denied.status, 429);
    assert.match(denied.headers.get("content-type"), /^application\/problem\+json/);
    assert.equal(denied.headers.get("cache-control"), "no-store");
    assert.match(denied.headers.get("ratelimit"), /^"api";r=0;t=\d+$/);
    const seconds = Number(denied.headers.get("retry-after"));
    assert.ok(seconds > 3000 && seconds <= 3600, String(seconds));
    const problem = JSON.parse(denied.body);
    assert.deepEqual([problem.title, problem.status, problem["violated-policies"]], ["Quota Exceeded", 429, ["api"]]);
    assert.equal(Math.ceil(problem.retry_after_ms / 1000), seconds);

    assert.equal((await get(url, { "x-api-key": "bob" })).status, 200);
    // requests without a key share a counter, which is not that of the key "absent"
    for (const status of [200, 200, 429]) assert.equal((await get(url)).status, status);
    assert.equal((await get(url, { "x-api-key": "absent" })).status, 200);
  });

  test(`${name}: labels are constants and functions, or one function`, async (t) => {
    const client = await startClient(t);
    const labels = { route: "api", ip: ip({ trustedProxies: ["127.0.0.0/8"] }), api_key: header("x-api-key") };
    const url = await start(t, { client, labels });
    const from = (address) => ({ "x-forwarded-for": `192.0.2.7, ${address}` });
    for (const remaining of ["2", "1", "0"]) assert.equal((await get(url, from("203.0.113.9"))).body, remaining);
    const denied = await get(url, from("203.0.113.9"));
    assert.deepEqual([denied.status, JSON.parse(denied.body)["violated-policies"]], [429, ["per-ip"]]);
    assert.equal((await get(url, from("203.0.113.10"))).body, "2");
    // both rules apply
    const both = await get(url, { ...from("203.0.113.11"), "x-api-key": "k" });
    assert.equal(both.headers.get("ratelimit-policy"), '"per-ip";q=3;w=3600, "per-key";q=2;w=3600');

    const other = await start(t, { client, labels: async () => ({ route: "api", ip: "203.0.113.99" }) });
    assert.equal((await get(other)).body, "2");
  });

  test(`${name}: X-Forwarded-For of an untrusted peer is ignored`, async (t) => {
    const client = await startClient(t);
    const url = await start(t, { client, labels: { route: "api", ip: ip() } });
    const statuses = [];
    for (let n = 0; n < 4; n += 1) statuses.push((await get(url, { "x-forwarded-for": `203.0.113.${n}` })).status);
    assert.deepEqual(statuses, [200, 200, 200, 429]);
  });

  test(`${name}: skip, cost, a limit per request, and no headers`, async (t) => {
    const client = await startClient(t);
    const read = (request) => new URL(request.url, "http://localhost").searchParams;
    const url = await start(t, {
      client,
      name: "upload",
      key: () => "one",
      limit: async (request) => ({ ...LIMIT, amount: read(request).has("pro") ? 100 : 10 }),
      cost: (request) => Number(read(request).get("cost") ?? 1),
      skip: (request) => read(request).has("health"),
      headers: false,
    });
    const first = await get(`${url}/?cost=8`);
    assert.deepEqual([first.status, first.body, first.headers.get("ratelimit")], [200, "2", null]);
    const denied = await get(`${url}/?cost=3`);
    assert.deepEqual([denied.status, denied.headers.get("ratelimit")], [429, null]);
    assert.ok(Number(denied.headers.get("retry-after")) > 3000);
    assert.equal((await get(`${url}/?pro&cost=3`)).body, "89");
    // no wait suffices, so there is no Retry-After
    const never = await get(`${url}/?cost=11`);
    assert.deepEqual([never.status, never.headers.get("retry-after")], [429, null]);
    assert.match(never.body, /a retry cannot succeed/);
    const skipped = await get(`${url}/?health`);
    assert.deepEqual([skipped.status, skipped.body], [200, "undefined"]);
  });

  test(`${name}: a custom response to denied requests has the headers`, async (t) => {
    const client = await startClient(t);
    const url = await start(t, { client, name: "api", key: () => "one", limit: { ...LIMIT, amount: 1 }, onDenied });
    assert.equal((await get(url)).status, 200);
    const denied = await get(url);
    assert.equal(denied.status, 420);
    assert.ok(JSON.parse(denied.body).wait > 3_000_000);
    assert.ok(Number(denied.headers.get("retry-after")) > 3000);
    assert.match(denied.headers.get("ratelimit"), /r=0/);
  });

  test(`${name}: several limiters extend the headers`, async (t) => {
    const client = await startClient(t);
    const labels = { route: "api", ip: () => "203.0.113.9" };
    const url = await start(t, { client, labels }, { client, name: "api", key: () => "one", limit: LIMIT });
    const policy = (await get(url)).headers.get("ratelimit-policy").split(", ").sort();
    assert.deepEqual(policy, ['"api";q=2;w=3600', '"per-ip";q=3;w=3600']);
  });

  test(`${name}: each limit of the code has its name in the headers`, async (t) => {
    const client = await startClient(t);
    const limits = [
      { client, name: 'a "b" \\ $& ü', key: () => "one", limit: { ...LIMIT, amount: 5 } },
      { client, name: "hourly", key: () => "one", limit: { ...LIMIT, amount: 1 } },
    ];
    const url = await start(t, ...limits);
    const { headers } = await get(url);
    const policy = headers.get("ratelimit-policy").split(", ").sort();
    assert.deepEqual(policy, ['"a \\"b\\" \\\\ $& ?";q=5;w=3600', '"hourly";q=1;w=3600']);
    assert.match(headers.get("ratelimit"), /"hourly";r=0;t=\d+/);
    assert.match(headers.get("ratelimit"), /"a \\"b\\" \\\\ \$& \?";r=4;t=\d+/);
    const denied = await get(url);
    assert.deepEqual([denied.status, JSON.parse(denied.body)["violated-policies"]], [429, ["hourly"]]);
    assert.match(JSON.parse(denied.body).detail, /^limit exceeded: hourly;/);
  });

  test(`${name}: a refund after the response`, async (t) => {
    // the test can end before the response to the refund arrives
    const client = await startClient(t, { onError: () => {} });
    const refundWhen = (_, response) => (response.status ?? response.statusCode) === 200 || response.statusCode === 200;
    const limit = { ...LIMIT, amount: 5 };
    const url = await start(t, { client, name: "login", key: () => "one", limit, refundWhen });
    const remaining = async () => (await client.peek({ key: "login:=one", limit })).remaining;
    assert.equal((await get(`${url}/?status=401`)).body, "4");
    assert.equal((await get(url)).body, "3");
    await until("the refund", async () => (await remaining()) === 4);
  });

  test(`${name}: a refund if the client disconnects during the check`, async (t) => {
    // the fetch handlers of this test get no signal of the connection, and call refundWhen after the handler
    const client = await startClient(t, { onError: () => {} });
    const limit = { ...LIMIT, amount: 5 };
    const gate = new EventEmitter();
    const slow = {
      check: async (...args) => {
        const decision = await client.check(...args);
        const opened = once(gate, "opened");
        gate.emit("checked");
        await opened;
        return decision;
      },
      refund: (request) => client.refund(request),
      onError: () => {},
    };
    const isChecked = once(gate, "checked");
    const url = await start(t, { client: slow, name: "login", key: () => "one", limit, refundWhen: () => true });
    const request = httpGet(url).on("error", () => {});
    await isChecked;
    const isClosed = new Promise((resolve) => request.once("close", resolve));
    request.destroy();
    await isClosed;
    // the server reads the end of the connection
    await sleep(100);
    const remaining = async () => (await client.peek({ key: "login:=one", limit })).remaining;
    assert.equal(await remaining(), 4);
    gate.emit("opened");
    await until("the refund", async () => (await remaining()) === 5);
  });

  test(`${name}: without a server, the failure policy decides, and no response is a 500`, async (t) => {
    const limits = { name: "api", key: () => "one", limit: LIMIT };
    const open = await start(t, { client: await deadClient(), ...limits });
    for (let n = 0; n < 8; n += 1) assert.equal((await get(open)).status, 200);

    const closed = await start(t, { client: await deadClient({ onFailure: "closed" }), ...limits });
    const denied = await get(closed);
    assert.deepEqual([denied.status, denied.headers.get("retry-after")], [503, "1"]);
    assert.equal(JSON.parse(denied.body).title, "Temporary Reduced Capacity");

    const onFailure = localBucket({ amount: 2, window: "1h" });
    const local = await start(t, { client: await deadClient({ onFailure: "closed" }), ...limits, onFailure });
    const statuses = [];
    for (let n = 0; n < 3; n += 1) statuses.push((await get(local)).status);
    assert.deepEqual(statuses, [200, 200, 429]);
    assert.ok(Number((await get(local)).headers.get("retry-after")) > 1000);
  });

  test(`${name}: an exception of a function of the application is not a free pass`, async (t) => {
    const client = await startClient(t, { onFailure: "open" });
    const broken = () => {
      throw new TypeError("no session");
    };
    const limits = { name: "api", key: () => "one", limit: LIMIT };
    for (const options of [
      { labels: { route: "api", ip: broken } },
      { labels: async () => broken() },
      { ...limits, key: broken },
      { ...limits, limit: broken },
      { ...limits, cost: broken },
      { ...limits, skip: broken },
      // Express continues with the next handler if there is no error
      { ...limits, key: () => Promise.reject() },
    ]) {
      const url = await start(t, { client, ...options });
      assert.equal((await get(url)).status, 500);
    }
  });

  test(`${name}: an error of the configuration is reported, and the failure policy decides`, async (t) => {
    const client = await startClient(t, { onFailure: "closed" });
    const errors = [];
    const onError = (error) => errors.push(error);
    const unknown = () => {
      throw new ConfigurationError("the address of the peer is unknown");
    };
    const closed = await start(t, { client, labels: { ip: unknown }, onError });
    assert.equal((await get(closed)).status, 503);
    const open = await start(t, { client, labels: async () => unknown(), onError, onFailure: "open" });
    assert.equal((await get(open)).status, 200);
    assert.deepEqual(
      errors.map(({ message }) => message),
      Array(2).fill("the address of the peer is unknown"),
    );
  });

  test(`${name}: a client cannot bypass its limit with a value of another type`, async (t) => {
    const client = await startClient(t, { onError: () => {}, onFailure: "open" });
    const limits = { client, name: "api", limit: LIMIT };
    // as JSON bodies and queries are parsed
    for (const value of [{ toString: 1 }, ["a"], { a: 1 }, true, Symbol("a"), Object.create(null)]) {
      const url = await start(t, { ...limits, key: () => value });
      const { status, body } = await get(url);
      assert.equal(status, 400);
      assert.match(JSON.parse(body).detail, /^the key is .*: send a string or a number$/);
      if (value === true) continue;
      assert.equal((await get(await start(t, { client, labels: { user: () => value } }))).status, 400);
      const cost = await start(t, { ...limits, key: () => "one", cost: () => value });
      assert.equal((await get(cost)).status, 400);
    }
    for (const value of [null, "a", 5]) {
      assert.equal((await get(await start(t, { client, labels: () => value }))).status, 400);
    }
    // the server quotes the name of the unit in its response
    const unit = await start(t, { client, labels: { route: "api" }, cost: () => ({ "a: unknown field `b`": 1 }) });
    assert.equal((await get(unit)).status, 400);
    for (const value of [7, 7n]) {
      const url = await start(t, { ...limits, key: () => value });
      assert.equal((await get(url)).status, 200);
    }
    // a function for the peer can read a header, which a client can omit
    for (const address of [undefined, null, "unknown", ["203.0.113.9"]]) {
      const url = await start(t, { ...limits, key: clientIp({ peer: () => address }) });
      assert.equal((await get(url)).status, 400);
    }
  });

  test(`${name}: a wrong token is reported, and the failure policy decides`, async (t) => {
    const config = `[[server.token]]\nname = "a"\nenv = "TOKEN"\nmay = ["check"]\n${RULES}`;
    const server = await Server.start(t, { config, environment: { TOKEN: "correct-horse-battery" } });
    const client = new Client({ url: server.url, token: "wrong", deadlineMs: RELAXED_MS });
    const errors = [];
    const limits = { name: "api", key: () => "one", limit: LIMIT, onError: (error) => errors.push(error) };
    const url = await start(t, { client, ...limits });
    assert.equal((await get(url)).status, 200);
    assert.ok(errors[0] instanceof AuthenticationError);
    const closed = await start(t, { client, ...limits, onFailure: "closed" });
    assert.equal((await get(closed)).status, 503);
  });

  test(`${name}: a client cannot bypass its limit with an invalid value`, async (t) => {
    const client = await startClient(t, { onError: () => {} });
    const url = await start(t, { client, name: "api", key: header("x-api-key"), limit: LIMIT });
    const long = await get(url, { "x-api-key": "x".repeat(1100) });
    assert.deepEqual([long.status, JSON.parse(long.body).status], [400, 400]);
    const labelled = await start(t, { client, labels: { api_key: header("x-api-key") } });
    assert.equal((await get(labelled, { "x-api-key": "x".repeat(1100) })).status, 400);
    // fetch handlers get repeated headers as one value
    const [status, body] = await getRepeated(url, ["x-api-key", "a", "x-api-key", "b"]);
    if (name === "fetch" || name === "hono") assert.equal(status, 200);
    else assert.deepEqual([status, JSON.parse(body).detail], [400, "the header x-api-key is repeated: send it once"]);
    // as Express parses ?user=a&user=b
    const array = await start(t, { client, labels: () => ({ user: ["a", "b"] }) });
    assert.equal((await get(array)).status, 400);
    const cost = await start(t, { client, labels: { route: "api" }, cost: () => 1.5 });
    assert.equal((await get(cost)).status, 400);
  });
}

test("both builds of the package work together", async (t) => {
  const common = createRequire(import.meta.url)("sluicegate");
  assert.notEqual(common.Client, Client);
  const server = await Server.start(t, { config: RULES });
  const client = new common.Client({ url: server.url, deadlineMs: RELAXED_MS, onError: () => {} });
  const [{ start }] = FRAMEWORKS;
  const url = await start(t, { client, name: "api", key: common.header("x-api-key"), limit: LIMIT });
  for (const body of ["1", "0"]) assert.equal((await get(url, { "x-api-key": "a" })).body, body);
  assert.equal((await getRepeated(url, ["x-api-key", "a", "x-api-key", "b"]))[0], 400);
  const invalid = await start(t, { client, labels: () => ({ user: ["a", "b"] }) });
  assert.equal((await get(invalid)).status, 400);
  await server.kill();
  const onFailure = common.localBucket({ amount: 1, window: "1h" });
  const local = await start(t, { client, name: "api", key: () => "one", limit: LIMIT, onFailure });
  assert.deepEqual([(await get(local)).status, (await get(local)).status], [200, 429]);
});

for (const [dialect, expected] of [
  ["github", { "x-ratelimit-resource": "api", "x-ratelimit-limit": "2" }],
  ["draft-07", { "ratelimit-policy": "2;w=3600" }],
  ["x-ratelimit", { "x-ratelimit-limit": "2" }],
]) {
  test(`the name of a limit in the dialect ${dialect}`, async (t) => {
    const server = await Server.start(t, { config: `[server]\nheaders = "${dialect}"\n${RULES}` });
    const client = new Client({ url: server.url, deadlineMs: RELAXED_MS });
    const [{ start }] = FRAMEWORKS;
    const { headers } = await get(await start(t, { client, name: "api", key: () => "one", limit: LIMIT }));
    for (const [header, value] of Object.entries(expected)) assert.equal(headers.get(header), value);
    assert.doesNotMatch(JSON.stringify([...headers]), /default/);
  });
}

test("limits that the server accepts are valid options", async (t) => {
  const client = await startClient(t);
  for (const setting of [
    { algorithm: "gcra", burst: 1_000_000_000 },
    { amount: 1_000_000_000 },
    { algorithm: "sliding-log", amount: 200_000 },
    { algorithm: "sliding-counter", window: "1ms" },
    { algorithm: "fixed-window", window: "3650d" },
  ]) {
    const limit = { amount: 1, window: "1m", ...setting };
    rateLimit({ client, name: "a", key: () => "a", limit });
    assert.equal((await client.check({ key: JSON.stringify(setting), limit })).allowed, true);
  }
});

for (const { name, start } of FRAMEWORKS) {
  test(`${name}: a constant limit that only the server rejects is reported, and the failure policy decides`, async (t) => {
    const errors = [];
    const client = await startClient(t, { onError: (error) => errors.push(error) });
    // as a server with smaller ranges, of another version
    const limit = { ...LIMIT };
    const options = { client, name: "api", key: () => "one", limit };
    const open = await start(t, options);
    const closed = await start(t, { ...options, onFailure: "closed" });
    const dynamic = await start(t, { ...options, limit: () => limit });
    limit.amount = 300_000;
    assert.deepEqual([(await get(open)).status, (await get(closed)).status], [200, 503]);
    assert.ok(
      errors.every((error) => error instanceof ConfigurationError && /^limit: amount 300000/.test(error.message)),
    );
    assert.equal(errors.length, 2);
    // the limit can depend on the request, so that the client gets a 400
    assert.equal((await get(dynamic)).status, 400);
  });
}

test("invalid options are rejected when the middleware is created", async () => {
  const client = await deadClient();
  const limit = { amount: 1, window: "1m" };
  for (const [options, message] of [
    [{}, /client is missing/],
    [{ client }, /either labels/],
    [{ client, key: () => "a", limit }, /either labels/],
    [{ client, labels: {}, name: "a", key: () => "a", limit }, /either labels/],
    [{ client, name: "a:b", key: () => "a", limit }, /without a colon/],
    [{ client, name: "a", key: () => "a", limit: { amount: 0, window: "1m" } }, /amount 0/],
    [{ client, name: "a", key: () => "a", limit: { amount: 1, window: "1w" } }, /"1w" is not a duration/],
    [{ client, labels: {}, onFailure: "never" }, /onFailure is invalid/],
    ...[
      [{ algorithm: "token_bucket" }, /algorithm "token_bucket" is unknown: use one of token-bucket, /],
      [{ algorithm: "toString" }, /algorithm "toString" is unknown/],
      [{ algorithm: "sliding-log", burst: 5 }, /sliding-log has no burst/],
      [{ algorithm: "sliding-log", amount: 200_001 }, /amount 200001 is out of range: sliding-log accepts 1 to 200000/],
      [{ amount: 1_000_000_001 }, /amount 1000000001 is out of range/],
      [{ burst: 0 }, /burst 0 is out of range/],
      [{ burst: 1.5 }, /burst 1.5 is out of range/],
      [{ window: "3651d" }, /window "3651d" is out of range/],
      [{ algorithm: "fixed-window", window: "1d", zone: "UTC" }, /zone "UTC" needs a calendar window: remove it/],
      [{ anchor: 15 }, /anchor 15 needs a calendar window: remove it, or use fixed-window and .* "1 month"/],
    ].map(([setting, message]) => [{ client, name: "a", key: () => "a", limit: { ...limit, ...setting } }, message]),
    [{ client, name: "a", key: () => "a", limit: "100/m" }, /limit is "100\/m": use an object/],
    [{ client, name: "a", key: () => "a", limit: null }, /limit is null: use an object/],
    [{ client, name: "a", key: () => "a", limit, cost: 1.5 }, /cost is 1.5/],
    [{ client, name: "a", key: () => "a", limit, cost: { tokens: 1 } }, /cost is of type object/],
    [{ client, labels: {}, cost: { tokens: -1 } }, /cost is -1/],
    [{ client, labels: { a: "x".repeat(1025) } }, /labels: "a" is invalid/],
    [{ client, labels: { "": "x" } }, /labels: "" is invalid/],
    [{ client, labels: { a: ["x"] } }, /labels: "a" is invalid/],
  ]) {
    assert.throws(
      () => rateLimit(options),
      (error) => error instanceof ConfigurationError && message.test(error.message),
    );
  }
  assert.throws(() => clientIp({ trustedProxies: ["10.0.0.0/33"] }), /not a network/);
  assert.throws(() => clientIp({ ipv6Prefix: 0 }), /ipv6Prefix 0/);
});
