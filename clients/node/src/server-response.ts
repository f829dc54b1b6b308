/**
 * What the integrations for responses of `node:http` share: headers, and the end of the response.
 */

import type { ServerResponse } from "node:http";
import type { Socket } from "node:net";
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

/**
 * Calls a function when a response is sent or its client has disconnected, also if that was during the check. Listeners of the
 * application run first: they may still set the actual cost of a hold.
 */
export function afterResponse(response: ServerResponse, callback: () => void): void {
  let hasEnded = false;
  let unsubscribe = () => {};
  const end = () => {
    if (hasEnded) return;
    hasEnded = true;
    unsubscribe();
    setImmediate(callback);
  };
  if (isClosed(response)) {
    end();
    return;
  }
  response.once("close", end);
  // The response to a pipelined request gets the connection after those before it, and never if the client disconnects first. The
  // response to an upgrade has none. Neither is closed then.
  const connection = response.socket === null ? response.req?.socket : undefined;
  if (connection?.destroyed) end();
  else if (connection) unsubscribe = onClose(connection, end);
}

function isClosed(response: ServerResponse): boolean {
  // HTTP/2 responses have no property `closed`
  const { stream } = response as { stream?: { destroyed: boolean } };
  return response.closed || stream?.destroyed === true;
}

/** The functions to call when a connection is closed. One listener for all: a client can pipeline any number of requests. */
const onConnectionClose = new WeakMap<Socket, Set<() => void>>();

/** Calls a function when a connection is closed. Returns a function that cancels this. */
function onClose(connection: Socket, callback: () => void): () => void {
  let callbacks = onConnectionClose.get(connection);
  if (callbacks === undefined) {
    const created = new Set<() => void>();
    onConnectionClose.set(connection, created);
    connection.once("close", () => {
      for (const close of created) close();
    });
    callbacks = created;
  }
  const added = callbacks.add(callback);
  return () => added.delete(callback);
}
