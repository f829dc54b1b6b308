/** Durations in the format of the server: `250ms`, `30s`, `5m`, `1h30m`, `7d`. */

const UNITS_MS: Readonly<Record<string, number>> = { d: 86_400_000, h: 3_600_000, m: 60_000, s: 1000, ms: 1 };

/** Returns a duration in milliseconds; null if the text is not a duration above zero. */
export function parseDuration(text: unknown): number | null {
  if (typeof text !== "string" || !/^(\d{1,12}d)?(\d{1,12}h)?(\d{1,12}m)?(\d{1,12}s)?(\d{1,12}ms)?$/.test(text))
    return null;
  let totalMs = 0;
  for (const [, number, unit] of text.matchAll(/(\d+)(ms|[dhms])/g)) {
    totalMs += Number(number) * (UNITS_MS[unit as string] as number);
  }
  return totalMs > 0 ? totalMs : null;
}
