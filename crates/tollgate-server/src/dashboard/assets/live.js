// The stream of events: read, resumed after a break, and begun anew after a restart of the server.
// EventSource cannot carry a token, so the stream is read by hand.

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 15000;
// The server tells something every second; when it does not, the connection is as good as lost.
const SILENCE = 10000;

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem('tollgate-token'),
  set: (value) => sessionStorage.setItem('tollgate-token', value),
  forget: () => sessionStorage.removeItem('tollgate-token'),
};

export function headers(more = {}) {
  const value = token.get();
  return value ? { authorization: `Bearer ${value}`, ...more } : more;
}

// What a problem says, or the status where it says nothing.
export async function refusal(response) {
  let detail = `${response.status} ${response.statusText}`;
  try {
    detail = (await response.json()).detail ?? detail;
  } catch { /* no JSON: the status has to do */ }
  return new Refused(response.status, detail);
}

// Tells `on.event(name, data)` everything, and `on.state(state, detail)` how the connection is:
// 'live', 'lost' (with the milliseconds until the next attempt) or 'refused' (with a `Refused`).
export class Live {
  constructor(on) {
    this.on = on;
    this.last = null;
    this.pause = FIRST_PAUSE;
    this.attempt = 0;
  }

  // Connects now, whatever was under way.
  async connect() {
    const attempt = ++this.attempt;
    clearTimeout(this.timer);
    this.stop?.abort();
    const stop = (this.stop = new AbortController());
    try {
      await this.read(stop);
    } catch (error) {
      if (attempt !== this.attempt) return;
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        this.on.state('refused', error);
        return;
      }
    }
    if (attempt !== this.attempt) return;
    const pause = this.pause * (0.75 + Math.random() / 2);
    this.pause = Math.min(this.pause * 2, LONGEST_PAUSE);
    this.on.state('lost', pause);
    this.timer = setTimeout(() => this.connect(), pause);
  }

  // For another visitor: nothing is known any more.
  forget() {
    this.last = null;
    this.pause = FIRST_PAUSE;
  }

  async read(stop) {
    const resume = this.last ? { 'last-event-id': this.last } : {};
    let watchdog = setTimeout(() => stop.abort(), SILENCE);
    try {
      const response = await fetch('/v1/live', { headers: headers(resume), signal: stop.signal, cache: 'no-store' });
      if (!response.ok) throw await refusal(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = '';
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(watchdog);
        watchdog = setTimeout(() => stop.abort(), SILENCE);
        text += value;
        const events = text.split('\n\n');
        text = events.pop();
        for (const event of events) this.take(event);
      }
    } finally {
      clearTimeout(watchdog);
    }
  }

  take(event) {
    let name = 'message';
    let data = '';
    for (const line of event.split('\n')) {
      const [, field, value] = /^([^:]*):? ?(.*)$/.exec(line);
      if (field === 'event') name = value;
      else if (field === 'data') data += value;
      else if (field === 'id') this.last = value;
    }
    if (name === 'hello') {
      this.pause = FIRST_PAUSE;
      this.on.state('live');
    }
    if (data) this.on.event(name, JSON.parse(data));
  }
}
