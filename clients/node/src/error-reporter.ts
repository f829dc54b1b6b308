/**
 * Reports errors that are not returned to a caller, for example because a failure policy decided.
 */

import type { SluicegateError } from "./errors.js";

/** How often the same message is reported by default. */
const INTERVAL_MS = 60_000;

/** The most messages that are reported in an interval, so that clients cannot flood the log. */
const MAX_MESSAGES = 100;

/** Receives the errors that are not returned to a caller. */
export type ErrorHandler = (error: SluicegateError) => void;

/** Returns a handler that writes each message to standard error, at most once a minute. */
export function consoleReporter(): ErrorHandler {
  /** For each message the time at which it was reported; the oldest first. */
  const reportedMs = new Map<string, number>();
  return (error) => {
    const nowMs = performance.now();
    for (const [message, atMs] of reportedMs) {
      if (nowMs - atMs < INTERVAL_MS) break;
      reportedMs.delete(message);
    }
    if (reportedMs.has(error.message) || reportedMs.size >= MAX_MESSAGES) return;
    reportedMs.set(error.message, nowMs);
    console.error(`sluicegate: ${error.message}`);
  };
}

/** Calls a handler of the application. An error in it must not fail the request. */
export function report(handler: ErrorHandler, error: SluicegateError): void {
  try {
    handler(error);
  } catch (failure) {
    console.error("sluicegate: onError failed:", failure);
  }
}
