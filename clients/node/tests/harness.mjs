// Starts the servers that tests need, and ends them.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import net from "node:net";
import { tmpdir } from "node:os";
import path from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const root = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../../..");
const binary = path.resolve(root, process.env.SLUICEGATE_BIN ?? "target/debug/sluicegate");
if (!existsSync(binary)) throw new Error(`${binary} is missing: build it with cargo build, or set SLUICEGATE_BIN`);

/** The time limit of anything that a test waits for, also on a busy machine. */
export const PATIENCE_MS = 20_000;

/** A deadline that is never reached unless the server does not answer. */
export const RELAXED_MS = 5000;

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Waits until a condition holds, and returns its value. */
export async function until(description, condition) {
  const end = performance.now() + PATIENCE_MS;
  for (;;) {
    const value = await condition();
    if (value) return value;
    if (performance.now() > end) throw new Error(`${description}: not within ${PATIENCE_MS} ms`);
    await sleep(20);
  }
}

/** Creates a directory that is removed at the end of the test. */
export function temporaryDirectory(t) {
  const directory = mkdtempSync(path.join(tmpdir(), "sluicegate-node-"));
  t.after(() => rmSync(directory, { recursive: true, force: true }));
  return directory;
}

async function end(child) {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const exited = once(child, "exit");
  child.kill("SIGKILL");
  await exited;
}

/** Returns a port on which nothing listens. */
export async function freePort() {
  const server = net.createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address();
  server.close();
  await once(server, "close");
  return port;
}

/** A sluicegate server. Settings of `environment` are added to its environment. */
export class Server {
  static async start(t, { config = "", args = [], environment = {}, port = 0 } = {}) {
    const server = new Server();
    server.directory = temporaryDirectory(t);
    server.args = ["serve", "--json", "--resp", "off", "--grpc", "off", ...args];
    server.environment = environment;
    server.protocol = config.includes("[server.tls]") ? "https" : "http";
    writeFileSync(path.join(server.directory, "sluicegate.toml"), config);
    t.after(() => server.kill());
    await server.run(port);
    return server;
  }

  async run(port) {
    const environment = { ...process.env, ...this.environment };
    const args = [...this.args, "--http", `127.0.0.1:${port}`];
    this.child = spawn(binary, args, { cwd: this.directory, env: environment, stdio: ["ignore", "pipe", "pipe"] });
    let log = "";
    this.child.stderr.on("data", (text) => {
      log = (log + text).slice(-4000);
    });
    const [line] = await Promise.race([
      once(createInterface(this.child.stdout), "line"),
      once(this.child, "exit").then(() => {
        throw new Error(`the server does not start: ${log}`);
      }),
    ]);
    this.port = Number(JSON.parse(line).http.split(":").at(-1));
    this.url = `${this.protocol}://127.0.0.1:${this.port}`;
  }

  /** Stops the process, and waits until all its threads are stopped. */
  async pause() {
    this.child.kill("SIGSTOP");
    const threads = `/proc/${this.child.pid}/task`;
    const isStopped = (thread) => readFileSync(`${threads}/${thread}/stat`, "utf8").includes(") T ");
    await until("the server stops", () => readdirSync(threads).every(isStopped));
  }

  resume() {
    this.child.kill("SIGCONT");
  }

  async kill() {
    await end(this.child);
  }

  /** Starts the server again on its port. */
  async restart() {
    await this.kill();
    await this.run(this.port);
  }
}

/** Starts a Redis and returns its URL. */
export async function startRedis(t) {
  const port = await freePort();
  const args = ["--port", String(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"];
  const child = spawn("redis-server", args, { cwd: temporaryDirectory(t), stdio: "ignore" });
  t.after(() => end(child));
  await until("redis-server listens", () => connects(port));
  return `redis://127.0.0.1:${port}`;
}

function connects(port) {
  return new Promise((resolve) => {
    const socket = net.connect(port, "127.0.0.1");
    socket.once("connect", () => resolve(true)).once("error", () => resolve(false));
    socket.once("connect", () => socket.destroy());
  });
}

/** Starts an HTTP server for a handler of node:http, and returns its URL. */
export async function listen(t, server) {
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => {
    server.closeAllConnections();
    server.close();
  });
  return `http://127.0.0.1:${server.address().port}`;
}

/** Starts a TCP server that handles each connection, and returns its URL. */
export async function listenTcp(t, onConnection) {
  const sockets = new Set();
  const server = net.createServer((socket) => {
    sockets.add(socket);
    socket.on("error", () => {});
    onConnection(socket);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => {
    for (const socket of sockets) socket.destroy();
    server.close();
  });
  return `http://127.0.0.1:${server.address().port}`;
}

/** Runs a program to its end, and returns its exit code and output. */
export async function runProgram(command, args, options = {}) {
  const child = spawn(command, args, { ...options, stdio: ["ignore", "pipe", "pipe"] });
  let output = "";
  for (const stream of [child.stdout, child.stderr]) {
    stream.on("data", (text) => {
      output += text;
    });
  }
  const timer = setTimeout(() => child.kill("SIGKILL"), PATIENCE_MS * 3);
  const [code, signal] = await once(child, "close");
  clearTimeout(timer);
  return { code, signal, output };
}
