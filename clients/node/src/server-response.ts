/**
 * What the integrations for responses of `node:http` share: headers, and refunds after the response.
 */

import type { ServerResponse } from "node:http";
import { isListHeader } from "./middleware.js";

/** Access to the headers of a response. */
export interface HeaderAccess {
  get(name: string): unknown;
  set(name: string, value: string): unknown;
}

/** Adds headers to a response. Lists are extended, because several limiters can each add members. */
export function addHeaders(response: HeaderAccess, headers: Readonly<Record<string, string>>): void {
  for (const [name, value] of Object.entries(headers)) {
    const existing = response.get(name);
    const isExtended = existing !== undefined && isListHeader(name, value);
    response.set(name, isExtended ? `${existing}, ${value}` : value);
  }
}

/** Calls a function when a response is sent or its client has disconnected, now if that was during the check. */
export function afterResponse(response: ServerResponse, callback: () => void): void {
  if (response.closed) callback();
  else response.once("close", callback);
}
