/**
 * Ready-made functions that read a label or a key from a request: Express, Fastify, `node:http` or `Request` of fetch.
 */

import { ClientAddress, type ClientAddressOptions } from "./client-address.js";
import { ConfigurationError } from "./errors.js";
import { RejectedRequest } from "./rejected-request.js";

/** Reads a value from a request; undefined if the request has none. */
// biome-ignore lint/suspicious/noExplicitAny: one extractor serves the request types of all frameworks
export type Extractor = (request: any, ...context: any[]) => string | undefined;

/** Settings of `clientIp`. */
export interface ClientIpOptions extends ClientAddressOptions {
  /** Returns the address of the peer. Needed for fetch handlers, whose requests have none. */
  // biome-ignore lint/suspicious/noExplicitAny: the arguments are those of the framework's handler
  peer?: (request: any, ...context: any[]) => string | undefined;
}

/** The parts of requests that extractors read. */
interface AnyRequest {
  headers?: Record<string, string | string[] | undefined> | { get(name: string): string | null };
  headersDistinct?: Record<string, string[] | undefined>;
  socket?: { remoteAddress?: string; destroyed?: boolean };
  /** The `IncomingMessage` of a Fastify request. */
  raw?: AnyRequest;
}

/** Reads a header, for example `header("x-api-key")`. A request that repeats it is rejected with 400. */
export function header(name: string): Extractor {
  const lower = name.toLowerCase();
  return (request: AnyRequest) => {
    const values = headerLines(request, lower);
    if (values.length > 1) throw new RejectedRequest(`the header ${lower} is repeated: send it once`);
    return values[0];
  };
}

/**
 * Reads the client's address: the peer of the connection, or the one that trusted proxies report in `X-Forwarded-For`.
 *
 * ```js
 * clientIp({ trustedProxies: ["10.0.0.0/8"] })
 * ```
 */
export function clientIp({ peer, ...options }: ClientIpOptions = {}): Extractor {
  const client = new ClientAddress(options);
  return (request: AnyRequest, ...context) => {
    const address = peer === undefined ? socketAddress(request) : peer(request, ...context);
    if (address === undefined && isDisconnected(request)) return undefined;
    const forwardedFor = headerLines(request, "x-forwarded-for");
    const found =
      typeof address !== "string"
        ? null
        : client.of(address, forwardedFor.length > 0 ? forwardedFor.join(",") : undefined);
    // the function can read a header, which a client can omit
    if (found === null && peer !== undefined)
      throw new RejectedRequest("the address of the client is unknown or invalid");
    if (found === null) {
      throw new ConfigurationError(
        'clientIp: the address of the peer is unknown: pass peer, for example { peer: () => "127.0.0.1" } behind a local proxy',
      );
    }
    return found;
  };
}

/** Returns the lines of a header. */
function headerLines({ headers, headersDistinct, raw }: AnyRequest, name: string): readonly string[] {
  const distinct = headersDistinct ?? raw?.headersDistinct;
  if (distinct !== undefined) return distinct[name] ?? [];
  if (typeof headers?.get === "function") {
    const value = headers.get(name);
    return value === null ? [] : [value];
  }
  const value = (headers as Record<string, string | string[] | undefined> | undefined)?.[name];
  return value === undefined ? [] : [value].flat();
}

function socketAddress({ socket, raw }: AnyRequest): string | undefined {
  return (socket ?? raw?.socket)?.remoteAddress;
}

function isDisconnected({ socket, raw }: AnyRequest): boolean {
  return (socket ?? raw?.socket)?.destroyed === true;
}
