// Limits hold exactly over several application processes and several servers with one Redis.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { Agent, get as httpGet } from "node:http";
import { createInterface } from "node:readline";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { freePort, Server, startRedis } from "./harness.mjs";

const WORKERS = 3;
const AMOUNT = 100;
const REQUESTS = 400;
const CALLERS = 32;

test("a limit is exact over several processes and servers", async (t) => {
  const redis = await startRedis(t);
  // a deadline that a busy machine meets: a degraded decision would not be exact
  const environment = { SLUICEGATE_STORE_DEADLINE: "8s" };
  const servers = [];
  for (let n = 0; n < 2; n += 1) servers.push(await Server.start(t, { args: ["--store", redis], environment }));
  const port = await freePort();
  const settings = { URLS: servers.map(({ url }) => url).join(), AMOUNT, PORT: port, WORKERS };
  const program = fileURLToPath(new URL("cluster-worker.mjs", import.meta.url));
  const application = spawn(process.execPath, [program], {
    env: { ...process.env, ...settings },
    stdio: ["ignore", "pipe", "inherit"],
  });
  t.after(() => application.kill("SIGTERM"));
  assert.deepEqual(await once(createInterface(application.stdout), "line"), ["ready"]);

  const agent = new Agent({ keepAlive: true, maxSockets: CALLERS });
  t.after(() => agent.destroy());
  const get = async (key) => {
    const request = httpGet({ host: "127.0.0.1", port, agent, headers: { "x-api-key": key } });
    const [response] = await once(request, "response");
    return { status: response.statusCode, body: (await response.toArray()).join("") };
  };
  const keys = ["alice", "bob"];
  const responses = new Map(keys.map((key) => [key, []]));
  let sent = 0;
  const call = async () => {
    while (sent < REQUESTS) {
      const key = keys[sent % keys.length];
      sent += 1;
      responses.get(key).push(await get(key));
    }
  };
  await Promise.all(Array.from({ length: CALLERS }, call));
  for (const key of keys) {
    const count = (status) => responses.get(key).filter((response) => response.status === status).length;
    assert.deepEqual([count(200), count(429)], [AMOUNT, REQUESTS / keys.length - AMOUNT], key);
  }
  const processes = new Set(
    responses
      .get("alice")
      .filter(({ status }) => status === 200)
      .map(({ body }) => body),
  );
  assert.equal(processes.size, WORKERS);
});
