/**
 * Validation of the settings of a client.
 */

import * as net from "node:net";
import * as tls from "node:tls";
import { ConfigurationError } from "./errors.js";

/** The address of a server on this machine. */
export const DEFAULT_URL = "http://127.0.0.1:8080";

/** Certificates and keys in PEM format. */
export type Pem = string | Buffer | Array<string | Buffer>;

/** The settings of TLS. */
export interface TlsOptions {
  /** The certificate authorities that sign the server's certificate; those of Node by default. */
  ca?: Pem;
  /** The client certificate, for a server that requires one. */
  cert?: Pem;
  /** The key of the client certificate. */
  key?: Pem;
  /** The name in the server's certificate, if it differs from the host of the URL. */
  servername?: string;
}

export function validToken(token: string | undefined): string | undefined {
  if (token !== undefined && !/^[\x21-\x7e]+$/.test(token)) {
    throw new ConfigurationError("token has characters that a header cannot have: remove spaces and line breaks");
  }
  return token;
}

export function parseUrl(url: string | URL): URL {
  let parsed: URL;
  try {
    parsed = new URL(url);
  } catch (cause) {
    throw new ConfigurationError(`url ${JSON.stringify(url)} is invalid: use for example ${DEFAULT_URL}`, cause);
  }
  if (parsed.protocol !== "http:" && parsed.protocol !== "https:") {
    throw new ConfigurationError(`url has the protocol ${parsed.protocol} which is not supported: use http: or https:`);
  }
  if (parsed.username !== "" || parsed.password !== "") {
    throw new ConfigurationError("url has a user name or password: use the setting token");
  }
  return parsed;
}

/** Reads certificates and keys once, for all connections. */
function secureContext(material: {
  ca: Pem | undefined;
  cert: Pem | undefined;
  key: Pem | undefined;
}): tls.SecureContext {
  try {
    return tls.createSecureContext(material);
  } catch (cause) {
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new ConfigurationError(
      `ca, cert or key is invalid (${reason}): pass certificates and keys in PEM format`,
      cause,
    );
  }
}

export function tlsSettings(url: URL, { ca, cert, key, servername }: TlsOptions): tls.ConnectionOptions | null {
  const given = Object.entries({ ca, cert, key, servername }).filter(([, value]) => value !== undefined);
  if (url.protocol === "https:") {
    const host = url.hostname.replace(/^\[|\]$/g, "");
    // a server name must not be an address
    const name = net.isIP(host) === 0 ? { servername: host } : {};
    return {
      ...name,
      ...(servername === undefined ? {} : { servername }),
      secureContext: secureContext({ ca, cert, key }),
    };
  }
  if (given.length > 0) {
    const names = given.map(([name]) => name).join(", ");
    throw new ConfigurationError(`${names} need TLS: use a url that starts with https:`);
  }
  return null;
}
