// The API over fetch: requests with the token, and server-sent events (EventSource cannot send a token).

const SILENCE_MS = 15000; // the monitor says something at least every 10 s
const PAUSES_MS = [300, 700, 1500, 3000];

export class Problem extends Error {
  constructor(status, document) {
    super(document.detail || document.title || `the monitor answered ${status}`);
    this.status = status;
  }
}

let token = "";
export const useToken = (value) => { token = value; };
const headers = () => (token ? { Authorization: `Bearer ${token}` } : {});

async function refused(answer) {
  const document = await answer.json().catch(() => ({}));
  return new Problem(answer.status, document);
}

export async function ask(path, method = "GET") {
  const answer = await fetch(path, { method, headers: headers(), cache: "no-store" });
  if (!answer.ok) throw await refused(answer);
  return answer.json();
}

// Calls `heard(data)` for every event, `linked(true | false)` as the connection comes and goes, and
// `locked()` when a token is needed; it goes on when that resolves.
export async function follow(heard, linked, locked) {
  let last = "";
  for (let failures = 0; ;) {
    const silence = new AbortController();
    let timer = setTimeout(() => silence.abort(), SILENCE_MS);
    try {
      const extra = last ? { "Last-Event-ID": last } : {};
      const answer = await fetch("/v1/events", { headers: { ...headers(), ...extra }, signal: silence.signal });
      if (answer.status === 401) {
        clearTimeout(timer);
        await locked();
        continue;
      }
      if (!answer.ok) throw await refused(answer);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      const parts = [];
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENCE_MS);
        parts.push(value);
        if (!value.includes("\n\n") && !(value.startsWith("\n") && parts.length > 1)) continue;
        const texts = parts.join("").split("\n\n");
        parts.length = 0;
        parts.push(texts.pop());
        for (const text of texts) {
          const fields = Object.fromEntries(text.split("\n").map((line) => line.split(/: (.*)/s, 2)));
          last = fields.id || last;
          if (fields.data) heard(JSON.parse(fields.data));
        }
        failures = 0;
        linked(true);
      }
    } catch (error) {
      if (error instanceof Problem && error.status !== 503) console.warn(error.message);
    }
    clearTimeout(timer);
    linked(false);
    await new Promise((resolve) => setTimeout(resolve, PAUSES_MS[Math.min(failures++, PAUSES_MS.length - 1)]));
  }
}
