/**
 * Reports errors that no caller sees, for example because a failure policy decided.
 */

import type { SluicegateError } from "./errors.js";

/** How often the same message is reported by default. */
const INTERVAL_MS = 60_000;

/** The most messages that are remembered; the oldest is forgotten first. */
const MAX_MESSAGES = 100;

/** Receives the errors that no caller sees. */
export type ErrorHandler = (error: SluicegateError) => void;

/** Returns a handler that writes each message to standard error, at most once a minute. */
export function consoleReporter(): ErrorHandler {
  const reportedMs = new Map<string, number>();
  return (error) => {
    const nowMs = performance.now();
    const lastMs = reportedMs.get(error.message);
    if (lastMs !== undefined && nowMs - lastMs < INTERVAL_MS) return;
    reportedMs.delete(error.message);
    reportedMs.set(error.message, nowMs);
    if (reportedMs.size > MAX_MESSAGES) reportedMs.delete(reportedMs.keys().next().value as string);
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
