/**
 * Validation of limits and costs that are constants of the application, with the ranges of the server.
 *
 * An error in a constant fails the start of the application. Otherwise the server would reject every request.
 */

import { parseDuration } from "./duration.js";
import { ConfigurationError, type SluicegateError } from "./errors.js";
import { type Algorithm, type Cost, describe, type Limit } from "./request.js";

const MAX_AMOUNT = 1_000_000_000;
const MAX_WINDOW_MS = 3650 * 86_400_000;

/** A period of the calendar. */
const CALENDAR_WINDOW = /^1 (?:day|week|month|quarter|year)$/;

/** The largest amount of each algorithm. */
const MAX_AMOUNTS: Readonly<Record<Algorithm, number>> = {
  "token-bucket": MAX_AMOUNT,
  gcra: MAX_AMOUNT,
  "sliding-log": 200_000,
  "sliding-counter": MAX_AMOUNT,
  "fixed-window": MAX_AMOUNT,
  concurrency: MAX_AMOUNT,
};

/** Throws a ConfigurationError if a limit is invalid. */
export function validateLimit(limit: Limit): void {
  if (typeof limit !== "object" || limit === null) {
    throw new ConfigurationError(
      `limit is ${describe(limit)}: use an object, for example { amount: 100, window: "1m" }`,
    );
  }
  const { amount, window, algorithm = "token-bucket", burst } = limit;
  if (!Object.hasOwn(MAX_AMOUNTS, algorithm)) {
    const known = Object.keys(MAX_AMOUNTS).join(", ");
    throw new ConfigurationError(`limit: algorithm ${JSON.stringify(algorithm)} is unknown: use one of ${known}`);
  }
  validateRange("amount", amount, MAX_AMOUNTS[algorithm], algorithm);
  validateWindow(window, algorithm);
  validateCalendar(limit);
  if (burst === undefined) return;
  if (algorithm !== "token-bucket" && algorithm !== "gcra") {
    throw new ConfigurationError(`limit: ${algorithm} has no burst: remove it, or use token-bucket`);
  }
  validateRange("burst", burst, MAX_AMOUNT, algorithm);
}

function validateWindow(window: string | undefined, algorithm: Algorithm): void {
  if (algorithm === "concurrency") {
    if (window === undefined) return;
    throw new ConfigurationError(`limit: concurrency has no window: remove ${JSON.stringify(window)}`);
  }
  if (window === undefined) {
    throw new ConfigurationError(`limit: ${algorithm} needs a window: add one, for example "1m"`);
  }
  if (CALENDAR_WINDOW.test(window)) {
    if (algorithm === "fixed-window") return;
    throw new ConfigurationError(
      `limit: ${algorithm} has no calendar windows: use fixed-window, or a window such as "30d"`,
    );
  }
  const windowMs = parseDuration(window);
  if (windowMs === null) {
    throw new ConfigurationError(
      `limit: window ${JSON.stringify(window)} is not a duration: use for example "1m", or "1 month" with fixed-window`,
    );
  }
  if (windowMs > MAX_WINDOW_MS) {
    throw new ConfigurationError(`limit: window ${JSON.stringify(window)} is out of range: use 1ms to 3650d`);
  }
}

function validateCalendar({ window, zone, anchor }: Limit): void {
  if (window !== undefined && CALENDAR_WINDOW.test(window)) return;
  for (const [name, value] of Object.entries({ zone, anchor })) {
    if (value === undefined) continue;
    const fix = 'remove it, or use fixed-window and a window such as "1 month"';
    throw new ConfigurationError(`limit: ${name} ${JSON.stringify(value)} needs a calendar window: ${fix}`);
  }
}

/** Throws a ConfigurationError if a cost is invalid. The cost of a key has no units. */
export function validateCost(cost: Cost | undefined, isOfKey: boolean): void {
  const hasUnits = typeof cost === "object" && cost !== null && !isOfKey;
  for (const units of hasUnits ? Object.values(cost) : [cost]) {
    if (units === undefined || (Number.isSafeInteger(units) && (units as number) >= 0)) continue;
    throw new ConfigurationError(`cost is ${describe(units)}: use a whole number from 0`);
  }
}

/** Returns whether the server rejected a request because of its limit. */
export function isServersLimitError({ message }: SluicegateError): boolean {
  return message.startsWith("limit: ");
}

function validateRange(name: string, value: number, max: number, algorithm: Algorithm): void {
  if (Number.isSafeInteger(value) && value >= 1 && value <= max) return;
  throw new ConfigurationError(`limit: ${name} ${value} is out of range: ${algorithm} accepts 1 to ${max}`);
}
