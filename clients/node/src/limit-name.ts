/**
 * The names of limits without a rule. The server names each of them "default", so that clients could not distinguish several.
 */

/** The name that the server uses. */
export const UNNAMED = "default";

/** Returns rate limit headers with the name of the limit, in the dialects that have names. */
export function nameHeaders(headers: Readonly<Record<string, string>>, name: string): Record<string, string> {
  const named = Object.entries(headers).map(([header, value]) => {
    const isMember = header === "ratelimit" || header === "ratelimit-policy";
    // the check of a key has one limit, so that each header has one member
    if (isMember) return [header, value.replace(/^"default"(?=;|$)/, () => quoted(name))];
    return [header, header === "x-ratelimit-resource" && value === UNNAMED ? printable(name) : value];
  });
  return Object.fromEntries(named);
}

/** Returns a string of structured fields (RFC 9651), which has only printable ASCII characters. */
function quoted(name: string): string {
  return `"${printable(name).replace(/["\\]/g, "\\$&")}"`;
}

/** Replaces other characters by question marks, as the server does for rules. */
function printable(name: string): string {
  return name.replace(/[^\x20-\x7e]/gu, "?");
}
