// What ioredis makes of the server. NODE_PATH=.servers/ioredis/node_modules node ioredis.cjs PORT

const assert = require("node:assert/strict");
const Redis = require("ioredis");

async function main() {
  const port = Number(process.argv[2]);
  const client = new Redis({ port, username: "app", password: "s3cret", connectionName: "node" });
  assert.equal(await client.ping(), "PONG");
  assert.equal(await client.client("GETNAME"), "node");
  assert.deepEqual(await client.call("CL.THROTTLE", "node", 1, 1, 3600), [0, 2, 1, -1, 3600]);

  const login = ["route", "login", "ip", "node"];
  const [allowed, limit, remaining, retry, reset, rule, degraded, at] = await client.call("SG.CHECK", 1, ...login);
  assert.deepEqual([allowed, limit, remaining, retry, rule, degraded], [1, 5, 4, -1, "login-per-ip", 0]);
  assert(reset > 0 && reset <= 60_000 && at > 1_700_000_000_000_000);

  // sent one after another without waiting, and so in few writes
  const replies = await Promise.all(Array.from({ length: 6 }, () => client.call("SG.CHECK", 1, ...login)));
  assert.deepEqual(replies.map((reply) => reply[0]), [1, 1, 1, 1, 0, 0]);
  const pipeline = await client.pipeline([["ping"], ["call", "SG.RESET", ...login]]).exec();
  assert.deepEqual(pipeline, [[null, "PONG"], [null, [1, "login-per-ip", `login-per-ip:${login.at(-1)}`]]]);

  const [held, settled, unknown] = await Promise.all([
    client.call("SG.HOLD", "node", 30_000, 3, ...login),
    client.call("SG.SETTLE", "node", 1, ...login),
    client.call("SG.RELEASE", "other", ...login),
  ]);
  assert.deepEqual([held[0], held[2], held[8] - held[7], settled, unknown], [1, 2, 30_000_000, "settled", "unknown"]);

  await assert.rejects(client.call("SG.CHECK", "1.5", ...login), /^ReplyError: ERR cost '1.5' is not a whole number/);
  await assert.rejects(client.get("key"), /unknown command/);
  await client.quit();
  console.log("ok");
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
