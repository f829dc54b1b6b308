// The client of the event stream, which resumes after a lost connection and starts again after a restart of the server.
// It uses fetch because EventSource cannot send a token.

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 15000;
// The server sends an event every second; after this time without data the connection is considered lost.
const IDLE_TIMEOUT = 10000;

export class ApiError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem('sluicegate-token'),
  set: (value) => sessionStorage.setItem('sluicegate-token', value),
  forget: () => sessionStorage.removeItem('sluicegate-token'),
};

export function headers(more = {}) {
  const value = token.get();
  return value ? { authorization: `Bearer ${value}`, ...more } : more;
}

// Reads the detail of a problem response, or else the status.
export async function apiError(response) {
  let detail = `${response.status} ${response.statusText}`;
  try {
    detail = (await response.json()).detail ?? detail;
  } catch { /* not JSON: keep the status */ }
  return new ApiError(response.status, detail);
}

// Calls `on.event(name, data)` for each event and `on.state(state, detail)` for each change of the connection:
// 'live', 'lost' (with the milliseconds until the next attempt) or 'unauthorized' (with an `ApiError`).
export class Live {
  constructor(on) {
    this.on = on;
    this.last = null;
    this.pause = FIRST_PAUSE;
    this.attempt = 0;
  }

  // Connects now and cancels any connection or pending attempt.
  async connect() {
    const attempt = ++this.attempt;
    clearTimeout(this.timer);
    this.stop?.abort();
    const stop = (this.stop = new AbortController());
    try {
      await this.read(stop);
    } catch (error) {
      if (attempt !== this.attempt) return;
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        this.on.state('unauthorized', error);
        return;
      }
    }
    if (attempt !== this.attempt) return;
    const pause = this.pause * (0.75 + Math.random() / 2);
    this.pause = Math.min(this.pause * 2, LONGEST_PAUSE);
    this.on.state('lost', pause);
    this.timer = setTimeout(() => this.connect(), pause);
  }

  // Starts from the beginning for another user.
  forget() {
    this.last = null;
    this.pause = FIRST_PAUSE;
  }

  async read(stop) {
    const resume = this.last ? { 'last-event-id': this.last } : {};
    let watchdog = setTimeout(() => stop.abort(), IDLE_TIMEOUT);
    try {
      const response = await fetch('/v1/live', { headers: headers(resume), signal: stop.signal, cache: 'no-store' });
      if (!response.ok) throw await apiError(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = '';
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(watchdog);
        watchdog = setTimeout(() => stop.abort(), IDLE_TIMEOUT);
        text += value;
        const events = text.split('\n\n');
        text = events.pop();
        for (const event of events) this.dispatch(event);
      }
    } finally {
      clearTimeout(watchdog);
    }
  }

  dispatch(event) {
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
