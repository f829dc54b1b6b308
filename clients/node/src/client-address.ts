/**
 * The client's address: the peer of the connection, or the address that trusted proxies report.
 *
 * Any client can send `X-Forwarded-For`, so the header counts only if the peer is a trusted proxy. Each proxy appends the address
 * it received the request from, so the hops are read from right to left, up to the first that is not a trusted proxy.
 */

import { BlockList, isIP, isIPv4, isIPv6 } from "node:net";
import { ConfigurationError } from "./errors.js";

/** The default number of leading IPv6 bits that identify a client. */
const DEFAULT_IPV6_PREFIX = 64;

/** The most hops that are followed; a longer chain of trusted proxies is a loop. */
const MAX_HOPS = 32;

/** How the client's address is determined. */
export interface ClientAddressOptions {
  /** The addresses and networks of trusted proxies, for example `["10.0.0.0/8"]`; none by default. */
  trustedProxies?: readonly string[];
  /** The number of leading IPv6 bits to keep; 64 by default, because one client has at least 2^64 addresses. */
  ipv6Prefix?: number;
}

/** Determines the client's address of requests. */
export class ClientAddress {
  readonly #trusted = new BlockList();
  readonly #ipv6Prefix: number;

  constructor({ trustedProxies = [], ipv6Prefix = DEFAULT_IPV6_PREFIX }: ClientAddressOptions) {
    if (!Number.isInteger(ipv6Prefix) || ipv6Prefix < 1 || ipv6Prefix > 128) {
      throw new ConfigurationError(`ipv6Prefix ${ipv6Prefix} is out of range: use 1 to 128`);
    }
    this.#ipv6Prefix = ipv6Prefix;
    for (const network of trustedProxies) this.#trust(network);
  }

  /** Returns the address to count by; for IPv6, the first address of the client's network. Null if the peer is not an address. */
  of(peer: string, forwardedFor: string | undefined): string | null {
    let client = canonicalAddress(peer);
    if (client === null) return null;
    if (forwardedFor !== undefined && this.#trusts(client)) {
      const hops = forwardedFor.split(",").reverse().slice(0, MAX_HOPS);
      for (const hop of hops) {
        const address = canonicalAddress(withoutPort(withoutBlanks(hop)));
        if (address === null) break;
        client = address;
        if (!this.#trusts(client)) break;
      }
    }
    return isIPv6(client) ? maskIpv6(client, this.#ipv6Prefix) : client;
  }

  #trust(network: string): void {
    const [address = "", prefix, ...rest] = String(network).split("/");
    const family = isIP(address);
    const bits = family === 4 ? 32 : 128;
    const length = prefix === undefined ? bits : /^\d{1,3}$/.test(prefix) ? Number(prefix) : -1;
    if (family === 0 || rest.length > 0 || length < 0 || length > bits) {
      throw new ConfigurationError(
        `trusted proxy ${JSON.stringify(network)} is not a network: use for example "10.0.0.0/8"`,
      );
    }
    this.#trusted.addSubnet(address, length, family === 4 ? "ipv4" : "ipv6");
  }

  #trusts(address: string): boolean {
    return this.#trusted.check(address, isIPv4(address) ? "ipv4" : "ipv6");
  }
}

/** Removes spaces and tabs around a hop. `trim` would also remove characters that are not blanks in a header. */
function withoutBlanks(hop: string): string {
  const isBlank = (index: number) => hop[index] === " " || hop[index] === "\t";
  let [start, end] = [0, hop.length];
  while (start < end && isBlank(start)) start += 1;
  while (end > start && isBlank(end - 1)) end -= 1;
  return hop.slice(start, end);
}

/** Removes the port and brackets of a hop: `192.0.2.1:80`, `[2001:db8::1]:80`. */
function withoutPort(hop: string): string {
  const bracketed = /^\[([^\]]*)\](?::\d{1,5})?$/.exec(hop);
  if (bracketed !== null) return bracketed[1] as string;
  return /^([\d.]+):\d{1,5}$/.exec(hop)?.[1] ?? hop;
}

/** Returns the canonical form of an address, with IPv4-mapped IPv6 as IPv4; null if the text is not an address. */
function canonicalAddress(text: string): string | null {
  if (isIPv4(text)) return text;
  const [address = ""] = text.split("%");
  if (!isIPv6(address)) return null;
  const groups = ipv6Groups(address);
  const isMapped = groups.slice(0, 5).every((group) => group === 0) && groups[5] === 0xffff;
  if (!isMapped) return formatIpv6(groups);
  const [high, low] = groups.slice(6) as [number, number];
  return [high >> 8, high & 255, low >> 8, low & 255].join(".");
}

function maskIpv6(address: string, prefix: number): string {
  const masked = ipv6Groups(address).map((group, index) => {
    const kept = Math.min(16, Math.max(0, prefix - index * 16));
    return group & (0xffff << (16 - kept)) & 0xffff;
  });
  return formatIpv6(masked);
}

/** Returns the eight groups of an IPv6 address. */
function ipv6Groups(address: string): number[] {
  // a trailing IPv4 address is two groups
  const text = address.replace(/(\d+)\.(\d+)\.(\d+)\.(\d+)$/, (_, ...parts: string[]) => {
    const [a, b, c, d] = parts.slice(0, 4).map(Number) as [number, number, number, number];
    return `${((a << 8) | b).toString(16)}:${((c << 8) | d).toString(16)}`;
  });
  const [head = "", tail] = text.split("::");
  const groups = (part: string) => (part === "" ? [] : part.split(":").map((group) => Number.parseInt(group, 16)));
  const start = groups(head);
  const end = tail === undefined ? [] : groups(tail);
  return [...start, ...new Array<number>(8 - start.length - end.length).fill(0), ...end];
}

/** Formats an IPv6 address in its shortest form. */
function formatIpv6(groups: readonly number[]): string {
  // the parser of URLs produces the canonical form
  const full = groups.map((group) => group.toString(16)).join(":");
  return new URL(`http://[${full}]`).hostname.slice(1, -1);
}
