// Compiles src/ twice, as ES modules and as CommonJS, each with its type declarations.
import { execFileSync } from "node:child_process";
import { mkdirSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";

const tsc = createRequire(import.meta.url).resolve("typescript/bin/tsc");
const builds = [
  { directory: "dist/esm", type: "module", flags: [] },
  { directory: "dist/cjs", type: "commonjs", flags: ["--module", "commonjs", "--moduleResolution", "node10"] },
];

rmSync("dist", { recursive: true, force: true });
for (const { directory, type, flags } of builds) {
  execFileSync(process.execPath, [tsc, "--outDir", directory, ...flags], { stdio: "inherit" });
  mkdirSync(directory, { recursive: true });
  // overrides the "type" of the package for the files of this build
  writeFileSync(`${directory}/package.json`, `${JSON.stringify({ type })}\n`);
}
