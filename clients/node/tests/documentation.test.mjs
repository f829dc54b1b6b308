// The JavaScript on the documentation pages runs, with a real server.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { freePort, runProgram, Server } from "./harness.mjs";

const PACKAGE = fileURLToPath(new URL("..", import.meta.url));
const PAGES = [
  ["README.md", 1],
  ["clients/node/README.md", 1],
  ["docs/node.md", 7],
  ["docs/budgets.md", 1],
  ["docs/in-flight.md", 1],
  ["docs/moving.md", 3],
];

/** Returns the programs of a page that use the package. Of a migration, these are the added and the unchanged lines. */
function programs(page) {
  const text = readFileSync(new URL(`../../../${page}`, import.meta.url), "utf8");
  const blocks = [...text.matchAll(/^```(js|diff)\n([\s\S]*?)^```$/gm)];
  const code = blocks.map(([, language, block]) => {
    if (language === "js") return block;
    const lines = block.split("\n").filter((line) => !line.startsWith("-"));
    return lines.map((line) => line.slice(1)).join("\n");
  });
  return code.filter((block) => block.includes('from "sluicegate'));
}

/** Appended to a program: sends it a request, or calls its handler, and prints status and header. */
function usage(program, port) {
  const init = '{ headers: { "x-api-key": "alice", "x-tenant": "acme" } }';
  const print = "console.log(response.status, response.headers.has('ratelimit'));";
  if (program.includes("listen(")) {
    const [, path] = /app\.get\("([^"]*)"/.exec(program) ?? [null, "/api"];
    return `const response = await fetch("http://127.0.0.1:${port}${path}", ${init}); ${print} process.exit(0);`;
  }
  if (program.includes("export const GET")) {
    return `const response = await GET(new Request("http://localhost/api", ${init})); ${print}`;
  }
  return program.includes("withHold") ? "// prints the answer" : "console.log(decision.source);";
}

/** The output of a program. */
function expectedOutput(usage) {
  if (usage.includes("answer")) return "a prompt of five words\n";
  return usage.includes("decision") ? "memory\n" : "200 true\n";
}

const RULE = `
[defaults]
on_store_failure = "local"

[[rule]]
name = "per-ip"
per = ["ip"]
amount = 100
window = "1m"

[[rule]]
name = "in-flight"
per = ["tenant"]
algorithm = "concurrency"
amount = 10

[[rule]]
name = "tokens"
per = ["tenant"]
unit = "tokens"
amount = 100000
window = "1m"
`;

for (const [page, count] of PAGES) {
  test(`the programs of ${page} work`, async (t) => {
    const found = programs(page);
    assert.equal(found.length, count);
    const server = await Server.start(t, { config: RULE });
    for (const program of found) {
      const port = await freePort();
      const adapted = program
        .replaceAll("http://127.0.0.1:8080", server.url)
        .replaceAll("3000", String(port))
        // a busy machine may need longer than the default
        .replace(/new Client\(("[^"]*")\)/, "new Client({ url: $1, deadlineMs: 5000 })")
        .replace("deadlineMs: 100 ", "deadlineMs: 5000 ");
      const source = `${adapted}\n${usage(program, port)}`;
      const { code, output } = await runProgram(process.execPath, ["--input-type=module", "-e", source], {
        cwd: PACKAGE,
      });
      assert.deepEqual([code, output], [0, expectedOutput(usage(program, port))], program);
    }
  });
}
