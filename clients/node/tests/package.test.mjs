// The published package: its files, both module formats and the types, in an empty directory.
import assert from "node:assert/strict";
import { mkdirSync, readFileSync, symlinkSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { runProgram, Server, temporaryDirectory } from "./harness.mjs";

const PACKAGE = fileURLToPath(new URL("..", import.meta.url));
const TSC = createRequire(import.meta.url).resolve("typescript/bin/tsc");
const MODULES = ["sluicegate", "sluicegate/express", "sluicegate/fastify", "sluicegate/fetch"];

async function run(directory, command, ...args) {
  const { code, output } = await runProgram(command, args, { cwd: directory });
  assert.equal(code, 0, output);
  return output;
}

/** Packs the package and installs the tarball in an empty directory. */
async function install(t) {
  const directory = temporaryDirectory(t);
  await run(PACKAGE, "npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", directory);
  const tarball = path.join(directory, "sluicegate-0.1.0.tgz");
  writeFileSync(path.join(directory, "package.json"), '{"private": true}');
  const offline = ["--offline", "--no-audit", "--no-fund", "--no-package-lock", "--silent"];
  await run(directory, "npm", "install", ...offline, tarball);
  return directory;
}

const CONSUMER = `
import express, { type Request, type Response } from "express";
import Fastify, { type FastifyReply, type FastifyRequest } from "fastify";
import { Client, clientIp, type Decision, Hold, header, holdOf, InvalidRequestError, localBucket, type Settlement } from "sluicegate";
import { rateLimit } from "sluicegate/express";
import { rateLimit as plugin, rateLimitHook } from "sluicegate/fastify";
import { rateLimit as wrap } from "sluicegate/fetch";

const client = new Client({ url: "http://127.0.0.1:1", onFailure: localBucket({ amount: 1, window: "1s" }) });
const limit = { amount: 100, window: "1m" };

const app = express();
app.use(rateLimit({ client, labels: { route: "api", ip: clientIp(), api_key: header("x-api-key") } }));
app.get("/a", rateLimit({ client, name: "a", key: header("x-api-key"), limit }), (_request, response) => {
  response.send("hello");
});
app.get("/b", rateLimit({ client, labels: (request: Request) => ({ ip: request.ip }) }));
app.get("/o", rateLimit({ client, labels: { tenant: "acme" }, hold: true }), async (request, response) => {
  await holdOf(request)?.release();
  response.json({});
});
app.use(rateLimit({ client, labels: { route: "api" }, skip: (request) => request.path === "/healthz" }));
app.use(rateLimit<Request, Response>({ client, labels: (request) => ({ path: request.path }), onDenied: (_request, response) => response.json({}) }));
app.get("/c", rateLimit({ client, name: "c", key: (request) => request.headers.host, limit, skip: (request) => request.method === "HEAD" }));

const fastify = Fastify();
fastify.register(plugin, { client, labels: { ip: clientIp() }, hook: "preHandler" });
fastify.get("/d", { onRequest: rateLimitHook({ client, name: "d", key: header("x-api-key"), limit }) }, async () => "hello");
fastify.register(plugin, { client, name: "g", key: (request) => request.ip, limit, onDenied: (_request, reply) => reply.code(420).send() });
fastify.register(plugin, { client, labels: { ip: (request: FastifyRequest) => request.ip, path: (request) => request.url } });
fastify.get("/h", { onRequest: rateLimitHook({ client, name: "h", key: (request) => request.ip, limit }) }, async () => "hello");
fastify.get("/i", { onRequest: rateLimitHook({ client, name: "i", key: (request: FastifyRequest) => request.ip, limit }) }, async () => "hello");
fastify.get("/j", { onRequest: rateLimitHook<FastifyRequest, FastifyReply>({ client, name: "j", key: (request) => request.ip, limit }) }, async () => "hello");
type WithId = { Params: { id: string } };
const perId = (request: FastifyRequest<WithId>) => request.params.id;
fastify.get<WithId>("/k/:id", { preHandler: [rateLimitHook({ client, name: "k", key: perId, limit })] }, async (request) => request.params.id);
fastify.addHook("onRequest", rateLimitHook({ client, labels: { ip: (request) => request.ip }, refundWhen: (_request, reply) => reply.statusCode === 200 }));
fastify.setNotFoundHandler({ preHandler: rateLimitHook({ client, name: "l", key: (request) => request.ip, limit }) }, async () => "hello");
const secure = Fastify({ http2: true });
secure.get("/m", { onRequest: rateLimitHook({ client, name: "m", key: (request) => request.ip, limit }) }, async () => "hello");
// @ts-expect-error requests have no such property
rateLimitHook({ client, name: "n", key: (request) => request.nonsense, limit });

export const GET = wrap({ client, name: "e", key: header("x-api-key"), limit }, async (request) => new globalThis.Response(request.url));
export const POST = wrap(
  { client, name: "f", key: (_request, { params }) => params.id, limit },
  async (_request: globalThis.Request, context: { params: { id: string } }) => new globalThis.Response(context.params.id),
);

export async function use(): Promise<number | null> {
  const decision: Decision = await client.check({ labels: { route: "a", user: 7, plan: undefined }, cost: { tokens: 5 } });
  const [first] = await client.checkMany([{ key: "a", limit }]);
  if (first instanceof InvalidRequestError) return null;
  await client.refund({ key: "a", limit, atUs: decision.atUs ?? 0 });
  await using hold: Hold = await client.hold({ labels: { tenant: "acme" }, cost: { tokens: 5 } }, { id: "a", ttlMs: 1000 });
  hold.actualCost = { tokens: 3 };
  const settlement: Settlement = await hold.settle(2);
  await client.settle({ token: hold.token ?? "", cost: { tokens: 2 } });
  await client.renew({ labels: { tenant: "acme" }, id: hold.id, ttlMs: 5 });
  await client.release({ key: "a", limit: { algorithm: "concurrency", amount: 1 }, id: "a" });
  const outcome: string = await client.withHold({ labels: {} }, async ({ allowed }) => (allowed ? settlement.outcome : "denied"));
  // @ts-expect-error a token has no id
  await client.release({ token: outcome, id: "a" });
  // @ts-expect-error a settlement needs a cost
  await client.settle({ token: outcome });
  // @ts-expect-error a key needs a limit
  await client.check({ key: "a" });
  // @ts-expect-error a reset has no cost
  await client.reset({ labels: {}, cost: 1 });
  return first?.remaining ?? null;
}
`;

test("the packed package works as an ES module and as CommonJS", async (t) => {
  const directory = await install(t);
  const installed = path.join(directory, "node_modules/sluicegate");
  const { dependencies, version } = JSON.parse(readFileSync(path.join(installed, "package.json"), "utf8"));
  assert.deepEqual([dependencies, version], [undefined, "0.1.0"]);
  for (const file of ["README.md", "LICENSE-MIT", "LICENSE-APACHE"]) readFileSync(path.join(installed, file));

  const server = await Server.start(t);
  const check = `
    const client = new Client({ url: ${JSON.stringify(server.url)}, deadlineMs: 5000 });
    client.check({ key: "a", limit: { amount: 5, window: "1h", algorithm: "sliding-log" } })
      .then(({ remaining }) => console.log(remaining, typeof express.rateLimit, typeof fastify.rateLimit, typeof fetch_.rateLimit));`;
  const names = ["{ Client }", "express", "fastify", "fetch_"];
  const imports = MODULES.map((name, n) => `import ${n === 0 ? names[n] : `* as ${names[n]}`} from "${name}";`);
  writeFileSync(path.join(directory, "a.mjs"), imports.join("\n") + check);
  const requires = MODULES.map((name, n) => `const ${names[n]} = require("${name}");`);
  writeFileSync(path.join(directory, "b.cjs"), requires.join("\n") + check);
  assert.equal(await run(directory, process.execPath, "a.mjs"), "4 function function function\n");
  assert.equal(await run(directory, process.execPath, "b.cjs"), "3 function function function\n");

  // the types, with those of Express and Fastify, for both formats, and for the resolution before `exports`
  for (const name of ["@types", "express", "fastify"]) {
    symlinkSync(path.join(PACKAGE, "node_modules", name), path.join(directory, "node_modules", name));
  }
  for (const [format, type] of [
    ["esm", "module"],
    ["cjs", "commonjs"],
  ]) {
    mkdirSync(path.join(directory, format));
    writeFileSync(path.join(directory, format, "package.json"), JSON.stringify({ type }));
    writeFileSync(path.join(directory, format, "consumer.ts"), CONSUMER);
  }
  const flags = ["--noEmit", "--strict", "--esModuleInterop", "--target", "es2022", "--types", "node"];
  const checkTypes = (...args) => run(directory, process.execPath, TSC, ...flags, ...args);
  // without --skipLibCheck, the declarations of the package are checked too
  await checkTypes("--module", "nodenext", "esm/consumer.ts", "cjs/consumer.ts");
  await checkTypes("--skipLibCheck", "--module", "commonjs", "--moduleResolution", "node10", "cjs/consumer.ts");
});
