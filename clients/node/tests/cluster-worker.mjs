// One application process of cluster.test.mjs: an Express endpoint with a limit per API key.
import cluster from "node:cluster";
import express from "express";
import { Client, header } from "sluicegate";
import { rateLimit } from "sluicegate/express";

const { URLS, AMOUNT, PORT, WORKERS } = process.env;

if (cluster.isPrimary) {
  const urls = URLS.split(",");
  let listening = 0;
  cluster.on("listening", () => {
    listening += 1;
    if (listening === Number(WORKERS)) console.log("ready");
  });
  for (let n = 0; n < Number(WORKERS); n += 1) cluster.fork({ URL: urls[n % urls.length] });
  process.once("SIGTERM", () => process.exit(0));
} else {
  const client = new Client({ url: process.env.URL, deadlineMs: 10_000, onFailure: "closed" });
  const app = express();
  const limit = { algorithm: "sliding-log", amount: Number(AMOUNT), window: "1h" };
  app.use(rateLimit({ client, name: "shared", key: header("x-api-key"), limit }));
  app.get("/", (_, response) => response.send(String(process.pid)));
  app.listen(Number(PORT), "127.0.0.1");
}
