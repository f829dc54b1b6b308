/**
 * A parser of HTTP/1.1 responses, for one response at a time.
 *
 * Bodies need `Content-Length` or chunked encoding. Everything else is rejected, and the connection is closed.
 */

/** The largest head of a response, and the longest line of a chunked body, in bytes. */
const MAX_HEAD_BYTES = 16 * 1024;
const MAX_CHUNK_LINE_BYTES = 1024;

const LINE_END = Buffer.from("\r\n");
const HEAD_END = Buffer.from("\r\n\r\n");
const NOTHING = Buffer.alloc(0);

/** A complete response. */
export interface HttpResponse {
  status: number;
  body: string;
  /** Whether the connection can be used for another request. */
  keepAlive: boolean;
}

/** The bytes are not a valid response, or too many. */
export class ProtocolError extends Error {}

type State = "head" | "body" | "chunk-size" | "chunk-data" | "chunk-end" | "trailer";

/** Reads one response from a sequence of buffers. */
export class ResponseParser {
  readonly #maxBodyBytes: number;
  #state: State = "head";
  #unread: Buffer = NOTHING;
  #status = 0;
  #keepAlive = true;
  /** The bytes of the body, or of the current chunk, that are still to come. */
  #expected = 0;
  #parts: Buffer[] = [];
  #bodyBytes = 0;
  #headBytes = 0;

  constructor(maxBodyBytes: number) {
    this.#maxBodyBytes = maxBodyBytes;
  }

  /**
   * Reads more bytes. Returns the response once it is complete, otherwise null.
   *
   * @throws ProtocolError
   */
  push(bytes: Buffer): HttpResponse | null {
    this.#unread = this.#unread.length === 0 ? bytes : Buffer.concat([this.#unread, bytes]);
    for (;;) {
      const isComplete = this.#step();
      if (isComplete === null) return null;
      if (!isComplete) continue;
      if (this.#unread.length > 0) throw new ProtocolError("bytes after the end of the response");
      const body = this.#parts.length === 1 ? (this.#parts[0] as Buffer) : Buffer.concat(this.#parts);
      return { status: this.#status, body: body.toString("utf8"), keepAlive: this.#keepAlive };
    }
  }

  /** Performs one step. Returns null if it needs more bytes, otherwise whether the response is complete. */
  #step(): boolean | null {
    switch (this.#state) {
      case "head": {
        const head = this.#take(HEAD_END, MAX_HEAD_BYTES, "head");
        return head === null ? null : this.#readHead(head);
      }
      case "body":
        return this.#readData() ? true : null;
      case "chunk-size": {
        const line = this.#take(LINE_END, MAX_CHUNK_LINE_BYTES, "chunk size");
        if (line === null) return null;
        const size = /^([0-9a-f]{1,8})[ \t]*(;.*)?$/i.exec(line)?.[1];
        if (size === undefined) throw new ProtocolError("invalid chunk size");
        this.#expect(Number.parseInt(size, 16));
        this.#state = this.#expected === 0 ? "trailer" : "chunk-data";
        return false;
      }
      case "chunk-data":
        if (!this.#readData()) return null;
        this.#state = "chunk-end";
        return false;
      case "chunk-end": {
        const line = this.#take(LINE_END, LINE_END.length, "chunk end");
        if (line === null) return null;
        this.#state = "chunk-size";
        return false;
      }
      case "trailer": {
        const line = this.#take(LINE_END, MAX_CHUNK_LINE_BYTES, "trailer");
        if (line === null) return null;
        this.#countHead(line.length);
        return line === "";
      }
    }
  }

  /** Takes the bytes before a delimiter. Returns null if it has not arrived. */
  #take(delimiter: Buffer, most: number, part: string): string | null {
    const end = this.#unread.indexOf(delimiter);
    if (end + delimiter.length > most || (end < 0 && this.#unread.length >= most)) {
      throw new ProtocolError(`the ${part} of the response has more than ${most} bytes`);
    }
    if (end < 0) return null;
    const text = this.#unread.toString("latin1", 0, end);
    this.#unread = this.#unread.subarray(end + delimiter.length);
    return text;
  }

  #countHead(bytes: number): void {
    this.#headBytes += bytes;
    if (this.#headBytes > MAX_HEAD_BYTES) throw new ProtocolError(`more than ${MAX_HEAD_BYTES} bytes of headers`);
  }

  /** Reads the head. Returns whether the response is complete, because it has no body. */
  #readHead(head: string): boolean {
    this.#countHead(head.length);
    const [statusLine = "", ...lines] = head.split("\r\n");
    const [, minor, status] = /^HTTP\/1\.([01]) ([1-5]\d\d)(?: |$)/.exec(statusLine) ?? [];
    if (status === undefined) throw new ProtocolError("not an HTTP/1.1 response: is the port correct?");
    this.#status = Number(status);
    if (this.#status === 101) throw new ProtocolError("unexpected status 101");
    // an interim response, which another head follows
    if (this.#status < 200) return false;

    this.#keepAlive = minor === "1";
    let length: string | null = null;
    let encoding: string | null = null;
    for (const line of lines) {
      const colon = line.indexOf(":");
      if (colon <= 0) throw new ProtocolError("invalid header line");
      const value = line.slice(colon + 1).trim();
      switch (line.slice(0, colon).toLowerCase()) {
        case "content-length":
          if (!/^\d{1,15}$/.test(value) || (length !== null && length !== value)) {
            throw new ProtocolError("invalid Content-Length");
          }
          length = value;
          break;
        case "transfer-encoding":
          encoding = encoding === null ? value : `${encoding},${value}`;
          break;
        case "connection":
          if (/(^|,)\s*close\s*(,|$)/i.test(value)) this.#keepAlive = false;
          break;
      }
    }
    if (this.#status === 204 || this.#status === 304) return true;
    if (encoding !== null) {
      if (length !== null || encoding.toLowerCase() !== "chunked") {
        throw new ProtocolError("unsupported Transfer-Encoding");
      }
      this.#state = "chunk-size";
      return false;
    }
    if (length === null) throw new ProtocolError("neither Content-Length nor chunked encoding");
    this.#expect(Number(length));
    this.#state = "body";
    return false;
  }

  #expect(bytes: number): void {
    this.#expected = bytes;
    this.#bodyBytes += bytes;
    if (this.#bodyBytes > this.#maxBodyBytes) {
      throw new ProtocolError(`the response has more than ${this.#maxBodyBytes} bytes`);
    }
  }

  /** Reads the expected bytes. Returns whether all have arrived. */
  #readData(): boolean {
    const part = this.#unread.subarray(0, this.#expected);
    this.#unread = this.#unread.subarray(part.length);
    this.#expected -= part.length;
    if (part.length > 0) this.#parts.push(part);
    return this.#expected === 0;
  }
}
