// Talks to the server: one call, or the stream. The key lives in this module alone, in memory.

const ROOT = new URL("../", import.meta.url);
const QUIET_MS = 8000;
let key = null;

export const hasKey = () => key !== null;

export function useKey(value) {
  key = value;
}

export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.status = status;
  }
}

function headers(more = {}) {
  return key === null ? more : { ...more, authorization: `Bearer ${key}` };
}

/** One call of the server's own interface. Throws `Refused` with the server's sentence. */
export async function call(method, path, body) {
  const options = { method, headers: headers(body ? { "content-type": "application/json" } : {}), cache: "no-store" };
  const answer = await fetch(new URL(path, ROOT), body ? { ...options, body: JSON.stringify(body) } : options);
  const value = await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(answer.status, value?.error);
  return value;
}

/** Hand each event's text to `take` until the stream ends or `take` says false. A stream that falls silent is given up. */
export async function follow(take) {
  const stop = new AbortController();
  let watch = setTimeout(() => stop.abort(), QUIET_MS);
  const answer = await fetch(new URL("ui/events", ROOT), { headers: headers(), signal: stop.signal, cache: "no-store" });
  if (!answer.ok) {
    clearTimeout(watch);
    throw new Refused(answer.status, (await answer.json().catch(() => null))?.error);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(watch);
      watch = setTimeout(() => stop.abort(), QUIET_MS);
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) if (take(event.slice("data: ".length)) === false) return;
    }
  } finally {
    clearTimeout(watch);
    stop.abort();
  }
}
